import time

import pytest

from service.errors import SettingsError
from service.extensions.redis import image_store
from service.extensions.redis.extension import EXTENSION
from service.observe.metrics import Metrics
from service.settings import load_settings


def test_missing_package_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings({"recent_url": "redis://cache"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert EXTENSION.check is not None
    with pytest.raises(SettingsError, match=r"VIT_RECENT_URL: .* pip install"):
        EXTENSION.check(settings)


@pytest.mark.parametrize(
    ("changes", "name"), [({"model_name": "cats"}, "cats"), ({}, load_settings().checkpoint)]
)
def test_replicas_share_pictures_by_model_name(
    changes: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        image_store, "RedisImageStore", lambda url, *, name, **_: names.append(name)
    )
    settings = load_settings({"recent_url": "redis://127.0.0.1", **changes})
    EXTENSION.stores["redis"](settings, Metrics(), time.monotonic)
    assert names == [name]
