"""A promoted run without its mirror, as an entry of the warm server."""

from autofit import training


def run(request_path: str) -> int:
    training._start_mirror = lambda *_: None
    return training.main(request_path)
