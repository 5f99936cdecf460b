"""The report as a web page: complete, escaped, and without anything from elsewhere."""

import argparse
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import lawful
import pytest
from at_once import AtOnce
from recipes import grpo_recipe
from search_driver import plan

import autofit
from autofit.api.lower_tiers import Outside
from autofit.api.markup import Html, element, escaped, table
from autofit.api.page import page_of
from autofit.cli import main
from autofit.commands.studies import show_result
from autofit.errors import ConfigError
from autofit.files import write_json
from autofit.probing.supervise import note_of
from autofit.space.knob import load_space
from autofit.space.space import Space
from autofit.space.traits import reason_for
from autofit.tuning.frontier import winner
from autofit.tuning.record import Stop, StopKind, keep_proof, keep_record, record_of
from autofit.tuning.search import Search, open_study
from autofit.tuning.sensitivity import sensitivity
from autofit.tuning.study import load_study, trials_of
from autofit.watching.events import EventKind, RunEvent, keep_event

EVIL = "<script>alert('x')</script>&\"q\""
VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """The tags of a page, checked for balance, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.cells: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag not in VOID:
            self._open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href"):
                assert (value or "").startswith("#"), value

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)
        if self.cells and {"td", "th"} & set(self._open):
            self.cells[-1] += data

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def searched(folder: Path, *, trials: int = 6, target_mb: int = 150, model: str = "org/m", name: str = "law") -> Path:
    """A folder with a finished study over the law."""
    wanted = plan(folder, trials, target_bytes=target_mb * lawful.MB)
    recipe = grpo_recipe(per_device_train_batch_size=4, gradient_accumulation_steps=4, model_name_or_path=model)
    space = Space.of(recipe, load_space(None, trainer="grpo"))
    wanted = replace(wanted, recipe=recipe, space=space, study_name=name)
    study = open_study(wanted)
    Search(wanted, study, server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    best = winner(trials_of(study), **record_of(study).rule)
    if best is not None:
        kept = sensitivity(space, trials_of(study), best, limit_bytes=wanted.limit_bytes, predict=lambda *_: None)
        keep_record(study, replace(record_of(study), sensitivity=kept))
    return folder


def promoted(folder: Path, study: str, trial: int, *, says: str = "all is well") -> Path:
    """The files of a run of `trial` that stopped after two steps."""
    home = folder / "promoted" / f"{study}-trial-{trial}"
    promise = {
        "device_name": "Fake", "fidelity": "measured", "device_used_bytes": 10**9, "limit_bytes": 2 * 10**9,
        "step_s": 1.0, "samples_per_s": 16.0, "effective_batch_size": 16, "proof": "gradient proven neutral",
    }  # fmt: skip
    write_json(home / "request.json", {"study": study, "trial": trial, "device": "cpu", "folder": str(home)})
    write_json(home / "started.json", note_of(2**22))  # gone
    lines = [{"step": n, "max_steps": 9, "step_s": 3.0, "reward": 0.1 * n, "time": 100.0 + 3 * n} for n in (1, 2)]
    (home / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"promise": promise, "device": "cpu", "device_name": "Fake", "generates": True, "samples_per_step": 16,
             "batch_text": "4 x 4", "effective_batch_size": 16}  # fmt: skip
    keep_event(home, RunEvent(step=0, kind=EventKind.PROMISE, text="promised", data=start))
    keep_event(home, RunEvent(step=1, kind=EventKind.GUARD, text=says))
    return home


@pytest.fixture(scope="module")
def studied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = searched(tmp_path_factory.mktemp("page"))
    study = load_study(folder, "law")
    best = autofit.report(folder=folder).winner
    assert best is not None
    keep_proof(study, best.number, {"sentence": "gradient proven neutral: relative difference 1.2e-07"})
    promoted(folder, "law", best.number, says="length is short")
    return folder


def test_the_page_has_the_reports_figures_the_picture_and_the_reasons(studied: Path) -> None:
    result = autofit.report(folder=studied)
    page = Page(page_of(result))
    best = result.winner
    assert best is not None
    assert f"{best.speedup:.2f}x" in page.texts
    assert f"{best.step_s:.2f} s" in page.texts
    assert result.why[1:].replace(" -> ", " → ") in page.text, "a line may break behind the hyphen of ->"
    assert {"svg", "path"} <= set(page.tags)
    for key in best.changes:
        assert key in page.cells
        assert reason_for(key) in page.text, key
    assert "Gradient proven neutral: relative difference 1.2e-07." in page.texts
    numbers = [cell for cell in page.cells if re.fullmatch(r"\d+( \*)?", cell)]
    assert len(numbers) >= len(result.trials)


def test_the_page_says_what_each_changed_setting_was_and_what_moving_it_back_does(studied: Path) -> None:
    cells = Page(page_of(autofit.report(folder=studied))).cells
    at = cells.index("per_device_train_batch_size")
    assert cells[at + 1 : at + 4] == ["4", "8", "neutral"]
    assert "All else equal, with its old value: -16.0 MB, +0.65 s a step (measured, trial 0)." in cells[at + 4]


def test_the_options_of_a_change_outside_the_tier_stand_below_its_figures(studied: Path) -> None:
    change = Outside(changes={"dtype": "bfloat16"}, options="--set dtype=bfloat16", tier="approximate",
                     device_used_bytes=10**9, step_s=2.0, speedup=1.5)  # fmt: skip
    text = page_of(replace(autofit.report(folder=studied), outside=(change,)))
    assert "1.50x" in text
    assert "<div><code>--set dtype=bfloat16</code></div>" in text


@pytest.mark.parametrize("trains", [True, False])
def test_the_next_command_is_one_that_ends_well(
    trains: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe with synthetic samples has nothing to train on: promote alone writes its winner and ends with 2."""
    folder = searched(tmp_path, trials=3)
    study = load_study(folder, None)
    keep_record(study, replace(record_of(study), trains_on_data=trains))
    assert main(["report", "--dir", str(folder)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"Next: autofit promote best{'' if trains else ' --write-only'} --dir")


@pytest.mark.parametrize(("card", "written"), [(None, " --write-only"), ("NVIDIA A100-SXM4-40GB", "")])
def test_the_next_command_of_a_simulated_study_trains_where_that_card_is(
    card: str | None, written: str, studied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [] if card is None else [SimpleNamespace(name=card)]
    monkeypatch.setattr("autofit.promotion.place.gpus", lambda: here)
    options = argparse.Namespace(json=False, dir=studied)
    show_result(options, replace(autofit.report(folder=studied), device="sim:a100-40gb"))
    assert f"Next: autofit promote best{written} --dir" in capsys.readouterr().out


def test_the_next_command_of_a_study_of_verl_prints_the_overrides(
    studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """promote wants the gradient proof, which nothing here can train for verl."""
    show_result(argparse.Namespace(json=False, dir=studied), replace(autofit.report(folder=studied), trainer="verl"))
    assert "Next: autofit export best --to verl --dir" in capsys.readouterr().out


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupted_search_says_how_to_go_on(
    interrupted: bool, studied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = Stop(StopKind.INTERRUPTED, "interrupted") if interrupted else None
    show_result(argparse.Namespace(json=False, dir=studied), replace(autofit.report(folder=studied), stop=stop))
    said = capsys.readouterr().out
    assert ("the same `autofit search` command goes on" in said) is interrupted
    assert "Stopped because interrupted" not in said  # the same, a second time


def test_the_page_shows_promoted_runs_with_promised_against_actual_and_their_events(studied: Path) -> None:
    page = Page(page_of(autofit.report(folder=studied)))
    assert "interrupted, step 2 of 9" in page.text
    at = page.cells.index("step", page.cells.index("promised"))
    assert page.cells[at + 1].startswith("1 s")
    assert page.cells[at + 2].startswith("3 s")
    assert page.cells[at + 3] == "NO"
    assert "length is short" in page.cells


def test_nothing_comes_from_elsewhere_and_it_is_readable_in_the_dark(studied: Path) -> None:
    text = page_of(autofit.report(folder=studied))
    Page(text)  # checks src and href
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)|<script|<link|<iframe|<img", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert all("www.w3.org" in a or "purl.org" in a or "creativecommons" in a or "matplotlib" in a for a in addresses)
    assert len(text) < 400_000


def test_names_and_reasons_of_users_are_text_and_nothing_else(tmp_path: Path) -> None:
    folder = searched(tmp_path, trials=3, model=EVIL, name=f"a{EVIL}")
    study = load_study(folder, None)
    keep_record(study, replace(record_of(study), relaxed=EVIL))
    promoted(folder, study.study_name.replace("/", "-"), 0)
    home = promoted(folder, "x", 0, says=EVIL)
    write_json(home / "request.json", {"study": study.study_name, "trial": 0, "device": EVIL})
    text = page_of(autofit.report(folder=folder))
    page = Page(text)
    assert "script" not in page.tags
    assert f"Study a{EVIL}" in page.texts
    assert EVIL in page.cells  # the event
    assert any(EVIL in one for one in page.texts if "Trial 0 on" in one)


def test_a_study_in_which_nothing_fits_says_what_to_do(tmp_path: Path) -> None:
    folder = searched(tmp_path, trials=2, target_mb=90)
    result = autofit.report(folder=folder)
    page = Page(page_of(result))
    assert result.winner is None
    assert "nothing fits" in page.texts
    assert any(cell.startswith("> ") or "MB" in cell for cell in page.cells)
    assert "What was changed, and why" not in page.texts


def test_the_command_writes_the_page_and_says_where(studied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = studied / "new" / "page.html"
    assert main(["report", "--dir", str(studied), "--html", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["study"] == "law"
    assert err == f"wrote {path}\n"
    assert Page(path.read_text()).tags[0] == "html"
    path.unlink()
    autofit.report(folder=studied, html=path)
    assert path.read_text().startswith("<!doctype html>")


def test_a_place_that_cannot_be_written_is_one_clear_error(studied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (studied / "file").write_text("")
    assert main(["report", "--dir", str(studied), "--html", str(studied / "file" / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("autofit: cannot write")


def test_a_study_of_another_program_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import optuna

    optuna.create_study(study_name="theirs", storage=f"sqlite:///{tmp_path / 'studies.db'}")
    assert main(["report", "--dir", str(tmp_path), "theirs"]) == 2
    assert "'theirs' in" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="was not made by autofit"):
        autofit.report(folder=tmp_path)
    searched(tmp_path, trials=2)
    assert autofit.report(folder=tmp_path).study == "law"


@pytest.mark.parametrize("made", ["nothing", "folder", "text"])
def test_a_folder_without_studies_is_one_clear_error(
    made: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "there"
    if made != "nothing":
        folder.mkdir()
    if made == "text":
        (folder / "studies.db").write_text("this is no database, and long enough to be read as one" * 50)
    for command in ("report", "studies"):
        assert main([command, "--dir", str(folder)]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert ("cannot be used as a database" if made == "text" else "there are no studies in") in told


def test_the_pieces_escape_whatever_they_are_given() -> None:
    assert escaped('<a b="c">\x00\ud800') == "&lt;a b=&quot;c&quot;&gt;"
    assert element("p", "<", Html("<b>x</b>"), kind='"').text == '<p class="&quot;">&lt;<b>x</b></p>'
    assert '<td class="number">&lt;1</td>' in table(("a",), [("<1",)], numbers=(0,)).text


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"study": "law"}', '{"study": "law", "trial": 1}'])
def test_a_promoted_folder_that_is_not_a_runs_is_passed_over(text: str, studied: Path) -> None:
    home = studied / "promoted" / "torn"
    home.mkdir(exist_ok=True)
    (home / "request.json").write_text(text)
    assert len(autofit.report(folder=studied).promoted) == 1
    assert len(autofit.studies(studied).studies[0].promoted) == 1
