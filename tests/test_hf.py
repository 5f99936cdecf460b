"""The plain transformers.Trainer: its bytes against the CPU allocator's, its batches, and its rules."""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from datasets import Dataset
from fakegpu.tiny_trainers import Case as Model
from fakegpu.tiny_trainers import build_model, profiler_peak_bytes, tokenizer
from matrix import marked
from peft import LoraConfig
from transformers import AutoConfig

import autofit
from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.plugin.protocol import Inspection, Report, Task, WorstCase
from autofit.plugin.registry import trainer_for
from autofit.trainers import hf_ebft, hf_losses, hf_parts, hf_training
from autofit.trainers.common import random_weights, share_experts
from autofit.trainers.hf import TRAINER
from autofit.trainers.hf_data import Blocks, Labelled, Pairs, Rated, Samples, packed, tokenised
from autofit.trainers.hf_parts import keep_dtype
from autofit.trainers.hf_script import SAMPLES
from autofit.trainers.keys import hf_tiers, on_ranks
from autofit.trainers.trl_config import TrlConfig, parse

LENGTH = 128
LORA: dict[str, object] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
TAUGHT: dict[str, object] = {"teacher_model_name_or_path": ""}  # the small model
PACKED: dict[str, object] = {"packing": True, "block_diagonal": True}


def parsed(model: Path, folder: Path, **changes: object) -> TrlConfig:
    if changes.get("teacher_model_name_or_path") == "":
        changes["teacher_model_name_or_path"] = str(model)
    values: dict[str, object] = {
        "model_name_or_path": str(model), "output_dir": str(folder), "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "max_steps": 2, "max_length": LENGTH, "report_to": "none",
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 1, **changes,
    }  # fmt: skip
    return parse("hf", values, overrides={})


