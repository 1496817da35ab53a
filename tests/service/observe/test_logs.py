"""What is logged, and what is not."""

from __future__ import annotations

import pytest
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from service.observe import logs


@pytest.fixture
def configured(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")


def test_a_broken_form_writes_no_line_of_the_parsers_own(configured: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FormParserError):
        MultipartParser(b"boundary", {}).write(b"--bogus\r\n")
    assert capsys.readouterr().err == ""
