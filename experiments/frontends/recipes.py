"""The tools' own example files as recipes: read, refused by name or not recognised; batches; and written back.

Run: python experiments/frontends/recipes.py --llama-factory DIR --axolotl DIR --ms-swift DIR --verl DIR
Each DIR is a checkout; of a tool without one the last counts are kept. bash runs ms-swift's scripts in an empty folder
with stubs for every program: its arguments and environment, and swift's own rule for the accumulation, are the truth of
the batch. Of ms-swift only the scripts whose path has an even CRC-32 are read. Of verl the scripts under examples/
whose engine is FSDP and whose name and data (geo3k, openr1mm) tell of no images, sound or video; the batch's truth is
what bash hands to verl, by verl's own arithmetic. A file of the others is of a text model unless it is refused for
images, video or sound; those that are refused for another reason although their model sees or hears are counted as
text too, and told apart. Files with which the tool itself ends with an error are neither read nor counted, and told
apart too. Writes recipes.json.
"""

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path

import yaml

from autofit.errors import ConfigError
from autofit.frontends import verl
from autofit.frontends.draft import Draft, Foreign
from autofit.frontends.reading import explain, read
from autofit.frontends.writing import can_say, written
from experiments.frontends.examples import STUBS, arguments, commit_of

HERE = Path(__file__).parent
PROGRAMS = ("swift", "megatron", "torchrun", "accelerate", "deepspeed", "python", "ray", "pip", "sleep", "curl", "git")
STUB = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$TOLD"\nprintf "\\n" >> "$TOLD"\n' \
       'printf "%s %s\\n" "${NPROC_PER_NODE:-none}" "${NNODES:-1}" >> "$TOLD"\n'  # fmt: skip
TRAINS = re.compile(r"\bswift\s+(?:sft|pt|rlhf)\b|swift/cli/(?:sft|pt|rlhf)\.py")
# What a file of each tool has that trains on text: others infer, export, or configure a launcher.
OWN = {"LLaMA-Factory": "stage", "Axolotl": "base_model"}
ENDS = re.compile(
    r"ends with an error in|as Axolotl says|is no longer a key of Axolotl|got '<[\w-]+>'"
)  # why the tool itself does not train it
SEES = "images, video or sound"  # in the reason for which a file of a model that sees or hears is refused
CHANGES: tuple[Mapping[str, object], ...] = (
    {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5},
    {"gradient_checkpointing": True, "max_length": 640},
    {"optim": "paged_adamw_8bit"},
    {"lora_r": 4, "lora_alpha": 8},
)


def yamls(checkout: Path, tool: str) -> Iterator[Path]:
    """Files of a tool's `examples` that train on text."""
    for path in sorted((checkout / "examples").rglob("*.y*ml")):
        values = yaml.safe_load(path.read_text("utf-8"))
        if isinstance(values, dict) and OWN[tool] in values and (tool != "LLaMA-Factory" or values.get("do_train")):
            yield path


def scripts(checkout: Path) -> Iterator[Path]:
    """Scripts of ms-swift that start a training, of which the path has an even CRC-32."""
    for path in sorted((checkout / "examples" / "train").rglob("*.sh")):
        name = path.relative_to(checkout).as_posix()
        if zlib.crc32(name.encode()) % 2 == 0 and TRAINS.search(re.sub(r"(?m)^\s*#.*$", "", path.read_text("utf-8"))):
            yield path


def batch_of_yaml(path: Path, tool: str) -> int:
    """Samples of an optimizer step on one rank, by the tool's defaults (training_args.py; normalize_config)."""
    values = yaml.safe_load(path.read_text("utf-8"))
    if tool == "LLaMA-Factory":
        return int(values.get("per_device_train_batch_size", 8)) * int(values.get("gradient_accumulation_steps", 1))
    micro = int(values["micro_batch_size"])
    steps = values.get("gradient_accumulation_steps", 1) or int(values["batch_size"]) // micro  # its schema's default
    return micro * int(steps)


def batch_of_script(path: Path, folder: Path, checkout: Path) -> int | None:
    """Samples of an optimizer step over all ranks, by what bash starts; None where it starts no training here."""
    told = folder / "told"
    told.write_bytes(b"")
    copy = folder / "script.sh"
    copy.write_text(re.sub(r"(?m)^\s*set -.*$", "", path.read_text("utf-8")))
    environment = {"PATH": f"{folder / 'bin'}:/bin:/usr/bin", "HOME": str(folder), "TOLD": str(told)}
    subprocess.run(["/bin/bash", "--norc", str(copy)], cwd=folder / "cwd", stdin=subprocess.DEVNULL, timeout=20,
                   capture_output=True, check=False, env=environment)  # fmt: skip
    lines = told.read_bytes().decode().split("\n")
    for words, counts in zip(lines[::2], lines[1::2], strict=False):
        if TRAINS.search(words.replace("\0", " ")):
            return _batch(words.split("\0"), counts.split(), checkout)
    return None


