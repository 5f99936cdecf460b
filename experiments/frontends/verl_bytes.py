"""Bytes by phase of verl's own FSDP engine on two gloo ranks of the CPU, against autofit's simulated rank of the CPU.

Run: python experiments/frontends/verl_bytes.py --verl DIR, a checkout of verl at 1dda039b, with the packages that verl
imports (ray, tensordict, codetiming, hydra-core, by `pip install --no-deps`) on the path. Writes verl_bytes.json.
Nothing of Ray is started. Of both sides the same three things are replaced, which no CPU has: flash-attn's attention
and cross-entropy, by tensors of their sizes, and the copy of a micro-batch to the card, by a copy in memory. The copy
that gloo makes of what it reduces is not counted, since NCCL makes none, and neither is what verl has in the memory of
its host: the batch from which it cuts micro-batches, and checkpointing's states of the random numbers.
A phase's figure is the most bytes that tensors had within it above those that it began with. It is not the card's count
of allocated bytes: torch's allocator hands out blocks of up to 1 MiB more, which is much beside a tiny model.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from autofit.plugin.protocol import Report, Task, WorstCase

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

RANKS, PROMPT, RESPONSE, STEPS = 2, 32, 96, 2
KEPT = HERE / "verl_bytes.json"
ROWS, MICRO_BATCHES = 4, 2
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "LoRA": {"lora_rank": 4},
    "Ulysses 2": {"ulysses_sequence_parallel_size": 2},
    "Ulysses 2 with entropy": {"ulysses_sequence_parallel_size": 2, "calculate_entropy": True},
    "critic": {"critic": True},
    "critic, Ulysses 2": {"critic": True, "critic_ulysses_sequence_parallel_size": 2},
}
CASES: dict[str, dict[str, Any]] = {
    f"{sharding}, {name}": {"sharding": sharding, **changes}
    for sharding in ("fsdp1", "fsdp2")
    for name, changes in CHANGES.items()
}


class Flash(torch.autograd.Function):
    """The tensors that flash-attn saves and returns; not its values."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        out = query.clone()
        ctx.save_for_backward(query, key, value, out, query.new_zeros(query.shape[-2], query.shape[-3]).float())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(torch.zeros_like(each) for each in ctx.saved_tensors[:3])


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return Flash.apply(query, key, value)  # type: ignore[no-untyped-call]


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    from transformers import modeling_flash_attention_utils as flash
    from transformers.modeling_utils import PreTrainedModel

    kernels = attention, attention, None, flash._pad_input, flash._unpad_input
    with (
        mock.patch.object(PreTrainedModel, "_flash_attn_import_error", return_value=None),
        mock.patch.object(flash, "_lazy_imports", return_value=kernels),
    ):
        yield


