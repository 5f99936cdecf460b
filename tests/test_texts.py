"""What the texts of the repository name exists: files that they cite, and packages that they ask to install."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("autofit", "trainers", "search_spaces", "experiments", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
HISTORY = ("LOG.md", "CHANGELOG.md")  # of what was; files that they name may have gone since
CITED = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)")
DOCUMENT = re.compile(r"(?<![\w./-])[A-Z]{3,}\.md\b")
# On PyPI the name autofit is another project's, so that no text may have it installed by name, extras included.
INSTALLED = re.compile(r"(?<!un)install\s+(?:-\S+\s+)*[`'\"]*autofit(?![\w./-])")


def texts() -> Iterator[tuple[Path, str]]:
    more = ("noxfile.py", "pyproject.toml", "docs", "skills", "spaces", "action", "fakegpu-torch")
    for name in (*PAGES, *more, *FOLDERS):
        found = ROOT / name
        for path in [found] if found.is_file() else sorted(found.rglob("*")):
            if path.suffix in (".py", ".md", ".toml", ".yaml") and path.name not in HISTORY and path.is_file():
                yield path.relative_to(ROOT), path.read_text("utf-8")


def is_there(cited: str) -> bool:
    stands_for_any = any(part.isupper() for part in cited.split("/"))  # experiments/gpu/CARD
    return stands_for_any or (ROOT / cited).exists()


def test_a_file_that_a_text_cites_is_there() -> None:
    documents = {path.name for path, _ in texts()} | set(HISTORY)
    wrong = [f"{path} cites {cited}" for path, text in texts() for cited in CITED.findall(text) if not is_there(cited)]
    wrong += [f"{path} cites {cited}" for path, text in texts() for cited in DOCUMENT.findall(text)
              if cited not in documents]  # fmt: skip
    assert not wrong


def test_no_text_asks_to_install_the_strangers_package_of_our_name() -> None:
    wrong = [f"{path}: {said}" for path, text in texts() for said in INSTALLED.findall(text)]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "asks"),
    [("pip install 'auto" "fit[postgres]'", True), ("install auto" "fit[demo]", True),
     ("pip install -U auto" "fit", True),
     ('pip install -e ".[dev]"', False), ("pip install 'psycopg2-binary>=2.9.9'", False),
     ("install auto" "fit/trainers", False)],
)  # fmt: skip
def test_a_text_that_asks_for_our_name_is_found(text: str, asks: bool) -> None:
    assert bool(INSTALLED.search(text)) is asks


def test_the_page_on_pypi_leads_to_the_repository_that_releases_it() -> None:
    page = runpy.run_path(str(ROOT / "setup.py"))["page"]
    made = page((ROOT / "README.md").read_text("utf-8"), "owner/name", "v1.2.3")
    links = re.findall(r"(!?)\[[^]]*\]\(([^)\s]+)\)", made)
    at = {"": "https://github.com/owner/name/blob/v1.2.3/", "!": "https://raw.githubusercontent.com/owner/name/v1.2.3/"}
    assert {mark for mark, _ in links} == {"", "!"}
    for mark, link in links:
        assert link.startswith(at[mark])
        assert (ROOT / link.removeprefix(at[mark])).exists()
    assert page("[a](https://b.c/d) [e](#f)", "owner/name", "v1") == "[a](https://b.c/d) [e](#f)"
