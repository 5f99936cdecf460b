"""The gradient proof itself: compares accumulated gradients of recipes on one small model and identical samples.

Runs in a process of its own (`python -m autofit.proof.worker REQUEST`), on the CPU, in float32. Each gradient is that
of a whole optimizer step of the real trainer, read before the optimizer uses it. Sources of differences that are not
part of the recipe (generation, dropout, clipping, the optimizer) are removed or made equal. If any of the recipes has
several ranks, every training is made in forked processes, which meet over gloo, and sharded gradients are gathered.
"""

import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from autofit.errors import ConfigError, EnvironmentFault
from autofit.files import ScratchFolder, read_json, write_json, written_json
from autofit.plugin.models import go_offline_without_a_hub
from autofit.plugin.protocol import Report
from autofit.plugin.ranks import fsdp2_on_cpu, rank_environment
from autofit.plugin.registry import load
from autofit.probing.supervise import die_with_parent, keep_ranks
from autofit.recipe.launch import Launch, split
from autofit.recipe.secrets import opened

Gradient = dict[str, torch.Tensor]

_MOST_SAMPLES = 256  # most samples of one optimizer step; a larger step is shrunk equally in baseline and candidate
_MOST_STEPS = 3
_MOVE = 0.02  # length of one step relative to the weights' norm: enough to leave the policy that made the rollouts
_SPREAD = 0.05  # scale of the noise on trained weights, so that policy and reference differ and no LoRA matrix is zero
_WEIGHTY = 1e-2  # least share of the gradient's norm by which a parameter's difference is divided


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference:
    """The difference of a gradient from the baseline's: the largest over the compared optimizer steps."""

    relative: float  # ||g - g_baseline|| / ||g_baseline||
    steps: tuple[float, ...]
    parameter: str  # the parameter with the largest difference relative to its own gradient
    parameter_relative: float


def run(request_path: str) -> int:
    """Write the answer to the request at `request_path` into the file that it names. Returns 0."""
    began = time.perf_counter()
    gc.freeze()  # TRL collects garbage after every training; this excludes the imported modules
    request = written_json(request_path)
    try:
        with ScratchFolder("proof-") as folder:
            answer = prove(request, folder)
    except (ConfigError, EnvironmentFault) as error:
        answer = {"error": str(error)}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    write_json(Path(str(request["answer"])), answer | {"seconds": time.perf_counter() - began})
    return 0


def prove(request: Mapping[str, Any], folder: Path) -> dict[str, object]:
    """The answer: the candidate's difference from the baseline, and above the bounds also that of each part alone."""
    given = {"baseline": request["baseline"], "candidate": request["candidate"], **request["parts"]}
    recipes = {name: opened(values) for name, values in given.items()}
    proof = GradientProof(str(request["trainer"]), recipes, folder)
    small = proof.small
    answer: dict[str, object] = {
        "model": small.model, "stand_in": small.stand_in, "steps": small.steps,
        "samples_per_step": small.samples_per_step, "shrunken": small.divided_by, "versions": _versions(),
    }  # fmt: skip
    difference = proof.difference("candidate")
    answer |= {"difference": asdict(difference), "parts": {}}
    if difference.relative > request["bound"] or difference.parameter_relative > request["parameter_bound"]:
        answer["parts"] = {name: asdict(proof.difference(name)) for name in request["parts"]}
    return answer


class GradientProof:
    """Gradients of recipes ({name: values}, including "baseline") in the small trainings of their trainer."""

    def __init__(self, trainer: str, recipes: Mapping[str, Mapping[str, object]], folder: Path) -> None:
        go_offline_without_a_hub()
        launched = {name: split(values) for name, values in recipes.items()}
        self._launches = {name: launch for name, (launch, _) in launched.items()}
        self._on_ranks = any(not launch.is_plain for launch in self._launches.values())
        ranks = {}
        if self._on_ranks:
            torch.set_num_threads(1)  # in this process and its ranks; and no thread that shows progress
            tqdm.monitor_interval = 0
            ranks = {"ranks": {name: launch.ranks for name, launch in self._launches.items()}}
        self._folder = folder
        self._baseline: list[Gradient] | None = None
        self.small = load(trainer).small_trainings(
            {name: values for name, (_, values) in launched.items()}, folder, most_samples=_MOST_SAMPLES,
            most_steps=_MOST_STEPS, **ranks,
        )  # fmt: skip

    def gradients(self, name: str) -> list[Gradient]:
        """The accumulated gradients of the recipe `name`: one {parameter: tensor} per optimizer step."""
        if not self._on_ranks:
            return self._trained(name)
        return train_ranks(lambda: self._trained(name), self._launches[name], self._folder / f"ranks of {name}")

    def _trained(self, name: str) -> list[Gradient]:
        """The gradients of the recipe `name`, trained by this process as one of its ranks."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = self.small.run(name)
            for module in run.model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
            _spread(run.model)
            reader = _Reader(self._baseline)
            run.train(reader)
        if reader.sharded is not (self._launches[name].sharding == "fsdp2"):
            raise RuntimeError(f"FSDP2 was {'not ' if not reader.sharded else ''}at work in the ranks of the {name}")
        return reader.steps

    def difference(self, name: str) -> GradientDifference:
        """The difference of the recipe `name` from the baseline. Raises ConfigError if they train other parameters."""
        if self._baseline is None:
            self._baseline = self.gradients("baseline")
        return compare(self._baseline, self.gradients(name))


def compare(baseline: list[Gradient], candidate: list[Gradient]) -> GradientDifference:
    """The relative difference of two runs' gradients, step by step."""
    shapes = [[{n: tuple(g.shape) for n, g in step.items()} for step in steps] for steps in (baseline, candidate)]
    if shapes[0] != shapes[1]:
        raise ConfigError("candidate and baseline must train the same parameters; gradients cannot be compared")
    relative: list[float] = []
    worst, worst_relative = "", 0.0
    for ours, theirs in zip(candidate, baseline, strict=True):
        norm = _norm(theirs)
        if not norm > 0 or not norm < float("inf"):
            raise ConfigError(f"the norm of the baseline's gradient must be finite and above zero; it is {norm}")
        if not all(bool(g.isfinite().all()) for g in ours.values()):
            raise ConfigError("the candidate's gradient must be finite; it has infinite or NaN entries")
        gaps = {name: ours[name] - theirs[name] for name in theirs}
        relative.append(_norm(gaps) / norm)
        for name, gap in gaps.items():
            own = float(theirs[name].double().norm())
            share = float(gap.double().norm()) / max(own, _WEIGHTY * norm)
            if not worst or share > worst_relative:
                worst, worst_relative = name, share
    return GradientDifference(
        relative=max(relative), steps=tuple(relative), parameter=worst, parameter_relative=worst_relative
    )


