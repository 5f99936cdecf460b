"""Full runs of GRPO beside a vLLM server, for tests."""

from pathlib import Path

import tiny
import yaml

from autofit.files import read_json, write_json
from autofit.promotion.ladder import RescueLadder
from autofit.recipe.keys import LAUNCH, BatchKeys
from autofit.recipe.launch import Launch


def folder_of_run(home: Path, model: Path, launch: Launch | None = None, **changes: object) -> Path:
    """The folder of a run of GRPO beside a server that has not begun."""
    home.mkdir()
    path = tiny.write_recipe(home, model, use_vllm=True, vllm_mode="server", use_peft=False, **changes)
    values = {**yaml.safe_load(path.read_text()), "use_cpu": True}
    values |= {} if launch is None else {LAUNCH: launch.to_values()}
    ladder = RescueLadder(  # of a micro-batch that cannot be smaller: an OOM is met with the same settings
        trial=0, trainer="grpo", device="cpu", keys=BatchKeys(length="max_length"), compared=(), values=values,
        resolved={**values, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    )  # fmt: skip
    write_json(home / "request.json", {
        "folder": str(home), "device": "cpu", "trainer": "grpo", "output_dir": str(home / "out"), "generates": True,
        "values": values, "cwd": str(home), "slots": ["cpu-0"], "study_folder": str(home), "study": "none", "trial": 0,
        "serves": True, "ladder": ladder.to_json(),
    })  # fmt: skip
    return home


def failure(folder: Path) -> str:
    return str((read_json(folder / "failed.json") or {}).get("reason"))
