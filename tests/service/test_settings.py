"""Every setting from the environment and from a flag; every wrong value is one line."""

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from service.cli import serve
from service.cli.setting_flags import settings_from
from service.errors import SettingsError
from service.model_settings import ModelSettings
from service.setting_values import ApiKey
from service.setting_warnings import (
    check_variables,
    proxy_warnings,
    take_platform_port,
    unused_warnings,
)
from service.settings import Settings, load_settings

DEFAULTS: dict[str, Any] = {
    "checkpoint": "bundled",
    "image_size": None,
    "models": None,
    "models_bytes": None,
    "strict": False,
    "model_name": None,
    "coverage": None,
    "thresholds": None,
    "device": "auto",
    "preprocess": None,
    "labels": None,
    "activation": None,
    "architecture": None,
    "base": None,
    "keys": None,
    "dtype": "auto",
    "cache_dir": None,
    "compile": "auto",
    "host": "127.0.0.1",
    "port": 8000,
    "keep_alive": 75,
    "root_path": "",
    "workers": 1,
    "max_batch": None,
    "max_delay_ms": 0,
    "queue_size": 256,
    "request_timeout": 10,
    "max_upload_bytes": 20 * 1024**2,
    "max_request_bytes": 128 * 1024**2,
    "max_image_pixels": 64_000_000,
    "max_images_per_request": 64,
    "scaled_decode": True,
    "api_keys": (),
    "key_max_requests": 0,
    "admin_key": None,
    "checkpoint_folder": None,
    "metrics_public": True,
    "allowed_hosts": (),
    "recent_ttl": 600,
    "recent_bytes": 256 * 1024**2,
    "recent_url": "memory://",
    "drain_delay": 2,
    "drain_timeout": 30,
    "cors_origins": (),
    "log_format": "text",
    "log_level": "info",
}

GIVEN: list[tuple[str, str, Any]] = [
    ("checkpoint", "/models/cats", "/models/cats"),
    ("preprocess", "google-224", "google-224"),
    ("labels", "labels.txt", "labels.txt"),
    ("activation", "sigmoid", "sigmoid"),
    ("architecture", "vit_base_patch16_224", "vit_base_patch16_224"),
    ("base", "owner/name", "owner/name"),
    ("keys", "map.toml", "map.toml"),
    ("image_size", "384", (384, 384)),
    ("image_size", "384x256", (384, 256)),
    ("coverage", "0.95", 0.95),
    ("thresholds", '{"cat": 0.4}', {"cat": 0.4}),
    ("models", "/models", "/models"),
    ("models_bytes", "2GiB", 2 << 30),
    ("strict", "true", True),
    ("model_name", "cats v2", "cats v2"),
    ("device", "cuda:1", "cuda:1"),
    ("device", "cpu", "cpu"),
    ("device", "cuda:0,cuda:1", "cuda:0,cuda:1"),
    ("device", "all", "all"),
    ("device", "cuda:0, cuda:1", "cuda:0,cuda:1"),
    ("device", "cuda:MIG-c7384736-a75d", "cuda:MIG-c7384736-a75d"),
    (
        "device",
        "cuda:GPU-5d5ba0d6,cuda:MIG-GPU-8932/1/0",
        "cuda:GPU-5d5ba0d6,cuda:MIG-GPU-8932/1/0",
    ),
    ("dtype", "bfloat16", "bfloat16"),
    ("compile", "off", "off"),
    ("cache_dir", "/var/cache/vitserve", "/var/cache/vitserve"),
    ("cache_dir", "OFF", "off"),
    ("host", "0.0.0.0", "0.0.0.0"),
    ("port", "9000", 9000),
    ("keep_alive", "620", 620),
    ("root_path", "vit/a/", "/vit/a"),
    ("workers", "1", 1),
    ("workers", "4", 4),
    ("max_batch", "48", 48),
    ("max_delay_ms", "2.5", 2.5),
    ("queue_size", "16", 16),
    ("request_timeout", "0.5", 0.5),
    ("max_upload_bytes", "1000", 1000),
    ("max_upload_bytes", "5MiB", 5 * 1024**2),
    ("max_upload_bytes", "5Mi", 5 * 1024**2),
    ("max_upload_bytes", "5 m", 5_000_000),
    ("max_request_bytes", "5MB", 5_000_000),
    ("max_image_pixels", "1000000", 1_000_000),
    ("max_images_per_request", "3", 3),
    ("scaled_decode", "false", False),
    ("api_keys", "one, two,", (ApiKey("key1", b"one"), ApiKey("key2", b"two"))),
    ("key_max_requests", "7", 7),
    ("admin_key", " admin\n", "admin"),
    ("checkpoint_folder", "/usr", "/usr"),
    ("checkpoint_folder", ".", str(Path().absolute())),
    ("checkpoint_folder", "~/", str(Path("~/").expanduser())),
    ("metrics_public", "false", False),
    ("allowed_hosts", "Vit.example.org, *.b.example", ("vit.example.org", "*.b.example")),
    ("allowed_hosts", "münchen.example", ("xn--mnchen-3ya.example",)),
    ("recent_ttl", "0", 0),
    ("recent_bytes", "0", 0),
    ("recent_url", "memory://", "memory://"),
    ("drain_delay", "0", 0),
    ("drain_timeout", "7.5", 7.5),
    (
        "cors_origins",
        "https://a.example,https://b.example",
        ("https://a.example", "https://b.example"),
    ),
    ("log_format", "json", "json"),
    ("log_level", "debug", "debug"),
]

