"""ms-swift's own trainer on a simulated card: `python ms_swift.py rtx4090 sft --model ...`. Needs ms-swift.

The words after the card are those of its command line; two steps are enough for the peak (`--max_steps 2`).
"""

import json
import sys

from fakegpu_torch import fake_gpu

if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python ms_swift.py CARD sft|pt|rlhf [arguments of swift]")
    card, command, *words = sys.argv[1:]
    with fake_gpu(card) as gpu:
        from swift import pretrain_main, rlhf_main, sft_main

        {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main}[command](words)
    said = {"allocated": gpu.peak_allocated_bytes, "reserved": gpu.peak_reserved_bytes, "notes": gpu.notes}
    print(json.dumps({**said, "at_peak": gpu.timeline.at_peak}))
