"""A file of another tool, as the recipe of one of our trainers that trains as that tool would. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A recipe made from a file of another tool: its trainer and values, and what the reader of it should know.

    `launch` holds the keys of an accelerate config, {} where the file starts one process by itself. `keys` has the
    tool's own name of a recipe's key, so that answers can be given in the user's words. `defaults` are the tool's own
    keys and values that count and that the file does not say.
    """

    tool: str  # "LLaMA-Factory"
    trainer: str  # "hf", "grpo", "verl", ...
    values: Mapping[str, object]  # as the YAML of that trainer has them
    launch: Mapping[str, object] = field(default_factory=dict)
    ranks: int | None = None  # None: the file does not say
    prompt_tokens: int | None = None  # of the synthetic sample that stands for the tool's data
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()  # keys of the recipe that the tool takes no other value of beside the others
    notes: tuple[str, ...] = ()  # what the tool does otherwise, and what is not simulated, a sentence each
