"""`autofit completion`: what a shell needs to complete commands, options and values, made from the parser."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autofit.commands.common import DONE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """An option, or an argument without a name: what may stand after it, and its sentence."""

    names: Sequence[str]
    text: str
    takes: bool
    choices: Sequence[str]
    is_file: bool
    again: bool

    @classmethod
    def of(cls, action: argparse.Action) -> "_Word":
        from autofit.fakegpu.specs import GPU_SPECS

        cards = sorted(GPU_SPECS) if "--gpu" in action.option_strings else ()
        return cls(
            names=action.option_strings, text=" ".join((action.help or "").split()), takes=action.nargs != 0,
            choices=[str(choice) for choice in action.choices or cards], is_file=action.type is Path,
            again=isinstance(action, argparse._AppendAction),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: str
    text: str
    options: Sequence[_Word]
    arguments: Sequence[_Word]


def completion(options: argparse.Namespace) -> int:
    from autofit.commands.arguments import parser

    print(script(parser(), options.shell), end="")
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
    yield f"    commands=({' '.join(_quoted(f'{c.name}:{_plain(c.text)}') for c in commands)})"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local chosen=$words[2]"
    yield "    shift words; (( CURRENT-- ))"
    yield "    case $chosen in"
    for command in commands:
        specs = [spec for option in command.options for spec in _zsh_option(option)]
        for place, argument in enumerate(command.arguments, 1):
            specs.append(f"{place}:{_plain(argument.text)[:60]}:{_zsh_values(argument)}")
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
    """`text` without the characters that divide a completion's parts."""
    return text.replace("%%", "%").replace("[", "(").replace("]", ")").replace(":", ",").replace("\\", "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_SCRIPTS: dict[str, Callable[[Sequence[_Command]], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
