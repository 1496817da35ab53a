"""Adds linked files outside docs/, and the reference, to the site."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")
# `oad` (essentials-openapi) generates it from the OpenAPI document.
HTTP = REPOSITORY / "dist/http.md"
CLIENT = """# Python client

Fields of answers are in the [schemas](http.md#schemas).

::: vitserve.client
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, and all files of the repository that pages link to, directly or not."""
    files.append(File.generated(config, "reference/http.md", abs_src_path=str(HTTP)))
    files.append(File.generated(config, "reference/client.md", content=CLIENT))
    waiting = [REPOSITORY / name for name in TOP]
    waiting += [path for page in Path(config.docs_dir).rglob("*.md") for path in _outside(page)]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        files.append(File.generated(config, _place(path), abs_src_path=str(path)))
        waiting += _outside(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between the repository's files into links between the site's."""
    source = Path(page.file.abs_src_path or REPOSITORY / page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[1]).resolve()
        known = target.is_relative_to(REPOSITORY) and files.get_file_from_path(_place(target))
        return "../" * page.file.src_uri.count("/") + _place(target) if known else link[1]

    return LINK.sub(moved, markdown)


def _place(path: Path) -> str:
    """Return the path of a repository file in the site."""
    return path.relative_to(REPOSITORY).as_posix().removeprefix("docs/")


def _outside(page: Path) -> list[Path]:
    """Return the linked files of a page outside docs/."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    return [
        path
        for path in targets
        if path.is_relative_to(REPOSITORY) and not path.is_relative_to(REPOSITORY / "docs")
    ]