def rows(config: TrlConfig, count: int = 8) -> Dataset:
    """Rows of `LENGTH` tokens; packed ones of two samples."""
    tokens = {"ids": [5] * LENGTH, "labels": [5] * LENGTH}
    if config.training.objective in SAMPLES:
        row: dict[str, object] = {"input_ids": tokens["ids"], "labels": tokens["labels"]}
        if config.training.packing:
            row["seq_lengths"] = [LENGTH // 2, LENGTH // 2]
    else:
        row = {f"{side}_{name}": found for side in ("chosen", "rejected") for name, found in tokens.items()}
    return Dataset.from_list([row] * count)


def trained(model: Path, folder: Path, **changes: object) -> Any:
    config = parsed(model, folder, **changes)
    with random_weights(hf_training):  # as in a probe
        trainer = hf_training.made(config, rows(config))
    trainer.masks_all = True
    trainer.train()
    return trainer


CASES: dict[str, dict[str, object]] = {
    "full, float32 master with autocast": {"bf16": True, "gradient_accumulation_steps": 2},
    "full, pure bfloat16": {"dtype": "bfloat16"},
    "LoRA, adapters in float32": {
        **LORA,
        "dtype": "bfloat16",
        "adapter_dtype": "float32",
        "bf16": True,
        "gradient_accumulation_steps": 2,
    },
    "LoRA, adapters in bfloat16": {**LORA, "dtype": "bfloat16", "adapter_dtype": "bfloat16"},
    "DPO, float32 logits": {"objective": "dpo", "dtype": "bfloat16", "float32_logits": True},
    "DPO, LoRA": {"objective": "dpo", **LORA, "float32_logits": True},
    "DPO, row by row": {"objective": "dpo", "dtype": "bfloat16"},
    "reward": {"objective": "reward"},
    "reward, value head": {"objective": "reward", "value_head": True, **LORA, "dtype": "bfloat16", "bf16": True},
    "classes of tokens": {"objective": "label_tokens", "num_labels": 2, "dtype": "bfloat16", "bf16": True},
    "classes": {"objective": "classify", "num_labels": 3, **LORA},
    "KTO as LLaMA-Factory's": {"objective": "kto", **LORA, "float32_logits": True, "keeps_logits": True},
    "KTO as TRL's": {"objective": "kto", "dtype": "bfloat16", "keeps_logits": True},
    "ORPO as LLaMA-Factory's": {"objective": "orpo", "float32_logits": True, "nll_weight": 1.0},
    "ORPO as TRL's": {"objective": "orpo", "dtype": "bfloat16", "nll_weight": 1.0},
    "ASFT": {"objective": "asft", "bf16": True},
    "OFT": {**LORA, "peft_adapter": {"peft_type": "OFT", "oft_block_size": 32}, "dtype": "bfloat16", "bf16": True},
    "AdaLoRA": {**LORA, "peft_adapter": {"peft_type": "ADALORA", "target_r": 4, "init_r": 6}},
    "AdaMSS": {**LORA, "peft_adapter": {"peft_type": "ADAMSS", "r": 8, "num_subspaces": 3}, "dtype": "bfloat16"},
    "Bone": {**LORA, "peft_adapter": {"peft_type": "MISS", "r": 4}, "dtype": "bfloat16"},
    "GKD": {"objective": "gkd", **TAUGHT, "dtype": "bfloat16", "bf16": True, "beta": 0.5, "temperature": 0.9},
    "GKD, LoRA and the usual loss": {"objective": "gkd", **LORA, "beta": 0.0, "nll_weight": 0.1},
    "GKD of an answer": {"objective": "gkd", **LORA, "beta": 0.5, "answer_tokens": 40},
    "GKD, a teacher on a server": {"objective": "gkd", "teacher_words": 8, "dtype": "bfloat16", "bf16": True},
    "GKD, the likeliest words": {"objective": "gkd", **TAUGHT, "teacher_words": 8, "bf16": True},
    "embeddings": {"objective": "embed", "dtype": "bfloat16", "bf16": True},
    "diffusion": {"objective": "diffusion", "dtype": "bfloat16", "bf16": True, "packing": True},
    "energy-based": {"objective": "ebft", **LORA, "ebft": {"generate_max_len": 2, "stride": 32, "ce_coef": 0.1}},
    "reranker": {"objective": "rerank", "negatives": 3, **LORA},
    "reranker by words": {"objective": "rerank", "word_scores": True, "negatives": 2, "dtype": "bfloat16"},
    "packed": {"packing": True},
    "packed, block diagonal": PACKED,
    "added layer": {"added_layers": 1, "dtype": "bfloat16", "bf16": True},
    "adapters behind MLPs": {"bottleneck": 16, "dtype": "bfloat16", "bf16": True},
    "ternary weights": {"qat": {"weight_dtype": "ternary"}, "dtype": "bfloat16"},
    "pruning masks": {"pruning_masks": True, "dtype": "bfloat16"},
    "LoReFT": {"reft_rank": 4, "dtype": "bfloat16", "bf16": True},
    "last layer": {"trainable_layers": 1},
}


DEFAULT = (
    "full, float32 master with autocast",
    "LoRA, adapters in float32",
    "DPO, float32 logits",
    "packed, block diagonal",
    "KTO as LLaMA-Factory's",
    "ORPO as TRL's",
)


THOROUGH = (  # two settings at once, each of which another case has; or one with a test of its mechanism elsewhere
    "AdaMSS",
    "GKD, LoRA and the usual loss",
    "GKD, the likeliest words",
    "DPO, row by row",
    "full, pure bfloat16",
    "LoRA, adapters in bfloat16",
    "DPO, LoRA",
    "KTO as TRL's",
    "ORPO as LLaMA-Factory's",
    "packed",
    # Bytes of a classifier with LoRA are compared below; of the other adapters OFT's, and which modules they have
    "classes",
    "reward",
    "AdaLoRA",
    "Bone",
)


@pytest.mark.parametrize("name", marked(CASES, default=DEFAULT, thorough=THOROUGH))
def test_a_whole_training_peaks_at_the_real_allocators_bytes(name: str, small_model: Path, tmp_path: Path) -> None:
    peaks_as_real(name, CASES[name], small_model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["classify", "reward"])
def test_a_classifier_with_lora_in_bfloat16_lacks_only_what_onednn_has_within_a_product(
    objective: str, small_model: Path, tmp_path: Path
) -> None:
    """Where the classifier peaks, oneDNN's product allocates 58,368 B for itself, which no card does."""
    labels = {"num_labels": 3} if objective == "classify" else {}
    changes: dict[str, object] = {"objective": objective, **labels, **LORA, "dtype": "bfloat16", "bf16": True}
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of cards that are not here
    try:
        peaks_as_real(objective, changes, small_model, tmp_path)
    finally:
        torch._C._set_mkldnn_enabled(True)


def peaks_as_real(name: str, changes: dict[str, object], small_model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with fake_gpu("h100", mode="cpu", enforce_capacity=False) as gpu:
        trained(small_model, tmp_path / "fake", **changes)
    gc.collect()
    real = profiler_peak_bytes(lambda: trained(small_model, tmp_path / "real", **changes))
    error = gpu.peak_requested_bytes / real - 1
    print(f"{name}: real {real / 2**20:.3f} MiB, error {error:+.4%}")
    assert abs(error) <= 2e-4


@pytest.mark.parametrize("weight", ["int4", "mxfp4"])
def test_quantisation_aware_training_peaks_at_the_real_allocators_bytes(
    weight: str, small_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("torchao", reason="qat needs torchao")
    changes: dict[str, object] = {"qat": {"weight_dtype": weight, "group_size": 32}, "dtype": "bfloat16"}
    peaks_as_real("qat", changes, small_model, tmp_path)


def test_what_quantisation_aware_training_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ConfigError, match="qat needs the package torchao, which is not installed here"):
        hf_training.prepare(torch.nn.Linear(2, 2), {"weight_dtype": "int4"})


def test_an_objective_in_a_recipe_means_this_trainer() -> None:
    assert trainer_for({"objective": "dpo", "max_length": 8}, None) == "hf"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objective": "ppo"},
            "objective must be one of sft, asft, dpo, kto, orpo, simpo, cpo, classify, label_tokens, reward, gkd, "
            "embed, rerank, diffusion, ebft; got 'ppo'",
        ),
        ({"packing": True, "objective": "dpo"}, "packing fills rows for objective: sft; got objective: dpo"),
        ({"block_diagonal": True}, "block_diagonal keeps packed samples apart; it needs packing: true"),
        ({"trainable_layers": 0}, "the hf config: trainable_layers must be 1 or more; got 0"),
        ({"trainable_layers": 2, "use_peft": True}, "trainable_layers: 2 trains layers of the model"),
        (
            {"trainable_layers": 2, "adapter_dtype": "bfloat16"},
            "layers in bfloat16 train beside frozen ones",
        ),
        ({"peft_adapter": {"peft_type": "OFT"}}, "peft_adapter is used in place of LoRA; it needs use_peft: true"),
        ({"use_peft": True, "peft_adapter": {"r": 8}}, "peft_adapter must be a mapping with a peft_type"),
        ({"qat": {"weight_dtype": "int4"}, "use_peft": True}, "qat trains whole models; omit use_peft or qat"),
        ({"added_layers": 2, "trainable_layers": 2}, "added_layers are trained alone; omit them or trainable_layers"),
        ({"trains_rest": True}, "trains_rest says what is trained beside some layers; it needs trainable_layers"),
        ({"teacher_words": 8}, "a teacher, or a part of the tokens to learn, is of objective: gkd; got objective: sft"),
        ({"word_scores": True}, "word_scores is of objective: rerank; got objective: sft; omit it"),
        ({"spread_layers": True}, "spread_layers says which layers are trained; it needs trainable_layers"),
        ({"assistant_only_loss": True}, "every key must be one that the trainer hf takes"),
    ],
)
def test_a_wrong_recipe_is_one_line(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        TRAINER.parse({"output_dir": str(tmp_path), "use_cpu": True, **changes}, overrides={})
    assert "\n" not in str(raised.value)


ROW = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
LONGER = {"input_ids": [5] * 5, "labels": [5] * 5}


def test_a_batch_is_padded_on_the_right_to_a_multiple_and_padding_is_neither_read_nor_trained_on() -> None:
    batch = Samples(padding=9, multiple=4)([ROW, LONGER])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9, 9, 9, 9, 9], [5, 5, 5, 5, 5, 9, 9, 9]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"][0].tolist() == [-100, 6, 7, *[-100] * 5]
    assert Samples(padding=9, width=16)([ROW])["input_ids"].shape == (1, 16)


