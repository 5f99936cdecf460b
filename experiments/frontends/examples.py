"""The tools' own example files, as `autofit explain` reads them: which tool's, and verl's scripts against bash itself.

Run: python experiments/frontends/examples.py --verl DIR --llama-factory DIR --axolotl DIR --ms-swift DIR
Each DIR is a checkout. bash runs verl's scripts in an empty folder with stubs for every program: what they hand to
`python -m verl.trainer.main_ppo` is the truth. Writes results.json, where a tool without a checkout keeps its counts.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from autofit.errors import ConfigError
from autofit.frontends import tools, verl
from autofit.frontends.tools import AXOLOTL, LLAMA_FACTORY, MS_SWIFT, Tool, tool_of
from autofit.recipe.yaml_file import parse_yaml

HERE = Path(__file__).parent
TRAINS = {  # a key of every file that trains; the others infer, export or configure a launcher
    LLAMA_FACTORY.name: "per_device_train_batch_size", AXOLOTL.name: "datasets",
    MS_SWIFT.name: "per_device_train_batch_size",
}  # fmt: skip
RECORDS = '#!/bin/bash\nif [ "$1" = "-c" ]; then exit 1; fi\nprintf "%s\\n" "ARGUMENTS" "$@" >> "$ARGUMENTS_FILE"\n'
STUBS = {
    **dict.fromkeys(("python", "python3", "uv", "ray", "torchrun"), RECORDS),
    **dict.fromkeys(("date", "mkdir", "dirname", "basename", "nproc", "hostname"), "#!/bin/bash\necho .\n"),
    "tee": "#!/bin/bash\n/bin/cat > /dev/null\n",
}


def yamls(checkout: Path, tool: Tool) -> dict[str, int]:
    """How many of a tool's example YAMLs that train are told as its own, with an effective batch."""
    counts: Counter[str] = Counter()
    for path in sorted((checkout / "examples").rglob("*.y*ml")):
        try:
            values = yaml.safe_load(path.read_text("utf-8"))
        except yaml.YAMLError:
            continue
        if isinstance(values, dict) and TRAINS[tool.name] in values:
            told = tool_of(values) is tool
            batch = dict(tools.explain(tool, values).lines)["effective batch"]
            counts["another" if not told else "no batch" if batch.startswith("not known") else "told"] += 1
    return dict(counts)


def arguments(script: Path, folder: Path) -> dict[str, object] | None:
    """{key: value} that the script hands to verl under bash; None where it starts nothing."""
    told, copy = folder / "arguments", folder / "script.sh"
    told.write_text("")
    copy.write_text(re.sub(r"(?m)^\s*set -.*$", "", script.read_text("utf-8")))  # go on after a stub that fails
    (folder / "cwd").mkdir(exist_ok=True)
    subprocess.run(
        ["/bin/bash", "--norc", str(copy)], cwd=folder / "cwd", stdin=subprocess.DEVNULL, capture_output=True,
        timeout=20, check=False,
        env={"PATH": str(folder / "bin"), "HOME": str(folder / "cwd"), "ARGUMENTS_FILE": str(told)},
    )  # fmt: skip
    run = next((r for r in told.read_text().split("ARGUMENTS\n") if "verl.trainer.main_ppo" in r), None)
    return None if run is None else dict(_overrides(run.splitlines()))


def _overrides(words: list[str]) -> Iterator[tuple[str, object]]:
    for word in words:
        if found := re.match(r"\+{0,2}([a-z_0-9.]+)=(.*)$", word):
            try:
                yield found[1], parse_yaml(found[2])
            except ConfigError:
                yield found[1], found[2]


def scripts(checkout: Path) -> dict[str, int]:
    """How many of verl's scripts are read as bash reads them, in the keys of the batch."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        for stub, content in STUBS.items():
            (folder / "bin" / stub).write_text(content)
            (folder / "bin" / stub).chmod(0o755)
        for path in sorted((checkout / "examples").rglob("*.sh")):
            text = path.read_text("utf-8")
            truth = arguments(path, folder) if verl.starts_verl(text) else None
            if truth is None:
                counts["starts no verl" if not verl.starts_verl(text) else "bash starts nothing"] += 1
                continue
            found, unread = verl.overrides(text)
            keys = [key for key in verl.DEFAULTS if (key in truth or key in found) and key not in unread]
            wrong = [key for key in keys if truth.get(key) != found.get(key)]
            named = any(key in verl.DEFAULTS for key in unread)
            counts["wrong" if wrong else "a key is named as not certain" if named else "the same"] += 1
            if wrong:
                print(path, wrong)
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    counted: dict[str, tuple[str, Callable[[Path], Any]]] = {"verl": ("verl scripts", scripts), **{
        tool.name.lower(): (tool.name, partial(yamls, tool=tool)) for tool in (LLAMA_FACTORY, AXOLOTL, MS_SWIFT)
    }}  # fmt: skip
    for name in counted:
        parser.add_argument(f"--{name}", type=Path)
    options = vars(parser.parse_args())
    kept = HERE / "results.json"
    found = json.loads(kept.read_text())
    for name, (told, count) in counted.items():
        if (checkout := options[name.replace("-", "_")]) is not None:
            found[told] = count(checkout)
            found["commits"][checkout.name] = commit_of(checkout)
            found["dates"][told] = date.today().isoformat()
    kept.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def commit_of(checkout: Path) -> str:
    """The short hash of the commit that is checked out."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
