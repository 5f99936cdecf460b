"""`autofit verify`: prove a trial's gradient equal to the baseline's, or show by how much it is not."""

import argparse
import json

from autofit.commands.common import DONE, say, show
from autofit.tuning.storage import check_there, database_of

NOT_NEUTRAL = 1  # what was to be proven is not so


def verify(options: argparse.Namespace) -> int:
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit import api

    found = api.verify(options.trial, study=options.study, folder=options.dir, on_event=lambda event: say(str(event)))
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        show(found)
    return NOT_NEUTRAL if found.refused else DONE
