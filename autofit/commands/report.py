"""`autofit report`: a study's front, its winner and why; what a search ends with."""

import argparse
import json
import sys
from pathlib import Path

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS, dir_option
from autofit.errors import EnvironmentFault
from autofit.tuning.stop import Stop, StopKind


def report(options: argparse.Namespace) -> int:
    from autofit.tuning.study import load_study

    return show_result(options, options.dir, load_study(options.dir, options.study).study_name, None)


def show_result(options: argparse.Namespace, folder: Path, name: str, stop: Stop | None) -> int:
    """Show what a study found; `stop` is why its search ended, where one did. The exit code."""
    from autofit.commands.tables import front_table, margin_sentence, sensitivity_table, to_json
    from autofit.tuning.frontier import winner
    from autofit.tuning.record import record_of
    from autofit.tuning.sensitivity import of_winner
    from autofit.tuning.sentences import confirmation_note, predicted_note, why
    from autofit.tuning.study import load_study, trials_of

    study = load_study(folder, name)
    trials, record = trials_of(study), record_of(study)
    target, rule = record.target_bytes, record.rule
    sentence = why(trials, record.resolved, target, rule) + predicted_note(trials, record)
    if stop is not None and stop.kind is StopKind.BROKEN:
        raise EnvironmentFault(f"{sentence}; mend that and run the same command again")
    kept = of_winner(record.sensitivity, winner(trials, **rule))
    if not options.json:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 150
        Console(width=width).print(front_table(trials, record.resolved, target, rule))
        if kept is not None and (beside := sensitivity_table(kept)) is not None:
            Console(width=width).print(beside)
        print(f"{sentence}.")
        note = confirmation_note(trials, rule)
        print(f"{note[:1].upper()}{note[1:]}." if note else "", end="\n" if note else "")
        margin = "" if kept is None else margin_sentence(kept)
        print(f"{margin}." if margin else "", end="\n" if margin else "")
        print(f"Stopped because {stop.words}." if stop else "", end="\n" if stop else "")
        if winner(trials, **rule) is not None:
            where = dir_option(folder)
            print(f"Next: autofit promote best{where}   then: autofit ui{where}")
    else:
        content = to_json(
            trials,
            study=name,
            target_bytes=target,
            screened=record.screened,
            stopped="" if stop is None else stop.words,
            sentence=sentence,
            rule=rule,
        )
        around = kept or {"neighbours": None, "margin": None}
        print(json.dumps(content | {"sensitivity": around["neighbours"], "margin": around["margin"]}))
    return exit_code(stop, fits=winner(trials, **rule) is not None)


def exit_code(stop: Stop | None, *, fits: bool) -> int:
    """Of a search that ended so, or of a report (None); `fits` says whether there is a winner."""
    if stop is not None and stop.kind is StopKind.INTERRUPTED:
        return INTERRUPTED
    return DONE if fits else NOTHING_FITS
