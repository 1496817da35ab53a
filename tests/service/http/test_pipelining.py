"""Clients that pipeline many requests."""

from contextlib import AsyncExitStack

from tests.service.fakes import on_a_loop
from tests.service.http.listening import listening

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@on_a_loop
async def test_a_pipelining_flood_delays_nobody() -> None:
    async with listening() as server, AsyncExitStack() as stack:
        flood = [await stack.enter_async_context(server.connect()) for _ in range(50)]
        for connection in flood:
            await connection.send(GET * 100)
        for _ in range(5):
            assert (await server.ask(GET)).status == 200
        [family] = server.app.metrics.requests.collect()
        assert family.samples[0].value < 500  # of 5,000
        for connection in flood:
            for _ in range(100):
                assert (await connection.answer()).status == 200
