"""One thing that is wrong with a launch, and what is asked to find it. No torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import cast

from autofit.recipe.launch import Launch, is_on
from autofit.recipe.launch_places import place
from autofit.recipe.recipe import Recipe


class Severity(StrEnum):
    ERROR = "error"  # it does not train, or not on these ranks
    WARNING = "warning"  # it trains, and costs memory, time or a checkpoint
    NOTE = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong: where it stands, what happens, and what to change."""

    severity: Severity
    where: str  # the file and the key
    what: str
    fix: str

    @property
    def stops(self) -> bool:
        """Whether the training does not run as asked."""
        return self.severity is Severity.ERROR

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A recipe with its launch, and what the user's own files said before they were read.

    `values` is the recipe as it stands in `file`, `config` the accelerate config in the file `config_name` ({} without
    one); `cards_here` are the cards of this machine, `card` the model of the card that is trained on (as autofit names
    it), where it is known.
    """

    recipe: Recipe
    file: str = "the recipe"
    values: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    config_name: str = "the accelerate config"
    num_processes: int | None = None  # of the command line
    card: str = ""
    cards_here: int = 0

    @property
    def launch(self) -> Launch:
        return self.recipe.launch

    def section(self, name: str) -> Mapping[str, object]:
        """A section of the accelerate config, such as fsdp_config, with what the recipe changes; {} without it."""
        found = {**self.config, **self.launch.config}.get(name)
        return cast("Mapping[str, object]", found) if isinstance(found, Mapping) else {}

    def value(self, key: str) -> object:
        """The recipe's value of a key, defaults included."""
        return self.recipe.resolved.get(key, self.recipe.values.get(key))

    @property
    def gathered_bytes(self) -> int | None:
        """Bytes of all weights as FSDP gathers them: in the dtype of mixed precision."""
        weights, dtype = self.recipe.weights_bytes, str(self.value("dtype") or "float32")
        halved = dtype == "float32" and any(is_on(self.value(key)) for key in ("bf16", "fp16"))
        return weights // 2 if halved and weights is not None else weights

    def in_recipe(self, key: str) -> str:
        return f"{self.file}: {key}"

    def in_config(self, key: str) -> str:
        """Where the user says a key of an accelerate config: there, or in the recipe."""
        if key == "num_processes" and self.num_processes is not None:
            return "--num_processes"
        return place(key, self.values, file=self.file, config=self.config, config_name=self.config_name)
