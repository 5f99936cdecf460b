"""The stages of a pipeline: the known facts of each, and the model that one hands to the next.

A stage is done where its run is: `final.json` in the folder of its promotion. The file of a pipeline only says which
study and trial a stage is, and its inputs: recipe, data, code and earlier runs.

A folder with an adapter alone is no model to the next training: it has no config of an architecture, and a new adapter
on top of it would be a second one. So the adapter's weights are added to the base model's, in the dtype in which the
base model is stored, on the CPU, in a process of its own (`python -m autofit.promotion.stages ADAPTER FOLDER`). A base
model that was quantised for training is merged as it is stored, unquantised.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.models import go_offline_without_a_hub
from autofit.plugin.registry import code_hash
from autofit.promotion.place import texts_in
from autofit.promotion.run_folder import RunFolder
from autofit.recipe.pipeline import Stage, record_path
from autofit.recipe.secrets import sealed

_WHOLE_BYTES = 2**25  # larger files and folders count by sizes and times of change: weights, mostly
_FILES = 1000  # of a folder
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_OUTPUTS = re.compile(r".*(output|logging)_dir|hub_.*|run_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs on which the training of a stage depends, as JSON."""

    values: Mapping[str, object]  # of the recipe, `${stage}` as it stands there
    trainer: str
    files: Mapping[str, str]  # {path or module that the recipe names: its hash}
    models: Mapping[str, str]  # {stage whose model it uses: its run}

    def changed_from(self, other: "Inputs") -> list[str]:
        """Differences in words; empty if both are the same."""
        found = [] if self.trainer == other.trainer else [f"trainer {other.trainer} -> {self.trainer}"]
        for key in dict.fromkeys((*other.values, *self.values)):
            old, new = other.values.get(key), self.values.get(key)
            if old != new:
                found.append(f"{key} {old!r} -> {new!r}")
        found += [f"{name} has other content" for name in _differing(self.files, other.files)]
        return found + [f"{name} was trained again" for name in _differing(self.models, other.models)]


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in one if name in other and one[name] != other[name]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownStage:
    """Decisions on a stage: the trial of a study that is, or was, trained."""

    inputs: Inputs
    study: str
    trial: int
    restart: bool = False  # its run is to begin again at step 0, and has not yet done so

    @classmethod
    def from_json(cls, content: Mapping[str, object]) -> "KnownStage":
        inputs = Inputs(**cast("dict[str, dict[str, str]]", content["inputs"]))  # type: ignore[arg-type]
        return cls(**{**content, "inputs": inputs})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStage:
    """The finished training of a stage."""

    number: str  # differs from one training to the next
    final: Mapping[str, object]

    @property
    def model(self) -> Path:
        """The folder of the result: a model, or an adapter."""
        return Path(str(self.final["output_dir"]))


@dataclass(slots=True)
class State:
    """The stages of one pipeline that a study and trial are known of; kept in pipelines/NAME.json."""

    folder: Path  # of the studies
    name: str
    stages: dict[str, KnownStage] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, name: str) -> "State":
        """State of the pipeline `name` kept in `folder`. Raises EnvironmentFault for an unreadable file."""
        path = record_path(folder, name)
        try:
            stages = cast("dict[str, dict[str, object]]", (read_json(path) or {}).get("stages", {}))
            return cls(folder, name, {stage: KnownStage.from_json(known) for stage, known in stages.items()})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EnvironmentFault(
                f"{path} cannot be read; delete it: searches and trainings that are done are found again"
            ) from error

    def keep(self, stage: str, known: KnownStage) -> None:
        """Note the decisions on `stage`, in the file too."""
        self.stages[stage] = known
        content = {name: asdict(one) for name, one in self.stages.items()}
        write_json(record_path(self.folder, self.name), {"pipeline": self.name, "stages": content})

    def home(self, stage: str) -> Path:
        """The folder of the promoted run of `stage`."""
        known = self.stages[stage]
        return self.folder / "promoted" / f"{known.study}-trial-{known.trial}"

    def run(self, stage: str) -> FinishedStage | None:
        """The finished training of `stage`, whatever its inputs are now, if there is one."""
        if stage not in self.stages or self.stages[stage].restart:
            return None
        final = RunFolder(self.home(stage)).final()
        if final is None or not Path(str(final["output_dir"])).is_dir():
            return None
        told = sorted((key, value) for key, value in final.items() if key != "output_dir")  # it may be moved
        return FinishedStage(number=hashlib.sha256(repr(told).encode()).hexdigest()[:12], final=final)