def unseen(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose tensors a tracker does not see."""
    from torch.utils._python_dispatch import _disable_current_modes

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **options)

    return call


@contextmanager
def without_gloos_copies() -> Iterator[None]:
    """What gloo allocates within a reduce-scatter is not seen by a tracker of tensors."""
    with ExitStack() as stack:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(distributed, name):
                stack.enter_context(mock.patch.object(distributed, name, unseen(getattr(distributed, name))))
        yield


# -- verl -------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    from autofit.probing.supervise import free_port as found

    return found()


def of_verl(rank: int, port: int, verl: str, model: str, answer: str, titles: tuple[str, ...]) -> None:
    """In a rank: verl's engine for a generation and its optimizer step, once unmeasured."""
    from autofit.probing.memory import CpuMemory

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    sys.path.insert(0, verl)
    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    found: dict[str, dict[str, int]] = {}
    with flash_on_cpu(), without_gloos_copies():
        for title in titles:
            case = CASES[title]
            memory = CpuMemory(None)  # from before the weights are there: what it did not see made would count later
            memory.start()
            torch.get_rng_state = memory._original_rng  # type: ignore[assignment]  # states that are in host memory beside a card
            score, update, engine = verl_engine(model, case)
            score(), update()
            found[title] = recorded(memory, score, update, engine, critic=case.get("critic", False))
            memory.stop()
            del score, update, engine
            gc.collect()
    Path(f"{answer}.{rank}").write_text(json.dumps(found))


def recorded(
    memory: Any, score: Callable[[], Any], update: Callable[[], Any], engine: Any, *, critic: bool
) -> dict[str, int]:
    """The most bytes of each phase above those at its begin, by the tracker of autofit's probes of a CPU.

    torch's profiler does not hear of what a thread of gloo frees.
    """
    found: dict[str, int] = {}
    steps = engine.optimizer_step

    def phase(name: str, run: Callable[[], Any]) -> Any:
        memory.switch("", "")
        begin = begins.setdefault(name, memory._tracker.current_bytes)
        told = run()
        found[name] = memory.switch("", "").peak_allocated_bytes - begin
        return told

    begins: dict[str, int] = {}
    if critic:
        phase("values", score)
        phase("update critic", update)
        return found
    phase("old log-probs", score)
    begins["optimizer"] = memory._tracker.current_bytes

    def step() -> Any:
        found["update"] = memory.switch("", "").peak_allocated_bytes - begins["optimizer"]
        return phase("optimizer", steps)

    engine.optimizer_step = step
    update()
    phase("sync", partial(sent, engine))
    return found


def sent(engine: Any) -> None:
    """All weights, as they are given to the rollout."""
    for _name, _whole in engine.get_per_tensor_param(base_sync_done=True)[0]:
        pass


class Cpu:
    """torch.cuda as verl asks it, of a CPU: nothing is cached, and nothing has to be waited for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, lambda *_, **__: 0)


def verl_engine(model: str, case: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[], Any], Any]:
    """(scoring of a generation, its optimizer step, the engine)."""
    from verl.utils import device

    device.get_torch_device, device.get_device_id = Cpu, lambda: torch.device("cpu")
    device.get_device_name = lambda: "cpu"
    from verl.models.transformers import monkey_patch
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import (
        FSDPActorConfig,
        FSDPCriticConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
    )
    from verl.workers.engine.fsdp import transformer_impl
    from verl.workers.utils.losses import ppo_loss, value_loss

    from autofit.trainers.verl_losses import row_log_probs

    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    monkey_patch.is_trl_available = lambda: False  # verl patches a class of TRL that newer ones do not have
    critic = bool(case.get("critic"))
    sharers = case.get(f"{'critic_' if critic else ''}ulysses_sequence_parallel_size", 1)
    strategy = {"fsdp1": "fsdp", "fsdp2": "fsdp2"}[case["sharding"]]
    transformer_impl.logprobs_from_logits = lambda logits, labels, inplace_backward=False: row_log_probs(
        logits, labels, inplace=inplace_backward and torch.is_grad_enabled()
    )
    adapters = {"lora_rank": case["lora_rank"], "target_modules": "all-linear"} if "lora_rank" in case else {}
    config = HFModelConfig(path=model, load_tokenizer=False, use_remove_padding=True, **adapters)
    engine_config = FSDPEngineConfig(
        strategy=strategy, ulysses_sequence_parallel_size=sharers, use_torch_compile=False, use_dynamic_bsz=critic,
    )  # fmt: skip
    kind = transformer_impl.FSDPEngineWithValueHead if critic else transformer_impl.FSDPEngineWithLMHead
    config.model_type = "value_model" if critic else "language_model"
    engine = kind(config, engine_config, FSDPOptimizerConfig(lr=1e-6), None)
    engine.checkpoint_config = {}
    from torch.distributed.fsdp import _init_utils

    on_card = "_check_module_states_for_sync_module_states"
    with (
        mock.patch.object(transformer_impl, "FSDPCheckpointManager"),
        mock.patch.object(_init_utils, on_card, return_value=None),
    ):
        engine.initialize()
    transformer_impl.load_fsdp_model_to_gpu = lambda _: None  # it is there
    transformer_impl.prepare_micro_batches = unseen(transformer_impl.prepare_micro_batches)
    stepped = engine.forward_step
    engine.forward_step = lambda micro_batch, **options: stepped(micro_batch.clone(), **options)
    actor = FSDPActorConfig(
        strategy=strategy, rollout_n=1, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=ROWS,
        use_kl_loss=True,
    )  # fmt: skip
    samples = ROWS * MICRO_BATCHES

    def batch(*fields: str) -> Any:
        ids = [torch.zeros(PROMPT + RESPONSE, dtype=torch.long) for _ in range(samples)]
        nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
        made = {
            "input_ids": nested(ids), "position_ids": nested([torch.arange(len(each)) for each in ids]),
            "prompts": nested([each[:PROMPT] for each in ids]), "responses": nested([each[PROMPT:] for each in ids]),
            "response_mask": nested([torch.ones(RESPONSE, dtype=torch.long) for _ in ids]),
            "loss_mask": nested([torch.ones(RESPONSE, dtype=torch.long) for _ in ids]),
        }  # fmt: skip
        for field in ("rollout_log_probs", "rm_scores", *fields):
            made[field] = nested([torch.ones(RESPONSE) for _ in ids])
        found = tu.get_tensordict(made)
        entropy = case.get("calculate_entropy", False) if fields else True
        tu.assign_non_tensor(
            found, use_dynamic_bsz=critic, micro_batch_size_per_gpu=ROWS, use_remove_padding=True,
            max_token_len_per_gpu=ROWS * (PROMPT + RESPONSE) // sharers,
            temperature=1.0, calculate_entropy=entropy, global_batch_size=samples * RANKS // sharers,
        )  # fmt: skip
        return found

    losses = ("values", "returns") if critic else ("old_log_probs", "advantages", "ref_log_prob")
    scored, trained = batch(), batch(*losses)
    judge = FSDPCriticConfig(strategy=strategy, ppo_micro_batch_size_per_gpu=ROWS)
    loss = partial(value_loss, config=judge) if critic else partial(ppo_loss, config=actor)

    def score() -> None:
        with engine.eval_mode(), torch.no_grad():
            engine.forward_backward_batch(scored, None, forward_only=True)

    def update() -> None:
        with engine.train_mode():
            engine.train_batch(trained, loss)

    return score, update, engine


# -- autofit ----------------------------------------------------------------------------------------------------------


def values_of(model: str, case: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a case."""
    return {
        "model_path": model, "use_torch_compile": False, "ppo_micro_batch_size_per_gpu": ROWS, "rollout_n": 1,
        "gradient_accumulation_steps": MICRO_BATCHES, "steps_per_generation": MICRO_BATCHES, "use_kl_loss": True,
        "log_prob_micro_batch_size_per_gpu": ROWS, "max_prompt_length": PROMPT, "max_response_length": RESPONSE,
        "update_weights_bucket_megabytes": 1, "tensor_model_parallel_size": 1, "critic_model_path": model,
        **dict.fromkeys(
            ("critic_max_token_len_per_gpu", "critic_forward_max_token_len_per_gpu"),
            ROWS * (PROMPT + RESPONSE) // case.get("critic_ulysses_sequence_parallel_size", 1),
        ),
        "critic_sharding": case["sharding"],
        **{key: value for key, value in case.items() if key != "sharding"},
    }  # fmt: skip


class Phases(Report):
    """The most bytes of each phase of the last step above those at the begin of its first phase."""

    def __init__(self, held: Callable[[], int], peak: Callable[[], int]) -> None:
        self._held, self._peak, self._phase = held, peak, "update"
        self.found: dict[str, int] = {}
        self._begin = 0

    def enter(self, phase: str) -> str:
        left, self._phase = self._phase, phase
        self.found[left] = self._peak() - self._begin
        if phase not in ("optimizer", "update") or left not in ("optimizer", "update"):
            self._begin = self._held()
        return left

    def gradient_is_whole(self, model: object, optimizer: object) -> None:
        self.enter("optimizer")

    def optimizer_ends(self) -> None:
        self.kept = dict(self.found) | {"optimizer": self._peak() - self._begin}
        self.enter("end")


def of_autofit(model: str, case: dict[str, Any], folder: Path) -> dict[str, int]:
    """The same of the trainer on a simulated CPU, rank 0."""
    from autofit.fakegpu import fake_gpu
    from autofit.plugin.protocol import Inspection
    from autofit.plugin.ranks import simulated_rank
    from autofit.probing.prepare import worst_case_path
    from autofit.recipe.launch import Launch
    from autofit.trainers.verl import TRAINER

    values = values_of(model, case)
    worst_case = WorstCase(path=worst_case_path(folder))
    TRAINER.inspect(values, Inspection(device="sim:h100", worst_case=worst_case, ranks=RANKS))
    task = Task(device="cpu", output=folder, worst_case=worst_case, steps=STEPS)
    launch = Launch(ranks=RANKS, sharding=case["sharding"])
    with flash_on_cpu(), simulated_rank(launch), fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        allocator = gpu.memory.allocator

        def peak() -> int:
            found, allocator.peak_requested_bytes = allocator.peak_requested_bytes, allocator.requested_bytes
            return found

        report = Phases(lambda: allocator.requested_bytes, peak)
        run = TRAINER.build(values, task)
        run.train(report)
        report.enter("sync")
        if "lora_rank" in case:
            run.loop.actor.send_adapters()
        else:
            for _name, _whole in run.loop.actor.whole_weights():
                pass
        report.enter("end")
    return report.kept | {"sync": report.found["sync"]}


def write_model(folder: Path) -> Path:
    """A random Llama whose logits are most of a micro-batch, as those of real ones are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4000, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verl", required=True)
    parser.add_argument("--only", help="cases of this name under both; the others are kept as they were")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(KEPT.read_text()) if options.only else {}
    chosen = {title: case for title, case in CASES.items() if options.only in (None, *title.split(", "))}
    with tempfile.TemporaryDirectory() as name:
        model, answer = write_model(Path(name) / "model"), str(Path(name) / "answer")
        if options.verl != "none":
            spawn(of_verl, (free_port(), options.verl, str(model), answer, tuple(chosen)), nprocs=RANKS)
            theirs = json.loads(Path(f"{answer}.0").read_text())
        else:
            theirs = json.loads(KEPT.read_text())
            theirs = {title: {k: v["verl"] for k, v in case.items()} for title, case in theirs.items()}
        for at, (title, case) in enumerate(chosen.items()):
            folder = Path(name) / f"case{at}"
            folder.mkdir()
            ours = of_autofit(str(model), case, folder)
            found[title] = {
                phase: {"verl": size, "autofit": ours[phase], "off": round(ours[phase] / size - 1, 4)}
                for phase, size in theirs[title].items()
            }
            print(title, found[title], flush=True)
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
