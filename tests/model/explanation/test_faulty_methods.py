"""A faulty method of an extension fails its images, and names the extension."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest
import torch

from model import extension
from model.explanation.explain import explain
from model.extension import GROUP, ExplanationMethod, Extension, extensions
from model.methods import methods
from model.outputs import MapRequest
from tests.model.explanation.random_models import model_of, pictures

NAMES = ("fail", "answer_nothing", "answer_one", "missing")
FAULTY = Extension(
    name="faulty",
    methods=tuple(
        ExplanationMethod(name=name, summary="", function=f"{__name__}:{name}") for name in NAMES
    ),
)


def fail(*_: object) -> None:
    raise KeyError("boom")


def answer_nothing(*_: object) -> None: ...


def answer_one(*_: object) -> torch.Tensor:
    return torch.ones(1)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry_point = EntryPoint("faulty", f"{__name__}:FAULTY", GROUP)
    monkeypatch.setattr(extension, "entry_points", lambda *, group: [entry_point])
    extensions.cache_clear()
    methods.cache_clear()
    yield
    extensions.cache_clear()
    methods.cache_clear()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fail", "`methods, fail` failed: KeyError: 'boom'"),
        ("answer_nothing", "`methods, answer_nothing` failed: AttributeError"),
        ("answer_one", r"`methods, answer_one` failed: ValueError: shape \(1,\): expected \(2, "),
        ("missing", "missing cannot be loaded"),
    ],
)
def test_faulty_method_fails_its_images(method: str, message: str) -> None:
    model = model_of("plain")
    pixels = pictures(model)[:2]

    with pytest.raises(RuntimeError, match=f"the extension 'faulty': .*{message}"):
        explain(model, pixels, torch.zeros(2, dtype=torch.int64), MapRequest(method))