WRONG: list[tuple[str, str, str]] = [
    ("image_size", "big", "384x256"),
    ("image_size", "0x16", "greater than or equal to 1"),
    ("image_size", "384x", "384x256"),
    ("device", "gpu", "cuda:0"),
    ("device", "cuda:1,cuda:1", "once"),
    ("device", "cuda,cuda:0", "once"),
    ("device", "cuda:0,cuda:00", "cuda:0,cuda:1"),
    ("device", "cuda:\uff11", "cuda:0,cuda:1"),
    ("device", "cpu,cuda:0", "cuda:0,cuda:1"),
    ("dtype", "int4", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ("coverage", "95", "less than 1"),
    ("thresholds", "cat", 'expected JSON like {"cat": 0.4}'),
    ("thresholds", "0.4", 'expected JSON like {"cat": 0.4}'),
    ("thresholds", '["cat"]', 'expected JSON like {"cat": 0.4}'),
    ("thresholds", '{"cat": true}', "a valid number"),
    ("cache_dir", "s3://bucket/graphs", "not a URL"),
    ("checkpoint_folder", "file:///checkpoints", "not a URL"),
    (
        "checkpoint_folder",
        "/no/such",
        "there is no folder /no/such: correct the path, or create it",
    ),
    ("checkpoint_folder", __file__, "expected the path of a folder; this is a file"),
    ("cache_dir", __file__, "expected the path of a folder; this is a file"),
    ("allowed_hosts", "none", "not a host's name"),
    ("allowed_hosts", "a.example,,b.example", "one is empty: is a variable unset?"),
    ("cors_origins", ",https://a.example", "expected origins between commas; one is empty"),
    ("allowed_hosts", ".example.org", "*.example.org"),
    ("thresholds", '{"cat": 0.4, "cat": 0.5}', "'cat' is given twice"),
    ("model_name", "cat,dog", "without commas"),
    ("device", "cuda:MIG-", "cuda:MIG-..."),
    ("compile", "maybe", "'auto', 'on' or 'off'"),
    ("cache_dir", "~nobody-of-this-name/graphs", "home folder"),
    ("cache_dir", "false", "write ./false for a folder of this name"),
    ("cache_dir", "$HOME/graphs", "a variable after $ is not expanded"),
    ("image_size", "\uff12\uff12\uff14", "384x256"),
    ("workers", "8 # cores", "remove the comment"),
    ("port", "tcp://10.0.0.1:8000", "enableServiceLinks"),
    ("request_timeout", "30s", "valid number, without a unit"),
    ("max_upload_bytes", "50%", "20MiB"),
    ("max_upload_bytes", "1e6", "20MiB"),
    ("recent_bytes", "10 bytes", "20MiB"),
    ("allowed_hosts", "*.", "not a host's name"),
    ("port", "65536", "less than or equal to 65535"),
    ("port", "http", "valid integer"),
    ("keep_alive", "0", "greater than or equal to 1"),
    ("workers", "0", "greater than or equal to 1"),
    ("max_batch", "0", "greater than or equal to 1"),
    ("max_delay_ms", "-1", "greater than or equal to 0"),
    ("max_delay_ms", "nan", "finite"),
    ("queue_size", "0", "greater than or equal to 1"),
    ("request_timeout", "0", "greater than 0"),
    ("request_timeout", "inf", "finite"),
    ("max_upload_bytes", "0", "greater than 0"),
    ("max_upload_bytes", "many", "byte"),
    ("max_request_bytes", "-5", "byte"),
    ("max_image_pixels", "0", "greater than or equal to 1"),
    ("max_images_per_request", "0", "greater than or equal to 1"),
    ("scaled_decode", "perhaps", "valid boolean: true or false"),
    ("metrics_public", "2", "valid boolean"),
    ("allowed_hosts", "https://vit.example.org", "without scheme"),
    ("allowed_hosts", "vit.example.org:8000", "without scheme, port"),
    ("recent_ttl", "-1", "greater than or equal to 0"),
    ("recent_bytes", "lots", "byte"),
    ("drain_delay", "-0.1", "greater than or equal to 0"),
    ("drain_timeout", "soon", "valid number"),
    ("log_format", "xml", "'text' or 'json'"),
    ("log_level", "loud", "'debug', 'info', 'warning' or 'error'"),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("VIT_"):
            monkeypatch.delenv(name)


def plain(value: Any) -> Any:
    """Return the texts of secrets."""
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def parse(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return vars(parser.parse_args(arguments))


@pytest.mark.parametrize("key", ["two", "two\n", "", " "])
def test_the_admin_key_must_be_unique(key: str) -> None:
    with pytest.raises(SettingsError, match=r"^VIT_ADMIN_KEY=\*\*\*: expected a (key|value)"):
        load_settings({"api_keys": "one,name:two", "admin_key": key})


def test_defaults_are_the_documented_ones() -> None:
    settings = load_settings()
    assert {name: plain(getattr(settings, name)) for name in Settings.model_fields} == DEFAULTS


def test_every_setting_is_tried_below() -> None:
    assert {name for name, _, _ in GIVEN} == set(Settings.model_fields)


@pytest.mark.parametrize(("name", "text", "value"), GIVEN)
def test_the_environment_gives_a_setting(
    name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"VIT_{name.upper()}", text)
    assert plain(getattr(load_settings(), name)) == value


@pytest.mark.parametrize(("name", "text", "value"), GIVEN)
def test_a_setting_is_read_from_a_flag(name: str, text: str, value: Any) -> None:
    assert (
        plain(getattr(load_settings(parse([f"--{name.replace('_', '-')}", text])), name)) == value
    )


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_PORT", "9000")
    monkeypatch.setenv("VIT_HOST", "0.0.0.0")
    settings = load_settings(parse(["--port", "9001"]))
    assert (settings.host, settings.port) == ("0.0.0.0", 9001)


def test_a_dotenv_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("VIT_PORT=9000\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings().port == 8000


def test_an_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.setenv(f"VIT_{name.upper()}", "")
    settings = load_settings()
    assert {name: plain(getattr(settings, name)) for name in Settings.model_fields} == DEFAULTS


@pytest.mark.parametrize(("name", "text", "allowed"), WRONG)
@pytest.mark.parametrize("source", ["environment", "flag"])
def test_a_wrong_value_is_told_in_one_line(
    name: str, text: str, allowed: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {}
    if source == "environment":
        monkeypatch.setenv(f"VIT_{name.upper()}", text)
    else:
        flags = parse([f"--{name.replace('_', '-')}={text}"])
    with pytest.raises(SettingsError) as raised:
        load_settings(flags)
    line = str(raised.value)
    assert line.startswith(f"VIT_{name.upper()}='{text}': ")
    assert allowed in line
    assert "\n" not in line


@pytest.mark.parametrize("name", sorted({"root_path"} ^ set(Settings.model_fields)))
def test_an_empty_flag_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="expected a value; remove the setting to use its"):
        load_settings({name: ""})


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("none", "remove the setting to serve without"),
        ("False", "remove the setting to serve without"),
        ("web=KEY1", "NAME:KEY"),
        ("my.app:KEY1", "NAME:KEY"),
        (":KEY1", "NAME:KEY"),
        (f"web:{__file__}", "not the path of a file"),
        (f"@{__file__}", "not the path of a file"),
    ],
)
def test_key_in_another_form_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(SettingsError, match=remedy):
        load_settings({"api_keys": f"one,{text}"})


@pytest.mark.parametrize("text", ["none", "admin:KEY1", __file__])
def test_admin_key_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="expected a key"):
        load_settings({"admin_key": text})


def test_table_of_toml_is_preprocessing() -> None:
    settings = ModelSettings.model_validate({"preprocess": {"size": [32, 32]}})
    assert settings.preprocess == '{"size": [32, 32]}'


def test_threshold_of_toml_names_the_form() -> None:
    with pytest.raises(ValueError, match="expected JSON like"):
        ModelSettings.model_validate({"thresholds": 0.4})


def test_message_about_a_flag_names_the_flag() -> None:
    with pytest.raises(SettingsError, match=r"^--max-batch='0': expected greater"):
        settings_from(argparse.Namespace(max_batch="0"))


def test_keys_are_never_shown() -> None:
    settings = load_settings({"recent_url": "memory://", "api_keys": "topsecret"})
    assert "topsecret" not in repr(settings)
    with pytest.raises(SettingsError) as raised:
        load_settings({"recent_url": "http://:topsecret@cache"})
    assert str(raised.value).startswith("VIT_RECENT_URL=***: expected memory://")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("VIT_APIKEYS", "VIT_API_KEYS"),
        ("VIT_API_KEY", "VIT_API_KEYS"),
        ("VIT_API_KEYS_FILE", "VIT_API_KEYS"),
        ("VIT-API-KEYS", "VIT_API_KEYS"),
        ("VITSERVE_API_KEYS", "VIT_API_KEYS"),
        ("VIT_ADMIN_KEY_FILE", "VIT_ADMIN_KEY"),
        ("VIT_PROT", "VIT_PORT"),
        ("vit_models_byte", "VIT_MODELS_BYTES"),
        ("VITSERVE_PORT", "VIT_PORT"),
    ],
)
def test_misspelt_setting_ends_the_start(variable: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"^{variable} is not a setting: .* {meant}?"):
        check_variables(load_settings(), {variable: "K1", "VIT_PORT": "1"})


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("VIT_BATCH_SIZE", "; did you mean VIT_MAX_BATCH?"),
        ("VIT_TIMEOUT", "; did you mean VIT_REQUEST_TIMEOUT or VIT_DRAIN_TIMEOUT?"),
        ("VIT_KEY_FILE", "; did you mean VIT_KEY_MAX_REQUESTS or VIT_ADMIN_KEY?"),
        ("VIT_TRIM_SECONDS", ""),
    ],
)
def test_unlike_variable_names_likely_ones(variable: str, hint: str) -> None:
    told = f"{variable} is not a setting and is ignored{hint}"
    assert check_variables(load_settings(), {variable: "1"}) == [told]


