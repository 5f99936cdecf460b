"""The answer of a worker: a row's figures as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from autofit.fakegpu import FakeGpu


def write_figures(out: Path, figures: Mapping[str, object], gpu: FakeGpu, started: float) -> None:
    """Write the `figures`, and what every row tells; `started` is `time.perf_counter()` at its begin."""
    more = {
        "attention": gpu.attention_kernels,
        "notes": gpu.notes,
        "wall_s": round(time.perf_counter() - started, 1),
    }
    out.write_text(json.dumps({**figures, **more}), encoding="utf-8")
