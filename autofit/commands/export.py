"""`autofit export`: a trial in another tool's keys, to paste."""

import argparse
import json

from autofit.commands.common import DONE
from autofit.tuning.storage import check_there, database_of


def export(options: argparse.Namespace) -> int:
    check_there(database_of(options.dir.absolute()))  # before imports that take a second
    from autofit.api.exporting import export_to_verl

    found = export_to_verl(options.trial, study=options.study, folder=options.dir)
    print(json.dumps(found.to_dict()) if options.json else found)
    return DONE