def test_key_of_clients_may_be_beside_keys() -> None:
    with_keys = load_settings({"api_keys": "K2"})
    assert check_variables(with_keys, {"VIT_API_KEY": "K1"}) == [
        "VIT_API_KEY is not a setting and is ignored"
    ]


def test_untrusted_item_of_proxies_is_named() -> None:
    proxies = {"FORWARDED_ALLOW_IPS": "10.0.0.0/8, ::1,unix:,*,nginx,10.0.0.0/33"}
    assert [line.split(" is not ")[0] for line in proxy_warnings(proxies)] == [
        "FORWARDED_ALLOW_IPS: 'nginx'",
        "FORWARDED_ALLOW_IPS: '10.0.0.0/33'",
    ]


@pytest.mark.parametrize(
    ("environment", "flags", "port", "told"),
    [
        ({"PORT": "8080"}, [], "8080", "listening on PORT=8080"),
        ({"PORT": "8080", "VIT_PORT": ""}, [], "8080", "listening on PORT=8080"),
        ({"PORT": "8080", "VIT_PORT": "9000"}, [], "9000", "PORT=8080 is ignored"),
        ({"PORT": "tcp://10.0.0.1"}, [], None, "is not a port"),
        ({"PORT": "8080"}, ["port"], None, None),
        ({"VIT_PORT": "9000"}, [], "9000", None),
    ],
)
def test_port_of_a_platform_is_taken(
    environment: dict[str, str], flags: list[str], port: str | None, told: str | None
) -> None:
    warnings = take_platform_port(flags, environment)
    assert environment.get("VIT_PORT") == port
    assert len(warnings) == (told is not None)
    assert all(str(told) in line for line in warnings)


