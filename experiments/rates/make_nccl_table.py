"""Make `autofit/fakegpu/rates/nccl.npz` anew from aiconfigurator-core's measurements of NCCL, and check what it tells.

Run: `python experiments/rates/make_nccl_table.py [wheel]` (downloads the wheel if none is given, about 2 minutes)

The rows of half precision; `message_size` counts elements there, so twice as many bytes (the rows of int8 with as many
bytes take as long). The whole message: of an all-gather the gathered tensor, as nccl-tests print it.

Held out: every second message size, told by its two neighbours; 4 cards told by 2 and 8; and the rows of int8, whose
collectives move as many bytes with other elements.
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from source import PACKAGE, VERSION, Columns, Floats, download, read

import autofit.fakegpu.rates
from autofit.fakegpu.rates.collectives import KINDS
from autofit.fakegpu.rates.kernels import STEP, RateGrid

PATH = Path(autofit.fakegpu.rates.__file__).parent / "nccl.npz"
NEWEST = {  # system: version of NCCL, the newest that was measured
    "a100_sxm": "2.27.3", "l40s": "2.27.3", "h100_sxm": "2.29.2", "h200_sxm": "2.29.2", "b200_sxm": "2.29.2",
    "b300_sxm": "2.29.2", "gb200": "2.29.2", "gb300": "2.29.2", "rtx_pro_6000_server": "2.29.2",
}  # fmt: skip
ITEM_BYTES = {"half": 2, "int8": 1}


def seconds(columns: Columns, kind: str, dtype: str = "half") -> tuple[Floats, Floats, Floats]:
    """(numbers of cards, bytes, seconds of each pair) of one operation; every pair was measured."""
    mine = (columns["op_name"] == kind) & (columns["nccl_dtype"] == dtype)
    cards, size, latency = (columns[name][mine].astype(float) for name in ("num_gpus", "message_size", "latency"))
    size = size * ITEM_BYTES[dtype]
    numbers, sizes = np.unique(cards), np.unique(size)
    found = np.full((len(numbers), len(sizes)), np.nan)
    found[np.searchsorted(numbers, cards), np.searchsorted(sizes, size)] = latency * 1e-3
    assert not np.isnan(found).any(), f"{kind}: a pair was not measured"
    return numbers, sizes, found


def error(told: Floats, measured: Floats) -> str:
    """Median, 95th percentile and largest relative error in percent."""
    wrong = 100 * np.abs(told / measured - 1.0).ravel()
    return f"{np.median(wrong):.1f} / {np.quantile(wrong, 0.95):.0f} / {wrong.max():.0f}"


def held_out(numbers: Floats, sizes: Floats, measured: Floats, other: Floats) -> tuple[str, str, str]:
    """Errors at every second size, at 4 cards told by 2 and 8, and of the rows of int8."""
    logs = np.log(measured)
    few = RateGrid((np.log(numbers), np.log(sizes[::2])), logs[:, ::2])
    mesh = np.meshgrid(numbers, sizes[1::2], indexing="ij")
    by_size = error(np.exp(few.at(mesh[0].ravel(), mesh[1].ravel())).reshape(mesh[0].shape), measured[:, 1::2])
    between = "-"
    if len(numbers) == 3:
        ends = RateGrid((np.log(numbers[::2]), np.log(sizes)), logs[::2])
        between = error(np.exp(ends.at(np.full_like(sizes, numbers[1]), sizes)), measured[1])
    return by_size, between, error(measured, other)


def main() -> None:
    wheel = download(sys.argv[1] if len(sys.argv) > 1 else None)
    made: dict[str, npt.ArrayLike] = {
        "source": f"{PACKAGE} {VERSION} (Apache-2.0, figures only): systems/data/<system>/comm/nccl/<version>, "
        + ", ".join(f"{system} {version}" for system, version in NEWEST.items())
        + "; half precision"
    }
    print("| system | operation | every second size | 4 cards by 2 and 8 | int8 | GB/s of the bus, 512 MiB |")
    print("|---|---|---|---|---|---|")
    for system, version in NEWEST.items():
        columns = read(wheel, f"{system}/comm/nccl/{version}/nccl_perf.parquet")
        for kind in KINDS:
            numbers, sizes, measured = seconds(columns, kind)
            _, _, other = seconds(columns, kind, "int8")
            assert np.array_equal(made.setdefault("bytes", sizes.astype(np.int64)), sizes)
            made[f"{system}/cards"] = numbers.astype(np.int16)
            made[f"{system}/{kind}"] = np.round(np.log(measured) / STEP).astype(np.int32)
            share = (numbers - 1) / numbers * (2 if kind == "all_reduce" else 1)
            bus = ", ".join(f"{x:.0f}" for x in share * sizes[-1] / measured[:, -1] / 1e9)
            print(
                f"| {system} | {kind} | {' | '.join(held_out(numbers, sizes, measured, other))} | {bus} |", flush=True
            )
    np.savez_compressed(PATH, **made)  # type: ignore[arg-type]
    print(f"\n{PATH.name}: {PATH.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
