"""Builds mass models from a few short simulated trainings of the real trainer, one variable changed at a time.

A model is for one structure: everything but the variables. `B` is the micro-batch, `G` the completions generated at
once, `C` the completion length, `r` the LoRA rank. TRL's loss works in tiles of tokens, so a micro-batch of more tokens
than a tile has a model of its own. Imports torch.
"""

import gc
import importlib
import os
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from autofit.fakegpu import FakeGpu, fake_gpu, gpu_spec
from autofit.fakegpu.depth.layers import fewer_layers, repeats_after
from autofit.fakegpu.formula.formula import MassModel, Trace, Variation
from autofit.fakegpu.formula.kernel_log import KernelLog
from autofit.fakegpu.specs import HostCosts
from autofit.files import read_json, write_json
from autofit.hardware.calibration import host_costs
from autofit.probing import offline
from autofit.probing.phases import QUIET, read_worst_case, wrap_phases
from autofit.recipe.trainer_keys import TILE_TOKENS
from autofit.recipe.trl_config import parse

LATER = "+"  # ends the name of a phase in which gradients of an earlier micro-batch are alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Where to trace: values of the variables and the shape of a step."""

    micro_batch: int
    completion: int
    rank: int | None
    accumulation: int
    chunk: int
    layers: int

    @property
    def generated(self) -> int:
        return self.micro_batch * self.chunk


def trace(point: Point, *, trainer: str, values: Mapping[str, object], device: str, worst_case: Path) -> Trace:
    """Two optimizer steps of the recipe `values` at `point`, on the simulated `device`."""
    plug_in = importlib.import_module(f"autofit.trainers.{trainer}")
    changed = dict(values) | {
        "per_device_train_batch_size": point.micro_batch, "gradient_accumulation_steps": point.accumulation,
    }  # fmt: skip
    if trainer == "grpo":
        changed |= {
            "steps_per_generation": point.chunk,
            "num_generations": 2,
            "max_completion_length": point.completion,
        }
        changed.pop("generation_batch_size", None)
    if point.rank is not None:
        changed["lora_r"] = point.rank
    spec = gpu_spec(device.removeprefix("sim:"))
    gc.collect()
    with (
        tempfile.TemporaryDirectory(prefix="autofit-trace-") as folder,
        fake_gpu(spec, host_costs=host_costs(device)[0], enforce_capacity=False) as gpu,
        fewer_layers(point.layers),
    ):
        gpu.only_last_decode_steps = True
        marks = _Marks(gpu)
        standing_in = offline.overrides(values, worst_case.parent)
        quiet = {**QUIET, **plug_in.QUIET, **standing_in}
        config = parse(trainer, changed, overrides={**quiet, "max_steps": 2, "output_dir": folder})
        marks.enter("load")
        built = plug_in.build(config, worst_case=read_worst_case(worst_case))
        _follow(built, marks, plug_in.PHASES)
        built.train()
        marks.enter("end")
        return Trace.of(gpu, point.layers, marks.log.kinds(marks.repeats))