def _norm(gradient: Gradient) -> float:
    return float(sum(float(g.double().pow(2).sum()) for g in gradient.values()) ** 0.5)


class _Reader(Report):
    """Records the gradient of each optimizer step, then steps along the baseline's gradient.

    Every run therefore has the same weights in every step, and rounding does not accumulate over steps.
    """

    def __init__(self, baseline: list[Gradient] | None) -> None:
        self.steps: list[Gradient] = []
        self.sharded = False
        self._baseline = baseline

    def gradient_is_whole(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.sharded = any(isinstance(p, DTensor) for p in trained.values())
        gradient = {n: _whole(torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in trained.items()}
        self.steps.append(gradient)
        along = gradient if self._baseline is None else self._baseline[len(self.steps) - 1]
        if along.keys() == trained.keys():
            for name, parameter in trained.items():
                parameter.grad = _as_sharded(along[name].clone(), parameter)
        weights = _norm({name: _whole(p.detach()) for name, p in trained.items()})
        for group in optimizer.param_groups:
            group["lr"] = _MOVE * weights / max(_norm(along), 1e-12)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_sharded(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """The whole `tensor`, sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _spread(model: torch.nn.Module) -> None:
    """Add the same noise to the trained weights of every run."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=_SPREAD)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "trl", "peft")}


# -- real ranks -------------------------------------------------------------------------------------------------------
# Processes that are forked after the imports, meet over gloo and train one recipe. The process that forks must not have
# computed with more than one thread: OpenMP's threads do not live in a fork.

_PATIENCE = timedelta(seconds=300)  # of one rank for the others, which train the same small model
_NO_PORT = 1  # the ranks meet in a file


@contextmanager
def joined(launch: Launch, *, rank: int, meeting: Path) -> Iterator[None]:
    """Context in which this process is `rank` of `launch`; the ranks find each other by the file `meeting`."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # the forking process was one rank of its own
    GradientState._reset_state()
    torch.set_num_threads(1)
    if launch.is_plain:
        yield
        return
    os.environ.update(rank_environment(launch, rank=rank, port=_NO_PORT, device="cpu"))
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    store = torch.distributed.FileStore(str(meeting), launch.ranks)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=launch.ranks, timeout=_PATIENCE)
    if launch.sharding == "fsdp2":
        with fsdp2_on_cpu():
            yield
    else:
        yield


Saved = list[dict[str, torch.Tensor]]


def train_ranks(train: Callable[[], Saved], launch: Launch, folder: Path) -> Saved:
    """Result of `train` on rank 0 of `launch`, each rank a forked process; the first failure ends all ranks.

    Raises ConfigError if a rank raised one, and EnvironmentFault for any other end.
    """
    folder.mkdir(parents=True)
    gc.freeze()  # TRL collects garbage in every training; imported modules are left out
    ended = keep_ranks(lambda rank: _forked(train, launch, rank, folder), launch.ranks, grace_s=0.0)
    if ended.first is not None:
        _fail(ended.first, ended.worst.exit_code, folder)
    saved: Saved = torch.load(folder / "gradients.pt", weights_only=True)
    return saved


def _forked(train: Callable[[], Saved], launch: Launch, rank: int, folder: Path) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        _be_rank(train, launch, rank, folder, parent)
    return pid


def _be_rank(train: Callable[[], Saved], launch: Launch, rank: int, folder: Path, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        with joined(launch, rank=rank, meeting=folder / "meeting"):
            found = train()
        if rank == 0:
            torch.save(found, folder / "gradients.pt")
        code = 0
    except ConfigError as error:
        write_json(folder / f"error-{rank}.json", {"error": str(error), "config": True})
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        write_json(folder / f"error-{rank}.json", {"error": text, "config": False})
    finally:
        os._exit(code)  # no clean-up of the parent's own: its temporary folders are its matter


def _fail(rank: int, code: int, folder: Path) -> NoReturn:
    """Raise the first error of a rank: others lose their connection after it. `rank` ended with `code`."""
    said = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    first = read_json(said[0]) if said else None
    if first is None:
        raise EnvironmentFault(f"rank {rank} ended with exit code {code}")
    if first["config"]:
        raise ConfigError(str(first["error"]))
    raise EnvironmentFault(f"rank {said[0].stem.removeprefix('error-')}: {first['error']}")


if __name__ == "__main__":
    die_with_parent()
    os._exit(run(sys.argv[1]))
