"""The reward functions of a full run: their seconds, one clear reason where they fail; and the summary at its start."""

import asyncio
import functools
import time
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml
from watched_series import Line, events, watched

from autofit.files import read_json, write_json
from autofit.plugin.protocol import own_checkpoints
from autofit.probing.fork_server import ForkServer
from autofit.watching.events import EventKind, events_of, read_progress, stop_asked
from autofit.watching.thresholds import StatedGuards, read_guards
from autofit.watching.watchers import RewardFault, RewardWatcher, facts_of


def trainer_of(function: Any, name: str = "exact") -> Any:
    return SimpleNamespace(reward_funcs=[function], reward_func_names=[name], state=SimpleNamespace(global_step=11))


def scored(function: Any, completions: int = 4) -> tuple[Any, RewardWatcher]:
    """What the trainer gets from `function` for so many completions, and its watcher."""
    trainer, watcher = trainer_of(function), RewardWatcher()
    list(watcher.begins(watched(trainer=trainer)))
    returned = trainer.reward_funcs[0](completions=["x"] * completions, prompts=["p"] * completions)
    return (asyncio.run(returned) if asyncio.iscoroutine(returned) else returned), watcher


def raises(**_: object) -> list[float]:
    raise ZeroDivisionError("division by zero")


async def raises_later(**_: object) -> list[float]:
    raise KeyError("answer")


def exits(**_: object) -> list[float]:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raises, "raised ZeroDivisionError: division by zero (test_reward_functions.py, line"),
        (functools.partial(raises, a=1), "raised ZeroDivisionError"),
        (raises_later, "raised KeyError: 'answer'"),
        (exits, "called sys.exit(3)"),
        (lambda **_: [1.0] * 3, "returned 3 rewards for 4 completions"),
        (lambda **_: None, "returned None, which is no list"),
        (lambda **_: 0.5, "returned 0.5, which is no list"),
        (lambda **_: [1.0, "good", 1.0, 1.0], "returned 'good' as reward number 2"),
        (lambda **_: [[1.0]] * 4, "returned [1.0] as reward number 1"),
    ],
)
def test_a_reward_function_that_fails_is_named_with_the_step_and_what_it_must_return(function: Any, said: str) -> None:
    with pytest.raises(RewardFault) as fault:
        scored(function)
    assert said in str(fault.value)
    assert str(fault.value).startswith("in step 12 the reward function 'exact' ")
    assert "a list with one number for each completion (4 in this call)" in str(fault.value)


