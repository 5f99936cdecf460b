"""`autofit fit-check`: whole scripts, run unchanged on a card that is not there."""

import json
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.scripts.changes import ACCUMULATION, CHECKPOINTING, MICRO, Advice
from autofit.scripts.data import Columns
from autofit.scripts.notebook import code_of
from autofit.scripts.running import Script, fit_script

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
        ("raise ValueError('my own')", "failed after 0 steps: ValueError: .*my own.*train.py:1"),
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


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("d = load_dataset('x')\nd['train'].map(lambda row: t(row['question'] + row['answer']))", "question answer"),
        ("print(d[3]['messages'])", "messages"),
        ("def right(completions, solution, **more): ...\nGRPOTrainer()", "solution prompt"),
        ("DPOTrainer(d)", "prompt chosen rejected"),
        ("SFTTrainer(d)", "text"),
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
        assert sum(len(str(value).split()) for value in row.values()) == (150 if pair else 100)


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
    found = list(Advice(seen=seen, ask=ask).offers(figures(16, 3, checkpointing=False)))
    assert asked == [(2, False), (16, True), (8, True)]
    assert [offer.changes for offer in found] == [
        {MICRO: 2, ACCUMULATION: 24}, {MICRO: 8, ACCUMULATION: 6, CHECKPOINTING: True}
    ]  # fmt: skip
    assert [offer.most_step_s for offer in found] == [12.0, 3.0]
    assert "--set per_device_train_batch_size=8 --set gradient_accumulation_steps=6" in str(found[1])
    assert not list(Advice(seen=seen, ask=lambda _: None).offers(figures(16, 3, checkpointing=False)))


def test_a_script_is_led_from_other_commands(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "explain"):
        assert main([command, str(script), *(["--gpu", "l4"] if command == "check" else [])]) == 2
        assert f"autofit fit-check --gpu NAME {script}" in capsys.readouterr().err


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
    short = fit_script(Script(path=path, prompt_tokens=64), gpu="l4")
    small = fit_script(Script(path=path, prompt_tokens=256, changes={MICRO: 4}), gpu="l4")
    assert long.arguments == {MICRO: 16, ACCUMULATION: 2, CHECKPOINTING: False}
    assert small.arguments[MICRO] == 4
    weights = sum(row.allocated_bytes for row in long.found.alive_at_peak if row.category == "weights")
    assert weights < 0.6e9  # 0.27 GB of embeddings in 16 bits and the rest in 4; 1.98 GB in float32
    stays = small.found.peak_allocated_bytes - (long.found.peak_allocated_bytes - small.found.peak_allocated_bytes) / 3
    assert weights < stays < weights + 0.2e9  # activations are in proportion to the micro-batch
    assert short.found.peak_allocated_bytes < 0.4 * long.found.peak_allocated_bytes
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
