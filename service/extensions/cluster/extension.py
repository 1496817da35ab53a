"""Runs the service in several processes: VIT_WORKERS, several devices, or a GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from service.errors import SettingsError
from service.extension import Extension

if TYPE_CHECKING:
    from service.engine.backbones import Loader
    from service.settings import Settings


def _serve(settings: Settings, load: Loader) -> int:
    if not sys.platform.startswith("linux"):
        raise SettingsError("VIT_WORKERS, VIT_DEVICE: several processes, or a GPU, need Linux")
    from service.extensions.cluster.run import run_cluster  # Linux only

    return run_cluster(settings, load)


EXTENSION = Extension(name="cluster", serve=_serve)
