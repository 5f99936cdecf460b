"""YAML of open-r1 and the alignment-handbook: TRL's keys, with keys of their own scripts for data and reports.

Read at open-r1 078c5e17 and the alignment-handbook 1416fa0c. Their data is not read: a made-up sample of
the greatest length that the recipe keeps stands for it. No torch here.
"""

from collections.abc import Mapping
from pathlib import Path

from autofit.errors import ConfigError
from autofit.frontends.draft import Explanation, Foreign, Line, lines
from autofit.frontends.python_file import as_it_is
from autofit.recipe.keys import RENAMED
from autofit.recipe.profile import OF_TRL, profile

OPEN_R1, HANDBOOK = "open-r1", "alignment-handbook"
OTHERS = ("kto", "orpo", "cpo", "gkd", "ppo", "nash_md", "online_dpo", "xpo", "bco", "prm", "distillation")
_OF_ITS_COMMAND = ("kto", "distillation")  # those of them that TRL 1.16's own command has, in trl/scripts
# Arguments of open-r1's own (src/open_r1/configs.py at 078c5e17) that reach neither the model nor the batch.
_OWN_NAMES = """
benchmarks callbacks chat_template system_prompt hub_model_revision num_completions_to_print overwrite_hub_revision
push_to_hub_revision wandb_entity wandb_project wandb_run_group wandb_log_unique_prompts cosine_min_value_wrong
cosine_max_value_wrong cosine_min_value_correct cosine_max_value_correct cosine_max_len repetition_n_grams
repetition_max_penalty code_language code_eval_test_batch_size parallel_code_exec_per_proc dataset_prompt_column
e2b_router_url morph_router_url code_provider ioi_provider code_eval_scoring_mode max_completion_len soft_punish_cache
enforce_same_language
"""
OTHERS_OWN = frozenset(_OWN_NAMES.split())
_DATA = """
dataset_mixture dataset_mixer dataset_splits dataset_configs auto_insert_empty_system_msg preprocessing_num_workers
text_column tokenizer_name_or_path
"""
_OF_HANDBOOK = frozenset({*_DATA.split(), "chat_template"})
_TRLS = {"num_completions_to_print", "wandb_log_unique_prompts"}  # which TRL has too
_OWN = _OF_HANDBOOK | (OTHERS_OWN - _TRLS)
_OF_OPEN_R1 = _OWN - _OF_HANDBOOK - {"hub_model_revision", "push_to_hub_revision"}
_NAMES = """
accuracy format reasoning_steps cosine repetition_penalty length code binary_code ioi_code cf_code code_format tag_count
soft_overlong_punishment
"""
_REWARDS = frozenset(_NAMES.split())  # of open-r1's registry
_STANDS = "think_format_reward"
_REWARD_KEYS = ("reward_funcs", "reward_weights", "reward_model_name_or_path")
_BOTH = ("gradient_checkpointing", "gradient_checkpointing_kwargs")  # TRL takes the older name too
_NEWER = {old: new for old, new in RENAMED if old not in _BOTH}
_PROMPT_TOKENS, _SAMPLE_TOKENS = 512, 1024  # TRL's defaults of max_prompt_length, of then, and of max_length


def tool_of(values: Mapping[str, object]) -> str | None:
    """Tool whose YAML has these `values`; None if they are of TRL alone, or of anything but a recipe."""
    if "model_name_or_path" not in values or not _OWN & values.keys():
        return None
    return OPEN_R1 if _OF_OPEN_R1 & values.keys() or _has_rewards(values) else HANDBOOK


def recipe(
    values: Mapping[str, object], *, folder: Path, ranks: int | None = None, trainer: str | None = None
) -> Foreign:
    """The recipe of TRL that `values` mean in a file in `folder`, which may be named after the trainer."""
    tool = tool_of(values)
    assert tool is not None
    trainer = trainer or _trainer(values, folder)
    own = [key for key in values if key in _OWN]
    keys = {_NEWER.get(key, key): key for key in values if key not in _OWN}
    found = {name: values[key] for name, key in keys.items()}
    notes = [f"left out, as neither the batch nor memory depends on them but by the data: {', '.join(own)}"]
    if _has_rewards(values):
        found = {key: value for key, value in found.items() if key not in _REWARD_KEYS}
    found, stands, more = stand_in(trainer, found)
    notes += more
    return Foreign(
        tool=tool, trainer=trainer, values=found, ranks=ranks, prompt_tokens=stands, notes=tuple(notes), keys=keys
    )


