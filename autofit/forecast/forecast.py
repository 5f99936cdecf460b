"""Predictions for every candidate before the first probe: trace each structure once, then evaluate all candidates.

The candidates of a space fall into structures (the values of the knobs that change which code runs) and, within one,
into micro-batches below and above a tile of TRL's loss, and with and without padding. Each has a mass model, built by
the fork server and stored on disk under a hash of all its inputs.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np

from autofit.errors import EnvironmentFault
from autofit.fakegpu.formula.formula import Floats, MassModel
from autofit.fakegpu.formula.seconds import REPEATED
from autofit.fakegpu.specs import gpu_spec
from autofit.files import read_json, write_json
from autofit.forecast.engines import Rollout, with_engine
from autofit.forecast.predictions import Predictions
from autofit.hardware import calibration
from autofit.plugin.padding import is_padded
from autofit.probing.fork_server import ForkServer
from autofit.recipe.keys import BatchKeys
from autofit.recipe.recipe import Recipe, merge
from autofit.space.space import Candidate, Space, Value

LONGER = 4  # models are valid for completions up to this multiple of the space's longest
EXACT_SHARE = 1e-4  # a model with a larger hold-out error (relative) rules out no candidate
_DEADLINE_S = 300.0
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


@dataclass(frozen=True, slots=True)
class _Shape:
    """The values of the mass model's variables for one candidate."""

    micro: int
    accumulation: int
    chunk: int
    completion: int
    rank: int
    group: int = 1
    share: float = 0.0  # of the card, of a rollout engine
    longest: int = 0  # tokens of the longest sequence that it serves; 0 is the model's own

    @property
    def generated(self) -> int:
        return self.micro * self.chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of one structure: its mass model, or the reason why there is none."""

    model: MassModel | None = None
    layers: int = 0  # of the architecture
    mismatch: float = 0.0  # relative error at the hold-out, which has all layers
    reason: str = ""

    @property
    def problem(self) -> str:
        """Why the model rules out no candidate; "" where it may."""
        if self.model is None:
            return self.reason
        if self.mismatch > EXACT_SHARE:
            return f"a training traced as a test took {self.mismatch:.2%} more or less than was forecast"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecaster:
    """Builds mass models in the fork server, or loads them from the folder `kept`."""

    device: str
    worst_case: Path
    server: ForkServer
    scratch: Path
    kept: Path
    workers: int = 2

    def predict(self, space: Space) -> Predictions:
        """Floor bytes, device-used bytes and step seconds of the allowed candidates; unknown if a trace fails."""
        return self.forecast(space).predictions

    def forecast(self, space: Space) -> "Forecast":
        """The predictions of the allowed candidates, with the mass models behind them."""
        candidates = tuple(space.allowed())
        if not space.recipe.forecasts:
            return self._unknown(space, candidates)
        facts = read_json(self.worst_case) or {}
        shapes, structures = _sorted_out(space, candidates, facts)
        groups: dict[str, list[int]] = {}
        for place, name in enumerate(structures):
            groups.setdefault(name, []).append(place)
        requests = {name: self._request(name, space, [(candidates[p], shapes[p]) for p in places])
                    for name, places in groups.items()}  # fmt: skip
        self.scratch.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(self.workers) as pool:
            try:
                models = dict(zip(requests, pool.map(self._model, requests.values()), strict=True))
            except BaseException:  # Ctrl-C: stop the running traces too
                pool.shutdown(wait=False, cancel_futures=True)
                self._cancel.touch()
                raise
        floor = np.zeros(len(candidates))
        used, step, rollout = (np.full(len(candidates), np.nan) for _ in range(3))
        spec = gpu_spec(self.device.removeprefix("sim:"))
        problems: dict[str, int] = {}
        for name, places in groups.items():
            made = models[name]
            if made.problem:
                problems[made.problem] = problems.get(made.problem, 0) + len(places)
            if made.model is not None:
                mine = [shapes[p] for p in places]
                live, seconds, before_update = _evaluate(made.model, made.layers, mine, _prompt(facts))
                floor[places] = 0.0 if made.problem else spec.context_bytes + live
                used[places] = spec.context_bytes + live
                step[places], rollout[places] = seconds, before_update
        predictions = Predictions(
            candidates=candidates, floor_bytes=floor, device_used_bytes=used, step_s=step,
            rollout_s=rollout if space.recipe.generates else None,
        )  # fmt: skip
        return Forecast(
            space=space,
            context_bytes=spec.context_bytes,
            predictions=predictions,
            models=models,
            problems=problems,
            facts=facts,
        )

    def _unknown(self, space: Space, candidates: tuple[Candidate, ...]) -> "Forecast":
        """A forecast without predictions, for a trainer whose models cannot be traced with few layers."""
        nothing = np.full(len(candidates), np.nan)
        predictions = Predictions(
            candidates=candidates, floor_bytes=np.zeros(len(candidates)), device_used_bytes=nothing, step_s=nothing
        )
        return Forecast(
            space=space,
            context_bytes=0,
            predictions=predictions,
            models={},
            problems={"traces of few layers do not stand for this trainer's models": len(candidates)},
        )

    @property
    def _cancel(self) -> Path:
        return self.scratch / "cancel"

    def _request(self, name: str, space: Space, members: list[tuple[Candidate, _Shape]]) -> dict[str, object]:
        recipe = space.recipe
        _, large, padded = json.loads(name)
        values = merge(recipe.values, space.yaml_changes(members[0][0]))
        shapes = [shape for _, shape in members]
        hold_out = shapes[len(shapes) // 2]

        def span(numbers: list[int]) -> tuple[int, int]:
            return min(numbers), max(numbers)

        hold = {"B": hold_out.micro, "accumulation": min(hold_out.accumulation, 2 * hold_out.chunk),
                "chunk": hold_out.chunk, "r": hold_out.rank, "C": hold_out.completion}  # fmt: skip
        return {
            "trainer": recipe.trainer, "keys": recipe.keys.to_json(), "tile_tokens": recipe.tile_tokens,
            "architecture": recipe.architecture_hash, "values": values, "device": self.device,
            "worst_case": str(self.worst_case),
            "large": large, "padded": padded,
            "reused": recipe.generates and recipe.generation_batch_size > recipe.effective_batch_size,
            "varies_rank": recipe.uses_lora,
            "ranges": {
                "B": span([s.micro for s in shapes]), "G": span([s.generated for s in shapes]),
                "C": _widened(span([s.completion for s in shapes]), by=LONGER),
                "r": _widened(span([s.rank for s in shapes]), by=2),
            },
            "hold_out": hold,
        }  # fmt: skip

    def _model(self, request: Mapping[str, object]) -> Made:
        name = _key(request, self.worst_case)
        kept = self.kept / name
        found = _read(kept)
        if found is None:
            folder = self.scratch / name
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / "request.json", {**request, "answer": str(folder / "model.json")})
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
                return Made(reason=_reason(folder))
            _keep(folder, kept)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predictions of a space, and their mass models, which also evaluate candidates near the space."""

    space: Space
    context_bytes: int
    predictions: Predictions
    models: Mapping[str, Made]
    problems: Mapping[str, int]  # why nothing is ruled out: the reason, and the number of candidates
    facts: Mapping[str, Any] = field(default_factory=dict)  # of the worst case

    def of(
        self, space: Space, candidate: Candidate, *, completion_tokens: int | None = None
    ) -> tuple[float, float] | None:
        """(device-used bytes, step seconds) of a candidate of `space`, which may have more knobs than the forecast's.

        `completion_tokens` replaces the candidate's own. None if the candidate's structure was not traced.
        """
        own, ours = space.params(space.baseline), {knob.name for knob in self.space.knobs}
        params = space.params(candidate)
        if any(v != own[k] for k, v in params.items() if k not in ours and _is_structural(k, space.recipe.keys)):
            return None
        shape = _shape(space, candidate)
        if completion_tokens is not None:
            shape = replace(shape, completion=completion_tokens)
        known = {k: v for k, v in params.items() if k in ours}
        found = self.models.get(_structure(space.recipe, known, shape, self.facts))
        if found is None or found.model is None:
            return None
        live, seconds, _ = _evaluate(found.model, found.layers, [shape], _prompt(self.facts))
        return self.context_bytes + float(live[0]), float(seconds[0])


