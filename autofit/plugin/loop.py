"""The adapter for a plain torch loop: a training of one's own becomes a trainer by a few methods.

`Loop` is one training: its model, its optimizer, the micro-batches of a step and the loss of one of them. `LoopTrainer`
is the trainer: the keys of its recipe (a dataclass), its longest sample, and how a loop is made. trainers/README.md
walks through an example. Imports torch.
"""

import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import gcd
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

import numpy as np
import torch

from autofit.errors import ConfigError, nearest
from autofit.files import write_json
from autofit.plugin.protocol import Facts, Inspection, Report, SampleFacts, Task, WorstCase, own_checkpoints
from autofit.recipe.keys import BatchKeys, Tier, divisors
from autofit.recipe.secrets import into_environment
from autofit.recipe.yaml_file import accepts, readable


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of the random number generators that a trainer's checkpoint holds."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]

    @classmethod
    def now(cls) -> "RandomStates":
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


_STATE = "loop.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Arguments for making a loop.

    `sample` is given in a probe: train random weights on that sample alone, at full length. With `proof` the loop is a
    run of a gradient proof: small models in float32 with no dropout, and samples that depend only on their number in
    the optimizer step.
    """

    device: torch.device
    sample: Mapping[str, Any] | None = None
    proof: bool = False

    @property
    def random_weights(self) -> bool:
        """True if weights are made from a model's config; a probe and a proof download none."""
        return self.sample is not None or self.proof


