"""Predictions of many structures from few traces: of a law that is known everywhere, and of real traces of a model."""

import json
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from architectures import ROLLOUTS, random_config, write_model
from recipes import grpo_recipe
from transformers import Qwen3Config

from autofit.fakegpu.engines.forward import Decoder
from autofit.fakegpu.engines.vllm import VllmEngine
from autofit.fakegpu.formula.formula import Floats, MassModel
from autofit.fakegpu.formula.kernel_log import KernelKinds
from autofit.fakegpu.formula.polynomials import Basis, Kind, Symbols, with_steps
from autofit.fakegpu.scratch import Rounded
from autofit.fakegpu.specs import HostCosts, gpu_spec
from autofit.files import write_json
from autofit.forecast import worker
from autofit.forecast.composed import Composer, Made, PredictionSource, Workshop, changed_bytes
from autofit.forecast.evaluation import Parts, Sketched
from autofit.forecast.forecast import Forecast, Forecaster
from autofit.forecast.predictions import LARGE, Setting, Shape, Sorted, Structure, without
from autofit.recipe.keys import BatchKeys
from autofit.recipe.recipe import Recipe
from autofit.space.space import Knob, Space
from autofit.space.traits import Traits

pytestmark = pytest.mark.filterwarnings("ignore")
CONTEXT_BYTES = gpu_spec("l4").context_bytes
ENGINE, IDLE, BROKEN, WATCH = "use_vllm", "use_cache", "torch_compile", "torch_empty_cache_steps"
OWN: Structure = (("optim", "adamw_torch"),)
SWITCHES = {  # of knobs that are off in the recipe: factors of (weights, activations, update, decode), bytes, seconds
    "gradient_checkpointing": (1.0, 0.11, 1.3, 1.0, 0.0, 0.0),
    "dtype": (2.0, 1.9, 2.8, 1.6, 0.0, 0.0),
    "optim": (1.0, 1.0, 1.0, 1.0, -2e8, 0.1),
    "cast_lm_head_to_fp32": (1.0, 1.05, 1.1, 1.05, 6e8, 0.0),
    "use_liger_kernel": (1.0, 0.8, 0.9, 1.0, 0.0, 0.0),
    ENGINE: (1.0, 1.0, 1.0, 0.2, 3e9, 0.4),
    IDLE: (1.0, 1.0, 1.0, 1.0, 0.0, 0.0),
}
KNOBS = (
    Knob(name="per_device_train_batch_size", tier="neutral", solved=True),
    Knob(name="steps_per_generation", tier="neutral", solved=True),
    *(Knob(name=name, tier="approximate", values=(False, True)) for name in SWITCHES),
)


class Law:
    """A mass model in place of a traced one: a law of the settings, some of which change what others do."""

    variables, base, engine = ("B", "G", "C", "r"), (10.0, 10.0, 129.0, 7.0), None
    sample_bytes, micro_batches = 0.0, 1

    def __init__(self, values: Mapping[str, Any]) -> None:
        on = np.array([factors for name, factors in SWITCHES.items() if values.get(name)]).reshape(-1, 6)
        self._weights, self._activations, self._update, self._decode = on[:, :4].prod(axis=0)
        self._bytes, self._seconds = on[:, 4:].sum(axis=0)
        self._wakes = bool(values.get(ENGINE))

    def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
        micro, generated = values["B"], values.get("G", values["B"])
        weights = 4e9 * self._weights + self._bytes
        update = weights + 1.8e9 * self._activations * micro
        wakes = {"wake-up": 2 * weights + 0 * micro} if self._wakes else {}
        return {"rollout": weights + 1e8 * generated, "update": update, "update+": update + 1e8, **wakes}

    def seconds(self, values: Mapping[str, Floats], layers: int, decode_steps: Floats) -> dict[str, Floats]:
        micro, generated = values["B"], values.get("G", values["B"])
        update = self._update * (0.1 + 0.2 * micro)
        return {
            "decode": 1e-2 * decode_steps * self._decode * (1 + 0.01 * generated),
            "update": update, "update+": update, "optimizer": np.full(len(micro), 0.1 + self._seconds),
        }  # fmt: skip


