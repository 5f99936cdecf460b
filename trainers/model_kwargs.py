"""Settings of the model that a recipe may also give inside `model_init_kwargs`, where they win over top-level keys."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache

from .names import installed
from .scripts import is_trls, script
from .trl_config import TrlConfig, parse, plain

_KEY = "model_init_kwargs"
_TOP_LEVEL = {"attn_implementation": "attn_implementation", "dtype": "dtype", "revision": "model_revision"}
_OLDER = "torch_dtype"  # from_pretrained takes it where it is given no dtype


def at_top_level(
    trainer: str, values: Mapping[str, object], config: TrlConfig, changed: Collection[str]
) -> tuple[dict[str, object], tuple[str, ...]]:
    """(`values` with these settings as top-level keys, a sentence for each that moved).

    The `changed` keys are given besides the recipe, so its `model_init_kwargs` do not win over them.
    Without `model_init_kwargs` altogether where the installed `trl <trainer>` does not use them (TRL 1.14).
    """
    inner = dict(getattr(config.training, _KEY, None) or {})
    kept = {key: value for key, value in values.items() if key != _KEY}
    if not inner:
        return kept, ()
    if not used_by_script(trainer):
        return kept, (f"{_KEY} is left out: `trl {trainer}` of {installed()} does not use it",)
    moved = {top: plain(inner.pop(name)) for name, top in _TOP_LEVEL.items() if name in inner}
    if _OLDER in inner:
        older = plain(inner.pop(_OLDER))
        known = moved.get("dtype", config.model.dtype)
        moved["dtype"] = older if known is None else known
    moved = {top: value for top, value in moved.items() if top not in changed}
    notes = tuple(f"{_KEY} sets {top} too; {installed()} uses {value}, kept as {top}" for top, value in moved.items())
    return {**kept, **moved, **({_KEY: plain(inner)} if inner else {})}, notes


@cache
def used_by_script(trainer: str) -> bool:
    """Whether TRL's own script passes a recipe's `model_init_kwargs` on; it does so before it asks for a dataset."""
    if not is_trls(trainer):
        return False
    own = script(trainer)
    config = parse(trainer, {"use_cpu": True, "bf16": False, _KEY: {"revision": "asked"}}, overrides={})
    with suppress(ValueError):  # neither `datasets` nor `dataset_name`
        own.main(config.script, config.training, config.model, config.datasets)
    return bool(config.training.model_init_kwargs["revision"] == "asked")