def test_a_pair_is_two_rows_of_one_width_the_chosen_answers_first() -> None:
    pair = {"chosen_ids": [1], "chosen_labels": [1], "rejected_ids": [2, 2], "rejected_labels": [2, 2]}
    assert Pairs(padding=0)([pair, pair])["input_ids"].tolist() == [[1, 0], [1, 0], [2, 2], [2, 2]]


def test_a_label_is_a_class_or_a_number() -> None:
    rows = [ROW | {"label": 2}, LONGER | {"label": 1}]
    assert Labelled(padding=0, classes=3)(rows)["labels"].tolist() == [2, 1]
    assert Labelled(padding=0, classes=1)(rows)["labels"].dtype is torch.float32
    tokens = Labelled(padding=0, classes=2, tokens=True)([{"input_ids": [5, 6, 7], "labels": [-100, 1, 0]}, LONGER])
    assert tokens["labels"].tolist() == [[-100, 1, 0, -100, -100], [1] * 5]


def test_packed_samples_do_not_see_each_other() -> None:
    row = {"input_ids": [5] * 5, "labels": [5] * 5, "seq_lengths": [2, 3]}
    common = {"padding": 9, "width": 6, "dtype": torch.float32}
    batch = Blocks(**common, flash=False)([row])
    seen = (batch["attention_mask"][0, 0] == 0).int().tolist()
    assert seen == [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0],
                    [0] * 6]  # fmt: skip
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    flat = Blocks(**common, flash=True)([row, row])
    assert flat["input_ids"].shape == (1, 12)
    assert "attention_mask" not in flat
    assert flat["position_ids"][0, 6:].tolist() == [0, 1, 0, 1, 2, 0]


