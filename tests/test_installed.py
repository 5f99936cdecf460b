"""What is installed: `autofit` alone, which works in a folder full of names that a user may have given too."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tiny

from autofit.commands.common import stranger_in

ROOT = Path(__file__).parents[1]
BROKEN = "raise RuntimeError('a module of the user, which autofit must not import')\n"
FOLDERS = ("trainers", "search_spaces", "tests", "experiments", "commands", "proofs")
MODULES = ("space.py", "recipe.py", "common.py", "keys.py", "grpo.py", "worker.py", "proof.py", "files.py", "units.py")


def users_folder(folder: Path, model: Path) -> Path:
    """A recipe in a folder of colliding names, with a reward of the user's own."""
    tiny.write_recipe(folder, model, reward_funcs=["rewards.share_of_t1"])
    (folder / "tiny_rewards.py").rename(folder / "rewards.py")
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(BROKEN)
    for name in MODULES:
        (folder / name).write_text(BROKEN)
    return folder


def run(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def copied() -> list[str]:
    """The files and folders of the repository from which the image of `spaces/` installs autofit."""
    lines = re.findall(r"^COPY (.*) \S+$", (ROOT / "spaces/Dockerfile").read_text("utf-8"), re.MULTILINE)
    return [name for line in lines for name in line.split()]


def test_a_space_is_given_all_that_its_image_copies() -> None:
    (given,) = re.findall(r"^cp -r (.*) space/$", (ROOT / "spaces/README.md").read_text("utf-8"), re.MULTILINE)
    assert {*given.split()} == {*copied(), "spaces/README.md", "spaces/Dockerfile"} - {"README.md"}  # its own README


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment that has autofit from its wheel, and every other package from here."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in copied():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(home),
        str(source),
    ]
    done = run(build, home)
    assert done.returncode == 0, done.stderr
    venv.create(home / "env", with_pip=False, symlinks=True)
    packages = next((home / "env" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(next(home.glob("autofit_llm-*.whl"))) as wheel:
        wheel.extractall(packages)
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return home / "env" / "bin" / "python"


def test_a_wheel_holds_the_package_autofit_and_nothing_beside_it(installed: Path, tmp_path: Path) -> None:
    packages = next(installed.parents[1].glob("lib/python*/site-packages"))
    names = {path.name for path in packages.iterdir() if path.suffix not in (".pth", ".dist-info")} - {"__pycache__"}
    assert names == {"autofit"}
    kinds = (".py", ".yaml", ".npz", ".html", ".css", ".js", ".svg")
    ours = {f"{p.relative_to(ROOT)}" for p in (ROOT / "autofit").rglob("*") if p.suffix in kinds}
    for name in ("trainers", "search_spaces"):
        found = (p.relative_to(ROOT) for p in (ROOT / name).rglob("*") if p.suffix in (".py", ".yaml", ".json"))
        ours |= {f"autofit/{path}" for path in found if "examples" not in path.parts}
    installed_files = (p for p in (packages / "autofit").rglob("*") if p.is_file() and p.suffix != ".pyc")
    assert {f"{p.relative_to(packages)}" for p in installed_files} == ours


def test_another_project_s_package_in_the_same_folder_is_said(tmp_path: Path) -> None:
    """PyPI's `autofit` installs a package of the same name: it writes over our files."""
    (tmp_path / "autofit_llm-0.1.0.dist-info").mkdir()
    assert stranger_in(tmp_path) is None
    (tmp_path / "autofit-2026.7.29.1.dist-info").mkdir()
    said = stranger_in(tmp_path)
    assert said is not None
    assert "autofit 2026.7.29.1" in said
    assert "pip uninstall autofit" in said


@pytest.mark.parametrize("how", ["wheel", "editable"])
def test_no_name_of_ours_but_autofit_can_be_imported(installed: Path, tmp_path: Path, how: str) -> None:
    names = ["trainers", "search_spaces", "experiments", "noxfile"]
    code = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n) is not None])"
    python = str(installed) if how == "wheel" else sys.executable
    done = run([python, "-c", code], tmp_path)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "command"), [pytest.param("wheel", "script", marks=pytest.mark.thorough), ("editable", "module")]
)
def test_commands_work_in_a_folder_full_of_colliding_names(
    installed: Path, tmp_path: Path, tiny_model: Path, how: str, command: str
) -> None:
    folder = users_folder(tmp_path, tiny_model)
    if command == "script":  # `python -m autofit` means the folder's own
        (folder / "autofit").mkdir()
        (folder / "autofit" / "__init__.py").write_text(BROKEN)
    python = str(installed) if how == "wheel" else sys.executable
    script = tmp_path.parent / f"{tmp_path.name}-autofit"  # beside the folder, as a console script is elsewhere
    script.write_text("import sys\nfrom autofit.cli import main\nsys.exit(main())\n")
    start = [python, str(script)] if command == "script" else [python, "-m", "autofit"]
    trials = "2" if how == "wheel" else "1"
    search = ["search", "run.yaml", "--device", "cpu", "--target-vram", "100MB", "--trials", trials, "--json",
              "--no-advice", "--no-confirm"]  # fmt: skip
    done = run([*start, *search], folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counts"]["fit"] == int(trials), done.stderr
    if how == "editable":
        return  # the rest takes as long again
    verified = run([*start, "verify", "1", "--json"], folder)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["verdict"] == "proven"
