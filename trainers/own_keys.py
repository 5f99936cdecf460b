"""Keys of its own for a trainer that is otherwise one of TRL's."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, ClassVar, get_type_hints

from autofit.errors import ConfigError
from autofit.plugin.protocol import Facts, Inspection
from autofit.recipe.yaml_file import accepts, readable

from .trl import TrlTrainer
from .trl_config import TrlConfig


class OwnKeys(TrlTrainer):
    """A mixin for one of TRL's trainers whose recipes have more keys: `settings` is a dataclass of these.

    They go around TRL's parser; `own(config)` has them again. A recipe with them is no longer TRL's own, so no command
    of TRL runs it, and no trace of few layers stands for all that the trainer loads.
    """

    settings: ClassVar[type]

    def own(self, config: TrlConfig) -> Any:
        """The settings of a parsed recipe. Raises ConfigError where one is missing."""
        return self.read(getattr(config.training, "own_keys", {}))

    def read(self, given: Mapping[str, object]) -> Any:
        """The settings of these values. Raises ConfigError that names every wrong or missing one."""
        hints = get_type_hints(self.settings)
        wrong = [
            f"{key} must be {readable(hints[key])}; got {value!r}"
            for key, value in given.items()
            if not accepts(value, hints[key])
        ]
        needed = [f.name for f in fields(self.settings) if f.default is MISSING and f.default_factory is MISSING]
        wrong += [f"{name} is missing" for name in needed if name not in given]
        if wrong:
            raise ConfigError("; ".join(wrong))
        return self.settings(**given)

    def parse(self, values: Mapping[str, object], *, overrides: Mapping[str, object]) -> TrlConfig:
        rest, own = self._split(values)
        config = super().parse(rest, overrides=overrides)
        config.training.own_keys = own
        return config

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        rest, own = self._split(values)
        settings = self.read(own)
        facts = super().inspect(rest, inspection)
        return replace(
            facts, values={**facts.values, **own}, resolved={**facts.resolved, **asdict(settings)}, command=None,
            forecasts=False,
        )  # fmt: skip

    def _split(self, values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
        """(the keys of TRL, those of this trainer)."""
        names = {field.name for field in fields(self.settings)}
        rest = {key: value for key, value in values.items() if key not in names}
        return rest, {key: value for key, value in values.items() if key in names}
