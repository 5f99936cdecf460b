"""The page of `autofit web`: what its server refuses, what reaches a trainer, and the page in a real browser."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from autofit.cli import main
from autofit.commands.arguments import parser
from autofit.commands.web import _access, _check
from autofit.errors import ConfigError
from autofit.plugin.registry import load
from autofit.recipe.yaml_file import parse_yaml
from autofit.web.simulator import ALONE, PUBLIC, Line, Question, Simulator

if TYPE_CHECKING:
    from playwright.sync_api import Page
from web_served import MODEL, SWIFTS, VERL, served


def test_a_server_answers_to_the_address_that_it_prints() -> None:
    for host, asked in (("127.0.0.2", "127.0.0.2:7860"), ("::1", "[::1]:7860"), ("localhost", "localhost")):
        access = _access(parser().parse_args(["web", "--host", host]))
        assert access.refusal(asked, None) is None
        assert access.refusal("evil.example:7860", None) is not None


def test_another_address_than_this_machines_needs_the_flag_of_strangers() -> None:
    _check(parser().parse_args(["web"]))
    _check(parser().parse_args(["web", "--host", "::1"]))
    _check(parser().parse_args(["web", "--host", "0.0.0.0", "--public"]))
    for wrong in (["--host", "0.0.0.0"], ["--host", "me.example"], ["--port", "70000"]):
        with pytest.raises(ConfigError):
            _check(parser().parse_args(["web", *wrong]))
    assert PUBLIC.at_once <= 2


def test_a_simulation_that_does_not_start_ends_the_command_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "ready", and each question was told to ask again."""
    broken = [sys.executable, "-c", "import sys; sys.exit('ImportError: undefined symbol: _PyModule_Add')"]
    popen = subprocess.Popen
    monkeypatch.setattr("autofit.web.simulator.subprocess.Popen", lambda _, **how: popen(broken, **how))
    assert main(["web", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "ready" not in said
    assert "the simulation does not start; it printed last: ImportError: undefined symbol: _PyModule_Add" in said


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["web", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "choose another --port" in said.err


SMALL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
         "tie_word_embeddings": True, "max_position_embeddings": 2048}  # fmt: skip
RECIPE = """dtype: bfloat16
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_length: 128
packing: false
output_dir: /etc
"""
_WAIT_MS = 300_000  # on a loaded machine
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]  # fmt: skip

OF_SEVERAL = RECIPE.replace("packing: false\n", "")  # of sft, dpo or reward
UNNAMED = """[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button')].filter(
  (e) => (!e.labels?.length && !e.ariaLabel && !e.textContent.trim())
    || (e.tagName === 'BUTTON' && e.ariaLabel && !e.ariaLabel.includes(e.textContent))).length"""


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setattr("autofit.web.simulator._START_S", 200.0)
        with Simulator(replace(ALONE, advice_s=120.0)) as made:
            home = made.home
            yield made
    assert not home.exists()


def left_by(simulator: Simulator) -> list[Path]:
    """Folders of answers that stay for 15 s: simulations that are being ended may write for a moment."""
    end = time.monotonic() + 15
    while (found := list(simulator.home.glob("answer-*"))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def small(**more: object) -> Question:
    return Question.from_json({"text": RECIPE, "config": json.dumps(SMALL), "card": "rtx4090", **more})


def without_advice(simulator: Simulator, question: Question) -> list[Line]:
    """The lines of an answer whose changes nobody asks for: each of them is simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))
        return [line for line in simulator.answer(question) if line is not None]


@pytest.mark.slow
def test_an_answer_has_the_verdict_and_the_phases_and_leaves_nothing_behind(simulator: Simulator) -> None:
    told = without_advice(simulator, small())  # the browser is shown changes, below
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["verdict"] == "fits"
    assert "trains on 4 samples: 2 at a time x 2 accumulation steps x 1 card" in str(verdict["batch"])
    phases: list[dict[str, Any]] = verdict["phases"]  # type: ignore[assignment]
    assert {"load", "update", "optimizer"} <= {phase["name"] for phase in phases}
    for phase in phases:
        beside = phase["bytes"] - verdict["context_bytes"] - sum(phase["categories"].values())
        assert 0 <= beside < 2**20  # the allocator's rounding
    course: dict[str, Any] = verdict["course"]  # type: ignore[assignment]
    assert {"update", "optimizer"} <= {name for name, _, _ in course["phases"]}
    totals = [sum(parts) * 2**20 for parts in zip(*course["live"].values(), strict=True)]
    most = max(phase["bytes"] for phase in phases if phase["name"] in ("update", "optimizer"))
    most -= verdict["context_bytes"]
    assert max(totals) == pytest.approx(most, rel=0.02)
    assert str(simulator.home) not in json.dumps(told)
    assert any("left out: output_dir" in str(line["text"]) for line in told if line["is"] == "note")
    assert not left_by(simulator)
    environment = Path(f"/proc/{simulator.pid}/environ").read_text()
    assert "hf_secret" not in environment
    assert "HF_HUB_OFFLINE=1" in environment
    for path in simulator.home.rglob("*"):  # what is kept until the end says nothing of the question
        assert not path.is_file() or b"max_length" not in path.read_bytes()


@pytest.mark.slow
def test_a_pasted_model_is_simulated_once(simulator: Simulator) -> None:
    kept = simulator.home / "cache" / "probes"
    question = small(changes={"use_peft": True, "lora_r": 7})
    before = set(kept.glob("*.json"))
    first = without_advice(simulator, question)
    made = set(kept.glob("*.json")) - before
    assert len(made) == 1
    assert without_advice(simulator, question) == first
    assert set(kept.glob("*.json")) - before == made
    assert all(b"answer-" not in path.read_bytes() for path in made)  # no folder of the answer that it was made for


@pytest.mark.slow
def test_prompts_are_as_long_as_an_older_trl_cut_them_where_nobody_says_how_long(simulator: Simulator) -> None:
    text = """model_name_or_path: Qwen/Qwen2.5-0.5B
torch_dtype: bfloat16
max_prompt_length: 300
max_completion_length: 16
num_generations: 2
per_device_train_batch_size: 2
reward_funcs: [think_format_reward]
"""
    told = without_advice(simulator, small(text=text))
    assert any("prompts of 300 tokens are taken" in str(line.get("text")) for line in told)


@pytest.mark.thorough  # the browser's question is one, below
def test_a_recipe_of_several_trainers_is_asked_which_and_answered_for_that_one(simulator: Simulator) -> None:
    *_, choice = without_advice(simulator, small(text=OF_SEVERAL))
    assert choice["is"] == "choose"
    assert choice["trainers"] == ["sft", "dpo", "reward"]
    assert "max_length may belong to a recipe of sft or dpo or reward" in str(choice["text"])
    told = without_advice(simulator, small(text=OF_SEVERAL, trainer="sft"))
    assert next(line for line in told if line["is"] == "verdict")["trainer"] == "sft"


@pytest.mark.slow
def test_an_answer_that_nobody_waits_for_ends_and_so_does_one_that_takes_too_long(simulator: Simulator) -> None:
    lines = simulator.answer(small(changes={"lora_r": 3, "use_peft": True}))
    next(lines)
    lines.close()
    assert not left_by(simulator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autofit.web.simulator._START_S", -299.7)
        patch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))
        told = [line for line in simulator.answer(small(changes={"lora_r": 5, "use_peft": True})) if line is not None]
    assert "took longer than it may" in str(told[-1]["text"])
    assert not left_by(simulator)


@pytest.mark.thorough  # CI has an ms-swift script here, below, and a LLaMA-Factory file by a command (test_readers.py)
def test_another_tools_file_is_simulated_as_that_tool_trains(simulator: Simulator) -> None:
    yaml = """model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
dataset: mine
do_train: true
template: qwen
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
    told = without_advice(simulator, Question.from_json({"text": yaml, "card": "h100"}))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["trainer"] == "hf"
    assert "trains on 2 samples: 1 at a time x 2 accumulation steps" in str(verdict["batch"])
    assert any("a file of LLaMA-Factory" in str(line["text"]) for line in told if line["is"] == "note")


@pytest.mark.slow
def test_a_command_of_verl_is_simulated_and_its_changes_are_overrides_of_its_own(simulator: Simulator) -> None:
    changes = {"ppo_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    asked = {"text": VERL, "config": json.dumps(SMALL), "card": "rtx4090", "changes": changes}
    told = without_advice(simulator, Question.from_json(asked))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert (verdict["trainer"], verdict["count"]) == ("verl", 2)
    assert {"rollout", "sync", "update"} <= {phase["name"] for phase in verdict["phases"]}  # type: ignore[attr-defined]
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 " in str(verdict["yaml"])


OF_TWO = f"NPROC_PER_NODE=2 {SWIFTS} --gradient_accumulation_steps 2 --deepspeed zero2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"text": OF_TWO}, pytest.param({"count": 2}, marks=pytest.mark.thorough)], ids=["script", "recipe"]
)
def test_a_sharing_that_is_chosen_keeps_the_ranks_of_the_recipe_and_its_batch(
    asked: dict[str, object], simulator: Simulator
) -> None:
    """The config of that name which TRL ships has eight."""
    told = without_advice(simulator, small(sharing="fsdp2", **asked))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["count"] == 2
    assert "trains on 4 samples" in str(verdict["batch"])
    *_, last = without_advice(simulator, small(sharing="fsdp2"))
    assert "choose the number of cards under More too" in str(last["text"])


@pytest.mark.slow
def test_cards_are_compared_with_their_prices(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    request = simulator._request
    monkeypatch.setattr(simulator, "_request", lambda *asked: {**request(*asked), "entry": "few_cards:run"})
    told = [line for line in simulator.answer(small(kind="cards")) if line is not None and line["is"] == "card"]
    assert [line["card"] for line in told] == ["h100", "rtx4090"]  # the largest first
    assert all(line["verdict"] == "fits" and line["usd_per_1000_steps"] for line in told)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(390, 844, "dark"), pytest.param(850, 450, "light", marks=pytest.mark.thorough)],
)
def test_the_page_works_in_a_real_browser(
    simulator: Simulator, width: int, height: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect, sync_playwright

    with served() as (server, _), sync_playwright() as playwright:
        server.answers = simulator
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(_WAIT_MS)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
        page.get_by_text("More: length").click()
        page.get_by_label("config.json").fill(json.dumps(SMALL))
        page.get_by_label("Recipe (YAML) or command").fill(OF_SEVERAL)
        page.get_by_label("Card", exact=True).select_option("rtx4090")
        page.get_by_label("Recipe (YAML) or command").press("Control+Enter")
        page.get_by_role("button", name="sft").click()
        expect(page.get_by_role("heading", name="fits NVIDIA GeForce RTX 4090")).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_role("img", name="The peak is update")).to_be_visible()
        expect(page.get_by_role("img", name="Memory over one step, by category: update")).to_be_visible()
        first = page.get_by_role("button", name="Apply per_device_train_batch_size 2 -> 4").first
        expect(first).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_role("status")).to_contain_text("An optimizer step trains on 4 samples")
        take(page, f"answer-{width}-{scheme}")
        monkeypatch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))  # the verdict of the next is enough
        first.click()
        expect(page.get_by_role("button", name="Undo per_device_train_batch_size")).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_text("trains on 4 samples: 4 at a time x 1 accumulation step").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(UNNAMED) == 0
        link = page.url
        assert "#q=" in link
        other = browser.new_page()
        other.goto(link)
        expect(other.get_by_role("button", name="Undo per_device_train_batch_size")).to_be_visible(timeout=_WAIT_MS)
        assert not problems
        browser.close()


