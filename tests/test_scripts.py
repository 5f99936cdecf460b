"""`autofit fit-check`: whole scripts, run unchanged on a card that is not there."""

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.recipe import catalogue
from autofit.scripts.changes import ACCUMULATION, CHECKPOINTING, MICRO, ScriptAdvice
from autofit.scripts.data import Columns, MadeUp, stood_in
from autofit.scripts.packages import _INSTALLS, _REACHES, idle
from autofit.scripts.running import Script, code_of, fit_script

SCRIPT = """
import sys, torch
from beside import width
net = torch.nn.Linear(width, width, bias=False).to("cuda")
optimizer = torch.optim.AdamW(net.parameters())
for number in range(int(sys.argv[1])):
    net(torch.ones(8, width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    open(__file__ + ".steps", "w").write(str(number + 1))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("width = 1024\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_a_script_ends_after_its_steps_and_its_states_are_seen(script: Path) -> None:
    found = fit_script(Script(path=script, arguments=["1000"]), gpu="l4", steps=3).found
    assert found.fits
    assert script.with_name("train.py.steps").read_text() == "2"  # the third step was the last that it did
    size = 4 * 1024 * 1024
    assert 4 * size <= found.peak_allocated_bytes <= 6 * size + 20e6  # weights, gradients, two states, a workspace
    assert {row.category for row in found.alive_at_peak} >= {"weights", "optimizer", "gradients"}


def test_the_command_says_a_script_that_does_not_fit(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["fit-check", "--gpu", "l4", "--target-vram", "200MB", "--json", str(script), "5"]
    assert main(options) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["fits"], found["target_bytes"]) == (False, 200_000_000)
    assert main(["fit-check", str(script), "--gpu", "l4"]) == 2
    assert "before the script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("import socket\nsocket.create_connection(('example.org', 80))", "wanted to reach example.org, and sees no"),
        ("raise ValueError('my own')", "failed before its first step: ValueError: my own .*train.py:1"),
        (
            "import subprocess\nsubprocess.run(['git', 'clone', 'https://example.org/a.git'], check=True)",
            "CalledProcessError: Command '.'git', 'clone', .* wanted to reach example.org, and sees no network",
        ),
        ("import torch.no_such", "imports torch.no_such, which the torch .* here does not have"),
        ("import torch\nimport no_such.part", "imports no_such, which is not installed here .*pip install no_such"),
        ("open('data/mine.bin', 'rb')", "reads 'data/mine.bin', which is not there .*train.py:1.; make it first"),
        ("import sys\nsys.exit(3)", "exit code 3 before its first step"),
        ("import torch\ntorch.ones(3)", "put nothing on the card"),
    ],
)
def test_a_script_that_cannot_be_run_is_told_with_its_line(text: str, wrong: str, script: Path) -> None:
    script.write_text(text)
    before = socket.socket.connect
    with pytest.raises(ConfigError, match=wrong):
        fit_script(Script(path=script), gpu="l4")
    assert socket.socket.connect is before


def test_a_package_of_the_scripts_project_is_found_as_if_it_were_installed(script: Path, tmp_path: Path) -> None:
    (tmp_path / "beside.py").unlink()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "src" / "mine").mkdir(parents=True)
    (tmp_path / "src" / "mine" / "__init__.py").write_text("from .size import width\n")
    (tmp_path / "src" / "mine" / "size.py").write_text("import wandb\nwidth = 1024 if wandb.init() == 0 else 1024\n")
    (tmp_path / "scripts").mkdir()
    moved = tmp_path / "scripts" / "train.py"
    moved.write_text(SCRIPT.replace("from beside", "from mine"))
    before = list(sys.path)
    assert fit_script(Script(path=moved, arguments=["5"]), gpu="l4").found.fits
    assert sys.path == before
    assert "mine" not in sys.modules
    (tmp_path / "pyproject.toml").unlink()
    with pytest.raises(ConfigError, match="imports mine, which is not installed here"):
        fit_script(Script(path=moved, arguments=["5"]), gpu="l4")


@pytest.mark.parametrize(("name", "what"), [("lf.yaml", "a YAML"), ("run.sh", "a shell script")])
def test_a_recipe_given_as_a_script_is_led_to_the_command_that_reads_it(name: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("stage: sft\n")
    with pytest.raises(ConfigError, match=f"is {what}, and fit-check runs .* of Python; `autofit check FILE"):
        code_of(tmp_path / name)


def test_a_script_that_no_change_mends_is_told_so(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fit_script(Script(path=script, arguments=["5"]), gpu="l4", target_vram="10MB")
    seen = {MICRO: 1, ACCUMULATION: 1, CHECKPOINTING: True}  # nothing is left to change
    monkeypatch.setattr("autofit.scripts.running.fit_script", lambda *args, **more: replace(found, arguments=seen))
    assert main(["fit-check", "--gpu", "l4", "--target-vram", "10MB", str(script), "5"]) == 1
    assert "no smaller micro-batch was found with which it fits" in capsys.readouterr().out


def test_a_notebook_is_its_code_without_commands(tmp_path: Path) -> None:
    cells = ["!pip install a \\\n   b\nx = 1", ["%%bash\n", "ls"], "y = (3\n     % 2)", "names = !ls\nz = 2"]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": [
        {"cell_type": "markdown", "source": "!"}, *({"cell_type": "code", "source": cell} for cell in cells)
    ]}))  # fmt: skip
    found: dict[str, object] = {}
    exec(code_of(path), found)
    assert (found["x"], found["y"], found["z"]) == (1, 1, 2)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="no notebook of Jupyter's format"):
        code_of(path)


INSTALLS = """
!pip install -q autofit-is-not-there
import os, subprocess, sys, torch
get_ipython().system("pip install a")
assert os.system("pip install -q autofit-is-not-there") == 0
subprocess.check_call([sys.executable, "-m", "pip", "install", "autofit-is-not-there"])
subprocess.run("uv pip install autofit-is-not-there && exit 3", shell=True, check=True)
assert subprocess.check_output(["echo", "pip", "and", "install"]) == b"pip and install\\n"
import pip
assert pip.main(["install", "autofit-is-not-there"]) == 0
torch.ones(2, device="cuda")
"""


def test_a_script_that_installs_packages_installs_none_and_a_note_names_each_command(tmp_path: Path) -> None:
    path = tmp_path / "exported.py"  # by Colab, with a command of its notebook
    path.write_text(INSTALLS)
    notes = [note for note in fit_script(Script(path=path), gpu="l4").found.notes if "installs nothing" in note]
    assert len(notes) == 4
    assert notes[0] == "'pip install -q autofit-is-not-there' was not run: fit-check installs nothing"


FETCHES = """
import os, subprocess, torch
assert os.system("wget -q http://example.org/a.json") != 0
assert subprocess.run("cd . && /usr/bin/git -c a=b clone git@example.org:a/b.git", shell=True).returncode == 1
assert subprocess.run(["echo", "curl ", "x"]).returncode == 0
torch.ones(2, device="cuda")
"""


def test_a_command_of_a_script_that_fetches_is_not_run_and_a_note_names_it(tmp_path: Path) -> None:
    path = tmp_path / "fetches.py"
    path.write_text(FETCHES)
    notes = [note for note in fit_script(Script(path=path), gpu="l4").found.notes if "no network" in note]
    assert notes == [
        "'wget -q http://example.org/a.json' was not run: a script sees no network here",
        "'cd . && /usr/bin/git -c a=b clone git@example.org:a/b.git' was not run: a script sees no network here",
    ]


@pytest.mark.parametrize("command", ["git status", "git commit -m 'curl x'", "python curl.py", "ls curl /wget "])
def test_a_command_that_stays_on_this_machine_is_run(command: str) -> None:
    assert _REACHES.search(command) is None


@pytest.mark.parametrize("command", ["python pip_install.py", "uv run train.py --add 3", "echo upgrade pip"])
def test_a_command_that_installs_nothing_is_run(command: str) -> None:
    assert _INSTALLS.search(command) is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("d = load_dataset('x')\nd['train'].map(lambda row: t(row['question'] + row['answer']))", "question answer"),
        ("print(d[3]['messages'])", "messages"),
        ("def right(completions, solution, **more): ...\nGRPOTrainer()", "solution prompt"),
        ("DPOTrainer(d)", "prompt chosen rejected"),
        ("SFTTrainer(d)", "text"),
        ("d.map(lambda row: row['messages'][0]['content'] if row['messages'][0]['role'] else '')", "messages"),
        ("os.environ['HOME'], batch['input_ids']", "text"),
    ],
)
def test_the_columns_of_made_up_data_are_those_that_the_script_reads(text: str, names: str) -> None:
    columns = Columns(text)
    assert columns.names == tuple(names.split())
    row = columns.row(100)
    assert tuple(row) == columns.names
    chat = row.get("messages")
    if isinstance(chat, list):
        assert [len(turn["content"].split()) for turn in chat] == [50, 50]
    else:
        pair = "chosen" in row
        words = [len(str(value).split()) for value in row.values()]
        rollouts = "GRPO" in text  # whose prompt is one column, and the other for its reward
        assert words == [100, 100] if rollouts else sum(words) == (150 if pair else 100)


def test_a_column_is_a_chat_where_a_function_takes_turns_of_it() -> None:
    code = "def last(row):\n    return [turn for turn in row['chosen'][:-1] if turn['role'] == 'user'] + row['text']"
    row = Columns(code).row(40)
    assert isinstance(row["text"], str)
    chosen = row["chosen"]
    assert isinstance(chosen, list)
    assert [turn["role"] for turn in chosen] == ["user", "assistant"]
    assert isinstance(Columns(code.replace("role", "name")).row(40)["chosen"], str)


def test_a_prompt_is_a_turn_where_trls_rewards_read_turns_and_the_script_makes_none() -> None:
    code = "from trl.rewards import accuracy_reward\nGRPOTrainer(reward_funcs=accuracy_reward)"
    row = Columns(code).row(30)
    assert set(row) == {"solution", "prompt"}
    prompt = row["prompt"]
    assert isinstance(prompt, list)
    assert [(turn["role"], len(turn["content"].split())) for turn in prompt] == [("user", 30)]
    makes = code + "\nd.map(lambda row: {'prompt': [{'role': 'user', 'content': row['problem']}]})"
    assert Columns(makes).row(30)["problem"] == Columns(makes).row(30)["solution"]


def test_packages_that_only_report_do_nothing_where_they_are_missing() -> None:
    code = """
