"""`nox` runs lint, types and tests; `nox -s slow` runs all that CI does, `nox -s thorough` the rest.

`nox -s gpu` runs what needs a CUDA card, `nox -s cuda` what needs the CUDA build of torch, and no card.

`nox -s compat` runs the simulation's tests on the oldest and the newest versions that it supports, `nox -s fresh` the
README's two lines, each in a clean clone.

`nox -s docs` builds the site of docs/, `nox -s outputs` runs the commands of its pages again, `nox -s build` makes and
checks the distributions of a release.
"""

import os
import re
import shutil
import tomllib
from pathlib import Path

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
    session.run("bash", ".ci/types", external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the default tests: whole cases of each capability, and all tests that take less than a second."""
    session.install(*INSTALL)
    session.run("pytest", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Run every test that needs no GPU, as CI does."""
    session.install(*INSTALL)
    session.run("pytest", "-m", "not thorough and not gpu and not cuda", *session.posargs)


@nox.session
def thorough(session: nox.Session) -> None:
    """Run whole matrices of cases and the long training, which CI samples: before a release, or weekly."""
    session.install(*INSTALL)
    session.run("pytest", "-m", "thorough and not gpu and not cuda", *session.posargs)


@nox.session
@nox.parametrize(
    "versions",
    [
        nox.param(("torch==2.11.*", "transformers==5.17.*", "trl==1.14.*"), id="oldest"),
        nox.param(("torch", "transformers", "trl"), id="newest"),
    ],
)
def compat(session: nox.Session, versions: tuple[str, ...]) -> None:
    """Run the simulation's tests on the oldest supported and on the newest torch, transformers and TRL (several GB)."""
    session.install("--upgrade", "-e", ".[dev]", *versions)
    session.run(
        "pytest",
        "-m",
        "not thorough and not gpu and not cuda",
        *(
            session.posargs
            or ["tests/fakegpu", "tests/test_architectures.py", "tests/test_loading.py", "tests/test_names.py"]
        ),
    )


@nox.session(venv_backend="none")
def fresh(session: nox.Session) -> None:
    """Run the README's two lines, each in a clone of its own without a virtual environment: weekly (several GB)."""
    lines = re.findall(r"^(?:Run|Test): `(.*)`$", Path("README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        clone = session.create_tmp()
        session.run("git", "clone", "--quiet", ".", clone, external=True)
        with session.chdir(clone):
            session.run("bash", "-euo", "pipefail", "-c", line, external=True)
        shutil.rmtree(clone)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of docs/ into site/; a dead link or a page without a place in the nav ends it."""
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    session.install(*extras["docs"])  # mkdocstrings reads the sources: autofit itself need not be installed
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def build(session: nox.Session) -> None:
    """Build both distributions into dist/, check them as PyPI does, and start the command from its wheel alone."""
    session.install("build", "twine")
    made, lifted = Path("dist").absolute(), Path(session.create_tmp()) / "fakegpu-torch"
    for folder in (made, lifted):
        shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "fakegpu-torch/lift.py", str(lifted))
    for project in (".", str(lifted)):
        session.run("python", "-m", "build", "--outdir", str(made), project)
    files = sorted(made.iterdir())
    session.run("twine", "check", "--strict", *map(str, files))
    tag = os.environ.get("GITHUB_REF_NAME", "")
    if tag.startswith("v") and not all(f"-{tag[1:]}" in file.name for file in files):
        session.error(f"the tag {tag} names another version than {', '.join(file.name for file in files)}")
    wheel = next(file for file in files if file.match("autofit_llm-*.whl"))
    session.install("pyyaml")  # all that --help imports of others
    session.install("--no-deps", "--force-reinstall", str(wheel))
    session.run("autofit", "--help", silent=True)


@nox.session
def outputs(session: nox.Session) -> None:
    """Run the commands of the pages' console blocks and compare their outputs (minutes); `-- PAGE` for one page."""
    session.install(*INSTALL)
    session.run("python", "docs/outputs.py", "--check", *session.posargs)


@nox.session
def cuda(session: nox.Session) -> None:
    """Run the tests on the CUDA build of torch, of the exact version in constraints.txt, without a card (4 GB)."""
    pins = [line.split("#")[0].strip() for line in Path("constraints.txt").read_text().splitlines()]
    version = next(pin.removeprefix("torch==") for pin in pins if pin.startswith("torch=="))
    # `===` is no CPU build (2.13.0+cpu), which a folder of wheels may offer before the index.
    clean = {"PIP_CONSTRAINT": os.devnull, "PIP_FIND_LINKS": ""}
    session.install(f"torch==={version}", "nvidia-cuda-crt==13.0.88", env=clean)  # the headers of CUDA's runtime
    rest = Path(session.create_tmp()) / "constraints.txt"
    rest.write_text("\n".join(pin for pin in pins if pin and not pin.startswith("torch==")))
    session.install("-c", str(rest), "-e", ".[dev]", env={"PIP_CONSTRAINT": os.devnull})
    session.run("pytest", "-m", "cuda", *(session.posargs or ["tests/test_null_gpu.py", "tests/test_card_values.py"]))


@nox.session
def smoke(session: nox.Session) -> None:
    """Start every experiment with its shortest arguments, in a clone of the last commit."""
    session.install(*INSTALL)
    session.run("python", "-m", "experiments.smoke", *session.posargs)


@nox.session
def storm(session: nox.Session) -> None:
    """Attack autofit: -- --inputs N --torn N --kills N --seed S --minutes M, or -- --on to add to what was tried."""
    session.install(*INSTALL)
    session.run("python", "-m", "experiments.storm", *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA card, in the environment at hand."""
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
