"""What is wrong with a launch on several cards, or will surprise its user: each with its place and the fix. No torch.

Every finding is what the installed libraries do, read in their source or run: accelerate 1.15, transformers 5.23, TRL
1.16, torch 2.13. Where the libraries raise an error, theirs comes late (after the weights are loaded) or names no key.
"""

import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from autofit.files import read_json
from autofit.recipe.catalogue import attention_heads
from autofit.recipe.findings import CHECKPOINTING, CHECKS, OFFLOAD, SHARDING, Finding, Severity, StatedLaunch, clashes
from autofit.recipe.keys import divisors
from autofit.recipe.launch import THREADS, is_on, named_cards, sharding_strategy, state_dict_type, wrap_policy
from autofit.recipe.launch_keys import CONFIG_KEYS, SECTION_KEYS
from autofit.recipe.profile import profile


def findings(asked: StatedLaunch) -> list[Finding]:
    """Everything that was found, the worst first; of a tool with a launch of its own, nothing of accelerate's keys."""
    accelerates = (
        _known, _started, _hybrid, _broadcast, _packages, _batch, *CHECKS, _checkpointing, _saving, _deepspeed_batch,
        _threads, _clashes,
    )  # fmt: skip
    checks = (*(() if profile(asked.recipe.trainer).own_launch else accelerates), _engine, _cards)
    order = list(Severity)
    return sorted((found for check in checks for found in check(asked)), key=lambda f: order.index(f.severity))


def _known(asked: StatedLaunch) -> Iterator[Finding]:
    """Keys that are misspelt, or lost on their way. Others that are not known here may be of a newer accelerate."""
    for key in asked.config:
        if key not in CONFIG_KEYS:
            close = get_close_matches(str(key), CONFIG_KEYS, n=1, cutoff=0.85)
            yield Finding(  # accelerate/commands/config/config_args.py, from_yaml_file
                severity=Severity.ERROR, where=asked.in_config(str(key)),
                what="accelerate (1.15) refuses a config with a key that it does not know",
                fix=f"write {close[0]}" if close else "remove it",
            )  # fmt: skip
    for section, known in SECTION_KEYS.items():
        inner = asked.config.get(section)
        for key in inner if isinstance(inner, Mapping) else ():
            if key not in known and (close := get_close_matches(str(key), known, n=1, cutoff=0.7)):
                yield Finding(  # accelerate/commands/launch.py, line 1269: an argument that nobody reads
                    severity=Severity.WARNING, where=asked.in_config(f"{section}.{key}"),
                    what="accelerate ignores a key that it does not know", fix=f"write {close[0]}",
                )  # fmt: skip
    zero = asked.section("deepspeed_config")
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(f"{key}_device") == "nvme" and zero.get(f"{key}_nvme_path"):
            yield Finding(  # accelerate/utils/launch.py, prepare_deepspeed_cmd_env, sets no such variable
                severity=Severity.WARNING, where=asked.in_config(f"deepspeed_config.{key}_nvme_path"),
                what="accelerate launch does not pass it on: DeepSpeed writes to a folder named none",
                fix=f"export ACCELERATE_DEEPSPEED_{key.upper()}_NVME_PATH, or name a deepspeed_config_file with it",
            )  # fmt: skip


