"""`autofit explain`: what a file of another tool says, by that tool's own arithmetic. Loads no torch."""

import argparse
import json

from autofit.commands.common import DONE, NOTHING_FITS


def explain(options: argparse.Namespace) -> int:
    from autofit.frontends.reading import explain as explained

    found = explained(options.file, ranks=options.num_processes)
    for name, text in found.lines:
        print(f"{name:>16}: {text}")
    for text in found.wrong:
        print(f"{'error':>16}: {text}")
    if found.unread:
        print(f"{'not read':>16}: {', '.join(found.unread)}: the script does not say the value for certain")
    if options.json:
        print(json.dumps(found.to_json()))
    return NOTHING_FITS if found.wrong else DONE
