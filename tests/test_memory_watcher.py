"""The memory watcher: on trainers with a law of bytes, then in a real training on a simulated card."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler

from autofit.watching.contract import Promise, StepFacts, Watched
from autofit.watching.events import EventKind, RunEvent
from autofit.watching.memory import MemoryWatcher
from autofit.watching.micro_batches import joined, visits_of
from autofit.watching.progress import Growth
from autofit.watching.projection import Law, Projection, Size

MB = 10**6
WEIGHTS, A_TOKEN, CONTEXT = 400 * MB, 100_000, 50 * MB


# ---------------------------------------------------------------------- the law
def project(seen: dict[Size, float], size: Size) -> Projection:
    return Law.of(seen).at(size)


def test_a_line_through_four_sizes_tells_the_fifth() -> None:
    found = project({Size(n): 7 * MB + 1000 * n for n in (10, 20, 30, 40)}, Size(400))
    assert found.fitted
    assert found.estimate == pytest.approx(7 * MB + 400_000)
    assert found.at_most == pytest.approx(10 * (7 * MB + 40_000))


def test_one_size_leaves_the_bytes_between_those_and_their_multiple() -> None:
    found = project({Size(10): 5.0 * MB}, Size(40))
    assert (found.estimate, found.at_most, found.fitted) == (5.0 * MB, 20.0 * MB, False)


@pytest.mark.parametrize("seed", range(5))
def test_the_upper_bound_holds_where_an_unseen_amount_takes_over(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = [(random.uniform(0, 9 * MB), random.uniform(0, 9e4)) for _ in range(5)]

    def law(tokens: int) -> float:
        return float(max(a + b * tokens for a, b in parts))

    found = project({Size(n): law(n) for n in (100, 150, 170, 220, 300)}, Size(9000))
    assert found.estimate <= law(9000) * 1.001
    assert law(9000) <= found.at_most


def test_eager_attention_grows_with_the_square() -> None:
    sizes = [Size(2 * n, 2 * n * n) for n in (50, 60, 80, 90, 120)]
    found = project({s: 3 * MB + 500 * s.tokens + 64 * s.square for s in sizes}, Size(2 * 2000, 2 * 2000**2))
    assert found.estimate == pytest.approx(3 * MB + 500 * 4000 + 64 * 8_000_000, rel=1e-6)


# ---------------------------------------------------------------------- the order
def test_each_micro_batch_names_its_longest_sample() -> None:
    visits = joined([[2, 0], [3, 1], [4]], np.array([5, 9, 7, 1, 3]))
    assert visits.longest.tolist() == [7, 9, 3]
    assert visits.row.tolist() == [2, 1, 4]
    assert visits.total.tolist() == [12, 10, 3]


@pytest.mark.parametrize("epoch", [0, 2])
def test_the_order_is_the_one_that_trains_and_no_random_number_is_used_up(epoch: int) -> None:
    trainer = FakeTrainer(list(range(1, 41)))
    before = torch.get_rng_state()
    visits = visits_of(trainer, epoch=epoch, most=100)
    assert visits is not None
    assert torch.equal(before, torch.get_rng_state())
    trainer.sampler.set_epoch(epoch)
    assert visits.row.tolist() == [max(batch) for batch in trainer.loader.batch_sampler]  # row n has n + 1 tokens


def test_an_order_that_is_drawn_only_when_the_epoch_begins_is_not_guessed() -> None:
    trainer = FakeTrainer([4] * 8)
    trainer.loader.batch_sampler.sampler = torch.utils.data.RandomSampler(trainer.train_dataset)
    assert visits_of(trainer, epoch=0, most=100) is None


# ---------------------------------------------------------------------- warnings
def test_a_longer_sample_is_told_long_before_its_step() -> None:
    lengths = [30 + 7 * (n % 9) for n in range(200)]
    lengths[137] = 3000
    run = FakeRun(lengths, limit_bytes=700 * MB)
    (event,) = run.train()
    assert run.oom_step is not None
    assert (event.kind, event.data["sample"], event.data["at_step"]) == (EventKind.MEMORY, 137, run.oom_step)
    assert event.step <= run.oom_step - 30
    assert event.data["limit_bytes"] == 700 * MB
    assert event.data["projected_bytes"] == pytest.approx(run.bytes_of(3000), rel=0.02)
    assert "will cross the limit at step" in event.text
    assert "sample 137 there is the longest so far, 3,000 tokens" in event.text


def test_the_length_to_set_is_the_longest_that_fits() -> None:
    lengths = [30 + 7 * (n % 9) for n in range(200)]
    lengths[137] = 900
    run = FakeRun(lengths, limit_bytes=600 * MB)
    (event,) = run.train()
    longest = int(event.text.split("at most ")[-1].split(" ")[0].replace(",", ""))
    assert run.bytes_of(longest) <= 600 * MB < run.bytes_of(longest + 20)


@pytest.mark.parametrize("seed", range(20))
def test_samples_of_the_usual_lengths_give_no_alarm(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(40), 0.4, 200), 8, 120).astype(int).tolist()
    run = FakeRun(lengths, seed=seed, noise=0.01)
    run.limit_bytes = int(run.bytes_of(max(lengths)) * 1.03)
    assert run.train() == []
    assert run.oom_step is None


@pytest.mark.parametrize("seed", range(20))
def test_one_longer_sample_among_them_always_does(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(40), 0.4, 200), 8, 120).astype(int).tolist()
    ordinary, row = max(lengths), int(random.integers(200))
    lengths[row] = ordinary * int(random.integers(3, 100))
    run = FakeRun(lengths, seed=seed, noise=0.01)
    if row in run.rows_of_step(1):
        pytest.skip("the longer sample comes in the first step, before any measure")
    run.limit_bytes = int(run.bytes_of(ordinary) * 1.03)
    events = run.train()
    assert [(e.data["sample"], e.data["at_step"]) for e in events] == [(row, run.oom_step)]
    assert all(e.step < int(str(e.data["at_step"])) for e in events)


def test_in_the_next_step_a_guess_counts_but_not_against_a_measured_promise() -> None:
    """Between the bytes seen and their multiple nothing is known yet; a probe that trained this sample knows."""
    lengths = [40] * 200
    lengths[FakeRun(lengths).rows_of_step(2)[0]] = 400
    (event,) = FakeRun(lengths, limit_bytes=560 * MB).train()
    assert (event.step, event.data["at_step"]) == (1, 2)
    assert "may cross the limit" in event.text
    promise = Promise(
        device_name="card", fidelity="measured", device_used_bytes=535 * MB, limit_bytes=560 * MB, step_s=None,
        samples_per_s=None, effective_batch_size=None,
    )  # fmt: skip
    assert FakeRun(lengths, limit_bytes=560 * MB, promise=promise).train() == []


def test_a_run_of_which_the_longest_has_passed_says_nothing_and_a_resume_knows_the_place() -> None:
    lengths = [40 + n % 5 for n in range(200)]
    run = FakeRun(lengths, limit_bytes=10**12)
    row = run.rows_of_step(30)[0]
    lengths[row] = 2000
    (event,) = FakeRun(lengths, limit_bytes=600 * MB, first_step=20).train()
    assert (event.data["sample"], event.data["at_step"]) == (row, 30)
    assert FakeRun(lengths, limit_bytes=600 * MB, first_step=30).train() == []


def test_on_a_cpu_nothing_is_looked_at() -> None:
    trainer = FakeTrainer([4] * 8)
    watcher = MemoryWatcher()
    assert list(watcher.begins(_watched(trainer, device="cpu"))) == []
    assert list(watcher.step_ends(StepFacts(number=1, step_s=1.0))) == []
    assert trainer.callbacks == []


# ---------------------------------------------------------------------- leaks
def test_a_leak_is_told_with_the_step_at_which_it_crosses() -> None:
    run = FakeRun([40] * 4000, limit_bytes=600 * MB, leak_bytes=MB // 4, noise=0.01)
    (event,) = run.train()
    assert run.oom_step is not None
    assert event.step < 60
    assert event.data["sample"] is None
    assert abs(int(str(event.data["at_step"])) - run.oom_step) <= 0.05 * run.oom_step
    assert "grows by" in event.text


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_memory_that_fills_up_once_are_no_leak(seed: int) -> None:
    random = np.random.default_rng(seed)
    noise, filling, walking = Growth(), Growth(), Growth()
    walk = np.clip(np.cumsum(random.normal(0, 1, 400)), -5, 5)
    for step in range(400):
        noise.add(step, int(WEIGHTS + random.normal(0, MB)))
        filling.add(step, int(WEIGHTS + MB * min(step, 40) + random.normal(0, MB / 10)))
        walking.add(step, int(WEIGHTS + MB * walk[step]))
    assert [trend.growth() for trend in (noise, filling)] == [None, None]
    assert (walking.growth() or 0.0) < MB / 20


def test_completions_that_become_longer_are_told_before_they_cross() -> None:
    run = FakeRun([40 + n % 7 for n in range(2000)], limit_bytes=540 * MB, completion=lambda step: 20 + step)
    run.trainer.args.max_completion_length, run.trainer.args.num_generations = 2000, 2
    run.trainer.args.steps_per_generation = 2
    (event,) = run.train()
    assert run.oom_step is not None
    assert event.step <= 60
    assert abs(int(str(event.data["at_step"])) - run.oom_step) <= 0.1 * run.oom_step
    assert "completions grow by 1 tokens a step" in event.text


def test_completions_of_a_steady_length_are_not() -> None:
    run = FakeRun([40] * 2000, limit_bytes=600 * MB, completion=lambda step: 20 + step * 7 % 11)
    run.trainer.args.max_completion_length, run.trainer.args.num_generations = 2000, 2
    run.trainer.args.steps_per_generation = 2
    assert run.train() == []


# ---------------------------------------------------------------------- real trainings
def test_the_peak_of_the_run_outlives_its_windows() -> None:
    from autofit.fakegpu import fake_gpu
    from autofit.watching.memory import CudaGauge, since_beginning

    with fake_gpu("t4", mode="cpu"):
        gauge = CudaGauge()
        large = torch.zeros(8 * MB, dtype=torch.uint8, device="cuda")
        del large
        assert gauge.window_bytes() >= 8 * MB
        assert gauge.window_bytes() == gauge.allocated_bytes() < MB
        assert since_beginning()["peak_allocated_bytes"] >= 8 * MB
        assert gauge.outside_bytes() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_training_is_warned_of_the_sample_that_ends_it(tmp_path: Path) -> None:
    from drift.trainings import drawn, trained

    case = drawn("sft", 0, with_longer=True)
    found = trained(case, tmp_path, capacity_bytes=1220 * MB)
    assert found.oom
    assert [(e.data["sample"], e.data["at_step"]) for e in found.warnings] == [(case.longer, found.steps + 1)]
    assert found.warnings[0].step <= found.steps


# ---------------------------------------------------------------------- a trainer with a law
class FakeTrainer:
    """What the watcher reads of a `transformers.Trainer`: its rows, their order, its arguments."""

    def __init__(self, lengths: list[int], *, seed: int = 3) -> None:
        self.train_dataset = [{"input_ids": [1] * n} for n in lengths]
        self.sampler = SeedableRandomSampler(self.train_dataset, data_seed=seed)
        batches = torch.utils.data.BatchSampler(self.sampler, 2, drop_last=False)
        self.loader = _Loader(batches)
        self.callback_handler = SimpleNamespace(train_dataloader=self.loader)
        self.args = SimpleNamespace(gradient_accumulation_steps=2, max_length=None, torch_compile=False)
        self.model = _Model()
        self.callbacks: list[Any] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


class _Loader:
    def __init__(self, batches: Any) -> None:
        self.batch_sampler = batches

    def __len__(self) -> int:
        return len(self.batch_sampler)


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.Embedding(4, 1)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embeddings


class _Card:
    """A card whose bytes the run sets."""

    capacity_bytes = 0

    def __init__(self) -> None:
        self.held = WEIGHTS
        self.peak = 0

    def allocated_bytes(self) -> int:
        return self.held

    def window_bytes(self) -> int:
        found, self.peak = max(self.peak, self.held), self.held
        return found

    def outside_bytes(self) -> int:
        return CONTEXT


class FakeRun:
    """A training whose micro-batches take 100 kB a token, on a card with a limit, watched from its begin to its end."""

    def __init__(
        self, lengths: list[int], *, limit_bytes: int = 0, seed: int = 3, noise: float = 0.0, leak_bytes: int = 0,
        first_step: int = 0, promise: Promise | None = None, completion: Callable[[int], int] = lambda _: 0,
    ) -> None:  # fmt: skip
        self.limit_bytes, self._noise, self._leak_bytes = limit_bytes, noise, leak_bytes
        self._completion = completion
        self.trainer, self._lengths = FakeTrainer(lengths, seed=seed), lengths
        self._first_step, self._promise = first_step, promise
        self._random = np.random.default_rng(seed)
        self.oom_step: int | None = None
        self._order = list(FakeTrainer(lengths, seed=seed).loader.batch_sampler)

    def rows_of_step(self, step: int) -> list[int]:
        return [row for batch in self._order[2 * step - 2 : 2 * step] for row in batch]

    def bytes_of(self, length: int) -> int:
        """The device-used bytes of a micro-batch with such a sample."""
        return WEIGHTS + CONTEXT + 5 * MB + 2 * length * A_TOKEN

    def train(self) -> list[RunEvent]:
        card = _Card()
        card.capacity_bytes = self.limit_bytes
        watcher = MemoryWatcher(card)
        last = len(self._order) // 2
        events = list(watcher.begins(_watched(self.trainer, self._first_step, last, promise=self._promise)))
        for step in range(self._first_step + 1, last + 1):
            if not self._step(step, card):
                self.oom_step = step
                break
            events += watcher.step_ends(StepFacts(number=step, step_s=1.0))
        return events + list(watcher.ends())

    def _step(self, step: int, card: _Card) -> bool:
        tell = [getattr(c, name) for c in self.trainer.callbacks for name in ("on_step_begin", "on_substep_end")]
        tell[0]()
        for batch in self._order[2 * step - 2 : 2 * step]:
            width = max(self._lengths[row] for row in batch) + self._completion(step)
            self.trainer.model.embeddings(torch.ones(len(batch), width, dtype=torch.long))
            noise = 1 + self._noise * self._random.uniform(-1, 0)
            card.peak = card.held + int((5 * MB + len(batch) * width * A_TOKEN) * noise)
            if card.peak + CONTEXT > self.limit_bytes:
                return False
            tell[1]()
        card.held += self._leak_bytes
        return True


def _watched(
    trainer: FakeTrainer, first_step: int = 0, last_step: int = 4, *, device: str = "cuda",
    promise: Promise | None = None,
) -> Watched:  # fmt: skip
    return Watched(
        folder=None, trainer="sft", values={}, device=device, generates=False, samples_per_step=4,
        first_step=first_step, last_step=last_step, promise=promise, hf_trainer=trainer,
    )  # fmt: skip