class _Marks:
    """Names the phases of the simulated card's bytes and kernels."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.log = KernelLog()
        gpu.clock.log = self.log
        self.phase = "load"
        self.later = False
        self.repeats: dict[str, int] = {}

    def enter(self, phase: str) -> str:
        left, self.phase = self.phase, phase
        self._gpu.memory.enter_phase(phase + LATER if self.later else phase)
        self.log.phase = phase
        return left

    def wrap(self, target: object, method: str, phase: str) -> None:
        original = getattr(target, method)

        def within(*args: Any, **kwargs: Any) -> Any:
            outer = self.enter(phase)
            if self.log.on:
                self.repeats[phase] = self.repeats.get(phase, 0) + 1
            result = original(*args, **kwargs)
            self.enter(outer)
            return result

        setattr(target, method, within)


def _follow(trainer: Any, marks: _Marks, phases: Mapping[str, str]) -> None:
    from transformers import TrainerCallback

    wrap_phases(trainer, phases, marks.wrap)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            marks.later = False
            marks.log.on = state.global_step == 1
            if marks.log.on:
                marks.repeats["update"] = args.gradient_accumulation_steps
            marks.enter("update")

        def on_substep_end(self, *_: object, **__: object) -> None:
            marks.later = True
            marks.enter("update")

        def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
            marks.later = False
            marks.enter("optimizer")

        def on_optimizer_step(self, *_: object, **__: object) -> None:
            marks.enter("between")

    trainer.add_callback(Steps())


# -- one structure ----------------------------------------------------------------------------------------------------


def run(request_path: str) -> int:
    """Build the mass model that the request at `request_path` asks for; answer in a file beside it. 0 either way."""
    request = read_json(Path(request_path))
    assert request is not None
    answer = Path(str(request["answer"]))
    gc.collect()
    gc.freeze()  # collections need not look at what was imported
    try:
        structure = Structure(**{k: v for k, v in request.items() if k in Structure.__slots__})  # type: ignore[arg-type]
        model, mismatch = structure.model()
    except Exception as error:
        traceback.print_exc()
        write_json(answer, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})
        return 0
    partial = answer.with_suffix(f".{os.getpid()}.npz")
    model.save(partial)
    os.replace(partial, answer.with_suffix(".npz"))
    write_json(answer, {"mismatch": mismatch, "layers": structure.depth[0]})
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A recipe but for its variables. `hold_out` is a point of the space: variables, accumulation and chunk."""

    trainer: str
    values: Mapping[str, object]
    device: str
    worst_case: str
    large: bool  # a micro-batch of more tokens than a tile
    reused: bool  # a rollout serves several optimizer steps
    varies_rank: bool
    ranges: Mapping[str, tuple[float, float]]
    hold_out: Mapping[str, int]

    @property
    def depth(self) -> tuple[int, int]:
        """(layers, the number after which their pattern repeats)."""
        return repeats_after(self._config())

    def _config(self) -> Any:
        from transformers import AutoConfig

        standing_in = offline.overrides(self.values, Path(self.worst_case).parent)
        name = standing_in.get("model_name_or_path", self.values["model_name_or_path"])
        return AutoConfig.from_pretrained(name, trust_remote_code=bool(self.values.get("trust_remote_code")))

    def model(self) -> tuple[MassModel, float]:
        """The model, and by what share its phases miss those of a trace that it was not made from."""
        layers, period = self.depth
        shallow = layers % period + period
        shallow += period if shallow < 2 else 0
        base = self._base(shallow)
        at, varied = self._variations(base)
        traced = self._trace(base)
        deeper = self._trace(replace(base, layers=shallow + period))
        spec = gpu_spec(self.device.removeprefix("sim:"))
        model = MassModel.fit(
            traced, deeper,
            [Variation(variable=n, value=v, trace=self._trace(p), instead_of=i) for n, v, p, i in varied],
            at=at, ranges={name: self.ranges[name] for name in at}, layers=layers,
            bandwidth_bytes_per_s=spec.bandwidth_bytes_per_s, costs=host_costs(self.device)[0] or HostCosts(),
        )  # fmt: skip
        return model, self._mismatch(model, shallow + period)

    def _base(self, layers: int) -> Point:
        micro, completion = (64, 128) if self.large else (6, 96)
        if self.trainer != "grpo":
            fewest = TILE_TOKENS // self._sample_tokens + 1
            micro, completion = (fewest if self.large else 1), 0
        rank = None if not self.varies_rank else 8
        shape = (1, 2) if self.reused else (2, 1)
        return Point(
            micro_batch=micro, completion=completion, rank=rank, accumulation=shape[0], chunk=shape[1], layers=layers
        )

    @property
    def _sample_tokens(self) -> int:
        found = read_json(Path(self.worst_case))
        assert found is not None
        return int(str(found["longest_tokens"]))

    def _variations(self, base: Point) -> tuple[dict[str, float], list[tuple[str, float, Point, str | None]]]:
        """The variables at the base point, and for each: its other value, where to trace, and what varies with it."""
        wider = base.micro_batch + (base.micro_batch + 2) // 4 * 2 if self.trainer == "grpo" else 2 * base.micro_batch
        at: dict[str, float] = {"B": base.micro_batch}
        varied: list[tuple[str, float, Point, str | None]] = [("B", wider, replace(base, micro_batch=wider), None)]
        if base.rank is not None:
            at["r"] = base.rank
            varied.append(("r", 12, replace(base, rank=12), None))
        if self.trainer == "grpo":
            at |= {"G": base.generated, "C": base.completion}
            longer = base.completion * 3 // 2
            if self.ranges["C"][0] != self.ranges["C"][1] or self.ranges["C"][0] != base.completion:
                varied.append(("C", longer, replace(base, completion=longer), None))
            more = replace(base, chunk=base.chunk + 1, accumulation=base.accumulation)
            varied.append(("G", more.generated, more, "B"))
        return at, varied

    def _trace(self, point: Point) -> Trace:
        return trace(
            point, trainer=self.trainer, values=self.values, device=self.device, worst_case=Path(self.worst_case)
        )

    def _mismatch(self, model: MassModel, layers: int) -> float:
        want = self.hold_out
        point = Point(
            micro_batch=want["B"], completion=want.get("C", 0), rank=want.get("r") if self.varies_rank else None,
            accumulation=want["accumulation"], chunk=want["chunk"], layers=layers,
        )  # fmt: skip
        found = self._trace(point).peaks
        at = {"B": want["B"], "G": want["B"] * want["chunk"], "C": want.get("C", 0), "r": want.get("r", 0)}
        told = model.peaks({name: np.array([float(at[name])]) for name in model.variables}, layers)
        top = max(found.values())
        return max(abs(float(told[phase][0]) - peak) / top for phase, peak in found.items() if phase in told)