NO_FIT = {
    "is": "verdict", "verdict": "does not fit", "why": "update of the longest sample (512 tokens), 0.4 GB over",
    "card": "rtx4090", "card_name": "NVIDIA GeForce RTX 4090", "count": 1, "model": MODEL, "trainer": "sft",
    "used_bytes": 25_000_000_000, "shown_bytes": 25_000_000_000, "shown_as": "used", "capacity_bytes": 25_250_000_000,
    "most_bytes": None, "least_bytes": 25_700_000_000, "step_s": None, "step_s_90": None, "rollout_s": None,
    "batch": "An optimizer step trains on 4 samples: 4 at a time x 1 accumulation step x 1 card.",
    "facts": [["model", MODEL], ["weights", "a_long_name_of_a_file_without_a_place_to_break_it" * 3]],
    "phases": [{"name": "update", "bytes": 24e9, "cached_bytes": 1, "categories": {"weights": 20e9}}],
    "context_bytes": 600_000_000, "course": None, "warnings": [], "yaml": "a: 1",
}  # fmt: skip
CARD = {
    "is": "card", "card": "rtx4090", "name": "NVIDIA GeForce RTX 4090", "count": 1, "verdict": "fits", "tier": "",
    "used_bytes": 17_100_000_000, "capacity_bytes": 25_300_000_000, "step_s": 7.41, "over": False, "samples_per_s": 1.0,
    "usd_per_hour": 0.74, "usd_per_1000_steps": 1.52, "words": "", "reason": "", "price": "a list", "unit": "samples",
}  # fmt: skip
EXPLAINED = {
    "is": "explained", "tool": "verl", "why": "Megatron is not simulated", "wrong": [], "unread": [],
    "facts": [["effective batch", "per_device_train_batch_size 2 x gradient_accumulation_steps 2"]],
}  # fmt: skip