def _started(asked: StatedLaunch) -> Iterator[Finding]:
    """How many processes accelerate starts."""
    kind = str(asked.config.get("distributed_type", ""))
    wanted = asked.num_processes or asked.config.get("num_processes", 1)
    if kind == "NO" and isinstance(wanted, int) and wanted > 1:
        # accelerate/commands/launch.py, launch_command: without multi_gpu it is simple_launcher, which starts one
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("distributed_type"),
            what=f"NO starts one process, whatever num_processes={wanted} says",
            fix="set distributed_type: MULTI_GPU, or take --accelerate_config multi_gpu, fsdp2 or zero3",
        )  # fmt: skip
    if kind == "MULTI_CPU" and isinstance(wanted, int) and wanted > 1 and not asked.config.get("mpirun_config"):
        yield Finding(  # accelerate/commands/launch.py, launch_command: simple_launcher, seen with 1.15
            severity=Severity.ERROR, where=asked.in_config("distributed_type"),
            what=f"accelerate launch starts one process for MULTI_CPU without mpirun_config, not {wanted}",
            fix="start it with torchrun --nproc_per_node, or `autofit promote`, which starts the ranks itself",
        )  # fmt: skip
    if kind in ("MULTI_GPU", "FSDP", "DEEPSPEED") and asked.launch.ranks == 1 and "num_processes" not in asked.config:
        yield Finding(  # accelerate/commands/launch.py: "You need to manually pass in `--num_processes`"
            severity=Severity.ERROR, where=asked.in_config("num_processes"),
            what="it is missing, and accelerate refuses a distributed launch without it",
            fix=f"set it to the number of cards{_or_here(asked)}, or pass --num_processes",
        )  # fmt: skip
    elif kind == "MULTI_GPU" and asked.launch.ranks == 1:
        # the flag --multi_gpu with one process is refused, a config file with both is not (launch.py, line 1208)
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("num_processes"),
            what="MULTI_GPU with num_processes 1 trains on one card, in a DDP wrapper that costs memory",
            fix=f"set num_processes to the number of cards{_or_here(asked)}, or distributed_type: 'NO'",
        )  # fmt: skip
    cards, each = named_cards(asked.config), asked.launch.ranks // asked.launch.machines
    if kind in ("MULTI_GPU", "FSDP", "DEEPSPEED") and cards not in (None, each):
        yield Finding(  # accelerate/utils/launch.py sets CUDA_VISIBLE_DEVICES to them
            severity=Severity.ERROR, where=asked.in_config("gpu_ids"),
            what=f"it names {cards} card(s) for {each} ranks of a machine, of which each takes one",
            fix=f"name {each}, or write all",
        )  # fmt: skip
    if asked.launch.machines > 1:
        yield Finding(
            severity=Severity.NOTE, where=asked.in_config("num_machines"),
            what=f"num_processes {asked.launch.ranks} counts the ranks of all {asked.launch.machines} machines, "
                 f"{asked.launch.ranks // asked.launch.machines} each; probes and simulations are of one machine",
            fix="start it on every machine, each with its machine_rank and the same main_process_ip",
        )  # fmt: skip


def _or_here(asked: StatedLaunch) -> str:
    return f" (here {asked.cards_here})" if asked.cards_here > 1 else ""


