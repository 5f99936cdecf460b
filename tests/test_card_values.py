"""Full runs on the CUDA build of torch without a card, with values: they learn what the CPU learns. `nox -s cuda`."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from null_gpu.build import NullGpu, h100s
from test_rank_runs import Runs, logs

from autofit.probing.fork_server import ForkServer
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import TrainerName
from autofit.watching.events import read_progress

pytestmark = pytest.mark.cuda
CLOSE = 1e-5
COMPARED = ("loss", "grad_norm", "entropy", "kl", "reward", "completions/mean_length", "rewards/margins")
GENERATE = ("grpo", "rloo")
REWARD = '''"""Rewards that write the completions down."""
import json
import os

def share_of_t1(completions, **kwargs):
    with open(f"completions-{os.environ.get('RANK', 0)}.jsonl", "a") as file:
        file.write(json.dumps(completions) + "\\n")
    return [sum(word[-1] in "13579" for word in c.split()) / max(1, len(c.split())) for c in completions]
'''
Train = Callable[..., Path]


@pytest.fixture(scope="module")
def on_card(null_gpu: NullGpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A fork server whose children see the cards that `null_gpu` has at that moment, with values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in null_gpu.env(values=True).items():
            patch.setenv(name, value)
        found = ForkServer(tmp_path_factory.mktemp("warm-card"))
    yield found
    found.close()


@pytest.fixture
def trained(null_gpu: NullGpu, on_card: ForkServer, fork_server: ForkServer, tiny_model: Path, tmp_path: Path) -> Train:
    """Trains to the end on a device; the folder of the run."""

    def train(device: str, trainer: TrainerName, launch: Launch, changes: Mapping[str, object]) -> Path:
        null_gpu.has(h100s(launch.ranks))
        server = on_card if device == "cuda" else fork_server
        assert server.is_ready()
        runs = Runs(server, tiny_model, tmp_path, device=device)
        folder = runs.folder(device, launch, trainer=trainer, **changes)
        (folder / "tiny_rewards.py").write_text(REWARD)
        assert runs.train(folder, "run" if launch.is_alone else "run_rank") is not None, logs(folder)
        return folder

    return train


def compare(trained: Train, trainer: TrainerName, launch: Launch, **changes: object) -> None:
    """Train on the card and on the CPU: the same losses, gradients and completions."""
    card, host = (trained(device, trainer, launch, changes) for device in ("cuda", "cpu"))
    lines, wanted = read_progress(card), read_progress(host)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all({"loss", "grad_norm"} <= line.keys() for line in wanted)
    for line, numbers in zip(lines, wanted, strict=True):
        numbers = {key: numbers[key] for key in COMPARED if key in numbers}
        assert {key: line[key] for key in numbers} == pytest.approx(numbers, rel=CLOSE, abs=CLOSE)
    assert completions(card) == completions(host)
    assert bool(completions(card)) == (trainer in GENERATE)


def completions(folder: Path) -> list[str]:
    """Every completion that was scored, in its order, a text for each rank."""
    return [path.read_text() for path in sorted(folder.glob("completions-*.jsonl"))]


def often(*cases: object) -> list[object]:
    """Cases that only `nox -s cuda` runs, not CI."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.thorough) for case in cases]


@pytest.mark.parametrize("trainer", ["reward", *often("sft", "dpo", "grpo", "rloo")])
def test_a_training_on_the_cuda_build_learns_what_the_cpu_learns(trainer: TrainerName, trained: Train) -> None:
    compare(trained, trainer, Launch())


@pytest.mark.parametrize(
    ("trainer", "sharding"),
    [("dpo", "ddp"), ("grpo", "fsdp2"),
     *often(("sft", "ddp"), ("sft", "fsdp2"), ("dpo", "fsdp2"), ("reward", "ddp"), ("reward", "fsdp2"), ("grpo", "ddp"),
            ("rloo", "ddp"), ("rloo", "fsdp2"))],
)  # fmt: skip
def test_two_ranks_on_the_cuda_build_learn_what_two_on_the_cpu_learn(
    trainer: TrainerName, sharding: Sharding, trained: Train
) -> None:
    compare(trained, trainer, Launch(ranks=2, sharding=sharding))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [{"bf16": True}, {"dtype": "bfloat16"}, {"use_peft": None}, {"attn_implementation": "eager"},
     {"gradient_checkpointing": False}, {"optim": "adamw_torch"}, {"optim": "adafactor"}, {"loss_type": "nll"}],
    ids=str,
)  # fmt: skip
def test_a_knob_changes_nothing_of_that(changes: dict[str, object], trained: Train) -> None:
    compare(trained, "sft", Launch(), **changes)


DROPOUT = """
x = torch.ones(1, 2, 4, 8, device="cuda")
torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
"""
UNSEEN = """
with torch.utils._python_dispatch._disable_current_modes():
    x = torch.ones(2, device="cuda")
x + 1
"""


ENDS = {
    "efficient_attention.default has no values": DROPOUT,
    "a kernel without values was started outside of an operator": UNSEEN,
}


def test_what_has_no_values_ends_the_program_with_its_name(null_gpu: NullGpu) -> None:
    """Each program is a fork of one that has imported torch, which takes longer."""
    null_gpu.has(h100s(1))
    program = f"""
import os, torch
for code in {list(ENDS.values())!r}:
    if os.fork():
        os.wait()
        continue
    exec(code)
    break
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **null_gpu.env(values=True)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    last_words = [line for line in done.stderr.splitlines() if line.startswith("NotImplementedError: ")]
    assert [any(told in words for words in last_words) for told in ENDS] == [True, True], done.stderr
