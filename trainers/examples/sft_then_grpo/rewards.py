"""Two objectives and a judge. Each function gives a number from 0 to 1 for each completion."""

import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_JUDGE_S = 6.0  # a judge that takes longer has no opinion
_ASKED = "Rate the answer to the question from 0 (useless) to 10 (excellent). Reply with the number alone."


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the answer stands in the completion as a word of its own."""
    words = [re.findall(r"\w+", _text(said)) for said in completions]
    return [float(str(wanted) in said) for said, wanted in zip(words, answer, strict=True)]


def brief(completions: list[Any], **_: Any) -> list[float]:
    """1 for an answer of at most 30 words, less for longer ones."""
    return [min(1.0, 30 / max(1, len(_text(said).split()))) for said in completions]


def judged(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
    """The opinion of the judge at JUDGE_URL, if it answers, else None. Without a judge: a share of new words."""
    said = [_text(completion) for completion in completions]
    address = os.environ.get("JUDGE_URL")
    if not address:
        return [len(set(text.split())) / max(1, len(text.split())) for text in said]
    with ThreadPoolExecutor(8) as several:
        return list(several.map(lambda pair: _opinion(address, *pair), zip(map(_text, prompts), said, strict=True)))


def _opinion(address: str, prompt: str, said: str) -> float | None:
    """The judge's number of one answer, from 0 to 1; None after an error, so that the others still count."""
    text = f"{_ASKED}\n\nQuestion: {prompt}\n\nAnswer: {said}"
    body = {"model": os.environ.get("JUDGE_MODEL", "judge"), "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('JUDGE_KEY', '')}"}
    request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_JUDGE_S) as answer:  # noqa: S310  (the user's own address)
            reply = json.load(answer)["choices"][0]["message"]["content"]
    except (OSError, ValueError, LookupError):
        return None
    number = re.search(r"\d+(\.\d+)?", str(reply))
    return None if number is None else min(1.0, float(number[0]) / 10)


def _text(said: Any) -> str:
    """A prompt or completion as text: of messages, the last one's."""
    return str(said[-1]["content"]) if isinstance(said, list) else str(said)
