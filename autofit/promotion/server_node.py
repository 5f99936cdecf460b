"""The last node of a job of Slurm, which keeps the run's vLLM server whenever the first node orders one. No torch."""

import time
from pathlib import Path
from typing import cast

from autofit.cluster.inside import OwnJob
from autofit.cluster.node import card_fault, only_cards
from autofit.errors import AutofitError
from autofit.files import read_json
from autofit.probing.supervise import computing_env, keep
from autofit.promotion.machines import superseded
from autofit.promotion.server_files import Post, log_of_server
from autofit.promotion.serving import start_keeper
from autofit.recipe.server import Server

_POLL_S = 0.2


def serve_all(request_path: Path, folder: Path, mine: OwnJob) -> None:
    """Keep one server after the other, until the first node wants none any more, or the run was started elsewhere."""
    number = 0
    while True:
        number += 1
        post = Post(folder=folder, name=mine.attempt, number=number)
        while (wanted := post.ordered()) is None:
            if number > 1 and superseded(folder, mine):
                return
            time.sleep(_POLL_S)
        if not wanted:
            return
        try:
            _serve(post, request_path, mine)
        except AutofitError as error:
            post.ended(f"the vLLM server on {mine.name} could not be started: {error}")


def _serve(post: Post, request_path: Path, mine: OwnJob) -> None:
    request = read_json(request_path) or {}
    cards: dict[str, str] = {}
    if request["device"] == "cuda":
        needed = Server.of(cast("dict[str, object]", request["values"])).cards
        fault = card_fault(None, needed)
        if fault is not None:
            post.ended(f"the vLLM server on {mine.name} could not be started: {fault}")
            return
        cards = only_cards(needed)
    address, cwd, env = mine.own_address(), str(request["cwd"]), computing_env(**cards)
    ending = keep(
        lambda: start_keeper(request_path, post, cwd=cwd, env=env, address=address, node=mine.name),
        abandoned=lambda: superseded(post.folder, mine),
    )
    if ending.exit_code and not ending.abandoned:
        post.ended(f"the keeper of the vLLM server on {mine.name} was killed; see {log_of_server(post.folder)}")
