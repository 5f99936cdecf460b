"""The gradient proof of a trial: equality with the baseline's gradient to rounding, as its tier claims. No torch.

The proof runs in a process of its own (`autofit.proof.worker`) and is kept in the study, so that a trial is proven
once. What it compares of a recipe, key by key, is its reach; a recipe of many ranks is proven on at most 4 gloo ranks
of one CPU, with DDP or FSDP2.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import optuna

from autofit.errors import ConfigError, EnvironmentFault, option
from autofit.files import ScratchFolder, read_json, write_json
from autofit.plugin.protocol import compared_attention
from autofit.plugin.registry import code_hash
from autofit.probing import kept_server
from autofit.probing.fork_server import ServerGone, call
from autofit.probing.supervise import trial_env
from autofit.recipe.keys import LAUNCH, BatchKeys, Tier, weight_bits
from autofit.recipe.recipe import Batch, inner_value, merge
from autofit.space.traits import UNPROVEN, Reach, describe_changes, traits_of
from autofit.tuning.frontier import Trial
from autofit.tuning.record import keep_proof, kept_proof, record_of

# -- reach: what a proof compares of a recipe -------------------------------------------------------------------------

# Changes of the recipe that can be applied to both baseline and candidate in the small trainings.
IN_BOTH = ("use_peft", "lora_task_type", "lora_r", "lora_alpha", "max_completion_length", "num_generations")
# Keys that no space varies, and a comparison of two recipes meets.
_KEYS: Mapping[str, Reach] = {
    **dict.fromkeys((
        "logging_steps", "logging_strategy", "logging_first_step", "report_to", "save_steps", "save_strategy",
        "save_total_limit", "save_only_model", "output_dir", "run_name", "disable_tqdm", "log_completions",
        "num_completions_to_print", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor",
        "dataloader_persistent_workers", "skip_memory_metrics", "eval_strategy", "eval_steps",
        "per_device_eval_batch_size",
    ), Reach.HARMLESS),
    **dict.fromkeys((
        "torch_compile_backend", "torch_compile_mode", "liger_kernel_config", "fsdp", "fsdp_config", "deepspeed",
        "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "gradient_checkpointing_kwargs.offload",
    ), Reach.KERNEL),
}  # fmt: skip
_ENV = "neutral by construction: a setting of an allocator or library, outside the model's arithmetic"
_BOUNDS = ("epsilon", "epsilon_high", "delta", "off_policy_mask_threshold")


def reach(
    compared: Collection[str], key: str, value: object, own: object, stated: Mapping[str, object] | None = None
) -> tuple[Reach, str]:
    """(reach of a proof for `key` changed from `own` to `value`, reason why it is left out or "").

    `compared` has the keys that the trainer's small trainings use unchanged, `stated` the traits that a space states.
    """
    if key == "attn_implementation":
        absent = [v for v in (own, value) if not compared_attention(v)]
        if not absent:
            return Reach.COMPARED, ""
        return Reach.KERNEL, f"the kernel {absent[0]!r} does not run on a CPU; the model's default replaces it"
    traits = traits_of(key, stated)
    known = traits.proof or _KEYS.get(key)
    if key in compared or (key.partition(".")[0] in compared and known is not Reach.KERNEL):
        return Reach.COMPARED, ""
    if known is not None:
        return known, traits.why or UNPROVEN[known]
    if key == "env":
        return Reach.HARMLESS, _ENV
    if key in _BOUNDS:
        return Reach.OTHER, "it is a bound, and the proof's samples may never reach it"
    if key.startswith("optim"):
        return Reach.OTHER, "it changes the update, not the gradient"
    return Reach.OTHER, UNPROVEN[Reach.OTHER]


def unlike(resolved: Mapping[str, object]) -> tuple[str, ...]:
    """The differences between the recipe and the small trainings, one phrase each."""
    found = ["whole optimizer steps only, without a partial step at the end of an epoch"]
    dtype = resolved.get("dtype")
    if resolved.get("bf16") or resolved.get("fp16") or dtype not in (None, "float32", "auto"):
        found.append("float32, not the recipe's 16-bit arithmetic, which has larger rounding errors")
    if weight_bits(resolved):
        found.append("no quantised weights")
    if resolved.get("use_vllm"):
        found.append("no vLLM: its importance weights, one per token or sequence, are not compared")
    if not compared_attention(resolved.get("attn_implementation")):
        found.append(f"the model's attention kernel for CPUs, not {resolved['attn_implementation']}")
    if resolved.get("torch_compile") or resolved.get("use_liger_kernel"):
        found.append("neither torch.compile nor Liger's kernels")
    if (resolved.get("use_peft") and resolved.get("lora_dropout")) or resolved.get("neftune_noise_alpha"):
        found.append("no dropout and no noise: their random numbers differ in every split")
    return tuple(found)


MOST_RANKS = 4
_MOST_OWN = 8  # ranks of a recipe whose samples no fewer ranks can share in micro-batches of the same size
_RUN_HERE = ("ddp", "fsdp2")
_MACHINES = "neutral by construction: it changes where the ranks run"
_ENGINE = "it changes the engine that generates, and the proof's samples are fixed"


def reach_of_launch(
    key: str, value: object, own: object, stated: Mapping[str, object] | None = None
) -> tuple[Reach, str]:
    """(reach of a proof for `launch.KEY` changed from `own` to `value`, reason why it is left out or "")."""
    field = key.partition(".")[2]
    if field == "sharding":
        absent = [v for v in (own or "ddp", value) if v not in _RUN_HERE]
        return (Reach.KERNEL, f"{_absent(str(absent[0]))}; DDP replaces it") if absent else (Reach.COMPARED, "")
    if field == "ranks":
        return Reach.COMPARED, ""
    if field == "server_ranks" and own and value:
        return Reach.HARMLESS, "neutral by construction: the copies of the same engine divide the prompts"
    if field == "machines":
        return Reach.HARMLESS, _MACHINES
    traits = traits_of(key, stated)
    if traits.proof is not None:
        return traits.proof, traits.unproven
    return Reach.OTHER, _ENGINE if field == "server_ranks" else "it is a setting of accelerate that the proof lacks"


def _absent(sharding: str) -> str:
    if sharding == "fsdp1":
        return "the proof's ranks on a CPU run no FSDP1"
    return "DeepSpeed is not installed" if find_spec("deepspeed") is None else "the proof's ranks run no DeepSpeed"


def on_few_ranks(values: Mapping[str, object], sizes: Mapping[str, object], keys: BatchKeys) -> dict[str, object]:
    """The recipe `values` on the ranks of a proof, with the same samples in an optimizer step and a rollout.

    `sizes` has the resolved values of its batch keys. Fewer ranks have a larger accumulation. Raises ConfigError if
    there are more ranks than a proof can have.
    """
    launch = cast("Mapping[str, object]", values.get(LAUNCH) or {})
    rest = {key: value for key, value in values.items() if key != LAUNCH}
    if launch.get("ranks", 1) == 1:
        return rest
    batch = Batch.of(sizes, keys, cast(int, launch["ranks"]))
    few = batch.on(_ranks(batch), keys)
    if few.ranks != batch.ranks:
        once = {} if keys.rollout_batch is None else {keys.rollout_batch: None}
        rest = merge(rest, {**few.to_keys(keys), **once})
    own = str(launch.get("sharding", "ddp"))
    sharding = own if own in _RUN_HERE else "ddp"
    reshard = launch.get("reshard_after_forward", True)
    return {**rest, LAUNCH: {"ranks": few.ranks, "sharding": sharding, "reshard_after_forward": reshard}}


def _ranks(batch: Batch) -> int:
    """Ranks of a proof that have the same samples in micro-batches of the same size."""
    whole = (batch.effective, batch.generated or batch.effective)
    fitting = [n for n in range(2, MOST_RANKS + 1) if not any(total % (n * batch.micro) for total in whole)]
    if batch.ranks in fitting or (not fitting and batch.ranks <= _MOST_OWN):
        return batch.ranks
    if not fitting:
        raise ConfigError(f"a proof has at most {_MOST_OWN} ranks, and fewer than {batch.ranks} cannot share the batch")
    return max(fitting)


def launch_unlike(named: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]]) -> tuple[str, ...]:
    """The differences between launches of the recipe and those of the proof, one phrase each.

    `named` has {"trial" or "baseline": (its values, its values in the proof)}.
    """
    found: list[str] = []
    for name, (values, small) in named.items():
        asked, had = (cast("Mapping[str, object]", v.get(LAUNCH) or {}) for v in (values, small))
        own, few = (cast(int, launch.get("ranks", 1)) for launch in (asked, had))
        if own > 1:
            fewer = f", not {own}: the accumulation is larger" if few != own else ""
            found.append(f"{few} gloo ranks of one CPU in the {name}{fewer}")
        sharding = str(asked.get("sharding", "ddp"))
        if own > 1 and sharding not in _RUN_HERE:
            found.append(f"DDP in the {name}, not {sharding}: {_absent(sharding)}")
    return tuple(found)


# -- the proof --------------------------------------------------------------------------------------------------------

# Rounding in float32 was 1e-7 to 6e-6 in the neutral cells of experiments/neutrality, and the smallest difference of
# any other cell was 9e-5: the bound lies between.
ROUNDING = 1e-5
# Bound for a single parameter, whose gradient norm may be a hundredth of the whole gradient's.
PARAMETER_ROUNDING = 1e-3
_VERSION = 2  # version of the comparison: a stored proof of another version is repeated
_DEADLINE_S = 900.0
_TOO_LONG = f"the gradient proof took longer than {_DEADLINE_S:.0f} s"
_RANKS = f"{LAUNCH}.ranks"
_PACKAGES = ("torch", "transformers", "trl", "peft")


class Verdict(StrEnum):
    BASELINE = "baseline"  # the trial changes nothing, so no proof is needed
    PROVEN = "proven"  # claimed neutral; the gradient differs by rounding only
    NOT_COMPARED = "not compared"  # claimed neutral; all changed knobs have no effect on a gradient on a CPU
    REFUSED = "refused"  # claimed neutral; the gradient differs by more than rounding
    APPROXIMATE = "approximate"  # claimed approximate; the difference is reported
    RECIPE = "recipe"  # another recipe is trained; its changes are in both sides of the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The result of a proof: the compared changes, their gradient difference, the verdict. None is "not compared"."""

    trial: int
    claimed_tier: Tier
    verdict: Verdict
    relative_difference: float | None = None
    steps: tuple[float, ...] = ()
    largest_parameter: str | None = None
    largest_parameter_difference: float | None = None
    compared: Mapping[str, object]
    in_both: Mapping[str, object]  # changes of the recipe, applied to the baseline too
    not_compared: Mapping[str, str]  # {knob: reason}
    because_of: Mapping[str, float | None]  # {knob: difference of this change alone}, if above rounding
    simplified: tuple[str, ...] = ()
    model: str = ""
    samples_per_step: int | None = None
    shrunken: int = 1
    versions: Mapping[str, str]
    seconds: float | None = None
    key: str = ""

    @property
    def rounding(self) -> bool | None:
        """True if the difference is rounding only."""
        if self.relative_difference is None or self.largest_parameter_difference is None:
            return None
        return self.relative_difference <= ROUNDING and self.largest_parameter_difference <= PARAMETER_ROUNDING

    @property
    def sentence(self) -> str:
        """One line: the verdict, the relative difference and the compared changes."""
        number = "" if self.relative_difference is None else f"{self.relative_difference:.1e}"
        against = f"rounding is below {ROUNDING:.0e}"
        blame = ", ".join(k if d is None else f"{k} ({d:.1e} alone)" for k, d in self.because_of.items())
        unseen = "; ".join(f"{key}: {self.not_compared.get(key)}" for key in self.because_of)
        known = "only rounding here" if self.rounding else f"more than rounding, because of {blame}"
        return {
            Verdict.BASELINE: "the recipe is unchanged: no proof is needed",
            Verdict.PROVEN: f"gradient proven neutral: relative difference {number} ({against})",
            Verdict.NOT_COMPARED: f"no gradient to compare: {', '.join(self.not_compared)}",
            Verdict.REFUSED: "claimed neutral, but " + (
                f"is not: relative difference {number} ({against}), because of {blame}" if number
                else f"no gradient can show it: {unseen}"),
            Verdict.APPROXIMATE: "approximate: " + (f"relative gradient difference {number} ({known})" if number
                                                    else "no gradient was compared"),
            Verdict.RECIPE: "the recipe is changed" + (f"; the other changes alone differ by {number} ({known})"
                                                       if number else ", so no gradient is compared"),
        }[self.verdict]  # fmt: skip

    def to_json(self) -> dict[str, object]:
        derived = {"bound": ROUNDING, "rounding": self.rounding, "sentence": self.sentence}
        return {**asdict(self), **derived}

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "Proof":
        found = {k: v for k, v in content.items() if k in cls.__slots__}
        found["verdict"] = Verdict(str(found["verdict"]))
        for name in ("steps", "simplified"):
            found[name] = tuple(cast(list[object], found[name]))
        return cls(**found)  # type: ignore[arg-type]


