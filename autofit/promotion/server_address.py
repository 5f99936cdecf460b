"""Where a training finds the vLLM server of this start of the job: in its environment, and nowhere on the disk.

A run that goes on later, on other machines, has another server. No torch here.
"""

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

_URL, _PORT = "AUTOFIT_VLLM_SERVER", "AUTOFIT_VLLM_GROUP_PORT"


def address_variables(url: str, *, address: str, port: int) -> dict[str, str]:
    """What a training needs in its environment to use the server at `url`.

    The server's cards meet rank 0, which sends them the weights, at `port` of `address`. No proxy stands between them.
    """
    direct = ",".join(filter(None, [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(url).hostname]))
    # vLLM's code in rank 0 tells the server that address; without the variable it guesses by a route to the internet.
    host = os.environ.get("VLLM_HOST_IP") or address
    return {_URL: url, _PORT: str(port), "no_proxy": direct, "NO_PROXY": direct, "VLLM_HOST_IP": host}


def with_address(values: Mapping[str, object]) -> dict[str, object]:
    """The values of a recipe, with the server that this process finds in its environment."""
    found = os.environ.get(_URL)
    if found is None:
        return dict(values)
    return {**values, "vllm_server_base_url": found, "vllm_group_port": int(os.environ[_PORT])}
