"""Architectures known offline: facts from published config.json files, by model name. Free of torch."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import cast

import yaml

from autofit.files import read_json
from autofit.recipe.yaml_file import may_read

Config = Mapping[str, object]
# Owners whose models are copies of others' under the same name, or with "Meta-" before it.
_MIRRORS = ("unsloth", "nousresearch", "llm-research", "ai-modelscope", "modelscope")
# Ends of the names of copies in 4 bits, the longest first, and what their config.json says of their weights. The first
# leaves some layers in 16 bits, which differ from model to model.
_IN_4_BITS = ("-unsloth-bnb-4bit", "-bnb-4bit")
_SIZE = re.compile(r"e?\d+[bm]")  # of 1.5b the part after the dot; E4B is a size of Gemma's
_STORED = {"gptq", "awq", "gguf", "exl2", "aqlm", "fp8", "int4", "int8", "vl", "vision", "embedding", "reranker", "moe"}
_NF4: Config = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model's shape: the keys of its config.json that decide its tensors, and its published parameter count."""

    name: str
    config: Config
    parameters: int

    @property
    def text_config(self) -> Config:
        """The part of `config` that is of the text model."""
        return cast(Config, self.config.get("text_config", self.config))


def names() -> tuple[str, ...]:
    """The names of all models in the catalogue, as on the hub."""
    return tuple(_all())


def architecture(name: str) -> Architecture | None:
    """The entry of the model `name`, if any, in any case or as a mirror has it (unsloth/Meta-Llama-3.1-8B).

    A copy in 4 bits (unsloth/Qwen3-8B-bnb-4bit) has the model's shape and a quantization_config. None for one of a
    model that is packed itself (gpt-oss, DeepSeek-V3): its experts are stored in a way of its own.
    """
    found = _all()
    if name in found:
        return found[name]
    owner, _, model = name.lower().partition("/")
    plain = next((name[: -len(end)] for end in _IN_4_BITS if model.endswith(end)), None)
    if plain is not None:
        copied = architecture(plain)
        if copied is None or "quantization_config" in copied.config:
            return None
        return replace(copied, name=name, config={**copied.config, "quantization_config": _NF4})
    if owner not in _MIRRORS:
        return {key.lower(): value for key, value in found.items()}.get(name.lower())
    same = [value for key, value in found.items() if _without_owner(key) == model.removeprefix("meta-")]
    return same[0] if same and all(one.config == same[0].config for one in same) else None


def others() -> Mapping[str, Architecture]:
    """{name in small letters: entry} of models that only scripts load: encoders, models of two stacks, older ones."""
    return {key.lower(): value for key, value in _all("others").items()}


def base_of(name: str) -> Architecture | None:
    """The model whose name and size stand in `name`: mistralai/Mistral-7B-v0.1 for someone/dolphin-2.1-mistral-7b.

    Of several the one with most parts of the name. None if there is none, and for weights stored in another way.
    """
    asked = _parts(name.rpartition("/")[2])
    found = {key: _base_parts(key) for key in _all()}
    same = [key for key, parts in found.items() if _is_in(asked, parts) and not _STORED & {*asked} - {*parts}]
    return _all()[max(same, key=lambda key: len(found[key]))] if same else None


def _is_in(asked: list[str], parts: list[str]) -> bool:
    """True if `parts`, with a size, stand in a row in a name's."""
    has_size = any(_SIZE.fullmatch(part) for part in parts)
    return has_size and any(asked[n : n + len(parts)] == parts for n in range(len(asked)))


def _parts(name: str) -> list[str]:
    return re.split(r"[-_. ]", name.lower().removeprefix("meta-"))


def _base_parts(name: str) -> list[str]:
    """The parts of a model's name up to its size."""
    parts = _parts(name.rpartition("/")[2])
    last = [n for n, part in enumerate(parts) if _SIZE.fullmatch(part)]
    return parts[: last[0] + 1] if last else parts


def of_folder(name: str) -> str | None:
    """The name on the hub of the model that a folder of this name holds, if it is known."""
    same = [key for key in _all() if key.partition("/")[2].lower() == name.lower()]
    return same[0] if same and all(_all()[key].config == _all()[same[0]].config for key in same) else None


def _without_owner(name: str) -> str:
    return name.lower().partition("/")[2].removeprefix("meta-")


def text_config(model: str) -> Config:
    """The config.json of the text model in a folder, or as the catalogue has it; {} if both lack `model`."""
    path = Path(model) / "config.json"
    known = architecture(model)
    is_there = may_read(path) and os.path.isfile(path)
    config = read_json(path) if is_there else None if known is None else known.config
    inner = (config or {}).get("text_config", config)
    return inner if isinstance(inner, Mapping) else {}


def attention_heads(model: str) -> int | None:
    """Attention heads of a model, if they are known."""
    heads = text_config(model).get("num_attention_heads")
    return heads if isinstance(heads, int) else None


@cache
def _all(section: str = "models") -> dict[str, Architecture]:
    text = resources.files("autofit.recipe").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    content = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  (a SafeLoader)
    found: dict[str, Architecture] = {}
    for name, entry in content[section].items():
        shape = {**content["families"].get(entry.get("family"), {}), **entry["config"]}
        for variant, changes in {name: {}, **entry.get("also", {})}.items():
            config = cast(Config, {**shape, **changes})
            found[variant] = Architecture(name=variant, config=config, parameters=int(entry["parameters"]))
    return found