def _batch(words: list[str], counts: list[str], checkout: Path) -> int:
    given = {a.lstrip("-").split("=")[0]: a.split("=")[1] if "=" in a else b for a, b in zip(words, [*words[1:], ""],
             strict=True) if a.startswith("--")}  # fmt: skip
    named = next((word for word in words[2:3] if word.endswith(".yaml")), None)
    settings = yaml.safe_load((checkout / named).read_text("utf-8")) if named else {}
    given = {key: str(value) for key, value in settings.items()} | given
    if settings.get("use_ray"):  # swift/ray_utils/resource_manager.py
        ranks = settings["device_groups"]["default"]["ranks"]
        counts = [str(len(eval(ranks, {"__builtins__": {"list": list, "range": range}}))), "1"]
    each, nodes = given.get("nproc_per_node", counts[0]), given.get("nnodes", counts[1])
    config = given.get("config_file")
    ranks = 1 if each == "none" else int(each) * int(nodes)
    if words[0] == "accelerate" and config:
        ranks = 2  # the one example's fsdp2.json: num_processes
    micro = int(given.get("per_device_train_batch_size", 1))
    usual = 1 if given.get("rlhf_type") == "grpo" else max(1, math.ceil(16 / micro / ranks))  # arguments.py, line 283
    shared = int(given.get("sequence_parallel_size", 1))  # ranks of a group have the same samples (SwiftMixin)
    return micro * int(given.get("gradient_accumulation_steps", usual)) * ranks // shared


# -- verl -------------------------------------------------------------------------------------------------------------

OTHER_DATA = re.compile(r"_vl_|omni|video|glm4_1v")  # in a script's name
SEEN_DATA = re.compile(r"(?m)^[^#\n]*(?:geo3k|openr1mm)/train")  # data with images, in its text
VERL_ENDS = "verl ends"  # in the reason for which a script is refused that verl itself does not train
VERL_CHANGES: tuple[Mapping[str, object], ...] = (
    {}, {"param_offload": True, "optimizer_offload": False}, {"gpu_memory_utilization": 0.35},
    {"attn_implementation": "sdpa", "lora_rank": 4}, {"enable_gradient_checkpointing": False},
)  # fmt: skip


SIZES = ("ppo_micro_batch_size_per_gpu", "gradient_accumulation_steps", "steps_per_generation",
         "ulysses_sequence_parallel_size")  # fmt: skip


def verl_counted(checkout: Path, folder: Path) -> dict[str, object]:
    """verl's scripts: explained, simulated, or refused by name; the effective batch against bash; changes written."""
    for stub, content in STUBS.items():
        (folder / "bin" / stub).write_text(content)
        (folder / "bin" / stub).chmod(0o755)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    trips: Counter[str] = Counter()
    for path in sorted((checkout / "examples").rglob("*.sh")):
        text = path.read_text("utf-8")
        if OTHER_DATA.search(path.name) or not verl.starts_verl(text):
            continue
        truth = arguments(path, folder)
        config = verl.VerlConfig.of(verl.overrides(text)[0])
        if config.strategy not in ("fsdp", "fsdp2"):
            continue
        if SEEN_DATA.search(text):
            counts["with images in their data"] += 1
            continue
        counts["scripts"] += 1
        told = explain(path)
        counts["batch told" if told.lines and not told.unread else "a key named as not certain"] += 1
        try:
            foreign = read(path)
        except ConfigError as error:
            reason = re.sub(r"^.*?read as a file of [^:]+: ", "", str(error))
            reasons[reason] += 1
            counts["refused, as verl ends there" if VERL_ENDS in reason else "refused by name"] += 1
            same = verl.batch_of(config) == verl.batch_of(verl.VerlConfig.of(truth or {}))
            counts["batch as bash" if same else "wrong batch"] += 1
            continue
        counts["simulated"] += 1
        assert foreign is not None  # it starts verl
        if truth is None:
            counts["no truth of the batch"] += 1
        else:
            said = verl.batch_of(verl.VerlConfig.of(truth))
            same = said is not None and same_samples(foreign, said)
            counts["batch as bash" if same else "wrong batch"] += 1
        for changes in VERL_CHANGES:
            try:
                written(path, {key: value for key, value in changes.items() if can_say(foreign, key, value)})
                trips["the same"] += 1
            except ConfigError as error:
                trips["wrong"] += 1
                print(path, changes, error)
    return {
        "commit": commit_of(checkout), "files": dict(counts), "round trips": dict(trips),
        "refused": dict(reasons.most_common()),
    }  # fmt: skip


