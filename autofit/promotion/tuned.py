"""The files of a tuned recipe, as TRL and accelerate take them: the YAML, and an accelerate config for ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from autofit.files import write_atomically
from autofit.recipe.launch import Launch, split
from autofit.recipe.recipe import tuned_yaml

_ACCELERATE = ".accelerate.yaml"  # after the stem of the YAML
_EACH_MACHINE = "# on each machine add: --machine_rank NUMBER_FROM_0 --main_process_ip ADDRESS_OF_THE_FIRST\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A tuned recipe. `values` may have a `launch`, which no trainer takes: it goes to the accelerate config."""

    values: Mapping[str, object]
    comment: str
    command: str | None = None  # what runs the YAML without autofit, up to the file's name
    remark: str = ""  # what is left to do before it runs

    @property
    def launch(self) -> Launch:
        """The ranks that train it."""
        return split(self.values)[0]

    def write(self, path: Path, *, accelerate: Path | None = None) -> tuple[Path, ...]:
        """Write the YAML to `path`, and where the launch is not plain the accelerate config to `accelerate`.

        The latter's default is beside the YAML, as its stem and `.accelerate.yaml`. Returns what was written.
        """
        launch, values = split(self.values)
        values = {**values, **launch.flags}
        if launch.is_plain:
            write_atomically(path, tuned_yaml(values, {}, comment=self._comment("THIS_FILE")))
            return (path,)
        beside = path.with_name(f"{path.stem}{_ACCELERATE}") if accelerate is None else accelerate
        config = yaml.safe_dump(launch.to_accelerate(), sort_keys=False, allow_unicode=True)
        note = _EACH_MACHINE if launch.machines > 1 else ""
        write_atomically(beside, f"# autofit: {launch.words}\n{note}{config}")
        comment = self._comment(f"{path.name} --accelerate_config {beside.name}")
        write_atomically(path, tuned_yaml(values, {}, comment=comment))
        return (path, beside)

    def command_line(self, written: Sequence[Path]) -> str | None:
        """The command that trains the files that `write` returned; None where the trainer has none."""
        if self.command is None:
            return None
        path, *others = written
        return f"{self.command} {path}" + (f" --accelerate_config {others[0]}" if others else "")

    def _comment(self, files: str) -> str:
        lines = [self.comment, "" if self.command is None else f"run it with: {self.command} {files}", self.remark]
        return "\n".join(line for line in lines if line)
