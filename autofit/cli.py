"""The command line: argv in, exit code out. Commands are in autofit/commands/; they and this module alone print.

Heavy imports happen inside the commands, so that `autofit --help` answers at once.
"""

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from autofit.commands.arguments import parser
from autofit.commands.common import INTERRUPTED, WRONG_USAGE, lose_no_interrupt, say, stranger_in, was_interrupted
from autofit.commands.doctor import doctor, init
from autofit.commands.help import completion
from autofit.commands.predict import advise, check, estimate, explain, fit_check, search
from autofit.commands.studies import export, jobs, monitor, promote, report, run, studies, sync, ui, verify
from autofit.commands.web import server, web
from autofit.errors import AutofitError, ConfigError, one_line, option
from autofit.recipe.secrets import without_secrets
from autofit.tuning.storage import VARIABLE, shows_password

_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
_COMMANDS = {
    "search": search, "estimate": estimate, "verify": verify, "promote": promote, "ui": ui, "sync": sync,
    "report": report, "doctor": doctor, "check": check, "run": run, "monitor": monitor,
    "studies": studies, "advise": advise, "jobs": jobs, "explain": explain, "fit-check": fit_check,
    "server": server, "init": init, "completion": lambda options: completion(options, parser()),
    "web": web, "export": export,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code (0 done, 1 nothing fits, 2 wrong usage, 130 interrupted)."""
    try:
        _open_missing_streams()
        lose_no_interrupt()
        if (stranger := stranger_in(Path(__file__).parents[1])) is not None:
            say(f"autofit: {stranger}")
        options = parser().parse_args(argv)
        _check_working_folder()
        if getattr(options, "storage", None) is not None:
            os.environ[VARIABLE] = options.storage  # for the processes of this command as well
            if shows_password(options.storage):
                say("the password in --storage can be seen by others (ps): use PGPASSWORD, ~/.pgpass or file:PATH")
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()  # here its errors have words
        return code
    except AutofitError as error:
        say(f"autofit: {one_line(without_secrets(error.told(str)))}")
        return WRONG_USAGE
    except (KeyboardInterrupt, ImportError) as error:
        if isinstance(error, ImportError) and not was_interrupted():
            raise
        say("autofit: interrupted; run the same command again to go on")
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return WRONG_USAGE
    except OSError as error:
        say(f"autofit: {_os_error(error)}")
        _drop_output()
        return WRONG_USAGE


def _drop_output() -> None:
    """Discard unwritable output, so that Python's end succeeds."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_working_folder() -> None:
    """Raise ConfigError where this process works in a folder that was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("the working directory was deleted; go to a folder that exists") from error


def _open_missing_streams() -> None:
    """Open the streams that this process was started without (`>&-`): the next opened file would take their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  (as long as the process lives)
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _os_error(error: OSError) -> str:
    from autofit.files import cannot_write

    if error.filename is None and error.errno in _OF_OUTPUT:
        return f"the output cannot be written: {error.strerror}; what the command did is kept, so run it again"
    path = Path(str(error.filename or "."))
    place = path if os.path.lexists(path) else path.parent
    if isinstance(error, PermissionError) and not os.access(place, os.R_OK):
        return f"{path} is closed to you: {error.strerror}; ask its owner, or choose another place ({option('dir')})"
    return str(cannot_write(path, error))
