"""`autofit estimate`: one config on a simulated card."""

import argparse
import json
import sys
from pathlib import Path

from autofit.commands.common import DONE, NOTHING_FITS, at_least_one, describe, given, prepared, say
from autofit.recipe.baseline import baseline_path
from autofit.units import parse_bytes, parse_seconds


def estimate(options: argparse.Namespace) -> int:
    import tempfile

    from autofit.forecast.estimate import Estimator, advice_lines, estimate_json, estimate_table, plot_phases
    from autofit.hardware.hardware import choose_device_and_target
    from autofit.probing.fork_server import ForkServer
    from autofit.probing.prepare import worst_case_path
    from autofit.probing.result import ProbeStatus

    at_least_one("--prompt-tokens", options.prompt_tokens)
    asked_bytes = given("--target-vram", options.target_vram, parse_bytes)
    device, capacity = choose_device_and_target("sim", options.gpu, asked_bytes)
    deadline_s = given("--deadline", options.deadline, parse_seconds) or 0
    options.world_size = 1
    with tempfile.TemporaryDirectory(prefix="autofit-estimate-") as temporary:
        folder = Path(temporary)
        server = ForkServer(folder)
        try:
            recipe = prepared(options.recipe or baseline_path(), options, device, folder / "inspection", server)
            recipe.check()
            say(f"{recipe.model} on {describe(device, capacity)}")
            estimator = Estimator(
                recipe=recipe, device=device, capacity_bytes=capacity, folder=folder / "probes", server=server,
                worst_case=worst_case_path(folder / "inspection"), deadline_s=deadline_s,
            )  # fmt: skip
            result = estimator.estimate()
            fits = result.status is ProbeStatus.FIT
            advice = None if fits or options.no_changes else estimator.advice()
        finally:
            server.close()
    if options.plot is not None:
        plot_phases(result, capacity, options.plot)
    if options.json:
        print(json.dumps(estimate_json(result, capacity, advice)))
    else:
        from rich.console import Console

        table, sentence = estimate_table(result, capacity)
        Console(width=None if sys.stdout.isatty() else 150).print(table)
        print(sentence)
        for line in advice_lines(advice, recipe, capacity) if advice is not None else ():
            print(line)
    return DONE if fits else NOTHING_FITS
