"""The page of `autofit web`: what its server refuses, what reaches a trainer, and the page in a real browser."""

import html
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from recipes import grpo_recipe

from autofit.api.reading import source_of
from autofit.cli import main
from autofit.commands.arguments import parser
from autofit.commands.web import _access, _check
from autofit.errors import ConfigError
from autofit.files import TornFile
from autofit.plugin.registry import load
from autofit.recipe.yaml_file import Source, only_below, parse_yaml
from autofit.web.allowed import allowed, allowed_launch, write_config, write_training
from autofit.web.answering import TOLD, batch_words, run
from autofit.web.server import FILES, Access, ArrivalQueue, Connections, Full, PageServer, examples
from autofit.web.simulator import ALONE, PUBLIC, Limits, Line, Question, Rate, Simulator

if TYPE_CHECKING:
    from playwright.sync_api import Page

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


# -- the server -------------------------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere_and_lets_nothing_in() -> None:
    with served() as (server, _):
        for path in FILES:
            status, headers, body = asked(server, path, method="GET")
            assert status == 200
            assert "http://" not in body.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in body
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert policy.endswith("frame-ancestors 'self'")
            assert headers["X-Content-Type-Options"] == "nosniff"
        page = asked(server, "/", method="GET")[2]
        assert "<script src=" in page
        assert " style=" not in page
        assert " onclick=" not in page
        assert 'value="h100"' in page
        assert f'value="{MODEL}"' in page
        assert asked(server, "/", method="HEAD")[2] == ""


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/page/index.html", "//etc/passwd", "/%2e%2e/etc/passwd", "/."])
def test_no_path_leads_to_another_file(path: str) -> None:
    with served() as (server, _):
        assert asked(server, path, method="GET")[0] == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"Host": "evil.example:7860"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
     ({"Host": "localhost", "Origin": "https://evil.example"}, 403), ({"Host": "localhost", "Origin": "null"}, 403),
     ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200)],
)  # fmt: skip
def test_a_page_of_another_site_reaches_nothing(headers: dict[str, str], status: int) -> None:
    with served() as (server, told):
        assert asked(server, body=question(), **headers)[0] == status
        assert bool(told.ended) is (status == 200)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [("{", {}, 400), ("[]", {}, 400), ('{"text": 1}', {}, 400), ("[" * 100_000, {}, 400), ("\xff", {}, 400),
     (question(kind="run"), {}, 400), (question(shell="ls"), {}, 400), (question(count=True), {}, 400),
     (question(count=3), {}, 400), (question(tokens=0), {}, 400), (question(tokens=10**9), {}, 400),
     (question(changes=[1]), {}, 400), (question("x" * 70_000), {}, 400), (question(sharing="/etc/passwd"), {}, 400),
     ("x" * 300_000, {}, 413), (question(), {"Content-Length": "99999999999"}, 413),
     (question(), {"Content-Length": "-1"}, 411), (question(), {"Content-Type": "text/plain"}, 415)],
)  # fmt: skip
def test_a_question_that_is_none_is_refused_in_one_sentence(body: str, headers: dict[str, str], status: int) -> None:
    with served() as (server, told):
        found, _, said = asked(server, body=body.encode("latin-1"), **headers)
        assert found == status
        assert set(json.loads(said)) == {"is", "text"}
        assert not told.ended


def test_a_paste_that_is_too_long_is_told_by_the_pages_words_and_its_length() -> None:
    with pytest.raises(ConfigError, match="the recipe must have at most 65,536 characters here; it has 70,000"):
        Question.from_json({"text": "x" * 70_000})
    with pytest.raises(ConfigError, match=r"config\.json must have at most"):
        Question.from_json({"text": "x", "config": "x" * 70_000})


def test_the_error_that_the_page_names_is_that_of_the_table() -> None:
    table = (Path(__file__).parents[1] / "experiments" / "accuracy" / "table.md").read_text()
    rows = [
        line.split("|") for line in table.splitlines() if "| reserved_max_bytes | " in line and line.count("|") == 7
    ]
    worst = min(float(row[6].strip(" %")) for row in rows)
    count = sum(int(row[3]) for row in rows)
    with served() as (server, _):
        page = asked(server, "/", method="GET")[2]
    assert f"the worst of {count} peaks that others measured was predicted {-worst:.1f} % too low" in page


def test_an_answer_comes_line_by_line() -> None:
    with served() as (server, _):
        status, headers, body = asked(server, body=question("<b>"))
        assert status == 200
        assert headers["Content-Type"].startswith("application/x-ndjson")
        assert [json.loads(line)["is"] for line in body.splitlines()] == ["started", "note", "done"]


