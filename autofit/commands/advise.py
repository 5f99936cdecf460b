"""`autofit advise`: which card, and how many of them, for a recipe."""

import argparse
import json

from autofit.commands.common import (
    DONE,
    INTERRUPTED,
    NOTHING_FITS,
    hears,
    look_early,
    settings,
    show,
    terminate_like_interrupt,
)
from autofit.errors import ConfigError, quoted


def advise(options: argparse.Namespace) -> int:
    look_early(options, device="sim:")
    from autofit import api

    terminate_like_interrupt()
    found = api.advise(
        options.recipe, cards=_names(options.cards), counts=_numbers(options.counts), prices=options.prices,
        trainer=options.trainer, changes=settings(options.set), prompt_tokens=options.prompt_tokens,
        accelerate_config=options.accelerate_config, num_processes=options.num_processes,
        deadline=options.deadline, parallel=options.parallel, on_event=hears,
    )  # fmt: skip
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
    if found.interrupted:
        return INTERRUPTED
    return DONE if found.fits else NOTHING_FITS


def _names(given: str | None) -> list[str] | str | None:
    if given is None or given == "all":
        return given
    return [name.strip() for name in given.split(",") if name.strip()]


def _numbers(given: str) -> list[int]:
    try:
        return [int(number) for number in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"--counts takes numbers of cards, for example 1,2,4,8; got {quoted(given)}") from error
