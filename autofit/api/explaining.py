"""`autofit.explain`: the trainer and the effective batch of another tool's file or command, without a simulation."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from autofit.api.arguments import named_as_arguments
from autofit.api.tables import Shown
from autofit.frontends.draft import Explanation
from autofit.plugin.registry import explained


@dataclass(frozen=True, slots=True, repr=False)
class Explained(Shown):
    """What the file says, what its tool adds and refuses: `explanation.lines`, `wrong`, `unread` and `notes`."""

    explanation: Explanation

    def parts(self) -> list[Table | str]:
        return [f"{name}: {text}" for name, text in self.explanation.shown()]

    def to_dict(self) -> dict[str, object]:
        return self.explanation.to_json()


def explain(
    file: str | os.PathLike[str], *, changes: Mapping[str, object] | None = None, num_processes: int | None = None,
) -> Explained:  # fmt: skip
    """What a file of verl, LLaMA-Factory, Axolotl, ms-swift or open-r1 trains, in less than a second, without torch.

    `file` is a YAML, a shell script, or a command such as "swift sft --model ...". `changes` are in the tool's own
    keys; `num_processes` ranks (GPUs) count in place of what the file says. Raises ConfigError.
    """
    with named_as_arguments():
        return Explained(explained([os.fspath(file)], changes or {}, ranks=num_processes))
