"""`autofit run`: the stages of a pipeline file, each tuned on its own, then trained."""

import argparse
import json

from autofit.commands.common import (
    DONE,
    INTERRUPTED,
    NOTHING_FITS,
    dir_option,
    executor_option,
    say,
    settings,
    show,
    terminate_like_interrupt,
)
from autofit.commands.promote import step_line
from autofit.recipe.pipeline import read_pipeline


def run(options: argparse.Namespace) -> int:
    where = executor_option(options)
    read_pipeline(options.pipeline, changes=settings(options.set))  # a wrong key is told before imports of a second
    from autofit import api

    terminate_like_interrupt()
    result = api.run(
        options.pipeline, target_vram=options.target_vram, device=options.device, gpu=options.gpu,
        trials=options.trials, changes=settings(options.set), only=options.only, restart=options.restart,
        search=not options.no_search,
        plan=options.plan, folder=options.dir, mlflow=not options.no_mlflow,
        executor=where, on_event=lambda event: say(str(event)),
        on_step=lambda step: say(step_line(step)),
    )  # fmt: skip
    if options.json:
        print(json.dumps(result.to_dict()))
    else:
        show(result)
        if result.status == "done":
            print(f"the model is in {result.model_path}; its runs are in MLflow: autofit ui{dir_option(options.dir)}")
    return {"interrupted": INTERRUPTED, "nothing fits": NOTHING_FITS}.get(result.status, DONE)
