"""The answers to raw forms of requests, and whether their connections stay open."""

import asyncio
import json

from tests.service.fakes import on_a_loop
from tests.service.http.listening import Connection, Listening, listening
from tests.service.http.raw_forms import FORMS, RED, Form, get
from tests.service.web.apps import service_in

NEXT = get(line=b"GET /labels HTTP/1.1")
"""Second request: it gets an answer if the connection stays open, and the form has ended."""


async def answer(connection: Connection, form: Form) -> int:
    """Return the next answer's status, after checking its prediction or its problem."""
    found = await connection.answer(to_head=form.sent.startswith(b"HEAD"))
    if found.status >= 400:
        assert found.code
        assert (found.status != 400) or found.headers["connection"] == "close"
    elif b"predictions" in found.body:
        assert json.loads(found.body)["predictions"][0]["index"] == RED
    return found.status


async def seen(server: Listening, form: Form) -> Form:
    """Send a form and another request; return the form with the observed answers."""
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
async def test_forms_get_their_documented_answers() -> None:
    async with listening() as server:
        # At once, because the server lingers after each refusal.
        found = await asyncio.gather(*(seen(server, form) for form in FORMS.values()))
        assert dict(zip(FORMS, found, strict=True)) == FORMS
        assert service_in(server.app).limiter.in_use == 0
