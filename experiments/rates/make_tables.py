"""Make the tables of `autofit/fakegpu/rates/` anew from the measurements of aiconfigurator-core.

Run: `python experiments/rates/make_tables.py [wheel]` (downloads the wheel if none is given, about 2 minutes)

One file a card, with the fitted waves of its products, the logarithms of measured over computed seconds (in steps of
1e-4), the same for attention, the achieved memory bandwidth and the time of the shortest kernel. `source` in each file
names the package, its version, its licence and the tables.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from fitting import attention_table, flops_frac, gemm_table, memory_frac
from source import CARDS, PACKAGE, VERSION, Card, Floats, attention, download, gemms

import autofit.fakegpu.rates
from autofit.fakegpu.rates.kernels import STEP

FOLDER = Path(autofit.fakegpu.rates.__file__).parent


def small(values: Floats) -> npt.NDArray[np.int16]:
    """Logarithms as 16-bit numbers; those beyond a factor of 26 are cut off."""
    return np.round(np.clip(values / STEP, -32767, 32767)).astype(np.int16)


def make(wheel: Path, card: Card) -> dict[str, Any]:
    measured = gemms(wheel, card)
    products = gemm_table(measured, card)
    shortest_s = float(np.nanmin(measured.seconds))
    attentions = attention_table(
        attention(wheel, card, "context"), attention(wheel, card, "generation"), card, shortest_s
    )
    w = products.waves
    waves = [w.shortest_s, w.bandwidth_frac, w.split_s, w.wave_s, w.cache_gain, w.cache_bytes, w.cache_power]
    return {
        "source": f"{PACKAGE} {VERSION} (Apache-2.0, figures only): systems/data/{card.folder}/gemm/{card.gemm}, "
                  f"{card.folder}/attention/{card.attention}; bfloat16",
        "waves": np.array([*waves, *w.tile_frac]),
        **{f"gemm_{name}": np.exp(axis) for name, axis in zip("mnk", products.corrections.axes, strict=True)},
        "gemm": small(products.corrections.values),
        **{f"attention_{i}": np.exp(axis) for i, axis in enumerate(attentions.prefill.axes)},
        "prefill": small(attentions.prefill.values),
        "decode": small(attentions.decode.values),
        "flash_version": card.flash_version,
        "machine": np.array([card.half_flops_per_s, card.bandwidth_bytes_per_s, card.sm_count]),
        "memory_frac": memory_frac(measured, card),
        "flops_frac": flops_frac(measured, card),
        "shortest_s": shortest_s,
    }  # fmt: skip


def main() -> None:
    wheel = download(sys.argv[1] if len(sys.argv) > 1 else None)
    for card in CARDS:
        path = FOLDER / f"{card.folder}.npz"
        made = make(wheel, card)
        np.savez_compressed(path, **made)
        print(
            f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, memory {made['memory_frac']:.3f} and products "
            f"{made['flops_frac']:.3f} of the data sheet, "
            f"shortest kernel {1e6 * float(made['shortest_s']):.2f} us"
        )


if __name__ == "__main__":
    main()
