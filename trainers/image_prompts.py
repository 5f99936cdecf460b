"""The longest prompt of a dataset with images, for a probe on a simulated card: messages, and sizes for images."""

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from autofit.errors import ConfigError, option
from autofit.plugin.protocol import Inspection

from .common import short
from .images import Size, StandInProcessor, sees, vision_of
from .trl_config import TrlConfig

COLUMNS = ("image", "images")


def processor_of(config: TrlConfig) -> StandInProcessor | None:
    """A stand-in for the processor of the recipe's model; None for a model that takes no images."""
    name, trust = config.model.model_name_or_path, bool(config.training.trust_remote_code)
    found = AutoConfig.from_pretrained(name, trust_remote_code=trust)
    if not sees(found):
        return None
    token = getattr(found, "image_token_id", None) or getattr(found, "image_token_index", None)
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    return StandInProcessor(tokenizer, vision_of(found, str(name)), token)


def for_text(config: TrlConfig) -> dict[str, Any]:
    """Arguments with which TRL's trainer of a model that takes images asks for no file of its processor: {} of others.

    TRL prepares rows without images by the processor's tokenizer alone.
    """
    processor = processor_of(config)
    return {} if processor is None else {"processing_class": processor.tokenizer}


def simulated_only(inspection: Inspection) -> None:
    """Raise ConfigError on a real device, where images would need the processor's files and the pixels."""
    if not inspection.simulated:
        raise ConfigError(f"images can be predicted on a simulated card only ({option('gpu', 'NAME')}), not probed")


def has_images(rows: Dataset) -> bool:
    return any(column in rows.column_names for column in COLUMNS)


def with_an_image(rows: Dataset, processor: StandInProcessor) -> Dataset:
    """Synthetic rows, each with one image of the size that makes the most tokens, if the model's have one."""
    vision = processor.vision
    return rows.add_column("images", [[list(vision.largest)]] * len(rows)) if vision.in_made_up else rows


def longest_row(rows: Dataset, processor: StandInProcessor, column: str) -> tuple[dict[str, Any], int, int]:
    """(the row with the most tokens, images included; its tokens; the fewest of any row).

    `column` has text or messages.
    """
    best: tuple[dict[str, Any], int] | None = None
    least = 0
    for row in rows:
        messages, images = _messages(row[column]), _sizes(row)
        tokens = processor.count(messages, images)
        least = tokens if best is None else min(least, tokens)
        if best is None or tokens > best[1]:
            best = {column: messages, "images": images}, tokens
    if best is None:
        raise ConfigError("the train split of the dataset is empty; the trainer needs at least one sample")
    return *best, least


def note_of(processor: StandInProcessor, row: Mapping[str, Any], *, made_up: bool) -> str:
    """A sentence on the images that the probe trains on."""
    if not row["images"]:
        return "this model takes images, but its probe has none: it is simulated on text"
    each = [processor.vision.tokens(size) for size in row["images"]]
    made = "the synthetic prompt has one image at the processor's limit (transformers' own, without the model's files)"
    which = made if made_up else "the longest prompt's images"
    return f"images are simulated by size: {which}, {sum(each):,} tokens; values of pixels are not read"


def _messages(content: Any) -> list[dict[str, str]]:
    """Text, or messages with or without places for images, as messages of plain text: TRL puts images in again."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    return [{"role": m["role"], "content": _plain(m["content"])} for m in content]


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or ())


def _sizes(row: Mapping[str, Any]) -> list[Size]:
    one = [] if row.get("image") is None else [row["image"]]
    return [_size(image) for image in row.get("images") or one]


def _size(image: Any) -> Size:
    if isinstance(image, list) and len(image) == 2:
        return image
    try:
        if isinstance(image, str):
            from PIL import Image

            with Image.open(image) as opened:
                return list(opened.size)
        width, height = image.size
    except (OSError, AttributeError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            f"an image of the dataset must be one that PIL can open; got {short(error) or type(image).__name__}"
        ) from error
    return [int(width), int(height)]
