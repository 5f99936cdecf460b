"""`autofit report`: a study's front, its winner and why; what a search ends with."""

import argparse
import json
import sys
from pathlib import Path
from typing import cast

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS, dir_option
from autofit.errors import EnvironmentFault


def report(options: argparse.Namespace) -> int:
    from autofit.tuning.study import load_study

    return show_result(options, options.dir, load_study(options.dir, options.study).study_name, "")


def show_result(options: argparse.Namespace, folder: Path, name: str, stopped: str) -> int:
    from autofit.commands.tables import front_table, margin_sentence, sensitivity_table, to_json
    from autofit.tuning.frontier import rule_of, winner
    from autofit.tuning.search import BROKEN
    from autofit.tuning.sensitivity import of_winner
    from autofit.tuning.sentences import confirmation_note, predicted_note, why
    from autofit.tuning.study import load_study, trials_of

    study = load_study(folder, name)
    trials, attrs = trials_of(study), study.user_attrs
    target = cast("int | None", attrs.get("target_bytes"))
    rule = rule_of(attrs)
    sentence = why(trials, attrs["resolved"], target, rule) + predicted_note(trials, attrs)
    screened = int(attrs.get("screened", 0))
    if stopped == BROKEN:
        raise EnvironmentFault(f"{sentence}; mend that and run the same command again")
    kept = of_winner(attrs.get("sensitivity"), winner(trials, **rule))
    if not options.json:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 150
        Console(width=width).print(front_table(trials, attrs["resolved"], target, rule))
        if kept is not None and (beside := sensitivity_table(kept)) is not None:
            Console(width=width).print(beside)
        print(f"{sentence}.")
        note = confirmation_note(trials, rule)
        print(f"{note[:1].upper()}{note[1:]}." if note else "", end="\n" if note else "")
        margin = "" if kept is None else margin_sentence(kept)
        print(f"{margin}." if margin else "", end="\n" if margin else "")
        print(f"Stopped because {stopped}." if stopped else "", end="\n" if stopped else "")
        if winner(trials, **rule) is not None:
            where = dir_option(folder)
            print(f"Next: autofit promote best{where}   then: autofit ui{where}")
    else:
        content = to_json(
            trials,
            study=name,
            target_bytes=target,
            screened=screened,
            stopped=stopped,
            sentence=sentence,
            rule=rule,
        )
        around = kept or {"neighbours": None, "margin": None}
        print(json.dumps(content | {"sensitivity": around["neighbours"], "margin": around["margin"]}))
    if stopped == "interrupted":
        return INTERRUPTED
    return DONE if winner(trials, **rule) is not None else NOTHING_FITS
