"""One step of a configuration on a card as torch's profiler traces it: `python -m gpu.timeline OUT NAME...`.

OUT/NAME.json.gz is the trace (host and card), and OUT/timeline.jsonl a line each: the seconds that parts of a step took
the host without the profiler, which slows the host. To see why a step takes longer than its kernels.
"""

import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from gpu.folder import Folder, Row, append

_STEPS = 6  # the first two warm up; the last is traced
_TRACE = "trace.json.gz"


def traced(request_path: str) -> int:
    """In a fork: train, with the host's seconds of the parts of each step, and trace the last step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from autofit.files import write_json
    from autofit.plugin.protocol import Control, Report, Task, WorstCase
    from autofit.plugin.registry import load
    from autofit.probing.result import ProbeRequest
    from autofit.recipe.launch import split
    from autofit.recipe.secrets import into_environment

    request = ProbeRequest.read(Path(request_path))
    into_environment(request.values)
    task = Task(device=request.device, output=request.folder / "out", steps=_STEPS,
                worst_case=WorstCase(path=request.worst_case))  # fmt: skip
    run = load(request.trainer).build(split(request.values)[1], task)
    parts, steps = _parts(), []
    recorder = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    class Watch(Report):
        began = 0.0

        def enter(self, phase: str) -> str:
            return phase

        def step_begins(self, step: int) -> None:
            torch.cuda.synchronize()
            if step == _STEPS - 1:
                recorder.start()
            parts.clear()
            self.began = time.perf_counter()

        def step_ends(self, step: int) -> Control:
            host_s = time.perf_counter() - self.began
            torch.cuda.synchronize()
            steps.append({"s": time.perf_counter() - self.began, "host_s": host_s, **parts})
            if step == _STEPS:
                recorder.stop()
                recorder.export_chrome_trace(str(request.folder / _TRACE))
            return Control(stop=step == _STEPS)

    run.train(Watch())
    write_json(request.answer_path, {"status": "fit", "reason": "", "steps": steps})
    return 0


def _parts() -> dict[str, float]:
    """A dict that gets the host's seconds of a step's parts, by the methods of transformers and torch."""
    import accelerate
    import torch
    import transformers

    seconds: defaultdict[str, float] = defaultdict(float)

    def timed(owner: Any, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, name)

        @wraps(plain)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - began

        setattr(owner, name, wrapped)

    for name in ("training_step", "compute_loss", "get_batch_samples", "_prepare_inputs", "_maybe_log_save_evaluate"):
        timed(transformers.Trainer, name)
    timed(accelerate.Accelerator, "clip_grad_norm_")
    timed(accelerate.Accelerator, "backward")
    timed(accelerate.optimizer.AcceleratedOptimizer, "step")
    timed(torch.optim.Optimizer, "zero_grad")
    timed(torch.nn.Module, "zero_grad")
    return seconds


def main() -> None:
    from gpu.children import answered, scratch, server
    from gpu.configs import chosen

    out, names = Path(sys.argv[1]), tuple(sys.argv[2:])
    out.mkdir(parents=True, exist_ok=True)
    with server(out) as fork_server:
        for config in chosen(only=names):
            with scratch() as place:
                request = Folder(home=Path(".gpu")).request(config, place, "cuda", deadline_s=60)
                row: Row = {"name": config.name, **answered(fork_server, "gpu.timeline:traced", request)}
                if (place / _TRACE).exists():
                    shutil.copyfile(place / _TRACE, out / f"{config.name}.json.gz")
            append(out / "timeline.jsonl", row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
