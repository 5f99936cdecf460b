"""What stands in for a model or a dataset that cannot be reached, and what is refused."""

import json
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny
import yaml
from huggingface_hub import constants
from recipes import inspect
from transformers import AutoConfig, AutoTokenizer

from autofit.errors import ConfigError
from autofit.plugin import models
from autofit.recipe import catalogue
from autofit.trainers import offline
from autofit.trainers.offline import read_config, stand_in_model
from autofit.units import format_bytes

SIM = "sim:a100-40gb"


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def values_of(recipe: Path, **changes: object) -> dict[str, object]:
    found = {**yaml.safe_load(recipe.read_text()), **changes}
    return {key: value for key, value in found.items() if value is not None}


def inspected(
    recipe: Path, *, prompt_tokens: int | None = None, device: str = SIM, **changes: object
) -> dict[str, object]:
    return inspect("grpo", values_of(recipe, **changes), device, recipe.parent / "i" / "worst_case.json", prompt_tokens)


def test_a_model_of_the_catalogue_needs_neither_hub_nor_tokenizer(tiny_recipe: Path) -> None:
    found = inspected(tiny_recipe, prompt_tokens=77, model_name_or_path="Qwen/Qwen3-0.6B", dataset_name="no/such")
    assert (found["model_parameters"], found["longest_prompt_tokens"]) == (596049920, 77)
    assert found["num_prompts"] is None
    assert found["values"]["model_name_or_path"] == "Qwen/Qwen3-0.6B"  # type: ignore[index]
    assert found["resolved"]["dataset_name"] == "no/such"  # type: ignore[index]
    changes = offline.overrides(values_of(tiny_recipe), tiny_recipe.parent / "i")
    assert AutoConfig.from_pretrained(changes["model_name_or_path"]).num_hidden_layers == 28
    assert changes["reward_funcs"] == ["autofit.trainers.offline.no_reward"]
    inspected(tiny_recipe)  # everything is at hand again
    assert offline.overrides(values_of(tiny_recipe), tiny_recipe.parent / "i") == {}


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        (None, "the recipe has no reward: one"),
        (["tiny_rewards.share_of_t1", "gone.exact"], "functions gone.exact cannot be imp"),
    ],
)
def test_a_prediction_needs_no_reward_and_says_what_stands_in(
    tiny_recipe: Path, rewards: list[str] | None, said: str
) -> None:
    found = inspected(tiny_recipe, reward_funcs=rewards)
    assert said in str(found["notes"])
    with pytest.raises(ConfigError, match=r"needs a reward|must be importable"):
        inspected(tiny_recipe, device="cpu", reward_funcs=rewards)


def test_weights_that_are_stored_in_4_bits_are_read_so_whatever_says_it(tiny_recipe: Path, tiny_model: Path) -> None:
    """The name of a copy in the catalogue, or a folder's config.json: the recipe need not say load_in_4bit."""
    named = inspected(
        tiny_recipe, prompt_tokens=9, model_name_or_path="unsloth/Qwen3-0.6B-bnb-4bit", dataset_name="a/b"
    )
    config = json.loads((tiny_model / "config.json").read_text())
    stored = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (tiny_model / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    local = inspected(tiny_recipe)
    (tiny_model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    other = inspected(tiny_recipe)
    (tiny_model / "config.json").write_text(json.dumps(config))
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    for found, wanted in ((named, settings), (local, {"load_in_8bit": True}), (other, {"load_in_4bit": False})):
        assert settings.keys() <= found["resolved"].keys()  # type: ignore[attr-defined]
        assert wanted.items() <= found["resolved"].items()  # type: ignore[attr-defined]
    assert settings.items() <= named["values"].items()  # type: ignore[attr-defined]
    assert "holds weights of 4 bits, so the recipe is read with load_in_4bit: true" in str(named["notes"])
    assert "holds gptq weights, which are simulated in 16 bits" in str(other["notes"])
    assert str(other["notes"]).count("an upper bound") == 1
    assert named["weights_bytes"] < 0.8 * 2 * named["model_parameters"]  # type: ignore[operator]


def test_a_local_folder_is_used_as_it_is_and_a_config_alone_is_enough(tiny_model: Path, tmp_path: Path) -> None:
    assert stand_in_model(str(tiny_model), tmp_path) == str(tiny_model)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_model / "config.json", bare)
    made = stand_in_model(str(bare), tmp_path)
    assert AutoConfig.from_pretrained(made).hidden_size == 32
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert len(tokenizer) == tiny.WORDS
    messages = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "user a <eos> assistant "


ONE_OF_EACH_TYPE = {str(a.config["model_type"]): a.config for a in map(catalogue.architecture, catalogue.names()) if a}
GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 500}


