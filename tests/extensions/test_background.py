"""Background tasks and threads of extensions are supervised, or their errors appear somewhere."""

from tests.service.beginnings import beginnings_below

# Tasks and threads that `service.background` does not start, and where their errors appear.
ALLOWED = {
    "service/extensions/tracing/spans.py:Tracing.close": "the log has the error",
    "service/extensions/cluster/engine_server.py:_Worker.handle": "the error is its answer",
    "service/extensions/cluster/engine_server.py:_Swap.__init__": "`load` and `decide` await it",
    "service/extensions/cluster/engine_server.py:_Swap.load": "it waits for an event",
    "service/extensions/cluster/remote_model.py:RemoteModels.load": "its request awaits it",
    "service/extensions/inference_protocol/grpc/call.py:Call.message": "its request awaits it",
}


def test_every_background_task_is_supervised() -> None:
    assert beginnings_below("service/extensions") == ALLOWED.keys()
