"""Mass models of structures, and predictions of structures that lack one, phase by phase.

The recipe's own structure has a model of all variables. Others have *sketches*: models of the micro-batch alone, at the
recipe's own completion length and rank, which take a fifth of the traces. What a structure adds to the bytes of a
phase, and the factor of a segment's seconds, are those of its sketch over the sketch of the recipe's own structure. A
structure without a sketch starts from the nearest one that has, and takes the effect of each other setting from a pair
of sketches that differ in it alone.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from autofit.errors import EnvironmentFault
from autofit.fakegpu.formula.formula import Floats, MassModel
from autofit.files import read_json, write_json
from autofit.forecast.evaluation import Engine, Evaluated, Parts, Sketched, passes, plain
from autofit.forecast.predictions import LARGE, LATER, Setting, Shape, Structure, differences, variables
from autofit.hardware import calibration
from autofit.hardware.hardware import host_memory_bytes, threads_of_each
from autofit.plugin.protocol import UPDATE
from autofit.probing.fork_server import ForkServer
from autofit.probing.job import by_content, code_hash
from autofit.recipe.keys import BatchKeys

# -- mass models of structures: built in the fork server, kept on disk ------------------------------------------------

EXACT_SHARE = 1e-4  # a model with a larger hold-out error (relative) rules out no candidate
SECONDS_SHARE = 0.05  # the same of the seconds of an update
_DEADLINE_S = 300.0
_MOST_PROCESSES = 3  # that trace one structure, of five to eight traces
_PROCESS_BYTES = 2 << 30  # memory of the machine for each of them
_OF_LOSS = (LARGE,)  # settings that change the loss alone, which is beside the layers
_UNREAD = ("output_dir", "run_name", "logging_dir", "seed", "learning_rate", "max_steps", "num_train_epochs")

Request = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """Outcome for one structure: its mass model, or the reason why there is none."""

    model: MassModel | None = None
    layers: int = 0  # of the architecture
    mismatch: float = 0.0  # relative error of the bytes at the hold-out, which has all layers
    seconds_mismatch: float = 0.0  # and of the seconds of its update: below 0 where the forecast is too fast
    evaluated: Evaluated | None = None  # where the model's phases have no evaluation, and the recipe does evaluate
    reason: str = ""
    crashed: bool = False  # whether the reason is an error of the training itself

    @property
    def problem(self) -> str:
        """Reason why the model must keep all candidates; "" if it may exclude some."""
        if self.model is None:
            return self.reason
        off = []
        if self.mismatch > EXACT_SHARE:
            off.append(f"took {self.mismatch:.2%} more or less memory than was forecast")
        if abs(self.seconds_mismatch) > SECONDS_SHARE:
            way = "short" if self.seconds_mismatch < 0 else "long"
            off.append(f"had an update that was forecast {abs(self.seconds_mismatch):.0%} too {way}")
        return f"a training traced as a test {', and '.join(off)}" if off else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Makes the mass models that are requested, `workers` at once, or reads them from the folder `kept`.

    None is begun after the moment `until` (time.monotonic), if that is given.
    """

    worst_case: Path
    server: ForkServer
    scratch: Path
    kept: Path
    workers: int = 2
    until: float = math.inf

    def make(
        self, whole: Mapping[Structure, Request], sketches: Mapping[Structure, Request]
    ) -> tuple[dict[Structure, Made], dict[Structure, Made]]:
        """Outcomes of the requests of each kind; the whole ones, which take longer, begin first.

        After a Ctrl-C the running traces stop too.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        names = [_key(request, self.worst_case) for request in (*whole.values(), *sketches.values())]
        requests = dict(zip(names, (*whole.values(), *sketches.values()), strict=True))  # alike ones are made once
        at_once = max(1, min(self.workers, len(requests)))
        made_by = partial(self._made, processes=processes(at_once))
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                found = dict(zip(requests, pool.map(made_by, requests.values()), strict=True))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._cancel.touch()
                raise
        made = [found[name] for name in names]
        return dict(zip(whole, made, strict=False)), dict(zip(sketches, made[len(whole) :], strict=True))

    @property
    def _cancel(self) -> Path:
        return self.scratch / "cancel"

    def _made(self, request: Request, *, processes: int) -> Made:
        name = _key(request, self.worst_case)
        kept = self.kept / name
        found = _read(kept)
        if found is None:
            if time.monotonic() > self.until:
                return Made(reason="the time for predictions was over")
            folder = self.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            told = {"answer": str(folder / "model.json"), "processes": processes}
            write_json(folder / "request.json", {**request, **told})
            try:
                self.server.call(
                    {
                        "entry": "autofit.forecast.worker:run", "argument": str(folder / "request.json"),
                        "cwd": str(Path.cwd()), "log": str(folder / "forecast.log"), "env": {},
                        "deadline_s": _DEADLINE_S, "cancel": str(self._cancel),
                    }
                )  # fmt: skip
            except EnvironmentFault as error:
                return Made(reason=str(error))
            found = _read(folder)
            if found is None:
                return Made(reason=_reason(folder), crashed="error" in (read_json(folder / "model.json") or {}))
            keep(folder, kept)
        return found


def processes(at_once: int) -> int:
    """Processes for each of so many structures that are traced at once, by the machine's cores and memory."""
    return max(1, min(_MOST_PROCESSES, threads_of_each(at_once), host_memory_bytes() // _PROCESS_BYTES // at_once))


def _read(folder: Path) -> Made | None:
    """Outcome of an earlier trace, if there is one that still counts."""
    answer = read_json(folder / "model.json")
    if answer is None or "error" in answer:
        return None
    if "refused" in answer:
        return Made(reason=str(answer["refused"]))
    if not (folder / "model.npz").exists():
        return None
    return Made(
        model=MassModel.load(folder / "model.npz"), layers=int(str(answer["layers"])),
        mismatch=float(str(answer["mismatch"])), seconds_mismatch=float(str(answer["seconds_mismatch"])),
        evaluated=Evaluated(**cast(dict[str, Any], answer["evaluated"])) if answer["evaluated"] else None,
    )  # fmt: skip


def _reason(folder: Path) -> str:
    """Why a trace failed, as its worker said."""
    answer = read_json(folder / "model.json") or {}
    return f"a trace failed: {answer.get('error', f'no answer within {_DEADLINE_S:.0f} s')}"


def keep(folder: Path, kept: Path) -> None:
    """Move a model to the folder where the next search finds it. Ignores a full disk or another search's copy."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(kept)
    except OSError:
        pass


def _key(request: Request, worst_case: Path) -> str:
    """A hash of all inputs of a mass model: the traced recipe, and the code that traces it."""
    keys = BatchKeys.from_json(cast(Mapping[str, "str | None"], request["keys"]))
    unread = (*_UNREAD, *variables(keys))
    values = by_content({k: v for k, v in cast(Mapping[str, object], request["values"]).items() if k not in unread})
    rest = {k: v for k, v in request.items() if k not in ("values", "worst_case", "answer")}
    parts = [values, rest, code_hash(), read_json(worst_case), calibration.fingerprint(str(request["device"]))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


# -- structures without a mass model of their own, phase by phase -----------------------------------------------------


class PredictionSource(StrEnum):
    """Source of the prediction of a structure."""

    WHOLE = "whole"  # a model of this structure, of all variables
    SKETCHED = "sketched"  # a sketch of this structure
    COMPOSED = "composed"  # the effects of single settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The prediction of one structure for several shapes."""

    parts: Parts
    least_live_bytes: Floats  # what it may need if the effects do not add up but multiply; surely, of a whole model
    source: PredictionSource

    @property
    def live_bytes(self) -> Floats:
        return self.parts.live_bytes


def pairs(own: Structure, structures: Sequence[Structure]) -> dict[Setting, tuple[Structure, Structure]]:
    """{setting that differs from the recipe's: (a structure with it, the same without)}, to see its effect alone.

    The structure has the fewest other changes: a setting that only exists beside another is compared with that other.
    """
    nearest: dict[Setting, tuple[int, Structure]] = {}
    for structure in structures:
        found = differences(structure, own)
        for name, value, _ in found:
            if (name, value) not in nearest or len(found) < nearest[name, value][0]:
                nearest[name, value] = len(found), structure
    known = {*structures, own}
    result = {}
    for (name, value), (_, with_it) in nearest.items():
        without = tuple((n, dict(own)[n] if n == name else v) for n, v in with_it)
        result[name, value] = with_it, without if without in known else own
    return result


@dataclass(frozen=True, kw_only=True)
class Composer:
    """Predictions of every structure: `whole` and `sketches` are the models so far, by structure."""

    own: Structure
    pairs: Mapping[Setting, tuple[Structure, Structure]]
    sketches: dict[Structure, Made]
    whole: Mapping[Structure, Made]
    completion: int  # of the sketches
    chunks: Callable[[Structure], int]  # micro-batches of a rollout of a structure's sketch
    prompt_tokens: int = 0  # of the longest prompt
    joint: Collection[frozenset[str]] = ()  # pairs of settings of which one decides what the other does

    def told(self, structure: Structure, shapes: tuple[Shape, ...]) -> Told | None:
        """The prediction, unless a model or the effect of a setting is missing."""
        structure = self.plain(structure)
        start = structure if structure in self.whole else self.own
        made = self.whole[start]
        if made.model is None:
            return None
        parts = self._parts(start, shapes)
        if structure == start:
            engine, prompt = made.model.engine, self.prompt_tokens
            sure = parts.with_evaluated(made.evaluated, least=True).with_engine(engine, prompt)
            whole = parts.with_engine(engine, prompt)
            return Told(parts=whole, least_live_bytes=sure.live_bytes, source=PredictionSource.WHOLE)
        if (effects := self._effects(structure, shapes)) is None:
            return None
        seconds, engine = dict(parts.seconds), made.model.engine
        for before, after in sorted(effects, key=lambda pair: not _new(parts.seconds, *(s.seconds for s in pair))):
            _change_seconds(seconds, before.seconds, after.seconds, shapes)
            engine = _changed_engine(engine, before.engine, after.engine)
        for before, after in self._losses(structure, shapes) if structure not in self.sketches else ():
            _add_seconds(seconds, before.seconds, after.seconds, shapes)
        added = self._composed(changed_bytes(parts.peaks, effects), seconds, shapes, engine)
        live = added.live_bytes
        if structure in self.sketches:
            return Told(parts=added, least_live_bytes=live, source=PredictionSource.SKETCHED)
        multiplied = self._composed(changed_bytes(parts.peaks, effects, multiplied=True), seconds, shapes, engine)
        least = np.clip(np.minimum(live, multiplied.live_bytes), 0.0, None)
        return Told(parts=added, least_live_bytes=least, source=PredictionSource.COMPOSED)

    def _composed(
        self, peaks: Mapping[str, Floats], seconds: Mapping[str, Floats], shapes: tuple[Shape, ...],
        engine: Engine | None,
    ) -> Parts:  # fmt: skip
        return Parts(shapes=shapes, peaks=peaks, seconds=seconds).with_engine(engine, self.prompt_tokens)

    def _effects(self, structure: Structure, shapes: tuple[Shape, ...]) -> list[tuple[Sketched, Sketched]] | None:
        """Sketches (before, after) whose changes together lead from the recipe's own structure to this one.

        One setting changes after another, and each effect is taken beside those before it: two settings of which one
        decides what the other does would both have what they do together. The seconds of all have the recipe's own
        loss, but those of a sketch of this structure itself.
        """
        if structure in self.sketches and self.sketches[structure].model is None:
            return None
        if not self._traced:
            return None
        near = min(self._traced, key=lambda s: (len(differences(structure, s)), len(differences(s, self.own))))
        sketch = self._sketch if near == structure else self._with_own_loss
        found = [(self._sketch(self.own, shapes), sketch(near, shapes))]
        now = near
        for name, value, of_near in differences(structure, near):
            if of_near != dict(self.own)[name]:
                found.append(self._pair((name, of_near), shapes, near=now, sketch=sketch))
            now = tuple((n, value if n == name else v) for n, v in now)
            if value != dict(self.own)[name]:
                found.append(self._pair((name, value), shapes, near=now, sketch=sketch)[::-1])
        known = [(before, after) for before, after in found if before is not None and after is not None]
        return known if len(known) == len(found) else None

    @property
    def crashed(self) -> dict[Setting, str]:
        """{setting: the error} of settings whose sketch crashed, while the same without the setting succeeded."""
        found = {}
        for setting, (with_it, without) in self.pairs.items():
            made = self.sketches[with_it]
            if made.crashed and not self.sketches[without].crashed:
                found[setting] = made.reason
        return found

    def plain(self, structure: Structure) -> Structure:
        """`structure` less the settings that left their sketches unchanged."""
        own = dict(self.own)
        return tuple((n, own[n] if (n, v) in self._idle else v) for n, v in structure)

    @cached_property
    def _idle(self) -> frozenset[Setting]:
        """Settings whose sketch equals the one that lacks them."""
        shapes = tuple(Shape(b, 1, self.chunks(self.own), self.completion, 0) for b in (1, 4, 16, 64))
        return frozenset(setting for setting in self.pairs if _alike(*self._pair(setting, shapes)))

    def _pair(
        self, setting: Setting, shapes: tuple[Shape, ...], *, near: Structure | None = None,
        sketch: Callable[[Structure | None, tuple[Shape, ...]], Sketched | None] | None = None,
    ) -> tuple[Sketched | None, Sketched | None]:  # fmt: skip
        """The sketches (with the setting, without it) at `shapes`, as `sketch` has them; None for one that failed.

        Of several such pairs, whose other settings are alike, the one like the structure `near`.
        """
        pair = self._nearest(setting, near) if near is not None else self.pairs.get(setting, (None, None))
        with_it, without = ((sketch or self._sketch)(s, shapes) for s in pair)
        return with_it, without

    def _losses(self, structure: Structure, shapes: tuple[Shape, ...]) -> list[tuple[Sketched, Sketched]]:
        """Sketches (before, after) of the settings with which the loss of `structure` differs from the recipe's own.

        None of a setting that is sketched beside another change alone.
        """
        changed = [(name, value) for name, value, _ in differences(structure, self.own) if name in _OF_LOSS]
        pairs = [self._nearest(setting, structure) for setting in changed]
        alone = [(one, other) for one, other in pairs if one and other and len(differences(one, other)) == 1]
        found = [(self._sketch(without, shapes), self._sketch(with_it, shapes)) for with_it, without in alone]
        return [(before, after) for before, after in found if before is not None and after is not None]

    def _with_own_loss(self, structure: Structure | None, shapes: tuple[Shape, ...]) -> Sketched | None:
        """The sketch of `structure`, its seconds with the loss of the recipe's own structure.

        A loss is beside the layers: what its tiles take is the same however long those take with other settings.
        """
        sketch = self._sketch(structure, shapes)
        if structure is None or sketch is None:
            return sketch
        seconds = dict(sketch.seconds)
        for before, after in self._losses(structure, shapes):
            for segment in seconds.keys() & before.seconds.keys() & after.seconds.keys():
                less = seconds[segment] - after.seconds[segment] + before.seconds[segment]
                seconds[segment] = np.maximum(less, 0.0)
        return replace(sketch, seconds=seconds)

    def _nearest(self, setting: Setting, near: Structure) -> tuple[Structure | None, Structure | None]:
        """The pair of traced structures with `setting` and without it, otherwise alike, that is most like `near`."""
        with_it, without = self.pairs.get(setting, (None, None))
        if with_it is None or without is None:
            return with_it, without
        (name, value), own = setting, dict(self.own)
        lacking = {s: tuple((n, own[n] if n == name else v) for n, v in s) for s in self._traced}
        alike = (s for s, less in lacking.items() if dict(s)[name] == value and less in lacking)
        found = min((with_it, *alike), key=lambda s: self._apart(near, s, effect=name))
        return found, (without if found == with_it else lacking[found])

    def _apart(self, one: Structure, other: Structure, *, effect: str) -> tuple[int, int]:
        """Numbers of settings besides `effect` that differ: of those that decide what it does, and of the others."""
        names = {name for name, *_ in differences(one, other)} - {effect}
        decide = {name for name in names if frozenset((name, effect)) in self.joint}
        return len(decide), len(names - decide)

    @property
    def _traced(self) -> list[Structure]:
        return [s for s, made in self.sketches.items() if made.model is not None]

    def _sketch(self, structure: Structure | None, shapes: tuple[Shape, ...]) -> Sketched | None:
        made = None if structure is None else self.sketches.get(structure)
        if structure is None or made is None or made.model is None:
            return None
        key = structure, shapes
        if key not in self._sketched:
            self._sketched[key] = Sketched.of(
                made.model, made.layers, shapes, completion=self.completion, chunk=self.chunks(structure),
                prompt=self.prompt_tokens,
            )  # fmt: skip
        return self._sketched[key]

    def _parts(self, structure: Structure, shapes: tuple[Shape, ...]) -> Parts:
        made = self.whole[structure]
        assert made.model is not None
        key = structure, shapes
        if key not in self._of_whole:
            self._of_whole[key] = Parts.of(made.model, made.layers, shapes).with_evaluated(made.evaluated)
        return self._of_whole[key]

    @cached_property
    def _sketched(self) -> dict[tuple[Structure, tuple[Shape, ...]], Sketched]:
        return {}

    @cached_property
    def _of_whole(self) -> dict[tuple[Structure, tuple[Shape, ...]], Parts]:
        return {}


def changed_bytes(
    peaks: Mapping[str, Floats], effects: Sequence[tuple[Sketched, Sketched]], *, multiplied: bool = False
) -> dict[str, Floats]:
    """The peak of each phase if the effects on it add up, or if they multiply.

    An effect whose sketches lack a phase changes it by what it changes of the bytes that are always held. A phase that
    the recipe's own structure lacks starts from the sketch of the setting that brings it.
    """
    brought = (name for before, after in effects for name in _new(peaks, before.peaks, after.peaks))
    return {name: _changed(name, peaks, effects, multiplied=multiplied) for name in dict.fromkeys((*peaks, *brought))}


def _changed(
    phase: str, peaks: Mapping[str, Floats], effects: Sequence[tuple[Sketched, Sketched]], *, multiplied: bool
) -> Floats:
    brings = [
        place for place, (before, after) in enumerate(effects) if phase in after.peaks.keys() - before.peaks.keys()
    ]
    first = -1 if phase in peaks else brings[0]
    found = peaks[phase] if first < 0 else effects[first][1].peaks[phase]
    for place, (before, after) in enumerate(effects):
        if place == first:
            continue
        name = phase if phase in before.peaks or phase in after.peaks else plain(phase)
        has_phase = name in before.peaks or name in after.peaks
        old, new = (each.peaks.get(name, 0 * found) if has_phase else each.held_bytes for each in (before, after))
        scaled = found * new / np.maximum(old, 1.0)
        found = np.where(old > 0, scaled, found + new) if multiplied else found + new - old
    return found


def _changed_engine(engine: Engine | None, before: Engine | None, after: Engine | None) -> Engine | None:
    """`engine` with what changed from `before` to `after`, so that changes of several settings add up."""
    if type(before) is not type(after) or type(engine) is not type(after) or engine is None or after is None:
        return engine if before == after else after
    names = (each.name for each in fields(after))
    return replace(engine, **{n: value for n in names if (value := getattr(after, n)) != getattr(before, n)})


def _change_seconds(
    seconds: dict[str, Floats], before: Mapping[str, Floats], after: Mapping[str, Floats], shapes: Sequence[Shape]
) -> None:
    """Multiply each segment by the ratio of its sketches; a segment that only the setting has is added."""
    for segment in (*seconds, *_new(seconds, before, after)):
        name = segment if segment in before or segment in after else plain(segment)
        old, new = before.get(name), after.get(name)
        if old is not None:
            ratio = (0.0 if new is None else new) / np.maximum(old, 1e-12)
            seconds[segment] = seconds.get(segment, np.zeros(len(shapes))) * ratio
        elif new is not None:
            seconds[segment] = seconds.get(segment, np.zeros(len(shapes))) + passes(segment, shapes, after) * new


def _add_seconds(
    seconds: dict[str, Floats], before: Mapping[str, Floats], after: Mapping[str, Floats], shapes: Sequence[Shape]
) -> None:
    """Add to each segment the difference of its sketches."""
    for segment in seconds.keys() & before.keys() & after.keys():
        added = passes(segment, shapes, after) * (after[segment] - before[segment])
        seconds[segment] = np.maximum(seconds[segment] + added, 0.0)


def _new(known: Mapping[str, Floats], before: Mapping[str, Floats], after: Mapping[str, Floats]) -> list[str]:
    """Phases or segments that an effect brings: unknown under any suffix, or a step's further micro-batches."""
    names = {plain(name) for name in known}
    brought = [name for name in after if name not in known and name not in before]
    return [name for name in brought if plain(name) not in names or name.startswith(UPDATE + LATER)]


def _alike(one: Sketched | None, other: Sketched | None) -> bool:
    if one is None or other is None:
        return False
    return one.engine == other.engine and all(
        a.keys() == b.keys() and all(np.allclose(a[k], b[k], rtol=1e-9, atol=0) for k in a)
        for a, b in ((one.peaks, other.peaks), (one.seconds, other.seconds))
    )