def test_weights_in_mxfp4_say_when_transformers_trains_them() -> None:
    settings, notes = offline.quantised_already("openai/gpt-oss-20b")
    assert settings == {}
    assert len(notes) == 1
    assert "holds mxfp4 weights" in notes[0]
    assert "only unpacked, which it does by itself where the package kernels is not installed" in notes[0]


@pytest.mark.parametrize("config", [*ONE_OF_EACH_TYPE.values(), GPT2], ids=lambda config: config["model_type"])
def test_the_prompt_is_as_long_as_it_was_said_for_every_kind_of_model(
    config: Mapping[str, object], tmp_path: Path
) -> None:
    """transformers loads the tokenizers of some models by classes of their own, and some of those without any file."""
    (tmp_path / "config.json").write_text(json.dumps(dict(config)))
    tokenizer = AutoTokenizer.from_pretrained(stand_in_model(str(tmp_path), tmp_path / "i"))
    for tokens in (1, 50):
        made = offline.made_up_dataset("grpo", tokens, tokenizer, tmp_path, text_column=None)
        row = json.loads((Path(made) / "train.jsonl").read_text())
        assert len(tokenizer(row["prompt"])["input_ids"]) == tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset_name": "no/such"}, "the dataset no/such cannot be .* or give --prompt-tokens N"),
        ({"dataset_name": "gone.jsonl"}, "no such file .* or give --prompt-tokens N"),
        ({"dataset_name": None}, "needs a dataset.* or give --prompt-tokens N"),
        ({"model_name_or_path": "Qwen/Qwen3-4B", "dataset_name": None}, "needs a dataset.* or give --prompt-tokens N"),
        ({"model_name_or_path": "Qwen/Qwen3-4B"}, "tokenizer of 'Qwen/Qwen3-4B' must be reachable.*--prompt-tokens N"),
        (
            {"model_name_or_path": "Qwen/Qwen3-1.8B"},
            "catalogue; got 'Qwen/Qwen3-1.8B'; similar names: Qwen/Qwen3-1.7B",
        ),
        ({"model_name_or_path": "qwen3_8b"}, "similar names: .*Qwen/Qwen3-8B"),
        (
            {"model_name_or_path": "baichuan-inc/Baichuan2-7B-Base"},
            "save https://huggingface.co/baichuan-inc/Baichuan2-7B-Base/raw/main/config.json into a folder and give",
        ),
        ({"lora_target_modules": ["wq", "wk"]}, "wk, wq matches none; it has q_proj, k_proj, v_proj, o_proj"),
        ({"lora_target_modules": ["q_prj", "v_prj"]}, "matches none; the nearest valid one is 'q_proj'"),
        ({"lora_target_modules": ["q_proj"]}, r"a pattern for the whole path of a module: write '\.\*q_proj'"),
        (
            {"load_in_4bit": True, "use_peft": False},
            "load_in_4bit needs LoRA, because quantised weights",
        ),
        ({"attn_implementation": "flash_attention_3"}, "needs the package flash_attn_interface.*sdpa needs none"),
    ],
)
def test_what_a_simulated_card_cannot_do_without_is_one_line(
    tiny_recipe: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        inspected(tiny_recipe, **changes)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_samples_that_are_cut_to_a_length_have_it_where_the_dataset_is_out_of_reach(
    trainer: str, tiny_model: Path, tmp_path: Path
) -> None:
    values = {"dataset_name": "no/such", "max_length": 300, "output_dir": str(tmp_path)}
    worst_case = tmp_path / "i" / "worst_case.json"
    by_length = inspect(trainer, {**values, "model_name_or_path": "Qwen/Qwen3-0.6B"}, SIM, worst_case, 300)
    for model in ("Qwen/Qwen3-0.6B", str(tiny_model)):  # without a tokenizer, and with one
        found = inspect(trainer, {**values, "model_name_or_path": model}, SIM, worst_case, None)
        assert found["longest_sample_tokens"] == by_length["longest_sample_tokens"] == 300
        assert "every sample counts as max_length, 300 tokens" in str(found["notes"])
        with pytest.raises(ConfigError, match="or give --prompt-tokens N"):
            inspect(trainer, {**values, "model_name_or_path": model, "max_length": None}, SIM, worst_case, None)


def test_a_real_device_takes_no_stand_in_but_says_where_one_would_do(tiny_recipe: Path) -> None:
    with pytest.raises(ConfigError, match="the hub does not answer; a simulated card does not need it: --gpu NAME"):
        inspected(tiny_recipe, device="cpu", model_name_or_path="Qwen/Qwen3-4B")
    with pytest.raises(ConfigError, match="the dataset no/such cannot be") as raised:
        inspected(tiny_recipe, device="cpu", dataset_name="no/such")
    assert "--prompt-tokens" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has none"),
        ("{", "is not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"hidden_size": 8}', "must have model_type, num_hidden_layers, num_attention_heads, vocab_size"),
        (
            '{"model_type": "llama", "hidden_size": 8}',
            "must have num_hidden_layers, .*, vocab_size, intermediate_size",
        ),
        ('{"model_type": "gpt2", "n_embd": 8, "n_head": 2}', "must have n_layer, vocab_size, because the model's size"),
    ],
)
def test_a_config_that_says_no_size_is_refused_instead_of_a_default_one(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_a_config_may_leave_out_what_does_not_decide_its_size(tmp_path: Path) -> None:
    text = '{"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}'
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path)["n_embd"] == 8
    layers = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "full_attention"], "num_attention_heads": 2}
    written = {**layers, "hidden_size": 8, "vocab_size": 9, "intermediate_size": 8}  # the list has their number
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path) == written


