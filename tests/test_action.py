"""The GitHub Action's steps and script and the pre-commit hook, with a stub for autofit and a server for GitHub."""

import json
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from action import check_recipes

ROOT = Path(__file__).parents[1]
OWN_PYTHON = sys.executable
FITS = {"verdict": "fits", "fits": True, "device_used_bytes": 2e10, "capacity_bytes": 4e10, "step_s": 12.34,
        "change": None}  # fmt: skip
TOO_LARGE = {
    **FITS, "verdict": "does not fit", "fits": False, "device_used_bytes": None, "step_s": None,
    "change": {"options": "--set dtype=bfloat16", "tier": "approximate", "device_used_bytes": 2.1e10},
}  # fmt: skip


def stub(folder: Path) -> Path:
    """A program that answers for autofit by the name of the recipe, its last word, as `check --json` does."""
    path = folder / "autofit"
    path.write_text(f"""#!/bin/sh
for last; do :; done
echo "$@" >> "{folder}/asked"
case "$last" in
    *large*) echo '{json.dumps(TOO_LARGE)}'; exit 1 ;;
    *wrong*) echo "autofit: unknown key 'a|b' of @someone" >&2; exit 2 ;;
    *) echo 'progress'; echo '{json.dumps(FITS)}' ;;
esac
""")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of git, with a commit `base` and one after it that adds and changes recipes."""
    folder = tmp_path / "repository"
    (folder / "recipes").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(stub(tmp_path)))
    git("init", "-q")
    for name in ("old", "changed"):
        (folder / f"recipes/{name}.yaml").write_text("a: 1\n")
    commit()
    git("tag", "base")
    (folder / "recipes/changed.yaml").write_text("a: 2\n")
    (folder / "recipes/large one.yaml").write_text("a: 1\n")
    (folder / "other.yaml").write_text("a: 1\n")
    commit()
    return folder


def git(*words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)


def commit() -> None:
    git("add", "-A")
    git("commit", "-qm", "a")


@pytest.fixture
def github() -> Iterator[tuple[str, list[dict[str, object]], list[str]]]:
    """A server with the comments of a pull request: its address, the comments, and the requests that it had."""
    comments: list[dict[str, object]] = [{"id": n, "body": "words"} for n in range(120)]
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = int(self.path.rpartition("=")[2])
            self.answer(comments[100 * (page - 1) : 100 * page])

        def do_POST(self) -> None:
            comments.append({"id": len(comments), **self.sent()})
            self.answer({})

        def do_PATCH(self) -> None:
            comments[int(self.path.rpartition("/")[2])].update(self.sent())
            self.answer({})

        def sent(self) -> dict[str, object]:
            return dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, what: object) -> None:
            asked.append(f"{self.command} {self.path}")
            self.send_response(200 if self.headers["Authorization"] == "Bearer t" else 403)
            self.end_headers()
            self.wfile.write(json.dumps(what).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", comments, asked
    server.shutdown()
    server.server_close()


def environment(**more: str) -> dict[str, str]:
    return {"RECIPES": "recipes/*.yaml\nnone/**", "GPU": "a100-40gb", "OPTIONS": "--prompt-tokens 512",
            "GITHUB_REPOSITORY": "o/r", **more}  # fmt: skip


def test_changed_recipes_are_checked_and_the_comment_is_written_once(
    repository: Path, github: tuple[str, list[dict[str, object]], list[str]]
) -> None:
    address, comments, asked = github
    output, summary = repository.parent / "output", repository.parent / "summary"
    told = environment(
        BASE="base", NUMBER="7", TOKEN="t", GITHUB_API_URL=address, GITHUB_OUTPUT=str(output),
        GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert check_recipes.main(told) == 1
    assert output.read_text() == "fits=false\n"
    table = [line for line in str(comments[120]["body"]).splitlines() if line.startswith("| `")]
    assert table == [
        "| `recipes/changed.yaml` | :white_check_mark: fits | 20.00 of 40.00 GB | 12.3 s |  |",
        "| `recipes/large one.yaml` | :x: does not fit | of 40.00 GB |  | `dtype=bfloat16 (approximate): 21.00 GB` |",
    ]
    assert summary.read_text().strip() == comments[120]["body"]
    assert (
        "--gpu a100-40gb --json --prompt-tokens 512 -- recipes/changed.yaml"
        in (repository.parent / "asked").read_text()
    )
    assert check_recipes.main(told) == 1
    assert len(comments) == 121
    assert asked[-1] == "PATCH /repos/o/r/issues/comments/120"
    assert check_recipes.main({**told, "GPU": "h100"}) == 1  # another card has a comment of its own
    assert len(comments) == 122


def test_a_row_reads_as_the_command_does_and_a_change_is_in_the_files_own_keys() -> None:
    change = {**TOO_LARGE["change"], "own": "bf16: true"}  # type: ignore[dict-item]
    row = check_recipes.Checked("a.yaml", {**TOO_LARGE, "step_s": 1743.9, "change": change}).row
    assert row.endswith("| 29m04s | `bf16: true (approximate): 21.00 GB` |")


def test_a_wrong_recipe_is_told_and_its_name_or_message_is_only_text(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "recipes/wrong`|@all.yaml").write_text("a: 1\n")
    commit()
    assert check_recipes.main(environment(BASE="base")) == 2
    said = capsys.readouterr().out
    assert (
        "| `recipes/wrong'\\|@all.yaml` | :warning: not checked | | | `autofit: unknown key 'a\\|b' of @someone` |"
        in said
    )


def test_without_a_pull_request_all_recipes_are_checked_and_nothing_is_written_where_it_may_not(
    repository: Path, github: tuple[str, list[dict[str, object]], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_recipes.main(environment()) == 1
    assert len((repository.parent / "asked").read_text().splitlines()) == 3
    address = github[0]
    told = environment(BASE="base", NUMBER="7", TOKEN="of a fork", GITHUB_API_URL=address)
    assert check_recipes.main(told) == 1
    assert "the comment was not written" in capsys.readouterr().out
    assert check_recipes.main(environment(BASE="HEAD", NUMBER="7")) == 0


def test_the_action_gives_the_script_each_variable_that_it_reads() -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "check")
    source = Path(check_recipes.__file__).read_text("utf-8")
    read = {*re.findall(r'environment(?:\[|\.get\()"(\w+)"', source)}
    assert {name for name in read if not name.startswith("GITHUB_")} == set(step["env"])
    assert "inputs." not in step["run"]  # no text of others in the shell's code
    named = {*re.findall(r"inputs\.([\w-]+)", (ROOT / "action.yml").read_text("utf-8"))}
    assert named == set(action["inputs"])


def composite(
    home: Path, workspace: Path, inputs: dict[str, str], github: dict[str, str]
) -> list[tuple[str, int, str]]:
    """The steps of action.yml as GitHub runs them: (name, exit code, output) of each, up to the first that fails.

    `github` is its context, as dotted names. actions/setup-python is the `python` in the folder bin of `home`.
    """
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    given = {name: str(one.get("default", "")) for name, one in action["inputs"].items()} | inputs
    known = {f"inputs.{name}": value for name, value in given.items()} | {f"github.{k}": v for k, v in github.items()}
    env = {"PATH": f"{home / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "RUNNER_TEMP": str(home / "temp"),
           "GITHUB_ACTION_PATH": str(ROOT), "GITHUB_REPOSITORY": "o/r", "GITHUB_API_URL": github["api_url"],
           "GITHUB_OUTPUT": str(home / "output"), "GITHUB_STEP_SUMMARY": str(home / "summary")}  # fmt: skip
    done = []
    for step in action["runs"]["steps"]:
        if "run" not in step:
            continue
        own = {
            key: re.sub(r"\$\{\{ ([\w.-]+) \}\}", lambda found: known[found[1]], value)
            for key, value in step["env"].items()
        }
        (home / "step.sh").write_text(step["run"])
        shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(home / "step.sh")]
        ran = subprocess.run(shell, cwd=workspace, env=env | own, capture_output=True, text=True, check=False)
        done.append((step["name"], ran.returncode, ran.stdout + ran.stderr))
        if ran.returncode:
            break
    return done


PYTHON = """#!/bin/sh
# Its environments have a pip that notes what it is asked for, and a python whose autofit is the stub.
mkdir -p "$3/bin" && cp "{folder}/checking" "$3/bin/python" && cp "{folder}/pip" "$3/bin/pip"
"""
CHECKING = """#!/bin/sh
code='import runpy, sys; sys.executable = "{stub}"; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name="__main__")'
PYTHONPATH="{root}" exec "{python}" -c "$code" "$@"
"""


def test_the_actions_steps_run_in_a_repository_with_a_pull_request(
    repository: Path, github: tuple[str, list[dict[str, object]], list[str]]
) -> None:
    address, comments, _ = github
    home = repository.parent
    told = {"folder": home, "stub": home / "autofit", "root": ROOT, "python": OWN_PYTHON}
    for path, text in (
        (home / "bin/python", PYTHON),
        (home / "checking", CHECKING),
        (home / "pip", '#!/bin/sh\necho "$@" >> "{folder}/installs"\n'),
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format_map(told))
        path.chmod(0o755)
    base = subprocess.run(["git", "rev-parse", "base"], capture_output=True, text=True, check=True).stdout.strip()
    event = {"event.pull_request.base.sha": base, "event.pull_request.number": "7", "token": "t", "api_url": address}
    inputs = {"recipes": "recipes/*.yaml", "gpu": "a100-40gb", "options": "--prompt-tokens 512"}
    steps = composite(home, repository, inputs, event)
    assert [(name, code) for name, code, _ in steps] == [("Install autofit", 0), ("Check the recipes", 1)], steps
    of_torch, of_autofit = (home / "installs").read_text().splitlines()
    assert re.search(r"--index-url https://download\.pytorch\.org/whl/cpu .* torch==[\d.]+$", of_torch)
    assert of_autofit.endswith(str(ROOT))
    assert len(comments) == 121
    assert "| `recipes/large one.yaml` | :x: does not fit |" in str(comments[120]["body"])
    assert (home / "output").read_text() == "fits=false\n"
    (repository / "recipes/large one.yaml").unlink()
    commit()
    assert [code for _, code, _ in composite(home, repository, inputs, event)] == [0, 0]
    assert len(comments) == 121
    assert (home / "output").read_text() == "fits=false\nfits=true\n"


def test_the_hook_checks_each_file_and_ends_with_the_worst_code(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    assert hook["stages"] == ["manual"]
    stub(tmp_path)
    run = [str(ROOT / hook["entry"]), "--gpu", "h100"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*run, "--", "large.yaml", "small.yaml"], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (1, "large.yaml")
    assert (tmp_path / "asked").read_text() == "check --gpu h100 -- large.yaml\ncheck --gpu h100 -- small.yaml\n"
    done = subprocess.run([*run, "large.yaml"], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, "args" in done.stderr) == (2, True)


def test_a_release_is_built_by_the_session_that_a_developer_runs_signed_and_uploaded_without_a_token() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert "nox -s build" in jobs["build"]["steps"][2]["run"]
    assert "def build(session" in (ROOT / "noxfile.py").read_text("utf-8")
    tagged = "startsWith(github.ref, 'refs/tags/v')"  # started by hand, nothing is signed or published
    (signed,) = (step for step in jobs["build"]["steps"] if "attest" in step.get("uses", ""))
    assert (signed["if"], jobs["publish"]["if"], jobs["publish"]["needs"]) == (tagged, tagged, "build")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in text