def test_one_answer_is_made_at_a_time_and_the_line_has_an_end() -> None:
    with served(replace(ALONE, waiting=2, of_address=9)) as (server, told):
        found: list[tuple[int, Mapping[str, str], str]] = []
        threads = [
            threading.Thread(target=lambda: found.append(asked(server, body=question("slow")))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert [status for status, _, _ in found] == [503, 503]
        told.may_end.set()
        for thread in threads:
            thread.join(20)
        assert sorted(status for status, _, _ in found) == [200, 200, 200, 503, 503]
        assert told.most == 1
        assert any('"place": 1' in body for _, _, body in found)


def test_one_address_has_few_places_and_asks_no_faster_than_it_may() -> None:
    line = ArrivalQueue(at_once=1, waiting=9, of_address=1)

    def turn() -> AbstractContextManager[None]:
        return line.turn("a", waits=lambda _: None)

    with turn(), pytest.raises(Full, match="at most 1 questions of one address"), turn():
        pass
    with turn():
        pass
    now = [0.0]
    rate = Rate(2, clock=lambda: now[0])
    assert [rate.wait_s("a"), rate.wait_s("a"), rate.wait_s("b")] == [0, 0, 0]
    assert rate.wait_s("a") == pytest.approx(30)
    now[0] = 31.0
    assert rate.wait_s("a") == 0
    with served(replace(ALONE, a_minute=1)) as (server, _):
        assert [asked(server, body=question())[0] for _ in range(2)] == [200, 429]


def test_behind_a_proxy_the_address_is_the_last_that_it_names() -> None:
    with served(replace(ALONE, a_minute=1), Access(hosts=frozenset(), behind_proxy=True)) as (server, _):

        def status(told: str) -> int:
            return asked(server, body=question(), X_Forwarded_For=told)[0]

        assert [status("9.9.9.9, 1.1.1.1"), status("1.1.1.1, 2.2.2.2"), status("8.8.8.8, 1.1.1.1")] == [200, 200, 429]


def test_an_answer_ends_when_nobody_listens_any_more() -> None:
    with served() as (server, told), socket.create_connection(("127.0.0.1", server.server_port)) as connection:
        body = question("slow").encode()
        head = (
            f"POST /answer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as lines:
            while b"note" not in lines.readline():
                pass
        connection.close()
        end = time.monotonic() + 20
        while not told.ended and time.monotonic() < end:
            time.sleep(0.01)
        assert told.ended == ["slow"]


def test_a_request_that_dribbles_in_is_dropped_and_others_are_answered() -> None:
    with served(replace(ALONE, request_s=0.3, connections=3)) as (server, told):
        slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
        began = time.monotonic()
        while time.monotonic() - began < 5:
            try:
                for connection in slow:
                    connection.sendall(b"G")
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - began < 4
        assert asked(server, "/health", method="GET")[0] == 200
        assert not told.ended
        for connection in slow:
            connection.close()


def test_requests_that_dribble_in_give_way_to_others_and_to_no_answer_that_is_made() -> None:
    with served(replace(ALONE, request_s=60, connections=4)) as (server, told):
        found: list[tuple[int, Mapping[str, str], str]] = []
        at_work = threading.Thread(target=lambda: found.append(asked(server, body=question("slow"))))
        at_work.start()
        while not told.at_work:
            time.sleep(0.01)
        slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(12)]
        for connection in slow:
            with suppress(OSError):  # it has given way already
                connection.sendall(b"POST /answer HTTP/1.1\r\n")
        for _ in range(6):
            began = time.monotonic()
            assert asked(server, "/health", method="GET")[0] == 200
            assert time.monotonic() - began < 10
        told.may_end.set()
        at_work.join(timeout=20)
        assert found[0][0] == 200
        assert '"done"' in found[0][2]
        for connection in slow:
            connection.close()


def test_with_all_places_at_work_a_new_connection_is_closed() -> None:
    places = Connections(1)
    (ours, other), (late, far) = socket.socketpair(), socket.socketpair()
    assert places.take(ours, "1.2.3.4")
    assert places.has_asked(ours)
    assert not places.take(late, "1.2.3.4")
    places.release(ours)
    assert places.take(late, "1.2.3.4")
    assert places.take(ours, "5.6.7.8")  # it has the place of one whose request is still arriving
    assert not places.has_asked(late)
    for end in (ours, other, late, far):
        end.close()


def test_the_examples_of_the_page_are_questions_and_are_prepared_in_their_turn() -> None:
    with served() as (server, told):
        page = asked(server, "/", method="GET")[2]
        server.prepare(one.question for one in examples())
        assert told.ended == [one.question.text for one in examples()]
        assert told.most == 1
        for one in examples():
            assert html.escape(one.question.text) in page
            assert kept(one.question.text) == parse_yaml(one.question.text)


# -- what reaches a trainer -------------------------------------------------------------------------------------------


def kept(yaml: str) -> dict[str, object]:
    return allowed(parse_yaml(yaml), known=KNOWN).values  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("yaml", "values"),
    [("reward_funcs: [os.system, think_format_reward]", {"reward_funcs": ["think_format_reward"] * 2}),
     ("reward_funcs: os.system", {"reward_funcs": ["think_format_reward"]}),
     ("trust_remote_code: true", {}), ("output_dir: /etc", {}), ("report_to: wandb", {}), ("torch_compile: true", {}),
     ("dataset_name: /etc/passwd", {}), ("datasets: [{path: /etc, data_files: passwd}]", {}),
     ("env: {LD_PRELOAD: /tmp/x.so, PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}",
      {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
     ("model_init_kwargs: {trust_remote_code: true, dtype: bfloat16}", {"model_init_kwargs": {"dtype": "bfloat16"}}),
     ("made_up: /etc/passwd", {"made_up": None}), ("lora_rank: 8", {"lora_rank": None}),
     ("model_name_or_path: qwen/qwen3-8b", {"model_name_or_path": MODEL}),
     ("lora_target_modules: 'layers.[\\d]+.(mlp|self_attn).(up|q)_proj'",
      {"lora_target_modules": r"layers.[\d]+.(mlp|self_attn).(up|q)_proj"}),
     ("eval_strategy: steps\nper_device_eval_batch_size: 4\neval_steps: 9",
      {"eval_strategy": "steps", "per_device_eval_batch_size": 4}),
     ("qat: {weight_dtype: int4, group_size: 32}", {"qat": {"weight_dtype": "int4", "group_size": 32}}),
     ("lora_target_modules: [q_proj, v_proj]", {"lora_target_modules": ["q_proj", "v_proj"]}),
     ("per_device_train_batch_size: 8", {"per_device_train_batch_size": 8})],
)  # fmt: skip
def test_code_files_and_addresses_of_a_recipe_are_left_out(yaml: str, values: dict[str, object]) -> None:
    assert kept(yaml) == values


@pytest.mark.parametrize(
    "yaml",
    ["model_name_or_path: /etc", "model_name_or_path: ../model", "model_name_or_path: me/private", "dtype: ../x",
     "reward_model_name_or_path: ./model", "attn_implementation: kernels-community/flash-attn2", "deepspeed: ds.json",
     "deepspeed: {zero_optimization: {offload_param: {nvme_path: /etc}}}", "fsdp_config: /etc/passwd",
     "accelerate_config: /etc/passwd", "accelerator_config: ../a.json", "optim: a/b", "optim: {a: b}",
     "generation_kwargs: {custom_generate: me/code}", "env: {PYTORCH_CUDA_ALLOC_CONF: '$(id)'}", "env: 1",
     "lora_target_modules: [/etc]", "per_device_train_batch_size: 100000", "max_length: .inf",
     "gradient_checkpointing_kwargs: {a: {b: {c: {d: {e: 1}}}}}"],
)  # fmt: skip
def test_a_file_or_an_address_in_the_place_of_a_setting_is_refused(yaml: str) -> None:
    with pytest.raises(ConfigError):
        kept(yaml)


def test_a_pasted_config_loses_what_names_code(tmp_path: Path) -> None:
    given = {"model_type": "qwen3", "auto_map": {"AutoModel": "evil.py"}, "_name_or_path": "/etc", "hidden_size": 64}
    folder, notes = write_config(json.dumps(given), tmp_path / "model")
    assert notes == ()
    assert json.loads((Path(folder) / "config.json").read_text()) == {"model_type": "qwen3", "hidden_size": 64}
    _, notes = write_config(json.dumps({**given, "quantization_config": {"bits": 4}}), tmp_path / "four")
    assert "quantization_config of config.json is left out" in notes[0]
    for wrong in ("[]", "{", "{}", "[" * 100_000):
        with pytest.raises(ConfigError):
            write_config(wrong, tmp_path / "other")


def test_the_batch_is_said_in_a_sentence_of_one_prompt_or_of_several() -> None:
    one = grpo_recipe(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=1)
    assert batch_words(one).endswith("4 at a time x 1 accumulation step x 1 card, of 1 prompt with 4 completions.")
    two = grpo_recipe(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert batch_words(two).endswith("which are 2 prompts with 4 completions each.")


def pasted(text: str, folder: Path) -> Source:
    """What a pasted text means, read as an answer reads it."""
    with only_below(folder):
        return source_of(write_training(text, folder))


LLAMA = """stage: sft
finetuning_type: lora
cutoff_len: 64
model_name_or_path: Qwen/Qwen3-4B
do_train: true
dataset: a
"""
LLAMAS = "--stage sft --do_train --model_name_or_path Qwen/Qwen3-4B --dataset a --finetuning_type lora --cutoff_len 64"
SWIFTS = "swift sft --model Qwen/Qwen3-4B --torch_dtype bfloat16 --max_length 64 --system 'You are: kind'"


@pytest.mark.parametrize(
    ("text", "trainer", "ranks"),
    [
        ("CUDA_VISIBLE_DEVICES=0 trl grpo \\\n --model_name_or_path Qwen/Qwen3-4B --use-peft --lora_r=8", "grpo", 1),
        ("accelerate launch --num_processes 4 trl/scripts/dpo.py --model_name_or_path Qwen/Qwen3-4B", "dpo", 4),
        (f"export CUDA_VISIBLE_DEVICES=0,1\ntorchrun --nproc_per_node 2 src/train.py {LLAMAS}\n", "hf", 2),
        (LLAMA, "hf", None),
        (f"#!/bin/bash\n# starts it\nNPROC_PER_NODE=2 {SWIFTS}\n", "hf", 2),
        (f"%%bash\n{SWIFTS}", "hf", None),
        (f"!{SWIFTS}", "hf", None),
        (f"$ {SWIFTS}", "hf", None),
        ("torchrun --nproc_per_node 2 t.py --model_name_or_path Qwen/Qwen3-4B --bf16 True --block_size 64", "hf", 2),
        ("python -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.rollout.n=2 "
         "algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2 actor_rollout_ref.actor.use_dynamic_bsz=True "
         "actor_rollout_ref.actor.ppo_mini_batch_size=256", "verl", 2),
        ("%%writefile a.yaml\nbase_model: Qwen/Qwen3-4B\nmicro_batch_size: 2\nsequence_len: 64\nadapter: lora\n"
         "lora_r: 8\nlora_alpha: 8\nlora_target_linear: true\ngradient_accumulation_steps: 1\n"
         "datasets: [{path: a, type: alpaca}]", "hf", None),
        ("# trl sft --config this.yaml\nmodel_name_or_path: Qwen/Qwen3-4B\nmax_length: 64\n", None, None),
        ("%%writefile a.yaml\nbase_model: Qwen/Qwen3-4B\nmicro_batch_size: 2\nsequence_len: 64\nval_set_size: 0.1\n"
         "gradient_accumulation_steps: 1\ndatasets: [{path: a, type: alpaca}]", "hf", None),
    ],
)  # fmt: skip
def test_what_the_commands_read_as_a_file_the_page_reads_too(
    text: str, trainer: str | None, ranks: int | None, tmp_path: Path
) -> None:
    found = pasted(text, tmp_path)
    model = found.values.get("model_name_or_path") or found.values["model_path"]
    assert (found.trainer, found.launch.get("num_processes"), model) == (trainer, ranks, "Qwen/Qwen3-4B")
    kept = allowed(found.values, known=(), trainer=trainer or "").values
    assert kept.keys() == found.values.keys() - {"trust_remote_code"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trl grpo --config run.yaml", "'run.yaml' is a file, and no file that is named is read here: paste its lines"),
        ("llamafactory-cli train secret.yaml", "'secret.yaml' is a file, .*: paste its lines"),
        ("accelerate launch --config_file secret.yaml trl/scripts/sft.py --model_name_or_path a/b", "choose beside"),
        (f"{SWIFTS} --deepspeed secret.json", "leave it out, and choose beside the file how the cards share"),
        ("torchrun t.py --model_name_or_path a/b --deepspeed secret.json", "leave it out"),
        (f"{LLAMA}deepspeed: secret.json", "leave it out"),
        ("python train.py", "no training is started in"),
        ("hello", "no training is started in"),
        ("a: 1\n  b: 2", "not valid YAML"),
        ('{"model_type": "qwen3", "hidden_size": 64}', "this is the config.json of a model"),
        ("from trl import SFTTrainer\nSFTTrainer('a').train()", "this is Python code, and the page runs none"),
        ("import os\n!trl sft --config run.yaml", "run.yaml"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "the error of a training"),
        ("Traceback (most recent call last):\n  File", "the error of a training"),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory.", "the error of a training"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "the error of a training"),
        ("", "paste a recipe"),
        ("   ", "paste a recipe"),
    ],
)
def test_no_file_that_is_named_is_read_and_the_page_says_what_to_paste(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").mkdir()
    monkeypatch.chdir(tmp_path)  # where the readers of the commands look first
    for name in ("secret.yaml", "run.yaml"):
        Path(name).write_text(LLAMA)
    Path("secret.json").write_text('{"zero_optimization": {"stage": 3}}')
    with pytest.raises(ConfigError, match=says):
        pasted(text, tmp_path / "answer")


def test_an_accelerate_config_of_trls_examples_is_known_by_its_name(tmp_path: Path) -> None:
    start = "accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml --num_processes 4"
    found = pasted(f"{start} trl/scripts/sft.py --model_name_or_path {MODEL}", tmp_path)
    assert found.values["accelerate_config"] == "zero3"
    assert any("deepspeed_zero3.yaml is not here: the zero3 that TRL ships" in note for note in found.notes)


def test_what_another_tools_file_says_of_its_launch_names_no_file(tmp_path: Path) -> None:
    inline = "deepspeed: {zero_optimization: {stage: 3, offload_param: {device: %s}}}"
    found = pasted(LLAMA + inline % "cpu", tmp_path)
    assert allowed_launch(found.launch) == found.launch
    found = pasted(LLAMA + inline % "nvme, nvme_path: /etc", tmp_path)
    with pytest.raises(ConfigError, match=r"offload_param.nvme_path must be .* names here; got '/etc'"):
        allowed_launch(found.launch)


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/train.parquet \\
  data.train_batch_size=16 data.max_prompt_length=64 data.max_response_length=64 actor_rollout_ref.model.path=a/b \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=2 \\
  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  trainer.n_gpus_per_node=2
"""


def test_the_settings_of_a_command_of_verl_are_all_in_the_list_and_its_model_is_one_of_the_catalogue(
    tmp_path: Path,
) -> None:
    values = dict(pasted(VERL.replace("a/b", MODEL), tmp_path).values)
    found = allowed(values, known=(), trainer="verl")
    assert found.notes == ()
    assert found.values == {key: value for key, value in values.items() if key != "trust_remote_code"}
    assert allowed(values, known=(), trainer="verl", model="/tmp/model").values["model_path"] == "/tmp/model"
    with pytest.raises(ConfigError, match="model_path must be one of the"):
        allowed({**values, "model_path": "/etc"}, known=(), trainer="verl")


def test_no_folder_that_a_command_of_verl_names_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer: the folder's config.json would be read to know whether the embeddings are tied."""
    monkeypatch.setattr("tempfile.tempdir", None)  # an answer sets it in its process, which is this one
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("not JSON")
    text = VERL.replace("a/b", str(tmp_path / "model"))
    with pytest.raises(TornFile):
        source_of(_script(tmp_path, text))
    (tmp_path / "answer").mkdir()
    *_, last = told_without_simulation(text, tmp_path / "answer")
    assert last["is"] == "error"
    assert "model_path must be one of the" in str(last["text"])


def _script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


def test_a_deepspeed_file_that_the_tool_ships_is_known_by_its_name_though_no_file_is_read(tmp_path: Path) -> None:
    found = pasted(f"{LLAMA}deepspeed: /etc/examples/deepspeed/ds_z3_config.json", tmp_path)
    assert found.launch["deepspeed_config"]["zero_stage"] == 3  # type: ignore[index]
    assert any(
        "ds_z3_config.json is not here: the file of that name that LLaMA-Factory ships" in n for n in found.notes
    )


@pytest.mark.parametrize(
    "text", ["a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [*b, *b]\n" * 9000, "[" * 5000, "a: !!python/x", "- a", "x"]
)
def test_a_yaml_that_would_blow_up_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        pasted(text, tmp_path)


def told_without_simulation(text: str, folder: Path, **more: object) -> list[Line]:
    """The lines of an answer that ends before it simulates anything."""
    asked = {"text": text, "card": "h100", **more}
    request = {"question": asdict(Question.from_json(asked)), "seconds": {"verdict": 60.0, "advice": 0.0}, "socket": ""}
    (folder / "question.json").write_text(json.dumps(request))
    run(str(folder / "question.json"))
    return [json.loads(line) for line in (folder / TOLD).read_text().splitlines()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\n  b: 2", "the recipe: not valid YAML: a ':' where no key may stand: the line is "
         "indented too far, or a text with ': ' has no quotes (line 2, column 4)"),
        ("python train.py", "no training is started in the file: it must call"),
        (f"{LLAMA}deepspeed: my.json", "read as a file of LLaMA-Factory: 'my.json' is a file, and no file that is "
         "named is read here: leave it out, and choose under More how the cards share the model"),
        (f"model_name_or_path: {MODEL}\nmax_length: 64\npacking: false\nper_device_train_batch_size: 2000",
         "per_device_train_batch_size must be at most 1,024 here"),
    ],
)  # fmt: skip
def test_an_error_names_no_place_of_this_machine_and_the_pages_own_fields(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)  # an answer sets it in its process, which is this one
    *_, last = told_without_simulation(text, tmp_path)
    assert last["is"] == "error"
    assert str(last["text"]).startswith(says)
    assert str(tmp_path) not in json.dumps(last)


def test_a_file_that_is_not_simulated_is_explained_by_its_own_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    (explained,) = told_without_simulation(f"{LLAMA}use_unsloth: true\n", tmp_path)
    assert (explained["is"], explained["tool"]) == ("explained", "LLaMA-Factory")
    assert str(explained["why"]).startswith("use_unsloth: Unsloth's kernels")
    assert "not simulated" not in dict(explained["facts"])  # type: ignore[call-overload]
    assert any("x gradient_accumulation_steps" in text for _, text in explained["facts"])  # type: ignore[attr-defined]


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_server_answers_to_the_address_that_it_prints() -> None:
    for host, asked in (("127.0.0.2", "127.0.0.2:7860"), ("::1", "[::1]:7860"), ("localhost", "localhost")):
        access = _access(parser().parse_args(["web", "--host", host]))
        assert access.refusal(asked, None) is None
        assert access.refusal("evil.example:7860", None) is not None


def test_another_address_than_this_machines_needs_the_flag_of_strangers() -> None:
    _check(parser().parse_args(["web"]))
    _check(parser().parse_args(["web", "--host", "::1"]))
    _check(parser().parse_args(["web", "--host", "0.0.0.0", "--public"]))
    for wrong in (["--host", "0.0.0.0"], ["--host", "me.example"], ["--port", "70000"]):
        with pytest.raises(ConfigError):
            _check(parser().parse_args(["web", *wrong]))
    assert PUBLIC.at_once <= 2


def test_a_simulation_that_does_not_start_ends_the_command_with_its_last_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "ready", and each question was told to ask again."""
    broken = [sys.executable, "-c", "import sys; sys.exit('ImportError: undefined symbol: _PyModule_Add')"]
    popen = subprocess.Popen
    monkeypatch.setattr("autofit.web.simulator.subprocess.Popen", lambda _, **how: popen(broken, **how))
    assert main(["web", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "ready" not in said
    assert "the simulation does not start; it printed last: ImportError: undefined symbol: _PyModule_Add" in said


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["web", "--port", str(taken.getsockname()[1])]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "choose another --port" in said.err


# -- the whole --------------------------------------------------------------------------------------------------------

SMALL = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
         "tie_word_embeddings": True, "max_position_embeddings": 2048}  # fmt: skip
RECIPE = """dtype: bfloat16
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
max_length: 128
packing: false
output_dir: /etc
"""
_WAIT_MS = 300_000  # on a loaded machine
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
          "--disable-component-update", "--disable-sync"]  # fmt: skip

OF_SEVERAL = RECIPE.replace("packing: false\n", "")  # of sft, dpo or reward
UNNAMED = """[...document.querySelectorAll('input:not([type=hidden]), select, textarea, button')].filter(
  (e) => (!e.labels?.length && !e.ariaLabel && !e.textContent.trim())
    || (e.tagName === 'BUTTON' && e.ariaLabel && !e.ariaLabel.includes(e.textContent))).length"""


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_secret")
        patch.setattr("autofit.web.simulator._START_S", 200.0)
        with Simulator(replace(ALONE, advice_s=120.0)) as made:
            home = made.home
            yield made
    assert not home.exists()


def left_by(simulator: Simulator) -> list[Path]:
    """Folders of answers that stay for 15 s: simulations that are being ended may write for a moment."""
    end = time.monotonic() + 15
    while (found := list(simulator.home.glob("answer-*"))) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def small(**more: object) -> Question:
    return Question.from_json({"text": RECIPE, "config": json.dumps(SMALL), "card": "rtx4090", **more})


def without_advice(simulator: Simulator, question: Question) -> list[Line]:
    """The lines of an answer whose changes nobody asks for: each of them is simulated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))
        return [line for line in simulator.answer(question) if line is not None]


