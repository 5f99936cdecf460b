"""The adapter for `transformers.Trainer` and what derives from it: a run that reports its steps and phases."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from autofit.plugin.loop import RandomStates
from autofit.plugin.protocol import EVALUATION, OPTIMIZER, Report, SampleFacts, own_checkpoints
from autofit.recipe.secrets import masked


class Spot(TrainerCallback):  # type: ignore[misc]
    """Remembers, between two optimizer steps, what the next step will change besides weights and optimizer.

    A checkpoint is saved at the end of a step, so this is the content of a checkpoint of that moment. Costs some
    microseconds a step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._between_steps = False
        self._optimizer_began = False
        self._kept: tuple[Any, float, RandomStates] | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._between_steps = True

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._between_steps = False

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self._optimizer_began = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._between_steps, self._optimizer_began = True, False
        self._keep(state)

    def on_log(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._keep(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._keep(state)

    def _keep(self, state: Any) -> None:
        if self._between_steps:
            self._kept = (copy.copy(state), float(self._trainer.current_flos), RandomStates.now())

    def save(self) -> bool:
        """Save the checkpoint of the last finished step. False, leaving it unsaved, if it would be inexact.

        Weights and optimizer are those of the last finished step until the optimizer begins.
        """
        trainer = self._trainer
        spread = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or trainer.args.world_size > 1
        if self._kept is None or self._optimizer_began or spread:
            return False
        state, flos, randoms = self._kept
        if int(state.global_step) != int(trainer.state.global_step):
            return False
        trainer.state, trainer.current_flos = state, flos
        randoms.restore()
        trainer._save_checkpoint(trainer.model, trial=None)
        return True


_EVALUATES = "evaluates_now"  # an attribute of a trainer

# What a checkpoint has besides trainer_state.json and the scheduler: each entry has all names of one file. FSDP writes
# one file, or a folder of shards in which .metadata comes last; DeepSpeed writes `latest` after every rank's share.
_STEP_OF_DEEPSPEED = "accelerator.deepspeed_engine_wrapped.engine.step"
_WEIGHTS = ("adapter_model.*", "model*.safetensors", "pytorch_model*.bin")
_ALIKE = (("optimizer.pt",), _WEIGHTS)
_FSDP = (("optimizer.bin", "optimizer_0/.metadata"), ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata"))
_DEEPSPEED = (("latest",),)


class TransformersRun:
    """A `transformers.Trainer` as a run.

    `phases` has the methods of the trainer (dotted paths) during which a phase of its own is at work; all else in an
    optimizer step is `update` or `optimizer`.
    """

    evaluates = False  # whether its evaluation is one batch, made to be asked for by a probe
    weighs_samples_alike = False  # whether a smaller last micro-batch of an epoch counts by its samples or tokens

    def __init__(
        self, trainer: Any, *, phases: Mapping[str, str], samples_per_step: int, tokens_per_step: int | None = None
    ) -> None:
        self.trainer = trainer
        self.samples_per_step = samples_per_step
        self.tokens_per_step = tokens_per_step
        self._phases = phases
        self._spot = Spot(trainer)

    @property
    def model(self) -> torch.nn.Module:
        model = self.trainer.model
        assert isinstance(model, torch.nn.Module)
        return model

    @property
    def scoring_share(self) -> float:
        return 0.0

    @property
    def rollout_share(self) -> float:
        return 1.0

    @property
    def steps_between_saves(self) -> int:
        return 1

    @property
    def rollout_every(self) -> int:
        """Micro-batches in a row: of a rollout, or of a step on one sample; 0 if all must run."""
        one_row = getattr(self.trainer, "repeats_one_row", False)
        return int(self.trainer.args.gradient_accumulation_steps) if one_row else 0

    def kinds(self) -> list[object]:
        """The kind of each micro-batch of the row at work: those of one kind have the same shapes and masks."""
        return [None] * self.rollout_every

    @property
    def last_step(self) -> int:
        return int(self.trainer.state.max_steps)

    def train(self, report: Report, *, resume_from: Path | None = None) -> None:
        self._reporter = reporter = _Reporter(report, self.trainer, evaluates=self.evaluates)
        _report_saves(self.trainer, reporter, report)
        for path, phase in self._phases.items():
            _report_phase(self.trainer, path, phase, report)
        _report_evaluation(self.trainer, report)
        if report.leaves_out and self.rollout_every:
            leave_out_repeated(self.trainer, report, rollout_every=self.rollout_every, kinds=self.kinds)
        if report.one_in_first_step:
            compute_one_in_first_step(self.trainer, last=report.one_in_first_step == "last")
        self.trainer.add_callback(reporter)
        self.trainer.add_callback(self._spot)
        arguments: Any = type(self.trainer.args)  # pickled into each checkpoint (training_args.bin), tokens in clear
        arguments.__getstate__ = lambda given: masked(vars(given))
        if resume_from is not None:
            self.before_resuming(resume_from)
        self.trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))

    def before_resuming(self, checkpoint: Path) -> None:
        """Correct the state that the trainer resumes inexactly by itself; here there is none."""

    def save_on_the_spot(self) -> bool:
        """Save the last finished step's checkpoint after a failed step; False if it would be inexact."""
        self._reporter.request_save()
        return self._spot.save()

    @property
    def sample_facts(self) -> SampleFacts:
        rows: int | None = None
        with suppress(TypeError, AttributeError):  # a stream has no length
            rows = len(self.trainer.train_dataset)
        drops = bool(self.trainer.args.dataloader_drop_last)
        last = self.last_step or None  # 0: the training has not begun
        return SampleFacts(rows=rows, last_step=last, drops_last=drops, weighs_alike=self.weighs_samples_alike)

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        """True if every file is there that the trainer continues from; a kill while saving leaves some out."""
        if not all(any(any(checkpoint.glob(name)) for name in names) for names in self._needed):
            return False
        try:
            state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
            return int(state["global_step"]) == int(checkpoint.name.rsplit("-", 1)[1])
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @property
    def _needed(self) -> tuple[tuple[str, ...], ...]:
        """The files of a whole checkpoint, by all their names (patterns); each rank has a random state of its own."""
        trainer = self.trainer
        ranks = 1 if trainer is None else int(trainer.args.world_size)
        random = (("rng_state*.pth",),) if ranks == 1 else tuple((f"rng_state_{rank}.pth",) for rank in range(ranks))
        fsdp, deepspeed = (
            trainer is not None and getattr(trainer, name) for name in ("is_fsdp_enabled", "is_deepspeed_enabled")
        )
        how = _FSDP if fsdp else _DEEPSPEED if deepspeed else _ALIKE
        return (("trainer_state.json",), ("scheduler.pt",), *how, *random)

    def save_model(self, folder: Path) -> None:
        self.trainer.save_model(str(folder))


def _report_phase(trainer: Any, path: str, phase: str, report: Report) -> None:
    """Make the method at the dotted `path` from the trainer run within `phase`, if the trainer has it."""
    *parts, method = path.split(".")
    owner = trainer
    for part in parts:
        owner = getattr(owner, part, None)
    original = getattr(owner, method, None)
    if original is None:
        return

    def within(*args: Any, **kwargs: Any) -> Any:
        if getattr(trainer, _EVALUATES, False):
            return original(*args, **kwargs)
        with report.phase(phase):
            return original(*args, **kwargs)

    setattr(owner, method, within)


def _report_evaluation(trainer: Any, report: Report) -> None:
    """Make an evaluation within the training one phase, with all generation and scoring in it.

    It lasts until another begins, as the allocator keeps what it reserved for it.
    """
    original = trainer._evaluate

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        report.enter(EVALUATION)
        setattr(trainer, _EVALUATES, True)
        found = original(*args, **kwargs)
        setattr(trainer, _EVALUATES, False)
        return found

    trainer._evaluate = evaluate


def _report_saves(trainer: Any, reporter: "_Reporter", report: Report) -> None:
    """Make the trainer say of every checkpoint whether it was written, and put those that `report` asked for apart."""
    save = trainer._save_checkpoint

    def saving(*args: Any, **kwargs: Any) -> None:
        own = reporter.takes_request() or not trainer.control.should_save  # the latter: saved outside of its turn
        with _own_place(trainer.args) if own else nullcontext():
            checkpoint = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
            report.save_begins()
            try:
                save(*args, **kwargs)
            except Exception as error:
                if not report.save_failed(checkpoint, error):
                    raise
            else:
                report.saved(checkpoint)

    trainer._save_checkpoint = saving


@contextmanager
def _own_place(arguments: Any) -> Iterator[None]:
    """Context whose checkpoints go to autofit's own folder, outside the recipe's limit and any push to the hub."""
    changes = {
        "output_dir": str(own_checkpoints(Path(arguments.output_dir))), "save_total_limit": None, "push_to_hub": False,
    }  # fmt: skip
    kept = {name: getattr(arguments, name) for name in changes}
    try:
        for name, value in changes.items():
            setattr(arguments, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(arguments, name, value)


class _Reporter(TrainerCallback):  # type: ignore[misc]
    """Passes transformers' callbacks on, and the receiver's wishes back."""

    def __init__(self, report: Report, trainer: Any, *, evaluates: bool) -> None:
        self._report, self._evaluates = report, evaluates
        self._trainer = trainer
        self._requested = False

    def request_save(self) -> None:
        """The next checkpoint is the receiver's."""
        self._requested = True

    def takes_request(self) -> bool:
        """True if the checkpoint to save now is the receiver's, rather than the recipe's; asked once for each."""
        requested, self._requested = self._requested, False
        return requested

    def on_train_begin(self, *_: object, **__: object) -> None:
        # DeepSpeed's engine steps at the end of its backward, before transformers speaks of the optimizer
        _report_phase(self._trainer, _STEP_OF_DEEPSPEED, OPTIMIZER, self._report)
        self._report.train_begins()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self._report.step_begins(state.global_step)

    def on_substep_end(self, *_: object, **__: object) -> None:
        self._report.micro_step_ends()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: object
    ) -> None:
        self._report.gradient_is_whole(model, optimizer)

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self._report.optimizer_ends()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        wanted = self._report.step_ends(state.global_step)
        self._requested = wanted.save and not control.should_save
        control.should_save = control.should_save or wanted.save
        control.should_training_stop = control.should_training_stop or wanted.stop
        control.should_evaluate = control.should_evaluate or (wanted.evaluate and self._evaluates)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: object) -> None:
        if logs and "loss" in logs:
            self._report.logs(state.global_step, state.max_steps, logs)


