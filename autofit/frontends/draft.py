"""A recipe in the making: a reader takes the keys of another tool's file one by one, until none is left. No torch here.

Each key of the file is taken (it has a place in the recipe), ignored (by the tool's own list of what has no effect on
memory), named in a note, or refused in one sentence. What is then left is no key of the tool.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from autofit.errors import ConfigError, UnknownKeyError, nearest, quoted
from autofit.frontends.foreign import Foreign, WrongValuesError

# Models that see or hear, by the names that their makers give them; a tool's own keys for images count too.
_SEES = re.compile(
    r"(?:-|\d)V(?:-|$)|(?i:(?:^|[-_/.\d])(?:vl\d*|vlm|vision|audio|ocr|ovis\d*|mllm|mllama)(?:$|[-_/.])"
    r"|llava|internvl|minicpm-?o|smolvlm|pixtral|voxtral|omni|paligemma|idefics|jina-reranker-m\d)"
)
_MOST_NAMED = 4
# Allocator settings with which Axolotl starts all trainings (cli/main.py, torch 2.9 and later), LLaMA-Factory those of
# more than one process (launcher.py: OPTIM_TORCH, which is on by itself), and verl's worker all of its passes
# (engine_workers.py, the end of update_weights).
GROWING_SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
_NUMBERS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "max_steps",
            "seed", "neftune_noise_alpha", "torch_empty_cache_steps")  # fmt: skip
_SAME_VALUE = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing_kwargs")


@dataclass(slots=True)
class Draft:
    """A recipe in the making. `given` has the file's keys, of which `_read` have been taken."""

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
        """Keep what the tool does not take, to be told with the rest."""
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
        """The value of `key`; the tool's `usual` one, which is recorded as its default, where the file has none."""
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
        """Whether `key` is on; a default that is off is not recorded."""
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
        """Whether `key` is on; where the file does not say, `usual`: None where the tool leaves it open."""
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
        """Whether the file turns `key` on or sets it to something; nothing, false, 0, "" and [] do not."""
        self._read.add(key)
        given = self.given.get(key)
        return truth(given) is not False and given not in (None, "", 0, [], {})

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
        if refused := [f"{key}: {reason}" for key, reason in reasons.items() if self.says(key)]:
            raise ConfigError("; ".join(refused))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def name(self, effects: Mapping[str, str]) -> None:
        """Note the effect of each of these keys that the file turns on."""
        for key, effect in effects.items():
            if self.says(key):
                self.note(f"{key}: {effect}")

    def ignore(self, names: Collection[str]) -> None:
        """Take keys that have no effect on memory or on the batch."""
        self._read.update(names)

    def left(self) -> tuple[str, ...]:
        """Keys of the file that nobody took."""
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
        """The whole. Raises ConfigError for values that cannot be, and, if the tool is `strict`, for unknown keys."""
        unknown = self.left()
        named = "; ".join(f"unknown key {key!r}{nearest(key, self._read)}" for key in unknown[:_MOST_NAMED])
        more = f"; {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        if unknown and strict:
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


def truth(given: object) -> bool | None:
    """True or false as YAML, JSON or a command line says it; None for what is neither."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    return words.get(str(given).strip().lower())