import os
import lm_eval.tasks as tasks
from google.colab import userdata
from math_verify import parse, verify
try:
    import swanlab
except ImportError:
    swanlab = None
class Mine(tasks.Callback): ...
@tasks.traced
def twice(number): return 2 * number
os.environ["A_TOKEN_OF_MINE"] = userdata.get("A_TOKEN_OF_MINE")
reward = float(verify(parse("1"), parse("1"))) if len(parse("1")) == 0 else 1.0
with tasks.init(project="mine") as run:
    run.log({"loss": 1.0})
found = Mine() is not None, twice(3), reward, swanlab, isinstance(1, tasks.Run), str | tasks.Run
"""
    assert not any(find_spec(name) for name in ("lm_eval", "google.colab", "math_verify", "swanlab")), "installed"
    notes: list[str] = []
    before = set(sys.modules)
    with mock.patch.dict(os.environ), idle(code, notes.append):
        own: dict[str, object] = {}
        exec(code, own)
    found = own["found"]
    assert isinstance(found, tuple)
    assert found[:5] == (True, 6, 0.0, None, False)
    assert set(sys.modules) == before
    assert notes == ["google.colab, lm_eval, math_verify: not needed on the card, so what they do is left out"]
    with idle("import deepspeed_of_mine, flash_attn", notes.append), pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")
    assert len(notes) == 1


def test_made_up_rows_are_read_from_files_that_are_missing_and_written_over_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from huggingface_hub import constants

    for told in (constants, datasets.config):  # as a script of its own is: else the hub is asked again for 23 s
        monkeypatch.setattr(told, "HF_HUB_OFFLINE", True)
    notes: list[str] = []
    (tmp_path / "folder").mkdir()
    made = MadeUp(Columns("row['question']"), 20, tmp_path / "folder", notes.append)
    mine = tmp_path / "mine.json"
    mine.write_text('{"question": "my own"}\n')
    with stood_in(made, lambda name: name == __file__):
        assert datasets.load_dataset("json", data_files=str(mine), split="train")[0] == {"question": "my own"}
        assert made.names == []
        with open(tmp_path / "missing.json") as file:
            rows = json.load(file)
        assert len(rows[0]["question"].split()) == 20
        with pytest.raises(FileNotFoundError):
            (tmp_path / "missing.bin").open()
        data = datasets.load_dataset("somebody/data", split="train")
        data.to_json(mine)
        again = datasets.load_dataset("json", data_files={"train": str(mine)})["train"]
        assert again[0] == data[0] == rows[0]
        lost = datasets.load_dataset("json", data_files=str(tmp_path / "lost.jsonl"))
        assert set(lost) == {"train", "test", "validation"}
    assert mine.read_text() == '{"question": "my own"}\n'
    assert len(notes) == 3
    assert made.unknown_column(KeyError("answer")) == "answer"
    assert made.unknown_column(KeyError("Column answer not in the dataset. Current columns")) == "answer"
    assert made.unknown_column(ValueError("Column name ['answer'] not in the dataset. Current columns")) == "answer"
    assert made.unknown_column(KeyError("question")) is None
    assert made.unknown_column(ValueError("answer")) is None


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("somebody/dolphin-2.1-mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("somebody/Llama-3.1-8B-tuned", "meta-llama/Llama-3.1-8B"),
        ("somebody/llama-3-1-8b-tuned", "meta-llama/Llama-3.1-8B"),
        ("somebody/a-qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B"),
        ("somebody/qwen2.5-coder-7b-mine", "Qwen/Qwen2.5-Coder-7B"),
        ("somebody/Llama-2-7B-GPTQ", None),
        ("somebody/open_llama_3b", None),
        ("somebody/Qwen9-VL-7B-tuned", None),
        ("somebody/Qwen2.5-VL-7B-tuned", "Qwen/Qwen2.5-VL-7B-Instruct"),
    ],
)
def test_a_models_name_says_the_model_that_it_was_trained_from(name: str, base: str | None) -> None:
    found = catalogue.base_of(name)
    assert (found and found.name) == base


def figures(micro: int, accumulation: int, *, checkpointing: bool) -> dict[str, object]:
    """Of a script whose weights take 10, and whose samples take 4, or 1 with checkpoints."""
    shrinks = micro * (1 if checkpointing else 4)
    alive = [{"category": "weights", "allocated_bytes": 10}, {"category": "activations", "allocated_bytes": shrinks}]
    return {"fits": 10 + shrinks <= 20, "target_bytes": 20, "peak_allocated_bytes": 10 + shrinks, "step_s": 1.0,
            "least_capacity_bytes": 10 + shrinks, "alive_at_peak": alive}  # fmt: skip


def test_advice_keeps_the_batch_and_asks_only_for_what_may_fit() -> None:
    asked: list[tuple[object, object]] = []

    def ask(changes: Mapping[str, object]) -> dict[str, object]:
        asked.append((changes[MICRO], changes.get(CHECKPOINTING, False)))
        assert changes[ACCUMULATION] == 2  # two micro-batches are enough
        return figures(int(str(changes[MICRO])), 2, checkpointing=CHECKPOINTING in changes)

    seen = {MICRO: 16, ACCUMULATION: 3, CHECKPOINTING: False}
    found = list(ScriptAdvice(seen=seen, ask=ask).offers(figures(16, 3, checkpointing=False)))
    assert asked == [(2, False), (16, True), (8, True)]
    assert [offer.changes for offer in found] == [
        {MICRO: 2, ACCUMULATION: 24}, {MICRO: 8, ACCUMULATION: 6, CHECKPOINTING: True}
    ]  # fmt: skip
    assert [offer.most_step_s for offer in found] == [12.0, 3.0]
    assert "--set per_device_train_batch_size=8 --set gradient_accumulation_steps=6" in str(found[1])
    assert not list(ScriptAdvice(seen=seen, ask=lambda _: None).offers(figures(16, 3, checkpointing=False)))


def test_a_script_is_led_from_other_commands(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "explain"):
        assert main([command, str(script), *(["--gpu", "l4"] if command == "check" else [])]) == 2
        assert f"autofit fit-check --gpu NAME {script}" in capsys.readouterr().err


OF_UNSLOTH = """
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template, train_on_responses_only
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("little", max_seq_length=96)
model = FastLanguageModel.get_peft_model(model, r=8, use_gradient_checkpointing=CHECKPOINTS)
data = load_dataset("somebody/texts", split="train").map(lambda row: {"text": row["text"]})
trainer = SFTTrainer(model=model, tokenizer=get_chat_template(tokenizer, "qwen-2.5"), train_dataset=data,
                     args=SFTConfig(output_dir="out", per_device_train_batch_size=32, report_to="none"))
