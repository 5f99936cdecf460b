"""`autofit.estimate`: one config on a simulated card."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from autofit.api.arguments import at_least_one, named_as_arguments, seconds, size
from autofit.api.events import Event, OnEvent, silent
from autofit.api.reading import Given, describe_device, fork_server, read_recipe, source_of
from autofit.api.tables import Shown
from autofit.forecast.advice import Advice
from autofit.forecast.estimate import Estimator, advice_lines, estimate_json, estimate_table, phases_figure
from autofit.hardware.hardware import Device, choose_device_and_target
from autofit.probing.prepare import worst_case_path
from autofit.probing.result import PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Shown):
    """What a simulated card says of one config. `str` of it is a table of phases by category and what dominates."""

    recipe: Recipe
    device: Device  # sim: and the card
    capacity_bytes: int  # what may be used of it
    result: ProbeResult  # every figure of the simulated probe
    advice: Advice | None = None  # what would make it fit; None where it fits or was not asked for

    @property
    def fits(self) -> bool:
        """Whether a step, a save and a resume stay within the capacity."""
        return self.result.status is ProbeStatus.FIT

    @property
    def device_used_bytes(self) -> int | None:
        """Bytes that the driver would report: the allocator's, and the context."""
        return self.result.device_used_bytes

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Most bytes of live tensors."""
        return self.result.peak_allocated_bytes

    @property
    def least_capacity_bytes(self) -> int | None:
        """Bytes of the smallest card on which it would run."""
        return self.result.least_capacity_bytes

    @property
    def step_s(self) -> float | None:
        """Seconds of one optimizer step; None where it ran out of memory before its end."""
        return self.result.median_step_s

    @property
    def phases(self) -> tuple[PhasePeak, ...]:
        """The peak of each phase: load, rollout, scoring, update, optimizer."""
        return self.result.phases

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit estimate --json` prints: plain values only."""
        return estimate_json(self.result, self.capacity_bytes, self.advice)

    def parts(self) -> list[Table | str]:
        """The phases by category, whether it fits, and what would make it fit."""
        table, sentence = estimate_table(self.result, self.capacity_bytes)
        more = [] if self.advice is None else advice_lines(self.advice, self.recipe, self.capacity_bytes)
        return [table, sentence, *more]

    def plot(self) -> "Figure":
        """A matplotlib Figure of the bytes (in GB) by category at each phase's peak, and the capacity."""
        return phases_figure(self.result, self.capacity_bytes)


def estimate(
    recipe: Given | None = None, *,
    gpu: str | None = None,
    target_vram: str | float | None = None,
    trainer: str | None = None,
    changes: Mapping[str, object] | None = None,
    prompt_tokens: int | None = None,
    advice: bool = True,
    deadline: str | float = "15m",
    on_event: OnEvent | None = None,
) -> Estimate:  # fmt: skip
    """Peak bytes by phase and category and the seconds of a step, of one config on a simulated card.

    `recipe`, `trainer`, `changes` and `prompt_tokens` are as `autofit.search` takes them. `gpu` names the card, else
    the size of `target_vram` does (bytes, or text such as "40GB"), which also is how much of it may be used. Where it
    does not fit, `advice` looks for the cheapest changes that do. `deadline` (seconds, or "15m") bounds it.

    Raises ConfigError for a recipe or a card that cannot be, and EnvironmentFault when the simulation fails.
    """
    with named_as_arguments(), tempfile.TemporaryDirectory(prefix="autofit-estimate-") as temporary:
        at_least_one("--prompt-tokens", prompt_tokens)
        device, capacity = choose_device_and_target("sim", gpu, size("--target-vram", target_vram))
        deadline_s = seconds("--deadline", deadline) or 0
        folder = Path(temporary)
        server = fork_server(folder)
        try:
            stated = read_recipe(
                source_of(recipe), trainer=trainer, device=device, scratch=folder / "inspection", server=server,
                changes=changes, prompt_tokens=prompt_tokens,
            )  # fmt: skip
            stated.check()
            where = describe_device(device, capacity)
            tell = on_event or silent
            tell(Event(text=f"{stated.model} on {where}"))
            for note in stated.notes:
                tell(Event(label="note", text=note))
            estimator = Estimator(
                recipe=stated, device=device, capacity_bytes=capacity, folder=folder / "probes", server=server,
                worst_case=worst_case_path(folder / "inspection"), deadline_s=deadline_s,
            )  # fmt: skip
            result = estimator.estimate()
            for note in result.notes:
                tell(Event(label="note", text=note))
            found = None if result.status is ProbeStatus.FIT or not advice else estimator.advice()
        finally:
            server.close()
    return Estimate(recipe=stated, device=device, capacity_bytes=capacity, result=result, advice=found)
