"""Shared memory for pictures: no buffer has two pictures, and killed processes mix none up."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from service.extensions.cluster.shared_pixels import PART_BYTES, SharedPixels, shared_memory
from tests.extensions.cluster.scripts import run

SHAPES = st.sampled_from([(8, 8, 3), (16, 8, 3), (5, 7, 1)])
BYTES = 2000


class Buffers(RuleBasedStateMachine):
    """Puts pictures into buffers and frees them; the bytes of all others stay."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = memoryview(bytearray(BYTES))
        self.shared = SharedPixels(self.memory, 0)
        self.pictures: dict[int, Any] = {}
        self.random = np.random.default_rng(0)

    @rule(shape=SHAPES, is_transposed=st.booleans())
    def put(self, shape: tuple[int, ...], is_transposed: bool) -> None:
        picture = self.random.integers(0, 256, shape, np.uint8)
        if is_transposed:
            picture = picture.transpose(1, 0, 2)
        buffer = self.shared.put(picture)
        if isinstance(buffer, int):
            assert buffer not in self.pictures
            self.pictures[buffer] = picture
        else:
            assert buffer.tobytes() == picture.tobytes()

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.pictures:
            buffer = data.draw(st.sampled_from(sorted(self.pictures)))
            del self.pictures[buffer]
            self.shared.free(buffer)

    @rule()
    def clear(self) -> None:
        self.pictures.clear()
        self.shared.clear()

    @invariant()
    def keeps_the_bytes(self) -> None:
        for buffer, picture in self.pictures.items():
            assert self.memory[buffer : buffer + picture.nbytes].tobytes() == picture.tobytes()


Buffers.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBuffers = Buffers.TestCase


def test_each_worker_has_a_part_of_its_own() -> None:
    memory = shared_memory(2)
    parts = [SharedPixels(memory, index) for index in range(2)]
    picture = np.full((PART_BYTES // 4, 1, 2), 7, np.uint8)
    buffers = [part.put(picture) for part in parts for _ in range(3)]
    assert [buffer for buffer in buffers if isinstance(buffer, int)] == [
        0,
        PART_BYTES // 2,
        PART_BYTES,
        PART_BYTES // 2 * 3,
    ]
    assert [isinstance(buffer, memoryview) for buffer in buffers] == [False, False, True] * 2


@pytest.mark.timeout(120)
def test_killed_processes_mix_up_no_answers() -> None:
    script = "from tests.extensions.cluster.killed import wrong_answers; print(wrong_answers())"
    assert run(script) == "0"