@pytest.mark.slow
def test_an_answer_has_the_verdict_and_the_phases_and_leaves_nothing_behind(simulator: Simulator) -> None:
    told = without_advice(simulator, small())  # the browser is shown changes, below
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["verdict"] == "fits"
    assert "trains on 4 samples: 2 at a time x 2 accumulation steps x 1 card" in str(verdict["batch"])
    phases: list[dict[str, Any]] = verdict["phases"]  # type: ignore[assignment]
    assert {"load", "update", "optimizer"} <= {phase["name"] for phase in phases}
    for phase in phases:
        beside = phase["bytes"] - verdict["context_bytes"] - sum(phase["categories"].values())
        assert 0 <= beside < 2**20  # the allocator's rounding
    course: dict[str, Any] = verdict["course"]  # type: ignore[assignment]
    assert {"update", "optimizer"} <= {name for name, _, _ in course["phases"]}
    totals = [sum(parts) * 2**20 for parts in zip(*course["live"].values(), strict=True)]
    most = max(phase["bytes"] for phase in phases if phase["name"] in ("update", "optimizer"))
    most -= verdict["context_bytes"]
    assert max(totals) == pytest.approx(most, rel=0.02)
    assert str(simulator.home) not in json.dumps(told)
    assert any("left out: output_dir" in str(line["text"]) for line in told if line["is"] == "note")
    assert not left_by(simulator)
    environment = Path(f"/proc/{simulator.pid}/environ").read_text()
    assert "hf_secret" not in environment
    assert "HF_HUB_OFFLINE=1" in environment
    for path in simulator.home.rglob("*"):  # what is kept until the end says nothing of the question
        assert not path.is_file() or b"max_length" not in path.read_bytes()


