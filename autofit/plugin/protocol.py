"""The interface of trainers: one typed protocol, for TRL's trainers, RLOO and a loop of one's own alike.

A trainer is one object that is named as `module:object`, or by an entry point of the group `autofit.trainers`. It is
only loaded in processes that may import torch (the fork server's children, a proof, a promoted run); the search itself
knows the `Facts` that it told. `autofit.plugin.transformers_run` and `autofit.plugin.loop` are adapters: with them, a
`transformers.Trainer` or a plain torch loop is a few methods (trainers/README.md).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from autofit.files import written_json
from autofit.recipe.keys import BatchKeys, Tier

if TYPE_CHECKING:
    import torch

# Phases whose seconds count as the rollout's; `update` is every moment of a step that is in no other phase.
LOAD, UPDATE, OPTIMIZER, SAVE = "load", "update", "optimizer", "save"
WAKE_UP, ROLLOUT, SCORING = "wake-up", "rollout", "scoring"
SYNC = "sync"  # of several ranks: weights are gathered and given to vLLM, which has woken up for them
# Once a generation in trainers that score all samples first, and that move their states to the host while vLLM works.
LOG_PROBS, REFERENCE, LOADING = "old log-probs", "reference", "loading"
VALUES, CRITIC = "values", "update critic"  # of PPO's critic: of all samples, and all its optimizer steps
BEFORE_UPDATE = (WAKE_UP, SYNC, ROLLOUT, SCORING, LOG_PROBS, REFERENCE, VALUES, CRITIC, LOADING)
EVALUATION = "evaluation"  # between two steps: only the loss, of samples that are not trained
IN_ORDER = (LOAD, *BEFORE_UPDATE, UPDATE, OPTIMIZER, EVALUATION, SAVE)  # as a person is shown them
MOST_PROMPT_TOKENS = 4_194_304  # a sample of this length takes 2 GB of the host while it is made


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Meaning of a recipe to its trainer, as plain values: all that the search knows of the trainer.

    `tiers` has the knobs that change more under this recipe than their space declares (a loss that weighs micro-batches
    by themselves makes the split `approximate`). `compared` has the keys that the trainer's gradient proof trains with:
    a neutral claim of any other key is not believed.
    """

    name: str  # what its search spaces call the trainer
    resolved: Mapping[str, object]  # every key of the recipe and its value, defaults included
    values: Mapping[str, object]  # the recipe as given, where the trainer has one way to say a thing
    keys: BatchKeys
    space: str  # path of the trainer's default search space
    model: str = ""
    command: str | None = None  # what runs a tuned recipe without autofit, before its file's name
    trains_on_data: bool = True  # False: the samples are synthetic, so there is nothing to train on
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    longest_prompt_tokens: int | None = None  # for trainers that generate
    longest_sample_tokens: int | None = None  # for those that do not
    longest_row: int | None = None  # the sample (or prompt) with the most tokens: its row in the dataset, from 0
    longest_place: int | None = None  # its place in the order of the first epoch, which the seed decides
    num_samples: int | None = None  # of an epoch
    num_prompts: int | None = None
    model_parameters: int | None = None
    weights_bytes: int | None = None
    vocab_size: int | None = None
    embedding_parameters: int | None = None  # of the input embeddings, and of the head where it has its own
    tile_tokens: int | None = None  # tokens of a micro-batch that the loss works on at once; None: all of them
    forecasts: bool = False  # True if traces of few layers give the bytes of all: one architecture that repeats
    read_by: Mapping[str, tuple[tuple[str, ...], ...]] = field(
        default_factory=dict
    )  # {phase: groups of keys}: `Visits`
    other_names: Mapping[str, str] = field(default_factory=dict)  # {another name of a key: the recipe's name of it}
    notes: tuple[str, ...] = ()  # what the user should know of how the recipe was read, a sentence each
    left_out: Mapping[str, str] = field(default_factory=dict)  # {knob that this recipe cannot change: why}
    version: str = ""  # of the library whose keys these are
    spelling: str = ""  # how the keys of a recipe of older libraries are written, in half a sentence
    content_hash: str = ""  # of the data and the code that the recipe only names
    architecture_hash: str = ""  # of the model's shape, where the recipe only names it

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Facts":
        keys = BatchKeys.from_json(cast(Mapping[str, "str | None"], content["keys"]))
        lists = {name: tuple(cast(list[str], content[name])) for name in ("compared", "notes")}
        read_by = cast("Mapping[str, list[list[str]]]", content.get("read_by", {}))
        groups = {phase: tuple(map(tuple, each)) for phase, each in read_by.items()}
        return cls(**{**content, "keys": keys, **lists, "read_by": groups})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstCase:
    """The folder in which a trainer's `inspect` left its longest sample, and its notes on that sample."""

    path: Path
    padded: bool | None = None  # True if its batches have padding; None: by its facts (`is_padded`)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def facts(self) -> dict[str, Any]:
        """Notes of `inspect`, as JSON."""
        return written_json(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Arguments of `Trainer.inspect`, which leaves the longest sample in `worst_case`.

    On a simulated card `prompt_tokens` asks for a synthetic sample of that many tokens in place of the data: the
    longest of samples that differ in length, as those of text do, so batches of it have padding. `changed` has the keys
    that the user gave besides the recipe: they win over other names of the same setting. `ranks` train together as the
    recipe says; it is then spread over `cards` where their number was given.
    """

    device: str  # "cpu", "cuda" or "sim:NAME"
    worst_case: WorstCase
    prompt_tokens: int | None = None
    changed: tuple[str, ...] = ()
    ranks: int = 1
    cards: int | None = None

    @property
    def many(self) -> bool:
        """True if several ranks train in the end."""
        return (self.ranks if self.cards is None else self.cards) > 1

    @property
    def simulated(self) -> bool:
        return self.device.startswith("sim:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Purpose of a run.

    With `worst_case` it trains random weights on that sample alone, every sequence at full length, for `steps`
    optimizer steps; by default, it trains the recipe as written, and logs every step.
    """

    device: str
    output: Path  # where checkpoints go, as output/checkpoint-N, or as own_checkpoints(output)/checkpoint-N
    worst_case: WorstCase | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Wishes of the receiver of a report after an optimizer step."""

    save: bool = False  # a checkpoint besides those of the recipe, in `own_checkpoints`
    stop: bool = False
    evaluate: bool = False  # one batch of the recipe's evaluation, in a probe; nothing where it has none


def own_checkpoints(output: Path) -> Path:
    """The folder of the checkpoints that a `Control` asked for: those of the recipe's own settings are in `output`."""
    return output / "autofit-checkpoints"


class Report:
    """Receiver of a run's progress: here only its phases follow from that. A subclass overrides the rest."""

    def enter(self, phase: str) -> str:
        """The run goes on in `phase`; the phase that it left."""
        return UPDATE

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose content is the phase `name`. After an error the phase stays at the place of the error."""
        left = self.enter(name)
        yield
        self.enter(left)

    leaves_out = False  # True if the receiver itself repeats micro-batches that are alike
    one_in_first_step: Literal["", "first", "last"] = ""  # the micro-batch that is enough for the receiver in that step

    def train_begins(self) -> None: ...

    def micro_step_begins(self, *, left_out: bool) -> None:
        """A micro-batch of many that are alike begins, or is left out because the receiver repeats it."""

    def last_are_alike(self) -> bool:
        """True if the last two computed ones needed the same memory: others like them may be left out."""
        return True

    def step_begins(self, step: int) -> None:
        """The optimizer step after `step` finished ones begins."""
        self.enter(UPDATE)

    def micro_step_ends(self) -> None:
        """The gradients of one micro-batch are added, and another follows before the optimizer."""

    def gradient_is_whole(self, model: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
        """Called when every gradient of the optimizer step is accumulated, before the optimizer uses them."""
        self.enter(OPTIMIZER)

    def optimizer_ends(self) -> None:
        self.enter(UPDATE)

    def step_ends(self, step: int) -> Control:
        """`step` optimizer steps are finished."""
        return Control()

    def save_begins(self) -> None:
        """A checkpoint is about to be written."""

    def saved(self, checkpoint: Path) -> None:
        """Every file of `checkpoint` is written, in a whole number of optimizer steps."""

    def save_failed(self, checkpoint: Path, error: Exception) -> bool:
        """True if the run goes on although `error` kept `checkpoint` from being written."""
        return False

    def logs(self, step: int, last_step: int, values: Mapping[str, Any]) -> None:
        """Called with the trainer's log of step number `step` of `last_step`: loss, reward, lengths, ..."""


class Run(Protocol):
    """One training, ready to start. Weights and optimizer live as long as it does."""

    @property
    def model(self) -> "torch.nn.Module":
        """The module whose parameters are trained."""
        ...

    @property
    def samples_per_step(self) -> int:
        """Samples (completions, where the trainer generates) that one optimizer step of one rank trains on."""
        ...

    @property
    def tokens_per_step(self) -> int | None:
        """Prompt and completion tokens of one optimizer step of one rank at full length, if known."""
        ...

    @property
    def scoring_share(self) -> float:
        """Number of scorings before training for each optimizer step of the whole training; or 0."""
        ...

    @property
    def rollout_share(self) -> float:
        """Number of rollouts in the recipe for each one in a simulated step: below 1 if a probe makes more."""
        ...

    @property
    def steps_between_saves(self) -> int:
        """Steps between checkpoints from which a run continues exactly (a rollout in use is left unsaved)."""
        ...

    @property
    def last_step(self) -> int:
        """Optimizer steps of the whole training; known while it trains."""
        ...

    def train(self, report: Report, *, resume_from: Path | None = None) -> None:
        """Train to the end or until a `Control` says stop, telling `report`; continue exactly after a checkpoint."""
        ...

    def checkpoint_is_whole(self, checkpoint: Path) -> bool:
        """True if training can continue from `checkpoint`, which may have been torn by a kill while it was saved."""
        ...

    def save_model(self, folder: Path) -> None:
        """Save the trained weights, for use after training."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFacts:
    """Facts that decide whether another micro-batch trains on the same samples with the same weights."""

    rows: int | None  # samples or prompts of an epoch; None: not known
    last_step: int | None = None  # of the whole training
    drops_last: bool = False  # whether an incomplete last micro-batch of an epoch is dropped
    weighs_alike: bool = True  # whether the samples of an incomplete micro-batch weigh as much as all others

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@runtime_checkable
class Rescuable(Protocol):
    """Optional part of a `Run`, so that a step that runs out of memory keeps the steps before it."""

    @property
    def sample_facts(self) -> SampleFacts: ...

    def save_on_the_spot(self) -> bool:
        """Save the last finished step's checkpoint after a failed step; False if it would be inexact."""
        ...


class SmallTrainings(Protocol):
    """The small trainings of a gradient proof: one small model, identical samples, a run for each recipe by name.

    Nothing random differs from run to run, gradients are neither clipped nor scaled, and the model is float32 on a CPU.
    """

    @property
    def model(self) -> str:
        """Description of the small model, in words."""
        ...

    @property
    def stand_in(self) -> str | None:
        """Reason why another architecture stands in for the recipe's, if one does."""
        ...

    @property
    def steps(self) -> int:
        """Optimizer steps of each run."""
        ...

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        ...

    @property
    def divided_by(self) -> int:
        """Divisor of the accumulation of every recipe, so that a step is small; 1: undivided."""
        ...

    def run(self, name: str) -> Run:
        """The training of the recipe `name`."""
        ...


class Visits(Protocol):
    """The phases of a training one by one, each with another recipe, by which candidates are predicted.

    `Facts.read_by` has the groups of keys that each phase reads: what two groups do to its bytes and seconds adds up,
    and a group that it does not read changes its bytes by what that changes of those held between two steps.
    """

    rollout_share: float  # as of a `Run`

    def take(self, values: Mapping[str, object]) -> None:
        """Go on with the recipe `values`, which differs in keys of `Facts.read_by` from the one that was built."""
        ...

    def visit(self, phase: str, report: Report) -> None:
        """Run `phase`, and leave the card as between two steps."""
        ...


class Trainer(Protocol):
    """Interface of a trainer. `space` is the path of its default search space, `keys` those that batch its samples."""

    name: str
    keys: BatchKeys

    @property
    def space(self) -> Path: ...

    def inspect(self, values: Mapping[str, object], inspection: Inspection) -> Facts:
        """Facts of the recipe `values`; leaves its longest sample in `inspection.worst_case`. Raises ConfigError."""
        ...

    def build(self, values: Mapping[str, object], task: Task) -> Run:
        """The training of the recipe `values`, for `task`. Raises ConfigError."""
        ...

    def layers(self, values: Mapping[str, object], worst_case: WorstCase) -> Any:
        """The transformers config of the model's layers, only for `Facts.forecasts`."""
        ...

    def small_trainings(
        self, recipes: Mapping[str, Mapping[str, object]], folder: Path, *, most_samples: int, most_steps: int,
        ranks: Mapping[str, int] | None = None,
    ) -> SmallTrainings:  # fmt: skip
        """The trainings of a gradient proof, with files in `folder`. Raises ConfigError if there is none.

        `ranks` has the ranks of every recipe where one has several: `run` is then called in a process of each rank.
        """
        ...


class VisitedTrainer(Trainer, Protocol):
    """A trainer whose `Facts` have `read_by`."""

    def visits(self, values: Mapping[str, object], task: Task, report: Report) -> Visits:
        """The phases of the recipe `values`, after a whole step that is reported to `report`."""
        ...


_ATTENTION = ("sdpa", "eager")


def compared_attention(value: object) -> bool:
    """True if the attention named `value` is one that the proof runs."""
    return value is None or value in _ATTENTION


# -- padding of the worst batch ---------------------------------------------------------------------------------------
# A probe trains on one longest sample, repeated. Where samples differ in length, real batches have padding, and with a
# mask attention runs another kernel. With one (transformers, sdpa) the keys of grouped queries are repeated and the
# mask is kept, so most runs take more memory; without one, float32 with grouped queries takes the math kernel, which
# keeps all scores. The worst batch is the longest that the dataset can make; where both kinds can happen, the larger
# one counts.

KEPT = 64  # lengths that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLengths:
    """The lengths of a dataset's samples, in tokens. Of a pair of answers, `longest` has the shorter one."""

    longest: tuple[int, ...]  # of the `KEPT` longest samples, in descending order
    most: int
    least: int
    sequences: int = 1  # that a sample adds to a batch
    generates: bool = False  # whether a rollout is padded as a whole, over its micro-batches
    unmasked_is_larger: bool = False  # whether attention without a mask takes more memory
    filled: bool = False  # whether samples are cut from one stream, so that few are not of the longest length
    rest: int | None = None  # tokens of a batch's other sequences; None: as many, in the worst case

    @classmethod
    def of(cls, lengths: Sequence[int], *, most: int, others: bool = False, **more: Any) -> "SampleLengths":
        """Of the `lengths` of all samples, or with `others` of the longest: what was left out counts as shorter."""
        kept = tuple(sorted(lengths, reverse=True))
        return cls(longest=kept[:KEPT], most=most, least=0 if others else kept[-1], **more)

    def padded(self, micro_batch: int, limit: int | None) -> bool:
        """True if the worst micro-batch, its samples cut to `limit` tokens, has padding.

        A rollout of prompts that differ has padding in each micro-batch but one of a single completion: TRL shuffles
        the completions, which end at different lengths too. Of samples that fill what they are cut from, the few
        micro-batches of an epoch that hold a shorter one do not count.
        """
        most = self.most if limit is None else min(self.most, limit)
        if min(self.least, most) == most:
            return False
        if micro_batch * self.sequences == 1:
            return self.generates and not self.unmasked_is_larger
        if self.generates or not (self.unmasked_is_larger or self.filled):
            return True
        same = sum(length >= most for length in self.longest)
        return same < min(micro_batch, KEPT)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def is_padded(facts: Mapping[str, Any], micro_batch: int, limit: int | None) -> bool:
    """`Lengths.padded` of a worst case's facts; False if its trainer leaves out lengths."""
    lengths = facts.get("lengths")
    if lengths is None:
        return False
    return SampleLengths(**{**lengths, "longest": tuple(lengths["longest"])}).padded(micro_batch, limit)
