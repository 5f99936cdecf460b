"""How many kernels and views an eager decode step has, for the host's cost of one: `HostCosts` has the result.

Run: `python experiments/rates/host_launches.py PATH_TO_GPT_FAST` (a clone of github meta-pytorch/gpt-fast, whose eager
Llama-2-7B took 1 / 25.5 s a token on an A100 80GB, as PyTorch's blog reports; none of its code is here)
"""

import sys
import warnings
from typing import Any, cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autofit.fakegpu import fake_gpu

TOKENS_PER_S = 25.5
VIEW_S = 1.5e-6


class Counter:
    """A listener of the clock."""

    def __init__(self) -> None:
        self.kernels = self.views = 0

    def view(self) -> None:
        self.views += 1

    def moment(self, lanes: object) -> int:
        return 0

    def wait(self, lanes: object, number: int) -> None: ...

    def kernel(self, *args: object, **kwargs: object) -> None:
        self.kernels += 1

    def decode_step(self, number: int) -> None: ...

    def decode_end(self) -> None: ...

    def engine(self, law: object) -> None: ...


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, sys.argv[1])
    with fake_gpu("a100-80gb") as gpu, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # as its eager decoding chose
        from model import Transformer  # type: ignore[import-not-found]

        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = Transformer.from_name("7B")
            model.setup_caches(max_batch_size=1, max_seq_length=208)
        token = torch.zeros(1, 1, dtype=torch.int, device="cuda")
        position = torch.zeros(1, dtype=torch.int, device="cuda")
        model(token, position)
        counter = Counter()
        gpu.clock.log = cast(Any, counter)
        logits = model(token, position)[0, -1]
        smallest = torch.topk(logits, 200).values[-1:]
        chances = torch.softmax(torch.where(logits < smallest, -float("inf"), logits), -1)
        torch.argmax(chances / torch.empty_like(chances).exponential_(1), dim=-1, keepdim=True)
    each = (1 / TOKENS_PER_S - counter.views * VIEW_S) / counter.kernels
    print(f"{counter.kernels} kernels, {counter.views} views: {each * 1e6:.1f} us a kernel")


if __name__ == "__main__":
    main()