def _is_structural(knob: str, keys: BatchKeys) -> bool:
    """Whether a change of `knob` leads to another structure. False for variables of the mass model and env knobs."""
    return knob not in _variables(keys) and not knob.startswith("env.")


@cache
def _variables(keys: BatchKeys) -> tuple[str, ...]:
    """The recipe keys that are variables of a mass model."""
    named = (
        keys.micro_batch, keys.rollout, keys.accumulation, keys.completion, "lora_r", keys.group, keys.engine_share,
        keys.engine_length,
    )  # fmt: skip
    return tuple(key for key in named if key is not None)


def _structure(recipe: Recipe, params: Mapping[str, Value], shape: _Shape, facts: Mapping[str, Any]) -> str:
    """The identity of a mass model as text: the values of the structural knobs, `_is_large` and `is_padded`."""
    fixed = {k: v for k, v in params.items() if _is_structural(k, recipe.keys)}
    limit = params.get(recipe.keys.length or "", recipe.resolved.get(recipe.keys.length or ""))
    padded = is_padded(facts, shape.micro, limit if isinstance(limit, int) else None)
    return json.dumps([fixed, _is_large(recipe, shape), padded], sort_keys=True, default=str)


def _sorted_out(
    space: Space, candidates: Sequence[Candidate], facts: Mapping[str, Any]
) -> tuple[list[_Shape], list[str]]:
    """(shape, structure) of each candidate, as two lists. Cached: 10^5 candidates share few shapes and structures."""
    knobs = [knob.name for knob in space.knobs]
    keys = space.recipe.keys
    varying = [i for i, n in enumerate(knobs) if n in _variables(keys)]
    fixed = [i for i, n in enumerate(knobs) if _is_structural(n, keys)]
    shapes: dict[tuple[Value, ...], _Shape] = {}
    structures: dict[tuple[tuple[Value, ...], bool, int], str] = {}
    shape_of_each: list[_Shape] = []
    structure_of_each: list[str] = []
    for candidate in candidates:
        values = candidate.values
        variables = tuple([values[i] for i in varying])
        if (shape := shapes.get(variables)) is None:
            shape = shapes[variables] = _shape(space, candidate)
        key = tuple([values[i] for i in fixed]), _is_large(space.recipe, shape), shape.micro
        if (structure := structures.get(key)) is None:
            structure = structures[key] = _structure(space.recipe, space.params(candidate), shape, facts)
        shape_of_each.append(shape)
        structure_of_each.append(structure)
    return shape_of_each, structure_of_each


