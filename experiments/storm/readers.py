"""What is attacked with input in this process: recipes, launches, spaces, guards, pipelines, executors, options, ..."""

from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from recipes import grpo_recipe

from autofit.api.arguments import seconds, share, size
from autofit.cluster.scheduler import FILE, read_executor
from autofit.commands.arguments import parser
from autofit.commands.common import settings
from autofit.fakegpu.specs import UnknownGpuError, gpu_spec
from autofit.hardware.hardware import card_needs
from autofit.hardware.prices import prices
from autofit.plugin.registry import trainer_for
from autofit.recipe.launching import launch_options, launched
from autofit.recipe.pipeline import OPTIONS, read_pipeline
from autofit.recipe.profile import TAKEN_BY
from autofit.recipe.recipe import merge
from autofit.recipe.secrets import sealed
from autofit.recipe.yaml_file import read_source
from autofit.space.knob import load_space, read_space
from autofit.space.space import Space
from autofit.trainers.offline import read_config_file
from autofit.watching.guards import GuardWatcher
from autofit.watching.thresholds import read_guards
from storm.inputs import ODD, SCALARS, VALUES, Reader, json_text_of, mapping_of, written, yaml_text_of

_LAUNCH = ["accelerate_config", "config_file", "multi_gpu", "use_fsdp", "use_deepspeed", "num_processes", "fsdp",
           "fsdp_config", "deepspeed", "launch", "zero_stage", "mixed_precision", "fsdp_version", "num_machines",
           "fsdp_reshard_after_forward", "offload_optimizer_device", "distributed_type", "tpu", "deepspeed_config_file",
           "world_size"]  # fmt: skip
_KEYS = [*TAKEN_BY, *_LAUNCH, "model_name_or_path", "dataset_name", "datasets", "per_device_train_batch_size",
         "gradient_accumulation_steps", "learning_rate", "bf16", "env", "hub_token", "lora_r", "use_peft", "dtype",
         "attn_implementation", "load_in_4bit", "model_init_kwargs", "run_name", "output_dir", "launch.sharding",
         "env.A", "gradient_checkpointing", "max_steps"]  # fmt: skip
_BATCH = ["per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "steps_per_generation",
          "generation_batch_size", "max_completion_length", "num_iterations", "world_size", "num_prompts"]  # fmt: skip
_KNOBS = ["per_device_train_batch_size", "steps_per_generation", "num_generations", "gradient_checkpointing",
          "loss_type", "lora_r", "max_completion_length", "quantization", "attn_implementation", "env.A",
          "launch.sharding", "launch.server_ranks", "model_init_kwargs.a", "temperature"]  # fmt: skip
_OF_KNOB = [
    "tier",
    "values",
    "cpu_values",
    "memory",
    "needs",
    "scales",
    "traced",
    "when",
    "sets",
    "unset",
    "values_need",
]
_GUARDS = [*yaml.safe_load((Path(str(__import__("autofit").__file__)).parent / "watching" / "guards.yaml").read_text())]
_OF_GUARD = ["metric", "check", "min", "max", "share", "times", "direction", "ahead", "window", "patience", "warmup",
             "action", "objective", "generates", "says", "advice"]  # fmt: skip
_OF_STAGE = ["trainer", "recipe", "values", "set", "search", *OPTIONS]
_OF_EXECUTOR = ["executor", "kind", "partition", "account", "qos", "time", "nodes", "gpus_per_node", "cpus", "memory",
                "setup", "slurm", "python", "constraint"]  # fmt: skip
_OF_MODEL = ["model_type", "architectures", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
             "text_config", "auto_map", "num_experts", "head_dim", "rope_scaling", "quantization_config"]  # fmt: skip


def _recipe(values: dict[str, object]) -> object:
    source = read_source(values)
    card_needs(source.values)
    trainer_for(source.values, None)
    return launched(sealed(merge(source.values, {})))


def _recipe_file(text: str, folder: Path) -> object:
    return _recipe(dict(read_source(written(folder, "recipe.yaml", text)).values))


def _batches(numbers: dict[str, int], _: Path) -> object:
    recipe = grpo_recipe(**numbers)
    space = Space.of(recipe, load_space(None, trainer="grpo"))
    return [space.yaml_changes(candidate) for candidate in list(space.tiers)[:50]]