def stand_in(trainer: str, values: Mapping[str, object]) -> tuple[dict[str, object], int, list[str]]:
    """(`values` of a recipe with unread data, the tokens of the made-up sample that stands for it, notes)."""
    found, notes = dict(values), []
    if not profile(trainer).generates:
        what, most, usual = "sample", found.get("max_length"), _SAMPLE_TOKENS
    else:
        what, most, usual = "prompt", found.pop("max_prompt_length", None), _PROMPT_TOKENS
        if not any(found.get(key) for key in _REWARD_KEYS):
            found["reward_funcs"] = [_STANDS]
            notes.append(f"its own rewards are not run: TRL's {_STANDS} stands for them, which takes no time")
    stands = most if isinstance(most, int) else usual
    notes.append(f"the data is not read: a made-up {what} of {stands:,} tokens, the most that is kept, stands for it")
    return found, stands, notes


def explain(values: Mapping[str, object], *, folder: Path, ranks: int | None = None) -> Explanation:
    """Whose file it is, what trains, the effective batch, and what stands for the data."""
    found = recipe(values, folder=folder, ranks=ranks)
    first = (
        Line("tool", f"{found.tool}, by its keys {', '.join([key for key in values if key in _OWN][:4])}"),
        Line("trainer", f"{found.trainer} of TRL"),
        Line("effective batch", batch_words(found.trainer, found.values, ranks)),
    )
    return Explanation(tool=found.tool, lines=(*first, *lines(found)), notes=found.notes)


def batch_words(kind: str, values: Mapping[str, object], ranks: int | None) -> str:
    """The effective batch of a training of TRL's, by transformers' defaults."""
    micro = values.get("per_device_train_batch_size", 8)
    steps = values.get("gradient_accumulation_steps", 1)
    batch = f"per_device_train_batch_size {micro} x gradient_accumulation_steps {steps}"
    if isinstance(micro, int) and isinstance(steps, int) and min(micro, steps) > 0:
        each = (
            "on each rank" if ranks is None else f"x {ranks} rank{'s' if ranks > 1 else ''} = {micro * steps * ranks}"
        )
        batch += f" = {micro * steps} {'completions' if kind in ('grpo', 'rloo') else 'samples'} {each}"
    return batch


def say(foreign: Foreign, changes: Mapping[str, object]) -> dict[str, object]:
    """{the file's own key: value} of `changes`. Raises ConfigError for those set outside of the file."""
    outside = [key for key in changes if key.partition(".")[0] in ("env", "launch")]
    if outside:
        raise ConfigError(f"{foreign.tool} has no key for {outside[0]}")
    return {foreign.keys.get(key, key): value for key, value in changes.items()}


def _has_rewards(values: Mapping[str, object]) -> bool:
    given = values.get("reward_funcs")
    return isinstance(given, list) and bool(given) and all(isinstance(name, str) and name in _REWARDS for name in given)


def not_simulated(kind: str, script: str = "") -> ConfigError:
    """The refusal of an unsupported trainer of TRL's, with the command that runs its `script`, or one."""
    runs = "SCRIPT.py ... runs a Python script that trains with it"
    if kind in _OF_ITS_COMMAND:
        runs = f"-m trl.scripts.{kind} ... runs `trl {kind} ...`"
    trains = as_it_is(script) or f"; autofit fit-check --gpu NAME {runs}"
    return ConfigError(f"training with {kind} is not simulated; {', '.join(OF_TRL)} are{trains}")


def _trainer(values: Mapping[str, object], folder: Path) -> str:
    """By the name of the file's folder, as both projects have it, else by its keys. Raises ConfigError."""
    if folder.name in OTHERS:
        raise not_simulated(folder.name)
    if folder.name in OF_TRL:
        return folder.name
    if {"num_generations", "reward_funcs", "max_completion_length"} & values.keys():
        return "grpo"
    return "dpo" if {"beta", "max_prompt_length", "rpo_alpha"} & values.keys() else "sft"
