"""The campaign's folder: model configs, data and worst cases, a few MB; and its results, a JSON line each."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autofit.probing.result import ProbeRequest
from gpu.configs import Config

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Paths below `home`, which is given relative to the working directory, so that both machines agree on it."""

    home: Path

    def model(self, config: Config) -> Path:
        return self.home / "models" / config.model.replace("/", "--")

    def data(self, config: Config) -> Path:
        return self.home / "data" / f"{config.samples.replace(' ', '-')}-{config.tokens}"

    def case(self, config: Config) -> Path:
        """The file with the facts of the longest sample, as a probe reads it."""
        return self.home / "cases" / config.name / "worst_case.json"

    def recipe(self, config: Config) -> Path:
        """For `autofit search`: JSON, which is YAML."""
        return self.home / "recipes" / f"{config.name}.yaml"

    def values(self, config: Config) -> Row:
        """The recipe, with its model and data in this folder."""
        return {
            "model_name_or_path": str(self.model(config) / "stand_in_model"),
            "dataset_name": str(self.data(config) / "made_up_samples"), "learning_rate": 1e-5, "seed": 7,
            **config.values,
        }  # fmt: skip

    def request(
        self, config: Config, scratch: Path, device: str, *, limit_bytes: int | None = None, steps: int = 2,
        deadline_s: float = 300.0,
    ) -> ProbeRequest:  # fmt: skip
        """A probe of `config` in the fresh folder `scratch`."""
        return ProbeRequest(
            folder=scratch, trainer=config.trainer, values=self.values(config), device=device, limit_bytes=limit_bytes,
            worst_case=self.case(config), measured_steps=steps, deadline_s=deadline_s,
        )  # fmt: skip


def append(path: Path, row: Mapping[str, object]) -> None:
    """Add a line to the results, on the disk before this returns: the machine may be gone in the next moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rows(path: Path) -> list[Row]:
    """The lines of a results file, without one that was cut off while it was written; none where there is no file."""
    found: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def by_name(path: Path) -> dict[str, Row]:
    """{configuration: its last line}."""
    return {str(row["name"]): row for row in rows(path)}
