"""autofit: the fastest GRPO configuration that fits a VRAM budget, at exactly the same effective batch."""

__version__ = "0.1.0"
