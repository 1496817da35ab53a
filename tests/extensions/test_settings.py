"""The settings of extensions, from the environment and from a flag."""

import argparse
from typing import Any

import pytest

from service.cli import serve
from service.errors import SettingsError
from service.settings import Settings, load_settings, settings_class
from tests.deploy.settings_page import PAGE, page

DEFAULTS: dict[str, Any] = {"grpc_port": None, "teach": None, "teach_thumbnails": False}

VALUES: list[tuple[str, str, Any]] = [
    ("grpc_port", "0", 0),
    ("teach", "/taught", "/taught"),
    ("teach_thumbnails", "true", True),
]


def parse(name: str, text: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return vars(parser.parse_args([f"--{name.replace('_', '-')}={text}"]))


def test_defaults_are_the_documented_ones() -> None:
    settings = load_settings()
    added = settings_class().model_fields.keys() - Settings.model_fields.keys()
    assert {name: getattr(settings, name) for name in added} == DEFAULTS


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_settings_come_from_the_environment(
    name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for written in (text, f'"{text}"'):
        monkeypatch.setenv(f"VIT_{name.upper()}", written)
        assert getattr(load_settings(), name) == value
    monkeypatch.setenv(f"VIT_{name.upper()}", "")
    assert getattr(load_settings(), name) == DEFAULTS[name]


@pytest.mark.parametrize(("name", "text", "value"), VALUES)
def test_setting_is_read_from_a_flag(name: str, text: str, value: Any) -> None:
    assert getattr(load_settings(parse(name, text)), name) == value


def test_wrong_port_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"^VIT_GRPC_PORT='65536': .*less than or equal to 65535.*$"
    with pytest.raises(SettingsError, match=message):
        load_settings(parse("grpc_port", "65536"))
    monkeypatch.setenv("VIT_GRPC_PORT", "65536")
    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_the_documented_table_is_current() -> None:
    assert PAGE.read_text() == page(), "python -m tests.deploy.settings_page"
