from __future__ import annotations

import logging
from pathlib import Path

import pytest

from service.settings import load_settings
from service.web.single_process import log_address


@pytest.fixture
def hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "vitserve")
    return caplog


def test_the_hint_names_the_example_where_there_is_one(hint: pytest.LogCaptureFixture) -> None:
    Path("examples").mkdir()
    Path("examples/dog.jpg").touch()
    log_address(load_settings(), 8000)
    assert "curl -F file=@examples/dog.jpg 'http://127.0.0.1:8000/classify'" in hint.text


def test_the_hint_names_the_callers_own_picture_where_no_examples_are(hint: pytest.LogCaptureFixture) -> None:
    log_address(load_settings({"host": "::"}), 9000)
    assert "curl -F file=@photo.jpg 'http://127.0.0.1:9000/classify'" in hint.text
