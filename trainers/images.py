"""Images on a simulated card: how many tokens and pixels a model makes of each, and a stand-in for its processor.

A simulated card keeps no values, so an image is its (width, height) and the processor's files are not needed. Follows
transformers 5.23's processors: Qwen2-VL and its successors resize to a multiple of a patch within limits of pixels;
Idefics3 and SmolVLM split into square tiles; LLaVA 1.5, Gemma 3 and PaliGemma scale to one square.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForImageTextToText, ProcessorMixin

from autofit.errors import ConfigError

Size = Sequence[int]  # width and height in pixels
_MARK = "<image>"
_GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_TEXT_FIRST = ("qwen3_5", "qwen3_5_moe", "gemma3")  # tuned on text mostly: a sample that is made up has no image
_TILES = ("idefics3", "smolvlm")
_SQUARES = {"llava": None, "gemma3": "token_type_ids", "paligemma": "token_type_ids"}
# Limits of Qwen2VLImageProcessor where the model's own files do not say (transformers 5.23).
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280
_MOST_TILES_A_SIDE = 4  # of Idefics3ImageProcessor: size["longest_edge"] = 4 * max_image_size


class Vision(Protocol):
    """Images as a model sees them, given as sizes."""

    @property
    def largest(self) -> Size:
        """An image that makes the most tokens."""
        ...

    @property
    def token_types(self) -> str | None:
        """The model's input that marks the tokens of images, if it has one."""
        ...

    @property
    def in_made_up(self) -> bool:
        """True if a sample that is made up has an image."""
        ...

    def tokens(self, size: Size) -> int: ...

    def features(self, samples: Sequence[Sequence[Size]]) -> dict[str, torch.Tensor]:
        """The model's inputs for the images of each sample."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchGrid:
    """Patches of an image whose sides are multiples of `merge` patches, within limits of pixels."""

    patch: int
    merge: int
    values: int  # of a patch: channels, frames and pixels
    least_pixels: int
    most_pixels: int
    token_types: str | None = "mm_token_type_ids"  # noqa: S105  (a name)
    in_made_up: bool = True

    @property
    def largest(self) -> Size:
        unit = self.patch * self.merge
        units = self.most_pixels // unit**2
        rows = max(range(math.isqrt(units) // 2 + 1, math.isqrt(units) + 1), key=lambda rows: units // rows * rows)
        return units // rows * unit, rows * unit

    def tokens(self, size: Size) -> int:
        rows, columns = self._patches(size)
        return rows * columns // self.merge**2

    def features(self, samples: Sequence[Sequence[Size]]) -> dict[str, torch.Tensor]:
        grids = [(1, *self._patches(size)) for sizes in samples for size in sizes]
        count = sum(rows * columns for _, rows, columns in grids)
        return {"pixel_values": torch.zeros(count, self.values), "image_grid_thw": torch.tensor(grids)}

    def _patches(self, size: Size) -> tuple[int, int]:
        """Rows and columns of patches, after resizing as Qwen2VLImageProcessor's smart_resize does."""
        unit, (width, height) = self.patch * self.merge, size
        sides = [max(unit, round(side / unit) * unit) for side in (height, width)]
        if sides[0] * sides[1] > self.most_pixels:
            by = math.sqrt(height * width / self.most_pixels)
            sides = [max(unit, math.floor(side / by / unit) * unit) for side in (height, width)]
        elif sides[0] * sides[1] < self.least_pixels:
            by = math.sqrt(self.least_pixels / (height * width))
            sides = [math.ceil(side * by / unit) * unit for side in (height, width)]
        return sides[0] // self.patch, sides[1] // self.patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """Squares of one size: the image scaled to one, and with `splits` the tiles of the image too."""

    side: int
    each: int  # tokens of a square
    splits: bool = False
    token_types: str | None = None
    in_made_up: bool = True

    @property
    def largest(self) -> Size:
        side = self.side * (_MOST_TILES_A_SIDE if self.splits else 1)
        return side, side

    def tokens(self, size: Size) -> int:
        return self._squares(size) * self.each

    def features(self, samples: Sequence[Sequence[Size]]) -> dict[str, torch.Tensor]:
        counts = [sum(map(self._squares, sizes)) for sizes in samples]
        shape = (len(counts), max(counts)) if self.splits else (sum(counts),)
        pixels = {"pixel_values": torch.zeros(*shape, 3, self.side, self.side)}
        mask = {"pixel_attention_mask": torch.ones(*shape, self.side, self.side, dtype=torch.long)}
        return {**pixels, **mask} if self.splits else pixels

    def _squares(self, size: Size) -> int:
        if not self.splits:
            return 1
        longest = self.side * _MOST_TILES_A_SIDE
        sides = [math.ceil(side * longest / max(size) / self.side) for side in size]
        return sides[0] * sides[1] + 1  # and the whole image, scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Of a model whose images are not known here: it is simulated on text."""

    kind: str
    token_types: str | None = None
    in_made_up: bool = False

    @property
    def largest(self) -> Size:
        raise self._error

    def tokens(self, size: Size) -> int:
        raise self._error

    def features(self, samples: Sequence[Sequence[Size]]) -> dict[str, torch.Tensor]:
        raise self._error

    @property
    def _error(self) -> ConfigError:
        known = ", ".join((*_GRIDS, *_TILES, *_SQUARES))
        return ConfigError(
            f"images of model_type {self.kind!r} cannot be simulated yet, only those of {known}; a dataset without the "
            "columns image and images is simulated on text"
        )


def sees(config: Any) -> bool:
    """True if the model of `config` takes images."""
    return (
        getattr(config, "vision_config", None) is not None
        and type(config) in AutoModelForImageTextToText._model_mapping
    )