def prove(study: optuna.Study, trial: Trial, *, say: Callable[[str], None] = lambda _: None) -> Proof:
    """The proof of `trial`, stored in the study and made only once for the same changes and versions.

    Raises EnvironmentFault if the comparison itself fails.
    """
    question = _Question.of(study, trial)
    kept = kept_proof(study, trial.number)
    if kept is not None and kept.get("key") == question.key:
        return Proof.from_json(kept)
    proof = _answered(question, say)
    keep_proof(study, trial.number, proof.to_json())
    return proof


def prove_changes(
    compared_changes: Mapping[str, object], yaml_changes: Mapping[str, object], *, trial: int, trainer: str,
    keys: BatchKeys, compared: tuple[str, ...], values: Mapping[str, object], resolved: Mapping[str, object], cwd: Path,
    traits: Mapping[str, object] | None = None,
) -> Proof:  # fmt: skip
    """The proof that changes of the recipe `values` are neutral, as for a trial that claims so; kept nowhere.

    `yaml_changes` are the same changes as keys of the YAML, where None removes a key; `traits` has what the space
    itself says of its knobs. Raises EnvironmentFault if the comparison itself fails.
    """
    claimed = Trial(
        number=trial, tier="neutral", changes=compared_changes, params={}, yaml_changes=yaml_changes
    )  # fmt: skip
    question = _Question.asked(
        claimed, trainer=trainer, keys=keys, compared=compared, values=values, resolved=resolved, cwd=cwd,
        traits=traits or {},
    )  # fmt: skip
    return _answered(question, lambda _: None)


