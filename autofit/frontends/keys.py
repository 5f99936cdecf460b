"""Keys of the tools that no reader looks at one by one, by what they do to memory (keys.yaml), and transformers' own.

LLaMA-Factory and ms-swift take the keys of transformers' TrainingArguments too. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import yaml

from autofit.errors import ConfigError, nearest
from autofit.frontends.draft import Draft
from autofit.recipe.keys import evaluates

# The same key in our recipe: the optimizer, its schedule, precision, and what trains how long.
SAME = (
    "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "num_train_epochs",
    "max_steps", "lr_scheduler_type", "warmup_steps", "seed", "optim_args", "neftune_noise_alpha",
    "torch_empty_cache_steps", "label_smoothing_factor", "gradient_checkpointing_kwargs",
    "average_tokens_across_devices",
)  # fmt: skip
# What stands for a model that is quantised already: NF4 takes 0.5 bytes a weight and 4 bytes for each block of 64.
_LIKE_NF4 = (
    "weights (0.52 bytes each in groups of 128) are simulated as bitsandbytes' NF4 (0.5625 bytes each), and what its "
    "kernels unpack as one matrix in 16 bits"
)
QUANTISED = {
    "gptq": f"GPTQ's {_LIKE_NF4}",
    "awq": f"AWQ's {_LIKE_NF4}",
    "aqlm": "AQLM's weights of 2 bits are simulated as bitsandbytes' NF4 (4.5 bits each): an upper bound",
}
# Optimizers by transformers' own names (training_args.py, OptimizerNames) whose states are simulated.
OPTIMIZERS = (
    "adamw_torch", "adamw_torch_fused", "adafactor", "adamw_torch_4bit", "adamw_torch_8bit", "ademamix", "sgd",
    "adagrad", "adamw_bnb_8bit", "adamw_8bit", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
    "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
    "rmsprop", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "stable_adamw", "schedule_free_adamw",
    "schedule_free_radam", "schedule_free_sgd",
)  # fmt: skip
_RENAMED = {"adamw_hf": "adamw_torch"}  # removed from transformers; the same states


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKeys:
    """The keys of one tool: refused ones with the reason, noted ones with their effect, and those without effect."""

    refused: Mapping[str, str] = field(default_factory=dict)
    noted: Mapping[str, str]
    without_effect: frozenset[str]
    plugins: Mapping[str, str] = field(default_factory=dict)  # Axolotl's, by their class: the effect, or ""

    def take(self, draft: Draft) -> None:
        """Name those that have an effect, and ignore those that have none."""
        draft.name(self.noted)
        draft.ignore(self.without_effect)


def keys_of(tool: str) -> ToolKeys:
    """The keys of a tool by its name, or of "transformers"."""
    return _all()[tool]


@cache
def _all() -> Mapping[str, ToolKeys]:
    text = resources.files("autofit.frontends").joinpath("keys.yaml").read_text(encoding="utf-8")
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (a SafeLoader)
    return {
        tool: ToolKeys(**{**keys, "without_effect": frozenset(keys["without_effect"].split())})
        for tool, keys in content.items()
    }


def take(draft: Draft) -> None:
    """Take the keys that mean what they mean in transformers, and ignore or name the others. Not the batch's."""
    keys = keys_of("transformers")
    draft.refuse(keys.refused)
    draft.same(*SAME)
    take_optimizer(draft, "optim", "adafactor" if draft.is_on("adafactor") else "adamw_torch_fused")
    keys.take(draft)


def take_quantised(draft: Draft, method: str, compute: str) -> None:
    """A model that is quantised already, by `method`, as one of bitsandbytes in 4 bits."""
    draft.put("load_in_4bit", True, "quantization_bit")
    draft.put("use_bnb_nested_quant", False)
    draft.put("bnb_4bit_quant_type", "nf4")
    draft.put("bnb_4bit_quant_storage", compute)
    draft.note(QUANTISED[method])


def take_optimizer(draft: Draft, key: str, usual: str) -> None:
    """The optimizer that `key` names. Raises ConfigError for one whose states are not simulated."""
    name = draft.text(key, usual) or usual
    name = _RENAMED.get(name, name)
    if name not in OPTIMIZERS:
        raise ConfigError(f"{key}: the states of the optimizer {name} are not simulated{nearest(name, OPTIMIZERS)}")
    draft.put("optim", name, key)


# -- evaluation within a training: how many samples at once ------------------------------------------------------------

_SAMPLES = "per_device_eval_batch_size"


def asks_for_evaluation(draft: Draft) -> bool:
    """Whether the file has a strategy of evaluation, by transformers' key of today or of before 2024."""
    given = draft.given
    return evaluates({"eval_strategy": given.get("eval_strategy", given.get("evaluation_strategy"))})


def take_evaluation(draft: Draft, trainer: str, *, key: str = _SAMPLES, usual: int) -> None:
    """Let the recipe evaluate as many samples at once as `key` says; `usual` ones where the file has none.

    A trainer that generates evaluates whole groups, which the tools make in ways of their own: a note.
    """
    samples = draft.whole(key, usual)
    if trainer in ("grpo", "rloo"):
        draft.note(f"evaluation is not simulated: {samples} completions at once ({key})")
        return
    draft.values["eval_strategy"] = "epoch"  # whenever it is, it takes the same
    draft.put(_SAMPLES, samples, key)
