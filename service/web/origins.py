"""Which web pages may call the service from a browser, by their origin."""

import re
from collections.abc import Iterable


def split_origins(origins: Iterable[str]) -> tuple[list[str], str | None]:
    """Return the origins to compare, and a pattern of those with `*.` before their host, None without such an origin.

    The subdomains of an origin are names of letters, digits, hyphens and dots, and not the domain itself.
    """
    exact = [origin for origin in origins if "*." not in origin]
    patterns = [re.escape(origin).replace(r"\*\.", r"(?:[a-z0-9_-]+\.)+") for origin in origins if "*." in origin]
    return exact, "|".join(patterns) or None
