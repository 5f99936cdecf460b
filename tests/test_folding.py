"""On a terminal of any width every value of a table is there, and no word is broken."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autofit.api.events import TrialResult
from autofit.api.monitoring import Card, Host, Probe, Snapshot
from autofit.api.tables import Shown, _text_of, front_table, sensitivity_table
from autofit.errors import ConfigError, option
from autofit.folding import Folding
from autofit.forecast.estimate import estimate_table
from autofit.lines import wrapped
from autofit.picture import Picture
from autofit.probing.result import Fidelity, PhasePeak, ProbeResult, ProbeStatus
from autofit.tuning.sensitivity import Neighbour

WIDTHS = (60, 80, 100, 120, 160, 200)
GB = 10**9
CHANGES = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4,
    "activation_checkpointing": False, "env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}  # fmt: skip
ORIGINAL = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1,
    "activation_checkpointing": True, "num_generations": 8,
}  # fmt: skip


def front() -> Table:
    rows = [
        TrialResult(
            number=number, tier="neutral", status=ProbeStatus.FIT, changes=CHANGES if number else {},
            device_used_bytes=34_300_000_000, step_s=12.8, completions_per_s=1.25, speedup=1.6, confirmed=None,
            margin_bytes=4_900_000_000,
        )
        for number in (4, 0)
    ]  # fmt: skip
    return front_table(
        rows, original=ORIGINAL, winner=4, target_bytes=40 * GB, fidelity="predicted",
        device_name="NVIDIA A100-SXM4-40GB (simulated, cuda mode)",
    )  # fmt: skip


def knobs() -> Table:
    rows = [
        Neighbour(
            knob=knob, direction="up", before=1, after="{'activation_offloading': True}", tier="approximate",
            fidelity=Fidelity.PREDICTED, trial=None, at_least=False, device_used_bytes=20 * GB,
            device_used_delta_bytes=-4 * GB, step_s=12.0, step_delta_s=0.4, fits=True,
        )
        for knob in ("activation_checkpointing_kwargs.offload", "lora_r")
    ]  # fmt: skip
    table = sensitivity_table(4, rows)
    assert table is not None
    return table


def phases() -> Table:
    parts = ("weights", "activations", "gradients", "optimizer", "logits", "KV cache", "temporaries", "workspace")
    names = ("load", "update", "scoring", "rollout", "optimizer")
    result = ProbeResult(
        status=ProbeStatus.FIT, device="sim:rtx5090", device_used_bytes=20 * GB, step_s=(3.0,), rollout_s=(1.0,),
        device_name="NVIDIA GeForce RTX 5090 (simulated, cuda mode)",
        phases=tuple(PhasePeak(name=name, peak_allocated_bytes=(9 - place) * GB, peak_reserved_bytes=0,
                               device_used_bytes=0) for place, name in enumerate(names)),
        categories={name: {part: (place + 1) * 123_456_789 for place, part in enumerate(parts)} for name in names},
    )  # fmt: skip
    return estimate_table(result, 32 * GB)[0]


def watched() -> list[Table]:
    card = Card(
        index=0, name="NVIDIA H100 80GB HBM3", uuid="GPU-1", capacity_bytes=85 * GB, device_used_bytes=70 * GB,
        utilisation_frac=0.97, processes=(), peak_allocated_bytes=60 * GB, peak_reserved_bytes=66 * GB, alloc_retries=3,
    )  # fmt: skip
    host = Host(cores=16, capacity_bytes=128 * GB, used_bytes=40 * GB, utilisation_frac=0.5, ours_rss_bytes=9 * GB)
    probe = Probe(
        name="trial 12", trial=12, device="NVIDIA H100 80GB HBM3", phase="rollout", elapsed_s=70.0, limit_bytes=40 * GB,
        device_used_bytes=30 * GB, rss_bytes=5 * GB, cpu_frac=1.2, study="qwen3-4b-grpo-40gb-a100-0f3c",
        changes="per_device_train_batch_size 8 -> 4, gradient_accumulation_steps 2 -> 4",
    )  # fmt: skip
    found = Snapshot(time=0.0, folder=Path("autofit-studies"), cards=(card,), host=host, probes=(probe,), runs=())
    return [table for table in found.parts() if isinstance(table, Table)]


def words(table: Table) -> Iterator[str]:
    """Every word of every cell that says something."""
    for column in table.columns:
        for cell in column.cells:
            yield from (cell if isinstance(cell, Text) else Text.from_markup(str(cell))).plain.split()


def lines_of(table: Table, width: int) -> list[str]:
    Console(file=(file := io.StringIO()), width=width).print(table, crop=False)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("table", [front(), knobs(), phases(), *watched()], ids=lambda table: str(table.title)[:20])
def test_every_value_is_shown_and_no_word_is_broken(table: Table, width: int) -> None:
    lines = lines_of(table, width)
    assert max(map(len, lines)) <= width
    shown = " ".join(lines).replace(",", " ").replace("│", " ").split()
    missing = {word for word in words(table) if word != "-" and word.strip(",") not in shown}
    assert not missing


def test_below_120_columns_a_trial_is_a_block_with_what_changed_and_its_figures() -> None:
    table = front()
    assert lines_of(table, 80)[2:8] == [
        "trial 4 *",
        "  changes: per_device_train_batch_size 8 -> 4, gradient_accumulation_steps",
        "    2 -> 4, steps_per_generation 1 -> 4, activation_checkpointing True -> False,",
        "    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "  tier neutral, device-used 34.30 GB, of target 86%, free 4.90 GB, step 12.8 s,",
        "    completions/s 1.25, speed-up 1.60x",
    ]
    assert lines_of(table, 119)[1].startswith("trial 4 *")
    assert "┃" in lines_of(table, 160)[2]


def test_a_narrow_table_comes_before_blocks() -> None:
    narrow, wide = Folding(title="cards"), Folding(title="cards")
    narrow.add_column("card and figures")
    narrow.add_row("h100, 3 s")
    for name in ("card", "a column of eighteen words", "step"):
        wide.add_column(name, no_wrap=True)
    wide.add_row("h100", "-", "3 s")
    wide.narrow = narrow
    assert "card and figures" in "".join(lines_of(wide, 30))
    assert "card h100" in lines_of(wide, 10)


@pytest.mark.parametrize("padding", [(0, 1), (0, 1, 0, 0)])
def test_a_table_takes_the_columns_that_its_frame_leaves(padding: tuple[int, ...]) -> None:
    table = Folding(title="cards", padding=padding)
    for name in ("card", "with"):
        table.add_column(name)
    table.add_row("h100", "the recipe as it is")
    width = next(width for width in range(20, 60) if len(lines_of(table, width)) == 6)
    assert len(lines_of(table, width)[1]) == width, "no blank is left beside a line that was broken in two"


def test_a_sentence_is_wrapped_between_words_and_its_options_stay_a_command() -> None:
    line = (
        "  dtype None -> bfloat16 (approximate): 8.35 s a step, 24.56 GB   --set dtype=bfloat16 --set optim=adamw_8bit"
    )
    assert wrapped(line, 200) == [line]
    found = wrapped(line, 60)
    assert found == [
        "  dtype None -> bfloat16 (approximate): 8.35 s a step,",
        "    24.56 GB",
        "    --set dtype=bfloat16 --set optim=adamw_8bit",
    ]
    assert wrapped(line, 40)[-2:] == ["    --set dtype=bfloat16 \\", "    --set optim=adamw_8bit"]
    assert wrapped("a" * 90, 60) == ["a" * 90]
    command = "run it with: A='one two' llamafactory-cli train /studies/promoted/lf-trial-2/lf.yaml"
    assert wrapped(command, 60) == [
        "run it with:", "  A='one two' llamafactory-cli train \\", "  /studies/promoted/lf-trial-2/lf.yaml",
    ]  # fmt: skip
    assert wrapped("  tool: one two three", 15, label=8) == ["  tool: one two", "        three"]


def test_a_change_in_the_users_own_file_begins_a_line() -> None:
    line = "  recipe: max_length 8192 -> 4096 (59.37 GB, 52.1 s a step)   in your file: cutoff_len: 4096"
    assert wrapped(line, 200) == [line]
    assert wrapped(line, 80) == [
        "  recipe: max_length 8192 -> 4096 (59.37 GB, 52.1 s a step)",
        "    in your file: cutoff_len: 4096",
    ]


def test_the_text_of_a_result_is_whole_in_a_notebook_and_shows_nothing_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich takes a notebook for its own place to show a table: each result stood there twice."""
    plain = _text_of(front())
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel sets it
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    shown: list[object] = []
    monkeypatch.setattr("rich.jupyter.display", lambda *args: shown.append(args))
    assert _text_of(front()) == plain
    assert (shown, capsys.readouterr().out) == ([], "")
    assert "34.30 GB" in plain


