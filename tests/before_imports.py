"""Runs a command that is to end before the imports of seconds."""

import subprocess
import sys

_CODE = (
    "import sys; from autofit.cli import main; code = main(sys.argv[1:]); "
    "assert not {'torch', 'optuna', 'numpy', 'rich'} & set(sys.modules), 'too much is imported'; sys.exit(code)"
)


def refused(*words: str) -> str:
    """What `autofit WORDS` says in a process of its own, which ends with 2 and has imported nothing heavy."""
    done = subprocess.run([sys.executable, "-c", _CODE, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    return done.stderr
