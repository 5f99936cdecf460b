"""`autofit fit-check`: whole scripts, run unchanged on a card that is not there."""

import json
import socket
from pathlib import Path

import pytest

from autofit.cli import main
from autofit.errors import ConfigError
from autofit.fitscript import fit_script

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
    found = fit_script(script, ["1000"], gpu="l4", steps=3)
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
        fit_script(script, gpu="l4")
    assert socket.socket.connect is before


def test_weights_that_are_not_here_are_random_ones_of_the_same_shape(script: Path) -> None:
    script.write_text(
        "import torch, transformers\n"
        "m = transformers.AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B', dtype=torch.bfloat16,"
        " device_map='cuda')\n"
        "with torch.no_grad():\n    m(torch.ones(1, 8, dtype=torch.long, device='cuda'))\n"
    )
    found = fit_script(script, gpu="l4")
    assert found.peak_allocated_bytes >= 2 * 596_000_000  # parameters of Qwen3-0.6B, with tied embeddings
    assert any("Qwen/Qwen3-0.6B are not on this machine" in note for note in found.notes)
    assert any("no step of a torch.optim optimizer" in note for note in found.notes)
