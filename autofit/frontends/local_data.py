"""Datasets on disk that another tool's file names: those that are not there are noted. No torch here."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from autofit.errors import quoted
from autofit.files import TornFile, read_json
from autofit.frontends.command import UNSURE
from autofit.frontends.draft import Draft
from autofit.recipe.yaml_file import may_read

_FORMATS = (".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt")
_BUILDERS = ("json", "csv", "parquet", "arrow", "text")  # `path` of datasets whose files are named beside it
_INFO = "dataset_info.json"
_LONGEST = 300  # characters of a path that are shown
_NOT_HERE = ("ONLINE", "REMOTE:")  # dataset_dir of LLaMA-Factory (data/parser.py)
_OF_SWIFT = re.compile(r"(?:(?:HF|MS|hf|ms)::)?(?P<path>[^:#]*)")  # [source::]path[:subsets][#samples]


def note_axolotl(draft: Draft, folder: Path) -> None:
    """Note the files of `datasets` and `test_datasets` of Axolotl that are not there."""
    for key in ("datasets", "test_datasets"):
        given = draft.given.get(key)
        for entry in given if isinstance(given, list) else ():
            if isinstance(entry, Mapping):
                path, files = entry.get("path"), entry.get("data_files")
                listed = files if isinstance(files, list) else [files]
                _note_gone(draft, key, listed if path in _BUILDERS else [path], folder)


def note_swift(draft: Draft, folder: Path) -> None:
    """Note the files of `--dataset` and `--val_dataset` of ms-swift that are not there."""
    for key in ("dataset", "val_dataset"):
        given = draft.given.get(key)
        names = [str(name) for name in (given if isinstance(given, list) else str(given or "").split())]
        paths = [found["path"] for name in names if UNSURE not in name and (found := _OF_SWIFT.match(name))]
        _note_gone(draft, key, paths, folder)


def note_llama_factory(draft: Draft, folder: Path) -> None:
    """Note datasets of LLaMA-Factory that dataset_info.json does not have, or whose files are not beside it."""
    stated = draft.given.get("dataset_dir")
    name = "data" if stated is None else stated
    if not isinstance(name, str) or name == UNSURE or name.startswith(_NOT_HERE):
        return
    places = [Path(name), folder / name]
    if not all(may_read(place / _INFO) for place in places):
        return
    found = next((place for place in places if os.path.isfile(place / _INFO)), None)
    if found is None:
        if stated is not None:
            draft.note(f"dataset_dir: {quoted(name)} has no {_INFO} here, without which {draft.tool} does not start")
        return
    try:
        known = read_json(found / _INFO) or {}
    except (TornFile, OSError):
        draft.note(f"dataset_dir: {_INFO} in {quoted(name)} cannot be read")
        return
    for key in ("dataset", "eval_dataset"):
        for each in _names(draft.given.get(key)):
            if each not in known:
                within = f"{_INFO} in {quoted(name, _LONGEST)}"
                draft.note(f"{key}: {within} has no {quoted(each)}, without which {draft.tool} does not start")
            elif isinstance(entry := known[each], Mapping) and isinstance(file := entry.get("file_name"), str):
                _note_gone(draft, key, [os.path.join(".", name, file)], folder)


def _names(given: object) -> Iterator[str]:
    listed = given if isinstance(given, list) else str(given or "").split(",")
    yield from (name for each in listed if (name := str(each).strip()) and UNSURE not in name)


def _note_gone(draft: Draft, key: str, names: Sequence[object], folder: Path) -> None:
    for name in names:
        if not isinstance(name, str) or UNSURE in name or "*" in name or not _is_path(name):
            continue
        places = [Path(os.path.expanduser(name)), folder / name]
        if all(map(may_read, places)) and not any(map(os.path.exists, places)):
            draft.note(f"{key}: there is no {quoted(name, _LONGEST)} here, without which {draft.tool} does not start")


def _is_path(name: str) -> bool:
    """Whether `name` can only be a file or a folder of this machine."""
    return "://" not in name and (name.startswith(("/", "./", "../", "~/")) or name.endswith(_FORMATS))