def lawful(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The list to which every request is added; the law answers it, and a trace of BROKEN fails."""
    asked: list[dict[str, Any]] = []

    def made(_: Workshop, request: dict[str, Any], *, processes: int) -> Made:
        asked.append(request)
        if request["values"].get(BROKEN):
            return Made(reason="it does not compile", crashed=True)
        return Made(model=cast(MassModel, Law(request["values"])), layers=1)

    monkeypatch.setattr(Workshop, "_made", made)
    return asked


def forecast_of(space: Space, folder: Path, *, limit_bytes: int | None = None) -> Forecast:
    worst_case = folder / "worst_case.json"
    if not worst_case.exists():
        worst_case.write_text(json.dumps({}))
    forecaster = Forecaster(
        device="sim:l4", worst_case=worst_case, server=cast(Any, Here()), scratch=folder / "scratch",
        kept=folder / "kept", workers=1,
    )  # fmt: skip
    return forecaster.forecast(space, limit_bytes=limit_bytes)


def law_space(*more: Knob) -> Space:
    recipe = grpo_recipe(
        per_device_train_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=8, num_generations=4,
        max_completion_length=256, use_peft=False,
        **dict.fromkeys((*SWITCHES, BROKEN, WATCH), False),
    )  # fmt: skip
    return Space.of(recipe, (*KNOBS, *more), allow="approximate", device="sim:l4")


def truth(forecast: Forecast) -> tuple[Floats, Floats]:
    """(device-used bytes, step seconds) of every candidate by the law."""
    used, step = (np.zeros(len(forecast.found.candidates)) for _ in range(2))
    for place, (candidate, shape) in enumerate(zip(forecast.found.candidates, forecast.found.shapes, strict=True)):
        law = Law(forecast.space.params(candidate))
        one = {"B": np.array([float(shape.micro)]), "G": np.array([float(shape.generated)])}
        used[place] = CONTEXT_BYTES + max(float(peak[0]) for peak in law.peaks(one, 1).values())
        seconds = law.seconds(one, 1, np.array([float(shape.completion)]))
        later = shape.accumulation - 1
        often = {"decode": shape.accumulation / shape.chunk, "update": 1, "update+": later, "optimizer": 1}
        step[place] = sum(often[name] * float(each[0]) for name, each in seconds.items())
    return used, step


@pytest.mark.parametrize("limit_gb", [6, 8, 11, 15, 20, 40])
def test_the_predicted_best_of_many_structures_is_the_optimum_of_all_within_1_percent(
    limit_gb: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = lawful(monkeypatch)
    limit = limit_gb * 10**9
    forecast = forecast_of(law_space(), tmp_path, limit_bytes=limit)
    used, step = truth(forecast)
    fits = forecast.predictions.device_used_bytes <= limit
    best = np.flatnonzero(fits)[np.argmin(forecast.predictions.step_s[fits])]
    assert len(forecast.found.places) >= 2 ** len(SWITCHES)
    assert len(asked) <= 3 + len(SWITCHES) + 12
    assert used[best] <= limit
    assert step[best] <= 1.01 * step[used <= limit].min()
    assert forecast.sources[best] is not PredictionSource.COMPOSED
    composed = np.array([source is PredictionSource.COMPOSED for source in forecast.sources])
    assert not forecast.predictions.floor_bytes[composed].any()


def test_a_setting_without_effect_is_sketched_once_and_one_that_changes_no_trace_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = lawful(monkeypatch)
    forecast = forecast_of(law_space(Knob(name=WATCH, tier="neutral", values=(1,), traced=False)), tmp_path)
    assert sum(bool(request["values"].get(IDLE)) for request in asked) == 1
    assert not any(request["values"].get(WATCH) for request in asked)
    assert np.isfinite(forecast.predictions.step_s).all()


def test_two_settings_of_which_one_decides_what_the_other_does_are_sketched_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composed, a micro-batch with offloaded activations and no checkpoints had 41 % too many bytes."""
    asked = lawful(monkeypatch)
    first, second = "optim", "use_liger_kernel"
    space = law_space()
    knobs = [replace(k, stated=Traits(joint=(second,))) if k.name == first else k for k in space.knobs]
    forecast_of(replace(space, knobs=tuple(knobs)), tmp_path)
    changed = [[name for name in SWITCHES if request["values"].get(name)] for request in asked[: 3 + len(SWITCHES)]]
    assert changed.count([first, second]) == 1


def test_from_one_sample_which_has_no_padding_a_model_holds_for_several_and_what_padding_decides_is_sketched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own model held for one sample alone: eight were told to need 11 % too few bytes, without checkpoints 7 %."""
    asked = lawful(monkeypatch)
    lengths = {"longest": [64, 32], "most": 64, "least": 8}
    (tmp_path / "worst_case.json").write_text(json.dumps({"lengths": lengths}))
    space = law_space()
    knobs = [replace(k, stated=Traits(joint=("padding",))) if k.name == "optim" else k for k in space.knobs]
    recipe = replace(space.recipe, resolved={**space.recipe.resolved, "per_device_train_batch_size": 1})
    space = Space.of(recipe, tuple(knobs), allow="approximate", device="sim:l4")
    found = Sorted(space, {"lengths": lengths})
    forecast_of(space, tmp_path)
    (whole,) = (request for request in asked if not request.get("sketch"))
    assert not whole["padded"]
    assert whole["ranges"]["B"] == (1, max(shape.micro for shape in found.shapes))
    assert whole["micro"] == 1
    asked_together = [r for r in asked if r["padded"] and r["values"].get("optim") and not r["values"].get("dtype")]
    assert asked_together[0]["sketch"]


def test_a_setting_that_cannot_be_traced_leaves_only_its_own_candidates_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lawful(monkeypatch)
    space = law_space(Knob(name=BROKEN, tier="approximate", values=(False, True)))
    forecast = forecast_of(space, tmp_path)
    broken = np.array([bool(space.params(c)[BROKEN]) for c in forecast.found.candidates])
    assert (np.isnan(forecast.predictions.step_s) == broken).all()
    assert forecast.problems == {"it does not compile": int(broken.sum())}
    assert forecast.of(space, forecast.found.candidates[int(np.argmax(broken))]) is None
    assert forecast.crashed == {(BROKEN, True): "it does not compile"}
    left = without(space, forecast.crashed).allowed()
    assert set(left) == {c for c, fails in zip(forecast.found.candidates, broken, strict=True) if not fails}
    assert forecast.of(space, space.baseline, completion_tokens=512) is not None


def test_a_structure_that_is_not_begun_in_time_is_told_and_a_kept_model_needs_none(tmp_path: Path) -> None:
    request = {"keys": BatchKeys().to_json(), "values": {}, "device": "sim:l4"}
    worst_case = tmp_path / "worst_case.json"
    worst_case.write_text("{}")

    class Traces:
        def call(self, message: Mapping[str, object]) -> None:
            write_json(Path(str(message["argument"])).with_name("model.json"), {"refused": "too deep"})

    def made(until: float) -> Made:
        workshop = Workshop(
            worst_case=worst_case, server=cast(Any, Traces()), scratch=tmp_path / "scratch", kept=tmp_path / "kept",
            until=until,
        )  # fmt: skip
        return workshop.make({OWN: request}, {})[0][OWN]

    now = time.monotonic()
    assert made(now - 1).reason == "the time for predictions was over"
    assert made(now + 60).reason == "too deep"
    assert made(now - 1).reason == "too deep"


class Here:
    """A fork server that runs its calls in this process."""

    def call(self, message: Mapping[str, object]) -> None:
        worker.run(str(message["argument"]))


@pytest.mark.slow
def test_two_settings_together_are_predicted_from_sketches_of_a_real_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path, random_config("llama", random.Random(0), layers=5))
    values: dict[str, Any] = {
        "model": str(model), "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "chunk": 2,
        "group": 2, "completion": 24, "checkpointing": True, "dtype": "bfloat16", "lora_r": 0,
    }  # fmt: skip
    recipe = Recipe(
        trainer="architectures:ROLLOUTS", values=values, resolved={**values, "generation_batch_size": 16},
        keys=ROLLOUTS.keys,
    )  # fmt: skip
    knobs = (
        Knob(name="per_device_train_batch_size", tier="neutral", solved=True),
        Knob(name="chunk", tier="neutral", solved=True),
        Knob(name="checkpointing", tier="neutral", values=(False, True)),
        Knob(name="dtype", tier="neutral", values=("bfloat16", "float32")),
    )
    space = Space.of(recipe, knobs, device="sim:l4")
    told = forecast_of(space, tmp_path)
    monkeypatch.setattr("autofit.forecast.forecast._FEW", 4)
    exact = forecast_of(space, tmp_path)
    assert set(exact.sources) == {PredictionSource.WHOLE}
    limits = {
        PredictionSource.WHOLE: (0, 0),
        PredictionSource.SKETCHED: (0.01, 0.02),
        PredictionSource.COMPOSED: (0.3, 0.1),
    }
    for source, (most_bytes, most_s) in limits.items():
        mine = [place for place, each in enumerate(told.sources) if each is source]
        for name, most in (("device_used_bytes", most_bytes), ("step_s", most_s)):
            ours, theirs = (getattr(f.predictions, name)[mine] - 0.0 for f in (told, exact))
            if name == "device_used_bytes":
                ours, theirs = ours - told.context_bytes, theirs - exact.context_bytes
            assert not len(mine) or np.abs(ours / theirs - 1).max() <= most, (source, name)


def test_a_phase_that_only_one_setting_brings_changes_with_what_the_others_hold() -> None:
    def sketch(**peaks: float) -> Sketched:
        return Sketched(peaks={name: np.array([nbytes]) for name, nbytes in peaks.items()}, seconds={})

    own = {"load": np.array([9.0]), "update+": np.array([5.0]), "rollout": np.array([3.0])}
    halves = sketch(load=9.0, update=4.0, rollout=3.0), sketch(load=4.0, update=2.0, rollout=1.5)
    brings = sketch(load=9.0, update=4.0, rollout=3.0), sketch(load=9.0, update=4.0, rollout=5.0, wakes=8.0)
    for effects in ([halves, brings], [brings, halves]):
        added, multiplied = (changed_bytes(own, effects, multiplied=each) for each in (False, True))
        found = {name: peak[0] for name, peak in added.items()}
        assert found == {"load": 4.0, "update+": 3.0, "rollout": 3.5, "wakes": 6.5}
        assert multiplied["wakes"][0] == 4.0


def test_longer_completions_hold_what_the_sketched_setting_makes_of_each_of_their_tokens() -> None:
    """They grew as the recipe's own checkpointed ones did: 488 tokens more were told to fit where 46 do."""

    class ByTokens(Law):
        def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
            tokens = values["B"] * (512 + values.get("C", 768.0 + 0 * values["B"]))
            return {"update": 16e9 + 5e6 * self._activations * tokens}

    own: Structure = (("gradient_checkpointing", True),)
    other: Structure = (("gradient_checkpointing", False),)
    made = {s: Made(model=cast(MassModel, ByTokens(dict(s))), layers=1) for s in (own, other)}
    composer = Composer(
        own=own, pairs={}, sketches=made, whole={own: made[own]}, completion=768, chunks=lambda _: 1,
        prompt_tokens=512,
    )  # fmt: skip
    shapes = tuple(Shape(micro, 4, 1, completion, 0) for micro in (1, 8) for completion in (256, 768, 1536))
    told = composer.told(other, shapes)
    assert told is not None
    assert told.source is PredictionSource.SKETCHED
    assert told.live_bytes == pytest.approx([16e9 + 5e6 * s.micro * (512 + s.completion) for s in shapes])


def composed_of(own: Structure, laws: Mapping[Structure, Law], pairs: Mapping[Setting, Any]) -> Composer:
    """A composer whose sketches are of these laws; `pairs` has {setting: (a structure with it, one without)}."""
    made = {s: Made(model=cast(MassModel, law), layers=1) for s, law in laws.items()}
    return Composer(
        own=own, pairs=pairs, sketches=made, whole={own: made[own]},
        completion=256, chunks=lambda _: 1, prompt_tokens=64,
    )  # fmt: skip


def test_a_setting_changes_the_further_micro_batches_that_the_recipe_has_not() -> None:
    """Those of a recipe with one a step were told without the offloading that slows each of them."""

    class Accumulates(Law):
        def seconds(self, values: Mapping[str, Floats], layers: int, decode_steps: Floats) -> dict[str, Floats]:
            found = super().seconds(values, layers, decode_steps)
            return found if self._more else {n: each for n, each in found.items() if n != "update+"}

        def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
            found = super().peaks(values, layers)
            return found if self._more else {n: each for n, each in found.items() if n != "update+"}

        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__({"dtype": values["dtype"]})
            self._more = values["accumulates"]

    each: list[Structure] = [(("accumulates", a), ("dtype", d)) for a in (False, True) for d in (False, True)]
    own, slow, more, both = each
    laws = {s: Accumulates(dict(s)) for s in each}
    pairs: dict[Setting, Any] = {("accumulates", True): (more, own), ("dtype", True): (slow, own)}
    composer = composed_of(own, {s: laws[s] for s in (own, slow, more)}, pairs)
    shapes = (Shape(2, 4, 1, 256, 0), Shape(1, 8, 1, 256, 0))
    told, true = composer.told(both, shapes), Parts.of(cast(MassModel, laws[both]), 1, shapes)
    assert told is not None
    assert told.source is PredictionSource.COMPOSED
    assert told.parts.step_s == pytest.approx(true.step_s, rel=1e-9)
    assert told.parts.peaks.keys() == true.peaks.keys()


@pytest.mark.parametrize("near", [("more", "other"), ("ckpt", "more", "other")])
def test_an_effect_is_taken_from_the_sketches_most_like_the_structure(near: tuple[str, ...]) -> None:
    """Offloading's was that beside checkpoints, which leave it little to move, for a structure without any.

    Beside a sketch with checkpoints, both what leaving them out does and what offloading does was that without them.
    """

    class Offloads(Law):
        def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
            activations = (1e8 if self.on["ckpt"] else 1e9) * values["B"] * (0.1 if self.on["offload"] else 1.0)
            return {"update": 4e9 + activations + 5e8 * (self.on["more"] + self.on["other"])}

        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__({})
            self.on = values

    def structure(*on: str) -> Structure:
        return tuple((name, name in on) for name in ("ckpt", "offload", "more", "other"))

    own = structure("ckpt")
    sketched = (own, structure(*near), structure(), structure("offload"), structure("ckpt", "offload"))
    pairs: dict[Setting, Any] = {
        ("offload", True): (structure("ckpt", "offload"), own),
        ("ckpt", False): (structure(), own),
    }
    composer = composed_of(own, {s: Offloads(dict(s)) for s in sketched}, pairs)
    shapes = (Shape(1, 8, 1, 256, 0), Shape(8, 1, 1, 256, 0))
    told = composer.told(structure("offload", "more", "other"), shapes)
    assert told is not None
    assert told.source is PredictionSource.COMPOSED
    assert told.live_bytes == pytest.approx([5e9 + 1e8 * shape.micro for shape in shapes])


def test_an_effect_is_taken_beside_the_setting_that_decides_it_however_many_others_differ() -> None:
    """Offloading's was that beside checkpoints, as the pair without them lacked two other settings."""

    class Offloads(Law):
        def peaks(self, values: Mapping[str, Floats], layers: int) -> dict[str, Floats]:
            kept = (1e9 if self.on["whole"] else 1e8) * (0.1 if self.on["offload"] else 1.0)
            return {"update": 4e9 + kept * values["B"] + 5e8 * (self.on["more"] + self.on["other"])}

        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__({})
            self.on = values

    def structure(*on: str) -> Structure:
        return tuple((name, name in on) for name in ("whole", "offload", "more", "other"))

    own, offload, both = structure(), structure("offload", "more", "other"), structure("more", "other")
    whole = structure("whole"), structure("whole", "more", "other"), structure("whole", "offload")
    sketched = (own, *whole, both, offload)
    pairs: dict[Setting, Any] = {("offload", True): (offload, both), ("whole", True): (whole[0], own)}
    composer = composed_of(own, {s: Offloads(dict(s)) for s in sketched}, pairs)
    composer = replace(composer, joint=[frozenset(("whole", "offload"))])
    told = composer.told(structure("whole", "offload", "more", "other"), (Shape(4, 8, 1, 256, 0),))
    assert told is not None
    assert told.live_bytes == pytest.approx([5e9 + 1e8 * 4])


@pytest.mark.parametrize("near", [(LARGE,), ("eager",), (LARGE, "whole"), ("eager", "whole")])
def test_seconds_of_the_loss_are_added_however_long_the_layers_take(near: tuple[str, ...]) -> None:
    """A tile of the loss more took six times as long beside an attention with which the layers do."""

    class Tiles(Law):
        def seconds(self, values: Mapping[str, Floats], layers: int, decode_steps: Floats) -> dict[str, Floats]:
            of_layers = (6.0 if self.on["eager"] else 1.0) * (0.75 if self.on["whole"] else 1.0) * values["B"]
            of_loss = values["B"] if self.on[LARGE] else 1.0
            return {"update": of_layers + of_loss, "update+": of_layers + of_loss, "optimizer": np.full(1, 0.1)}

        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__({})
            self.on = values

    def structure(*on: str) -> Structure:
        return tuple((name, name in on) for name in ("eager", "whole", LARGE))

    own = structure()
    pairs: dict[Setting, Any] = {(name, True): (structure(name), own) for name in ("eager", "whole", LARGE)}
    sketched = {own, structure(*near), *(with_it for with_it, _ in pairs.values())}
    composer = composed_of(own, {s: Tiles(dict(s)) for s in sketched}, pairs)
    shapes = (Shape(8, 4, 1, 256, 0),)
    for asked, most in (("eager", LARGE), 1e-9), (("eager", "whole", LARGE), 0.04):
        told = composer.told(structure(*asked), shapes)
        true = Parts.of(cast(MassModel, Tiles(dict(structure(*asked)))), 1, shapes)
        assert told is not None
        assert told.parts.step_s == pytest.approx(true.step_s, rel=most)


def test_structures_whose_traces_are_the_same_are_traced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once wrote into one folder, and one of them ended without an answer."""
    asked = lawful(monkeypatch)
    worst_case = tmp_path / "worst_case.json"
    worst_case.write_text("{}")
    workshop = Workshop(
        worst_case=worst_case, server=cast(Any, Here()), scratch=tmp_path / "scratch", kept=tmp_path / "kept"
    )

    def request(value: bool) -> dict[str, Any]:
        keys = BatchKeys(micro_batch="b", accumulation="a").to_json()
        return {"keys": keys, "values": {"dtype": value}, "device": "sim:l4"}

    one, alike, other = ((("dtype", False),), (("optim", "x"),), (("dtype", True),))
    whole, sketches = workshop.make({one: request(False)}, {alike: request(False), other: request(True)})
    assert len(asked) == 2
    assert whole[one] is sketches[alike]
    assert sketches[other] is not sketches[alike]


def test_what_two_settings_change_of_a_rollouts_engine_adds_up() -> None:
    """The engine of the last setting was taken whole: a sleeping one of many sequences held its cache in the update."""
    card = gpu_spec("a100-80gb")
    decoder = Decoder(hidden=64, layers=2, heads=2, key_heads=2, head_dim=32, intermediate=128, vocab=512)
    awake = VllmEngine(spec=card, costs=HostCosts(), weights_bytes=10**9, utilization=0.3, longest=1024,
                       decoder=decoder, most_sequences=20)  # fmt: skip

    class Serves(Law):
        def __init__(self, values: Mapping[str, Any]) -> None:
            super().__init__(values)
            sequences = 124 if values["wide"] else 20
            self.engine = replace(awake, sleeps=values["sleeps"], most_sequences=sequences)  # type: ignore[assignment]

    each: list[Structure] = [(("sleeps", s), ("wide", w)) for s in (False, True) for w in (False, True)]
    own, wide, sleeps, both = each
    made = {s: Made(model=cast(MassModel, Serves(dict(s))), layers=1) for s in (own, wide, sleeps)}
    composer = Composer(
        own=own, pairs={("wide", True): (wide, own), ("sleeps", True): (sleeps, own)}, sketches=made,
        whole={own: made[own]}, completion=256, chunks=lambda _: 1, prompt_tokens=64,
    )  # fmt: skip
    shapes = (Shape(4, 2, 2, 256, 0, share=0.3),)
    awake_bytes, asleep_bytes, both_bytes = (
        float(told.parts.peaks["update"][0]) for s in (wide, sleeps, both) if (told := composer.told(s, shapes))
    )
    assert both_bytes == pytest.approx(asleep_bytes)
    assert both_bytes < awake_bytes - 0.2 * card.capacity_bytes


def test_a_size_of_a_weight_is_not_taken_for_the_rows_of_the_last_tile() -> None:
    """Five samples of 1,024 tokens leave 1,018 rows of a tile (one is padded), and keys have 1,024 features."""
    product = ("update", "mm", (), False)
    tile, tail = (Kind(product, ((rows, 512), (512, 9000))) for rows in (4096, 1018))
    queries, keys = (Kind(product, ((5120, 4096), (4096, features))) for features in (4096, 1024))
    recording = worker.Recording(
        trainer=cast(Any, None), layers=4, keys=BatchKeys(micro_batch="b", accumulation="a"), values={},
        device="sim:l4", worst_case=cast(Any, None), tile_tokens=4096, sizes={512, 1024, 4096, 9000},
    )  # fmt: skip
    point = worker.Point(micro_batch=5, completion=1024, rank=None, accumulation=2, chunk=1)
    found = recording._in_whole_tiles(KernelKinds(counts=dict.fromkeys((tile, tail, queries, keys), 1.0)), point)
    assert found.counts == {tile: pytest.approx(1 + 1018 / 4096), queries: 1.0, keys: 1.0}


def test_a_buffer_that_kernels_need_from_so_many_rows_on_is_in_a_law_of_fewer() -> None:
    """Traces of up to 3,072 tokens had no scratch of the embedding's gradient, and so no forecast had any."""
    fewer, more = (Kind("scratch", ((tokens - 9,),)) for tokens in (1024, 2048))
    symbols = Symbols(("B",), (1.0,))
    symbols.start({fewer: 1.0})
    symbols.vary("B", 2.0, {fewer: 1.0}, {more: 1.0})
    law = symbols.rounded_numel(fewer, 0, (10,), above=3072 - 9)
    points = with_steps(np.array([[1.0], [3.0], [4.0]]), symbols.base, symbols.steps)
    basis = Basis.of([law])
    assert (basis.at(points) @ basis.rows([law])[0]).round() == pytest.approx([0, 0, 4090])


def test_a_scratch_without_dimensions_has_its_bytes_for_any_shape() -> None:
    """A rollout's engine keeps such ones."""
    assert Rounded(512.0, (), ()).nbytes == 512
    assert (Rounded(4.0, (9, 8), (1, 1), above=9).nbytes, Rounded(4.0, (10, 8), (1, 1), above=9).nbytes) == (0, 320)


def test_every_micro_batch_of_a_step_is_on_the_card_and_between_steps_those_of_two() -> None:
    model = cast(MassModel, Law({}))
    vars(model).update(sample_bytes=1e5, micro_batches=2)
    shapes = tuple(Shape(4, accumulation, 1, 0, 0) for accumulation in (2, 8))
    with_two, with_eight = np.stack(list(Parts.of(model, 1, shapes).peaks.values()), axis=1)
    assert (with_eight - with_two).tolist() == [2.4e6] * len(with_two)


def test_a_sketch_of_samples_without_completions_holds_as_many_as_a_micro_batch_has() -> None:
    model = cast(MassModel, Law({}))
    shapes = tuple(Shape(micro, 1, 1, 0, 0) for micro in (2, 16))
    found = Sketched.of(model, 1, shapes, completion=0, chunk=1)
    alone = [model.peaks({"B": np.array([float(shape.micro)])}, 1)["update"][0] for shape in shapes]
    assert found.peaks["update"] == pytest.approx(alone)
    assert alone[0] < alone[1]


@pytest.mark.parametrize(
    ("tokens", "hidden", "mlp", "told", "chosen"),
    [
        (1024, 2048, 6144, {}, (3, 4)),  # two samples have as many tokens as the model has features
        (1024, 2048, 8192, {}, (3, 4)),  # four have half of those of the MLP, which is no size of a product
        (1024, 3072, 8192, {}, (2, 4)),  # three have as many as the model has features
        (1024, 3072, 8192, {"sequences": 2}, (2, 3)),  # of pairs, four have those of the MLP
        (1024, 2304, 6144, {}, (2, 3)),
        (1000, 2048, 6144, {}, (2, 3)),
        (2048, 512, 6144, {}, (1, 2)),
        (2048, 512, 6144, {"padded": True}, (2, 3)),  # one sample alone has no padding, and another kernel of attention
        (1024, 4608, 14336, {"large": True}, (5, 7)),
        (1024, 7168, 14336, {"large": True}, (5, 6)),  # seven have as many tokens as the model has features
    ],
)
def test_samples_of_a_trace_have_tokens_that_are_no_size_of_the_model(
    tokens: int, hidden: int, mlp: int, told: dict[str, int], chosen: tuple[int, int]
) -> None:
    """With 2,048 tokens before 2,048 features the products were forecast 3.7 times too fast, and the update 19 %."""
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=4, num_attention_heads=hidden // 128,
        num_key_value_heads=8, head_dim=128, vocab_size=4000,
    )  # fmt: skip
    structure = worker.Structure(
        trainer="sft", keys=BatchKeys(micro_batch="b", accumulation="a"), tile_tokens=4096, values={}, device="sim:l4",
        worst_case="", large=bool(told.get("large")), padded=bool(told.get("padded")), reused=False, varies_rank=False,
        ranges={}, hold_out={},
    )  # fmt: skip
    lengths = {"sequences": told.get("sequences", 1)}
    vars(structure).update(_config=config, _worst_case={"longest_tokens": tokens, "lengths": lengths})
    base = structure._base().micro_batch
    assert (base, structure._wider(base)) == chosen


def test_a_micro_batch_of_samples_has_a_model_of_its_own_above_a_tile_of_the_loss() -> None:
    keys = BatchKeys(micro_batch="per_device_train_batch_size", accumulation="gradient_accumulation_steps")
    resolved = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    recipe = Recipe(trainer="sft", values={}, resolved=resolved, keys=keys, longest_sample_tokens=2048,
                    tile_tokens=4096)  # fmt: skip
    found = Sorted(Space.of(recipe, (KNOBS[0],)), {})
    micros = {dict(structure)[LARGE]: sorted(found.shapes[place].micro for place in places)
              for structure, places in found.places.items()}  # fmt: skip
    assert micros == {False: [1, 2], True: [4, 8, 16]}


def test_a_model_that_fails_its_test_in_bytes_and_in_seconds_tells_both() -> None:
    model = cast(MassModel, Law({}))
    assert Made(model=model, mismatch=0.0274, seconds_mismatch=-0.651).problem == (
        "a training traced as a test took 2.74% more or less memory than was forecast, and had an update that was "
        "forecast 65% too short"
    )
    assert Made(model=model).problem == ""
