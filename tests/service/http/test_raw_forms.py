"""Every raw form of a request is answered as its row says, and its connection is kept or closed."""

import asyncio
import json

from tests.service.fakes import on_a_loop
from tests.service.http.listening import Connection, Listening, listening
from tests.service.http.raw_forms import FORMS, RED, Form, get
from tests.service.web.apps import service_in

NEXT = get(line=b"GET /labels HTTP/1.1")
"""Sent behind a form: answered only where the connection is kept and nothing of the form is left
over.
"""


async def answer(connection: Connection, form: Form) -> int:
    """Return the next answer's status; a picture must be classified as itself, and a refusal say
    why.
    """
    found = await connection.answer(to_head=form.sent.startswith(b"HEAD"))
    if found.status >= 400:
        assert found.code
        assert (found.status != 400) or found.headers["connection"] == "close"
    elif b"predictions" in found.body:
        assert json.loads(found.body)["predictions"][0]["index"] == RED
    return found.status


async def seen(server: Listening, form: Form) -> Form:
    """Send a form and another request, and return the form with what the server did."""
    statuses: list[int] = []
    async with server.connect() as connection:
        await connection.send(form.sent)
        try:
            while len(statuses) < len(form.statuses):
                statuses.append(await answer(connection, form))
            await connection.send(NEXT)
            last = await connection.answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            return Form(form.sent, tuple(statuses), kept=False)
    if b"labels" in last.body:
        return Form(form.sent, tuple(statuses), kept=True)
    return Form(form.sent, (*statuses, last.status), kept=False)


@on_a_loop
async def test_a_form_is_answered_as_its_row_says() -> None:
    async with listening() as server:
        # All at once: the server hears what a refused caller still sends before it closes.
        found = await asyncio.gather(*(seen(server, form) for form in FORMS.values()))
        assert dict(zip(FORMS, found, strict=True)) == FORMS
        assert service_in(server.app).limiter.in_use == 0