def checked(study: optuna.Study, trial: Trial, *, say: Callable[[str], None] = lambda _: None) -> Proof:
    """The proof of `trial` before its run. Raises ConfigError if the trial claims to be neutral and is not."""
    proof = prove(study, trial, say=say)
    if proof.verdict is Verdict.REFUSED:
        raise ConfigError(
            f"trial {trial.number} {proof.sentence}; it is not promoted: choose another trial, or search with "
            f"{option('allow', 'approximate')} and a space that declares these knobs approximate"
        )
    return proof


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """The comparison to make: two recipes as TRL's YAML values, and the changes outside the comparison."""

    trial: Trial
    trainer: str
    keys: BatchKeys
    cwd: Path
    resolved: Mapping[str, object]
    baseline: Mapping[str, object]
    candidate: Mapping[str, object]
    compared: Mapping[str, object]
    in_both: Mapping[str, object]
    outside: Mapping[str, tuple[Reach, str]]

    @classmethod
    def of(cls, study: optuna.Study, trial: Trial) -> "_Question":
        record = record_of(study)
        return cls.asked(
            trial, trainer=record.trainer, keys=record.batch_keys, compared=record.compared, values=record.values,
            resolved=record.resolved, cwd=record.cwd, traits=record.traits,
        )  # fmt: skip

    @classmethod
    def asked(
        cls, trial: Trial, *, trainer: str, keys: BatchKeys, compared: tuple[str, ...], values: Mapping[str, object],
        resolved: Mapping[str, object], cwd: Path, traits: Mapping[str, object],
    ) -> "_Question":  # fmt: skip
        """The question for the changes of `trial` to the recipe `values`."""
        reaches = {
            k: reach_of_launch(k, v, inner_value(resolved, k), traits) if k.startswith(f"{LAUNCH}.")
            else reach(compared, k, v, resolved.get(k), traits)
            for k, v in trial.changes.items()
        }  # fmt: skip
        outside = {k: found for k, found in reaches.items() if found[0] is not Reach.COMPARED}
        in_both = {k: v for k, v in trial.changes.items() if trial.tier == "recipe" and k in IN_BOTH}
        outside = {k: found for k, found in outside.items() if k not in in_both}
        made = {k: v for k, v in trial.changes.items() if k not in outside and k not in in_both}
        return cls(
            trial=trial, trainer=trainer, cwd=cwd, keys=keys,
            resolved=resolved, baseline=merge(values, in_both),
            candidate=merge(values, {k: v for k, v in trial.yaml_changes.items() if k not in outside}),
            compared=made, in_both=in_both, outside=outside,
        )  # fmt: skip

    @property
    def key(self) -> str:
        """A hash of all inputs of the proof."""
        parts = [
            _VERSION, list(Proof.__slots__), self.trainer, code_hash(self.trainer), self.baseline, self.candidate,
            list(self.outside), self.trial.tier, [version(name) for name in _PACKAGES],
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def parts(self) -> dict[str, Mapping[str, object]]:
        """{name of a change: the baseline with that change alone}, for the changes that are valid alone."""
        found: dict[str, Mapping[str, object]] = {}
        keys = self.keys
        batch = {keys.micro_batch, keys.accumulation, keys.rollout, keys.rollout_batch, _RANKS}
        for key, value in self.compared.items():
            if key not in batch:
                found[key] = merge(self.baseline, {key: value})
        if not batch & set(self.compared):
            return found
        return found | self._batch_parts()

    def _batch_parts(self) -> dict[str, Mapping[str, object]]:
        keys, now, then = self.keys, self._batch({}), self._batch(self.compared)
        parts: dict[str, Mapping[str, object]] = {}
        split: dict[str, object] = {keys.micro_batch: then.micro, keys.accumulation: then.accumulation}
        what = "micro-batch x accumulation"
        if then.ranks != now.ranks:
            split[_RANKS], what = then.ranks, f"{what} x ranks"
        if then.rollout is None or now.generated is None or then.generated is None:
            return {what: merge(self.baseline, split)}
        said_once = {} if keys.rollout_batch is None else {keys.rollout_batch: None}
        each, new_each = now.micro * now.ranks, then.micro * then.ranks  # completions of a micro-batch of all ranks
        if new_each != each and now.generated % new_each == 0:
            change = {**split, str(keys.rollout): now.generated // new_each, **said_once}
            parts[what] = merge(self.baseline, change)
        if now.generated != then.generated and then.generated % each == 0:
            change = {str(keys.rollout): then.generated // each, **said_once}
            parts[str(keys.rollout)] = merge(self.baseline, change)
        return parts or {f"{what} and {keys.rollout}": self.candidate}

    def _batch(self, changes: Mapping[str, object]) -> Batch:
        own = cast("Mapping[str, object]", self.resolved.get(LAUNCH) or {}).get("ranks", 1)
        return Batch.of({**self.resolved, **changes}, self.keys, cast(int, changes.get(_RANKS, own)))

    def launches_unlike(self) -> tuple[str, ...]:
        """The differences between the launches of both recipes and those of the proof."""
        small = self.recipes()
        return launch_unlike({
            "baseline": (self.baseline, small["baseline"]), "trial": (self.candidate, small["candidate"]),
        })  # fmt: skip

    def recipes(self) -> dict[str, Any]:
        """The recipes that the worker trains. Raises ConfigError if they have more ranks than a proof can."""
        made = {**self.resolved, **self.trial.changes}
        return {
            "baseline": on_few_ranks(self.baseline, self.resolved, self.keys),
            "candidate": on_few_ranks(self.candidate, made, self.keys),
            "parts": {
                name: on_few_ranks(values, {**self.resolved, **values}, self.keys)
                for name, values in self.parts().items()
            },
        }  # fmt: skip


def _answered(question: _Question, say: Callable[[str], None]) -> Proof:
    trial = question.trial
    if not trial.changes:
        return _proof(question, Verdict.BASELINE, {})
    others = [k for k, (kind, _) in question.outside.items() if kind is Reach.OTHER]
    if trial.tier == "neutral" and others:
        return _proof(question, Verdict.REFUSED, {}, because_of=dict.fromkeys(others))
    verdict = {"neutral": Verdict.NOT_COMPARED, "approximate": Verdict.APPROXIMATE, "recipe": Verdict.RECIPE}
    if not question.compared:
        return _proof(question, verdict[trial.tier], {})
    try:
        question.recipes()
    except ConfigError as error:
        unseen = {key: (Reach.KERNEL, str(error)) for key in question.compared}
        question = replace(question, compared={}, outside={**question.outside, **unseen})
        return _proof(question, verdict[trial.tier], {})
    say(f"comparing the gradients of trial {trial.number} and the baseline on a small model")
    answer = _ask(question)
    if "error" in answer:
        if trial.tier == "recipe":  # the other changes are not valid without those of the recipe
            return _proof(question, Verdict.RECIPE, {})
        raise EnvironmentFault(f"the gradients of trial {trial.number} could not be compared: {answer['error']}")
    proof = _proof(question, verdict[trial.tier], answer)
    because_of = {} if proof.rounding else _because_of(question, answer)
    if trial.tier == "neutral":
        proof = replace(proof, verdict=Verdict.PROVEN if proof.rounding else Verdict.REFUSED)
    return replace(proof, because_of=because_of)


def _because_of(question: _Question, answer: Mapping[str, object]) -> dict[str, float | None]:
    """The parts that alone differ by more than rounding, else all compared changes."""
    parts = cast(dict[str, dict[str, float]], answer["parts"])
    found: dict[str, float | None] = {k: d["relative"] for k, d in parts.items() if not d["relative"] <= ROUNDING}
    return found or dict.fromkeys(question.compared)


def _ask(question: _Question) -> dict[str, object]:
    """The worker's answer. Raises EnvironmentFault if the worker dies before it answers."""
    with ScratchFolder("proof-") as folder:
        request = {
            "trainer": question.trainer, **question.recipes(), "bound": ROUNDING, "parameter_bound": PARAMETER_ROUNDING,
            "answer": str(folder / "answer.json"),
        }  # fmt: skip
        write_json(folder / "request.json", request)
        code, said = _run_worker(folder / "request.json", question.cwd if question.cwd.is_dir() else Path.cwd())
        answer = read_json(folder / "answer.json")
    if answer is None:
        last = (said.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFault(f"the gradient proof ended with exit code {code}: {last[:300]}")
    return answer


def _run_worker(request: Path, cwd: Path) -> tuple[int, str]:
    """(exit code, text on stderr) of the worker. Raises EnvironmentFault after the deadline."""
    kept = kept_server.hold()
    if kept is not None:
        try:
            return _run_forked(kept.path, request, cwd)
        except ServerGone:  # it was killed
            pass
        finally:
            kept.close()
    command = [sys.executable, "-P", "-m", "autofit.proof.worker", str(request)]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=trial_env(CUDA_VISIBLE_DEVICES=""), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_DEADLINE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(_TOO_LONG) from error
    return done.returncode, done.stderr


def _run_forked(server: str, request: Path, cwd: Path) -> tuple[int, str]:
    """The same by a fork of the kept server, which has the worker's imports."""
    log = request.with_name("worker.log")
    message = {
        "entry": "autofit.proof.worker:run", "argument": str(request), "cwd": str(cwd), "log": str(log),
        "env": {"CUDA_VISIBLE_DEVICES": ""}, "deadline_s": _DEADLINE_S,
    }  # fmt: skip
    ending = call(server, message)
    if ending.deadline_passed:
        raise EnvironmentFault(_TOO_LONG)
    return ending.exit_code, log.read_text("utf-8", "replace")


def _proof(
    question: _Question, verdict: Verdict, answer: Mapping[str, object], *,
    because_of: Mapping[str, float | None] | None = None,
) -> Proof:  # fmt: skip
    difference = cast(dict[str, object], answer.get("difference", {}))
    stand_in = answer.get("stand_in")
    model = str(answer.get("model", ""))
    return Proof(
        trial=question.trial.number, claimed_tier=question.trial.tier, verdict=verdict,
        relative_difference=cast("float | None", difference.get("relative")),
        steps=tuple(cast(list[float], difference.get("steps", []))),
        largest_parameter=cast("str | None", difference.get("parameter")),
        largest_parameter_difference=cast("float | None", difference.get("parameter_relative")),
        compared=question.compared, in_both=question.in_both,
        not_compared={key: reason for key, (_, reason) in question.outside.items()},
        because_of=because_of or {},
        simplified=(*unlike(question.resolved), *question.launches_unlike()) if answer else (),
        model=f"{model} in place of the recipe's model, which cannot be made small: {stand_in}" if stand_in else model,
        samples_per_step=cast("int | None", answer.get("samples_per_step")),
        shrunken=cast(int, answer.get("shrunken", 1)),
        versions=cast(dict[str, str], answer.get("versions", {})),
        seconds=cast("float | None", answer.get("seconds")), key=question.key,
    )  # fmt: skip


def lines(proof: Proof, resolved: Mapping[str, object], names: Mapping[str, str] | None = None) -> list[str]:
    """The proof as text, one fact per line; `names` are those of the user's own file."""
    names = names or {}
    found = [f"trial {proof.trial}, claimed {proof.claimed_tier}: {proof.verdict}", f"  {proof.sentence}"]
    if proof.relative_difference is not None:
        found += [
            f"  largest difference of one parameter: {proof.largest_parameter_difference:.1e} in "
            f"{proof.largest_parameter}",
            f"  compared: {describe_changes(proof.compared, resolved, names)}",
        ]
    if proof.in_both:
        both = describe_changes(proof.in_both, resolved, names)
        found.append(f"  changes of the recipe, in trial and baseline: {both}")
    found += [f"  not compared: {names.get(key, key)}: {reason}" for key, reason in proof.not_compared.items()]
    if proof.relative_difference is not None:
        found.append(
            f"  on {proof.model}; float32, CPU, identical samples; {len(proof.steps)} optimizer step(s) of "
            f"{proof.samples_per_step} samples"
            + (f" (accumulation divided by {proof.shrunken} in trial and baseline)" if proof.shrunken > 1 else "")
            + (f"; {proof.seconds:.1f} s" if proof.seconds is not None else "")
        )
        found += [f"  simplified in trial and baseline: {text}" for text in proof.simplified]
    return found