train_on_responses_only(trainer, instruction_part="a", response_part="b").train()
"""


@pytest.mark.slow
def test_a_script_of_unsloth_trains_with_transformers_peft_and_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 4 bits with adapters of float32, samples of the model's length, and float16 on a card without bfloat16."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "little").mkdir()
    known = catalogue.architecture("Qwen/Qwen2.5-0.5B")
    assert known is not None
    config = {**known.config, "num_hidden_layers": 2}
    (tmp_path / "little" / "config.json").write_text(json.dumps(config))
    peaks = {}
    for checkpoints in ("'unsloth'", "False"):
        (tmp_path / "train.py").write_text(OF_UNSLOTH.replace("CHECKPOINTS", checkpoints))
        run = fit_script(Script(path=tmp_path / "train.py", prompt_tokens=512), gpu="t4")
        peaks[checkpoints] = run.found.peak_allocated_bytes
        assert run.longest_tokens == 96
    assert peaks["'unsloth'"] < peaks["False"]
    weights = sum(row.allocated_bytes for row in run.found.alive_at_peak if row.category == "weights")
    assert weights < 0.6e9
    trained = sum(row.allocated_bytes for row in run.found.alive_at_peak if "_make_float32" in row.short_place)
    assert trained == 4 * 2 * 8 * (2 * 1792 + 2 * 1024 + 3 * 5760)  # rank 8 on seven products of two layers
    assert "unsloth" not in sys.modules
    assert any("upper bounds" in note for note in run.found.notes)


TRAINS = """
!pip install -q trl
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer, setup_chat_format
name = "Qwen/Qwen2.5-0.5B-Instruct"
tokenizer = AutoTokenizer.from_pretrained("somebody/tokenizer-alone")
model = AutoModelForCausalLM.from_pretrained(
    pretrained_model_name_or_path=name, device_map="auto", torch_dtype=torch.bfloat16, use_cache=False,
    num_hidden_layers=2,
    quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
)
model, tokenizer = setup_chat_format(model, tokenizer)
data = load_dataset("somebody/questions", split="train").select(range(10_000))
data = data.map(lambda row: {"text": row["question"] + row["answer"]}).remove_columns(["question", "answer", "url"])
arguments = SFTConfig("out", per_device_train_batch_size=16, gradient_accumulation_steps=2,
                      logging_dir="logs", report_to="wandb", gradient_checkpointing=False, bf16=True)