@pytest.mark.slow
def test_a_pasted_model_is_simulated_once(simulator: Simulator) -> None:
    kept = simulator.home / "cache" / "probes"
    question = small(changes={"use_peft": True, "lora_r": 7})
    before = set(kept.glob("*.json"))
    first = without_advice(simulator, question)
    made = set(kept.glob("*.json")) - before
    assert len(made) == 1
    assert without_advice(simulator, question) == first
    assert set(kept.glob("*.json")) - before == made
    assert all(b"answer-" not in path.read_bytes() for path in made)  # no folder of the answer that it was made for


@pytest.mark.slow
def test_prompts_are_as_long_as_an_older_trl_cut_them_where_nobody_says_how_long(simulator: Simulator) -> None:
    text = """model_name_or_path: Qwen/Qwen2.5-0.5B
torch_dtype: bfloat16
max_prompt_length: 300
max_completion_length: 16
num_generations: 2
per_device_train_batch_size: 2
reward_funcs: [think_format_reward]
"""
    told = without_advice(simulator, small(text=text))
    assert any("prompts of 300 tokens are taken" in str(line.get("text")) for line in told)


@pytest.mark.thorough  # the browser's question is one, below
def test_a_recipe_of_several_trainers_is_asked_which_and_answered_for_that_one(simulator: Simulator) -> None:
    *_, choice = without_advice(simulator, small(text=OF_SEVERAL))
    assert choice["is"] == "choose"
    assert choice["trainers"] == ["sft", "dpo", "reward"]
    assert "max_length may belong to a recipe of sft or dpo or reward" in str(choice["text"])
    told = without_advice(simulator, small(text=OF_SEVERAL, trainer="sft"))
    assert next(line for line in told if line["is"] == "verdict")["trainer"] == "sft"


