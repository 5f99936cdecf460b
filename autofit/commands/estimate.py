"""`autofit estimate`: one config on a simulated card."""

import argparse
from typing import TYPE_CHECKING

from autofit.commands.common import (
    begin_server,
    ended,
    hears,
    launch_arguments,
    look_early,
    settings,
    show,
    show_lines,
    stream,
    streams,
    terminate_like_interrupt,
)

if TYPE_CHECKING:
    from autofit.api import Estimate


def estimate(options: argparse.Namespace) -> int:
    look_early(options, device="sim:")
    begin_server()
    from autofit import api

    def shown(found: "Estimate") -> None:
        if options.plot is not None:
            found.plot().savefig(options.plot, dpi=110)
        if options.stream:
            stream("verdict", found.to_dict())
        elif not options.json:
            show(found)

    def then_typical(found: "Estimate") -> None:
        if not (options.stream or options.json):
            show_lines(found.of_typical)

    terminate_like_interrupt()
    found = api.estimate(
        options.recipe, gpu=options.gpu, target_vram=options.target_vram, trainer=options.trainer,
        **launch_arguments(options),
        changes=settings(options.set), prompt_tokens=options.prompt_tokens, advice=not options.no_advice,
        advice_time=options.advice_time, as_of=options.as_of, lengths=options.lengths, deadline=options.deadline,
        on_event=streams if options.stream else hears, on_result=shown, on_typical=then_typical,
    )  # fmt: skip
    return ended(found, as_json=options.json or options.stream)