class Loop(ABC):
    """One training. autofit calls `micro_batches` once an optimizer step, `loss` for each, and steps the optimizer."""

    model: torch.nn.Module  # the trained model
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def micro_batches(self, step: int, report: Report) -> Sequence[Any]:
        """The micro-batches of optimizer step number `step` (0 is the first), one for each accumulation.

        Generate and score here, each within `report.phase("rollout")` or `report.phase("scoring")`.
        """

    @abstractmethod
    def loss(self, micro_batch: Any) -> torch.Tensor:
        """A micro-batch's share of the loss of its optimizer step: the shares of a step add up to the step's loss."""

    def logs(self) -> Mapping[str, float]:
        """Values to log of the step that has just ended, besides the loss."""
        return {}

    def state(self) -> dict[str, Any]:
        """Content of a checkpoint besides weights, optimizer and random state (a scheduler's state); tensors, numbers
        and text."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027  (most loops have nothing to continue)
        """Continue from what `state` returned."""


class LoopRun:
    """A loop as a run."""

    scoring_share = 0.0
    rollout_share = 1.0
    steps_between_saves = 1

    def __init__(
        self, loop: Loop, *, steps: int, output: Path, samples_per_step: int, tokens_per_step: int | None = None
    ) -> None:
        self.loop = loop
        self.last_step = steps
        self.samples_per_step = samples_per_step
        self.tokens_per_step = tokens_per_step
        self._output = output
        self._report = Report()
        self._before_step: tuple[int, RandomStates] | None = None  # until the optimizer begins

    @property
    def model(self) -> torch.nn.Module:
        return self.loop.model

    @property
    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, p) for name, p in self.loop.model.named_parameters() if p.requires_grad)

    def train(self, report: Report, *, resume_from: Path | None = None) -> None:
        self._report = report
        first = 0 if resume_from is None else self._resume(resume_from)
        report.train_begins()
        for step in range(first, self.last_step):
            self._before_step = (step, RandomStates.now())
            report.step_begins(step)
            loss = self._step(step, report)
            wanted = report.step_ends(step + 1)
            report.logs(step + 1, self.last_step, {"loss": loss, **self.loop.logs()})
            if wanted.save:
                self._try_to_save(step + 1, report)
            if wanted.stop:
                return

    def _step(self, step: int, report: Report) -> float:
        """One optimizer step; its loss."""
        loop, total = self.loop, 0.0
        micro_batches = loop.micro_batches(step, report)
        for number, micro_batch in enumerate(micro_batches, start=1):
            loss = loop.loss(micro_batch)
            loss.backward()
            total += float(loss.detach())
            del loss
            if number < len(micro_batches):
                report.micro_step_ends()
        report.gradient_is_whole(loop.model, loop.optimizer)
        self._before_step = None
        loop.optimizer.step()
        report.optimizer_ends()
        loop.optimizer.zero_grad(set_to_none=True)
        return total

    @property
    def sample_facts(self) -> SampleFacts:
        return SampleFacts(rows=None)

    def save_on_the_spot(self) -> bool:
        """Save the last finished step's checkpoint after a failed step; False if it would be inexact.

        A loop with a state of its own may have moved it in the failed step.
        """
        if self._before_step is None or type(self.loop).state is not Loop.state:
            return False
        step, randoms = self._before_step
        randoms.restore()
        self._try_to_save(step, self._report)
        return True

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _try_to_save(self, step: int, report: Report) -> None:
        final = own_checkpoints(self._output) / f"checkpoint-{step}"
        with report.phase("save"):
            report.save_begins()
            try:
                self._save(step)
            except Exception as error:
                shutil.rmtree(_partial(final), ignore_errors=True)
                if not report.save_failed(final, error):
                    raise
            else:
                report.saved(final)

    def _save(self, step: int) -> None:
        """Put a whole checkpoint in place: it is written beside its place and renamed."""
        final = own_checkpoints(self._output) / f"checkpoint-{step}"
        partial = _partial(final)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        content = {
            "step": step, "trained": {name: p.detach() for name, p in self._trained},
            "optimizer": self.loop.optimizer.state_dict(), "random": torch.get_rng_state(), "cuda_random": cuda,
            "own": self.loop.state(),
        }  # fmt: skip
        torch.save(content, partial / _STATE)
        shutil.rmtree(final, ignore_errors=True)
        partial.replace(final)

    def _resume(self, checkpoint: Path) -> int:
        """Continue from `checkpoint`; the optimizer steps that it has finished."""
        device = next(self.loop.model.parameters()).device
        content = torch.load(checkpoint / _STATE, weights_only=True, map_location=device)
        with torch.no_grad():
            for name, parameter in self._trained:
                parameter.copy_(content["trained"][name])
        self.loop.optimizer.load_state_dict(content["optimizer"])
        self.loop.load_state(content["own"])
        torch.set_rng_state(content["random"].cpu())
        if content["cuda_random"]:
            torch.cuda.set_rng_state_all([state.cpu() for state in content["cuda_random"]])
        return int(content["step"])

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        return (checkpoint / _STATE).exists()  # the folder was put in place with everything in it

    def save_model(self, folder: Path) -> None:
        """The trained weights, as transformers saves them where the model is one of its."""
        save = getattr(self.loop.model, "save_pretrained", None)
        if callable(save):
            save(folder)
            return
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({name: p.detach() for name, p in self._trained}, folder / "trained.pt")


def _partial(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.part")


class LoopTrainer(ABC):
    """A trainer of one's own. Name an instance of a subclass as `--trainer module:object`."""

    name: ClassVar[str]
    settings: ClassVar[type]  # a dataclass: the keys of a recipe, their types and defaults
    space: ClassVar[Path]  # the default search space
    keys: ClassVar[BatchKeys]

    @abstractmethod
    def loop(self, settings: Any, setup: Setup) -> Loop:
        """The training of `settings`, made as `setup` asks. Raises ConfigError."""

    @abstractmethod
    def longest_sample(self, settings: Any) -> dict[str, Any]:
        """The longest sample of the data, as JSON; its key `tokens` says how many tokens it has. Raises ConfigError."""

    def steps(self, settings: Any) -> int:
        """Optimizer steps of the whole training: the key `max_steps`, unless a subclass says it otherwise."""
        if not hasattr(settings, "max_steps"):
            raise ConfigError(
                f"the trainer {self.name} must say how long it trains: give its settings a key max_steps, or define "
                f"steps(settings)"
            )
        return int(settings.max_steps)

    def tiers(self, settings: Any) -> Mapping[str, Tier]:
        """Knobs that change more under this recipe than their space declares."""
        return {}

    def model_name(self, settings: Any) -> str:
        """Name of the trained model, in words."""
        return str(getattr(settings, "model", self.name))

    @property
    def compared(self) -> tuple[str, ...]:
        """Keys that the gradient proof trains with: a loop in a proof must heed them."""
        return (self.keys.micro_batch, self.keys.accumulation)

    # -- the protocol ------------------------------------------------------------------------------------------------

    def parse(self, values: Mapping[str, object]) -> Any:
        """`values` as `settings`; `env` sets environment variables. Raises ConfigError that names every wrong key."""
        given = dict(values)
        env = given.pop("env", {})
        if not isinstance(env, dict):
            raise ConfigError(f"env must be a mapping of environment variables; got {env!r}")
        hints = get_type_hints(self.settings)
        known = {field.name: field for field in fields(self.settings)}
        wrong = [f"unknown key {key!r}{nearest(key, known)}" for key in given if key not in known]
        wrong += [
            f"{key} must be {readable(hints[key])}; got {value!r}"
            for key, value in given.items()
            if key in known and not accepts(value, hints[key])
        ]
        required = (f for f in known.values() if f.default is MISSING and f.default_factory is MISSING)
        wrong += [f"{field.name} is missing" for field in required if field.name not in given]
        batch = (self.keys.micro_batch, self.keys.accumulation, self.keys.rollout, self.keys.group)
        low = [key for key in batch if isinstance(value := given.get(key or ""), int) and value < 1]
        wrong += [f"{key} must be 1 or more; got {given[str(key)]!r}" for key in low]
        if wrong:
            raise ConfigError("; ".join(wrong))
        into_environment(values)
        return self.settings(**given)

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        if inspection.ranks > 1:
            raise ConfigError(
                f"a plain torch loop such as {self.name} trains on one rank; got num_processes: {inspection.ranks}; "
                "remove it, or make the trainer a transformers.Trainer, which accelerate puts on several"
            )
        settings = self.parse(values)
        self.steps(settings)  # reports a missing one before the search, not after it
        asked = inspection.prompt_tokens
        made_up = asked is not None
        sample: dict[str, Any] = {"tokens": asked} if made_up else self.longest_sample(settings)
        if not isinstance(sample.get("tokens"), int):
            raise ConfigError(f"longest_sample of {self.name} must return a whole number of `tokens`; got {sample!r}")
        write_json(inspection.worst_case.path, sample)
        tokens = int(sample["tokens"])
        return Facts(
            name=self.name, resolved=asdict(settings), values=dict(values), keys=self.keys, space=str(self.space),
            model=self.model_name(settings), trains_on_data=not made_up, tiers=self.tiers(settings),
            compared=self.compared, longest_sample_tokens=None if self.keys.rollout else tokens,
            longest_prompt_tokens=tokens if self.keys.rollout else None, content_hash=str(sorted(sample.items())),
        )  # fmt: skip

    def build(self, values: Mapping[str, object], task: Task) -> LoopRun:
        settings = self.parse(values)
        sample = None if task.worst_case is None else task.worst_case.facts
        device = torch.device("cpu" if task.device == "cpu" else "cuda")
        loop = self.loop(settings, Setup(device=device, sample=sample))
        samples = self._samples_per_step(settings)
        return LoopRun(
            loop, steps=self.steps(settings) if task.steps is None else task.steps, output=task.output,
            samples_per_step=samples, tokens_per_step=None if sample is None else samples * int(sample["tokens"]),
        )  # fmt: skip

    def _samples_per_step(self, settings: Any) -> int:
        return int(getattr(settings, self.keys.micro_batch)) * int(getattr(settings, self.keys.accumulation))

    def layers(self, values: Mapping[str, object], worst_case: WorstCase) -> Any:
        raise NotImplementedError("Facts.forecasts is False: no trace of few layers stands for this trainer's models")

    def small_trainings(
        self, recipes: Mapping[str, Mapping[str, object]], folder: Path, *, most_samples: int, most_steps: int,
        ranks: Mapping[str, int] | None = None,
    ) -> "_SmallLoops":  # fmt: skip
        if ranks:
            raise ConfigError(f"the trainer {self.name} is a loop of one process; its proof has one rank")
        return _SmallLoops(self, recipes, folder, most_samples=most_samples)


