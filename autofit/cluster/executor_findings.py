"""What is wrong with an executor.yaml for a recipe, as `autofit doctor` tells it. No torch here."""

from collections.abc import Iterator
from pathlib import Path

from autofit.cluster.executor import FILE, Executor, read_executor
from autofit.cluster.slurm import partition_limits_s
from autofit.recipe.findings import Finding, Severity
from autofit.units import format_seconds


def executor_findings(folder: Path, *, cards: int) -> list[Finding]:
    """Of executor.yaml in `folder`, for probes of so many `cards`; none without the file. Raises ConfigError."""
    executor = read_executor(None, {}, folder) if (folder / FILE).exists() else Executor()
    return list(_findings(executor, str(folder / FILE), cards)) if executor.is_slurm else []


def _findings(executor: Executor, file: str, cards: int) -> Iterator[Finding]:
    count = (executor.gpus_per_node or "").rpartition(":")[2]
    if count.isdigit() and int(count) < cards:
        yield Finding(
            severity=Severity.ERROR, where=f"{file} (gpus_per_node)",
            what=f"a job has {count} cards, and the recipe trains on {cards}", fix=f"ask for {cards}",
        )  # fmt: skip
    if not executor.is_requeued:
        yield Finding(
            severity=Severity.NOTE, where=f"{file} (slurm)",
            what="Slurm puts no job back into its queue, so a full run ends at its time limit",
            fix="run the same promote command again, which goes on from the last checkpoint",
        )  # fmt: skip
    limits = partition_limits_s()
    if limits is None:
        yield Finding(
            severity=Severity.NOTE, where=file, what="sinfo does not answer here, so its partition is not checked",
            fix="run doctor on the cluster's login node",
        )  # fmt: skip
        return
    for name in (executor.partition or "").split(","):
        if name and name not in limits:
            yield Finding(
                severity=Severity.ERROR, where=f"{file} (partition)", what=f"Slurm has no partition {name}",
                fix=f"one of {', '.join(sorted(limits)[:20])}",
            )  # fmt: skip
        elif name and executor.time_s is not None and executor.time_s > limits[name]:
            yield Finding(
                severity=Severity.ERROR, where=f"{file} (time)",
                what=f"the partition {name} allows {format_seconds(limits[name])}, and jobs ask for {executor.time}: "
                f"they would wait for ever, or be refused",
                fix="ask for less; a full run goes on in a next job",
            )  # fmt: skip