def test_a_figure_is_a_picture_in_a_notebook_without_pyplot() -> None:
    assert Picture()._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("phase_s", "words"),
    [
        ({}, " A step takes 3.00 s (rollout 2.00 s). "),
        ({"rollout": 1.97, "scoring": 0.03}, " A step takes 3.00 s (rollout 2.00 s). "),
        ({"rollout": 1.5}, " A step takes 3.00 s (2.00 s before the update). "),
    ],
)
def test_the_seconds_of_a_rollout_are_not_told_as_those_of_a_phase_of_the_table(
    phase_s: dict[str, float], words: str
) -> None:
    """In verl the passes without gradient come before the update too, and the phase of the same name has less."""
    peak = PhasePeak(name="rollout", peak_allocated_bytes=GB, peak_reserved_bytes=GB, device_used_bytes=GB)
    result = ProbeResult(status=ProbeStatus.FIT, device="sim:h100", device_used_bytes=GB, least_capacity_bytes=GB,
                         step_s=(3.0,), rollout_s=(2.0,), phases=(peak,), phase_s=phase_s)  # fmt: skip
    assert words in estimate_table(result, 32 * GB)[1]


@pytest.mark.parametrize(("columns", "at_most"), [(80, 80), (200, 150)])
def test_a_result_at_a_prompt_is_no_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, at_most: int
) -> None:
    class Result(Shown):
        def parts(self) -> list[Table | str]:
            return [front(), "a sentence of five words " * 8]

    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, str(Result()).splitlines())) > 80
    assert repr(Result()) == str(Result())
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert max(map(len, repr(Result()).splitlines())) <= max(at_most, columns)


def test_an_error_is_one_line_in_a_notebook_too() -> None:
    error = ConfigError(f"give {option('gpu', 'NAME')}")
    assert error._render_traceback_() == ["ConfigError: give --gpu NAME"]