@pytest.mark.slow
def test_an_answer_that_nobody_waits_for_ends_and_so_does_one_that_takes_too_long(simulator: Simulator) -> None:
    lines = simulator.answer(small(changes={"lora_r": 3, "use_peft": True}))
    next(lines)
    lines.close()
    assert not left_by(simulator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autofit.web.simulator._START_S", -299.7)
        patch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))
        told = [line for line in simulator.answer(small(changes={"lora_r": 5, "use_peft": True})) if line is not None]
    assert "took longer than it may" in str(told[-1]["text"])
    assert not left_by(simulator)


@pytest.mark.thorough  # CI has an ms-swift script here, below, and a LLaMA-Factory file by a command (test_readers.py)
def test_another_tools_file_is_simulated_as_that_tool_trains(simulator: Simulator) -> None:
    yaml = """model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
finetuning_type: lora
dataset: mine
do_train: true
template: qwen
cutoff_len: 64
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
"""
    told = without_advice(simulator, Question.from_json({"text": yaml, "card": "h100"}))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["trainer"] == "hf"
    assert "trains on 2 samples: 1 at a time x 2 accumulation steps" in str(verdict["batch"])
    assert any("a file of LLaMA-Factory" in str(line["text"]) for line in told if line["is"] == "note")


@pytest.mark.slow
def test_a_command_of_verl_is_simulated_and_its_changes_are_overrides_of_its_own(simulator: Simulator) -> None:
    changes = {"ppo_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    asked = {"text": VERL, "config": json.dumps(SMALL), "card": "rtx4090", "changes": changes}
    told = without_advice(simulator, Question.from_json(asked))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert (verdict["trainer"], verdict["count"]) == ("verl", 2)
    assert {"rollout", "sync", "update"} <= {phase["name"] for phase in verdict["phases"]}  # type: ignore[attr-defined]
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 " in str(verdict["yaml"])


OF_TWO = f"NPROC_PER_NODE=2 {SWIFTS} --gradient_accumulation_steps 2 --deepspeed zero2"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"text": OF_TWO}, pytest.param({"count": 2}, marks=pytest.mark.thorough)], ids=["script", "recipe"]
)
def test_a_sharing_that_is_chosen_keeps_the_ranks_of_the_recipe_and_its_batch(
    asked: dict[str, object], simulator: Simulator
) -> None:
    """The config of that name which TRL ships has eight."""
    told = without_advice(simulator, small(sharing="fsdp2", **asked))
    verdict = next(line for line in told if line["is"] == "verdict")
    assert verdict["count"] == 2
    assert "trains on 4 samples" in str(verdict["batch"])
    *_, last = without_advice(simulator, small(sharing="fsdp2"))
    assert "choose the number of cards under More too" in str(last["text"])


