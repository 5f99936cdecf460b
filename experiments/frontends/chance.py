"""Files of other tools drawn by chance, read by autofit and by the tool's own arguments; each difference is printed.

    python -m experiments.frontends.chance llama-factory DIR --count 200 --seed 0

DIR is a checkout of the tool, of which nothing is kept here. It wants a Python with autofit and what the tool's
arguments import; no card. Ranks are those of a fake process group. Each axis is drawn on its own, and every third file
has one value that may be wrong. `drawn_TOOL.py` has what a tool's files are drawn from, and both readings of one.
"""

import argparse
import contextlib
import importlib
import io
import os
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from autofit.errors import ConfigError
from autofit.frontends.draft import NOT_SIMULATED, Foreign
from autofit.frontends.reading import explain, read

Values = dict[str, Any]
Facts = Mapping[str, object]
NO = object()  # a key that the file does not have
_AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
         "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}  # fmt: skip


def zero(stage: int, offload: tuple[str, ...] = (), **more: object) -> Values:
    """DeepSpeed's settings of a stage of ZeRO."""
    sharing = {"stage": stage, **{part: {"device": "cpu"} for part in offload}}
    return {**_AUTO, **more, "zero_optimization": sharing}


def draw(tool: "Drawn", chance: random.Random, nth: int) -> Values:
    """The values of one file: each axis, two settings that are rare, and in every third what may be wrong."""
    values = {key: chance.choice(choices) for key, choices in tool.axes.items()}
    for _ in range(chance.choice((0, 1, 2))):
        values |= chance.choice(tool.rare)
    if nth % 3 == 2:
        values |= chance.choice(tool.mistakes)
    return {key: value for key, value in values.items() if value is not NO}


@contextlib.contextmanager
def group(ranks: int) -> Iterator[None]:
    """A process group of `ranks`, as its first rank sees it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": 29511, "OMP_NUM_THREADS": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        torch.distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)


def fresh() -> None:
    """Forget what torch, accelerate and transformers keep of a training for the whole process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations import deepspeed

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    deepspeed.unset_hf_deepspeed_config()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]


def on_a_card() -> None:
    """Let transformers' arguments take the precisions of a card."""
    from transformers import training_args

    for name in ("is_torch_bf16_gpu_available", "is_torch_tf32_available"):
        if hasattr(training_args, name):
            setattr(training_args, name, lambda: True)


def tiny() -> Any:
    """A Qwen2 of 8 small layers in float32."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=128, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def dtypes(model: Any) -> Facts:
    """The dtype of most trained and of most frozen values, the layers with trained ones, and the adapter."""
    found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for weight in model.parameters():
        found[weight.requires_grad][str(weight.dtype).removeprefix("torch.")] += weight.numel()
    layers = {int(name.split("layers.")[1].split(".")[0]) for name, weight in model.named_parameters()
              if weight.requires_grad and "layers." in name}  # fmt: skip
    most = {kind: count.most_common(1)[0][0] if count else None for kind, count in found.items()}
    return {"trained": most[True], "frozen": most[False], "layers": tuple(sorted(layers)), "weights": dict(found[True])}


def in_order(names: object) -> object:
    return sorted(names) if isinstance(names, list) else None


# -- drawing and comparing --------------------------------------------------------------------------------------------


def yaml_of(values: Values) -> str:
    return yaml.safe_dump(values, sort_keys=False)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A tool: what its files are drawn from, what makes its own reading, and our reading in the same facts.

    `text` is a file of drawn values. `ranks` are those told beside a file; None: the file says them itself.
    """

    axes: Mapping[str, tuple[object, ...]]
    rare: tuple[Values, ...]
    mistakes: tuple[Values, ...]
    own: Callable[[Path], Callable[[Path, int | None], Facts]]
    ours: Callable[[Foreign], Facts]
    text: Callable[[Values], str] = yaml_of
    ending: str = ".yaml"
    ranks: tuple[int | None, ...] = (1, 1, 2, 4, 8)


TOOLS = {  # the module with a `TOOL`, imported only when it is asked for
    "axolotl": "experiments.frontends.drawn_axolotl",
    "llama-factory": "experiments.frontends.drawn_llama_factory",
    "ms-swift": "experiments.frontends.drawn_ms_swift",
    "verl": "experiments.frontends.drawn_verl",
}


def of_own(own: Callable[[Path, int | None], Facts], path: Path, ranks: int | None) -> Facts | str:
    """The tool's own reading, or why it ends."""
    fresh()
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        try:
            return own(path, ranks)
        except SystemExit:  # argparse's, which prints why
            return (quiet.getvalue().strip().splitlines() or ["it exits"])[-1]
        except Exception as error:  # whatever a tool ends with
            return f"{type(error).__name__}: {error}"


def of_ours(facts: Callable[[Foreign], Facts], path: Path, ranks: int | None) -> tuple[Facts | None, str]:
    """(our reading, "") or (None, why it is none); what is only not simulated is told apart."""
    try:
        explained = explain(path, ranks=ranks)
        if explained.wrong:
            return None, f"wrong: {'; '.join(explained.wrong)}"
        if NOT_SIMULATED in dict(explained.lines):
            return None, f"{NOT_SIMULATED}: {dict(explained.lines)[NOT_SIMULATED]}"
        found = read(path, ranks=ranks)
    except ConfigError as error:  # explain says nothing of verl's recipe
        return None, f"{NOT_SIMULATED if NOT_SIMULATED in str(error) else 'wrong'}: {error}"
    assert found is not None, path
    return facts(found), ""


def differences(theirs: Facts, ours: Facts) -> list[str]:
    return [f"{key}: theirs {theirs.get(key)}, ours {value}" for key, value in ours.items() if theirs.get(key) != value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the drawn files")
    args = parser.parse_args()
    tool: Drawn = importlib.import_module(TOOLS[args.tool]).TOOL
    own = tool.own(args.folder.resolve())
    kept = (args.keep or Path(tempfile.mkdtemp())).resolve()
    kept.mkdir(parents=True, exist_ok=True)
    chance, counts = random.Random(args.seed), Counter[str]()
    for nth in range(args.count):
        values, ranks = draw(tool, chance, nth), chance.choice(tool.ranks)
        path = kept / f"{args.tool}-{args.seed}-{nth}{tool.ending}"
        path.write_text(tool.text(values), encoding="utf-8")
        theirs = of_own(own, path, ranks)
        ours, why = of_ours(tool.ours, path, ranks)
        if isinstance(theirs, str):
            kind, told = ("both refuse", [f"{theirs} | {why}"]) if ours is None else ("only the tool refuses", [theirs])
        elif ours is None:
            kind, told = ("only autofit refuses", [why]) if why.startswith("wrong") else (NOT_SIMULATED, [why])
        else:
            told = differences(theirs, ours)
            kind = "differ" if told else "agree"
        counts[kind] += 1
        for line in told:
            print(f"{kind:22} {path.name} x{ranks or 'told'}: {' '.join(line.split())}")
    print(dict(counts))


if __name__ == "__main__":
    from experiments.frontends import chance  # the module that the tools import too

    chance.main()
