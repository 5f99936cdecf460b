"""`autofit.verify` and `autofit.promote`: the gradient proof of a trial, its YAML and its full run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from autofit.api.arguments import FOLDER, executor_asked, named_as_arguments, one_of, own_folder, studies_folder
from autofit.api.events import Event, OnEvent, silent
from autofit.api.promoted import PromotedRun, promoted_run
from autofit.api.tables import Shown
from autofit.cluster.scheduler import Executor, cluster_of
from autofit.errors import ConfigError
from autofit.files import write_atomically
from autofit.probing.launch import is_alive
from autofit.promotion.promotion import Promotion, choose, follow, logged, model_path, plan_promotion, stop
from autofit.promotion.promotion import launch as launch_run
from autofit.proof.proof import ROUNDING, Proof, Verdict, lines, prove
from autofit.recipe.keys import TIERS, Tier
from autofit.recipe.recipe import own_names
from autofit.space.narrow import missing_packages
from autofit.tracking.follower import mended
from autofit.tuning.locks import exclusive
from autofit.tuning.record import record_of
from autofit.tuning.storage import use_storage
from autofit.tuning.study import database_errors, load_study, trials_of
from autofit.units import format_metric
from autofit.watching.events import EventKind, read_progress
from autofit.watching.thresholds import StatedGuards, read_guards

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Step = Mapping[str, object]  # one logged step of a run: step, max_steps, and TRL's metrics


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProofResult(Shown):
    """The gradient proof of a trial of `study`. `str` of it is a fact a line."""

    study: str
    proof: Proof
    original: Mapping[str, object]  # the recipe as TRL resolved it
    names: Mapping[str, str] = field(default_factory=dict)  # {key of the recipe: its name in another tool's file}

    @property
    def verdict(self) -> Verdict:
        """The conclusion: baseline, proven, not compared, refused, approximate or recipe."""
        return self.proof.verdict

    @property
    def refused(self) -> bool:
        """True if the trial is claimed to be neutral and is not."""
        return self.proof.verdict is Verdict.REFUSED

    @property
    def relative_difference(self) -> float | None:
        """Norm of the gradients' difference over that of the baseline's, if they were compared."""
        return self.proof.relative_difference

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit verify --json` prints: plain values only."""
        return {"study": self.study, **self.proof.to_json()}

    def parts(self) -> list[Table | str]:
        """The verdict, the numbers, and the parts left out of the comparison."""
        return [*lines(self.proof, self.original, self.names)]

    def plot(self) -> "Figure":
        """A matplotlib Figure of the relative gradient difference of each optimizer step, and the rounding's bound."""
        figure, axes = _axes("optimizer step", "relative gradient difference")
        axes.bar(range(1, len(self.proof.steps) + 1), self.proof.steps)
        axes.axhline(ROUNDING, color="tab:red", linestyle="--", linewidth=1, label="rounding is below")
        axes.set_yscale("log")
        axes.legend()
        return figure


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PromotionResult(Shown):
    """The full run of one trial, or its YAML alone. `str` of it says how it went."""

    study: str
    trial: int
    status: Literal["written", "done", "interrupted"]  # written: the YAML only, as no launch was asked for
    yaml_path: Path
    accelerate_path: Path | None = None  # the accelerate config beside it, of a recipe of several ranks
    proof: Proof
    final: Mapping[str, object] | None = None  # of a run that is done: steps, losses, rewards, output_dir
    steps: tuple[Step, ...] = ()  # as they were logged
    command: str = ""  # that trains by the YAML without autofit, where one is known
    run: PromotedRun | None = None  # promised against actual, the verdict and the events; None: nothing was launched

    @property
    def verdict(self) -> str:
        """Sentence on whether the run kept the promise of the search; "" before its end."""
        return "" if self.run is None else self.run.verdict

    @property
    def model_path(self) -> str | None:
        """Path of the trained model, if the run is done."""
        return None if self.final is None else model_path(self.final)

    def to_dict(self) -> dict[str, object]:
        """The object that `autofit promote --json` prints once the run is done or written: plain values only."""
        ran = {} if self.run is None else self.run.to_dict()
        kept: dict[str, object] = {k: ran[k] for k in ("device", "kept", "verdict", "contract", "events") if k in ran}
        whole = {"study": self.study, "trial": self.trial, "status": self.status, "yaml_path": str(self.yaml_path)}
        whole |= {"command": self.command} if self.command else {}
        return {**whole, **(self.final or {}), **kept}

    def parts(self) -> list[Table | str]:
        """Outcome of the run, and the path of the model."""
        if self.final is None:
            how = "was interrupted; the same call resumes it" if self.status == "interrupted" else "was not launched"
            how_to = [f"run it with: {self.command}"] if self.status == "written" and self.command else []
            return [f"trial {self.trial} of {self.study}: the run {how}; its YAML is {self.yaml_path}", *how_to]
        final = self.final
        shown: list[Table | str] = [f"{final['steps']} steps done, final loss {format_metric(final['final_loss'])}"]
        if final["first_reward"] is not None:
            window = final["reward_window_steps"]
            shown.append(
                f"mean reward {format_metric(final['first_reward'])} over the first {window} step(s), "
                f"{format_metric(final['last_reward'])} over the last {window}"
            )
        return [*(self.run.parts() if self.run is not None else ()), *shown, f"the model is in {self.model_path}"]

    def plot(self) -> "Figure":
        """A matplotlib Figure of the loss, and of the reward where there is one, by optimizer step."""
        figure, axes = _axes("optimizer step", "")
        for key in ("loss", "reward"):
            points = [(step["step"], step[key]) for step in self.steps if key in step]
            if points:
                axes.plot(*zip(*points, strict=True), label=key)
                axes.legend()
        return figure


