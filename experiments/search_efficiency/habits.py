"""Two common manual methods: a grid with early stopping, and halving the micro-batch when memory runs out."""

from collections.abc import Callable

import numpy as np
from cases import Case

Probe = Callable[[int], tuple[float | None, float]]
_PATIENCE = 5  # DeepSpeed's autotuner: `tuner_early_stopping` trials without a better one


def grid_early_stop(case: Case, probe: Probe, probes: int) -> None:
    """DeepSpeed's way: for each setting of the other knobs, the micro-batch rises until OOM or until it is slower.

    The baseline's own settings come first; the tuner gives up after `_PATIENCE` settings without a better one.
    """
    grid = case.grid
    column = grid.names.index("per_device_train_batch_size")
    others = np.delete(grid.codes, column, axis=1)
    keys, first, inverse = np.unique(others, axis=0, return_index=True, return_inverse=True)
    order = sorted(range(len(keys)), key=lambda k: int(first[k]))
    best, since, left = np.inf, 0, probes
    for key in order:
        rising = np.flatnonzero(inverse == key)
        last, better = np.inf, False
        for place in rising[np.argsort(grid.codes[rising, column])]:
            if not left:
                return
            left -= 1
            step, _ = probe(int(place))
            if step is None or step > last:
                break
            last, better = step, better or step < best
            best = min(best, step)
        since = 0 if better else since + 1
        if since >= _PATIENCE:
            return


def halve_on_oom(case: Case, probe: Probe, probes: int) -> None:
    """accelerate's `find_executable_batch_size`: the recipe with the largest micro-batch, halved until it fits."""
    grid, space = case.grid, case.space
    own = space.baseline
    base = grid.params(0)
    micro = space.recipe.effective_batch_size
    tried: set[int] = set()
    while micro >= 1 and len(tried) < probes:
        chunk = max(1, space.split(own)[0] * space.split(own)[2] // micro)
        place = grid.find({**base, "per_device_train_batch_size": micro, "steps_per_generation": chunk})
        if place is not None and place not in tried:
            tried.add(place)
            if probe(place)[0] is not None:
                return
        micro //= 2
    if not tried:
        probe(0)
