"""What older libraries did with a recipe, and that the bytes of their losses are those of running them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recipes import grpo_recipe, trl_facts

from autofit.errors import ConfigError
from autofit.forecast.advice import then_lines
from autofit.plugin.protocol import UPDATE, Inspection, WorstCase
from autofit.probing.result import PhasePeak, ProbeResult, ProbeStatus
from autofit.recipe.as_of import UPGRADE, bytes_a_logit, read_libraries, then_of, without_proposal
from autofit.recipe.recipe import Recipe
from autofit.trainers.older import modern

GB = 10**9
ROWS, TOKENS, VOCABULARY = 2, 64, 2**16


def recipe(**changes: object) -> Recipe:
    return replace(grpo_recipe(max_completion_length=256, **changes), vocab_size=151_936, embedding_parameters=GB // 10)


def samples(trainer: str, **changes: object) -> Recipe:
    made = recipe(**changes)
    return replace(made, trainer=trainer, trainer_name=trainer, **trl_facts(trainer, dict(made.resolved)),
                   longest_sample_tokens=1000)  # fmt: skip


def test_libraries_are_names_and_versions() -> None:
    assert read_libraries("trl 0.14, transformers==4.48.1") == {"trl": (0, 14), "transformers": (4, 48, 1)}
    for wrong in ("0.14", "trl", "trl new", "torch 2.1", "", "trl 0.14 0.15", "tlr 0.14"):
        with pytest.raises(ConfigError, match="--as-of"):
            read_libraries(wrong)


def test_whoever_named_older_libraries_is_not_told_that_they_can_be_named() -> None:
    inspection = Inspection(device="sim:a10g", worst_case=WorstCase(path=Path()), prompt_tokens=None)
    (note,) = modern({"torch_dtype": "bfloat16"}, ["dtype"], inspection).notes
    assert "--as-of" in note
    (left,) = without_proposal(replace(grpo_recipe(), notes=(note,))).notes
    assert left.endswith("torch_dtype as dtype; their defaults may differ")


def test_full_logits_were_held_until_the_version_that_tiles_them() -> None:
    own = recipe()
    assert then_of(own, "trl 1.14").held_bytes == 4 * 257 * 151_936 * 12
    assert then_of(own, "trl 1.15").held_bytes == 0
    assert then_of(recipe(dtype="bfloat16"), "trl 0.19").held_bytes == 4 * 257 * 151_936 * 6
    assert then_of(recipe(dtype="bfloat16", bf16=True), "trl 0.19").held_bytes == 4 * 257 * 151_936 * 12
    by_default = replace(recipe(dtype="bfloat16"), resolved={**recipe(dtype="bfloat16").resolved, "bf16": True})
    assert then_of(by_default, "trl 0.18").held_bytes == 4 * 257 * 151_936 * 6  # bf16 was off unless set
    assert then_of(by_default, "trl 0.19").held_bytes == 4 * 257 * 151_936 * 12
    assert then_of(recipe(use_liger_kernel=True), "trl 0.19").held_bytes == 0
    assert then_of(samples("sft"), "trl 1.6").held_bytes == 4 * 1000 * 151_936 * 12
    assert then_of(samples("sft"), "trl 1.7").held_bytes == 0
    assert then_of(samples("sft", packing=True, max_length=2048), "trl 1.6").held_bytes == 4 * 2048 * 151_936 * 12
    assert then_of(samples("dpo"), "trl 1.14").held_bytes == 8 * 1000 * 151_936 * 12
    assert then_of(samples("reward"), "trl 0.18").held_bytes == 0


def test_every_forward_made_its_logits_float32_until_transformers_4_45() -> None:
    own = samples("dpo", dtype="bfloat16", bf16=False)
    upcast, plain = (then_of(own, f"trl 0.12, transformers {version}").held_bytes for version in ("4.45.2", "4.46"))
    assert (upcast, plain) == (8 * 1000 * 151_936 * 12, 8 * 1000 * 151_936 * 6)


def test_a_micro_batch_of_trl_0_14_was_of_prompts() -> None:
    held = then_of(recipe(num_generations=4), "trl 0.14")
    assert held.held_bytes == 4 * 4 * 257 * 151_936 * 8
    assert "counted prompts" in held.line()


def test_an_old_transformers_means_an_old_trl() -> None:
    line = then_of(samples("sft"), "transformers 4.34").line()
    assert "before 1.7" in line
    assert "eager" in line
    assert "eager" not in then_of(samples("sft"), "transformers 4.36").line()
    assert "no difference" in then_of(samples("sft"), "transformers 5.20").line()


def test_defaults_of_today_are_told_where_the_recipe_relies_on_them() -> None:
    assert "gradient_checkpointing" in then_of(recipe(bf16=True), "trl 0.21").line()
    set_here = recipe(gradient_checkpointing=True)
    assert "gradient_checkpointing" not in then_of(set_here, "trl 0.21").line()
    assert "float32" in then_of(recipe(load_in_4bit=True, dtype="bfloat16"), "trl 0.25").line()
    assert "weights" not in then_of(recipe(load_in_4bit=True, dtype="bfloat16"), "trl 0.26").line()


def test_upgrading_alone_mends_a_recipe_that_fits_today_only() -> None:
    phases = (
        PhasePeak(name=UPDATE, peak_allocated_bytes=5 * GB, peak_reserved_bytes=5 * GB, device_used_bytes=6 * GB),
    )
    found = ProbeResult(status=ProbeStatus.FIT, device="sim:a10g", device_used_bytes=6 * GB, phases=phases)
    then = then_of(recipe(), "trl 0.19")
    assert "did not fit then, and upgrading alone mends it" in then_lines(then, found, 7 * GB)[0]
    assert "did not fit" not in then_lines(then, found, 24 * GB)[0]
    over = replace(found, status=ProbeStatus.OOM)
    assert "not enough" in then_lines(then, over, 5 * GB)[0]
    assert all(line.endswith(UPGRADE) for line in then_lines(then, over, 5 * GB))
    assert then_lines(None, found, 7 * GB) == []


def _selected(logits: Any, index: Any) -> Any:
    """Log-probabilities of `index` as TRL 0.15 to 1.14 took them: by logsumexp in float32, else a row at a time."""
    import torch

    if logits.dtype == torch.float32:
        chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    rows = [row.log_softmax(-1).gather(-1, of.unsqueeze(-1)) for row, of in zip(logits, index, strict=True)]
    return torch.stack(rows)


def _row_by_row(logits: Any, index: Any) -> Any:
    import torch

    pairs = zip(logits, index, strict=True)
    return torch.stack([row.log_softmax(-1).gather(1, of.unsqueeze(1)).squeeze(1) for row, of in pairs])


def _whole(logits: Any, index: Any) -> Any:
    return logits.log_softmax(-1).gather(2, index.unsqueeze(2)).squeeze(2)


def _causal(logits: Any, index: Any) -> Any:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, index, VOCABULARY)


LOSSES: list[tuple[str, tuple[int, ...], Callable[[Any, Any], Any]]] = [
    ("grpo", (0, 14), lambda logits, index: _row_by_row(logits[:, :-1], index[:, 1:])),
    ("grpo", (0, 16), lambda logits, index: _selected(logits[:, :-1] / 0.9, index[:, 1:])),
    ("dpo", (0, 14), _whole),
    ("dpo", (0, 16), _selected),
    ("sft", (1, 6), _causal),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("trainer", "version", "loss"), LOSSES, ids=[f"{n} {v}" for n, v, _ in LOSSES])
def test_bytes_of_a_logit_are_those_of_running_the_loss(
    trainer: str, version: tuple[int, ...], loss: Callable[[Any, Any], Any], dtype: str
) -> None:
    import torch

    from autofit.fakegpu import fake_gpu

    with fake_gpu("a100-80gb"):
        kind = getattr(torch, dtype)
        head = torch.randn(VOCABULARY, 8, dtype=kind, device="cuda")
        hidden = torch.randn(ROWS, TOKENS, 8, dtype=kind, device="cuda", requires_grad=True)
        index = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="cuda")
        torch.nn.functional.linear(hidden[:1, :1].detach(), head[:8])  # allocates cuBLAS's workspace, which stays
        before = torch.cuda.memory_allocated()
        loss(torch.nn.functional.linear(hidden, head), index).mean().backward()
        peak = torch.cuda.max_memory_allocated() - before
    said = bytes_a_logit(trainer, version, float32=dtype == "float32") * ROWS * TOKENS * VOCABULARY
    assert peak == pytest.approx(said, rel=0.03)
