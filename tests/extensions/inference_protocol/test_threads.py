"""The threads on which the protocol reads and writes its documents."""

import pytest

from service.extensions.inference_protocol import inference, routes
from service.web import admit
from tests.extensions.inference_protocol.requests import encoded, infer
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App
from tests.service.web.thread_names import BIG, LOOP, ThreadNames


@on_a_loop
@pytest.mark.parametrize(("large", "thread"), [(1, BIG), (10_000, LOOP)])
async def test_large_json_spares_the_event_loop(
    large: int, thread: str, monkeypatch: pytest.MonkeyPatch, service: App
) -> None:
    monkeypatch.setattr(admit, "LARGE", large)
    monkeypatch.setattr(inference, "BYTES_A_VALUE", 100)
    watched = ThreadNames(monkeypatch)
    watched.watch(routes, "decode_request")
    watched.watch(routes, "encode_answer")
    watched.watch(inference, "make_outputs")
    answer = await infer(service, encoded(3))
    assert answer.json["outputs"][1]["data"][0] == 3
    assert watched.names == {thread}
