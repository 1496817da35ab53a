"""Write the admin routes of deploy/nginx/vitserve.conf: `python -m tests.deploy.admin_routes`."""

import asyncio
import re

from service.web.routes.endpoint import Endpoint
from tests.conftest import REPOSITORY
from tests.service.web.apps import app, inside

CONFIGURATION = REPOSITORY / "deploy/nginx/vitserve.conf"


def admin_routes() -> list[tuple[str, str]]:
    """Return the methods and paths that accept only the operator's key."""
    running = app(api_keys="web:KEY", admin_key="ADMIN")

    async def is_refused(method: str, path: str) -> bool:
        answer = await running.request(
            method, path.replace("{}", "1"), headers={"authorization": "Bearer KEY"}
        )
        return answer.status == 403 and "the admin key is needed" in str(answer.json)

    async def refused() -> list[tuple[str, str]]:
        return [route for route in _routes(inside(running).routes) if await is_refused(*route)]

    return asyncio.run(refused())


def configuration() -> str:
    """Return the configuration with the current admin routes."""
    head, start, rest = CONFIGURATION.read_text().partition("    # Written by `python -m")
    comment, _, _ = rest.partition("\n")
    tail = rest[rest.index("    default 0;") :]
    lines = "".join(f'    "~^{rule}" 1;\n' for rule in _rules())
    return f"{head}{start}{comment}\n{lines}{tail}"


def _rules() -> list[str]:
    """Return a regular expression for each start of admin paths.

    It names the methods only if an open route starts like this, too.
    """
    admin = admin_routes()
    open_routes = set(_routes(inside(app()).routes)) - set(admin)
    rules = []
    for start in sorted({path.partition("{")[0] for _, path in admin}):
        methods = sorted({method for method, path in admin if path.startswith(start)})
        joined = methods[0] if len(methods) == 1 else f"({'|'.join(methods)})"
        is_shared = any(path.startswith(start) for _, path in open_routes)
        rules.append(f"{joined if is_shared else '[A-Z]+'} {start}")
    return rules


def _routes(endpoints: list[Endpoint]) -> list[tuple[str, str]]:
    """Return method and path of each endpoint, with {} for each parameter."""
    return [
        (method, re.sub(r"\{[^}]*\}", "{}", endpoint.path))
        for endpoint in endpoints
        for method in sorted(endpoint.methods)
    ]


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration())
