"""Operators one by one: the bytes of each, simulated and by torch's own dispatch and allocator, at random shapes.

cd experiments; python -m oracle.operators collect FOLDER      # of traced steps and of programs -> operators.jsonl
python -m oracle.operators programs            # those of programs are added
python -m oracle.operators compare             # in `nox -s cuda`'s environment -> operators.md
"""

import argparse
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import torch  # noqa: E402
from gpu.configs import Config  # noqa: E402
from gpu.folder import Folder, Row  # noqa: E402

from oracle.calls import Call, Calls, has_sizes, made, operator, resized, tensors  # noqa: E402

SEEN, TABLE = HERE / "operators.jsonl", HERE / "operators.md"
SHAPES, _TRIES = 10, 400
_ENDED = "the process ended with "  # it could not be run without a card
_ROLLING = ("llama", "deepseek_v2", "gemma2", "llama4_text")  # each with a cache of another kind
# Why CUDA's dispatch cannot run an operator without a card.
NOT_RUN = {
    "aten._scaled_dot_product_cudnn_attention.default": "cuDNN does not start",
    "aten._scaled_dot_product_cudnn_attention_backward.default": "cuDNN does not start",
    "aten._fft_r2c.default": "cuFFT does not start",
    "aten.exp2.default": "its kernel is compiled when it is called (NVRTC)",
    "aten.prod.dim_int": "its kernel is compiled when it is called (NVRTC)",
}
# Operators whose result has as many rows as a mask has true elements. All of them are here: the simulated card's worst
# case, and what the null GPU tells of them.
BY_MASK = {
    "aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default",
    "aten.masked_scatter_backward.default", "aten.masked_select.default", "aten.nonzero.default",
}  # fmt: skip
Bytes = tuple[int, int] | str  # peak and kept beside the arguments; or the error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m oracle.operators", description=__doc__)
    parser.add_argument("what", choices=("collect", "programs", "compare", "simulate", "dispatch"))
    parser.add_argument("folder", type=Path, nargs="?")
    given = parser.parse_args()
    if given.what == "collect":
        collect(Folder(home=given.folder))
    elif given.what == "programs":
        of_programs()
    elif given.what == "compare":
        compare()
    else:
        if find_spec("bitsandbytes") is not None:
            import bitsandbytes  # noqa: F401  # its operators
        with (simulated if given.what == "simulate" else dispatched)() as taken:
            while line := sys.stdin.readline():
                print(json.dumps(taken(json.loads(line))), flush=True)
        sys.stdout.flush()
        os._exit(0)


# -- the operators -----------------------------------------------------------------------------------------------------


def collect(folder: Folder) -> None:
    """Write the calls of the operators that two steps of each configuration make, with few layers."""
    from oracle.configs import SINGLE

    found: dict[str, list[Call]] = {}
    for config in SINGLE:
        if not folder.case(config).exists():
            continue
        with tempfile.TemporaryDirectory() as out:
            keep(traced(folder, config, Path(out)), found)
        print(config.name, len(found), flush=True)
    from architectures import ARCHITECTURES

    for name in ARCHITECTURES:
        keep(of_architecture(name), found)
        print(name, len(found), flush=True)
    write(found)
    of_programs()


def of_programs() -> None:
    """Add the operators of small programs to those that were found."""
    from autofit.fakegpu import fake_gpu
    from oracle.programs import programs

    found: dict[str, list[Call]] = {}
    for line in SEEN.read_text().splitlines():
        call = json.loads(line)
        found.setdefault(call["op"], []).append(call)
    for number, program in enumerate(programs()):
        with fake_gpu("h100", enforce_capacity=False, record_places=False), Calls() as seen:
            program()
        keep(seen.found, found)
        print(number, len(found), flush=True)
    write(found)


def write(found: dict[str, list[Call]]) -> None:
    lines = [json.dumps(call) for op in sorted(found) for call in found[op]]
    SEEN.write_text("\n".join(lines) + "\n")


def keep(calls: dict[str, list[Call]], found: dict[str, list[Call]]) -> None:
    """Add calls of other shapes: four an operator at most, one of those that take lists of tensors."""
    for op, seen in calls.items():
        kept = found.setdefault(op, [])
        most = 1 if op.startswith(("aten._foreach", "aten._fused")) else 4
        kept += [call for call in seen if call not in kept][: most - len(kept)]


