"""The flags of subcommands that ask a server follow the environment that started it."""

from __future__ import annotations

import argparse

import pytest

from model.errors import InputError
from service.cli import bench, classify, evaluate, server_flags


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        ({}, None),
        ({"VIT_API_KEY": "mine"}, "mine"),
        ({"VIT_API_KEYS": "first,second"}, "first"),
        ({"VIT_API_KEYS": " , second "}, "second"),
        ({"VIT_API_KEY": "mine", "VIT_API_KEYS": "first"}, "mine"),
        ({"VIT_API_KEY": "", "VIT_API_KEYS": "first"}, "first"),
        ({"VIT_API_KEY": "", "VIT_API_KEYS": ""}, None),
    ],
)
@pytest.mark.parametrize("command", [bench, classify, evaluate])
def test_the_key_is_the_clients_or_else_on_this_machine_the_first_of_the_servers(
    environment: dict[str, str], key: str | None, command: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIT_API_KEY", "VIT_API_KEYS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    given = parser.get_default("api_key")
    assert server_flags.api_key_for("http://localhost:8000", given) == key
    assert server_flags.api_key_for("https://elsewhere.example", given) == (environment.get("VIT_API_KEY") or None)
    assert "first" not in parser.format_help().replace("first of VIT_API_KEYS", "")


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"VIT_PORT": "9123"}, "http://127.0.0.1:9123"),
        ({"VIT_PORT": ""}, "http://127.0.0.1:8000"),
    ],
)
def test_bench_loads_the_server_at_the_port_of_the_environment(
    environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VIT_PORT", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    assert parser.parse_args([]).url == url == server_flags.local_url()
    assert parser.parse_args(["--url", "http://there"]).url == "http://there"


def test_bench_refuses_a_port_that_is_none_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_PORT", "abc")
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    with pytest.raises(InputError, match=r"http://127\.0\.0\.1:abc: [^\n]+$"):
        bench.run(parser.parse_args([]))
