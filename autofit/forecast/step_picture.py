"""The picture of one optimizer step: its bytes by category as they come and go, the phases, and the limit."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autofit.plugin.protocol import IN_ORDER
from autofit.probing.result import PhasePeak, ProbeResult
from autofit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {  # as the page of `autofit web` has them (web/page/page.css)
    "weights": "#86b9ee", "gradients": "#f4b860", "optimizer": "#cfaeea", "activations": "#7fd6a4",
    "logits": "#f59a96", "KV cache": "#6fd0d6", "temporaries": "#e9d86f", "workspace": "#d9bd97",
}  # fmt: skip
_INK, _OTHER, _LIMIT = "#1b1f24", "#b7c2b1", "#b3261e"
_NAMED_PHASE_FRAC = 0.07  # of the picture's width: a shorter phase has no room for its name
_LETTER_FRAC = 0.0075  # of the picture's width: a letter of a name
_EDGE_FRAC = 0.08  # of the picture's width: a name nearer to an edge is cut
_NAMED_FRAC = 0.04  # of the picture's height: a lower part of a bar has no room for its name


def in_order(phases: Sequence[PhasePeak]) -> list[PhasePeak]:
    """The phases in the order of a step; they are measured in another one where the update is rehearsed first."""
    places = {name: place for place, name in enumerate(IN_ORDER)}
    return sorted(phases, key=lambda phase: places.get(phase.name, len(places)))


def categories_of(phases: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The names of the categories in the phases, each once."""
    return list(dict.fromkeys(name for categories in phases.values() for name in categories))