@pytest.mark.slow
def test_cards_are_compared_with_their_prices(simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    request = simulator._request
    monkeypatch.setattr(simulator, "_request", lambda *asked: {**request(*asked), "entry": "few_cards:run"})
    told = [line for line in simulator.answer(small(kind="cards")) if line is not None and line["is"] == "card"]
    assert [line["card"] for line in told] == ["h100", "rtx4090"]  # the largest first
    assert all(line["verdict"] == "fits" and line["usd_per_1000_steps"] for line in told)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [(390, 844, "dark"), pytest.param(850, 450, "light", marks=pytest.mark.thorough)],
)
def test_the_page_works_in_a_real_browser(
    simulator: Simulator, width: int, height: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from playwright.sync_api import expect, sync_playwright

    with served() as (server, _), sync_playwright() as playwright:
        server.answers = simulator
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(_WAIT_MS)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the answer")).to_be_focused()
        page.get_by_text("More: length").click()
        page.get_by_label("config.json").fill(json.dumps(SMALL))
        page.get_by_label("Recipe (YAML) or command").fill(OF_SEVERAL)
        page.get_by_label("Card", exact=True).select_option("rtx4090")
        page.get_by_label("Recipe (YAML) or command").press("Control+Enter")
        page.get_by_role("button", name="sft").click()
        expect(page.get_by_role("heading", name="fits NVIDIA GeForce RTX 4090")).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_role("img", name="The peak is update")).to_be_visible()
        expect(page.get_by_role("img", name="Memory over one step, by category: update")).to_be_visible()
        first = page.get_by_role("button", name="Apply per_device_train_batch_size 2 -> 4").first
        expect(first).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_role("status")).to_contain_text("An optimizer step trains on 4 samples")
        take(page, f"answer-{width}-{scheme}")
        monkeypatch.setattr(simulator, "_limits", replace(ALONE, advice_s=0.0))  # the verdict of the next is enough
        first.click()
        expect(page.get_by_role("button", name="Undo per_device_train_batch_size")).to_be_visible(timeout=_WAIT_MS)
        expect(page.get_by_text("trains on 4 samples: 4 at a time x 1 accumulation step").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate(UNNAMED) == 0
        link = page.url
        assert "#q=" in link
        other = browser.new_page()
        other.goto(link)
        expect(other.get_by_role("button", name="Undo per_device_train_batch_size")).to_be_visible(timeout=_WAIT_MS)
        assert not problems
        browser.close()


NO_FIT = {
    "is": "verdict", "verdict": "does not fit", "why": "update of the longest sample (512 tokens), 0.4 GB over",
    "card": "rtx4090", "card_name": "NVIDIA GeForce RTX 4090", "count": 1, "model": MODEL, "trainer": "sft",
    "used_bytes": 25_000_000_000, "shown_bytes": 25_000_000_000, "shown_as": "used", "capacity_bytes": 25_250_000_000,
    "most_bytes": None, "least_bytes": 25_700_000_000, "step_s": None, "step_s_90": None, "rollout_s": None,
    "batch": "An optimizer step trains on 4 samples: 4 at a time x 1 accumulation step x 1 card.",
    "facts": [["model", MODEL], ["weights", "a_long_name_of_a_file_without_a_place_to_break_it" * 3]],
    "phases": [{"name": "update", "bytes": 24e9, "cached_bytes": 1, "categories": {"weights": 20e9}}],
    "context_bytes": 600_000_000, "course": None, "warnings": [], "yaml": "a: 1",
}  # fmt: skip
CARD = {
    "is": "card", "card": "rtx4090", "name": "NVIDIA GeForce RTX 4090", "count": 1, "verdict": "fits", "tier": "",
    "used_bytes": 17_100_000_000, "capacity_bytes": 25_300_000_000, "step_s": 7.41, "over": False, "samples_per_s": 1.0,
    "usd_per_hour": 0.74, "usd_per_1000_steps": 1.52, "words": "", "reason": "", "price": "a list", "unit": "samples",
}  # fmt: skip
EXPLAINED = {
    "is": "explained", "tool": "verl", "why": "Megatron is not simulated", "wrong": [], "unread": [],
    "facts": [["effective batch", "per_device_train_batch_size 2 x gradient_accumulation_steps 2"]],
}  # fmt: skip


# Names of phases that begin where the one before it, as wide as it is drawn along its own line, has not ended.
OVERLAPS = """[...document.querySelectorAll('#picture > svg > text')].filter((one) => one.textContent.match(/^[a-z]/)
  && !one.classList.length).filter((one, place, all) => { if (!place) return false; const before = all[place - 1];
    const slanted = one.getAttribute('transform');
    const [a, b] = [before, one].map((text) => text.getBBox());
    return slanted ? (b.x + b.width - a.x - a.width) * Math.sin(40 * Math.PI / 180) < a.height : a.x + a.width > b.x;
  }).length"""


@contextmanager
def on_a_phone() -> Iterator["Page"]:
    """The page in a real browser, as narrow as a phone."""
    from playwright.sync_api import sync_playwright

    with served() as (server, _), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=_FLAGS)
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        yield page
        browser.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
