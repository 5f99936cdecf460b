"""Bytes of ring attention: ms-swift's and ring-flash-attn's own code against trainers/sequence.py.

Run: python -m experiments.frontends.sequence_bytes --ms-swift DIR --ring-flash-attn DIR, a checkout and an unpacked
sdist. Both run on the CPU with a process group whose collectives send nothing, as the last of four ranks, and with a
stand-in for flash-attn's kernels that allocates what these return. Prints the most bytes of forward and of backward.
"""

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autofit.fakegpu.rates.collectives import fake_ranks
from autofit.trainers import sequence

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from rank_peaks import allocator_bytes

TOKENS, HEADS, KEYS, WIDTH, RANKS = 4096, 8, 4, 64, 4


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
             max_seqlen_q: Any = None, max_seqlen_k: Any = None, dropout_p: float = 0.0, softmax_scale: float = 1.0,
             causal: bool = True, alibi_slopes: Any = None, return_softmax: bool = False, window_size_left: int = -1,
             window_size_right: int = -1) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # fmt: skip
    return torch.zeros(q.shape, dtype=q.dtype), torch.zeros((q.shape[1], len(q))), None, None


def _backward(dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any,
              cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None,
              dropout_p: float = 0.0, softmax_scale: float = 1.0, causal: bool = True, alibi_slopes: Any = None,
              deterministic: bool = False, window_size_left: int = -1,
              window_size_right: int = -1) -> None:  # fmt: skip
    for one in (dq, dk, dv):
        one.zero_()


def loaded(package: str, folder: Path, *files: str) -> ModuleType:
    """The last of some files of a package, without the rest of it."""
    home = ModuleType(package)
    home.__path__ = [str(folder)]
    sys.modules[package] = home
    for file in files:
        spec = importlib.util.spec_from_file_location(f"{package}.{file}", folder / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def peaks(attention: Callable[..., torch.Tensor]) -> Iterator[int]:
    """The most bytes of a forward pass, and of one with its backward."""
    kept = []  # what an earlier pass leaves is not freed within a later record
    for backward in (False, True):
        states = [torch.zeros((1, TOKENS, heads, WIDTH), dtype=torch.bfloat16, requires_grad=True)
                  for heads in (HEADS, KEYS, KEYS)]  # fmt: skip
        grad = torch.ones((1, TOKENS, HEADS, WIDTH), dtype=torch.bfloat16)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            out = attention(*states)
            if backward:
                out.backward(grad)
        kept += [*states, out]
        yield allocator_bytes(profiled)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("ms-swift", "ring-flash-attn"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(_flash_attn_varlen_forward=_forward, _flash_attn_varlen_backward=_backward)
    sys.modules |= {"flash_attn": ModuleType("flash_attn"), interface.__name__: interface}
    swift = loaded("sequence_parallel", options.ms_swift / "swift/sequence_parallel", "ring_utils",
                   "zigzag_ring_attn_npu", "zigzag_ring_attn")  # fmt: skip
    theirs = loaded("ring_flash_attn", options.ring_flash_attn / "ring_flash_attn", "utils", "llama3_flash_attn_varlen")
    with fake_ranks(RANKS, RANKS - 1):
        group: Any = torch.distributed.group.WORLD
        whole = torch.tensor([0, TOKENS * RANKS], dtype=torch.int32)
        own, keys = torch.tensor([0, TOKENS], dtype=torch.int32), whole
        pairs: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
            "ms-swift's ring": (
                lambda *states: swift.ZigZagRingFlashAttnVarlenFunc.apply(
                    *states, whole, TOKENS * RANKS, 0.0, None, True, (-1, -1), None, False, False, group
                ),
                lambda *states: sequence.Ring.apply(*states, RANKS, 1),
            ),
            "ring-flash-attn's llama3": (
                lambda *states: theirs.Llama3FlashAttnVarlenFunc.apply(
                    *(one.squeeze(0) for one in states), own, keys, TOKENS, TOKENS * RANKS, 1,
                    slice(0, TOKENS * RANKS), 0.0, None, True, (-1, -1), None, False, False, group,
                )[None],
                lambda *states: sequence.HeadByHead.apply(*states, group),
            ),
        }  # fmt: skip
        for name, (real, ours) in pairs.items():
            for what, a, b in zip(("forward", "backward"), peaks(real), peaks(ours), strict=True):
                print(f"| {name} | {what} | {a:,} | {b:,} | {b / a - 1:+.2%} |")


if __name__ == "__main__":
    main()
