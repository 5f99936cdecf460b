"""The process of `estimate --libraries`: the libraries are those of another environment. See libraries.py.

TRL's own script trains the recipe, unchanged but for a reward that needs no data, on made-up samples, for two steps on
a simulated card.
"""

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.plugin.protocol import LOAD, OPTIMIZER, ROLLOUT, SCORING, UPDATE
from autofit.scripts.running import Script, fit_script
from autofit.trainers.names import renamed
from autofit.trainers.offline import stand_in_model

MODEL = "model_name_or_path"
SAMPLES = "made-up-samples"
STEPS = 2
_LONGEST_INITIALS = 4  # TRL calls the trainers of sft and rloo SFTTrainer and RLOOTrainer, that of reward RewardTrainer
_NOT_ASKED: dict[str, object] = {
    "eval_strategy": "no", "save_strategy": "no", "report_to": "none", "push_to_hub": False,
    "logging_nan_inf_filter": False,  # a loss has no value here
}  # fmt: skip
_SCORES = "AutoModelForSequenceClassification"
_OF_DATA = (
    "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming", "datasets",
    "eos_token", "pad_token",  # which the small tokenizer does not have
)  # fmt: skip


def main(request: Path) -> None:
    """Answer the `request` of `libraries.run_with`."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    script = request.with_name("recipe.py")
    name = asked["trainer"]
    kind = name.upper() if len(name) <= _LONGEST_INITIALS else name.capitalize()
    script.write_text(
        f"# trl.scripts.{name}, with its {kind}Trainer\n"
        f"from autofit.scripts.their_run import train\n\ntrain({name!r}, {str(request)!r})\n",
        encoding="utf-8",
    )
    try:
        checked = fit_script(
            Script(path=script, prompt_tokens=asked["tokens"], of_libraries=True), gpu=asked["gpu"],
            steps=STEPS, target_vram=asked["target_bytes"],
        )  # fmt: skip
        told = json.loads(_told(request).read_text(encoding="utf-8"))
        answer = {"figures": checked.found.to_dict(), "longest_tokens": checked.longest_tokens, **told}
    except ConfigError as error:
        answer = {"error": re.sub(rf" \({re.escape(str(script))}:\d+\)", "", str(error)).replace(str(script), "it")}
    write_json(Path(asked["answer"]), answer)


def _told(request: Path) -> Path:
    return request.with_name("told.json")


def train(trainer: str, request: str) -> None:
    """Run TRL's own script for the recipe of the `request`, and write its phases and its unknown keys."""
    asked = json.loads(Path(request).read_text(encoding="utf-8"))
    try:
        script = importlib.import_module(f"trl.scripts.{trainer}")
        parser = script.make_parser()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no `trl {trainer}` to run ({type(error).__name__}: {error}); the oldest that has one for sft, "
            "dpo and grpo is trl 0.14"
        ) from error
    known = {field.name for kind in parser.dataclass_types for field in fields(kind) if field.init}
    values, unknown, names = in_their_keys(asked["values"], known)
    values["output_dir"] = str(Path(request).with_name("output"))
    if Path(str(values.get(MODEL))).is_dir():  # perhaps a config.json alone
        values[MODEL] = stand_in_model(str(values[MODEL]), Path(request).with_name("model"))
    recipe = Path(request).with_name("recipe.yaml")
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    parts = parser.parse_args_and_config(["--config", str(recipe)])
    phases = Phases()
    try:
        with phases.followed(_with_rollouts(script)), _rewarded(script, asked["values"]):
            script.main(*parts)
    finally:
        phases.enter(phases.now)  # which ends it
        write_json(_told(Path(request)), {"unknown": unknown, "renamed": names, "phases": phases.rows()})