def test_every_answer_is_in_whole_sentences_and_as_wide_as_a_phone() -> None:
    with on_a_phone() as page:

        def shown(line: Mapping[str, object]) -> str:
            page.evaluate("(line) => hear(line)", line)
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, line["is"]
            table = page.locator(".wide:has(caption)")
            assert table.count() == 0 or table.evaluate("(one) => one.scrollWidth <= one.clientWidth")
            return page.inner_text("#result")

        told = shown(NO_FIT)
        assert "It runs out of memory: update of the longest sample (512 tokens), 0.4 GB over." in told
        assert "25.7 GB\nneeded, of 25.3 GB" in told
        assert "Does not fit: 25.7 GB needed, of 25.3 GB. An optimizer step" in page.inner_text("#said")
        assert "the next tensor found no free piece that is large enough." in told
        assert "1 more, below 0.1 GB" not in told
        shown({"is": "note", "text": "no `dtype` is given"})
        assert page.inner_html("#notes") == "<li>No <code>dtype</code> is given.</li>"
        names = ("load", "sync", "rollout", "old log-probs", "reference", "loading", "update", "optimizer")
        phases = [{**cast(Any, NO_FIT["phases"])[0], "name": name} for name in names]
        told = shown({**NO_FIT, "least_bytes": None, "step_s": 60.0, "phases": phases})
        assert "needed" not in told  # a figure that is not known has no tile
        assert "1m00s" in told  # as the commands print it
        assert page.evaluate(OVERLAPS) == 0
        shown({"is": "error", "text": "the recipe is none"})
        assert page.inner_text("#status") == "The recipe is none."
        closest = {"words": "a: 1", "set": {"a": 1}, "tier": "neutral", "used_bytes": 78.4e9, "step_s": None,
                   "tight": False, "fits": False, "speedup": None, "reasons": []}  # fmt: skip
        none: dict[str, object] = {"mends": [], "faster": [], "card": None, "lines": [], "ended_early": False}
        told = shown({"is": "advice", **none, "closest": closest})
        assert "The closest:\n\nneutral a: 1\n\ndoes not fit: it needs 78.4 GB" in told
        words = "--use_peft true --activation_offloading true --dtype bfloat16 --gradient_accumulation_steps 2"
        assert words in shown({"is": "advice", **none, "closest": {**closest, "words": words}})
        heights = page.evaluate("[...document.querySelectorAll('.changes code span')].map((one) => one.offsetHeight)")
        assert len(set(heights)) == 1, "an option is broken behind its hyphens"
        told = shown(EXPLAINED)
        assert "It cannot be simulated: Megatron is not simulated." in told
        told = shown(CARD)
        assert "$1.52" in told
        for text, said in (
            ("train.py is read", "train.py is read."), ("ms-swift makes logits", "ms-swift makes logits."),
            ("kernel times", "Kernel times."), ("a_key is left out", "a_key is left out."), ("2 ranks", "2 ranks."),
            ("verl's config", "verl's config."), ("left out: a", "Left out: a."), ("examples/a is", "examples/a is."),
        ):  # fmt: skip
            assert page.evaluate("(text) => sentence(text)", text) == said
        methods = page.evaluate("[...field('method').options].map((one) => one.value)")
        for method in methods:  # each is a recipe that its trainer takes
            values = parse_yaml(page.evaluate("(method) => recipe('a', method)", method))
            trainer = cast(Any, load(method.partition("-")[0]))
            trainer.parse(values, overrides={"use_cpu": True})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/chromium").exists(), reason="needs Debian's chromium")
