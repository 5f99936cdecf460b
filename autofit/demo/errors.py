"""The one error the demo raises for something the user can act on."""

from autofit.errors import ConfigError


class DemoError(ConfigError):
    """The demo's model or data could not be prepared; the message says what to do about it."""