def same_samples(foreign: Foreign, truth: verl.VerlBatch) -> bool:
    """Whether the samples of an optimizer step, and of a generation, are those of a batch, over all ranks."""
    values = {key: int(str(value)) for key, value in foreign.values.items() if key in SIZES}
    micro, accumulated, generated, sharers = (values[key] for key in SIZES)
    shards = (foreign.ranks or 1) // sharers
    return (micro * accumulated * shards, micro * generated * shards) == (truth.effective, truth.generation)


def batch(foreign: Foreign) -> int:
    values = foreign.values
    return int(str(values["per_device_train_batch_size"])) * int(str(values["gradient_accumulation_steps"]))


def round_trips(path: Path, foreign: Foreign) -> Counter[str]:
    """How many changes were written into the file and read again as meant. A change without a key is left out."""
    counts: Counter[str] = Counter()
    batch, *others = CHANGES
    if foreign.trainer == "grpo":  # whole groups again
        kept = {"per_device_train_batch_size"} if "generation_batch_size" in foreign.values else set()
        batch = {
            key: int(str(foreign.values[key])) * int(str(value)) for key, value in batch.items() if key not in kept
        }
    for changes in ({}, batch, *others):
        said = {key: value for key, value in changes.items() if key in foreign.values and can_say(foreign, key, value)}
        if changes and not said:
            continue
        try:
            again = read(path, text=written(path, said))
        except ConfigError as error:
            counts["refused, as the tool would" if ENDS.search(str(error)) else "wrong"] += 1
            print(path, said, error)
            continue
        meant = {**foreign.values, **said}
        counts["the same" if again is not None and dict(again.values) == meant else "wrong"] += 1
        if again is None or dict(again.values) != meant:
            print(path, said, {k for k in meant if again is None or again.values.get(k) != meant[k]})
    return counts


def sees(path: Path, tool: str) -> bool:
    """Whether the model of a file, by its name, sees or hears; False where its name cannot be read."""
    if path.suffix == ".sh":
        found = re.search(r"--model\s+(\S+)", path.read_text("utf-8"))
        name = found[1] if found else None
    else:
        values = yaml.safe_load(path.read_text("utf-8"))
        name = values.get("model_name_or_path", values.get("base_model"))
    try:
        Draft(tool, {}).check_model(name)
    except ConfigError:
        return True
    return False


def counted(paths: Iterator[Path], tool: str, checkout: Path, folder: Path) -> dict[str, object]:
    counts: Counter[str] = Counter()
    batches: Counter[str] = Counter()
    trips: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seeing = 0
    for path in paths:
        try:
            foreign = read(path)
        except ConfigError as error:
            counts["refused by name"] += 1
            reason = re.sub(r"^.*?read as a file of [^:]+: ", "", str(error))
            reasons[reason] += 1
            seeing += SEES not in reason and sees(path, tool)
            continue
        if foreign is None:
            counts["not recognised"] += 1
            print("not recognised:", path)
            continue
        counts["read"] += 1
        truth = batch_of_script(path, folder, checkout) if path.suffix == ".sh" else batch_of_yaml(path, tool)
        ours = batch(foreign) * ((foreign.ranks or 1) if path.suffix == ".sh" else 1)
        ours //= int(str(foreign.values.get("sequence_parallel_size", 1))) if path.suffix == ".sh" else 1
        kind = "no truth" if truth is None else "the same" if truth == ours else "wrong"
        batches[kind] += 1
        if kind != "the same":
            print(kind, "batch:", path, truth, ours)
        trips += round_trips(path, foreign)
    ending = sum(n for reason, n in reasons.items() if ENDS.search(reason))
    of_text = sum(counts.values()) - sum(n for reason, n in reasons.items() if SEES in reason) - ending
    return {
        "commit": commit_of(checkout), "files": dict(counts),
        "of text models": {"files": of_text, "read": counts["read"], "share": round(counts["read"] / of_text, 3),
                           "whose model sees or hears all the same": seeing,
                           "with which the tool itself ends with an error, not counted": ending},
        "effective batch": dict(batches),
        "round trips": dict(trips), "refused": dict(reasons.most_common()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("llama-factory", "axolotl", "ms-swift", "verl"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    found: dict[str, object] = json.loads((HERE / "recipes.json").read_text())
    found["date"] = date.today().isoformat()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bin").mkdir()
        (folder / "cwd").mkdir()
        for program in PROGRAMS:
            (folder / "bin" / program).write_text(STUB)
            os.chmod(folder / "bin" / program, 0o755)
        for tool, checkout in (("LLaMA-Factory", options.llama_factory), ("Axolotl", options.axolotl)):
            if checkout is not None:
                found[tool] = counted(yamls(checkout, tool), tool, checkout, folder)
        if options.ms_swift is not None:
            found["ms-swift"] = counted(scripts(options.ms_swift), "ms-swift", options.ms_swift, folder)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "bin").mkdir()
        if options.verl is not None:
            found["verl"] = verl_counted(options.verl, Path(name))
    (HERE / "recipes.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