# Names of phases that begin where the one before it, as wide as it is drawn along its own line, has not ended.
OVERLAPS = """[...document.querySelectorAll('#picture > svg > text')].filter((one) => one.textContent.match(/^[a-z]/)
  && !one.classList.length).filter((one, place, all) => { if (!place) return false; const before = all[place - 1];
    const slanted = one.getAttribute('transform');
    const [a, b] = [before, one].map((text) => text.getBBox());
    return slanted ? (b.x + b.width - a.x - a.width) * Math.sin(40 * Math.PI / 180) < a.height : a.x + a.width > b.x;
  }).length"""


@contextmanager
def on_a_phone() -> Iterator["Page"]:
    """The page in a real browser, as narrow as a phone."""
    from playwright.sync_api import sync_playwright

    with served() as (server, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        yield page
        browser.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
def test_every_answer_is_in_whole_sentences_and_as_wide_as_a_phone() -> None:
    with on_a_phone() as page:

        def shown(line: Mapping[str, object]) -> str:
            page.evaluate("(line) => hear(line)", line)
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, line["is"]
            table = page.locator(".wide:has(caption)")
            assert table.count() == 0 or table.evaluate("(one) => one.scrollWidth <= one.clientWidth")
            return page.inner_text("#result")

        told = shown(NO_FIT)
        assert "It runs out of memory: update of the longest sample (512 tokens), 0.4 GB over." in told
        assert "25.7 GB\nneeded, of 25.3 GB" in told
        assert "Does not fit: 25.7 GB needed, of 25.3 GB. An optimizer step" in page.inner_text("#said")
        assert "the next tensor found no free piece that is large enough." in told
        assert "1 more, below 0.1 GB" not in told
        shown({"is": "note", "text": "no `dtype` is given"})
        assert page.inner_html("#notes") == "<li>No <code>dtype</code> is given.</li>"
        names = ("load", "sync", "rollout", "old log-probs", "reference", "loading", "update", "optimizer")
        phases = [{**cast(Any, NO_FIT["phases"])[0], "name": name} for name in names]
        told = shown({**NO_FIT, "least_bytes": None, "step_s": 60.0, "phases": phases})
        assert "needed" not in told  # a figure that is not known has no tile
        assert "1m00s" in told  # as the commands print it
        assert page.evaluate(OVERLAPS) == 0
        shown({"is": "error", "text": "the recipe is none"})
        assert page.inner_text("#status") == "The recipe is none."
        closest = {"words": "a: 1", "set": {"a": 1}, "tier": "neutral", "used_bytes": 78.4e9, "step_s": None,
                   "tight": False, "fits": False, "speedup": None, "reasons": []}  # fmt: skip
        none: dict[str, object] = {"mends": [], "faster": [], "card": None, "lines": [], "ended_early": False}
        told = shown({"is": "advice", **none, "closest": closest})
        assert "The closest:\n\nneutral a: 1\n\ndoes not fit: it needs 78.4 GB" in told
        words = "--use_peft true --activation_offloading true --dtype bfloat16 --gradient_accumulation_steps 2"
        assert words in shown({"is": "advice", **none, "closest": {**closest, "words": words}})
        heights = page.evaluate("[...document.querySelectorAll('.changes code span')].map((one) => one.offsetHeight)")
        assert len(set(heights)) == 1, "an option is broken behind its hyphens"
        told = shown(EXPLAINED)
        assert "It cannot be simulated: Megatron is not simulated." in told
        told = shown(CARD)
        assert "$1.52" in told
        for text, said in (
            ("train.py is read", "train.py is read."), ("ms-swift makes logits", "ms-swift makes logits."),
            ("kernel times", "Kernel times."), ("a_key is left out", "a_key is left out."), ("2 ranks", "2 ranks."),
            ("verl's config", "verl's config."), ("left out: a", "Left out: a."), ("examples/a is", "examples/a is."),
        ):  # fmt: skip
            assert page.evaluate("(text) => sentence(text)", text) == said
        methods = page.evaluate("[...field('method').options].map((one) => one.value)")
        for method in methods:  # each is a recipe that its trainer takes
            values = parse_yaml(page.evaluate("(method) => recipe('a', method)", method))
            trainer = cast(Any, load(method.partition("-")[0]))
            trainer.parse(values, overrides={"use_cpu": True})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
def test_what_is_applied_together_is_undone_together_since_one_alone_would_change_the_batch() -> None:
    from playwright.sync_api import expect

    with on_a_phone() as page:
        recipe, undo = page.get_by_label("Recipe (YAML) or command"), page.get_by_role("button", name="Undo")
        recipe.fill("trl sft --model_name_or_path a")
        for change in ({"micro": 4, "accumulation": 2}, {"env": {"A": "1"}}, {"env": {"B": "2"}}):
            page.evaluate("(set) => apply(set)", change)
        page.get_by_role("button", name="Check").click()  # keeps them: the recipe is the same
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2, "env": {"A": "1", "B": "2"}}
        page.evaluate("(line) => hear(line)", NO_FIT)
        assert page.evaluate("field('result').getBoundingClientRect().top") < 100  # a phone shows the answer at once
        undo.click()
        page.evaluate("(line) => hear(line)", NO_FIT)
        undo.click()
        page.evaluate("(line) => hear(line)", NO_FIT)
        expect(undo).to_have_accessible_name("Undo micro: 4, accumulation: 2")
        page.goto(page.url)
        page.reload()
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2}
        page.get_by_label("Card", exact=True).select_option("rtx4090")
        for line in (NO_FIT, {**CARD, "card": "h100", "set": {"dtype": "bfloat16"}}):
            page.evaluate("(line) => hear(line)", line)
        page.get_by_role("button", name="Use h100").click()  # the card, and the change with which it fits
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2, "dtype": "bfloat16"}
        page.evaluate("(line) => hear(line)", NO_FIT)
        expect(undo).to_have_accessible_name("Undo dtype: bfloat16, h100 in place of rtx4090")
        undo.click()
        assert page.evaluate("[field('card').value, merged()]") == ["rtx4090", {"micro": 4, "accumulation": 2}]
        page.get_by_label("Model", exact=True).fill(MODEL)
        page.get_by_label("Training", exact=True).select_option("sft-full")
        expect(page.get_by_role("status")).to_contain_text("The recipe below stays as it is")
        page.evaluate("(line) => hear(line)", NO_FIT)
        page.evaluate("hear({is: 'note', text: 'kernel times are scaled'})")
        page.get_by_role("button", name="Compare cards").click()  # its notes come beside those of the verdict
        page.wait_for_function("!status.className")
        expect(page.locator("#notes")).to_contain_text("Kernel times are scaled.")
        page.evaluate("field('tokens').value = '0'")
        page.get_by_role("button", name="Check").click()  # the wrong field is folded away: it is shown
        expect(page.get_by_label("Tokens of the longest sample")).to_be_focused()
        page.evaluate("field('tokens').value = ''")
        page.evaluate("start.hidden = false")
        page.get_by_role("button", name="DPO, Qwen3-4B").click()  # an example shows what it chose
        chosen = page.evaluate("['model', 'method', 'card'].map((id) => field(id).value)")
        assert chosen == ["Qwen/Qwen3-4B", "dpo-lora", "rtx4090"]
        page.get_by_label("Training", exact=True).select_option("sft-full")
        assert "beta" not in recipe.input_value()
        recipe.fill("trl sft --model_name_or_path b")
        assert page.evaluate("merged()") == {}


def take(page: "Page", name: str) -> None:
    """A screenshot to look at, where AUTOFIT_SCREENSHOTS names a folder."""
    if "AUTOFIT_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["AUTOFIT_SCREENSHOTS"]) / f"{name}.png", full_page=True)