def _space_file(text: str, folder: Path) -> object:
    knobs = read_space(str(written(folder, "space.yaml", text)), trainer="grpo")
    space = Space.of(grpo_recipe(), knobs, allow="recipe")
    return [space.yaml_changes(candidate) for candidate in list(space.tiers)[:50]]


def _guards_file(text: str, folder: Path) -> object:
    return _watched(read_guards(written(folder, "guards.yaml", text)))


def _watched(guards: Any) -> object:
    """Four logged lines watched with `guards`, hostile values among them."""
    watcher = GuardWatcher(guards)
    lines = [{"step": i, "kl": v, "loss": v, "grad_norm": v, "reward": v, "learning_rate": 1e-5}
             for i, v in enumerate((0.1, 1e300, float("nan"), -5))]  # fmt: skip
    return [str(event) for line in lines for event in watcher.logs(line)]


def _pipeline_file(text: str, folder: Path) -> object:
    return read_pipeline(written(folder, "pipeline.yaml", text))


def _executor_file(text: str, folder: Path) -> object:
    written(folder, FILE, text)
    return read_executor(None, {}, folder)


def _option(given: tuple[str, str], _: Path) -> object:
    kind, text = given
    if kind == "card":
        return launch_options(gpu=text, accelerate_config=None, num_processes=None, gpus=None)
    if kind == "known card":
        try:
            return gpu_spec(text)
        except UnknownGpuError:
            return None
    return {"size": size, "seconds": seconds, "share": share}[kind]("--x", text)


def _config(text: str, folder: Path) -> object:
    return read_config_file(written(folder, "config.json", text))


def _settings(texts: list[str], _: Path) -> object:
    return _recipe(merge({"model_name_or_path": "m", "env": ["A=1"], "launch": {"ranks": 2}}, settings(texts)))


def _arguments(words: list[str], _: Path) -> object:
    try:
        return parser().parse_args(words)
    except SystemExit as ended:  # --help
        if ended.code not in (0, 2):
            raise
        return None


_WORDS = ["search", "estimate", "promote", "run", "best", "--set", "a=1", "--target-vram", "3GB", "--trials", "1",
          "--device", "cpu", "--seed", "--parallel", "recipe.yaml", "--gpu", "--", "-", "--dir"]  # fmt: skip
_COUNTS = st.one_of(st.integers(1, 64), st.sampled_from([2**10, 10**6, 10**9, 10**12, 720720, 2**62, 10**40]))
_TEXT = st.one_of(ODD.filter(lambda o: isinstance(o, str)), st.text(max_size=12))
_LISTS = st.one_of(
    st.just("solved"), st.lists(st.integers(1, 64), min_size=1, max_size=4),
    st.lists(SCALARS, min_size=1, max_size=6),
    st.just(list(range(1, 65))), st.just(["x0.5", "x2", "xnan", "x1e300"]), st.just([True, False]),
    st.just(["longest"]),
)  # fmt: skip
_MORE_OF_KNOB = st.fixed_dictionaries({}, optional={
    "cpu_values": st.lists(st.integers(1, 9), max_size=2), "memory": st.sampled_from(["any", "ascending"]),
    "needs": st.one_of(st.sampled_from(["peft", "vllm>=0.1", "x y", ""]), st.lists(_TEXT, max_size=2)),
    "scales": st.lists(st.sampled_from(["lora_alpha", "learning_rate", "lora_r", "loss_type", "gone"]), max_size=2),
    "traced": st.booleans(), "unset": SCALARS, "sets": st.dictionaries(st.sampled_from(_KNOBS), SCALARS, max_size=2),
    "when": st.dictionaries(st.sampled_from(_KNOBS), st.one_of(SCALARS, st.lists(SCALARS, max_size=2)), max_size=2),
    "values_need": st.dictionaries(_TEXT, st.lists(SCALARS, max_size=2), max_size=2),
})  # fmt: skip
_GOOD_ENTRIES = st.builds(
    lambda tier, values, more: {"tier": tier, "values": values} | more,
    st.sampled_from(["neutral", "approximate", "recipe"]), _LISTS, _MORE_OF_KNOB,
)  # fmt: skip
_ENTRIES = st.one_of(_GOOD_ENTRIES, _GOOD_ENTRIES, mapping_of(_OF_KNOB), VALUES)
_SPACES = st.one_of(
    mapping_of(["trainer", "knobs"]),
    *[
        st.dictionaries(st.sampled_from(_KNOBS), entries, min_size=1, max_size=8).map(
            lambda knobs: {"trainer": "grpo", "knobs": knobs}
        )
        for entries in (_GOOD_ENTRIES, _GOOD_ENTRIES, _ENTRIES)
    ],
)
_GOOD_STAGES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.fixed_dictionaries(
    {"values": mapping_of(_KEYS)}, optional={"trainer": st.sampled_from(["sft", "grpo"]), "set": mapping_of(_KEYS),
                                             "trials": st.integers(), "search": st.booleans()},
), min_size=1, max_size=3)  # fmt: skip
_STAGES = st.one_of(_GOOD_STAGES, st.dictionaries(st.sampled_from(["a", "b", "c", "", "a b", "x" * 500]),
                                                  st.one_of(mapping_of(_OF_STAGE), VALUES), max_size=4))  # fmt: skip
