"""A stand-in for vLLM, which needs a card: `trl vllm-serve` as a program, and the module `vllm` for TRL's real client.

The program answers all that TRL 1.16's client asks of `vllm serve`, with random tokens, and has a child process as vLLM
has its engine. Weights are not sent; but the server does connect to the address and port at which rank 0 offers them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

_MODULES = {  # what TRL's client and its vllm_generation import, with vLLM 0.30's names
    "__init__.py": '__version__ = "0.30.0"\nLLM = RequestOutput = SamplingParams = object\n',
    "utils/__init__.py": "",
    "utils/network_utils.py": 'import os\n\ndef get_ip():\n    return os.environ["VLLM_HOST_IP"]\n',
    "distributed/__init__.py": "",
    "distributed/weight_transfer/__init__.py": "",
    "distributed/weight_transfer/nccl_common.py": """
import socket
from types import SimpleNamespace

def trainer_init(info):
    with socket.create_server((info["master_address"], info["master_port"])) as server:
        connection, _ = server.accept()
    return SimpleNamespace(group=SimpleNamespace(store=None, socket=connection))
""",
    "distributed/weight_transfer/nccl_engine.py": "NCCLTrainerSendWeightsArgs = NCCLWeightTransferEngine = object\n",
    "distributed/weight_transfer/packed_tensor.py": """
def packed_nccl_broadcast_producer(iterator, group, src, post_iter_func):
    group.group.socket.sendall(f"{sum(1 for _ in iterator)}\\n".encode())
""",
    # Imported once TRL has its client, whose NCCL wants a card.
    "sampling_params.py": """
from concurrent.futures import ThreadPoolExecutor
from trl.generation.vllm_client import VLLMClient, get_ip, open_trainer_endpoint

StructuredOutputsParams = object

def init_communicator(self, device=0):
    assert self.get_server_info()["weight_transfer_config"] is not None
    info = {"master_address": get_ip(), "master_port": self.group_port, "rank_offset": 1,
            "world_size": self.get_world_size() + 1}
    with ThreadPoolExecutor(max_workers=1) as executor:
        future = executor.submit(self._post, f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})
        self.communicator = open_trainer_endpoint(info)
        future.result()

VLLMClient.init_communicator = init_communicator
""",
}


def write_stand_in(folder: Path) -> list[str]:
    """Lines of shell (`--setup`) with which `trl vllm-serve` and `import vllm` are the stand-ins, made in `folder`."""
    for name, text in _MODULES.items():
        path = folder / "modules/vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    program = folder / "bin/trl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} "$@"\n')
    program.chmod(0o755)
    paths = {"PATH": folder / "bin", "PYTHONPATH": folder / "modules"}
    return [f"export {key}={shlex.quote(str(path))}:${key}" for key, path in paths.items()]


def servers_of(folder: Path) -> list[psutil.Process]:
    """The living processes of servers that were started in `folder`; engines last."""
    found: dict[str, list[psutil.Process]] = {"server": [], "engine": []}
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                kind = "engine" if "engine" in command else "server" if "vllm-serve" in command else ""
                found.get(kind, []).append(process)
        except psutil.Error:
            continue
    return found["server"] + found["engine"]


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    model = ""
    world_size = 1
    weights: socket.socket

    def do_GET(self) -> None:
        config = {"weight_transfer_config": {}, "model_config": {"logprobs_mode": "processed_logprobs"}}
        answers: dict[str, dict[str, object]] = {
            "/health": {}, "/v1/models": {"data": [{"id": self.model}]}, "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": self.world_size},
        }  # fmt: skip
        self._answer(answers[self.path.split("?")[0]])

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/init_weight_transfer_engine":
            info = given["init_info"]
            _Server.weights = _connected(info["master_address"], info["master_port"])
        elif self.path == "/update_weights":
            assert int(_Server.weights.makefile().readline()) == len(given["update_info"]["names"])
        self._answer({"choices": _choices(given)} if self.path == "/v1/completions" else {"success": True})

    def _answer(self, content: dict[str, object]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _connected(host: str, port: int) -> socket.socket:
    """A connection to rank 0, which listens soon."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _choices(asked: dict[str, list[list[int]]]) -> list[dict[str, object]]:
    count, tokens = int(str(asked["n"])), int(str(asked["max_tokens"]))
    found: list[dict[str, object]] = []
    for prompt in asked["prompt"]:
        for _ in range(count):
            ids = [random.randrange(6) for _ in range(tokens)]
            logprobs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-4.0] * tokens,
                        "top_logprobs": [None] * tokens}  # fmt: skip
            found.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["vllm-serve"])
    for name, kind in (("model", str), ("host", str), ("port", int), ("tensor_parallel_size", int),
                       ("data_parallel_size", int)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, required=True)
    asked = parser.parse_args()
    print("cards", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    engine = [sys.executable, "-c", "import time; time.sleep(3600)", "engine"]
    with subprocess.Popen(engine):  # fmt: skip
        _Server.model, _Server.world_size = asked.model, asked.tensor_parallel_size * asked.data_parallel_size
        ThreadingHTTPServer((asked.host, asked.port), _Server).serve_forever()


if __name__ == "__main__":
    main()
