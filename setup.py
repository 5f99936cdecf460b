"""The page on PyPI: what README names by its place in the repository is found at the repository that releases it.

The rest is in pyproject.toml. A release runs on GitHub, which names the repository and the tag; elsewhere README stays
as it is.
"""

import os
import re
from pathlib import Path

RELATIVE = re.compile(r"(!?)(\[[^]]*\]\()(?!https?:|#)([^)\s]+\))")


def page(text: str, repository: str, ref: str) -> str:
    """Markdown with whole addresses of the files and pictures of `repository` ("owner/name") at the tag `ref`."""
    at = {
        "": f"https://github.com/{repository}/blob/{ref}/",
        "!": f"https://raw.githubusercontent.com/{repository}/{ref}/",
    }
    return RELATIVE.sub(lambda found: f"{found[1]}{found[2]}{at[found[1]]}{found[3]}", text)


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text("utf-8")
    repository, ref = os.environ.get("GITHUB_REPOSITORY", ""), os.environ.get("GITHUB_REF_NAME", "")
    address = f"https://github.com/{repository}"
    setup(
        long_description=page(readme, repository, ref) if repository and ref else readme,
        long_description_content_type="text/markdown",
        project_urls={"Source": address, "Changes": f"{address}/blob/{ref}/CHANGELOG.md"} if repository and ref else {},
    )
