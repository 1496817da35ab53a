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
    import re
    from urllib.parse import urlsplit

    from service.setting_values import is_installed

    written = settings.recent_url.get_secret_value()
    url = urlsplit(written)
    if url.scheme not in _SCHEMES:
        return
    if url.netloc and not re.fullmatch("/?[0-9]*", url.path):
        raise SettingsError(
            "VIT_RECENT_URL: expected the number of a database after the host, as in redis://host/0"
        )
    if not is_installed("redis"):
        raise SettingsError(
            "VIT_RECENT_URL: it needs the package redis: pip install 'vitserve[redis]'"
        )
    from redis.asyncio import ConnectionPool

    try:
        # It does not connect yet.
        ConnectionPool.from_url(written).make_connection()  # type: ignore[no-untyped-call]
    except (TypeError, ValueError) as error:
        raise SettingsError(f"VIT_RECENT_URL=***: not an address of Redis: {error}") from None


EXTENSION = Extension(
    name="redis",
    notes={"recent_url": "`redis://...` is shared by all replicas"},
    check=_check,
    stores=dict.fromkeys(_SCHEMES, _store),
)
