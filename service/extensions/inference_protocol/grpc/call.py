"""One call: its deadline, its client, and the arrival of its messages."""

import asyncio
from typing import Any, Final
from urllib.parse import unquote

import grpc

from service.addresses import network_of
from service.errors import MalformedRequest, RequestTimeout
from service.extensions.inference_protocol.grpc.messages import ModelRequest, parse
from service.web.lanes import Deadline, Lane
from service.web.middleware import request_id_from
from service.web.service import Service

GRACE_SECONDS: Final = 0.25
"""Time in which a message must arrive while messages of other callers wait."""

OWN_GRACE_SECONDS: Final = 1.0
"""The same while only messages of the same caller wait."""


class Call:
    """A call whose message is still to arrive.

    Attributes:
        address: network address of the client.
        caller: see `Sender`.
    """

    def __init__(self, context: Any, arrivals: Lane, service: Service) -> None:
        self.started = service.clock()
        self.deadline = Deadline(self.started + service.settings.request_timeout, service.clock)
        # Reversed: only the first of several equal headers counts.
        self.metadata: dict[str, str | bytes] = dict(reversed(context.invocation_metadata()))
        self.request_id = request_id_from(str(self.metadata.get("x-request-id", "")))
        peer = unquote(context.peer()).rpartition(":")[0]  # such as ipv6:[::1], without the port
        self.address = peer.partition(":")[2].strip("[]")
        self.caller = network_of(self.address)
        self._context = context
        self._arrivals = arrivals

    async def message(self) -> bytes:
        """Wait for a turn to receive the message, and return it.

        grpcio holds the bytes of an incomplete message, and does not count them. Therefore only a
        few messages arrive at once, and two of one caller. A slow message fails when others wait.

        Raises:
            MalformedRequest: the call has no message.
            QueueFull, DeadlineExceeded: no turn was free in time.
            RequestTimeout: the message arrived too slowly.
        """
        with self._arrivals.turn(self.caller, 1, self.deadline) as turn:
            await turn
            arrival = asyncio.ensure_future(self._context.read())
            began = asyncio.get_running_loop().time()
            try:
                while not arrival.done():
                    if not self.deadline.remaining():
                        raise RequestTimeout("the message did not arrive in time")
                    seconds = asyncio.get_running_loop().time() - began
                    is_late = self._arrivals.is_crowded and seconds > GRACE_SECONDS
                    if is_late or (turn.delays_same_caller and seconds > OWN_GRACE_SECONDS):
                        raise RequestTimeout("the message arrived too slowly while others waited")
                    await asyncio.wait(
                        {arrival}, timeout=min(self.deadline.remaining(), GRACE_SECONDS / 4)
                    )
            finally:
                arrival.cancel()
        if arrival.result() is grpc.aio.EOF:
            raise MalformedRequest("the call has no message")
        return bytes(arrival.result())

    async def next_message(self) -> bytes | None:
        """Return the next message of a stream, None at its end; raises `RequestTimeout`."""
        try:
            async with asyncio.timeout(self.deadline.remaining()):
                message = await self._context.read()
        except TimeoutError:
            raise RequestTimeout("the stream reached its time limit: call again") from None
        return None if message is grpc.aio.EOF else bytes(message)

    async def send(self, message: bytes) -> None:
        """Send a message of a streamed answer."""
        await self._context.write(message)

    async def receive(self) -> dict[str, Any]:
        """Return the message as an ASGI event with a body; see `message`."""
        return {"type": "http.request", "body": await self.message(), "more_body": False}

    async def model_request(self) -> Any:
        """Return a message about the server or a model; raises as `message` and `parse`."""
        return parse(ModelRequest, await self.message())
