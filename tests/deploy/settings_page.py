"""Write the table of docs/settings.md: `python -m tests.deploy.settings_page`."""

from service.cli.setting_flags import described
from service.settings import ENV_PREFIX, settings_class
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs/settings.md"


def page() -> str:
    """Return the page with the current table."""
    head, _, rest = PAGE.read_text().partition("| variable |")
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    for name in settings_class().model_fields:
        meaning, default = described(name)
        rows.append(f"| `{ENV_PREFIX}{name.upper()}` | {default} | {meaning} |")
    _, end, tail = rest.partition("\n\n")
    return head + "\n".join(rows) + end + tail


if __name__ == "__main__":
    PAGE.write_text(page())
