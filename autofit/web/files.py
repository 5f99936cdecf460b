"""The files of the page, made once: the page with the known models and cards, its style, its script and its icon."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec

import yaml

from autofit import __version__
from autofit.api.markup import STYLE, escaped
from autofit.fakegpu.specs import GPU_SPECS
from autofit.hardware.prices import prices
from autofit.recipe.catalogue import names
from autofit.web.simulator import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question, the words of its button, and the training that the page shows as chosen."""

    words: str
    method: str
    question: Question


@cache
def examples() -> tuple[Example, ...]:
    """The examples, in the order of the page."""
    content = yaml.safe_load((resources.files("autofit.web") / "examples.yaml").read_text(encoding="utf-8"))
    return tuple(
        Example(words=one.pop("words"), method=one.pop("method"), question=Question.from_json(one)) for one in content
    )


File = tuple[str, bytes]  # (its type, its bytes)
_FIRST = "a100-80gb"
_ZERO = '<option value="zero2">ZeRO-2</option><option value="zero3">ZeRO-3</option>'  # where it can be simulated


@cache
def _page() -> File:
    listed = prices()
    cards = sorted(GPU_SPECS.values(), key=lambda spec: (spec.capacity_bytes, spec.half_flops_per_s))
    options = []
    for spec in cards:
        price = f", ${listed[spec.name].usd_per_hour:.2f}/h" if spec.name in listed else ""
        words = f"{spec.full_name.removeprefix('NVIDIA ')}: {spec.capacity_bytes / 1e9:.0f} GB{price}"
        chosen = " selected" if spec.name == _FIRST else ""
        options.append(f'<option value="{escaped(spec.name)}"{chosen}>{escaped(words)}</option>')
    models = (f'<option value="{escaped(name)}"></option>' for name in names())
    text = _text("index.html").replace("<!--cards-->", "\n".join(options)).replace("<!--models-->", "\n".join(models))
    buttons = (
        f'<li><button type="button" data-text="{escaped(one.question.text)}" data-card="{escaped(one.question.card)}" '
        f'data-method="{escaped(one.method)}" data-tokens="{one.question.tokens or ""}">'
        f"{escaped(one.words)}</button></li>"
        for one in examples()
    )
    text = text.replace("<!--examples-->", "\n".join(buttons))
    if find_spec("deepspeed") is not None:
        text = text.replace("<!--zero-->", _ZERO)
    return "text/html; charset=utf-8", text.replace("<!--version-->", escaped(__version__)).encode()


@cache
def _style() -> File:
    return "text/css; charset=utf-8", (STYLE + _text("page.css")).encode()


@cache
def _script() -> File:
    return "text/javascript; charset=utf-8", _text("page.js").encode()


@cache
def _icon() -> File:
    return "image/svg+xml", _text("icon.svg").encode()


def _health() -> File:
    return "text/plain; charset=utf-8", b"ok\n"


def _text(name: str) -> str:
    return (resources.files("autofit.web") / "page" / name).read_text(encoding="utf-8")


FILES: Mapping[str, Callable[[], File]] = {
    "/": _page, "/page.css": _style, "/page.js": _script, "/icon.svg": _icon, "/health": _health,
}  # fmt: skip