def of_architecture(name: str) -> dict[str, list[Call]]:
    """The operators of a step of a tiny model, that generates too where it can."""
    from architectures import PlainRun, random_config, write_model

    from autofit.fakegpu import fake_gpu
    from autofit.plugin.protocol import Report

    calls: dict[str, list[Call]] = {}
    for generates in (False, True) if name in _ROLLING else (False,):
        with tempfile.TemporaryDirectory() as place:
            model = write_model(Path(place), random_config(name, random.Random(name), layers=4))
            values = {
                "model": str(model), "dtype": "bfloat16", "checkpointing": False, "tokens": 24, "lora_r": 0, "chunk": 1,
                "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "completion": 20,
            }  # fmt: skip
            with fake_gpu("h100", enforce_capacity=False, record_places=False), Calls() as seen:
                PlainRun(values, generates=generates).train(Report())
            keep(seen.found, calls)
    return calls


def traced(folder: Folder, config: Config, out: Path) -> dict[str, list[Call]]:
    from autofit.fakegpu import fake_gpu
    from autofit.fakegpu.depth.stack import shallow_models
    from autofit.plugin.protocol import Report, Task, WorstCase
    from autofit.plugin.registry import load

    task = Task(device="sim:h100", output=out, steps=2, worst_case=WorstCase(path=folder.case(config)))
    with fake_gpu("h100", enforce_capacity=False, record_places=False), shallow_models(pattern=1), Calls() as seen:
        load(config.trainer).build(folder.values(config), task).train(Report())
    gc.collect()
    found: dict[str, list[Call]] = seen.found
    return found


# -- the bytes of a call -----------------------------------------------------------------------------------------------


@contextmanager
def simulated() -> Iterator[Callable[[Call], Bytes]]:
    from autofit.fakegpu import fake_gpu

    with fake_gpu("h100", enforce_capacity=False, record_places=False) as gpu:
        allocator = gpu.memory.allocator

        def reset() -> int:
            allocator.reset_peaks()
            return allocator.allocated_bytes

        def taken(call: Call) -> Bytes:
            gpu.memory.empty_cache()
            return _taken(call, reset, lambda: (allocator.peak_allocated_bytes, allocator.allocated_bytes))

        _start_cublas()
        yield taken


@contextmanager
def dispatched() -> Iterator[Callable[[Call], Bytes]]:
    def reset() -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    counts = ctypes.CDLL("libcudart.so.13").null_gpu_counts

    def taken(call: Call) -> Bytes:
        torch.cuda.empty_cache()  # a call takes what it finds: a block of up to 1 MiB more is not split
        counts(rows_of_mask(call))
        try:
            return _taken(call, reset, lambda: (torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))
        finally:
            counts(-1)

    _start_cublas()
    yield taken


def rows_of_mask(call: Call) -> int:
    """The rows of a call's mask where they decide about its memory, the most that there may be; -1 elsewhere."""
    mask = next((part for part in tensors(call["args"]) if part["dtype"] == "bool"), None)
    if mask is None or call["op"] not in BY_MASK:
        return -1
    sizes = call["args"][2] if call["op"] == "aten.masked_scatter_backward.default" else mask["shape"]
    return min(int(prod(mask["shape"])), int(prod(sizes)))


def _start_cublas() -> None:
    """Its workspace stays for good, and belongs to no call."""
    matrix = torch.empty(64, 64, device="cuda")
    torch.mm(matrix, matrix)


