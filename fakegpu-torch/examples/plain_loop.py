"""The largest batch of a small network that fits a card, found by running the loop: `python plain_loop.py rtx4090`."""

import sys

import torch
from fakegpu_torch import fake_gpu


def fits(card: str, batch: int) -> bool:
    with fake_gpu(card):
        try:
            model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(24))).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.randn(batch, 4096, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return False
    return True


if __name__ == "__main__":
    card = sys.argv[1] if len(sys.argv) > 1 else "rtx4090"
    batch = 1024
    while fits(card, 2 * batch):
        batch *= 2
    print(f"{card}: a batch of {batch} fits, {2 * batch} does not")
