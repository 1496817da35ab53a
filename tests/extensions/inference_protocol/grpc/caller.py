"""The application with its port of gRPC, and a caller of it."""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np

from service.extensions.inference_protocol import GRPC_SERVICE
from service.extensions.inference_protocol.grpc.descriptors import message_class
from service.extensions.inference_protocol.grpc.messages import (
    ModelInferRequest,
    ModelInferResponse,
)
from service.extensions.inference_protocol.grpc_port import grpc_port_kept
from service.extensions.inference_protocol.settings import InferenceProtocolSettings
from service.settings import Settings, load_settings, settings_of
from tests.service.web.apps import App, inside

Input = ModelInferRequest.InferInputTensor
Output = ModelInferRequest.InferRequestedOutputTensor


class Caller:
    """Calls methods; `infer` by its messages, any other by bytes."""

    def __init__(
        self,
        service: App,
        port: int,
        channel: grpc.aio.Channel,
        stop: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self.service = service
        self.port = port
        self.channel = channel
        self.stop = stop

    def call(self, method: str, message: bytes = b"", **options: Any) -> grpc.aio.UnaryUnaryCall:
        return self.channel.unary_unary(f"/{GRPC_SERVICE}/{method}")(message, **options)

    def stream(self, method: str, **options: Any) -> grpc.aio.StreamUnaryCall:
        """A call that has sent no message yet."""
        return self.channel.stream_unary(f"/{GRPC_SERVICE}/{method}")(**options)

    async def infer(self, request: Any, **options: Any) -> Any:
        response = ModelInferResponse()
        response.ParseFromString(
            await self.call("ModelInfer", request.SerializeToString(), **options)
        )
        return response

    async def refusal(self, request: Any, **options: Any) -> grpc.aio.AioRpcError:
        """The error that answers a request for inference."""
        message = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            await self.call("ModelInfer", message, **options)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError("it was answered")


def grpc_port_of(settings: Settings) -> int:
    port = settings_of(settings, InferenceProtocolSettings).grpc_port
    assert port is not None
    return port


@asynccontextmanager
async def calling(engine: Any = None, **settings: Any) -> AsyncIterator[Caller]:
    """The application, running, and a caller; at the end, or with `stop`, it stops as when its
    process ends.
    """
    with grpc_port_kept(load_settings({"grpc_port": 0, **settings})) as kept:
        service = App(kept) if engine is None else App(kept, engine=engine)
        port = grpc_port_of(kept)
        address = f"127.0.0.1:{port}"
        async with AsyncExitStack() as lifespan, grpc.aio.insecure_channel(address) as channel:
            layer = inside(service)
            await lifespan.enter_async_context(layer.lifespan(layer))
            yield Caller(service, port, channel, lifespan.aclose)


def image(*files: bytes) -> Any:
    """Pictures as typed contents."""
    tensor = Input(name="image", datatype="BYTES", shape=[len(files)])
    tensor.contents.bytes_contents.extend(files)
    return ModelInferRequest(model_name="fake", inputs=[tensor])


def raw(name: str, datatype: str, shape: list[int], content: bytes) -> Any:
    """A tensor as raw contents."""
    tensor = Input(name=name, datatype=datatype, shape=shape)
    return ModelInferRequest(model_name="fake", inputs=[tensor], raw_input_contents=[content])


def number(value: int) -> Any:
    return message_class("InferParameter")(int64_param=value)


def arrays(response: Any) -> dict[str, Any]:
    """The outputs by name; texts as lists."""
    found: dict[str, Any] = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            texts = []
            position = 0
            while position < len(content):
                length = int.from_bytes(content[position : position + 4], "little")
                texts.append(content[position + 4 : position + 4 + length].decode())
                position += 4 + length
            found[output.name] = np.array(texts).reshape(output.shape)
        else:
            dtype = {"BOOL": "?", "INT64": "<i8", "FP32": "<f4"}[output.datatype]
            found[output.name] = np.frombuffer(content, dtype).reshape(output.shape)
    return found
