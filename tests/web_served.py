"""A server of `autofit web` whose answers are the tests' own, and what its tests share."""

import http.client
import json
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

from autofit.recipe.yaml_file import parse_yaml
from autofit.web.allowed import allowed
from autofit.web.server import Access, PageServer
from autofit.web.simulator import ALONE, Limits, Question

MODEL = "Qwen/Qwen3-8B"
OWN = frozenset({"localhost", "127.0.0.1", "[::1]"})
KNOWN = ("output_dir", "report_to", "trust_remote_code", "torch_compile", "reward_funcs", "deepspeed", "eval_steps")


class Told:
    """Answers with what it was asked; each question that holds "slow" waits until it may end."""

    def __init__(self) -> None:
        self.may_end, self.at_work, self.most = threading.Event(), 0, 0
        self.ended: list[str] = []

    def answer(self, question: Question) -> Generator[Mapping[str, object] | None, None, None]:
        self.at_work += 1
        self.most = max(self.most, self.at_work)
        try:
            yield {"is": "note", "text": question.text}
            while "slow" in question.text and not self.may_end.wait(0.02):
                yield None
        finally:
            self.at_work -= 1
            self.ended.append(question.text)


@contextmanager
def served(limits: Limits = ALONE, access: Access | None = None) -> Iterator[tuple[PageServer, Told]]:
    with PageServer(("127.0.0.1", 0), access=access or Access(hosts=OWN), limits=limits) as server:
        server.answers = told = Told()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield server, told
        finally:
            told.may_end.set()
            server.shutdown()


def asked(
    server: PageServer, path: str = "/answer", body: str | bytes | None = None, method: str = "POST", **headers: str
) -> tuple[int, Mapping[str, str], str]:
    """(status, headers, body) of one request; with a `body` a question of JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body=body, headers=sent)
    response = connection.getresponse()
    found = response.status, dict(response.headers), response.read().decode()
    connection.close()
    return found


def question(text: str = "a: 1", **more: object) -> str:
    return json.dumps({"text": text, **more})


def kept(yaml: str) -> dict[str, object]:
    return allowed(parse_yaml(yaml), known=KNOWN).values  # type: ignore[arg-type]


SWIFTS = "swift sft --model Qwen/Qwen3-4B --torch_dtype bfloat16 --max_length 64 --system 'You are: kind'"

VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/train.parquet \\
  data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=64 actor_rollout_ref.model.path=a/b \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  trainer.n_gpus_per_node=2
"""
