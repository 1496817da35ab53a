"""The interface between a connection and the application behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from starlette.types import Receive, Scope, Send

from service.errors import ServiceError

if TYPE_CHECKING:
    from service.http.connection import HttpConnection

Header = tuple[bytes, bytes]


class AnswerRoom(Protocol):
    """Bounds the unsent bytes of answers; may end the connections of slow readers."""

    def add_reader(self, connection: HttpConnection) -> None:
        """Count the unsent bytes of a connection whose client reads its answer slowly."""

    def remove_reader(self, connection: HttpConnection) -> None:
        """Stop counting the unsent bytes of a connection. No effect if they are not counted."""


class HttpApplication(Protocol):
    """The application behind a server."""

    @property
    def answer_room(self) -> AnswerRoom:
        """Return the room for unsent answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""

    def refuse(
        self, error: ServiceError, headers: Iterable[Header]
    ) -> tuple[int, list[Header], bytes]:
        """Count bytes that never become a request; return status, headers and body of the answer.

        Args:
            error: reason for the refusal.
            headers: request headers that arrived before it.
        """
