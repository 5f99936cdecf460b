"""`nox` runs lint, types and tests; `nox -s slow` runs all that CI does, `nox -s gpu` what needs a CUDA card."""

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_existing_virtualenvs = True
INSTALL = ("-c", "constraints.txt", "-e", ".[dev]")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy, strict."""
    session.install(*INSTALL)
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default tests: every capability, within 3 minutes."""
    session.install(*INSTALL)
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run every test that needs no GPU, as CI does."""
    session.install(*INSTALL)
    session.run("pytest", "-m", "not gpu", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA card, in the environment at hand."""
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
