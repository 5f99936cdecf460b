"""LLaMA-Factory's own trainer on a simulated card: `python llama_factory.py FILE.yaml rtx4090`. Needs LLaMA-Factory.

Two steps are enough for the peak (`max_steps: 2`), and `train_from_scratch: true` needs the model's config.json alone.
"""

import json
import sys
from pathlib import Path

import yaml
from fakegpu_torch import fake_gpu

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python llama_factory.py FILE.yaml [CARD]")
    file, card = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "rtx4090"
    ended = ""
    with fake_gpu(card) as gpu:
        from llamafactory.train.tuner import run_exp

        try:
            run_exp(yaml.safe_load(file.read_text("utf-8")))
        except Exception as error:  # a reward model's checkpoint is read back after training, and has no values
            ended = f"{type(error).__name__}: {error}"
    said = {"allocated": gpu.peak_allocated_bytes, "reserved": gpu.peak_reserved_bytes, "notes": gpu.notes}
    said["ended_by"] = ended
    print(json.dumps({**said, "at_peak": gpu.timeline.at_peak}))
