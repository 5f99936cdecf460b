"""Which values of the knobs `launch.*` go together: those that a Launch can have. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from autofit.errors import ConfigError
from autofit.recipe.launch import LAUNCH, Launch
from autofit.space.knob import SERVER_RANKS, SHARED, Knob, Value

_MILDEST: dict[str, Value] = {"launch.offload": "none"}  # what goes with every sharding


@dataclass(frozen=True)
class Launches:
    """The launches that the `knobs` of a space can make of the recipe's `own`."""

    own: Launch
    knobs: Sequence[Knob]
    _known: dict[tuple[object, ...], tuple[Value, ...]] = field(default_factory=dict)

    @property
    def divide_cards(self) -> bool:
        """Whether a knob divides the cards between training and a vLLM server."""
        return any(knob.name == SERVER_RANKS for knob in self.knobs)

    def ranks(self, server_ranks: Value) -> int:
        """Ranks that train beside so many of a server."""
        return self.own.cards - cast(int, server_ranks)

    def possible(self, place: int, values: tuple[Value, ...], before: Mapping[str, Value]) -> tuple[Value, ...]:
        """Those of `values` of the knob at `place` with which there is a launch, given the knobs `before` it.

        The knobs below it may still change. Where none is possible, the value that goes with every launch.
        """
        name = self.knobs[place].name
        given = tuple((key, value) for key, value in before.items() if key.startswith(SHARED))
        if (name, values, given) not in self._known:
            below = {k.name: _MILDEST[k.name] for k in self.knobs[place + 1 :] if k.name in _MILDEST}
            found = tuple(v for v in values if self._exists(below | dict(given) | {name: v}))
            self._known[name, values, given] = found or ((_MILDEST[name],) if name in _MILDEST else values)
        return self._known[name, values, given]

    def _exists(self, changed: Mapping[str, Value]) -> bool:
        new: dict[str, object] = {name.removeprefix(SHARED): value for name, value in changed.items()}
        if SERVER_RANKS in changed:
            new["ranks"] = self.ranks(changed[SERVER_RANKS])
        try:
            Launch.of({LAUNCH: {**self.own.to_values(), **new}})
        except ConfigError:
            return False
        return True
