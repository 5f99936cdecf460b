"""`autofit verify`: prove a trial's gradient equal to the baseline's, or show by how much it is not."""

import argparse
import json

from autofit.commands.common import DONE, say

NOT_NEUTRAL = 1  # what was to be proven is not so


def verify(options: argparse.Namespace) -> int:
    from autofit.promotion.promotion import choose
    from autofit.proof.proof import Verdict, lines, prove
    from autofit.tuning.record import record_of
    from autofit.tuning.study import load_study, trials_of

    study = load_study(options.dir, options.study)
    record = record_of(study)
    trial = choose(trials_of(study), options.trial, record.rule, fitting=False)
    proof = prove(study, trial, say=say)
    if options.json:
        print(json.dumps({"study": study.study_name, **proof.to_json()}))
    else:
        print("\n".join(lines(proof, record.resolved)))
    return NOT_NEUTRAL if proof.verdict is Verdict.REFUSED else DONE
