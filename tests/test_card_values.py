"""Full runs on the CUDA build of torch without a card, with values: they learn what the CPU learns. `nox -s cuda`."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from null_gpu.build import NullGpu, h100s
from test_null_gpu import TRAINERS, null_gpu  # noqa: F401: a fixture
from test_rank_runs import Runs, logs

from autofit.probing.fork_server import ForkServer
from autofit.recipe.launch import Launch, Sharding
from autofit.recipe.recipe import TrainerName
from autofit.watching.events import read_progress

pytestmark = pytest.mark.cuda
CLOSE = 1e-5
COMPARED = ("loss", "grad_norm", "reward", "completions/mean_length", "rewards/margins", "kl", "entropy")
REWARD = '''"""Rewards that write the completions down."""
import json
import os

def share_of_t1(completions, **kwargs):
    with open(f"completions-{os.environ.get('RANK', 0)}.jsonl", "a") as file:
        file.write(json.dumps(completions) + "\\n")
    return [sum(word[-1] in "13579" for word in c.split()) / max(1, len(c.split())) for c in completions]
'''


@pytest.fixture(scope="module")
def on_card(null_gpu: NullGpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:  # noqa: F811
    with pytest.MonkeyPatch.context() as patch:
        for name, value in null_gpu.env(values=True).items():
            patch.setenv(name, value)
        found = ForkServer(tmp_path_factory.mktemp("warm-card"))
    yield found
    found.close()


@pytest.fixture
def trained(
    null_gpu: NullGpu, on_card: ForkServer, fork_server: ForkServer, tiny_model: Path, tmp_path: Path  # noqa: F811
) -> Callable[..., Path]:
    """Trains to the end on a device; the folder of the run."""

    def train(device: str, trainer: TrainerName, launch: Launch) -> Path:
        null_gpu.has(h100s(launch.ranks))
        server = on_card if device == "cuda" else fork_server
        assert server.is_ready()
        runs = Runs(server, tiny_model, tmp_path)
        folder = runs.folder(device, launch, trainer=trainer, device=device)
        (folder / "tiny_rewards.py").write_text(REWARD)
        assert runs.train(folder, "run" if launch.is_alone else "run_rank") is not None, logs(folder)
        return folder

    return train


def compare(card: Path, host: Path, trainer: TrainerName) -> None:
    here, there = (read_progress(folder) for folder in (host, card))
    assert [line["step"] for line in there] == [1, 2, 3, 4]
    for one, other in zip(here, there, strict=True):
        numbers = {key: one[key] for key in COMPARED if key in one}
        assert {"loss", "grad_norm"} <= numbers.keys()
        print("DIFF", trainer, one["step"], {k: (v, abs(float(other[k]) - float(v))) for k, v in numbers.items()})
        assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=CLOSE, abs=CLOSE)
    if trainer in ("grpo", "rloo"):
        assert completions(card) == completions(host)


def completions(folder: Path) -> list[str]:
    """Every completion that was scored, in its order, rank by rank."""
    found = [path.read_text() for path in sorted(folder.glob("completions-*.jsonl"))]
    assert found
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_training_on_the_cuda_build_learns_what_the_cpu_learns(
    trainer: TrainerName, trained: Callable[..., Path]
) -> None:
    compare(trained("cuda", trainer, Launch()), trained("cpu", trainer, Launch()), trainer)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_two_ranks_on_the_cuda_build_learn_what_two_on_the_cpu_learn(
    trainer: TrainerName, sharding: Sharding, trained: Callable[..., Path]
) -> None:
    launch = Launch(ranks=2, sharding=sharding)
    compare(trained("cuda", trainer, launch), trained("cpu", trainer, launch), trainer)
