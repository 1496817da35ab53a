"""The standard services of gRPC: health and reflection."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from service.extensions.inference_protocol import GRPC_SERVICE
from service.extensions.inference_protocol.grpc import health, reflection
from service.extensions.inference_protocol.grpc.descriptors import message_class
from tests.extensions.inference_protocol.grpc.caller import Caller, calling
from tests.service.fakes import on_a_loop, until
from tests.service.web.apps import service_in

Code = grpc.StatusCode


def question(name: str) -> bytes:
    return bytes(
        json_format.ParseDict(
            {"service": name}, message_class(health.REQUEST)()
        ).SerializeToString()
    )


def status(content: bytes) -> str:
    message: Any = message_class(health.RESPONSE).FromString(content)
    return str(json_format.MessageToDict(message)["status"])


async def check(caller: Caller, name: str = "") -> str:
    return status(await caller.channel.unary_unary("/grpc.health.v1.Health/Check")(question(name)))


@on_a_loop
async def test_health_is_the_readiness_of_a_model() -> None:
    async with calling(api_keys="one") as caller:
        assert question("") == b"", "what kubelet sends"
        for name in ("", GRPC_SERVICE, "fake"):
            assert await check(caller, name) == "SERVING"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await check(caller, "nobody")
        assert refused.value.code() == Code.NOT_FOUND
        caller.service.engine.state = "loading"
        for name in ("", GRPC_SERVICE, "fake"):
            assert await check(caller, name) == "NOT_SERVING"
        assert (
            caller.service.metric(
                "vit_requests_total", endpoint="/grpc.health.v1.Health/Check", code="200"
            )
            == 6
        )


@on_a_loop
async def test_a_watcher_is_told_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCH_SECONDS", 0.01)
    async with calling() as caller:
        watching = caller.channel.unary_stream("/grpc.health.v1.Health/Watch")(question("fake"))
        unknown = caller.channel.unary_stream("/grpc.health.v1.Health/Watch")(question("nobody"))
        assert [status(await each.read()) for each in (watching, unknown)] == [
            "SERVING",
            "SERVICE_UNKNOWN",
        ]
        caller.service.engine.state = "failed"
        assert status(await watching.read()) == "NOT_SERVING"
        caller.service.engine.state = "ready"
        assert status(await watching.read()) == "SERVING"
        unknown.cancel()
        service_in(caller.service).lifecycle.stopping = True
        assert status(await watching.read()) == "NOT_SERVING"
        service_in(caller.service).lifecycle.draining = True
        assert await watching.read() is grpc.aio.EOF
        assert await watching.code() == Code.OK, "a watcher does not hold up the stop"


@on_a_loop
async def test_one_caller_watches_few_times() -> None:
    async with calling(request_timeout=0.3) as caller:
        watches = [
            caller.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"") for _ in range(9)
        ]
        first = [asyncio.create_task(each.read()) for each in watches]
        await until(lambda: sum(each.done() for each in first) == 9)
        refused = [each for each in first if each.exception() is not None]
        assert len(refused) == 1
        for each in watches:
            each.cancel()


async def ask(caller: Caller, path: str, **asked: str) -> Any:
    call = caller.channel.stream_stream(path)()
    await call.write(
        json_format.ParseDict(asked, message_class(reflection.REQUEST)()).SerializeToString()
    )
    answer = message_class(reflection.RESPONSE).FromString(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    return answer


@pytest.mark.parametrize("path", reflection.PATHS)
@on_a_loop
async def test_reflection_describes_every_method(path: str) -> None:
    async with calling() as caller:
        services = [
            each.name
            for each in (await ask(caller, path, list_services="")).list_services_response.service
        ]
        assert GRPC_SERVICE in services
        pool = DescriptorPool()
        for name in services:
            answer = await ask(caller, path, file_containing_symbol=name)
            for content in reversed(answer.file_descriptor_response.file_descriptor_proto):
                pool.Add(FileDescriptorProto.FromString(content))
            methods = pool.FindServiceByName(name).methods
            for method in methods:
                code = await caller.channel.stream_stream(f"/{name}/{method.name}")(
                    timeout=0.1
                ).code()
                assert code != Code.UNIMPLEMENTED
        unknown = await ask(caller, path, file_containing_symbol="nothing")
        assert unknown.error_response.error_code == Code.NOT_FOUND.value[0]


@on_a_loop
async def test_reflection_needs_a_key() -> None:
    async with calling(api_keys="one") as caller:
        call = caller.channel.stream_stream(reflection.PATHS[0])()
        assert await call.code() == Code.UNAUTHENTICATED
