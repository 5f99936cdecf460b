"""`autofit check`: whether a config runs on a card, in one line and an exit code."""

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
    from autofit.api import Check


def check(options: argparse.Namespace) -> int:
    look_early(options, device="sim:")
    begin_server()
    from autofit import api

    def shown(found: "Check") -> None:
        if options.stream:
            stream("verdict", found.to_dict())
        elif not options.json:
            show(found)

    def then_typical(found: "Check") -> None:
        if not (options.stream or options.json):
            show_lines(found.of_typical)

    terminate_like_interrupt()
    found = api.check(
        options.recipe, gpu=options.gpu, target_vram=options.target_vram, trainer=options.trainer,
        **launch_arguments(options),
        changes=settings(options.set), prompt_tokens=options.prompt_tokens, deadline=options.deadline,
        advice_time=options.advice_time, as_of=options.as_of, lengths=options.lengths,
        on_event=streams if options.stream else hears,
        on_result=shown, on_typical=then_typical,
    )  # fmt: skip
    return ended(found, as_json=options.json or options.stream)
