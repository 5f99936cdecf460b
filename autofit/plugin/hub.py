"""The model hub, where it can be reached."""

import os
import socket
from urllib.parse import urlparse


def go_offline_without_a_hub() -> None:
    """Tell the hub's client to stay offline when the hub cannot be reached; it would retry for 23 s a file."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    url = urlparse(constants.ENDPOINT)
    try:
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=3):
            return
    except OSError:
        go_offline()


def go_offline() -> None:
    """Tell the hub's client to fetch nothing in this process."""
    import datasets.config
    from huggingface_hub import constants

    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