def test_a_packed_sample_has_the_logits_that_it_has_alone(small_model: Path, tmp_path: Path) -> None:
    model = hf_training.model_of(parsed(small_model, tmp_path))
    ids = list(range(5, 25))
    row = {"input_ids": ids, "labels": ids, "seq_lengths": [8, 12]}
    batch = Blocks(padding=0, width=24, flash=False, dtype=torch.float32)([row])
    del batch["labels"]
    with torch.no_grad():
        together = model(**batch).logits[0, 8:20]
        alone = model(input_ids=torch.tensor([ids[8:]])).logits[0]
    assert torch.allclose(together, alone, atol=1e-5)


def test_packing_fills_rows_with_whole_samples() -> None:
    sizes = [3, 7, 5, 2, 4, 6]
    rows = Dataset.from_list([{"input_ids": [size] * size, "labels": [size] * size} for size in sizes])
    found = packed(rows, 9)
    assert [row["seq_lengths"] for row in found] == [[7, 2], [6, 3], [5, 4]]
    assert found[0]["labels"] == [-100, *[7] * 6, -100, 2]


@pytest.mark.parametrize("changes", [{}, {"packing": True, "block_diagonal": True}, {"objective": "dpo"},
                                     {"objective": "classify", "num_labels": 2}, {"objective": "kto"},
                                     {"objective": "orpo", "nll_weight": 1.0}, {"objective": "gkd", "nll_weight": 1.0},
                                     {"objective": "embed"}, {"objective": "rerank", "word_scores": True},
                                     {"objective": "reward", "use_peft": False}], ids=str)  # fmt: skip
