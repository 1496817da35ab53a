import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from model import extension
from model.errors import ExtensionError
from model.extension import GROUP, Extension, extensions, resolve

SECOND = Extension(name="second")
FIRST = Extension(name="first", readers=("tests.model.test_extension:SECOND",))
SAME = Extension(name="second")
OTHER = "not an extension"
SPACED = Extension(name="my extension")
TEXT = Extension(name="text", readers="module:reader")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    extensions.cache_clear()
    yield
    extensions.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    found = [EntryPoint(name.lower(), f"{__name__}:{name}", GROUP) for name in names]
    monkeypatch.setattr(extension, "entry_points", lambda *, group: found)


def test_extensions_are_sorted_by_name(monkeypatch):
    install(monkeypatch, "SECOND", "FIRST")

    assert extensions() == (FIRST, SECOND)


def test_no_package_adds_an_extension(monkeypatch):
    install(monkeypatch)

    assert extensions() == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["MISSING"], "the extension 'missing' of .*:MISSING cannot be loaded: .*MISSING"),
        (["OTHER"], "the extension 'other' of .*:OTHER is not an Extension"),
        (["SECOND", "SAME"], "the extension 'same' of .* has the name 'second'"),
        (["SPACED"], "the extension 'spaced' of .*: its name is 'my extension': use letters"),
        (["TEXT"], r"the extension 'text' of .*: `readers` is a text: write a tuple, \('module"),
    ],
    ids=["missing", "another object", "same name", "a name with a space", "no tuple"],
)
def test_unusable_entry_point_is_refused(monkeypatch, names, message):
    install(monkeypatch, *names)

    with pytest.raises(ExtensionError, match=message):
        extensions()


def test_dotted_name_is_resolved(monkeypatch):
    install(monkeypatch, "SECOND")

    assert resolve(f"{__name__}:SECOND", FIRST) is SECOND


def test_missing_module_names_the_extension():
    with pytest.raises(ExtensionError, match="the extension 'first': no_such_module:x cannot"):
        resolve("no_such_module:x", FIRST)


def test_installed_extensions_need_no_torch():
    script = "import sys; from model.extension import extensions; extensions(); print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()

    assert "torch" not in modules