def inputs_of(stage: Stage, trainer: str, models: Mapping[str, str]) -> Inputs:
    """Inputs of the training of `stage`; `models` has the runs of the stages that it uses."""
    names = sorted(set(texts_in(stage.values, without=_OUTPUTS.fullmatch)))  # none that is a place for output
    files = {name: found for name in names if (found := content_of(name))}
    if own := code_hash(trainer):
        files[trainer] = own
    values = json.loads(json.dumps(sealed(stage.values), default=str))  # as the file will have them
    return Inputs(values=values, trainer=trainer, files=files, models=dict(models))


def content_of(name: str) -> str:
    """A hash of the file, folder or module (a dotted path to something in it) called `name`; "" if it is missing."""
    if _DOTTED.fullmatch(name) and not Path(name).exists():
        module, _, target = name.rpartition(".")
        return code_hash(f"{module}:{target}")
    path = Path(name)
    try:
        if not name or len(name) > 1000 or not path.exists():
            return ""
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())[:_FILES]
        whole = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(path)}\0".encode() + _content(file, whole=whole))
    except (OSError, ValueError):  # a name that no file can have, or a file that went away
        return ""
    return digest.hexdigest()[:16]


def _content(file: Path, *, whole: bool) -> bytes:
    found = file.stat()
    return file.read_bytes() if whole else f"{found.st_size} {found.st_mtime_ns}".encode()


_ADAPTER = "adapter_config.json"
_NOTE = "merged.json"  # which run the merged model is of


def is_adapter(folder: Path) -> bool:
    """True if `folder` holds the weights of an adapter alone."""
    return (folder / _ADAPTER).is_file()


def base_of(trained: Path) -> str:
    """The model that an adapter in the folder `trained` is for; the folder itself where it holds a whole model."""
    config = read_json(trained / _ADAPTER) or {}
    return str(config.get("base_model_name_or_path") or trained)


def whole_model(trained: Path, home: Path, *, run: str) -> Path:
    """The folder of a whole model: `trained`, or `home`/merged where that is an adapter; made once for each `run`.

    Raises EnvironmentFault where the adapter cannot be merged.
    """
    if not is_adapter(trained):
        return trained
    folder = home / "merged"
    if folder.is_dir() and (read_json(home / _NOTE) or {}).get("run") == run:
        return folder
    partial = home / ".merged.part"
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    with (home / "merged.log").open("wb") as log:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "autofit.promotion.stages", str(trained), str(partial), _trusted(home)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
    if ended.returncode:
        raise EnvironmentFault(
            f"the adapter in {trained} could not be merged into its base model (exit code {ended.returncode}); see "
            f"{home / 'merged.log'}"
        )
    os.replace(partial, folder)
    write_json(home / _NOTE, {"run": run})
    return folder


def _trusted(home: Path) -> str:
    """ "yes" where the recipe of the run in `home` lets the model bring code of its own."""
    values = (RunFolder(home).request() or {}).get("values")
    return "yes" if isinstance(values, dict) and values.get("trust_remote_code") else "no"


def merge_adapter(adapter: Path, folder: Path, *, trust_remote_code: bool = False) -> None:
    """Write to `folder` the base model of `adapter` with its weights added, and its tokenizer. Loads torch."""
    from peft import PeftModel

    base = PeftModel.from_pretrained(_base_model(adapter, trust_remote_code), str(adapter))
    base.merge_and_unload(safe_merge=True).save_pretrained(folder)
    _keep_processor(adapter, folder)


def _base_model(adapter: Path, trust: bool) -> Any:
    """The model that the adapter was trained on, in the dtype of its file."""
    import transformers
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(adapter))
    loading = {"revision": config.revision or "main", "trust_remote_code": trust}
    name = str(config.base_model_name_or_path)
    if not os.path.isdir(name):
        go_offline_without_a_hub()
    if config.task_type == "SEQ_CLS":
        return transformers.AutoModelForSequenceClassification.from_pretrained(
            name, num_labels=1, dtype="auto", **loading
        )
    found = transformers.AutoConfig.from_pretrained(name, **loading)
    own = getattr(transformers, (found.architectures or [""])[0], transformers.AutoModelForCausalLM)
    return own.from_pretrained(name, dtype="auto", **loading)


def _keep_processor(adapter: Path, folder: Path) -> None:
    """Copy the tokenizer's and processor's files: all except the adapter's own."""
    own = ("adapter_", "checkpoint-", "training_args", "README", "runs", ".")
    for path in adapter.iterdir():
        if path.is_file() and not path.name.startswith(own) and not (folder / path.name).exists():
            shutil.copy(path, folder)


if __name__ == "__main__":
    merge_adapter(Path(sys.argv[1]), Path(sys.argv[2]), trust_remote_code=sys.argv[3] == "yes")