def test_a_real_training_learns_its_rows(changes: dict[str, object], tiny_model: Path, tmp_path: Path) -> None:
    more = {"learning_rate": 0.02, "max_steps": 8, "objective": "sft", **changes}
    path = tiny.write_offline_recipe("hf", tmp_path, tiny_model, **more)
    run = TRAINER.build(yaml.safe_load(path.read_text()), Task(device="cpu", output=tmp_path / "out"))
    run.train(Report())
    losses = [line["loss"] for line in run.trainer.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("part", "layer"), [pytest.param("trainable_layers", "1", marks=pytest.mark.slow), ("added_layers", "2")]
)
def test_freezing_leaves_the_last_layers_to_train(part: str, layer: str, small_model: Path, tmp_path: Path) -> None:
    more: dict[str, object] = {part: 1, "gradient_checkpointing": True, "dtype": "bfloat16", "bf16": True}
    trainer = trained(small_model, tmp_path, **more, adapter_dtype="float32")
    kinds = {(name.split(".")[2], p.dtype) for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert kinds == {(layer, torch.float32)}


def test_spread_layers_are_the_last_of_each_group_of_layers_as_llama_pro_trains_them() -> None:
    model = build_model(Model(kind="sft"), num_hidden_layers=6)
    hf_parts.freeze_all_but(model, 3, spread=True)
    trained = {int(name.split(".")[2]) for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {1, 3, 5}  # range(stride - 1, number, stride) of adapter.py, with a stride of 2
    with pytest.raises(ConfigError, match="the 6 layers of the model must be a multiple of trainable_layers 4"):
        hf_parts.freeze_all_but(model, 4, spread=True)


def test_lisa_freezes_layers_alone_and_trains_embeddings_and_head() -> None:
    model = build_model(Model(kind="sft"), num_hidden_layers=4)
    hf_parts.freeze_all_but(model, 1, spread=False, with_rest=True)
    frozen = {name.split(".")[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"0", "1", "2"}
    assert model.get_input_embeddings().weight.requires_grad
    assert model.get_output_embeddings().weight.requires_grad


def test_a_rated_sample_stands_beside_the_answer_to_the_row_before_and_keeps_its_rating() -> None:
    rows = Dataset.from_dict({"prompt": ["w3 ", "w4 "], "completion": ["w5", "w6 w7"], "label": [False, True]})
    found = tokenised(rows, tokenizer(), objective="kto", max_length=9)
    assert [row["desirable"] for row in found] == [False, True]
    assert [row["rejected_labels"] for row in found] == [
        [-100] * (len(row["rejected_ids"]) - len(after)) + after
        for row, after in zip(found, [[t for t in found[n]["chosen_labels"] if t >= 0] for n in (1, 0)], strict=True)
    ]
    batch = Rated(padding=0)(list(found))
    assert batch["desirable"].tolist() == [False, True]
    assert batch["input_ids"].shape[0] == batch["other_input_ids"].shape[0] == 2


def of_loss(model: Path, folder: Path, batch: dict[str, torch.Tensor], **changes: object) -> Any:
    """(the trainer, its loss of a micro-batch)."""
    trainer = hf_training.made(parsed(model, folder, **changes), rows(parsed(model, folder, **changes)))
    return trainer, trainer.compute_loss(trainer.model, batch).item()


def sums(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row but its first token (B,)."""
    with torch.no_grad():
        each = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
    return torch.gather(each, 2, ids[:, 1:, None]).squeeze(2).sum(1)


def learn(model: Any, ids: torch.Tensor) -> None:
    """Make these rows more likely."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("float32", [True, False], ids=["LLaMA-Factory", "TRL"])
@pytest.mark.parametrize("objective", ["orpo", "simpo", "cpo"])
def test_a_loss_without_a_reference_is_that_of_the_tools(
    objective: str, float32: bool, small_model: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7], [8, 7, 6, 5], [6, 6, 9, 5]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    more: dict[str, object] = {"float32_logits": float32, "nll_weight": 0.5, "simpo_gamma": 0.7, "beta": 2.0}
    trainer, loss = of_loss(small_model, tmp_path, batch, objective=objective, **more)
    found = sums(trainer.model, ids)
    chosen, rejected = (found / (1 if objective == "cpo" else 3)).chunk(2)
    odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    margin = {"orpo": odds, "simpo": chosen - rejected - 0.7 / 2.0, "cpo": chosen - rejected}[objective]
    nll = -(chosen.mean() if objective != "cpo" or float32 else found[:2].mean() / 3)
    wanted = -torch.nn.functional.logsigmoid(2.0 * margin).mean() + 0.5 * nll
    if objective == "orpo":  # beta weighs the odds ratio, outside of the sigmoid
        wanted = -2.0 * torch.nn.functional.logsigmoid(odds).mean() + 0.5 * nll
    assert loss == pytest.approx(wanted.item(), rel=1e-4)


def test_asfts_loss_weighs_tokens_by_their_probability_and_adds_the_divergence(
    small_model: Path, tmp_path: Path
) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    config = parsed(small_model, tmp_path, objective="asft", beta=0.3)
    trainer = hf_training.made(config, rows(config))
    learn(trainer.model, ids)
    with torch.no_grad():
        own, others = (m(input_ids=ids).logits[0, :-1].log_softmax(-1) for m in (trainer.model, trainer.reference))
    chosen = own.gather(1, ids[0, 1:, None])
    divergence = (others.exp() * (others - own)).sum(-1).mean()
    wanted = (-chosen * chosen.exp()).mean() + 0.3 * divergence
    assert divergence > 0.01
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-3)


def test_ktos_loss_subtracts_what_changed_on_other_answers_and_turns_with_the_rating(
    small_model: Path, tmp_path: Path
) -> None:
    ids, other = torch.tensor([[5, 6, 7, 8], [9, 5, 6, 7]]), torch.tensor([[8, 7, 6, 5], [6, 6, 9, 5]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "other_input_ids": other,
             "other_attention_mask": torch.ones_like(other), "other_labels": other,
             "desirable": torch.tensor([True, False])}  # fmt: skip
    config = parsed(small_model, tmp_path, objective="kto", beta=0.5)
    trainer = hf_training.made(config, rows(config))
    before, before_other = sums(trainer.model, ids), sums(trainer.model, other)
    learn(trainer.model, other)
    ratio = sums(trainer.model, ids) - before
    shift = (sums(trainer.model, other) - before_other).mean().clamp(min=0)
    assert shift > 0.01
    wanted = (1 - torch.sigmoid(0.5 * torch.tensor([1.0, -1.0]) * (ratio - shift))).mean()
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "split"),
    [
        ({"objective": "orpo", "float32_logits": True, "nll_weight": 1.0}, False),
        ({"objective": "orpo", "float32_logits": False, "nll_weight": 1.0}, True),
        ({"objective": "cpo", "float32_logits": False, "nll_weight": 0.0}, False),
        ({"objective": "kto", "float32_logits": True}, True),
    ],
)
def test_a_split_is_neutral_only_where_a_loss_is_the_mean_of_its_parts(
    loss: dict[str, object], split: bool, small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, **loss, beta=2.0)
    trainer = hf_training.made(config, rows(config))
    pairs = [{"chosen_ids": [5, 6, 7, 9], "chosen_labels": [-100, 6, 7, 9], "rejected_ids": [5, 8],
              "rejected_labels": [-100, 8], "desirable": True},
             {"chosen_ids": [9, 5], "chosen_labels": [-100, 5], "rejected_ids": [9, 6, 7],
              "rejected_labels": [-100, 6, 7], "desirable": False}]  # fmt: skip
    model = trainer.model
    if loss["objective"] == "kto":  # another model than the reference
        learn(model, torch.tensor([[9, 6, 7]]))
    together, *apart = (
        trainer.compute_loss(model, trainer.data_collator(part)).item() for part in (pairs, pairs[:1], pairs[1:])
    )
    assert (abs(sum(apart) / 2 - together) > 1e-4) is split
    assert bool(hf_tiers(loss)) is split


def test_on_several_ranks_that_normalise_by_themselves_a_split_deals_samples_to_other_ranks() -> None:
    """Axolotl's average_tokens_across_devices: false; proven on two ranks, the gradient differed by 29 %."""
    apart, split = {"launch.ranks": "approximate"}, {"per_device_train_batch_size": "approximate"}
    tiers = hf_tiers({"objective": "sft", "average_tokens_across_devices": False})
    assert tiers == apart
    assert on_ranks(tiers, many=True, generates=False) == {**apart, **split}
    assert on_ranks(tiers, many=True, generates=True) == apart
    assert on_ranks(tiers, many=False, generates=False) == {}
    asked = Inspection(device="sim:t4", worst_case=WorstCase(path=Path("none")))
    assert [replace(asked, ranks=ranks, cards=cards).many for ranks, cards in ((1, None), (1, 2), (2, 1))] == [
        False, True, False,
    ]  # fmt: skip


def test_gkds_loss_is_the_divergence_of_the_words_of_both_models(small_model: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([[-100, 6, 7, 8]])}
    config = parsed(small_model, tmp_path, **TAUGHT, objective="gkd", beta=0.25, temperature=0.5)
    trainer = hf_training.made(config, rows(config))
    learn(trainer.model, ids)
    with torch.no_grad():
        own, others = ((m(input_ids=ids).logits[0, :-1] / 0.5).softmax(-1) for m in (trainer.model, trainer.reference))
    mixed = 0.75 * own + 0.25 * others
    wanted = (0.25 * others * (others / mixed).log() + 0.75 * own * (own / mixed).log()).sum(-1).mean()
    assert wanted > 0.01
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-3)


def test_the_smaller_vocabulary_is_filled_up_from_the_larger_one() -> None:
    own, others = torch.ones(2, 3), torch.full((2, 5), 7.0)
    assert hf_losses._same_width(own, others)[0].tolist() == [[1, 1, 1, 7, 7]] * 2
    assert hf_losses._same_width(others, own)[1].tolist() == [[1, 1, 1, 7, 7]] * 2


def test_an_embedding_is_the_normalised_state_of_the_last_token_and_is_compared_with_all_of_its_batch(
    small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, objective="embed")
    plain = hf_training.model_of(config)
    trainer = hf_training.made(config, rows(config))
    trainer.model.load_state_dict(plain.state_dict())
    texts = [[5, 6, 7], [8, 9], [5, 6], [8, 9, 7]]
    pairs = [{"chosen_ids": a, "chosen_labels": a, "rejected_ids": b, "rejected_labels": b}
             for a, b in zip(texts[:2], texts[2:], strict=True)]  # fmt: skip
    with torch.no_grad():
        found = torch.stack([plain.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in texts])
    found = torch.nn.functional.normalize(found, dim=1)
    wanted = torch.nn.functional.cross_entropy(found[:2] @ found[2:].T / 0.1, torch.tensor([0, 1]))
    assert trainer.compute_loss(trainer.model, trainer.data_collator(pairs)).item() == pytest.approx(
        wanted.item(), rel=1e-4
    )


def test_diffusion_predicts_a_masked_word_from_the_place_before_it_and_from_the_words_behind(
    small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(small_model, tmp_path, objective="diffusion", mask_token=3)
    trainer = hf_training.made(config, rows(config))
    monkeypatch.setattr(
        torch, "rand", lambda *size, **_: torch.full(size[0] if isinstance(size[0], torch.Size) else size, 0.5)
    )
    trainer.masks_all = True
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([[-100, -100, 7, 8]])}
    with torch.no_grad():
        seen = torch.ones((1, 1, 4, 4), dtype=torch.bool)
        logits = trainer.model(torch.tensor([[5, 6, 3, 3]]), attention_mask=seen).logits[0, 1:3]
    each = torch.nn.functional.cross_entropy(logits, ids[0, 2:], reduction="none")
    wanted = (each / (1e-3 + 0.999 * 0.5)).sum() / 4
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(wanted.item(), rel=1e-4)


@pytest.mark.parametrize("prompt", [0, 40])
def test_words_at_each_anchor_see_the_text_before_it_and_are_scored_by_what_they_are_like(
    prompt: int, small_model: Path, tmp_path: Path
) -> None:
    strides = {"stride": 8, "context_length": 8, "generate_max_len": 4, "n_samples_per_prompt": 2, "ce_coef": 0.5}
    config = parsed(small_model, tmp_path, objective="ebft", ebft=strides, **LORA)
    trainer = hf_training.made(config, rows(config))
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
    labels = ids.clone()
    labels[:, :prompt] = -100
    written = list[tuple[int, int]]()
    scores = trainer._scores

    def counted(model: Any, found: torch.Tensor, *more: Any) -> Any:
        written.append((found.shape[0], found.shape[1]))
        return scores(model, found, *more)

    trainer._scores = counted
    loss = trainer.compute_loss(trainer.model, {"input_ids": ids, "labels": labels})
    loss.backward()
    first = max(prompt, 8)
    anchors = (LENGTH - 4 - first) // 8 + 1
    assert written == [(4, LENGTH + 4 * anchors)]
    assert any(p.grad.abs().sum() > 0 for p in trainer.model.parameters() if p.grad is not None)


def test_a_word_sees_its_own_anchor_and_no_other(tmp_path: Path) -> None:
    told = hf_ebft.Strides(stride=4, context_length=3, generate_max_len=2)
    geometry = hf_ebft._Geometry(told=told, text=12, first=3, anchors=2)
    mask, places = geometry.dense_mask(16, 2, 1, torch.device("cpu"), torch.float32)
    seen = [row.nonzero()[:, 0].tolist() for row in mask[0, 0] == 0]
    assert seen[11] == list(range(12))
    assert seen[12:] == [[0, 1, 2, 12], [*range(7), 13], [0, 1, 2, 12, 14], [*range(7), 13, 15]]
    assert places[0, 12:].tolist() == [3, 7, 4, 8]


def test_what_is_no_setting_of_ebft_is_named(small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ebft has no key 'strid'; the nearest valid one is 'stride'"):
        hf_ebft.Strides.of({"strid": 4})
    with pytest.raises(ConfigError, match="ebft must be a mapping, with objective: ebft"):
        parsed(small_model, tmp_path, ebft={"stride": 4})


def test_a_reranker_by_words_scores_the_last_token_by_the_difference_of_two_words(
    small_model: Path, tmp_path: Path
) -> None:
    config = parsed(small_model, tmp_path, objective="rerank", word_scores=True, negatives=2)
    plain = hf_training.model_of(config)
    trainer = hf_training.made(config, rows(config))
    trainer.model.load_state_dict(plain.state_dict())
    fits, other = [5, 6, 7], [8, 9]
    row = {"chosen_ids": fits, "chosen_labels": fits, "rejected_ids": other, "rejected_labels": other}
    with torch.no_grad():
        logits = [plain(torch.tensor([ids])).logits[0, -1] for ids in (fits, other, other)]
    scores = torch.stack([one[0] - one[1] for one in logits])
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(scores, torch.tensor([1.0, 0.0, 0.0]))
    assert trainer.compute_loss(trainer.model, trainer.data_collator([row])).item() == pytest.approx(
        wanted.item(), rel=1e-4
    )


def mixture(folder: Path) -> Path:
    """A Qwen3 mixture of two layers, of which the experts are most."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 256,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(**sizes, **heads, num_hidden_layers=2, num_experts=16, num_experts_per_tok=2)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_experts_in_host_memory_leave_the_card_to_the_rest(tmp_path: Path) -> None:
    model, held = mixture(tmp_path / "model"), {}
    experts = 2 * 16 * 3 * 64 * 256 * 2  # bytes
    for host in (False, True):
        with fake_gpu("h100", enforce_capacity=False) as gpu:
            trained(model, tmp_path / "out", **{**LORA, "lora_target_modules": ["q_proj", "v_proj"]}, dtype="bfloat16",
                    bf16=True, host_experts=host, use_cpu=False,
                    gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})  # fmt: skip
        held[host] = gpu.peak_allocated_bytes
    assert held[False] - held[True] > 0.95 * experts
    with pytest.raises(ConfigError, match="host_experts needs a mixture of experts"):
        hf_parts.to_host(build_model(Model(kind="sft")))


@pytest.mark.slow
def test_a_rank_holds_its_share_of_the_experts_and_each_must_have_as_many_as_a_token_takes(tmp_path: Path) -> None:
    model, held = mixture(tmp_path / "model"), {}
    for ranks in (1, 4):
        with fake_gpu("h100", enforce_capacity=False) as gpu:
            more: dict[str, object] = {"expert_parallel_size": ranks, "gradient_accumulation_steps": 2}
            trained(model, tmp_path / "out", dtype="bfloat16", bf16=True, use_cpu=False, **more)
        held[ranks] = gpu.peak_allocated_bytes
    experts = 16 * 2 * 3 * 64 * 256  # weights; each with its gradient and two moments, in bfloat16
    assert held[1] - held[4] == pytest.approx(0.75 * experts * 2 * 4, rel=0.1)
    config = AutoConfig.from_pretrained(model)
    for wrong in (3, 16):
        with pytest.raises(ConfigError, match=f"expert_parallel_size {wrong} must divide the 16 experts"):
            share_experts(config, wrong)


def test_an_added_layer_stands_behind_its_group_changes_nothing_at_first_and_is_trained_alone() -> None:
    torch.manual_seed(0)
    model = build_model(Model(kind="sft"), num_hidden_layers=4)
    ids = torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    hf_parts.add_layers(model, 2)
    assert {int(name.split(".")[2]) for name, p in model.named_parameters() if p.requires_grad} == {2, 5}
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(6))
    assert torch.equal(model(input_ids=ids).logits, before)
    with pytest.raises(ConfigError, match="the 6 layers of the model must be a multiple of added_layers 4"):
        hf_parts.add_layers(model, 4)


def test_another_adapter_has_the_modules_that_lora_would_have() -> None:
    lora = LoraConfig(target_modules="all-linear", lora_alpha=9, task_type="CAUSAL_LM")
    found = hf_parts.other_adapter(lora, {"peft_type": "ADALORA", "init_r": 6}, total_steps=7)
    assert (type(found).__name__, found.target_modules, found.init_r, found.lora_alpha) == (
        "AdaLoraConfig", "all-linear", 6, 9,
    )  # fmt: skip
    for wrong, message in (({"peft_type": "LORE"}, "must be a type"), ({"peft_type": "OFT", "rnk": 1}, "rnk")):
        with pytest.raises(ConfigError, match=message):
            hf_parts.other_adapter(lora, wrong, total_steps=7)


def test_fsdp2_that_keeps_dtypes_prepares_without_mixed_precision_and_goes_on_with_it() -> None:
    state = SimpleNamespace(_mixed_precision="bf16")
    seen: list[str] = []
    accelerator = SimpleNamespace(state=state, _prepare_fsdp2=lambda *parts: seen.append(state._mixed_precision))
    keep_dtype(accelerator)
    accelerator._prepare_fsdp2("model")
    assert (seen, state._mixed_precision) == (["no"], "bf16")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_weights_gradients_and_states_under_fsdp2_are_halved_where_dtypes_are_kept() -> None:
    recipe = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "objective": "sft", "max_length": 64, "dtype": "bfloat16",
              "bf16": True, "launch": {"sharding": "fsdp2"}}  # fmt: skip
    kept, cast = (
        autofit.estimate(
            {**recipe, "keeps_dtype": keeps},
            gpu="2xa100-40gb",
            trainer="hf",
            prompt_tokens=64,
            num_processes=2,
            advice=False,
            lengths="off",
        ).device_used_bytes
        for keeps in (True, False)
    )
    assert kept is not None
    assert cast is not None
    assert cast - kept > 494_000_000 // 2 * 8  # 2 of 4 bytes of a weight and its gradient, 4 of 8 of its states
