"""DeepSpeed's own estimate of model states with ZeRO-3 and no offload: `python zero_states.py FOLDER`."""

import contextlib
import io
import json
import sys
from pathlib import Path

from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs


def main() -> None:
    row = json.loads((Path(sys.argv[1]) / "row.json").read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(io.StringIO()):
        _, gpu_bytes, _ = estimate_zero3_model_states_mem_needs(
            total_params=row["parameters"], largest_layer_params=0, num_gpus_per_node=row["ranks"], num_nodes=1,
            cpu_offload=False, cpu_offload_params=False, zero_init=True,
        )  # fmt: skip
    print(json.dumps({"bytes": gpu_bytes}))


if __name__ == "__main__":
    main()
