"""Write trainers/key_tables.json: the keys of TRL's trainers, so that a misspelt key is told before TRL is imported.

    python experiments/key_tables.py

Run it after a change of TRL's or transformers' version in constraints.txt; a test says when.
"""

import argparse
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

from autofit.trainers.key_table import TABLES, hash_of, sources, table_of, versions
from autofit.trainers.names import synonyms

TRAINERS = ("grpo", "sft", "dpo", "reward", "rloo")


def tables() -> dict[str, Any]:
    """The content of the file: keys of all trainers once, by the number of their type."""
    types: list[dict[str, object]] = []
    found: dict[str, dict[str, int]] = {}
    files: dict[str, str] = {}
    trainers: dict[str, Any] = {}
    for trainer in TRAINERS:
        parser = importlib.import_module(f"trl.scripts.{trainer}").make_parser()
        table = table_of(trainer, parser, synonyms(trainer))
        found[trainer] = {}
        for name, key in table.keys.items():
            entry = json.loads(json.dumps(asdict(key)))
            if entry not in types:
                types.append(entry)
            found[trainer][name] = types.index(entry)
        modules = [name for name in sources(trainer, parser) if name.partition(".")[0] in ("trl", "transformers")]
        own = sorted(_file_of(name) for name in modules)
        files |= {file: hash_of(file) for file in own}
        older = {new: list(old) for new, old in synonyms(trainer).items()}
        trainers[trainer] = {"files": own, "synonyms": older, "defaults": dict(table.defaults)}
    first = found[TRAINERS[0]]
    common = {name: number for name, number in first.items() if all(f.get(name) == number for f in found.values())}
    for trainer in TRAINERS:
        trainers[trainer]["keys"] = {name: n for name, n in found[trainer].items() if name not in common}
    return {"versions": versions(), "files": files, "types": types, "keys": common, "trainers": trainers}


def _file_of(module: str) -> str:
    """`trl/trainer/grpo_config.py` for `trl.trainer.grpo_config`."""
    path = str(sys.modules[module].__file__)
    return path[path.rindex(f"/{module.partition('.')[0]}/") + 1 :]


def text() -> str:
    """The file's text: a line for each entry."""
    return json.dumps(tables(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    TABLES.write_text(text(), encoding="utf-8")
    print(f"wrote {TABLES}")
