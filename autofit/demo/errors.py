"""The demo's error for failures that the user can fix."""

from autofit.errors import ConfigError


class DemoError(ConfigError):
    """The demo's model or data could not be prepared; the message says what to change."""
