"""How far a predicted time may be off: the distances, in logarithms, within which 9 of 10 are expected.

One number for each part of a step, and one for the card. A part's error is one for all of its kernels, and the errors
are independent of each other. So a step's is the root of the sum of squares of the card's and its parts', each part
weighted by its share of the step's seconds. Needs no torch.

- card: boards of one kind differ by 22 % in the worst of five large systems (arXiv:2208.11035), and a table is of one
  board. Of two drawn evenly from such a range, 9 of 10 pairs are within 0.684 of its width.
  Several cards wait for the slowest: in half of all groups of n it is beyond 0.5^(1/n) of the range.
- products: medians of two measurements of one card, with another framework, are 0.90 to 1.06 of each other; those told
  by another card's table 0.78 to 1.30 (experiments/rates/between_cards.py).
- attention: the forward is within 25 % at 95 % of the shapes held out (experiments/rates/held_out.py); the backward
  is 2.5 times as long by its FLOPs, and 2.9 times as we have it.
- others: what the cache keeps between two kernels was not measured. On the L40S, where it counts most, the others of a
  LoRA step (3B model, 872 tokens) would take 1.41 times as long if it kept nothing.
- collectives: measured between 2, 4 and 8 cards linked by NVLink, 19 of 20 held out are within 26 %
  (experiments/rates/make_nccl_table.py). On PCIe machines differ by their bridges: 20 and 1.4 GB/s were seen for L40S.
- host: published seconds a launch are 6 (one operator), 18 (twice) and 45 us (facebookresearch/sam2#768).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autofit.fakegpu.rates.collectives import TABLES
from autofit.fakegpu.rates.products import MEASURED
from autofit.fakegpu.specs import GpuSpec

HOST = "host"
COLLECTIVES = "collectives"
_CARD = 0.15
_BOARDS = 0.22
_BY_NVLINK, _BY_PCIE = 0.30, 1.0
_ERRORS = {"products": 0.10, "attention": 0.25, "others": 0.34, HOST: 0.70}
_BY_STAND_IN = {"products": 0.26, "attention": 0.35, "others": 0.34, HOST: 0.70}


def log_error(spec: GpuSpec, shares: Mapping[str, float], ranks: int = 1) -> float:
    """Half the width of the 90 % interval of a time, in logarithms; `shares` of its parts, 1 together.

    All `ranks` wait for the slowest of their boards.
    """
    of_collectives = _BY_NVLINK if spec.name in TABLES and spec.name != "l40s" else _BY_PCIE
    errors = {**(_ERRORS if spec.name in MEASURED else _BY_STAND_IN), COLLECTIVES: of_collectives}
    slowest = _BOARDS * (0.5 ** (1 / ranks) - 0.5)
    return math.hypot(_CARD, slowest, *(errors[part] * share for part, share in shares.items()))