_PIPELINES = st.one_of(_GOOD_STAGES.map(lambda stages: {"stages": stages, "vars": {"v": "${w}", "w": "${v}${v}"}}),
                       mapping_of(["stages", "vars", "name", *OPTIONS]),
                       st.builds(lambda s, v, m: {**m, "stages": s, "vars": v}, _STAGES,
                                 mapping_of(["a", "v", "w"]), mapping_of([*OPTIONS], most=2)))  # fmt: skip
_GUARD_ENTRIES = st.one_of(
    mapping_of(_OF_GUARD), VALUES,
    st.builds(
        lambda metric, check, says, more: {"metric": metric, "check": check, "says": says} | more,
        st.sampled_from(["kl", "loss", "*", "?", "[", "rew*rd"]),
        st.sampled_from(["band", "finite", "falls", "spikes", "stuck", "drifts"]), _TEXT,
        st.dictionaries(st.sampled_from(_OF_GUARD[2:13]), st.one_of(st.integers(-5, 5), st.floats(), SCALARS)),
    ),
)  # fmt: skip

READERS = (
    Reader(name="recipe values", makes=mapping_of(_KEYS), reads=lambda values, _: _recipe(values)),
    Reader(name="recipe files", makes=yaml_text_of(mapping_of(_KEYS)), reads=_recipe_file),
    Reader(name="launches", makes=mapping_of(_LAUNCH), reads=lambda values, _: _recipe(values)),
    Reader(name="batches", makes=st.dictionaries(st.sampled_from(_BATCH), _COUNTS), reads=_batches),
    Reader(name="space files", makes=yaml_text_of(_SPACES), reads=_space_file),
    Reader(name="guards files", makes=yaml_text_of(
        st.dictionaries(st.one_of(st.sampled_from(_GUARDS), st.text(max_size=6)), _GUARD_ENTRIES, max_size=4)),
        reads=_guards_file),
    Reader(name="pipelines", makes=yaml_text_of(_PIPELINES), reads=_pipeline_file),
    Reader(name="executor files", makes=yaml_text_of(st.one_of(
        mapping_of(_OF_EXECUTOR), mapping_of(_OF_EXECUTOR, _TEXT, most=2),
        mapping_of(["slurm", "setup", "time", "nodes"], most=1))), reads=_executor_file),
    Reader(name="prices", makes=yaml_text_of(mapping_of(["h100", "a100-80gb", "t4", "usd_per_hour"])),
           reads=lambda text, folder: prices(written(folder, "prices.yaml", text))),
    Reader(name="model configs", makes=json_text_of(mapping_of(_OF_MODEL)), reads=_config),
    Reader(name="--set", makes=st.lists(
        st.one_of(_TEXT, st.builds(lambda k, v: f"{k}={v}", st.sampled_from([*_KEYS, "env.A", "launch.ranks", "a.b.c"]),
                                   st.one_of(_TEXT, VALUES.map(repr)))), max_size=4), reads=_settings),
    Reader(name="options", makes=st.tuples(st.sampled_from(["size", "seconds", "share", "card", "known card"]), _TEXT),
           reads=_option),
    Reader(name="arguments", makes=st.lists(st.one_of(st.sampled_from(_WORDS), _TEXT), max_size=8), reads=_arguments),
)  # fmt: skip