SFTTrainer(model, arguments, train_dataset=data, tokenizer=tokenizer, max_seq_length=256,
           peft_config=LoraConfig(r=8)).train()
"""


@pytest.mark.slow
def test_a_notebook_for_older_libraries_trains_without_its_model_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": TRAINS}]}))
    with pytest.raises(ConfigError, match=r"data of 'somebody/questions' are not on this machine.*prompt-tokens"):
        fit_script(Script(path=path), gpu="l4")
    long = fit_script(Script(path=path, prompt_tokens=256), gpu="l4")
    small = fit_script(Script(path=path, prompt_tokens=64, changes={MICRO: 8}), gpu="l4")
    assert long.arguments == {MICRO: 16, ACCUMULATION: 2, CHECKPOINTING: False}
    assert small.arguments[MICRO] == 8
    weights = sum(row.allocated_bytes for row in long.found.alive_at_peak if row.category == "weights")
    assert weights < 0.6e9  # 0.27 GB of embeddings in 16 bits and the rest in 4; 1.98 GB in float32
    stays = small.found.peak_allocated_bytes - (long.found.peak_allocated_bytes - small.found.peak_allocated_bytes) / 7
    assert weights < stays < weights + 0.05e9  # activations are in proportion to the micro-batch and to its tokens
    assert small.found.peak_allocated_bytes < 0.5 * long.found.peak_allocated_bytes
    notes = " ".join(long.found.notes)
    for word in (
        "columns question, answer",
        "tokenizer somebody/tokenizer-alone",
        "setup_chat_format",
        "max_seq_length as max_length",
        "logging_dir",
    ):
        assert word in notes
    with pytest.raises(ConfigError, match="SFTConfig has no such field; the nearest valid one is"):
        fit_script(Script(path=path, prompt_tokens=256, changes={"per_device_train_batch": 4}), gpu="l4")


FULL = """
import json, os, sys, torch, transformers, wandb, evaluate
from dataclasses import dataclass, field
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import SFTConfig, SFTTrainer
import beside
@dataclass
class Mine:
    use_cache: bool = field(default=False)
    column: str = "story"
