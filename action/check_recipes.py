"""The GitHub Action's work: check the recipes that a pull request changes, and write one table as its comment.

Everything is told by the environment (action.yml sets it): RECIPES (globs, one a line), GPU, OPTIONS, BASE (a
commit, or nothing), NUMBER (of the pull request, or nothing), COMMENT and TOKEN, and GitHub's own GITHUB_REPOSITORY,
GITHUB_API_URL, GITHUB_STEP_SUMMARY and GITHUB_OUTPUT. Exit code 0: all fit; 1: one does not; 2: a recipe is wrong.
"""

import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autofit.units import format_seconds

SECONDS = 30.0  # of one request to GitHub
LONGEST = 300  # characters of a message in a cell
PER_PAGE = 100


@dataclass(frozen=True, slots=True)
class Checked:
    """A recipe and what `autofit check` says of it: its JSON object, or the message of an error."""

    path: str
    said: Mapping[str, Any] | None
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.said is not None and bool(self.said["fits"])

    @property
    def row(self) -> str:
        """The recipe's line of the table."""
        if self.said is None:
            return f"| {_cell(self.path)} | :warning: not checked | | | {_cell(self.error)} |"
        mark = ":white_check_mark:" if self.fits else ":x:"
        used, capacity, step = self.said["device_used_bytes"], self.said["capacity_bytes"], self.said["step_s"]
        memory = f"{used / 1e9:.2f} of {capacity / 1e9:.2f} GB" if used else f"of {capacity / 1e9:.2f} GB"
        seconds = "" if step is None else format_seconds(step)
        return f"| {_cell(self.path)} | {mark} {self.said['verdict']} | {memory} | {seconds} | {_cell(self._change)} |"

    @property
    def _change(self) -> str:
        change = (self.said or {}).get("change")
        if change is None:
            return ""
        words = change.get("own") or change["options"].replace("--set ", "")  # `own`: in its file's keys
        return f"{words} ({change['tier']}): {change['device_used_bytes'] / 1e9:.2f} GB"


def recipes(globs: Sequence[str], base: str) -> list[str]:
    """The paths that the globs name: those that differ from the commit `base`, or all that git knows."""
    named = [f":(glob){glob}" for glob in globs]
    if base:
        command = ["git", "diff", "-z", "--name-only", "--diff-filter=ACMR", f"{base}...HEAD", "--", *named]
    else:
        command = ["git", "ls-files", "-z", "--", *named]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [path for path in found.split("\0") if path]


def checked(path: str, gpu: str, options: Sequence[str]) -> Checked:
    """What `autofit check` says of a recipe."""
    program = [sys.executable, "-m", "autofit", "check", "--gpu", gpu, "--json", *options, "--", path]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode in (0, 1) and done.stdout.strip():
        return Checked(path, json.loads(done.stdout.splitlines()[-1]))
    return Checked(path, None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


def report(found: Sequence[Checked], gpu: str) -> str:
    """The comment: a table, and how to see more. Its first line, which nobody sees, finds it again."""
    lines = [_marker(gpu), f"**autofit: do the changed recipes fit on {gpu}?** Predicted; no GPU was used.", ""]
    lines += ["| recipe | | device-used | a step | what would make it fit |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(one.row for one in found), "", f"More: `autofit estimate RECIPE --gpu {gpu}`"])


def publish(text: str, gpu: str, environment: Mapping[str, str]) -> None:
    """Write the comment of the pull request, in place of the one for the same card that is there."""
    api = environment.get("GITHUB_API_URL", "https://api.github.com")
    issues = f"{api}/repos/{environment['GITHUB_REPOSITORY']}/issues"
    place = f"{issues}/{environment['NUMBER']}/comments"
    number, old = 1, None
    while old is None:
        page = _request("GET", f"{place}?per_page={PER_PAGE}&page={number}", None, environment)
        old = next((one["id"] for one in page if str(one["body"]).startswith(_marker(gpu))), None)
        if len(page) < PER_PAGE:
            break
        number += 1
    if old is None:
        _request("POST", place, {"body": text}, environment)
    else:
        _request("PATCH", f"{issues}/comments/{old}", {"body": text}, environment)


def _request(method: str, url: str, body: object, environment: Mapping[str, str]) -> Any:
    data = None if body is None else json.dumps(body).encode()
    token = environment["TOKEN"]
    headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
    request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310  (GitHub's own address)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
        return json.load(answer)


def _marker(gpu: str) -> str:
    return f"<!-- autofit check {gpu.replace('--', '')} -->"


def _cell(text: str) -> str:
    """A text that cannot end its cell, or become a mention or HTML: a pull request chooses names of files."""
    short = " ".join(text.split())[:LONGEST].replace("`", "'").replace("|", "\\|")
    return f"`{short}`" if short else ""


def main(environment: Mapping[str, str]) -> int:
    """Check, tell, and the exit code."""
    globs = [line.strip() for line in environment["RECIPES"].splitlines() if line.strip()]
    found = recipes(globs, environment.get("BASE", ""))
    if not found:
        print(f"no recipe of {' '.join(globs)} is changed")
    gpu = environment["GPU"]
    all_checked = [checked(path, gpu, shlex.split(environment.get("OPTIONS", ""))) for path in found]
    text = report(all_checked, gpu)
    fits = all(one.fits for one in all_checked)
    for name, line in (("GITHUB_STEP_SUMMARY", text), ("GITHUB_OUTPUT", f"fits={str(fits).lower()}")):
        if environment.get(name):
            with open(environment[name], "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
    print(text)
    if found and environment.get("NUMBER") and environment.get("COMMENT", "true") == "true":
        try:
            publish(text, gpu, environment)
        except urllib.error.URLError as error:  # a pull request from a fork may not write
            print(f"the comment was not written ({error}); the table is in the step's summary")
    if any(one.said is None for one in all_checked):
        return 2
    return int(not fits)


if __name__ == "__main__":
    sys.exit(main(os.environ))
