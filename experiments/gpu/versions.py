"""The versions that bytes and seconds depend on: figures of others are not comparable."""

from importlib.metadata import version

_OF = "torch", "transformers", "trl"


def versions() -> dict[str, str]:
    """Of torch (its CPU and CUDA builds are one version), transformers and TRL, of this Python."""
    return {name: version(name).partition("+")[0] for name in _OF}
