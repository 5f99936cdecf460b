"""A file of another tool, as the recipe of one of our trainers that trains as that tool would, and its words.

No torch here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from autofit.errors import ConfigError
from autofit.frontends import sharing


class WrongValuesError(ConfigError):
    """Values that the file's own tool does not take either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A recipe made from a file of another tool: its trainer and values, and what the reader of it should know.

    `launch` holds the keys of an accelerate config, {} where the file starts one process by itself. `keys` has the
    tool's own name of a recipe's key, so that answers can be given in the user's words. `defaults` are the tool's own
    keys and values that count and that the file does not say.
    """

    tool: str  # "LLaMA-Factory"
    trainer: str  # "hf", "grpo", "verl", ...
    values: Mapping[str, object]  # as the YAML of that trainer has them
    launch: Mapping[str, object] = field(default_factory=dict)
    ranks: int | None = None  # None: the file does not say
    prompt_tokens: int | None = None  # of the synthetic sample that stands for the tool's data
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()  # keys of the recipe that the tool takes no other value of beside the others
    notes: tuple[str, ...] = ()  # what the tool does otherwise, and what is not simulated, a sentence each
    unknown: Mapping[str, str] = field(default_factory=dict)  # keys that the tool passes over, each in half a sentence


_GPUS = ("trainer.nnodes", "trainer.n_gpus_per_node")  # verl's keys of how many it is launched on
NOT_SIMULATED = "not simulated"  # name of the fact that says why


class Line(NamedTuple):
    """A fact and its name."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Facts of a file, and what its tool does not take of it. `unread` are keys whose value is not in the file.

    `notes` say what a simulation of it leaves out or takes in its place; `unknown` are keys its tool does not know.
    """

    tool: str
    lines: tuple[Line, ...]
    unknown: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def shown(self) -> Iterator[Line]:
        """All of it, a name and a text each, as it is printed."""
        yield from self.lines
        yield from (Line("error", text) for text in self.wrong)
        yield from (Line("note", text) for text in self.notes)
        if self.unread:
            gpus = "; --num-processes N gives the GPUs" if any(key in _GPUS for key in self.unread) else ""
            keys = ", ".join(self.unread)
            yield Line("not read", f"{keys}: the script does not say the value for certain{gpus}")

    def to_json(self) -> dict[str, object]:
        return {
            "tool": self.tool, "facts": dict(self.lines), "wrong": list(self.wrong), "unread": list(self.unread),
            "notes": list(self.notes),
        }  # fmt: skip


_TRAINED_BY = {"hf": "a plain transformers Trainer", "grpo": "TRL's GRPO trainer", "dpo": "TRL's DPO trainer",
               "reward": "TRL's reward trainer", "sft": "TRL's SFT trainer", "verl": "verl's FSDP worker"}  # fmt: skip
_OBJECTIVES = {"sft": "the model's own loss on full logits", "asft": "ASFT on full logits",
               "dpo": "DPO on full logits",
               "kto": "KTO on full logits", "orpo": "ORPO on full logits", "simpo": "SimPO on full logits",
               "cpo": "CPO on full logits", "classify": "a loss over labels of samples",
               "label_tokens": "a loss over labels of tokens",
               "reward": "a pairwise loss", "gkd": "GKD on full logits", "embed": "a loss over embeddings of texts",
               "rerank": "a loss over scores of documents", "diffusion": "a loss over masked words",
               "ebft": "REINFORCE with rewards of hidden states"}  # fmt: skip
_TRLS_RANK = 16  # of `trl`'s ModelConfig; the other tools' readers give theirs


def lines(foreign: Foreign) -> Iterator[Line]:
    """The trainer that stands for the tool's, the weights and their dtypes, the rows, the sharing and the defaults."""
    values = foreign.values
    objective = _OBJECTIVES.get(str(values.get("objective")))
    yield Line("simulated as", ", ".join(filter(None, (_TRAINED_BY.get(foreign.trainer, foreign.trainer), objective))))
    yield Line("weights", _weights(foreign))
    yield Line("rows", _rows(foreign))
    if foreign.launch:
        yield Line("sharing", sharing.words(foreign.launch))
    if foreign.defaults:
        yield Line("defaults", ", ".join(f"{key} {_shown(value)}" for key, value in foreign.defaults.items()))


def summary(foreign: Foreign) -> str:
    """The trainer and the weights in half a sentence."""
    trained_by = _TRAINED_BY.get(foreign.trainer, f"{foreign.tool}'s {foreign.trainer.upper()} trainer")
    return (
        f"{trained_by}, {_weights(foreign)}" if "dtype" in foreign.values or foreign.trainer == "verl" else trained_by
    )


def _weights(foreign: Foreign) -> str:
    values = foreign.values
    dtype, bits = (
        str(values.get("dtype") or values.get("model_dtype") or "float32"),  # as a model is loaded without one
        next((b for b in (4, 8) if values.get(f"load_in_{b}bit")), None),
    )
    cast = next((name for key, name in (("bf16", "bfloat16"), ("fp16", "float16")) if values.get(key)), None)
    autocast = f", computed in {cast} (autocast)" if cast and cast != dtype else ""
    if values.get("lora_rank"):  # verl casts adapters to the dtype of the model
        return f"LoRA of rank {values['lora_rank']} and a frozen model, held in {dtype}"
    if values.get("use_peft"):
        other = values.get("peft_adapter")
        rank = values.get("lora_r", _TRLS_RANK)
        kind = other.get("peft_type") if isinstance(other, Mapping) else f"LoRA of rank {rank}"
        adapters = f"{kind} in {values.get('adapter_dtype') or 'float32'}"
        base = f"in {bits} bits" if bits else f"in {dtype}"
        return f"{adapters}, on a frozen model held {base}{autocast}"
    if values.get("bottleneck"):
        width = values["bottleneck"]
        return f"adapters of width {width} behind each MLP in float32, on a frozen model held in {dtype}{autocast}"
    if values.get("reft_rank"):
        return f"LoReFT of rank {values['reft_rank']} at each layer, on a frozen model held in {dtype}{autocast}"
    if values.get("added_layers"):
        return f"{values['added_layers']} added layers trained, beside frozen ones, all held in {dtype}{autocast}"
    if values.get("trainable_layers"):
        layers = f"{'' if values.get('spread_layers') else 'the last '}{values['trainable_layers']} layers"
        rest = " and all outside of the layers" if values.get("trains_rest") else ""
        trained = f"{layers}{rest} trained, held in {values.get('adapter_dtype') or dtype}"
        return f"{trained}, the others in {dtype}{autocast}"
    return f"all weights trained, held in {dtype}{autocast}"


def _rows(foreign: Foreign) -> str:
    values = foreign.values
    length = values.get("max_length", foreign.prompt_tokens)
    if foreign.trainer == "grpo":
        return f"prompts of {foreign.prompt_tokens:,} tokens, completions of {values.get('max_completion_length')}"
    tokens = f"{length:,} tokens" if isinstance(length, int) else "as many tokens as the data has"
    if values.get("packing"):
        apart = ", which see only themselves" if values.get("block_diagonal") else ""
        return f"{tokens}, packed from several samples{apart}"
    if values.get("pad_to_max_length"):
        return f"{tokens}, shorter samples padded to it"
    multiple = values.get("pad_to_multiple_of")
    return f"up to {tokens}, padded to the longest of a batch{f' and to a multiple of {multiple}' if multiple else ''}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