def _hybrid(asked: StatedLaunch) -> Iterator[Finding]:
    """Groups of FSDP1 that are made by the cards that torch sees (torch/distributed/fsdp/_init_utils.py)."""
    strategy, section = sharding_strategy(asked.section("fsdp_config")), asked.section("fsdp_config")
    if asked.launch.sharding != "fsdp1" or not strategy.startswith("HYBRID"):
        return
    where = asked.in_config("fsdp_config.fsdp_sharding_strategy")
    if wrap_policy(section) == "NO_WRAP":
        yield Finding(
            severity=Severity.ERROR, where=where, what=f"torch refuses {strategy} without a wrapping policy",
            fix="set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        )  # fmt: skip
    if 1 < asked.launch.ranks < asked.cards_here and named_cards(asked.config) is None:
        yield Finding(  # new_subgroups: the group must not exceed the world
            severity=Severity.ERROR, where=where,
            what=f"torch makes groups of all {asked.cards_here} visible cards, and refuses {asked.launch.ranks} ranks",
            fix=f"set {asked.launch.sharding_strategy}, the same on one machine, or name the cards with gpu_ids",
        )  # fmt: skip


def _broadcast(asked: StatedLaunch) -> Iterator[Finding]:
    """Weights that rank 0 alone loads and nobody sends on."""
    inner = asked.config.get("fsdp_config")
    fsdp = inner if asked.config.get("distributed_type") == "FSDP" and isinstance(inner, Mapping) else {}
    if fsdp.get("fsdp_cpu_ram_efficient_loading", True) and not fsdp.get("fsdp_sync_module_states", True):
        yield Finding(  # accelerate/utils/launch.py, prepare_multi_gpu_env, whatever the version of FSDP
            severity=Severity.ERROR, where=asked.in_config("fsdp_config.fsdp_sync_module_states"),
            what="accelerate refuses false unless fsdp_cpu_ram_efficient_loading is false too",
            fix="remove it, or set both to false",
        )  # fmt: skip


def _packages(asked: StatedLaunch) -> Iterator[Finding]:
    if asked.launch.is_deepspeeds and find_spec("deepspeed") is None:
        yield Finding(
            severity=Severity.WARNING, where=asked.in_config("distributed_type"),
            what="DEEPSPEED needs the package deepspeed, which is not installed here",
            fix="pip install deepspeed, or take fsdp2, which needs nothing more",
        )  # fmt: skip


def _batch(asked: StatedLaunch) -> Iterator[Finding]:
    """Groups that the ranks cannot share (trl/trainer/grpo_config.py, line 1131)."""
    recipe = asked.recipe
    if not recipe.generates or recipe.num_generations < 1:
        return
    key, group = recipe.keys.group, recipe.num_generations
    for what, samples in (("rollout", recipe.generation_batch_size), ("effective batch", recipe.effective_batch_size)):
        if samples % group:
            near = sorted(divisors(samples))[1:7]
            yield Finding(
                severity=Severity.ERROR, where=asked.in_recipe(str(key)),
                what=f"the {what} of {samples} completions over {recipe.world_size} rank(s) is no multiple of "
                     f"{key}={group}, so a group would be split",
                fix=f"{key} that works: {', '.join(map(str, near))}; or change {recipe.keys.micro_batch}",
            )  # fmt: skip
            return


def _checkpointing(asked: StatedLaunch) -> Iterator[Finding]:
    launch = asked.launch
    key = next((key for key in CHECKPOINTING if asked.recipe.values.get(key) is not None), CHECKPOINTING[1])
    own = is_on(asked.section("fsdp_config").get("fsdp_activation_checkpointing", False))
    if not asked.checkpoints or launch.ranks == 1:
        return
    if launch.sharding.startswith("fsdp") and own:  # transformers/trainer.py, line 879
        yield Finding(
            severity=Severity.ERROR, where=asked.in_config("fsdp_config.fsdp_activation_checkpointing"),
            what=f"true together with the recipe's {key}, which TRL turns on unless told otherwise, is refused after "
                 "the model is loaded",
            fix=f"set {key}: false in the recipe",
        )  # fmt: skip
    elif launch.sharding.startswith("fsdp"):  # transformers/training_args.py, line 2795
        yield Finding(
            severity=Severity.NOTE, where=asked.in_recipe(key),
            what="with FSDP the recipe's own checkpointing gathers the parameters once more in the backward pass",
            fix=f"set {key}: false, and true for {asked.in_config('fsdp_config.fsdp_activation_checkpointing')}",
        )  # fmt: skip


def _saving(asked: StatedLaunch) -> Iterator[Finding]:
    launch = asked.launch
    sharded = launch.sharding != "ddp"
    only_model = is_on(asked.value("save_only_model"))
    if sharded and only_model and is_on(asked.value("load_best_model_at_end")):  # transformers/trainer.py, line 892
        yield Finding(
            severity=Severity.ERROR, where=asked.in_recipe("save_only_model"),
            what=f"with load_best_model_at_end it is refused under {launch.sharding}: the best model is loaded from a "
                 "whole checkpoint",
            fix="set save_only_model: false",
        )  # fmt: skip
    if launch.sharding == "zero3":
        if is_on(asked.value("auto_find_batch_size")):  # transformers/trainer.py, line 901
            yield Finding(
                severity=Severity.ERROR, where=asked.in_recipe("auto_find_batch_size"),
                what="transformers refuses it with ZeRO-3, and it would change the effective batch",
                fix="remove it; `autofit search` finds the micro-batch",
            )  # fmt: skip
        if not is_on(asked.section("deepspeed_config").get("zero3_save_16bit_model", True)):
            yield Finding(  # transformers/trainer.py, save_model
                severity=Severity.WARNING, where=asked.in_config("deepspeed_config.zero3_save_16bit_model"),
                what="false: the model is saved as ZeRO shards, which from_pretrained cannot read",
                fix="set it to true, or run zero_to_fp32.py on each checkpoint",
            )  # fmt: skip
    state = state_dict_type(asked.section("fsdp_config"), launch.sharding)
    if launch.sharding.startswith("fsdp") and "SHARDED" in state:
        where = asked.in_config("fsdp_config.fsdp_state_dict_type")
        if only_model:  # transformers/trainer.py, line 907
            yield Finding(
                severity=Severity.ERROR, where=where, what=f"{state} is refused with save_only_model: true",
                fix="set FULL_STATE_DICT, or save_only_model: false",
            )  # fmt: skip
        else:  # transformers/trainer.py, save_model: only FULL_STATE_DICT is saved
            yield Finding(
                severity=Severity.WARNING, where=where,
                what=f"{state}: the final model is not saved in a form that from_pretrained reads, only shards of "
                     "checkpoints",
                fix="set FULL_STATE_DICT, or merge the shards: accelerate merge-weights",
            )  # fmt: skip


def _deepspeed_batch(asked: StatedLaunch) -> Iterator[Finding]:
    """What an accelerate config tells DeepSpeed, and the recipe transformers (trainer_config_finalize compares)."""
    zero = asked.config.get("deepspeed_config")
    if asked.config.get("distributed_type") != "DEEPSPEED" or not isinstance(zero, Mapping):
        return
    accumulation = asked.recipe.grad_accum_steps
    told = {"gradient_accumulation_steps": accumulation, "gradient_clipping": asked.value("max_grad_norm")}
    for key, own in told.items():
        if own is not None and zero.get(key, "auto") not in ("auto", own):
            yield Finding(
                severity=Severity.ERROR, where=asked.in_config(f"deepspeed_config.{key}"),
                what=f"{zero[key]} here and {own} in the recipe: transformers refuses two values",
                fix=f"remove it here: the recipe's {own} is taken then, and the effective batch stays as it is"
                    if key == "gradient_accumulation_steps" else "remove it here: the recipe's is taken then",
            )  # fmt: skip
    path = zero.get("deepspeed_config_file")
    content = read_json(Path(path)) if isinstance(path, str) else None
    if content is not None and "gradient_accumulation_steps" not in content and accumulation != 1:
        yield Finding(  # accelerate/utils/dataclasses.py, line 1274
            severity=Severity.ERROR, where=f"{path}: gradient_accumulation_steps",
            what=f"it is missing, which accelerate takes for 1, and the recipe has {accumulation}: transformers "
                 "refuses two values",
            fix='write "auto" there, as autofit does in what it writes',
        )  # fmt: skip


def _threads(asked: StatedLaunch) -> Iterator[Finding]:
    """The one thread of a rank whose optimizer is on the host (torch/distributed/run.py, line 872; accelerate too)."""
    launch = asked.launch
    if launch.offload != "none" and launch.ranks > 1 and not launch.flags and not os.environ.get("OMP_NUM_THREADS"):
        yield Finding(
            severity=Severity.WARNING, where="the environment: OMP_NUM_THREADS",
            what="it is not set: each rank gets one thread for the optimizer's step on the host, about 2.3 s for each "
                 "1e9 parameters of a rank (fused AdamW, clipping, float32)",
            fix="export it as the machine's cores by its ranks"
                + (f", or set {THREADS} in the recipe" if launch.sharding.startswith("fsdp") else ""),
        )  # fmt: skip


_OF_FSDP = {OFFLOAD: "fsdp_config.fsdp_offload_params", SHARDING: "fsdp_config.fsdp_version"}


def _clashes(asked: StatedLaunch) -> Iterator[Finding]:
    """Settings that fail together."""
    for clash in clashes(asked.recipe):
        in_config = _OF_FSDP.get(clash.key)
        own = asked.in_recipe(clash.key) if in_config is None else asked.in_config(in_config)
        yield Finding(severity=Severity.ERROR, where=own, what=clash.what, fix=clash.fix)


def _engine(asked: StatedLaunch) -> Iterator[Finding]:
    """Tensor parallel of a colocated vLLM engine."""
    size, ranks = asked.value("vllm_tensor_parallel_size"), asked.launch.ranks
    if not is_on(asked.value("use_vllm")) or not isinstance(size, int) or isinstance(size, bool) or size <= 1:
        return
    where = asked.in_recipe("vllm_tensor_parallel_size")
    if asked.value("vllm_mode") == "server":
        yield Finding(
            severity=Severity.NOTE, where=where, what="it has no effect in server mode",
            fix=f"start the server with --tensor_parallel_size {size}",
        )  # fmt: skip
        return
    heads = attention_heads(asked.recipe.model)
    works = [n for n in range(1, ranks + 1) if ranks % n == 0 and (heads is None or heads % n == 0)]
    if ranks % size:  # trl/generation/vllm_generation.py, line 314
        yield Finding(
            severity=Severity.ERROR, where=where, what=f"{size} must divide the {ranks} rank(s) that share engines",
            fix=f"take one of {', '.join(map(str, works))}",
        )  # fmt: skip
    elif heads is not None and heads % size:
        yield Finding(  # vLLM's ModelConfig.verify_with_parallel_config
            severity=Severity.ERROR, where=where,
            what=f"{size} must divide the {heads} attention heads of {asked.recipe.model}",
            fix=f"take one of {', '.join(map(str, works))}",
        )  # fmt: skip


def _cards(asked: StatedLaunch) -> Iterator[Finding]:
    """Cards that cannot reach each other's memory."""
    if asked.launch.ranks > 1 and asked.card.startswith("rtx40"):
        # accelerate/utils/environment.py, check_cuda_p2p_ib_support: "RTX 40" with a driver below 550.40.07
        yield Finding(
            severity=Severity.NOTE, where="the card",
            what=f"{asked.card} has no peer-to-peer copies, so collectives go through host memory; with a driver below "
                 "550.40.07 accelerate refuses to start several ranks",
            fix="start with accelerate launch or trl, which set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1 themselves",
        )  # fmt: skip
