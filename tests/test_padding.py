"""Which padding the worst batch of a dataset has, and that probes, forecasts and real runs agree on its kernel."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipes import inspect
from tiny import write_model, write_recipe

from autofit.fakegpu import FakeGpu, fake_gpu
from autofit.plugin.protocol import KEPT, Report, SampleLengths, Task, WorstCase, is_padded
from autofit.plugin.registry import load

FLASH = "flash_attention_2"
pytestmark = pytest.mark.filterwarnings("ignore")


def test_samples_of_one_length_are_never_padded_and_a_sample_alone_is_not() -> None:
    assert not SampleLengths.of([9, 9, 9], most=9).padded(2, None)
    assert SampleLengths.of([9, 9, 8], most=9).padded(2, None)
    assert not SampleLengths.of([9, 9, 8], most=9).padded(1, None)
    assert not SampleLengths.of([9, 9, 8], most=9).padded(2, 8)  # all are cut to one length
    assert SampleLengths.of([9, 8], most=9, sequences=2).padded(1, None)  # a pair is two rows
    assert SampleLengths.of([9, 8], most=9, generates=True).padded(1, None)  # padded with the rest of its rollout


def test_where_no_mask_takes_more_memory_it_counts_if_enough_samples_are_of_the_longest_length() -> None:
    lengths = SampleLengths.of([9, 9, 9, 8, 3], most=9, unmasked_is_larger=True)
    assert [lengths.padded(rows, None) for rows in (1, 2, 3, 4, 8)] == [False, False, False, True, True]
    assert not lengths.padded(4, 8)
    many = SampleLengths.of([9] * KEPT, most=9, others=True, unmasked_is_larger=True)
    assert not many.padded(KEPT + 9, None)  # more may have that length than were kept
    rollout = SampleLengths.of([9, 8], most=9, generates=True, unmasked_is_larger=True)
    assert [rollout.padded(rows, None) for rows in (1, 2)] == [False, True]


def _prompts(folder: Path, lengths: list[int], column: str) -> None:
    (folder / "data").mkdir(exist_ok=True)
    rows = [{column: " ".join(f"t{i % 9}" for i in range(n)), "answer": "t1"} for n in lengths]
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _probe(
    trainer: str, folder: Path, lengths: list[int], prompt_tokens: int | None = None, **changes: Any
) -> tuple[FakeGpu, dict[str, Any]]:
    model = folder / "model" if (folder / "model").exists() else write_model(folder / "model")
    recipe = {**yaml.safe_load(write_recipe(folder, model, **changes).read_text()), **changes}
    if trainer == "sft":
        for key in ("reward_funcs", "num_generations", "max_completion_length"):
            recipe.pop(key, None)
    _prompts(folder, lengths, "prompt" if trainer == "grpo" else "text")
    worst_case = folder / "worst_case.json"
    values: Any = inspect(trainer, recipe, "sim:a100-40gb", worst_case, prompt_tokens)["values"]
    with fake_gpu("a100-40gb") as gpu:
        gpu.only_last_decode_steps = True
        task = Task(device="sim:a100-40gb", output=folder / "out", worst_case=WorstCase(path=worst_case), steps=1)
        run = load(trainer).build(values, task)
        began_s = gpu.elapsed_s
        run.train(Report())
    return gpu, {**json.loads(worst_case.read_text()), "train_s": gpu.elapsed_s - began_s}


def test_grouped_queries_in_float32_run_the_efficient_kernel_where_prompts_differ_in_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {"use_peft": False, "max_completion_length": 9, "per_device_train_batch_size": 8,
             "gradient_accumulation_steps": 1, "gradient_checkpointing": False}  # fmt: skip
    varied, facts = _probe("grpo", tmp_path, [200, 17, 5, 133], **whole)
    equal, _ = _probe("grpo", tmp_path, [200, 200, 200, 200], **whole)
    assert facts["prompt_tokens"] == 200
    assert set(varied.attention_kernels) == {"efficient"}
    assert "math" in equal.attention_kernels
    scores = 4 * 8 * 4 * (200 + 9) ** 2  # of one layer: micro-batch x heads x tokens x tokens in float32
    assert varied.peak_allocated_bytes < equal.peak_allocated_bytes - scores


def test_samples_of_a_stated_length_count_as_padded_since_those_of_a_text_dataset_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(write_recipe(tmp_path, write_model(tmp_path / "model")).read_text())
    facts = {}
    for tokens in (None, 40):
        _prompts(tmp_path, [40, 40], "prompt")
        inspect("grpo", recipe, "sim:a100-40gb", tmp_path / "worst_case.json", tokens)
        facts[tokens] = json.loads((tmp_path / "worst_case.json").read_text())
    assert not is_padded(facts[None], 4, None)
    assert is_padded(facts[40], 4, None)


@pytest.mark.parametrize(
    ("lengths", "batch", "changes", "kernels"),
    [
        ([64, 64, 9, 5], 2, {}, {"math"}),  # two can have no padding, and that takes more
        ([64, 63, 9, 5], 2, {}, {"efficient"}),
        pytest.param([64, 63, 9, 5], 1, {}, {"math"}, marks=pytest.mark.slow),
        pytest.param([64, 64, 9, 5], 2, {"bf16": True}, {"efficient"}, marks=pytest.mark.slow),
        pytest.param([64, 64, 64, 64], 2, {"bf16": True}, {"flash"}, marks=pytest.mark.slow),
        pytest.param([64, 63, 9, 5], 1, {"bf16": True}, {"flash"}, marks=pytest.mark.slow),
    ],
)
def test_samples_run_the_kernel_of_the_worst_batch_that_the_dataset_can_make(
    lengths: list[int], batch: int, changes: dict[str, Any], kernels: set[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    gpu, _ = _probe("sft", tmp_path, lengths, per_device_train_batch_size=batch, use_peft=False, **changes)
    assert set(gpu.attention_kernels) == kernels


def test_rows_that_are_cut_from_one_stream_have_no_padding_but_for_the_rest_at_its_end() -> None:
    lengths = SampleLengths.of([9, 9, 9, 4], most=9, filled=True)
    assert [lengths.padded(rows, None) for rows in (1, 2, 3, 4)] == [False, False, False, True]


_PACKED: dict[str, Any] = {"packing": True, "bf16": True, "use_peft": False, "per_device_train_batch_size": 4,
                           "gradient_accumulation_steps": 1, "max_length": 64}  # fmt: skip

_PADDING_FREE: dict[str, Any] = {"packing": False, "padding_free": True, "max_length": None}


def test_wrapped_packing_of_a_stated_length_has_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    probe, _ = _probe("sft", tmp_path, [50, 30, 8, 40] * 6, 40, packing_strategy="wrapped", **_PACKED)
    assert set(probe.attention_kernels) == {"flash"}  # as all but a few micro-batches of an epoch have none


ROWS = {  # each text gets an end, a token more
    "bfd": ([39, 23] * 8, {"packing_strategy": "bfd"}),
    "bfd short": ([39, 19] * 8, {"packing_strategy": "bfd"}),  # no row is full
    "bfd_split": ([99, 27] * 8, {"packing_strategy": "bfd_split"}),
    "wrapped": ([50, 30, 8, 40] * 6, {"packing_strategy": "wrapped"}),
    "wrapped padding-free": ([50, 30, 8, 40] * 6, {"packing_strategy": "wrapped", "padding_free": True}),
    "padded": ([63, 62] * 8, {"packing": False}),
    "padding-free": ([63, 63] * 8, _PADDING_FREE),
    "padding-free uneven": ([63, 62] * 8, _PADDING_FREE),
}
QUICK = {("bfd short", "sdpa"), ("wrapped", "sdpa"), ("padding-free uneven", "sdpa")}
OTHER_KERNELS = {"bfd"}  # rows with boundaries, which each kernel treats in its own way
HELD = {("bfd", "sdpa"), ("padding-free", "sdpa")}  # by rows of one kind that are short or uneven


def _marks_of(way: str, attention: str) -> tuple[pytest.MarkDecorator, ...]:
    if (way, attention) in QUICK:
        return ()
    other = way in OTHER_KERNELS and attention == FLASH  # eager has no kernel of its own
    sampled = attention == "sdpa" and (way, attention) not in HELD
    return (pytest.mark.slow,) if sampled or other else (pytest.mark.thorough,)


@pytest.mark.parametrize(
    ("lengths", "changes", "attention"),
    [
        pytest.param(*ROWS[way], attention, id=f"{way}-{attention}", marks=_marks_of(way, attention))
        for way in ROWS
        for attention in ("sdpa", "eager", FLASH)
    ],
)
def test_each_way_to_make_rows_is_probed_as_trls_own_trainer_trains(
    lengths: list[int], changes: dict[str, Any], attention: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {**_PACKED, "attn_implementation": attention, **changes}
    probe, facts = _probe("sft", tmp_path, lengths, **changes)
    plugin: Any = load("sft")
    values = {**yaml.safe_load(write_recipe(tmp_path, tmp_path / "model", **changes).read_text()), **changes}
    _prompts(tmp_path, lengths, "text")
    for key in ("reward_funcs", "num_generations", "max_completion_length"):
        values.pop(key, None)
    with fake_gpu("a100-40gb") as gpu:
        own = plugin.real(plugin.parse({**values, "max_steps": 1}, overrides={"report_to": [], "save_strategy": "no"}))
        full = max(len(row) for row in own.train_dataset["input_ids"])
        rest = changes.get("packing_strategy") == "wrapped"  # its one shorter row is noted, not counted
        own.train_dataset = own.train_dataset.filter(lambda row: not rest or len(row["input_ids"]) == full)
        began_s = gpu.elapsed_s
        own.train()
    assert gpu.attention_kernels == probe.attention_kernels
    over = probe.peak_allocated_bytes - gpu.peak_allocated_bytes
    alike = len(set(lengths)) == 1 or (changes["packing"] and changes["packing_strategy"] != "bfd_split")
    assert over == 0 if alike else 0 <= over <= 0.02 * gpu.peak_allocated_bytes  # the most that may come together
    assert facts["train_s"] == pytest.approx(gpu.elapsed_s - began_s, rel=1e-3)


def _answers(prompt: int, answer: int, *names: str) -> dict[str, str]:
    return {"prompt": "t1 " * prompt, **dict.fromkeys(names, " t2" * answer)}


ANSWERS = {"sft": ("completion",), "dpo": ("chosen", "rejected")}


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_the_loss_of_the_longest_sample_has_as_many_tokens_as_that_of_any(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL projects the answers' tokens alone, so a shorter sample with a longer answer held up to 10 % more."""
    monkeypatch.chdir(tmp_path)
    # of the longest samples max_length leaves 28 tokens of answer
    rows = [_answers(100, 60, *ANSWERS[trainer])] * 2 + [_answers(20, 95, *ANSWERS[trainer])] * 22
    monkeypatch.setattr("autofit.trainers.common.LARGEST", 8)  # and one with a long answer is tokenised
    folder, changes = tmp_path / "model", {**_PACKED, "packing": False, "max_length": 128}
    if trainer == "dpo":
        del changes["packing"]
    values = {
        **yaml.safe_load(write_recipe(tmp_path, write_model(folder, hidden=256), **changes).read_text()),
        **changes,
    }
    for key in ("reward_funcs", "num_generations", "max_completion_length"):
        values.pop(key, None)
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plugin: Any = load(trainer)
    worst_case = tmp_path / "worst_case.json"
    told: Any = inspect(trainer, dict(values), "sim:a100-40gb", worst_case)["values"]
    with fake_gpu("a100-40gb") as probe:
        task = Task(device="sim:a100-40gb", output=tmp_path / "out", worst_case=WorstCase(path=worst_case), steps=2)
        load(trainer).build(told, task).train(Report())
    with fake_gpu("a100-40gb") as gpu:
        own = plugin.real(plugin.parse({**values, "max_steps": 6}, overrides={"report_to": [], "save_strategy": "no"}))
        own.train()
    assert gpu.peak_allocated_bytes <= probe.peak_allocated_bytes <= 1.02 * gpu.peak_allocated_bytes
