"""A stand-in for the model hub on 127.0.0.1: config.json and parameter counts of the rows' models, and no weights.

Every estimator asks it as it would ask the hub (`HF_ENDPOINT`), so that all of them see the same models.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from autofit.recipe.catalogue import architecture

HERE = Path(__file__).parent
_SHA = "0" * 40


@cache
def model(name: str) -> tuple[dict[str, Any], int] | None:
    """(config.json, parameters) of a model of models.yaml or of autofit's catalogue; None where neither has it."""
    ours = yaml.safe_load((HERE / "models.yaml").read_text(encoding="utf-8"))
    if name in ours:
        base = model(ours[name]["of"]) if "of" in ours[name] else None
        return {**(base[0] if base else {}), **ours[name]["config"]}, int(ours[name]["parameters"])
    known = architecture(name)
    return None if known is None else (dict(known.config), known.parameters)


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = [part for part in self.path.partition("?")[0].split("/") if part]
        is_api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if is_api else parts[:2])
        short = parts[2] if is_api and len(parts) > 2 else parts[0] if parts else ""
        found = model(name) or model(short)
        if found is None:
            return self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "not in this stand-in"})
        if is_api:
            return self._send(json.dumps(_described(name if model(name) else short, *found)).encode())
        if parts[-1] == "config.json":
            return self._send(json.dumps(found[0]).encode())
        if parts[-1] == "model.safetensors":  # the header alone: one tensor with all parameters
            return self._send(_header(found[1]))
        return self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound"})

    def _send(self, body: bytes, status: int = 200, more: dict[str, str] | None = None) -> None:
        first, last = 0, len(body) - 1
        asked = self.headers.get("Range", "")
        if status == 200 and asked.startswith("bytes="):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(start or 0), min(int(end or last), last), 206
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(last - first + 1), "X-Repo-Commit": _SHA,
                   "ETag": f'"{abs(hash(body))}"', "Accept-Ranges": "bytes", **(more or {})}  # fmt: skip
        if status == 206:
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[first : last + 1])

    def log_message(self, *words: object) -> None: ...


def _described(name: str, config: dict[str, Any], parameters: int) -> dict[str, Any]:
    return {
        "id": name, "modelId": name, "sha": _SHA, "private": False, "gated": False, "disabled": False, "downloads": 1,
        "likes": 0, "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["transformers"],
        "config": config, "safetensors": {"parameters": {"BF16": parameters}, "total": parameters},
        "siblings": [{"rfilename": "config.json"}, {"rfilename": "model.safetensors"}],
    }  # fmt: skip


def _header(parameters: int) -> bytes:
    tensor = {"dtype": "BF16", "shape": [parameters], "data_offsets": [0, 2 * parameters]}
    text = json.dumps({"model.weight": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


@contextmanager
def hub() -> Iterator[str]:
    """The address of the stand-in while the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
