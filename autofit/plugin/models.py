"""Models of transformers for loops of one's own: real weights, or random ones of the same shape. Imports torch."""

import contextlib
import os
import socket
import threading
from typing import Any
from urllib.parse import urlparse

import torch
from transformers import AutoConfig

from autofit.plugin.loop import Setup
from autofit.recipe import catalogue

_REACHED_S = 3.0


def go_offline_without_a_hub() -> None:
    """Tell the hub's client to stay offline if the hub is unreachable; it would retry for 23 s a file."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    url = urlparse(constants.ENDPOINT)
    if not _is_reached((url.hostname or "", url.port or 443)):
        go_offline()


def _is_reached(address: tuple[str, int]) -> bool:
    """True if `address` takes a connection within 3 s: the look-up of its name is unlimited by itself."""
    reached = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_REACHED_S):
            reached.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_REACHED_S)
    return reached.is_set()


def go_offline() -> None:
    """Turn off all fetches of the hub's client in this process."""
    import datasets.config
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def model_config(name: str, *, revision: str = "main", trust_remote_code: bool = False) -> Any:
    """The config of the model `name`: from its folder, the hub or, if the hub is unreachable, the catalogue.

    Raises OSError, ValueError or KeyError where none has it.
    """
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError):
        known = catalogue.architecture(name)
        if known is None:
            raise
    content = dict(known.config)
    return AutoConfig.for_model(str(content.pop("model_type")), **content)


def load_model(name: str, kind: Any, setup: Setup, *, dtype: torch.dtype, **config: Any) -> Any:
    """The model `name` by the auto class `kind` on the setup's device; `config` changes its config (num_labels=1).

    In a probe its weights are random, which needs no download and the same bytes.
    """
    found = model_config(name)
    for key, value in config.items():
        setattr(found, key, value)
    if not setup.random_weights:
        return kind.from_pretrained(name, config=found, dtype=dtype).to(setup.device)
    with torch.device(setup.device):
        return kind.from_config(found, dtype=dtype)
