"""Flags of the subcommands that ask a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from service.settings import Settings


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--api-key`."""
    parser.add_argument(
        "--api-key",
        default=_api_key(os.environ),
        help="key that the server asks for [VIT_API_KEY, else the first of VIT_API_KEYS]",
    )


def local_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of a server that was started on this machine with the same environment."""
    return f"http://127.0.0.1:{environment.get('VIT_PORT') or Settings.model_fields['port'].default}"


def _api_key(environment: Mapping[str, str]) -> str | None:
    """Return the client's key; without one, a key of the server, so that one variable serves both on one machine."""
    candidates = [environment.get("VIT_API_KEY", ""), *environment.get("VIT_API_KEYS", "").split(",")]
    return next((key.strip() for key in candidates if key.strip()), None)