parser = transformers.HfArgumentParser((Mine, SFTConfig))
mine, arguments = parser.parse_args_into_dataclasses()
assert arguments.warmup_steps == 0.03 and arguments.eval_strategy == "no" and arguments.lr_scheduler_type == "cosine"
rows = json.load(open("data.json"))
wandb.init(project="mine", config={"metric": evaluate.load("accuracy").compute()})
data = Dataset.from_list([{"text": beside.words(row, mine.column)} for row in rows])
model = transformers.AutoModelForCausalLM.from_pretrained(
    "somebody/a-qwen2.5-0.5b-of-mine", dtype=torch.bfloat16, use_auth_token="mine", device_map="auto",
    num_hidden_layers=2)
adapters = LoraConfig(r=8, target_modules="all-linear")
SFTTrainer(get_peft_model(model, adapters), arguments, train_dataset=data, peft_config=adapters,
           processing_class=transformers.AutoTokenizer.from_pretrained("somebody/a-qwen2.5-0.5b-of-mine")).train()
"""
OPTIONS = ("--output_dir=out", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4", "--bf16",
           "True", "--warmup_ratio", "0.03",
           "--evaluation_strategy", "no", "--lr_scheduler_type", "cosine")  # fmt: skip


@pytest.mark.slow
def test_a_script_of_several_files_trains_without_what_is_missing_and_counts_all_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FULL)
    (tmp_path / "beside.py").write_text("def words(row, name): return row['title'] + ' ' + row[name]\n")
    script = Script(path=tmp_path / "train.py", arguments=OPTIONS, prompt_tokens=128)
    fewer = fit_script(script, gpu="l4")
    monkeypatch.setattr("autofit.scripts.changes.FEW", 100)
    whole = fit_script(script, gpu="l4")
    assert whole.arguments == fewer.arguments == {MICRO: 2, ACCUMULATION: 4, CHECKPOINTING: True}
    # Samples keep their order: a pair of one length alone would have no mask.
    assert whole.found.peak_allocated_bytes == pytest.approx(fewer.found.peak_allocated_bytes, rel=0.001)
    assert whole.found.step_s == pytest.approx(fewer.found.step_s, rel=0.01)
    notes = " ".join(fewer.found.notes)
    for word in (
        "evaluate, wandb: not needed on the card",
        "warmup_ratio as warmup_steps, evaluation_strategy as eval_strategy",
        "columns title, story",
        "that of Qwen/Qwen2.5-0.5B, by its name",
        "peft_config is left out",
        "of 4 micro-batches a step 3 were run",
    ):
        assert word in notes
    assert "micro-batches a step" not in " ".join(whole.found.notes)


@pytest.mark.slow
def test_classes_that_trl_moved_and_keys_of_older_config_files_are_found(tmp_path: Path) -> None:
    import trl

    from autofit.scripts.stand_ins import options_understood, understood

    file = tmp_path / "old.yaml"
    file.write_text("torch_dtype: bfloat16\nmax_seq_length: 64\nwarmup_ratio: 0.1\noutput_dir: out\nbf16: false\n")
    notes: list[str] = []
    assert not hasattr(trl, "ORPOTrainer")
    with understood("from trl import ORPOConfig, ORPOTrainer, SFTTrainer", notes.append):
        assert trl.ORPOTrainer.__module__ == "trl.experimental.orpo.orpo_trainer"
        assert trl.ORPOConfig("out", evaluation_strategy="no", bf16=False).eval_strategy == "no"
        assert trl.ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
        with options_understood(notes.append):
            parser = trl.TrlParser((trl.ModelConfig, trl.SFTConfig))
            model, arguments = parser.parse_args_and_config(["--config", str(file)])
    assert not hasattr(trl, "ORPOTrainer")
    assert (model.dtype, arguments.max_length, arguments.warmup_steps) == ("bfloat16", 64, 0.1)
    assert "older names were read by those of today: torch_dtype as dtype" in notes
    plain: list[str] = []
    with understood('AutoModelForCausalLM.from_pretrained("a", torch_dtype="auto")', plain.append):
        assert plain == []  # an argument of transformers', not TRL's ModelConfig


@pytest.mark.parametrize("name", list(catalogue.others()))
def test_a_shape_that_is_not_in_the_catalogue_has_the_published_size(name: str) -> None:
    import transformers
    from on_meta import on_meta

    found = catalogue.others()[name]
    kinds = found.config["architectures"]
    assert isinstance(kinds, list)
    with on_meta():
        model = getattr(transformers, kinds[0])(transformers.AutoConfig.for_model(**found.config))
    head = model.get_output_embeddings()
    untied = found.config.get("tie_word_embeddings") is False
    own = head.weight.numel() if untied and head.weight is model.get_input_embeddings().weight else 0
    assert sum(each.numel() for each in model.parameters()) + own == found.parameters
    assert catalogue.architecture(name) is None


PART = """
import torch
from .beside import width
net = torch.nn.Linear(width, width, device="cuda")
optimizer = torch.optim.AdamW(net.parameters())
for number in range(9):
    net(torch.ones(8, width, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("words", [["{folder}/mine/train.py"], ["-m", "mine.train"]])
def test_a_script_within_a_package_finds_what_is_beside_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").write_text("width = 1024\n")
    (tmp_path / "mine" / "train.py").write_text(PART)
    if words[0] == "-m":
        monkeypatch.chdir(tmp_path)
    assert main(["fit-check", "--gpu", "l4", "--json", *(word.format(folder=tmp_path) for word in words)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["peak_allocated_bytes"] > 4 * 4 * 1024 * 1024


def test_a_module_that_is_nowhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit-check", "--gpu", "l4", "-m", "not_there.train"]) == 2
    assert (
        "there is no module 'not_there.train' in the current folder, and none is installed" in capsys.readouterr().err
    )


def test_a_script_that_asks_for_torchruns_variables_is_its_only_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, torch\nimport torch.distributed as dist\n"
        "assert 'LOCAL_RANK' in os.environ, 'torchrun should set LOCAL_RANK'\n"
        "dist.init_process_group('nccl', rank=int(os.environ['RANK']), world_size=int(os.environ['WORLD_SIZE']))\n"
        "net = torch.nn.Linear(64, 64, device='cuda')\noptimizer = torch.optim.SGD(net.parameters())\n"
        "for _ in range(3):\n    net(torch.ones(8, 64, device='cuda')).sum().backward()\n"
        "    dist.all_reduce(net.weight.grad)\n    optimizer.step()\n"
    )
    found = fit_script(Script(path=path), gpu="l4").found
    assert any("runs as its only rank" in note for note in found.notes)
    assert not importlib.import_module("torch.distributed").is_initialized()


def test_a_step_is_one_of_every_optimizer_where_each_weight_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nnet = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))).cuda()\n"
        "own = {p: torch.optim.Adam([p]) for p in net.parameters()}\n"
        "def update(p):\n    own[p].step()\n    p.grad = None\n"
        "for p in net.parameters():\n    p.register_post_accumulate_grad_hook(update)\n"
        "for _ in range(9):\n    net(torch.ones(8, 1024, device='cuda')).sum().backward()\n"
    )
    found = fit_script(Script(path=path), gpu="l4").found
    assert found.peak_allocated_bytes > 4 * 3 * 4 * 1024 * 1024  # weights and both states of all four


def test_an_assertion_without_words_is_told_by_its_code(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import os\nassert os.path.exists('train.txt')\n")
    with pytest.raises(ConfigError, match=r"AssertionError: `assert os\.path\.exists\('train\.txt'\)` \(.*:2\)"):
        fit_script(Script(path=path), gpu="l4")


def test_figures_of_a_metric_are_no_columns() -> None:
    code = "rows = load_dataset('glue')\nfound = metric.compute()\nprint(found['accuracy'], row['sentence'])\n"
    assert Columns(code).names == ("sentence",)
