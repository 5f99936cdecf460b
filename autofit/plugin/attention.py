"""Which attentions a gradient proof runs, on a CPU."""

_ATTENTION = ("sdpa", "eager")


def compared_attention(value: object) -> bool:
    """Whether the attention named `value` is one that the proof runs."""
    return value is None or value in _ATTENTION