def memory_figure(result: ProbeResult, limit_bytes: int | None, *, what: str = "") -> "Figure":
    """Allocated GB by category over one step, or at each phase's peak if its course is unknown; the limit as a line.

    Names stand in the areas, so that no legend is needed. `what` was run stands before the device in the title.
    """
    from autofit.picture import Picture

    figure = Picture(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    top = max((sum(held.values()) / 1e9 for held in _held(result).values()), default=1.0)
    near = limit_bytes if limit_bytes is not None and limit_bytes / 1e9 < 3 * top else None  # else the bytes are a line
    height = 1.12 * max(top, (near or 0) / 1e9)
    (_draw_course if result.course else _draw_phases)(axes, result, height)
    if near is not None:
        limit = near / 1e9
        axes.axhline(limit, color=_LIMIT, linestyle="--", linewidth=1)
        words = f"limit {format_bytes(near)} "
        axes.text(1.0, limit, words, color=_LIMIT, ha="right", va="bottom", fontsize=9,
                  transform=axes.get_yaxis_transform())  # fmt: skip
    axes.set(ylim=(0, height))
    title = ", ".join(part for part in (what, result.device_name, str(result.fidelity)) if part)
    axes.set_title(title, loc="left", fontsize=11, pad=22 if axes.get_legend() else 6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _held(result: ProbeResult) -> Mapping[str, Mapping[str, int]]:
    """Bytes by phase and category; of a measured run, which lacks categories, all as one."""
    return result.categories or {p.name: {"allocated": p.peak_allocated_bytes} for p in result.phases}


def _draw_course(axes: Any, result: ProbeResult, height: float) -> None:
    """The areas of the last step, each with its name where it has room; the others stand beside the title."""
    live = {name: [mib * 2**20 / 1e9 for mib in values] for name, values in result.course["live"].items()}
    parts = len(next(iter(live.values())))
    places = range(parts + 1)
    below, texts, unnamed = [0.0] * parts, list[tuple[float, float]](), []
    for name in (name for name in categories_of(result.categories) if name in live):
        above = [b + h for b, h in zip(below, live[name], strict=True)]
        area = axes.fill_between(places, [*below, below[-1]], [*above, above[-1]], step="post", linewidth=0,
                                 color=_COLOURS.get(name, _OTHER), label=name)  # fmt: skip
        long = round(_LETTER_FRAC * len(name) * parts)
        middles = [(at + 0.5, (below[at] + above[at]) / 2, live[name][at]) for at in _wide(live[name], long)]
        free = [
            (x, y) for x, y, tall in middles
            if tall > _NAMED_FRAC * height
            and _EDGE_FRAC * parts < x < (1 - _EDGE_FRAC) * parts
            and all(abs(x - u) > 0.15 * parts or abs(y - v) > _NAMED_FRAC * height for u, v in texts)
        ]  # fmt: skip
        if free:
            axes.text(*free[0], name, ha="center", va="center", fontsize=9, color=_INK)
            texts.append(free[0])
        else:
            unnamed.append(area)
        below = above
    axes.step(places, [*below, below[-1]], where="post", color=_INK, linewidth=0.8)
    peak = max(range(parts), key=below.__getitem__)
    axes.annotate(f"{below[peak]:.1f} GB", (peak + 0.5, below[peak]), xytext=(0, 4), textcoords="offset points",
                  ha="center", fontsize=9, color=_INK)  # fmt: skip
    if unnamed:
        axes.legend(handles=unnamed, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(unnamed), frameon=False,
                    fontsize=9, handlelength=1.0, columnspacing=1.0, borderaxespad=0.2)  # fmt: skip
    _draw_phases_of_step(axes, result.course["phases"], parts)
    axes.set(ylabel="GB allocated", xlim=(0, parts), xticks=[])


def _wide(values: Sequence[float], least: int) -> list[int]:
    """The middles of stretches of `least` places with at least half of the most; the longest, and then the first."""
    most, found, start = max(values), list[tuple[int, int]](), 0
    for place, value in enumerate([*values, -1.0]):
        if value < most / 2:
            if place - start >= max(1, least):
                found.append((start - place, (start + place - 1) // 2))
            start = place + 1
    return [middle for _, middle in sorted(found)]


def _draw_phases_of_step(axes: Any, phases: Sequence[Sequence[Any]], parts: int) -> None:
    """Lines between the phases of a step, and below each its name and seconds, where these have room."""
    merged: list[tuple[str, int, float]] = []
    for name, first, seconds in phases:
        if merged and merged[-1][0] == name:
            merged[-1] = (name, merged[-1][1], merged[-1][2] + seconds)
        else:
            merged.append((name, first, seconds))
    for (name, first, seconds), end in zip(merged, [*(m[1] for m in merged[1:]), parts], strict=True):
        if first:
            axes.axvline(first, color=_INK, linewidth=0.5, alpha=0.4)
        if end - first >= _NAMED_PHASE_FRAC * parts and name in IN_ORDER:
            axes.text((first + end) / 2, -0.02, f"{name}\n{format_seconds(seconds)}", ha="center", va="top", fontsize=9,
                      color=_INK, transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xlabel("allocations and frees of one step, in order", labelpad=34, fontsize=9)


def _draw_phases(axes: Any, result: ProbeResult, height: float) -> None:
    """A bar for each phase, in the order of a step."""
    held = _held(result)
    names = [p.name for p in in_order(result.phases) if p.name in held]
    below = [0.0] * len(names)
    for category in categories_of(held):
        heights = [held[name].get(category, 0) / 1e9 for name in names]
        axes.bar(names, heights, bottom=below, color=_COLOURS.get(category, _OTHER), edgecolor="white", linewidth=0.5)
        for place, tall in enumerate(heights):
            if tall > _NAMED_FRAC * height:
                axes.text(place, below[place] + tall / 2, category, ha="center", va="center", fontsize=9, color=_INK)
        below = [b + h for b, h in zip(below, heights, strict=True)]
    for place, each in enumerate(below):
        axes.text(place, each, f"{each:.{1 if each >= 1 else 2}f}\n", ha="center", va="center", fontsize=9, color=_INK)
    axes.set(ylabel="GB allocated at the peak of a phase")
