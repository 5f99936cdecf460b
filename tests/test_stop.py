"""Why a search ended: decided by kind."""

import pytest

from autofit.commands.common import DONE, INTERRUPTED, NOTHING_FITS
from autofit.commands.studies import exit_code
from autofit.tuning.record import Stop, StopKind


@pytest.mark.parametrize("words", ["interrupted", "no probe ran to its end", "reworded"])
@pytest.mark.parametrize("kind", StopKind)
def test_the_exit_code_follows_from_the_kind_of_stop_and_not_from_its_words(kind: StopKind, words: str) -> None:
    found = [exit_code(Stop(kind, words), fits=fits) for fits in (True, False)]
    assert found == ([INTERRUPTED] * 2 if kind is StopKind.INTERRUPTED else [DONE, NOTHING_FITS])
    assert [exit_code(None, fits=fits) for fits in (True, False)] == [DONE, NOTHING_FITS]
