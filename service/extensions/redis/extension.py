"""Adds image stores in Redis: VIT_RECENT_URL=redis://HOST, rediss://HOST or unix://PATH."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.errors import SettingsError
from service.extension import Extension

if TYPE_CHECKING:
    from collections.abc import Callable

    from service.observe.metrics import Metrics
    from service.settings import Settings
    from service.web.image_stores import ImageStore

_SCHEMES = ("redis", "rediss", "unix")


def _store(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> ImageStore:
    from service.extensions.redis.image_store import RedisImageStore

    return RedisImageStore(
        settings.recent_url.get_secret_value(),
        name=settings.models or settings.model_name or settings.checkpoint,
        ttl=settings.recent_ttl,
        max_bytes=settings.recent_bytes,
        failed=metrics.recent_errors.inc,
        on_evicted=metrics.recent_evicted_age.observe,
        clock=clock,
    )


def _check(settings: Settings) -> None:
    from service.setting_values import is_installed

    scheme = settings.recent_url.get_secret_value().partition("://")[0]
    if scheme in _SCHEMES and not is_installed("redis"):
        raise SettingsError(
            "VIT_RECENT_URL: it needs the package redis: pip install 'vitserve[redis]'"
        )


EXTENSION = Extension(
    name="redis",
    notes={"recent_url": "`redis://...` is shared by all replicas"},
    check=_check,
    stores=dict.fromkeys(_SCHEMES, _store),
)
