"""Another tool's file as the recipe of one of our trainers, and the draft from which readers make it. Free of torch.

Each key of the file is taken (it has a place in the recipe), ignored (by the tool's own list of keys irrelevant to
memory), named in a note, or refused in one sentence. A key left over is none of the tool's.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from autofit.errors import ConfigError, UnknownKeyError, nearest, quoted
from autofit.frontends import sharing
from autofit.recipe.keys import ALLOCATOR, GROWS

# -- a file of another tool, as the recipe of one of our trainers, and its words --------------------------------------


class WrongValuesError(ConfigError):
    """Values that the file's own tool refuses too."""


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
    derived: tuple[str, ...] = ()  # keys of the recipe that the tool works out itself, and has no keys for
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
    """Facts of a file, and its parts that the tool refuses. `unread` are keys whose value lies outside the file.

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
    held = "held"
    autocast = f", computed in {cast} (autocast)" if cast and cast != dtype else ""
    if cast and sharing.casts_by_deepspeed(foreign.launch):
        held, autocast = "loaded", f", all in {cast} under DeepSpeed, with float32 copies of what is trained"
    elif cast and sharing.casts_by_accelerate(foreign.launch) and not (values.get("keeps_dtype") or dtype == "float32"):
        held, autocast = "loaded", f", sharded in float32 where trained, computed in {cast}"
    if values.get("lora_rank"):  # verl casts adapters to the dtype of the model
        return f"LoRA of rank {values['lora_rank']} and a frozen model, held in {dtype}"
    if values.get("use_peft"):
        other = values.get("peft_adapter")
        rank = values.get("lora_r", _TRLS_RANK)
        kind = other.get("peft_type") if isinstance(other, Mapping) else f"LoRA of rank {rank}"
        own = "bfloat16" if bits and foreign.trainer != "hf" else "float32"  # TRL's trainers cast those of such models
        adapters = f"{kind} in {values.get('adapter_dtype') or own}"
        base = f"in {bits} bits" if bits else f"in {dtype}"
        if sharing.casts_by_accelerate(foreign.launch):  # what is frozen stays as it is
            held, autocast = "held", ""
        return f"{adapters}, on a frozen model {held} {base}{autocast}"
    if values.get("bottleneck"):
        width = values["bottleneck"]
        return f"adapters of width {width} behind each MLP in float32, on a frozen model {held} in {dtype}{autocast}"
    if values.get("reft_rank"):
        return f"LoReFT of rank {values['reft_rank']} at each layer, on a frozen model {held} in {dtype}{autocast}"
    if values.get("added_layers"):
        return f"{values['added_layers']} added layers trained, beside frozen ones, all {held} in {dtype}{autocast}"
    if (count := values.get("trainable_layers")) is not None:
        assert isinstance(count, int)
        place = "" if values.get("spread_layers") else "the last " if count > 0 else "the first "
        layers = f"{place}{abs(count)} layers" if count else ""
        if isinstance(parts := values.get("layer_modules"), list) and count:
            layers = f"{' and '.join(parts)} of {layers}"
        rest = "all outside of the layers" if values.get("trains_rest") else ""
        if isinstance(extra := values.get("extra_modules"), list):
            rest = ", ".join(extra)
        trained = (
            f"{' and '.join(filter(None, (layers, rest)))} trained, {held} in {values.get('adapter_dtype') or dtype}"
        )
        return f"{trained}, the others in {dtype}{autocast}"
    return f"all weights trained, {held} in {dtype}{autocast}"


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


# -- a recipe in the making -------------------------------------------------------------------------------------------

# Models that see or hear, by the names that their makers give them; a tool's own keys for images count too.
_SEES = re.compile(
    r"(?:-|\d)V(?:-|$)|(?i:(?:^|[-_/.\d])(?:vl\d*|vlm|vision|audio|ocr|ovis\d*|mllm|mllama)(?:$|[-_/.])"
    r"|llava|internvl|minicpm-?o|smolvlm|pixtral|voxtral|omni|paligemma|idefics|jina-reranker-m\d)"
)
_MOST_NAMED = 4
# Allocator settings with which Axolotl starts all trainings (cli/main.py, torch 2.9 and later), LLaMA-Factory those of
# more than one process (launcher.py: OPTIM_TORCH, which is on by itself), and verl's worker all of its passes
# (engine_workers.py, the end of update_weights).
GROWING_SEGMENTS = {ALLOCATOR: GROWS}
_NUMBERS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps",
            "num_train_epochs", "seed", "neftune_noise_alpha", "torch_empty_cache_steps")  # fmt: skip
_SAME_VALUE = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing_kwargs")


@dataclass(slots=True)
class Draft:
    """A recipe in the making. `given` has the file's keys, `_read` those already taken."""

    tool: str
    given: Mapping[str, object]
    values: dict[str, object] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, object] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _read: set[str] = field(default_factory=set)
    _wrong: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        """Keep an error that the tool would report, to be told with the rest."""
        self._wrong.append(text)

    @contextmanager
    def told_together(self) -> Iterator[None]:
        """Say with a refusal what was found wrong before it."""
        try:
            yield
        except UnknownKeyError:
            raise
        except ConfigError as error:
            if not self._wrong or isinstance(error, WrongValuesError):
                raise
            raise WrongValuesError("; ".join((*self._wrong, error.marked))) from error

    # -- what the file says ---------------------------------------------------------------------------------------

    def raw(self, key: str, usual: object = None) -> object:
        """The value of `key`; if the file has none, the tool's `usual` one, which is recorded as its default."""
        self._read.add(key)
        given = self.given.get(key)
        if given is None and usual is not None:
            self.defaults[key] = usual
        return usual if given is None else given

    def whole(self, key: str, usual: int | None = None, *, least: int = 1) -> int | None:
        found = number(self.raw(key, usual))
        if found is None or found != int(found) or found < least:
            if self.given.get(key) is not None:
                self.wrong(f"{key} must be a whole number of {least} or more; got {quoted(self.given[key])}")
            return usual
        return int(found)

    def number(self, key: str, usual: float | None = None) -> float | None:
        given = self.raw(key, usual)
        found = number(given)
        if found is None and given is not None:
            self.wrong(f"{key} must be a number; got {quoted(given)}")
            return usual
        return found

    def is_on(self, key: str, usual: bool = False) -> bool:
        """True if `key` is on; a default that is off stays unrecorded."""
        self._read.add(key)
        given = self.given.get(key)
        if given is None:
            if usual:
                self.defaults[key] = True
            return usual
        found = truth(given)
        if found is None:
            self.wrong(f"{key} must be true or false; got {quoted(given)}")
        return bool(found)

    def truth(self, key: str, usual: bool | None) -> bool | None:
        """True if `key` is on; by default `usual`: None if the tool leaves it open."""
        return self.is_on(key) if self.given.get(key) is not None else usual

    def text(self, key: str, usual: str | None = None, *, choices: Collection[str] = ()) -> str | None:
        given = self.raw(key, usual)
        if given is None:
            return None
        if not isinstance(given, str) or (choices and given not in choices):
            must = f"one of {', '.join(choices)}" if choices else "text"
            near = nearest(str(given), choices) if choices else ""
            self.wrong(f"{key} must be {must}; got {quoted(given)}{near}")
            return usual
        return given

    def names(self, key: str, usual: str | None = None) -> list[str] | None:
        """The names in a list, or in a text with commas."""
        given = self.raw(key, usual)
        if given is None:
            return None
        listed = given if isinstance(given, list) else str(given).split(",")
        return [str(name).strip() for name in listed if str(name).strip()]

    def mapping(self, key: str) -> Mapping[str, object]:
        given = self.raw(key)
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            self.wrong(f"{key} must be a mapping; got {quoted(given)}")
            return {}
        return {str(name): value for name, value in given.items()}

    def says(self, key: str) -> bool:
        """True if the file turns `key` on or sets it; False for null, false, 0, "" and []."""
        self._read.add(key)
        return is_set(self.given.get(key))

    # -- what becomes of it ---------------------------------------------------------------------------------------

    def put(self, ours: str, value: object, key: str | None = None) -> None:
        """Set a value of the recipe, which the tool calls `key`. None leaves it to our trainer's default."""
        if value is not None:
            self.values[ours] = value
            self.keys[ours] = key or ours

    def without_dropout(self, key: str) -> None:
        """Leave the adapter's dropout out, as trainers do whose loss is over whole answers; `key` is why."""
        if self.values.get("lora_dropout"):
            self.put("lora_dropout", 0.0, key)
            self.defaults.pop("lora_dropout", None)

    def same(self, *names: str) -> None:
        """Take keys over that mean the same in transformers. Numbers such as 1e-5, which YAML has as text, are read."""
        for name in names:
            given = self.raw(name)
            if given is None or given == "":
                continue
            found = number(given)
            if found is None and name in _NUMBERS:
                self.wrong(f"{name} must be a number; got {quoted(given)}")
            whole = found is not None and not isinstance(given, float) and found == int(found) and "." not in str(given)
            self.put(name, int(found) if whole and found is not None else given if found is None else found)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise ConfigError for those of these keys that the file turns on: the reason of each is one sentence."""
        named: dict[str, list[str]] = {}
        for key, reason in reasons.items():
            if self.says(key):
                named.setdefault(reason, []).append(key)
        if named:
            raise ConfigError("; ".join(f"{', '.join(keys)}: {reason}" for reason, keys in named.items()))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def name(self, effects: Mapping[str, str]) -> None:
        """Note the effect of each of these keys that the file turns on."""
        for key, effect in effects.items():
            if self.says(key):
                self.note(f"{key}: {effect}")

    def ignore(self, names: Collection[str]) -> None:
        """Take keys that are irrelevant to memory and to the batch."""
        self._read.update(names)

    def left(self) -> tuple[str, ...]:
        """Untaken keys of the file."""
        return tuple(key for key in self.given if key not in self._read)

    def check_model(self, *named: object) -> None:
        """Raise ConfigError where a name is of a model that sees or hears."""
        for name in named:
            if isinstance(name, str) and _SEES.search(name):
                raise ConfigError(f"{name} trains on images, video or sound, and only training on text is read")

    def foreign(
        self, trainer: str, *, launch: Mapping[str, object] | None = None, ranks: int | None = None,
        prompt_tokens: int | None = None, strict: bool = True,
    ) -> Foreign:  # fmt: skip
        """The whole. Raises ConfigError for impossible values, and, if the tool is `strict`, for unknown keys."""
        unknown = self.left()
        named = "; ".join(f"unknown key {key!r}{nearest(key, self._read)}" for key in unknown[:_MOST_NAMED])
        more = f"; {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        if unknown and (strict or (self._wrong and nearest(unknown[0], self._read))):  # what is missing may be misspelt
            self.wrong(f"{named}{more}")
        elif unknown:
            self.note(f"{self.tool} ignores what it does not know: {named}{more}")
        if self._wrong and unknown and strict:
            error = UnknownKeyError("; ".join(self._wrong))
            error.keys = unknown
            raise error
        if self._wrong:
            raise WrongValuesError("; ".join(self._wrong))
        return Foreign(
            tool=self.tool, trainer=trainer, values=self.values, launch=launch or {}, ranks=ranks,
            prompt_tokens=prompt_tokens, keys=self.keys, defaults=self.defaults, fixed=frozenset(self.fixed),
            notes=tuple(self.notes), unknown={key: f"unknown key {key!r}{nearest(key, self._read)}" for key in unknown},
        )  # fmt: skip


# How a tool says a key of a recipe: by another name, by the keys and values that a function makes of the value, or not
# at all (None, also of the function).
Saying = str | Callable[[object], Mapping[str, object] | None] | None


def said(foreign: Foreign, changes: Mapping[str, object], own: Mapping[str, Saying]) -> dict[str, object]:
    """{the tool's key: value} of `changes`: by `own`, or under the same value in the key that the file's reader took.

    Raises ConfigError for a change that the tool has no key for.
    """
    found: dict[str, object] = {}
    for key, value in changes.items():
        if key in foreign.fixed and value != foreign.values.get(key):
            saying: Saying = None
        else:
            saying = own.get(key, foreign.keys.get(key, key if key in _SAME_VALUE else None))
        theirs = {saying: value} if isinstance(saying, str) else None if saying is None else saying(value)
        if theirs is None:
            raise ConfigError(f"{key}: {quoted(value)} has no key in {foreign.tool}")
        found |= theirs
    return found


def number(given: object) -> float | None:
    """A finite number, also where YAML has text, such as 1e-5."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        found = float(given)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def is_set(given: object) -> bool:
    """True if a value turns something on or sets it; False for null, false, 0, "", [] and {}."""
    return truth(given) is not False and given not in (None, "", 0, [], {})


def truth(given: object) -> bool | None:
    """True or false as YAML, JSON or a command line spells it; None for any other value."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    return words.get(str(given).strip().lower())
