"""`make fuzz` finds what it looks for, and its cases come again with their seed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fuzz import pictures, streams
from tests.fuzz.caller import Caller, Lost
from tests.fuzz.mutation import case, damaged
from tests.fuzz.tally import Tally, table
from tests.model.images.test_hostile_images import valid_files
from tests.service.fakes import on_a_loop
from tests.service.http.listening import listening
from tests.service.http.raw_forms import GET

FAILED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/problem+json\r\nContent-Length: 2\r\n\r\n{}"
ODD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[int]:
    """A server that says the same to whatever comes first, and closes; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@on_a_loop
async def test_the_service_answers_a_few_cases_of_each_kind(tmp_path) -> None:
    async with listening() as server:
        sent = await pictures.send(server.port, valid_files(), 1, tmp_path, cases=60)
        parser, sockets = await streams.send(server.port, 1, tmp_path, cases=60)
    assert [tally.faults for tally in (sent, parser, sockets)] == [[], [], []]
    assert [tally.sent for tally in (sent, parser, sockets)] == [60, 60, 60]
    assert sum(sent.statuses.values()) == 60
    assert {200, 422} <= sent.statuses.keys()
    assert {200, 400} <= sockets.statuses.keys()
    assert not list(tmp_path.iterdir())


@on_a_loop
@pytest.mark.parametrize(
    ("answer", "fault", "lost"),
    [
        (b"", "closed without an answer", 2),
        (FAILED[:20], "half a head", 2),
        (FAILED[:-1], "half a body", 2),
        (b"hello\r\n\r\n", "not an answer", 2),
        (FAILED, "0: 500", 0),
        (ODD, "as 'text/html'", 0),
    ],
    ids=["nothing", "half a head", "half a body", "no HTTP", "500", "another media type"],
)
async def test_a_request_without_its_answer_is_a_fault_and_kept(tmp_path, answer, fault, lost) -> None:
    async with answering(answer) as port:
        tally = await pictures.send(port, valid_files(), 1, tmp_path, cases=2)
    assert tally.lost == lost
    assert sum(fault in line for line in tally.faults) >= 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pictures-1-0.http", "pictures-1-1.http"]


@on_a_loop
async def test_nothing_more_is_sent_to_a_server_that_is_gone(tmp_path) -> None:
    async with answering(b"") as port:
        pass
    sent = await pictures.send(port, valid_files(), 1, tmp_path, cases=1000)
    _, sockets = await streams.send(port, 1, tmp_path, cases=1000)
    assert 1 <= sent.lost < 10
    assert 1 <= sockets.lost < 100


@on_a_loop
async def test_a_stream_wants_as_many_answers_as_it_has_requests() -> None:
    tally = Tally("parser")
    assert await streams.parse([GET, GET[:9]], tally, 0) == (["GET"], False)
    async with answering(ODD) as port:
        assert await streams.converse(port, [GET], ["GET"], closes=True) == [200]
        with pytest.raises(Lost, match="1 answers to 2 requests"):
            await streams.converse(port, [GET + GET], ["GET", "GET"], closes=False)


@on_a_loop
async def test_an_answer_to_head_has_no_body() -> None:
    async with listening() as server:
        caller = await Caller.connect(server.port)
        await caller.send(GET.replace(b"GET", b"HEAD") + GET)
        first, second = await caller.answer(to_head=True), await caller.answer()
        caller.close()
    assert first and second
    assert (first.status, first.body, second.status) == (200, b"", 200)


def test_a_case_comes_again_with_its_seed_and_number() -> None:
    files = valid_files()
    found = [[pictures.request(files, case(seed, "pictures", number)) for number in range(20)] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == 20
    pieces = [[streams.stream(case(seed, "streams", number)) for number in range(20)] for seed in (1, 1, 2)]
    assert pieces[0] == pieces[1] != pieces[2]


def test_damage_changes_a_file() -> None:
    start = valid_files()[4]
    changed = [damaged(start, [start], case(0, "x", number)) != start for number in range(50)]
    assert sum(changed) > 40


def test_the_table_tells_refusals_from_failures() -> None:
    tally = Tally("pictures", sent=6, growth=3 << 20)
    assert [tally.answered(status, 0) for status in (200, 422, 501, 503, 505, 500)] == [True] * 5 + [False]
    tally.lose(7, "gone")
    text = table([tally])
    assert text.splitlines()[1].split() == ["pictures", "6", "1", "0", "1", "3", "1", "1", "+3.0"]
    assert text.splitlines()[2:] == ["pictures 0: 500", "pictures 7: lost: gone"]
