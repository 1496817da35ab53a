from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from model import extension
from model.config import ViTConfig
from model.errors import ExtensionError
from model.extension import GROUP, ExplanationMethod, Extension, extensions
from model.methods import is_class_specific, load_method, methods
from model.outputs import MapRequest
from model.parameters import methods_of

OCCLUSION = Extension(
    name="occlusion",
    methods=(
        ExplanationMethod(
            name="occlusion",
            summary="change of the score when a patch is covered",
            class_specific=True,
            function=f"{__name__}:occlusion",
        ),
    ),
)
SAME = Extension(name="same", methods=OCCLUSION.methods)


def occlusion() -> None: ...


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    def clear() -> None:
        extensions.cache_clear()
        methods.cache_clear()

    clear()
    yield
    clear()


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    entry_points = [EntryPoint(name.lower(), f"{__name__}:{name}", GROUP) for name in names]
    monkeypatch.setattr(extension, "entry_points", lambda *, group: entry_points)


def config(**fields: object) -> ViTConfig:
    sizes = {"image_size": (16, 16), "patch_size": 8, "width": 8, "depth": 1, "heads": 1}
    return ViTConfig.model_validate(sizes | {"mlp_width": 8, "num_classes": 3} | fields)


def test_core_offers_relevance_first(monkeypatch):
    install(monkeypatch)

    assert list(methods()) == ["relevance", "cls"]


def test_extension_adds_a_method(monkeypatch):
    install(monkeypatch, "OCCLUSION")

    assert list(methods()) == ["relevance", "cls", "occlusion"]
    assert load_method("occlusion")[1] is occlusion


def test_method_name_is_unique(monkeypatch):
    install(monkeypatch, "OCCLUSION", "SAME")

    with pytest.raises(ExtensionError, match="'same': the explanation method occlusion also"):
        methods()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("relevance", "cls", "occlusion")),
        ({"norm_order": "post"}, ("occlusion", "cls")),
        ({"num_classes": 0}, ("cls",)),
    ],
    ids=["pre-norm", "post-norm", "no classes"],
)
def test_methods_depend_on_the_network(monkeypatch, fields, expected):
    install(monkeypatch, "OCCLUSION")

    assert methods_of(config(**fields)) == expected


def test_unknown_methods_explain_no_class(monkeypatch):
    install(monkeypatch)

    assert not is_class_specific("occlusion")
    assert MapRequest("relevance").is_class_specific
