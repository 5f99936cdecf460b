"""`autofit monitor`: a live view of cards, running probes and promoted runs; or one look at them."""

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, terminate_like_interrupt

if TYPE_CHECKING:
    from autofit.api.monitoring import Watch

_REFRESH_S = 1.0


def monitor(options: argparse.Namespace) -> int:
    """One look with --once or --json, and where the output is not a terminal; else until Ctrl-C, which is its end."""
    from autofit import api
    from autofit.api.arguments import studies_folder
    from autofit.api.monitoring import Watch

    if options.json:
        print(json.dumps(api.monitor(options.dir).to_dict()))
    elif options.once or not sys.stdout.isatty():
        _print(api.monitor(options.dir))
    else:
        terminate_like_interrupt()
        _live(Watch(studies_folder(options.dir)))
    return DONE


def _print(snapshot: object) -> None:
    from rich.console import Console

    from autofit.api.snapshot_tables import tables_of
    from autofit.api.tables import WIDTH

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for table in tables_of(snapshot):  # type: ignore[arg-type]
        console.print(table, crop=False)


def _live(watch: "Watch") -> None:
    from rich.console import Console, Group
    from rich.live import Live

    from autofit.api.snapshot_tables import tables_of

    console = Console()
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                shown = Group(*tables_of(watch.snapshot()), "Ctrl-C ends this view, and nothing else.")
                live.update(shown, refresh=True)
                time.sleep(_REFRESH_S)
    except KeyboardInterrupt:
        return