def test_what_is_applied_together_is_undone_together_since_one_alone_would_change_the_batch() -> None:
    from playwright.sync_api import expect

    with on_a_phone() as page:
        recipe, undo = page.get_by_label("Recipe (YAML) or command"), page.get_by_role("button", name="Undo")
        recipe.fill("trl sft --model_name_or_path a")
        for change in ({"micro": 4, "accumulation": 2}, {"env": {"A": "1"}}, {"env": {"B": "2"}}):
            page.evaluate("(set) => apply(set)", change)
        page.get_by_role("button", name="Check").click()  # keeps them: the recipe is the same
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2, "env": {"A": "1", "B": "2"}}
        page.evaluate("(line) => hear(line)", NO_FIT)
        assert page.evaluate("field('result').getBoundingClientRect().top") < 100  # a phone shows the answer at once
        undo.click()
        page.evaluate("(line) => hear(line)", NO_FIT)
        undo.click()
        page.evaluate("(line) => hear(line)", NO_FIT)
        expect(undo).to_have_accessible_name("Undo micro: 4, accumulation: 2")
        page.goto(page.url)
        page.reload()
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2}
        page.get_by_label("Card", exact=True).select_option("rtx4090")
        for line in (NO_FIT, {**CARD, "card": "h100", "set": {"dtype": "bfloat16"}}):
            page.evaluate("(line) => hear(line)", line)
        page.get_by_role("button", name="Use h100").click()  # the card, and the change with which it fits
        assert page.evaluate("merged()") == {"micro": 4, "accumulation": 2, "dtype": "bfloat16"}
        page.evaluate("(line) => hear(line)", NO_FIT)
        expect(undo).to_have_accessible_name("Undo dtype: bfloat16, h100 in place of rtx4090")
        undo.click()
        assert page.evaluate("[field('card').value, merged()]") == ["rtx4090", {"micro": 4, "accumulation": 2}]
        page.get_by_label("Model", exact=True).fill(MODEL)
        page.get_by_label("Training", exact=True).select_option("sft-full")
        expect(page.get_by_role("status")).to_contain_text("The recipe below stays as it is")
        page.evaluate("(line) => hear(line)", NO_FIT)
        page.evaluate("hear({is: 'note', text: 'kernel times are scaled'})")
        page.get_by_role("button", name="Compare cards").click()  # its notes come beside those of the verdict
        page.wait_for_function("!status.className")
        expect(page.locator("#notes")).to_contain_text("Kernel times are scaled.")
        page.evaluate("field('tokens').value = '0'")
        page.get_by_role("button", name="Check").click()  # the wrong field is folded away: it is shown
        expect(page.get_by_label("Tokens of the longest sample")).to_be_focused()
        page.evaluate("field('tokens').value = ''")
        page.evaluate("start.hidden = false")
        page.get_by_role("button", name="DPO, Qwen3-4B").click()  # an example shows what it chose
        chosen = page.evaluate("['model', 'method', 'card'].map((id) => field(id).value)")
        assert chosen == ["Qwen/Qwen3-4B", "dpo-lora", "rtx4090"]
        page.get_by_label("Training", exact=True).select_option("sft-full")
        assert "beta" not in recipe.input_value()
        recipe.fill("trl sft --model_name_or_path b")
        assert page.evaluate("merged()") == {}


def take(page: "Page", name: str) -> None:
    """A screenshot to look at, where AUTOFIT_SCREENSHOTS names a folder."""
    if "AUTOFIT_SCREENSHOTS" in os.environ:
        page.screenshot(path=Path(os.environ["AUTOFIT_SCREENSHOTS"]) / f"{name}.png", full_page=True)
