"""`autofit web` under hostile requests and questions: each gets an answer that HTTP allows, and the page stays up."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import yaml

from storm.inputs import Found
from storm.odd_files import FOREIGN, ODD_WORDS, SCRIPTS, SECRET, changed, torn

NAME = "questions to the page"
_START_S, _ANSWER_S, _UP_S = 120.0, 20.0, 5.0
_STATUSES = (200, 400, 403, 404, 405, 408, 411, 413, 414, 415, 429, 431, 501, 503, 505)
_AT_ONCE = 60  # dribbling connections beside the questions
_RECIPE = {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "x", "per_device_train_batch_size": 2,
           "gradient_accumulation_steps": 2, "max_length": 64, "use_peft": True, "lora_r": 8, "bf16": True}  # fmt: skip
_CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 99,
           "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}  # fmt: skip
_HEADERS = ("Transfer-Encoding: chunked\r\n", "Origin: http://evil.example\r\n", ": \r\n", "X: y\r\n" * 200,
            "X: " + "y" * 70_000 + "\r\n", "Expect: 100-continue\r\n")  # fmt: skip
Draw = Callable[[random.Random], object]


def ask_pages(folder: Path, *, questions: int, dice: random.Random, until: float) -> Found:
    """Requests to one server, some while others dribble in; most browsers leave before their answer has ended."""
    found = Found()
    if not questions:
        return found
    log = folder / "web.log"
    with log.open("wb") as told:
        server = subprocess.Popen(
            [sys.executable, "-m", "autofit", "web", "--port", "0", *dice.choice([[], ["--public"]])], cwd=folder,
            stdout=subprocess.PIPE, stderr=told, text=True, env={**os.environ, "GITHUB_TOKEN": SECRET},
        )  # fmt: skip
    assert server.stdout is not None
    port = int(server.stdout.readline().strip().rstrip("/").rpartition(":")[2])
    dribbling = list[socket.socket]()
    try:
        while found.tried[NAME] < questions and time.monotonic() < until:
            found.tried[NAME] += 1
            if dice.random() < 0.05:
                dribbling += _dribble(port, dice)
            request = _request(port, dice)
            began = time.monotonic()
            status, answer = _asked(port, request, dice)
            found.slowest_s = max(found.slowest_s, time.monotonic() - began)
            found.refused += 400 <= status < 500
            for what in _wrong(port, status, answer):
                found.add_wrong(f"{NAME}: {what}", (request[:1500], answer[-600:]))
    finally:
        for connection in dribbling:
            connection.close()
        server.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            server.wait(timeout=60)
        if server.returncode != 0:
            found.add_wrong(f"{NAME}: the page ended with code {server.returncode}", log.read_text()[-1500:])
        server.kill()
    if "Traceback" in log.read_text():
        found.add_wrong(f"{NAME}: a traceback of the server", log.read_text()[-1500:])
    return found


def _dribble(port: int, dice: random.Random) -> list[socket.socket]:
    """Connections whose requests do not come to their end."""
    made = []
    for _ in range(dice.randint(1, _AT_ONCE)):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            connection.sendall(dice.choice([b"G", b"POST /answer HTTP/1.1\r\nHost: localhost\r\n", b"\r"]))
            made.append(connection)
    return made


def _request(port: int, dice: random.Random) -> bytes:
    body = _body(dice)
    length = dice.choice([str(len(body))] * 12 + ["-1", "9" * 30, "", "x", str(len(body) + 9), "1e3", "²"])
    method = dice.choice(["POST"] * 14 + ["GET", "PUT", "post", "\x00", "OPTIONS"])
    path = dice.choice(
        ["/answer"] * 14 + ["/", "/../../etc/passwd", "//", "/answer?x", "/%00", "*", "/" + "a" * 70_000]
    )
    host = dice.choice([f"127.0.0.1:{port}"] * 14 + ["evil.example", "", "[::1", "localhost:" + "9" * 30])
    kind = dice.choice(["application/json"] * 14 + ["text/plain", "", "application/json; charset=utf-16"])
    odd = dice.choice(_HEADERS) if dice.random() < 0.3 else ""
    head = f"{method} {path} {dice.choice(['HTTP/1.1'] * 14 + ['HTTP/9', 'x', 'HTTP/1.0'])}\r\nHost: {host}\r\n"
    head += f"Content-Type: {kind}\r\nContent-Length: {length}\r\n{odd}\r\n"
    whole = head.encode("utf-8") + body
    return torn(whole, dice) if dice.random() < 0.1 else whole


def _body(dice: random.Random) -> bytes:
    if dice.random() < 0.05:
        return dice.choice(
            [b"", b"{", b"[" * 50_000, b"null", b"\xff\xfe", b"{}" * 9, b'{"text": 1e999}', b"x" * 300_000]
        )
    config = json.dumps(changed(_CONFIG, dice) if dice.random() < 0.3 else _CONFIG)
    draws: dict[str, Draw] = {
        "text": _text, "kind": lambda dice: dice.choice(["check", "check", "cards"]),
        "card": lambda dice: dice.choice(["t4", "h100", *ODD_WORDS]),
        "trainer": lambda dice: dice.choice(["sft", "grpo", "a:b", *ODD_WORDS]),
        "count": lambda dice: dice.choice([1, 2, 8, 0, -1, 10**9, "1", None, 1.5]),
        "sharing": lambda dice: dice.choice(["", "fsdp2", "zero3", "x"]),
        "tokens": lambda dice: dice.choice([1, 64, 0, 10**12, None, "x"]),
        "changes": lambda dice: {dice.choice(["lora_r", "env.A", "deepspeed", "x", ""]): dice.choice(ODD_WORDS)},
        "config": lambda dice: config,
    }  # fmt: skip
    given: dict[str, object] = {"text": _text(dice), "card": "t4", "config": config}
    for name in dice.sample(sorted(draws), dice.choice([0, 1, 1, 2, 3])):
        given[name] = draws[name](dice)
    if dice.random() < 0.1:
        given[dice.choice(ODD_WORDS)] = dice.choice(ODD_WORDS)
    return json.dumps(given).encode("utf-8", "surrogatepass")


def _text(dice: random.Random) -> str:
    if dice.random() < 0.3:
        return str(dice.choice([*SCRIPTS, *ODD_WORDS]))
    content = dice.choice([_RECIPE, _RECIPE, *FOREIGN])
    text = str(yaml.safe_dump(changed(content, dice) if dice.random() < 0.7 else content, allow_unicode=True))
    return torn(text.encode("utf-8", "surrogatepass"), dice).decode("utf-8", "replace") if dice.random() < 0.2 else text


def _asked(port: int, request: bytes, dice: random.Random) -> tuple[int, str]:
    """(status, the start of the answer), as the browser leaves after a moment; status 0 without any answer."""
    deadline, answer = time.monotonic() + (_ANSWER_S if dice.random() < 0.02 else dice.uniform(0.5, 3.0)), b""
    with socket.create_connection(("127.0.0.1", port), timeout=_UP_S) as connection, suppress(OSError):
        connection.sendall(request)
        if dice.random() < 0.5:
            connection.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0 or (not answer and left > -_ANSWER_S):
            connection.settimeout(max(left, 0.5))
            try:
                part = connection.recv(65536)
            except TimeoutError:
                continue
            if not part:
                break
            answer += part
    answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] (\d+)", answer)
    headless = answer.startswith(b'{"is": "error"')  # so http.server answers a request line without a version
    return int(status[1]) if status else 400 if headless else 0 if not answer else -1, answer.decode(errors="replace")


def _wrong(port: int, status: int, answer: str) -> list[str]:
    body = answer.partition("\r\n\r\n")[2]
    whole = status == 200 and "ndjson" in answer.partition("\r\n\r\n")[0]
    lines = [line for line in body.split("\n")[:-1] if line.strip()] if whole else []
    try:
        told = [dict(json.loads(line)) for line in lines]
    except ValueError:
        told = [{"is": "no JSON"}]
    texts = [str(one.get("text", "")) for one in told if one.get("is") == "error"]
    checks = {
        f"status {status}": status not in (0, *_STATUSES),
        "a traceback": "Traceback" in answer,
        "lines that are no JSON": any(one.get("is") == "no JSON" for one in told),
        "an error without words": any("ended without an answer" in text or not text for text in texts),
        "an error that is longer than a paragraph": any(len(text) > 1000 for text in texts),
        "a secret": SECRET in answer,
        "a path of this machine": bool(re.search(r"/(tmp|root|home)/", body)),
        "others are shut out": not _is_up(port),
    }
    return [what for what, wrong in checks.items() if wrong]


def _is_up(port: int) -> bool:
    """Whether someone else gets the page within some seconds."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=_UP_S) as answer:
        return bool(answer.status == 200)
    return False