def vision_of(config: Any, model: str) -> Vision:
    """Images as the model of `config`, by name `model`, sees them."""
    kind, vision = config.model_type, config.vision_config
    in_made_up = kind not in _TEXT_FIRST
    if kind in _GRIDS:
        least, most = _limits(model)
        patch = vision.patch_size
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        return PatchGrid(
            patch=patch, merge=vision.spatial_merge_size, values=channels * vision.temporal_patch_size * patch**2,
            least_pixels=least, most_pixels=most, in_made_up=in_made_up,
        )  # fmt: skip
    patches = (vision.image_size // vision.patch_size) ** 2 if kind in _TILES or kind in _SQUARES else 0
    if kind in _TILES:
        return Squares(side=vision.image_size, each=patches // config.scale_factor**2, splits=True)
    if kind in _SQUARES:
        each = getattr(config, "mm_tokens_per_image", None) or patches
        return Squares(side=vision.image_size, each=each, token_types=_SQUARES[kind], in_made_up=in_made_up)
    return Unknown(kind=kind)


def _limits(model: str) -> tuple[int, int]:
    """The least and the most pixels of an image, from the processor's files where they are here."""
    from huggingface_hub import try_to_load_from_cache

    name = "preprocessor_config.json"
    found = Path(model) / name if os.path.isdir(model) else try_to_load_from_cache(model, name)
    said: Mapping[str, Any] = {}
    if isinstance(found, str | Path) and Path(found).is_file():
        said = json.loads(Path(found).read_text(encoding="utf-8"))
    size = said.get("size") or {}
    least = said.get("min_pixels") or size.get("shortest_edge") or _LEAST_PIXELS
    return int(least), int(said.get("max_pixels") or size.get("longest_edge") or _MOST_PIXELS)


# -- the processor ----------------------------------------------------------------------------------------------------


class StandInProcessor(ProcessorMixin):  # type: ignore[misc]
    """A processor to TRL, of images given as sizes: tokens and pixels of the right shapes, without values."""

    def __init__(self, tokenizer: Any, vision: Vision, image_token: int | None) -> None:
        self.tokenizer, self.chat_template = tokenizer, None
        self.vision, self._image_token = vision, image_token

    def count(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Size]) -> int:
        """Tokens of a prompt of plain text with `images`."""
        return len(self._tokens(_MARK * len(images) + self._rendered(messages), images))

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        flat = [{**message, "content": _text(message["content"])} for message in messages]
        if self.tokenizer.chat_template is None:  # some models have theirs beside the processor's files
            return "".join(message["content"] for message in flat)
        more = {"add_generation_prompt": kwargs.get("add_generation_prompt", True)}
        return str(self.tokenizer.apply_chat_template(flat, tokenize=False, **more))

    def apply_chat_template(self, conversation: Any, *_: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        many = conversation if conversation and isinstance(conversation[0], list) else [conversation]
        texts = [self._rendered(messages, **kwargs) for messages in many]
        if not tokenize:
            return texts if many is conversation else texts[0]
        images = [[part["image"] for part in _parts(messages, "image")] for messages in many]
        return self(text=texts, images=images, **{**kwargs, **kwargs.get("processor_kwargs", {})})

    def __call__(self, images: Any = None, text: Any = None, return_tensors: str | None = None, **kwargs: Any) -> Any:
        """The inputs of `text` with an image's tokens at each mark, as lists or, padded, as tensors."""
        texts = [text] if isinstance(text, str) else text
        pictures = images or [[] for _ in texts]
        rows = [self._tokens(*both) for both in zip(texts, pictures, strict=True)]
        most = kwargs.get("max_length") if kwargs.get("truncation") else None
        if most is not None and any(_IMAGE in row[most:] for row in rows):
            raise no_room(most, rows[0].count(_IMAGE))
        rows = [row[:most] for row in rows]
        found: dict[str, Any] = {
            "input_ids": [[self._image_token if token == _IMAGE else token for token in row] for row in rows],
            "attention_mask": [[1] * len(row) for row in rows],
        }
        if images is not None and any(pictures):
            if self.vision.token_types is not None:
                found[self.vision.token_types] = [[int(token == _IMAGE) for token in row] for row in rows]
            found |= self.vision.features(pictures)
        return _padded(found, right=kwargs.get("padding_side") == "right") if return_tensors == "pt" else found

    def _tokens(self, text: str, images: Sequence[Size]) -> list[int]:
        first, *rest = text.split(_MARK)
        row = list(self.tokenizer(first, add_special_tokens=False)["input_ids"])
        for part, size in zip(rest, images, strict=True):
            row += [_IMAGE] * self.vision.tokens(size)
            row += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return row


_IMAGE = -1  # stands for the model's own image token, which the stand-in tokenizer's vocabulary may contain


def no_room(limit: int, tokens: int) -> ConfigError:
    """Of a limit that would cut a sample's images."""
    return ConfigError(
        f"max_length={limit} must leave room for the {tokens:,} tokens of a sample's images; give more, or null for no "
        "limit"
    )


def _parts(messages: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (
        part for message in messages for part in message["content"] if isinstance(part, dict) and part["type"] == kind
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(_MARK if part["type"] == "image" else part["text"] for part in content)


def _padded(found: Mapping[str, Any], *, right: bool) -> dict[str, torch.Tensor]:
    """Lists as tensors, padded with zeros on one side."""
    longest = max(map(len, found["input_ids"]))

    def padded(row: list[int]) -> list[int]:
        blank = [0] * (longest - len(row))
        return row + blank if right else blank + row

    return {
        key: value if isinstance(value, torch.Tensor) else torch.tensor([padded(row) for row in value])
        for key, value in found.items()
    }