def verify(
    trial: str | int = "best", *, study: str | None = None, folder: str | Path = FOLDER,
    storage: str | None = None, on_event: OnEvent | None = None,
) -> ProofResult:  # fmt: skip
    """The gradient proof of `trial` (a number, "best" or "leanest") of a study in `folder`, or of the study used last.

    The accumulated gradients of the trial and of the recipe as it is are compared on a small model, with identical
    samples. A proof is kept with the study and made once. Raises ConfigError for a trial that is not there, and
    EnvironmentFault when the comparison fails.
    """
    with named_as_arguments():
        folder = studies_folder(folder)
        use_storage(folder, storage)
        found = load_study(folder, study)
        chosen = choose(trials_of(found), str(trial), record_of(found).rule, fitting=False)
        with database_errors(folder):
            proof = prove(found, chosen, say=_saying(on_event))
    record = record_of(found)
    return ProofResult(
        study=found.study_name, proof=proof, original=record.resolved, names=own_names(record.foreign)
    )  # fmt: skip


def promote(
    trial: str | int = "best", *,
    study: str | None = None,
    folder: str | Path = FOLDER,
    storage: str | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    launch: bool = True,
    restart: bool = False,
    guards: StatedGuards | None = None,
    allow: Tier = "neutral",
    executor: str | Mapping[str, object] | Executor | None = None,
    on_step: Callable[[Step], None] | None = None,
    on_event: OnEvent | None = None,
) -> PromotionResult:  # fmt: skip
    """Prove `trial` (a number, "best" or "leanest"), write its tuned YAML (to `out` as well), and follow its full run.

    The run is a job of its own, found again and resumed from its last whole checkpoint by the same call; `restart`
    throws the checkpoints away. Besides the recipe's own (save_strategy, save_steps, save_total_limit) it saves one
    about every minute, in `autofit-checkpoints` of its output folder, and keeps the newest two until it is done.
    `device` says where it trains: cpu, cuda, or auto, which is the device of the search; after a search on a simulated
    card, auto asks for it on a machine without that card. `guards` changes what the run is watched for: a file laid
    over autofit's own guards.yaml, its content as a mapping, or "off". A run that is out of memory goes on from its
    last checkpoint with the next neutral change that needs less; `allow` is the lowest tier of change that it may make
    then. A recipe of several ranks trains on as many processes, and has an accelerate config beside its YAML
    (`out` and `.accelerate.yaml`), as TRL takes them together. `executor` says where the run trains, as in
    `autofit.search`: on Slurm it is a job of its own, of `nodes` machines, and one more for the vLLM server of a recipe
    that has one and names no address of it. `launch=False` writes these files only.
    A recipe that was a file of another tool is written as that tool's own file, with its comments, and not run here.
    `on_step` gets each step that is logged from then on; `steps` of the result has all. Ctrl-C saves a checkpoint after
    the step at work and returns, with the status "interrupted".

    Raises ConfigError for a trial that does not fit, or is claimed to be neutral and is not, and EnvironmentFault when
    the run fails.
    """
    say, tell = _saying(on_event), on_event or silent
    with named_as_arguments():
        one_of("device", device, ("auto", "cpu", "cuda"))
        folder = studies_folder(folder)
        use_storage(folder, storage)
        if launch and folder.is_dir():
            own_folder(folder, on_event)
        watched_for = read_guards(guards)
        one_of("allow", allow, TIERS)
        where = executor_asked(executor, debugging=False)
        promotion = plan_promotion(
            folder, study_name=study, trial=str(trial), device=device, launch=launch, allow=allow, executor=where,
            say=say,
        )  # fmt: skip
        if promotion.own is not None:
            path = Path(out) if out is not None else promotion.folder / promotion.own.name
            write_atomically(path, promotion.own.text)
            say(f"wrote {path} for {promotion.own.tool}: {promotion.own.words}")
            command = f"{promotion.own.command} {path}"
            say(f"run it with: {command}")
            return _result(promotion, "written", (path,), command=command)
        written = promotion.written if out is None else promotion.tuned.write(Path(out))
        for file in written:
            say(f"wrote {file}")
        line = promotion.tuned.command_line(written)
        if len(written) > 1 and line is not None:
            say(f"without autofit: {line}")
        if not launch:
            return _result(promotion, "written", written, command=line or "" if promotion.trains_on_data else "")
        if not promotion.trains_on_data:
            raise ConfigError(
                f"the recipe has no dataset to train on, as its prompts were synthetic; add your own data and rewards "
                f"(dataset_name, reward_funcs) to {written[0]}, and run it "
                f"{'as its first lines say' if line else 'with your own program'}"
            )
        missing = missing_packages(promotion.trial.needs)
        if missing:
            raise ConfigError(
                f"trial {promotion.trial.number} {missing}; install it and run the same command again, or promote "
                f"another trial"
            )
        if where.is_cluster and not where.is_requeued:
            say(f"{cluster_of(where.kind).title} puts no job back into its queue (no-requeue): at its time limit the "
                "run saves a checkpoint and ends, and the same command goes on from there")  # fmt: skip
        with exclusive(folder / "locks", promotion.folder.name), mended(promotion.folder):
            try:
                home = promotion.folder
                earlier = logged(home)
                how = launch_run(promotion, study_folder=folder, restart=restart, guards=watched_for, executor=where)
                at = f", at step {steps[-1]['step']}" if how == "running" and (steps := read_progress(home)) else ""
                say(f"trial {promotion.trial.number} of {promotion.study}: the run is {how}{at}")
                final = follow(
                    promotion, on_step or (lambda _: None),
                    lambda event: tell(Event(text=event.text, verdict=event.kind is EventKind.VERDICT)), place=say,
                    known=earlier,
                )  # fmt: skip
            except KeyboardInterrupt:
                if not is_alive(promotion.folder):
                    raise
                say("saving a checkpoint after the step at work; run the same command again to resume")
                stop(promotion)
                return _result(promotion, "interrupted", written)
        return _result(promotion, "done", written, final)


def _result(
    promotion: Promotion, status: Literal["written", "done", "interrupted"], written: Sequence[Path],
    final: Step | None = None, *, command: str = "",
) -> PromotionResult:  # fmt: skip
    return PromotionResult(
        study=promotion.study, trial=promotion.trial.number, status=status, yaml_path=written[0],
        accelerate_path=written[1] if len(written) > 1 else None, proof=promotion.proof,
        command=command, final=final, steps=() if status == "written" else tuple(read_progress(promotion.folder)),
        run=None if status == "written" else promoted_run(promotion.folder),
    )  # fmt: skip


def _saying(on_event: OnEvent | None) -> Callable[[str], None]:
    tell = on_event or silent
    return lambda text: tell(Event(text=text))


def _axes(x: str, y: str) -> "tuple[Figure, Any]":
    from autofit.picture import Picture

    figure = Picture(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    return figure, axes
