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
def test_replicas_share_pictures_by_model(
    changes: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        image_store, "RedisImageStore", lambda url, *, name, **_: names.append(name)
    )
    settings = load_settings({"recent_url": "redis://127.0.0.1", **changes})
    EXTENSION.stores["redis"](settings, Metrics(), time.monotonic)
    assert names == [name]


def test_password_of_redis_is_never_shown() -> None:
    assert "topsecret" not in repr(load_settings({"recent_url": "redis://:topsecret@cache"}))


@pytest.mark.parametrize("url", ["redis://host/0?colour=1", "redis://host?socket_timeout=x"])
def test_unknown_redis_option_is_refused(url: str) -> None:
    assert EXTENSION.check is not None
    with pytest.raises(SettingsError, match=r"^VIT_RECENT_URL=\*\*\*: not an address of Redis"):
        EXTENSION.check(load_settings({"recent_url": url}))
    EXTENSION.check(load_settings({"recent_url": "unix:///run/redis.sock?db=2"}))


@pytest.mark.parametrize("url", ["redis://host:port", "redis://host:99999"])
def test_unreadable_address_ends_the_start(url: str) -> None:
    with pytest.raises(SettingsError, match="a port from 0 to 65535"):
        load_settings({"recent_url": url})


def test_a_wrong_database_ends_the_start() -> None:
    assert EXTENSION.check is not None
    with pytest.raises(SettingsError, match="expected the number of a database"):
        EXTENSION.check(load_settings({"recent_url": "redis://cache/pictures"}))


def test_url_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_RECENT_URL", "redis://cache:6379/1")
    assert load_settings().recent_url.get_secret_value() == "redis://cache:6379/1"
