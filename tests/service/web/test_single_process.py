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
    log_address(load_settings({"host": "::"}), 9000, container_marks=())
    assert "curl -F file=@photo.jpg 'http://127.0.0.1:9000/classify'" in hint.text


def test_in_a_container_the_hint_names_no_address_as_none_is_known(
    hint: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    mark = tmp_path / ".dockerenv"
    mark.touch()
    log_address(load_settings({"host": "0.0.0.0"}), 8000, container_marks=[str(mark)])
    assert "ready: port 8000 of this container (API: /docs)" in hint.text
    assert "127.0.0.1" not in hint.text
    log_address(load_settings({"host": "10.0.0.7"}), 8000, container_marks=[str(mark)])
    assert "ready: http://10.0.0.7:8000" in hint.text
