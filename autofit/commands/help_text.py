"""The words of `autofit --help`: the commands by task, examples, and exit codes."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS, WRONG_USAGE

SHELLS = ("bash", "zsh", "fish")  # those that `autofit completion` knows
EXIT_CODES = {
    DONE: "done, or it fits",
    NOTHING_FITS: "nothing fits, or a proof found a difference",
    WRONG_USAGE: "wrong usage, or a fault of the machine; one line on stderr says what to change",
    INTERRUPTED: "interrupted; the same command goes on",
}
GROUPS: Mapping[str, Sequence[str]] = {
    "Ask, without a GPU": ("check", "estimate", "advise", "doctor", "explain", "fit-check"),
    "Search and prove": ("search", "verify", "report", "studies", "export"),
    "Train": ("promote", "run", "monitor", "jobs"),
    "Track": ("ui", "sync"),
    "Set up": ("init", "completion", "server", "web"),
}
EXAMPLES: Mapping[str, tuple[str, str]] = {
    "check": ("check run.yaml --gpu rtx4090", "check run.yaml --gpu 8xh100 --set dtype=bfloat16"),
    "estimate": ("estimate run.yaml --gpu a100-40gb", "estimate run.yaml --target-vram 24GB --prompt-tokens 512"),
    "advise": ("advise run.yaml", "advise run.yaml --cards a100-80gb,h100 --counts 1,8"),
    "doctor": ("doctor", "doctor run.yaml --gpu 4xa100-80gb"),
    "explain": ("explain verl.sh", "explain llama_factory.yaml --num-processes 8"),
    "fit-check": ("fit-check --gpu rtx4090 train.py", "fit-check --gpu h100 --steps 3 train.py --batch-size 8"),
    "search": (
        "search run.yaml --target-vram 40GB",
        "search run.yaml --gpu h100 --allow approximate",
    ),
    "verify": ("verify best", "verify 3 --study grpo-40.00GB"),
    "report": ("report --html result.html", "report --verl-log train.log"),
    "studies": ("studies", "studies --json"),
    "promote": ("promote best", "promote leanest --out tuned.yaml --write-only"),
    "export": ("export best --to verl", "export 3 --to verl --study grpo-40.00GB"),
    "run": ("run pipeline.yaml --plan --gpu h100", "run pipeline.yaml --only sft --set sft.max_steps=100"),
    "monitor": ("monitor", "monitor --once --json"),
    "jobs": ("jobs", "jobs tail 12 --follow"),
    "ui": ("ui", "ui --port 5000"),
    "sync": ("sync", "sync --rebuild"),
    "init": ("init grpo", "init --model Qwen/Qwen3-8B --dataset data.jsonl"),
    "completion": ("completion bash", "completion zsh"),
    "server": ("server", "server stop"),
    "web": ("web", "web --port 8000 --open"),
}
_MOST_COLUMNS = 100
_NAME = 14  # columns of a command's name, with its margin


def overview(usage: str, description: str, sentences: Mapping[str, str]) -> str:
    """The text of `autofit --help`; `sentences` has the one of each command."""
    columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 1
    parts = [usage.strip(), "\n".join(textwrap.wrap(description, columns))]
    for title, commands in GROUPS.items():
        lines = [f"{title}:"]
        for name in commands:
            lines += textwrap.wrap(
                sentences[name], columns, initial_indent=f"  {name:<{_NAME - 2}}", subsequent_indent=" " * _NAME
            )
        examples = [EXAMPLES[name][0] for name in commands[:2]]
        parts.append("\n".join([*lines, *(f"    $ autofit {text}" for text in examples)]))
    parts.append(exit_codes(columns))
    parts.append("\n".join(textwrap.wrap("Options of a command, with examples: autofit COMMAND --help", columns)))
    return "\n\n".join(parts) + "\n"


def epilog(command: str) -> str:
    """What stands at the end of a command's own help."""
    columns = min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 1
    examples = "\n".join(["examples:", *(f"  autofit {text}" for text in EXAMPLES[command])])
    return f"{examples}\n\n{exit_codes(columns)}"


def exit_codes(columns: int) -> str:
    """The exit codes, a line each."""
    lines = ["exit codes:"]
    for code, text in EXIT_CODES.items():
        lines += textwrap.wrap(text, columns, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
    return "\n".join(lines)
