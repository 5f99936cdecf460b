"""`autofit explain`: what a file of another tool says, by that tool's own arithmetic. Loads no torch."""

import argparse
import json
from typing import TYPE_CHECKING

from autofit.commands.common import DONE, NOTHING_FITS, show_line

if TYPE_CHECKING:
    from autofit.frontends.foreign import Explanation


def explain(options: argparse.Namespace) -> int:
    from autofit.frontends.reading import explain as explained

    found = explained(options.file, ranks=options.num_processes)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        _show(found)
    return NOTHING_FITS if found.wrong else DONE


def _show(found: "Explanation") -> None:
    for name, text in found.lines:
        show_line(f"{name:>16}: {text}")
    for text in found.wrong:
        show_line(f"{'error':>16}: {text}")
    for text in found.notes:
        show_line(f"{'note':>16}: {text}")
    if found.unread:
        show_line(f"{'not read':>16}: {', '.join(found.unread)}: the script does not say the value for certain")