# -- micro-batches that are not computed ------------------------------------------------------------------------------

COMPUTED = 3  # first ones of a row that are alike; the last one is computed too
_LEAST = COMPUTED + 3  # in a row, below which all are computed


def leave_out_repeated(
    trainer: Any, report: Report, *, rollout_every: int, kinds: Callable[[], Sequence[object]]
) -> None:
    """Let the trainer compute only some micro-batches between two rollouts or optimizer steps, and tell `report`.

    Of a row the first three are computed, more where `report` finds the last two unlike, and the last one.
    `rollout_every` is the number of micro-batches in a row; a trainer that generates counts them in `_step`. `kinds`
    gives the kind of each of them, once a rollout is there: neighbours of one kind are alike. Of a step of many short
    rows, whole ones are left out, each with its rollout: `report` is told of the last micro-batch of each.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32
    generates, of_each, of_rows = hasattr(trainer, "_step"), list[object](), list[list[object]]()
    skips = False  # the micro-batch before, or the row before, was left out
    sleeps = bool(getattr(trainer.args, "vllm_enable_sleep_mode", False))  # each rollout gives unused memory back

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal of_each, skips
        each = int(trainer.args.gradient_accumulation_steps)
        number = next(done)
        in_step, in_rollout = number % each, int(trainer._step if generates else number) % rollout_every
        rows, rest = divmod(each, rollout_every)
        if not rest and rows > COMPUTED + 1 and rollout_every < _LEAST and not sleeps:
            if not in_rollout:
                row = in_step // rollout_every
                may = COMPUTED <= row < rows - 1 and of_rows[-1] == of_rows[-2]
                skips = may and (skips or report.last_are_alike())
            return in_short_row(in_rollout, args, kwargs)
        before, left = min(in_step, in_rollout), min(each - in_step, rollout_every - in_rollout)
        if before + left < _LEAST:
            return original(*args, **kwargs)
        if in_rollout == 1:  # the first micro-batch makes the rollout
            of_each = list(kinds())
        if in_rollout:
            before = min(before, _alike(of_each[in_rollout], reversed(of_each[:in_rollout])))
            left = min(left, _alike(of_each[in_rollout], of_each[in_rollout:]))
        skips = before >= COMPUTED and left > 1 and (skips or report.last_are_alike())
        report.micro_step_begins(left_out=skips)
        return _nothing(trainer, dtype) if skips else computed(args, kwargs)

    def in_short_row(place: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        last = place == rollout_every - 1
        if last:
            report.micro_step_begins(left_out=skips)
        if skips:
            return _nothing(trainer, dtype)
        loss = computed(args, kwargs)
        if last:
            of_rows.append(list(kinds()))
        return loss

    def computed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        nonlocal dtype
        loss = original(*args, **kwargs)
        dtype = loss.dtype
        return loss

    trainer.training_step = training_step


def compute_one_in_first_step(trainer: Any, *, last: bool) -> None:
    """Let the trainer compute only the first micro-batch of the first step, which already makes all gradients.

    What it leaves behind for the second step is what the last one would. Of several ranks that is the `last`, which
    adds up their gradients.
    """
    original, done, dtype = trainer.training_step, count(), torch.float32

    def training_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal dtype
        number, several = next(done), int(trainer.args.gradient_accumulation_steps)
        if number < several and number != (several - 1 if last else 0):
            return _nothing(trainer, dtype)
        loss = original(*args, **kwargs)
        dtype = loss.dtype
        return loss

    trainer.training_step = training_step


def _nothing(trainer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The loss of a skipped micro-batch. A trainer that generates counts it in `_step`."""
    if hasattr(trainer, "_step"):
        trainer._step += 1
    return torch.zeros((), dtype=dtype, device=trainer.args.device)


def _alike(kind: object, others: Iterable[object]) -> int:
    """Number of the first `others` in a row that are of the `kind`."""
    return sum(1 for _ in takewhile(lambda other: other == kind, others))
