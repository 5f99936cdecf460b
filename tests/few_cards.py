"""An answer of the page that compares cards, with two of the usual ones: each is simulated by itself."""

from unittest import mock

from autofit.web import answering

CARDS = ("rtx4090", "h100")


def run(request_path: str) -> int:
    with mock.patch.object(answering, "USUAL", CARDS):
        return answering.run(request_path)
