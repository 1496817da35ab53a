"""What is logged, and what is not."""

from __future__ import annotations

import subprocess
import sys

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


TIFF = """
import io
from PIL import Image
from service.observe import logs

encoded = io.BytesIO()
Image.effect_noise((64, 64), 50).save(encoded, "TIFF", compression="tiff_lzw")
damaged = encoded.getvalue()[:200] + bytes([255]) * 200 + encoded.getvalue()[400:]
for configure in (lambda: None, lambda: logs.configure("json", "info")):
    configure()
    try:
        Image.open(io.BytesIO(damaged)).load()
    except OSError:
        print("damaged")
"""


def test_libtiff_prints_nothing_between_our_lines() -> None:
    done = subprocess.run([sys.executable, "-c", TIFF], capture_output=True, text=True, check=True)
    assert done.stdout == "damaged\n" * 2
    assert len(done.stderr.splitlines()) == 1, "once before it was told to be silent"
