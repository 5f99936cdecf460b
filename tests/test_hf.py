"""The plain transformers.Trainer: its bytes against the CPU allocator's, its batches, and its rules."""

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from fakegpu.tiny_trainers import Case as Model
from fakegpu.tiny_trainers import build_model, profiler_peak_bytes, tokenizer
from hf_parsed import LORA, TAUGHT, parsed, rows
from matrix import marked
from peft import LoraConfig
from transformers import AutoConfig

import autofit
from autofit.errors import ConfigError
from autofit.fakegpu import fake_gpu
from autofit.plugin.protocol import Report, Task
from autofit.plugin.registry import trainer_for
from autofit.trainers import hf_parts, hf_training
from autofit.trainers.common import random_weights, share_experts
from autofit.trainers.hf import TRAINER
from autofit.trainers.hf_parts import keep_dtype

PACKED: dict[str, object] = {"packing": True, "block_diagonal": True}


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
        ({"trainable_layers": 0}, "the hf config: trainable_layers: 0 trains nothing without extra_modules"),
        (
            {"extra_modules": ["norm"]},
            "layer_modules and extra_modules say what is trained; they need trainable_layers",
        ),
        ({"trainable_layers": -1, "spread_layers": True}, "spread_layers needs trainable_layers of 1 or more; got -1"),
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


@pytest.mark.parametrize(
    ("count", "parts", "extra", "searched"),
    [
        (-1, (), (), [".0."]),
        (2, ("mlp",), (), [".2.mlp", ".3.mlp"]),
        (0, (), ("embed_tokens",), ["embed_tokens"]),
        (1, ("mlp",), ("norm",), [".3.mlp", "norm"]),  # and so the norms of all layers
    ],
)
def test_modules_are_trained_by_their_names_as_llama_factory_finds_them(
    count: int, parts: tuple[str, ...], extra: tuple[str, ...], searched: list[str]
) -> None:
    model = build_model(Model(kind="sft"), num_hidden_layers=4)
    hf_parts.freeze_all_but(model, count, spread=False, parts=parts, extra=extra)
    for name, parameter in model.named_parameters():  # the last lines of adapter.py's _setup_freeze_tuning
        assert parameter.requires_grad == any(part in name for part in searched), name


def test_names_that_no_module_has_are_told_with_those_that_are() -> None:
    model = build_model(Model(kind="sft"), num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"layer_modules must be of self_attn, mlp, .* of this model; got attention"):
        hf_parts.freeze_all_but(model, 1, spread=False, parts=("attention",))
    with pytest.raises(ConfigError, match=r"extra_modules must be of embed_tokens, norm.* of this model; got wte"):
        hf_parts.freeze_all_but(model, 1, spread=False, extra=("wte",))


def test_only_layers_that_are_trained_are_checkpointed(small_model: Path, tmp_path: Path) -> None:
    more: dict[str, object] = {"trainable_layers": 1, "extra_modules": ["embed_tokens"], "gradient_checkpointing": True}
    trainer = trained(small_model, tmp_path, **more)
    assert [layer.gradient_checkpointing for layer in trainer.model.model.layers] == [False, True]


def test_lisa_freezes_layers_alone_and_trains_embeddings_and_head() -> None:
    model = build_model(Model(kind="sft"), num_hidden_layers=4)
    hf_parts.freeze_all_but(model, 1, spread=False, with_rest=True)
    frozen = {name.split(".")[2] for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"0", "1", "2"}
    assert model.get_input_embeddings().weight.requires_grad
    assert model.get_output_embeddings().weight.requires_grad


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