class _SmallLoops:
    """The small trainings of a loop: one optimizer step each, of plain SGD."""

    stand_in = None
    steps = 1

    def __init__(
        self, trainer: LoopTrainer, recipes: Mapping[str, Mapping[str, object]], folder: Path, *, most_samples: int
    ) -> None:
        self._trainer, self._folder = trainer, folder
        key = trainer.keys.accumulation
        parsed = {name: trainer.parse(values) for name, values in recipes.items()}
        samples = trainer._samples_per_step(parsed["baseline"])
        common = gcd(*(int(getattr(settings, key)) for settings in parsed.values()))
        self.divided_by = min((n for n in divisors(common) if samples // n <= most_samples), default=common)
        self.samples_per_step = samples // self.divided_by
        self._settings = {
            name: trainer.parse({**recipes[name], key: int(getattr(settings, key)) // self.divided_by})
            for name, settings in parsed.items()
        }
        self.model = f"the small models of {trainer.name}"

    def run(self, name: str) -> LoopRun:
        torch.manual_seed(0)  # the same small weights in every run
        loop = self._trainer.loop(self._settings[name], Setup(device=torch.device("cpu"), proof=True))
        loop.optimizer = torch.optim.SGD([p for p in loop.model.parameters() if p.requires_grad], lr=1e-3)
        return LoopRun(loop, steps=self.steps, output=self._folder, samples_per_step=self.samples_per_step)
