"""`autofit studies`: the studies of a folder."""

import argparse
import json

from autofit.commands.common import DONE, show


def studies(options: argparse.Namespace) -> int:
    from autofit import api

    found = api.studies(options.dir)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
    return DONE
