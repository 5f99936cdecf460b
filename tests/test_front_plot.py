"""The picture of a front: what it names, and what is in it and what is not."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lawful
import numpy as np
import pytest
from at_once import AtOnce
from matplotlib.figure import Figure
from search_driver import plan

from autofit.api.events import TrialResult
from autofit.forecast.predictions import Cloud, Predictions
from autofit.probing.result import ProbeStatus
from autofit.tracking.front_plot import FrontPicture, front_figure, study_figure, title_of
from autofit.tuning.record import record_of
from autofit.tuning.search import Plan, Search, open_study
from autofit.tuning.study import load_study, trials_of

GB = 10**9


def trial(number: int, step_s: float | None, used_gb: float, status: ProbeStatus = ProbeStatus.FIT) -> TrialResult:
    return TrialResult(
        number=number, tier="neutral", status=status, changes={}, device_used_bytes=int(used_gb * GB), step_s=step_s,
        completions_per_s=1.0, speedup=1.0, confirmed=None, at_least=status is ProbeStatus.OOM and step_s is None,
    )  # fmt: skip


BASE, FAST, LEAN = trial(0, 20.0, 13), trial(1, 10.0, 35), trial(2, 12.0, 20)
OVER, CUT = trial(3, 9.0, 55, ProbeStatus.OOM), trial(4, None, 39, ProbeStatus.OOM)
FRONT = {"front": [FAST, LEAN, BASE], "winner": FAST, "baseline": BASE, "target_bytes": 40 * GB}


def legend(figure: Figure) -> set[str]:
    return {text.get_text() for legend in figure.legends for text in legend.get_texts()}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def points(figure: Figure, label: str) -> Any:
    found = next(c for c in figure.axes[0].collections if c.get_label() == label)
    return np.asarray(found.get_offsets())


def law(plan: Plan) -> Predictions:
    """Predictions of all candidates by the law of tests/lawful.py."""
    candidates = tuple(plan.space.allowed())
    known = [lawful.law({**plan.recipe.values, **plan.space.changes(c)}) for c in candidates]
    used, step_s = np.array(known, dtype=np.float64).T
    return Predictions(candidates=candidates, floor_bytes=0 * used, device_used_bytes=used, step_s=step_s)


def test_it_names_the_winner_the_baseline_the_card_the_model_and_whether_it_was_measured() -> None:
    title = title_of("s", {"model_name_or_path": "org/Qwen3-4B"}, trainer="grpo", device="A100", fidelity="predicted")
    figure = front_figure(FrontPicture(trials=[BASE, FAST, LEAN], title=title, **FRONT))  # type: ignore[arg-type]
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "Qwen3-4B GRPO on A100: predicted"
    assert {"winner: trial 1", "baseline", "2", "s; 3 probed: 3 fit"} <= set(texts(figure))
    assert axes.get_ylabel() == "device-used (GB)"
    assert axes.get_ylim()[1] > 40
    assert legend(figure) == {"probed, fits", "Pareto front", "target 40.00 GB"}


def test_a_number_stands_at_its_dot() -> None:
    figure = front_figure(FrontPicture(trials=[BASE, FAST, LEAN], **FRONT))  # type: ignore[arg-type]
    (number,) = [text for text in figure.axes[0].texts if text.get_text() == "2"]
    assert math.hypot(*number.xyann) < 6, "1/72 inch"  # type: ignore[attr-defined]


def test_the_legend_has_only_what_is_drawn() -> None:
    assert legend(front_figure(FrontPicture(trials=[FAST]))) == {"probed, fits"}
    ran_out = front_figure(FrontPicture(trials=[FAST, OVER, CUT]))
    assert legend(ran_out) == {"probed, fits", "out of memory", "out of memory, needs at least"}


def test_an_oom_is_a_point_where_its_need_is_known_and_else_a_bar_from_what_it_held() -> None:
    figure = front_figure(FrontPicture(trials=[FAST, OVER, CUT]))
    assert points(figure, "out of memory").tolist() == [[9.0, 55.0]]
    axes = figure.axes[0]
    bar = next(line for line in axes.lines if line.get_label() == "out of memory, needs at least")
    (left, right), (low, high) = np.asarray(bar.get_xdata()), np.asarray(bar.get_ydata())
    assert left == right > FAST.step_s  # beside the axis of the others: it has no step time
    assert low == 39
    assert high == axes.get_ylim()[1]


def test_a_baseline_without_a_step_time_is_named_at_its_bar() -> None:
    base = replace(CUT, number=0)
    figure = front_figure(FrontPicture(trials=[base], baseline=base, target_bytes=30 * GB))
    assert "baseline" in texts(figure)
    assert list(figure.axes[0].get_xticks()) == []


def test_a_baseline_that_wins_is_named_once() -> None:
    figure = front_figure(FrontPicture(trials=[BASE], front=[BASE], winner=BASE, baseline=BASE))
    assert "the winner is the baseline (trial 0)" in texts(figure)
    assert "baseline" not in texts(figure)


def test_every_predicted_candidate_near_the_probes_is_a_grey_point_and_far_ones_are_told() -> None:
    cloud = Cloud(candidates=4, device_used_bytes=(20 * GB, 36 * GB, 900 * GB, 10 * GB), step_s=(12, 10, 10, 500))
    figure = front_figure(FrontPicture(trials=[BASE, FAST], predicted=cloud, **FRONT))  # type: ignore[arg-type]
    assert sorted(points(figure, "candidates, predicted").tolist()) == [[10, 36], [12, 20]]
    assert any("4 candidates predicted, some beyond this picture" in text for text in texts(figure))


def test_a_long_range_of_step_times_is_logarithmic() -> None:
    assert front_figure(FrontPicture(trials=[BASE, FAST])).axes[0].get_xscale() == "linear"
    assert front_figure(FrontPicture(trials=[trial(0, 400.0, 9), FAST])).axes[0].get_xscale() == "log"


@pytest.mark.parametrize("trials", [[], [trial(0, None, 0, ProbeStatus.FAILED)], [BASE], [CUT]])
def test_a_study_with_next_to_nothing_in_it_is_drawn(trials: list[TrialResult], tmp_path: Path) -> None:
    front_figure(FrontPicture(trials=trials, title="$x$ & <y>")).savefig(tmp_path / "front.png")
    assert (tmp_path / "front.png").stat().st_size > 1000


def test_a_hundred_thousand_predictions_are_kept_as_a_few_points_that_span_the_same() -> None:
    rng = np.random.default_rng(0)
    used, step_s = np.exp(rng.normal(24, 1, 10**5)), np.exp(rng.normal(2, 1, 10**5))
    unknown = np.arange(10**5) % 10 == 0
    none = np.where(unknown, np.nan, used)
    candidates: Any = (None,) * 10**5
    cloud = Cloud.of(Predictions(candidates=candidates, floor_bytes=0 * used, device_used_bytes=none, step_s=step_s))
    assert cloud is not None
    assert cloud.candidates == 9 * 10**4
    assert 300 < len(cloud.step_s) <= 800
    assert len(json.dumps(cloud.to_json())) < 20_000
    assert Cloud.from_json(json.loads(json.dumps(cloud.to_json()))) == cloud
    assert max(cloud.step_s) > 0.5 * step_s[~unknown].max()
    assert Cloud.of(None) is Cloud.from_json(None) is None


def test_a_search_keeps_its_predictions_with_the_study_and_an_older_study_has_none(tmp_path: Path) -> None:
    wanted = plan(tmp_path, 3)
    wanted = replace(wanted, predictions=law(wanted))
    Search(wanted, open_study(wanted), server_socket=None, launcher=AtOnce(lawful.at_once)).run()
    study = load_study(tmp_path, "law")
    record, trials = record_of(study), trials_of(study)
    figure = study_figure("law", trials, record)
    assert record.predicted is not None
    assert record.predicted["candidates"] == len(wanted.space.allowed())
    assert "candidates, predicted" in legend(figure)
    assert "candidates, predicted" not in legend(study_figure("law", trials, replace(record, predicted=None)))