def _is_large(recipe: Recipe, shape: _Shape) -> bool:
    """Whether a micro-batch has more tokens than one tile of the loss."""
    tokens = shape.completion if recipe.generates else recipe.longest_prompt_tokens or 0
    return recipe.tile_tokens is not None and shape.micro * tokens > recipe.tile_tokens


def _widened(span: tuple[int, int], *, by: int) -> tuple[float, float]:
    """`span` widened by the factor `by` on both sides, so that the model covers the user's next changes."""
    return span[0] / by, span[1] * by


def _read(folder: Path) -> Made | None:
    """What an earlier trace made; None where there is nothing that counts another time."""
    answer = read_json(folder / "model.json")
    if answer is None or "error" in answer:
        return None
    if "refused" in answer:
        return Made(reason=str(answer["refused"]))
    if not (folder / "model.npz").exists():
        return None
    return Made(
        model=MassModel.load(folder / "model.npz"), layers=int(str(answer["layers"])),
        mismatch=float(str(answer["mismatch"])),
    )  # fmt: skip


def _reason(folder: Path) -> str:
    """Why a trace failed, as its worker said."""
    answer = read_json(folder / "model.json") or {}
    return f"a trace failed: {answer.get('error', f'no answer within {_DEADLINE_S:.0f} s')}"


