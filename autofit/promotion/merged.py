"""What a full run hands on: its trained model, with an adapter merged into the model that it was trained on.

A folder with an adapter alone is no model to the next training: it has no config of an architecture, and a new adapter
on top of it would be a second one. So the adapter's weights are added to the base model's, in the dtype in which the
base model is stored, on the CPU. A base model that was quantised for training is merged as it is stored, unquantised.
Runs in a process of its own (`python -m autofit.promotion.merged ADAPTER FOLDER`), whose memory is given back.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from autofit.errors import EnvironmentFault
from autofit.files import read_json, write_json
from autofit.plugin.hub import go_offline_without_a_hub

_ADAPTER = "adapter_config.json"
_NOTE = "merged.json"  # which run the merged model is of


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds the weights of an adapter alone."""
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
            [sys.executable, "-P", "-m", "autofit.promotion.merged", str(trained), str(partial), _trusted(home)],
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
    values = (read_json(home / "request.json") or {}).get("values")
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
    """Copy the tokenizer's and processor's files: all that is not the adapter's own."""
    own = ("adapter_", "checkpoint-", "training_args", "README", "runs", ".")
    for path in adapter.iterdir():
        if path.is_file() and not path.name.startswith(own) and not (folder / path.name).exists():
            shutil.copy(path, folder)


if __name__ == "__main__":
    merge_adapter(Path(sys.argv[1]), Path(sys.argv[2]), trust_remote_code=sys.argv[3] == "yes")
