"""The table of docs/settings.md comes from the settings: `python -m tests.deploy.settings_page` writes it."""

from service.settings import table
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs/settings.md"


def page() -> str:
    """The page with the table as it is to be."""
    head, _, rest = PAGE.read_text().partition("| variable |")
    return f"{head}{table()}\n\n{rest.partition(chr(10) * 2)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