async def later(**_: object) -> list[float]:
    return [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("function", [later, lambda **_: (x for x in (1.0, 2.0, 3.0, 4.0)), lambda **_: [1, 2, 3.0, 4]])
def test_good_rewards_reach_the_trainer_as_they_are(function: Any) -> None:
    rewards, watcher = scored(function)
    assert rewards == [1, 2, 3, 4]
    figures = watcher.adds({"step": 12, "run_s": 10.0})
    assert set(figures) == {"rewards/exact/seconds", "rewards/exact/seconds_frac"}


def test_an_oom_in_a_reward_function_stays_an_oom() -> None:
    import torch

    def runs_out(**_: object) -> list[float]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        scored(runs_out)


def test_none_and_nan_are_counted_apart_and_stay_logged_once_seen() -> None:
    _, watcher = scored(lambda **_: [None, nan, 1.0, None])
    assert watcher.adds({"step": 1, "run_s": 5.0}).items() >= {
        "rewards/exact/none_frac": 0.5, "rewards/exact/nan_frac": 0.25
    }.items()  # fmt: skip


def test_the_seconds_of_a_slow_function_are_its_share_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("autofit.watching.watchers.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(completions: list[str], **_: object) -> list[float]:
        now[0] += 42.0
        return [1.0] * len(completions)

    _, watcher = scored(slow)
    line: Line = {"step": 12, "max_steps": 20, "run_s": 50.0}
    line |= watcher.adds(line)
    assert line["rewards/exact/seconds"] == pytest.approx(42)
    assert line["rewards/exact/seconds_frac"] == pytest.approx(0.84)
    told = events([{**line, "step": n} for n in range(1, 12)])
    assert [e.data["since"] for e in told] == [2]  # the first step's calls warm up
    assert "the reward function exact took 42 s of a 50 s step" in told[0].text


def test_a_call_that_does_not_return_is_told_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autofit.watching.watchers._SLOW_S", 0.05)
    monkeypatch.setattr("autofit.watching.watchers._LOOK_EVERY_S", 0.01)

    def waits(completions: list[str], **_: object) -> list[float]:
        deadline = time.monotonic() + 20
        while not events_of(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return [1.0] * len(completions)

    trainer, watcher = trainer_of(waits), RewardWatcher()
    list(watcher.begins(replace(watched(trainer=trainer), folder=tmp_path)))
    trainer.reward_funcs[0](completions=["x"])
    watcher.ends()
    (first, *_) = events_of(tmp_path)
    assert first.text.startswith("the reward function 'exact' has run for ")
    assert first.text.endswith("in step 12; training waits for it")


def test_the_summary_of_a_run_without_a_trainer_of_transformers_says_what_is_known() -> None:
    facts = facts_of(watched(), read_guards({"kl": {"action": "stop"}}))
    assert facts["batch"] == "32 completions a step"
    assert facts["steps"] == "400"
    assert facts["guards"].startswith("of what it logs: kl, kl_drift, truncation")
    assert facts["guards"].endswith("the run stops at kl")
    assert "loss_stuck" not in facts["guards"]
    assert facts_of(watched(), ())["guards"] == "none"
    on_data = facts_of(watched(generates=False), read_guards())
    assert on_data["batch"] == "32 samples a step"
    assert "truncation" not in on_data["guards"]
    assert "loss_stuck" in on_data["guards"]


# -- whole runs --------------------------------------------------------------------------------------------------------


def run(folder: Path, model: Path, server: ForkServer, reward: str, guards: StatedGuards | None = None) -> int | None:
    """Start or go on with a GRPO run of 6 steps whose reward function is `reward`; its exit code."""
    values = yaml.safe_load(tiny.write_recipe(folder, model, max_steps=6).read_text())
    (folder / "tiny_rewards.py").write_text(reward)
    request = {
        "folder": str(folder), "device": "cpu", "trainer": "grpo", "output_dir": str(folder / "out"),
        "values": {**values, "use_cpu": True}, "generates": True,
        "guards": [guard.to_json() for guard in read_guards(guards)],
    }  # fmt: skip
    write_json(folder / "request.json", request)
    call = {"entry": "offline_training:run", "argument": str(folder / "request.json"), "cwd": str(folder),
            "log": str(folder / "log"), "env": {}, "deadline_s": 300}  # fmt: skip
    return server.call(call).exit_code


@pytest.mark.slow
def test_a_run_whose_reward_raises_ends_with_that_reason_after_a_true_summary(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    reward = (
        "calls = []\n\ndef share_of_t1(completions, **kwargs):\n"
        "    calls.append(1)\n    return [1 / (3 - len(calls))] * len(completions)\n"
    )
    assert run(tmp_path, tiny_model, fork_server, reward) == 1
    failed = read_json(tmp_path / "failed.json")
    assert failed is not None
    assert str(failed["reason"]).startswith(
        "in step 3 the reward function 'share_of_t1' raised ZeroDivisionError: division by zero (tiny_rewards.py, line"
    )
    (start, *_) = events_of(tmp_path)
    assert start.kind is EventKind.START
    assert (
        start.data["batch"]
        == "micro-batch 4 × accumulation 2 × 1 rank = 8 completions a step: 2 prompts × 4 completions"
    )
    assert start.data["adapter"] == "lora r 4, alpha 8, on q_proj, v_proj"
    assert " of 23,328 parameters are trained" in str(start.data["model"])
    lines = read_progress(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]
    assert {"rewards/share_of_t1/seconds", "rewards/share_of_t1/seconds_frac"} <= lines[0].keys()


@pytest.mark.slow
def test_a_guard_stops_the_run_with_a_checkpoint_and_the_next_start_goes_on_without_telling_it_again(
    tmp_path: Path, tiny_model: Path, fork_server: ForkServer
) -> None:
    reward = "def share_of_t1(completions, **kwargs):\n    return [float('nan')] * len(completions)\n"
    stopping: dict[str, object] = {"reward_nan": {"action": "stop"}}
    assert run(tmp_path, tiny_model, fork_server, reward, stopping) == 0
    asked = stop_asked(tmp_path)
    assert asked is not None
    assert asked.data["guard"] == "reward_nan"
    assert read_json(tmp_path / "final.json") is None
    assert (own_checkpoints(tmp_path / "out") / "checkpoint-2").is_dir()
    assert run(tmp_path, tiny_model, fork_server, reward, stopping) == 0
    assert read_json(tmp_path / "final.json") is not None
    assert [line["step"] for line in read_progress(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [e.data["guard"] for e in events_of(tmp_path) if e.kind is EventKind.GUARD] == ["reward_nan"]
    assert "goes on after step 2" in str(
        [e for e in events_of(tmp_path) if e.kind is EventKind.START][-1].data["steps"]
    )
