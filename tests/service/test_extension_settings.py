"""Settings and subcommands of faulty extensions are refused by name."""

import re
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from model.errors import ExtensionError
from service.cli.main import commands, main
from service.errors import SettingsError
from service.extension import Command, Extension
from service.settings import load_settings


class Port(BaseModel):
    port: int = 1


class Hosts(BaseModel):
    hosts: str = ""


class Color(BaseModel):
    color: str = ""


class Sizes(BaseModel):
    sizes: tuple[int, ...] = ()


class Required(BaseModel):
    shape: str


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)

    shape: str = ""


def fail(*_: Any) -> Any:
    raise KeyError("boom")


def setting(name: str, settings: str) -> Extension:
    return Extension(name=name, settings=f"{__name__}:{settings}")


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ([setting("a", "Port")], "'a': the setting VIT_PORT also belongs to vitserve"),
        ([setting("a", "Hosts")], "'a': the setting VIT_HOSTS also belongs to vitserve"),
        (
            [setting("a", "Color"), setting("b", "Color")],
            "'b': the setting VIT_COLOR also belongs to the extension 'a'",
        ),
        ([setting("a", "fail")], "'a': .*:fail is not a pydantic model"),
        ([setting("a", "Required")], "'a': the setting VIT_SHAPE has no default"),
        ([setting("a", "Strict")], "'a': 'strict' in the `model_config` of .*:Strict would apply"),
        (
            [Extension(name="a", notes={"prot": "x"})],
            "'a': `notes` names the unknown setting 'prot'",
        ),
    ],
    ids=[
        "a core setting",
        "a core property",
        "two extensions",
        "no model",
        "no default",
        "options of the core",
        "an unknown note",
    ],
)
def test_wrong_settings_are_refused(install, added, message):
    install(*added)

    with pytest.raises(ExtensionError, match=message):
        load_settings()


def test_unreadable_list_is_one_line(install, monkeypatch):
    install(setting("a", "Sizes"))
    monkeypatch.setenv("VIT_SIZES", "1,2")

    with pytest.raises(SettingsError, match=r"^VIT_SIZES='1,2': expected JSON$"):
        load_settings()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["serve"], "'a': the subcommand serve also belongs to vitserve"),
        (["x", "x"], "'b': the subcommand x also belongs to the extension 'a'"),
    ],
    ids=["a core subcommand", "two extensions"],
)
def test_taken_subcommand_is_refused(install, names, message):
    install(
        *(
            Extension(name=owner, commands={name: Command("m", "")})
            for owner, name in zip("ab", names, strict=False)
        )
    )

    with pytest.raises(ExtensionError, match=message):
        commands()


def add_arguments(parser: Any) -> None:
    parser.add_argument("--count", default=1)


def run(arguments: Any) -> int:
    return int(arguments.count) // 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("module", "TypeError: 'module' is not a `service.extension.Command`"),
        (Command("nowhere", "100%"), "ModuleNotFoundError: No module named 'nowhere'"),
        (Command("this", ""), "AttributeError: .* 'add_arguments'"),
        (Command(__name__, ""), "ZeroDivisionError"),
    ],
    ids=["wrong type", "no module", "no functions", "failing"],
)
def test_faulty_subcommand_is_named(install, capsys, command, message):
    install(Extension(name="a", commands={"x": command}))

    assert main(["x"]) == 1
    assert re.match(
        f"vitserve: the extension 'a': `commands` failed: {message}", capsys.readouterr().err
    )


def test_summary_of_a_subcommand_is_any_text(install, capsys):
    install(Extension(name="a", commands={"x": Command("nowhere", "100% of it")}))

    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "100% of it" in capsys.readouterr().out