def _keep(folder: Path, kept: Path) -> None:
    """Move a model to the folder where the next search finds it. Ignores a full disk or another search's copy."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(kept)
    except OSError:
        pass


def _shape(space: Space, candidate: Candidate) -> _Shape:
    micro, accumulation, chunk, _ = space.split(candidate)
    params = {**space.recipe.resolved, **space.params(candidate)}

    def number(name: str | None) -> int:
        value = cast(Value, params.get(name or ""))
        return int(value) if isinstance(value, int | float) else 0

    keys = space.recipe.keys
    share = cast(Value, params.get(keys.engine_share or ""))
    return _Shape(
        micro, accumulation, chunk, number(keys.completion), number("lora_r"), number(keys.group) or 1,
        float(share) if isinstance(share, int | float) else 0.0, number(keys.engine_length),
    )  # fmt: skip


def _prompt(facts: Mapping[str, Any]) -> int:
    """Tokens of the longest prompt."""
    return int(facts.get("longest_prompt_tokens", facts.get("prompt_tokens", 0)))


def _evaluate(model: MassModel, layers: int, shapes: list[_Shape], prompt: int = 0) -> tuple[Floats, Floats, Floats]:
    """(peak live bytes, seconds of an optimizer step, seconds before its update), each (len(shapes),).

    Equal shapes are evaluated once.
    """
    unique = list(dict.fromkeys(shapes))
    columns = np.array([(s.micro, s.generated, s.completion, s.rank, s.accumulation, s.chunk) for s in unique], float)
    values = dict(zip(("B", "G", "C", "r"), columns.T[:4], strict=True))
    accumulation, chunk = columns[:, 4], columns[:, 5]
    live = np.zeros(len(unique))
    rollouts = [
        Rollout(completions=s.generated, group=s.group, prompt=prompt, tokens=s.completion, share=s.share,
                longest=s.longest)
        for s in unique
    ]  # fmt: skip
    peaks, spent = model.peaks(values, layers), model.seconds(values, layers, values["C"])
    peaks, spent = with_engine(model.engine, rollouts, peaks, spent)
    for phase, peak in peaks.items():
        later = phase.endswith("+")  # phase in which gradients of an earlier micro-batch are alive
        happens = (accumulation > 1) if phase == "update+" else (chunk < accumulation) if later else accumulation > 0
        live = np.maximum(live, np.where(happens, peak, 0.0))
    once = np.ones(len(unique))
    often = {"update": accumulation, "optimizer": once, "between": once}
    seconds, before_update = np.zeros(len(unique)), np.zeros(len(unique))
    for segment, each in spent.items():
        each_micro = segment.endswith(REPEATED)
        total = (accumulation if each_micro else often.get(segment, accumulation / chunk)) * each
        seconds += total
        before_update += 0.0 if segment.removesuffix(REPEATED) in often else total
    order = {shape: place for place, shape in enumerate(unique)}
    places = [order[shape] for shape in shapes]
    return live[places], seconds[places], before_update[places]


def _key(request: Mapping[str, object], worst_case: Path) -> str:
    """A hash of all inputs of a mass model: the traced recipe, and the code that traces it."""
    keys = BatchKeys.from_json(cast(Mapping[str, "str | None"], request["keys"]))
    unread = (
        "output_dir", "run_name", "logging_dir", "seed", "learning_rate", "max_steps", "num_train_epochs",
        *_variables(keys),
    )  # fmt: skip
    values = {k: v for k, v in cast(Mapping[str, object], request["values"]).items() if k not in unread}
    rest = {k: v for k, v in request.items() if k not in ("values", "worst_case", "answer")}
    parts = [values, rest, _code(), read_json(worst_case), calibration.fingerprint(str(request["device"]))]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


@cache
def _code() -> str:
    """A hash of the simulation's own code and the versions of the packages that it runs."""
    digest = hashlib.sha256(json.dumps([version(p) for p in _PACKAGES]).encode())
    package = Path(__file__).parent.parent
    folders = (
        *(package / name for name in ("fakegpu", "forecast", "plugin", "probing")),
        Path(str(resources.files("autofit.trainers"))),
    )
    for folder in folders:
        for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.npz"))):
            digest.update(file.read_bytes())
    return digest.hexdigest()