def in_their_keys(given: Mapping[str, Any], known: set[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """(the values `given` by the keys `known`, the unknown keys, those that have another name).

    Data, reports and evaluations are left out.
    """
    values: dict[str, Any] = {}
    unknown, names = list[str](), list[str]()
    for key, value in given.items():
        if key in (*_OF_DATA, *_NOT_ASKED):
            continue
        name = key if key in known or key == "env" else renamed(key, known)
        if name is None:
            unknown.append(key)
            continue
        if name != key:
            names.append(f"{key} as {name}")
        values[name] = value
    own = {"dataset_name": SAMPLES, "max_steps": STEPS + 1, **_NOT_ASKED}
    return values | {key: value for key, value in own.items() if key in known}, unknown, names


def no_reward(completions: Sequence[object], **_: object) -> list[float]:
    """0.0 for each completion, as in `estimate`: the cost of rewards is left out."""
    return [0.0] * len(completions)


def _with_rollouts(script: Any) -> Any:
    """The class of the trainer that a script makes, if it generates."""
    return next((found for name in ("GRPO", "RLOO") if (found := getattr(script, f"{name}Trainer", None))), None)


@contextmanager
def _rewarded(script: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Context in which a trainer with rollouts has a reward of its own, so that user modules and data are unused."""
    original = _with_rollouts(script)
    if original is None or values.get("reward_model_name_or_path"):
        yield
        return

    def made(*given: Any, **named: Any) -> Any:
        return original(*given, **{**named, "reward_funcs": no_reward})

    loads = mock.Mock(from_pretrained=mock.Mock(return_value=None))
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(script, original.__name__, made))
        if hasattr(script, _SCORES):  # older scripts load one whatever is given
            patches.enter_context(mock.patch.object(script, _SCORES, loads))
        yield


class Phases:
    """The phases of the training on the simulated card, with the peaks of each."""

    def __init__(self) -> None:
        from autofit.fakegpu.patches.cuda_api import active_gpu

        self._card: Any = active_gpu()
        self.now, self._peaks = LOAD, dict[str, tuple[int, int]]()

    def enter(self, phase: str) -> str:
        """Begin `phase`; the one that was before."""
        allocator, left = self._card.memory.allocator, self.now
        before = self._peaks.get(left, (0, 0))
        peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        self._peaks[left] = max(before[0], peaks[0]), max(before[1], peaks[1])
        self._card.reset_peaks()
        self.now = phase
        return left

    def rows(self) -> list[dict[str, object]]:
        """The peaks of each phase, in their order."""
        outside = self._card.outside_bytes
        return [
            {"name": name, "peak_allocated_bytes": peaks[0], "peak_reserved_bytes": peaks[1],
             "device_used_bytes": outside + peaks[1]}
            for name, peaks in self._peaks.items()
        ]  # fmt: skip

    def _during(self, phase: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(*given: Any, **named: Any) -> Any:
            before = self.enter(phase)
            try:
                return original(*given, **named)
            finally:
                self.enter(UPDATE if before == LOAD else before)

        return run

    @contextmanager
    def followed(self, rollouts: Any) -> Iterator[None]:
        """Context in which the phases of a Trainer are told apart, of the class of trainers with `rollouts` too."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from transformers import Trainer
        from transformers.generation.utils import GenerationMixin

        step, generate = Trainer.training_step, GenerationMixin.generate

        def begins(*_: object) -> None:
            self.enter(OPTIMIZER)

        def ends(*_: object) -> None:
            self.enter(UPDATE)

        began, ended = register_optimizer_step_pre_hook(begins), register_optimizer_step_post_hook(ends)
        with (
            mock.patch.object(Trainer, "training_step", self._during(UPDATE, step)),
            mock.patch.object(GenerationMixin, "generate", self._during(ROLLOUT, generate)),
            nullcontext()
            if rollouts is None
            else mock.patch.object(rollouts, "_prepare_inputs", self._during(SCORING, rollouts._prepare_inputs)),
        ):
            try:
                yield
            finally:
                began.remove()
                ended.remove()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    print(f"trl {version('trl')}: done")
