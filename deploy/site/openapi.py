"""Writes the OpenAPI document of the service: `python -m deploy.site.openapi dist/openapi.json`."""

import asyncio
import sys
from pathlib import Path

from tests.service.web.apps import app

if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(asyncio.run(app().get("/openapi.json")).content)
