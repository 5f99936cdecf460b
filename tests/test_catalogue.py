"""The built-in architectures: each is the model it says, and nothing of it is a guess that a count would show."""

import pytest

from autofit.recipe import catalogue

NO_TENSORS = (
    "max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling", "rms_norm_eps",
    "sliding_window",
)  # fmt: skip


def shapes() -> list[catalogue.Architecture]:
    """One entry for each set of tensors."""
    found: dict[str, catalogue.Architecture] = {}
    for entry in filter(None, map(catalogue.architecture, catalogue.names())):
        found.setdefault(str({k: v for k, v in entry.config.items() if k not in NO_TENSORS}), entry)
    return list(found.values())


def by_class() -> list[object]:
    """All shapes; those of a class but for its one of the fewest layers with the mark of the slow run."""
    first: dict[str, catalogue.Architecture] = {}
    for entry in sorted(shapes(), key=lambda entry: int(str(entry.config.get("num_hidden_layers", 99)))):
        first.setdefault(str(entry.config["architectures"]), entry)
    return [
        pytest.param(entry, id=entry.name, marks=() if entry in first.values() else pytest.mark.slow)
        for entry in shapes()
    ]


@pytest.mark.parametrize("entry", by_class())
def test_the_model_built_from_an_entry_has_the_published_count(entry: catalogue.Architecture) -> None:
    from on_meta import on_meta
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    keys = dict(entry.config)
    auto = AutoModelForImageTextToText if "vision_config" in keys else AutoModelForCausalLM
    with on_meta():
        model = auto.from_config(AutoConfig.for_model(str(keys.pop("model_type")), **keys))
    assert sum(p.numel() for p in model.parameters()) == entry.parameters
    assert [type(model).__name__] == entry.config["architectures"]


def test_the_models_of_the_field_notes_are_known_and_one_that_never_was_is_not() -> None:
    for name in (
        "Qwen/Qwen3-4B", "mistralai/Mistral-7B-v0.1", "meta-llama/Meta-Llama-3-8B-Instruct",
        "meta-llama/Llama-2-7b-chat-hf", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B",
    ):  # fmt: skip
        assert catalogue.architecture(name) is not None, name
    assert catalogue.architecture("qwen/qwen3-4b") == catalogue.architecture("Qwen/Qwen3-4B")
    assert catalogue.architecture("Qwen/Qwen3-1.8B") is None


@pytest.mark.parametrize(
    ("mirror", "model"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("NousResearch/Llama-2-7b-hf", "meta-llama/Llama-2-7b-hf"),
        ("unsloth/gemma-2-9b-it", "google/gemma-2-9b-it"),
        ("LLM-Research/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("somebody/Llama-2-7b-hf", None),
        ("unsloth/Qwen3-9B-bnb-4bit", None),
        ("unsloth/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", None),  # packed itself: its experts are stored in a way of their own
    ],
)
def test_a_mirror_has_the_shape_of_the_model_that_it_copies(mirror: str, model: str | None) -> None:
    found, expected = catalogue.architecture(mirror), None if model is None else catalogue.architecture(model)
    assert (found is None) == (model is None)
    assert found is None or (expected is not None and found.config == expected.config)


@pytest.mark.parametrize("end", ["bnb-4bit", "unsloth-bnb-4bit"])
def test_a_copy_in_4_bits_has_the_models_shape_and_says_its_quantisation(end: str) -> None:
    found, model = catalogue.architecture(f"unsloth/Qwen3-8B-{end}"), catalogue.architecture("Qwen/Qwen3-8B")
    assert found is not None
    assert model is not None
    stored = dict(found.config)
    assert stored.pop("quantization_config") == catalogue._NF4
    assert (stored, found.parameters) == (model.config, model.parameters)
    assert found.name.endswith(end)  # where the name goes on, so does the quantisation


@pytest.mark.parametrize(
    "name",
    ["01-ai/Yi-1.5-9B-Chat", "deepseek-ai/deepseek-coder-6.7b-instruct", "zai-org/glm-4-9b-chat-hf",
     "facebook/opt-1.3b", "google/gemma-3-4b-it", "Qwen/Qwen1.5-7B-Chat", "Qwen/Qwen2-7B-Instruct",
     "codellama/CodeLlama-7b-hf", "gpt2", "Qwen/Qwen3.5-4B", "unsloth/Qwen3.5-9B-bnb-4bit", "google/gemma-4-E4B-it",
     "unsloth/gemma-4-26B-A4B-it", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct",
     "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Ministral-3-8B-Reasoning-2512",
     "microsoft/Phi-4-mini-instruct", "allenai/Olmo-3-7B-Instruct", "ibm-granite/granite-4.1-3b",
     "LiquidAI/LFM2.5-1.2B-Instruct", "zai-org/GLM-4.7-Flash", "unsloth/DeepSeek-R1-0528-Qwen3-8B",
     "NousResearch/Hermes-3-Llama-3.1-8B", "Qwen/Qwen1.5-MoE-A2.7B", "microsoft/Phi-3.5-MoE-instruct",
     "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-R1", "CohereLabs/aya-expanse-8b", "zai-org/GLM-4.6",
     "moonshotai/Moonlight-16B-A3B-Instruct", "mistralai/Devstral-Small-2507", "allenai/OLMo-2-0425-1B",
     "LGAI-EXAONE/EXAONE-4.0-1.2B", "internlm/internlm3-8b-instruct", "baidu/ERNIE-4.5-0.3B-PT"],
)  # fmt: skip
def test_the_families_that_people_name_are_known(name: str) -> None:
    assert catalogue.architecture(name) is not None


def test_one_vocabulary_of_hermes_is_larger_than_its_base_model_has() -> None:
    names = "NousResearch/Hermes-2-Pro-Llama-3-8B", "NousResearch/Hermes-3-Llama-3.1-8B"
    pro, third = map(catalogue.architecture, names)
    assert pro is not None
    assert third is not None
    assert (pro.config["vocab_size"], third.config["vocab_size"]) == (128288, 128256)


def test_a_variant_differs_from_its_model_only_in_what_it_says() -> None:
    base, instruct = map(catalogue.architecture, ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"))
    assert base is not None
    assert instruct is not None
    assert {k for k in base.config if base.config[k] != instruct.config[k]} == {"max_position_embeddings", "rope_theta"}


@pytest.mark.parametrize(
    ("tuned", "base"),
    [
        ("someone/dolphin-2.1-mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("someone/Qwen3.5-4B-tuned", "Qwen/Qwen3.5-4B"),
        ("someone/gemma-4-E4B-it-tuned", "google/gemma-4-E4B"),
        ("someone/Qwen3-VL-8B-tuned", "Qwen/Qwen3-VL-8B-Instruct"),
        ("someone/Qwen3-8B-VL-tuned", None),
        ("someone/Qwen3.5-4B-GPTQ", None),
    ],
)
def test_a_tuned_model_has_the_shape_of_the_one_in_its_name(tuned: str, base: str | None) -> None:
    found = catalogue.base_of(tuned)
    assert (None if found is None else found.name) == base
