"""A file of another tool, read and explained; and why a command that trains does not take it. No torch here."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from autofit.errors import ConfigError
from autofit.frontends import flat, shell, verl
from autofit.frontends.explanation import Explanation
from autofit.frontends.tools import TOOLS, VERL, tool_of
from autofit.recipe.yaml_file import MOST_BYTES, read_yaml_mapping

_SCRIPTS = (".sh", ".bash")


def explain(path: Path, *, ranks: int | None = None) -> Explanation:
    """What the file says. Raises ConfigError for what is a file of none of the tools."""
    if path.suffix in _SCRIPTS:
        return _script(path, ranks)
    values = read_yaml_mapping(path, what="file")
    tool = tool_of(values)
    if tool is None:
        raise ConfigError(
            f"{path} is not recognised as a file of {', '.join(known.name for known in TOOLS)}{_partly(values)}; a "
            "recipe of TRL is explained by `autofit doctor`"
        )
    return verl.explain(_on(values, ranks)) if tool is VERL else flat.explain(tool, values, ranks=ranks)


def refusal(values: Mapping[str, object]) -> str | None:
    """Why a recipe with these `values` is none, if it is another tool's file: whose, and its effective batch."""
    tool = tool_of(values)
    if tool is None:
        return None
    said = verl.effective_sentence(values) if tool is VERL else flat.batch_sentence(tool, values)
    keys = ", ".join(tool.keys_in(values)[:2])
    what = f"this is a config of {tool.name} ({keys}), which autofit explains and does not train"
    return f"{what}: `autofit explain FILE`; {said}"


def _on(values: Mapping[str, object], ranks: int | None) -> Mapping[str, object]:
    """verl's `values` on so many GPUs, where they are said beside the file."""
    paths = {path: value for path, value in verl.VerlConfig.of(values).said.items() if not path.startswith("trainer.n")}
    return values if ranks is None else {**paths, "trainer.nnodes": 1, "trainer.n_gpus_per_node": ranks}


def _script(path: Path, ranks: int | None) -> Explanation:
    try:
        text = path.read_bytes()[: MOST_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the script {path} cannot be read: {str(error)[:100]}") from error
    if len(text) > MOST_BYTES:
        raise ConfigError(f"the script {path} must have at most {MOST_BYTES // 1024} KiB")
    if not shell.starts_verl(text):
        raise ConfigError(
            f"the script {path} must start `python -m verl.trainer.main_ppo`; other commands are not read"
        )
    found, unread = shell.overrides(text)
    found = dict(_on(found, ranks))
    batch = [key for key in unread if key in verl.DEFAULTS and key not in found]
    if batch:  # no default in place of a value that is only known where the script runs
        return replace(verl.explain({**found, **dict.fromkeys(batch, verl.UNSURE)}), unread=tuple(batch))
    return verl.explain(found)


def _partly(values: Mapping[str, object]) -> str:
    """The keys of tools that are in it all the same."""
    found = [f"{', '.join(keys[:3])} of {tool.name}" for tool in TOOLS if (keys := tool.keys_in(values))]
    return f" (it has {' and '.join(found)})" if found else ""