def _taken(call: Call, reset: Callable[[], int], found: Callable[[], tuple[int, int]]) -> Bytes:
    """The most bytes while the operator runs, and those of its results, beside its arguments."""
    try:
        args, kwargs = made(call["args"]), made(call["kwargs"])
        before = reset()
        with torch.no_grad():
            out = operator(call["op"])(*args, **kwargs)
        peak, kept = found()
        del out
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return peak - before, kept - before


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare() -> None:
    """Write the table: each operator at SHAPES random shapes, or at those seen where it takes no others."""
    from null_gpu.build import NullGpu, build, h100s

    calls = [json.loads(line) for line in SEEN.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as home:
        gpu = NullGpu(libraries=build(Path(home) / "libraries"), home=Path(home))
        gpu.has(h100s(1))
        rows = compared(calls, gpu.env())
    TABLE.write_text(table(rows))
    print(table(rows), end="")


def compared(calls: Sequence[Call], env: dict[str, str], *, shapes: int = SHAPES) -> dict[str, list[Row]]:
    """{operator: its calls, with the bytes of both}. A call that CUDA's kernel refuses is drawn again."""
    by_op: dict[str, list[Call]] = {}
    for call in calls:
        by_op.setdefault(call["op"], []).append(call)
    rows: dict[str, list[Row]] = {}
    with _Child("simulate", {}) as simulate, _Child("dispatch", env) as dispatch:
        for op, seen in by_op.items():
            chance, rows[op] = random.Random(op), []
            for attempt in range(_TRIES):
                if len(rows[op]) == shapes:
                    break
                base = seen[attempt % len(seen)]
                call = resized(base, chance) if has_sizes(base) else base
                real = dispatch(call)
                if str(real).startswith(_ENDED):
                    rows[op] = [{"call": call, "real": real, "simulated": ""}]
                    break
                if not isinstance(real, str):
                    rows[op].append({"call": call, "real": real, "simulated": simulate(call)})
            for call in seen if not rows[op] else ():
                rows[op].append({"call": call, "real": dispatch(call), "simulated": simulate(call)})
    return rows


class _Child:
    """A process that answers calls, one line each; another one after a call that ended it."""

    def __init__(self, what: str, env: dict[str, str]) -> None:
        self._command = [sys.executable, "-m", "oracle.operators", what]
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Callable[[Call], Bytes]:
        return self._answer

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()

    def _answer(self, call: Call) -> Bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, env=self._env
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code, self._process = self._process.wait(), None
            return f"{_ENDED}{code}"
        found = json.loads(line)
        return found if isinstance(found, str) else (found[0], found[1])


def is_exact(row: Row) -> bool:
    return row["real"] == row["simulated"]


def table(rows: dict[str, list[Row]]) -> str:
    """Markdown: how many operators are exact to the byte, each that is not, and what did not run."""
    ran = {op: found for op, found in rows.items() if not isinstance(found[0]["real"], str)}
    exact = [op for op, found in ran.items() if all(map(is_exact, found))]
    lines = [
        "Peak and kept bytes of each operator, simulated and by the real CUDA build of torch without a card.", "",
        f"- {len(ran)} operators of traced steps and of small programs (`programs.py`), "
        f"{sum(map(len, ran.values()))} calls at random shapes",
        f"- {len(exact)} operators ({len(exact) / len(ran):.1%}) are exact to the byte at every shape",
        f"- {sum(op in BY_MASK for op in ran)} of them have as many rows as a mask has true elements: here all, the "
        "simulated card's worst case, as the null GPU is told to count them", "",
    ]  # fmt: skip
    if len(exact) < len(ran):
        lines += ["| not exact | calls | at | peak, kept | simulated |", "|---|---|---|---|---|"]
    for op, found in ran.items():
        wrong = [row for row in found if not is_exact(row)]
        if wrong:
            lines.append(f"| {op} | {len(wrong)} of {len(found)} | {_shapes(wrong[0]['call'])} | {wrong[0]['real']} | "
                         f"{wrong[0]['simulated']} |")  # fmt: skip
    few = [f"{op} ({len(found)})" for op, found in ran.items() if len(found) < SHAPES]
    if few:
        lines += ["", f"At fewer shapes, as random ones are refused: {', '.join(few)}."]
    lines += ["", "Not run by CUDA's dispatch without a card:", ""]
    lines += [f"- {op}: {NOT_RUN.get(op, found[0]['real'])}" for op, found in rows.items() if op not in ran]
    return "\n".join(lines) + "\n"


def _shapes(call: Any) -> str:
    return ", ".join(f"{part['dtype']}{part['shape']}" for part in tensors((call["args"], call["kwargs"])))[:160]


if __name__ == "__main__":
    main()