def test_line_break_in_a_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="without line breaks"):
        load_settings({"model_name": "cat\ndog"})


def test_unknown_variables_are_named() -> None:
    link = "tcp://10.0.0.1:8000"  # of Kubernetes
    environment = {"VIT_TRIM_SECONDS": "1", "HOME": "/", "VITSERVE_PORT": link, "VITSERVE_TAG": "1"}
    told = "VIT_TRIM_SECONDS is not a setting and is ignored"
    assert check_variables(load_settings(), environment) == [told]


@pytest.mark.parametrize(("name", "text", "value"), GIVEN)
def test_quotes_of_env_files_change_no_value(
    name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form in ('"{}"', "'{}'", " {} ", "{}\r", "'{}'\r", '" {} "'):
        monkeypatch.setenv(f"VIT_{name.upper()}", form.format(text))
        assert plain(getattr(load_settings(), name)) == value


def test_kept_quotes_cause_a_warning() -> None:
    told = "VIT_MODELS: the quotes around its value are ignored; remove them from the env file"
    environment = {"VIT_MODELS": '"models"', "VIT_LABELS": '"a red car","cat"'}
    assert check_variables(load_settings(), environment) == [told]


@pytest.mark.parametrize(
    "text", ['["web:K1","K2"]', '"web:K1","K2"', '"web:K1,K2"', "web:'K1',K2", " web:K1 , K2\r"]
)
def test_keys_of_every_list_are_the_same(text: str) -> None:
    web = ApiKey("web", b"K1", is_named=True)
    assert load_settings({"api_keys": text}).api_keys == (web, ApiKey("key2", b"K2"))


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://a.example/", "https://a.example"),
        ("HTTPS://A.Example", "https://a.example"),
        ("https://a.example:443", "https://a.example"),
        ("http://a.example:080/", "http://a.example"),
        ("https://a.example:8443", "https://a.example:8443"),
        (" 'https://a.example' ,", "https://a.example"),
        ('["https://a.example/"]', "https://a.example"),
        ("https://münchen.example", "https://xn--mnchen-3ya.example"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("https://*.Example.org/", "https://*.example.org"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("null", "null"),
        ("*", "*"),
    ],
)
def test_an_origin_is_as_browsers_write_it(text: str, origin: str) -> None:
    assert load_settings({"cors_origins": text}).cors_origins == (origin,)


WRONG_ORIGINS = (
    "a.example localhost:3000 https:// https://a.example/page https://a.example:99999 "
    "https://*example.org https://a.*.org https://* https://u@a.example //a.example "
    "https://a.example;https://b.example"
)


@pytest.mark.parametrize("text", [*WRONG_ORIGINS.split(), "https://a.example https://b.example"])
def test_an_impossible_origin_is_refused(text: str) -> None:
    with pytest.raises(
        SettingsError, match=r"^VIT_CORS_ORIGINS=.* is not an origin; write SCHEME://HOST"
    ):
        load_settings({"cors_origins": text})


@pytest.mark.parametrize("name", ["api_keys", "admin_key"])
@pytest.mark.parametrize(
    "text",
    [
        "K1;K2",
        "K1 K2",
        "K1\nK2",
        "K\x001",
        '"K1',
        "“K1”",
        "schlüssel",
        "['K1','K2']",
        '""',
        '{"a": 1}',
        "${KEY}",
        "$KEY",
    ],
)
def test_an_unsendable_key_is_refused(name: str, text: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"^VIT_{name.upper()}=\*\*\*: (a key contains|expected)"
    ) as raised:
        load_settings({name: text})
    assert "K1" not in str(raised.value) or "[" in str(raised.value)  # the example of a list


@pytest.mark.parametrize(
    ("flags", "warning"),
    [
        ({"key_max_requests": 3}, "VIT_KEY_MAX_REQUESTS has no effect without VIT_API_KEYS"),
        ({"strict": True}, "VIT_STRICT has no effect without VIT_MODELS"),
        (
            {"checkpoint_folder": "/usr"},
            "VIT_CHECKPOINT_FOLDER has no effect without VIT_ADMIN_KEY or VIT_MODELS",
        ),
        ({"metrics_public": False, "api_keys": "secret"}, None),
        (
            {"drain_delay": 40},
            "VIT_DRAIN_TIMEOUT=30 ends the process before VIT_DRAIN_DELAY=40 has passed: "
            "requests are cut off",
        ),
        (
            {"max_upload_bytes": "200MB", "max_request_bytes": "100MB"},
            "VIT_MAX_UPLOAD_BYTES=200000000 has no effect above VIT_MAX_REQUEST_BYTES=100000000",
        ),
    ],
)
def test_setting_without_effect_is_named(flags: dict[str, Any], warning: str | None) -> None:
    assert unused_warnings(load_settings(flags)) == ([] if warning is None else [warning])


@pytest.mark.parametrize("name", ["model_name", "labels", "cache_dir", "recent_url"])
@pytest.mark.parametrize("value", ["value # a comment", "# a comment", '"value" # a comment'])
def test_comment_of_env_file_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(f"VIT_{name.upper()}", value)

    with pytest.raises(SettingsError, match=f"VIT_{name.upper()}=.*remove the comment"):
        load_settings()


def test_hash_without_spaces_stays_in_a_value(monkeypatch):
    monkeypatch.setenv("VIT_LABELS", "player #1,c#")

    assert load_settings().labels == "player #1,c#"
