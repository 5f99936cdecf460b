"""A promoted run without its mirror, as an entry of the fork server."""

from autofit.promotion import training


def run(request_path: str) -> int:
    training._start_mirror = lambda *_: None
    return training.main(request_path)
