"""The words of `autofit --help` and the scripts of `autofit completion`: both are made from the parser."""

import argparse
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    "explain": ("explain verl.sh --num-processes 8", "explain llamafactory-cli train run.yaml cutoff_len=1024"),
    "fit-check": ("fit-check --gpu rtx4090 train.py", "fit-check --gpu h100 --steps 3 train.py --batch-size 8"),
    "search": ("search run.yaml --target-vram 40GB", "search run.yaml --gpu h100 --allow approximate"),
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
    wide = columns()
    parts = [usage.strip(), "\n".join(textwrap.wrap(description, wide))]
    for title, commands in GROUPS.items():
        lines = [f"{title}:"]
        for name in commands:
            lines += textwrap.wrap(
                sentences[name], wide, initial_indent=f"  {name:<{_NAME - 2}}", subsequent_indent=" " * _NAME
            )
        examples = [EXAMPLES[name][0] for name in commands[:2]]
        parts.append("\n".join([*lines, *(f"    $ autofit {text}" for text in examples)]))
    parts.append(exit_codes(wide))
    parts.append("\n".join(textwrap.wrap("Options of a command, with examples: autofit COMMAND --help", wide)))
    return "\n\n".join(parts) + "\n"


def folded(text: str, *, indent: int = 0) -> str:
    """A sentence in lines as long as the terminal has room for."""
    return textwrap.fill(text, columns() - indent)


def epilog(command: str) -> str:
    """The end of a command's own help: examples and exit codes."""
    examples = "\n".join(["examples:", *(f"  autofit {text}" for text in EXAMPLES[command])])
    return f"{examples}\n\n{exit_codes(columns())}"


def columns() -> int:
    """Columns of the terminal that help has room for."""
    return min(_MOST_COLUMNS, shutil.get_terminal_size().columns) - 1


def exit_codes(columns: int) -> str:
    """The exit codes, a line each."""
    lines = ["exit codes:"]
    for code, text in EXIT_CODES.items():
        lines += textwrap.wrap(text, columns, initial_indent=f"  {code:<5}", subsequent_indent=" " * 7)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """An option, or a positional argument: its allowed values, and its sentence."""

    names: Sequence[str]
    text: str
    takes: bool
    choices: Sequence[str]
    is_file: bool
    again: bool

    @classmethod
    def of(cls, action: argparse.Action) -> "_Word":
        from autofit.fakegpu.specs import GPU_SPECS

        hidden = action.help == argparse.SUPPRESS
        cards = sorted(GPU_SPECS) if "--gpu" in action.option_strings else ()
        return cls(
            names=action.option_strings, text="" if hidden else " ".join((action.help or "").split()),
            takes=action.nargs != 0,
            choices=[str(choice) for choice in action.choices or cards], is_file=action.type is Path,
            again=isinstance(action, argparse._AppendAction),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: str
    text: str
    options: Sequence[_Word]
    arguments: Sequence[_Word]


def completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    print(script(parser, options.shell), end="")
    return DONE


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for `shell`, which a user's start-up file evaluates."""
    return "\n".join(_SCRIPTS[shell](_commands(parser))) + "\n"


def _commands(parser: argparse.ArgumentParser) -> list[_Command]:
    (nested,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    found = []
    for choice in nested._choices_actions:
        words = [_Word.of(action) for action in nested.choices[choice.dest]._actions]
        found.append(
            _Command(
                name=choice.dest, text=str(choice.help), options=[word for word in words if word.names],
                arguments=[word for word in words if not word.names],
            )
        )  # fmt: skip
    return found


def _bash(commands: Sequence[_Command]) -> Iterator[str]:
    yield '# bash: put  eval "$(autofit completion bash)"  into ~/.bashrc'
    yield "_autofit() {"
    yield '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} words=""'
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    yield f'        words="{" ".join(command.name for command in commands)} --help --version"'
    yield '    elif [ "${cur:0:1}" = "-" ]; then'
    yield '        case "${COMP_WORDS[1]}" in'
    for command in commands:
        names = [name for option in command.options for name in option.names]
        yield f'            {command.name}) words="{" ".join(names)}";;'
    yield "        esac"
    yield "    else"
    yield '        case "${COMP_WORDS[1]} $prev" in'
    for command in commands:
        for option in command.options:
            if option.takes and option.choices:
                cases = "|".join(f'"{command.name} {name}"' for name in option.names)
                yield f'            {cases}) words="{" ".join(option.choices)}";;'
        for argument in [argument for argument in command.arguments if argument.choices][:1]:
            yield f'            "{command.name} {command.name}") words="{" ".join(argument.choices)}";;'
    yield "        esac"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield "complete -o bashdefault -o default -F _autofit autofit"


def _zsh(commands: Sequence[_Command]) -> Iterator[str]:
    yield "#compdef autofit"
    yield '# zsh: put  eval "$(autofit completion zsh)"  into ~/.zshrc, after compinit'
    yield "_autofit() {"
    yield "    local -a commands"
    yield f"    commands=({' '.join(_quoted(f'{c.name}:{_parted(c.text)}') for c in commands)})"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local chosen=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $chosen in"
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_option(option)]
        for place, argument in enumerate(command.arguments, 1):
            specs.append(
                f"{place}:{_parted(textwrap.shorten(argument.text, 60, placeholder=' ...'))}:{_zsh_values(argument)}"
            )
        yield f"        {command.name}) _arguments {' '.join(map(_quoted, specs))};;"
    yield "    esac"
    yield "}"
    yield 'if [ "$funcstack[1]" = "_autofit" ]; then _autofit "$@"; else compdef _autofit autofit; fi'


def _zsh_option(option: _Word) -> Iterator[str]:
    for name in option.names:
        value = f":value:{_zsh_values(option)}" if option.takes else ""
        yield f"{'*' if option.again else ''}{name}[{_plain(option.text)}]{value}"


def _zsh_values(word: _Word) -> str:
    return f"({' '.join(word.choices)})" if word.choices else "_files" if word.is_file else " "


def _fish(commands: Sequence[_Command]) -> Iterator[str]:
    yield "# fish: put  autofit completion fish | source  into ~/.config/fish/config.fish"
    for command in commands:
        yield f"complete -c autofit -f -n __fish_use_subcommand -a {command.name} -d {_quoted(_plain(command.text))}"
        here = f"complete -c autofit -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            flags = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            values = f" -a {_quoted(' '.join(option.choices))}" if option.choices else ""
            kind = "" if not option.takes else " -r -F" if option.is_file else " -x"
            yield f"{here} {flags}{kind}{values} -d {_quoted(_plain(option.text))}"
        for argument in command.arguments:
            if argument.choices:
                yield f"{here} -f -a {_quoted(' '.join(argument.choices))}"


def _plain(text: str) -> str:
    """`text` less the characters that divide a completion's parts."""
    return text.replace("%%", "%").replace("[", "(").replace("]", ")").replace("\\", "")


def _parted(text: str) -> str:
    """`text` as a part between colons."""
    return _plain(text).replace(":", "\\:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS: dict[str, Callable[[Sequence[_Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