def test_flash_attention_without_its_package_is_refused_on_a_real_device_and_simulated_on_another(
    tiny_recipe: Path,
) -> None:
    from autofit.trainers.inspection import check_model
    from autofit.trainers.trl_config import parse

    config = parse("grpo", values_of(tiny_recipe, attn_implementation="flash_attention_2", use_peft=False),
                   overrides={"use_cpu": True})  # fmt: skip
    check_model(None, config, simulated=True)
    with pytest.raises(ConfigError, match="needs the package flash_attn"):
        check_model(None, config)


def test_experts_that_are_no_linear_layers_are_told_and_counted_in_16_bits(tiny_recipe: Path, tmp_path: Path) -> None:
    """transformers' own replacement of layers says which parameters bitsandbytes would pack."""
    import torch
    from bitsandbytes.nn.modules import Linear4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, MixtralConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    from autofit.trainers.inspection import model_facts
    from autofit.trainers.trl_config import parse

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100, "num_local_experts": 4, "head_dim": 16}  # fmt: skip
    MixtralConfig(**sizes, architectures=["MixtralForCausalLM"]).save_pretrained(tmp_path)
    given = values_of(tiny_recipe, load_in_4bit=True, model_name_or_path=str(tmp_path), dtype="bfloat16")
    facts = model_facts(parse("grpo", given, overrides={"use_cpu": True}), AutoModelForCausalLM)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    whole = sum(p.numel() for p in model.parameters())
    replace_with_bnb_linear(model, ["lm_head"], quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    packed = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, Linear4bit))
    experts = 2 * 4 * 3 * 64 * 128
    assert whole - packed > experts
    assert facts.weights_bytes == int(0.53 * packed) + 2 * (whole - packed)
    assert facts.notes == (
        f"load_in_4bit leaves {format_bytes(2 * experts)} of weights as they are: bitsandbytes quantises linear "
        "layers, and MixtralExperts holds its matrices as parameters",
    )


def test_four_bits_need_a_linear_layer(tiny_recipe: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from autofit.trainers.inspection import check_model
    from autofit.trainers.trl_config import parse

    config = parse("grpo", values_of(tiny_recipe, load_in_4bit=True, lora_target_modules=["wte", "wpe"]),
                   overrides={"use_cpu": True})  # fmt: skip
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=0, vocab_size=9))
    with pytest.raises(ConfigError, match="load_in_4bit quantises linear layers, but GPT2LMHeadModel has none"):
        check_model(model, config)


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, offline_now = threading.Event(), list[bool]()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "_REACHED_S", 0.05)
    monkeypatch.setattr(models, "go_offline", lambda: offline_now.append(True))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: answer.wait(30) and [])
    before = time.monotonic()
    models.go_offline_without_a_hub()
    answer.set()
    assert offline_now == [True]
    assert time.monotonic() - before < 10
