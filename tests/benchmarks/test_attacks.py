"""The parts of the attacks that could make their table wrong without a word."""

from __future__ import annotations

import io
import math
import socket
import threading

import numpy as np
import pytest
from PIL import Image

from benchmarks.reliability import attacks


def test_the_hostile_picture_is_a_whole_png_of_16_bits() -> None:
    data = attacks.paeth_png(30)
    assert (data[24], data[25]) == (16, 6)  # bits, RGBA
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (30, 30)
        assert not np.asarray(image).any()


def test_percentiles_are_told_even_when_nobody_is_answered() -> None:
    assert all(math.isnan(each) for each in attacks.milliseconds([0.5]))
    assert attacks.milliseconds([each / 1000 for each in range(101)]) == pytest.approx((50, 95, 99))


def test_who_is_not_answered_counts_as_asked_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "_RATE", 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    asked, answered = attacks.honest(port, b"picture", 0.05)
    assert asked > 0
    assert answered == []


def test_who_leaves_early_goes_on_when_it_is_cut_while_it_sends() -> None:
    stop, accepted = threading.Event(), 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        thread = threading.Thread(target=attacks.leave_early, args=(port, bytes(50_000_000), stop))
        thread.start()
        while accepted < 3:
            connection, _ = server.accept()
            connection.close()
            accepted += 1
        stop.set()
    thread.join(20)
    assert not thread.is_alive()
