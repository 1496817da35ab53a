"""The flags of subcommands that ask a server follow the environment that started it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cli import server_flags
from tests.service.cli.command_line import run
from vitserve.client import Client, ClientError, Unreachable

PROBLEM = {"type": "about:blank", "title": "", "status": 401, "detail": "no key", "request_id": "r"}


def test_a_missing_key_is_one_line_that_names_where_to_give_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = httpx.Response(401, json=PROBLEM | {"code": "unauthorized"})
    transport = httpx.MockTransport(lambda _: answer)
    monkeypatch.setattr(server_flags, "Client", partial(Client, transport=transport))
    code, out, err = run(capsys, "classify", "examples/dog.jpg", "--url", "http://there")
    told = "401 unauthorized: no key: give one of the server's keys with --api-key or VIT_API_KEY"
    assert (code, out, err) == (1, "", f"vitserve: http://there: {told}\n")


class _Streaming(Client):
    """Gives these answers for any files."""

    def __init__(self, answers: list[object]) -> None:
        super().__init__("http://u")
        self._answers = answers

    def stream(self, images: Any, ask: object, **options: object) -> Any:
        return zip(images, self._answers, strict=True)


def test_a_server_that_is_gone_is_not_asked_about_every_file_that_is_left() -> None:
    gone = Unreachable(httpx.ConnectError("refused"), httpx.URL("http://u"))

    def answers(*given: object) -> Iterator[tuple[Path, str]]:
        files = [Path(str(number)) for number in range(len(given))]
        return server_flags.stream_answers(files, _Streaming(list(given)), lambda file: "")

    seen = []
    with pytest.raises(ClientError, match="no answer any more, 984 of 1000 files were not asked about"):
        for file, answer in answers(*[gone] * 7, "an answer", *[gone] * 992):
            seen.append((file.name, answer))
    assert [name for name, _ in seen] == [str(number) for number in range(16)]
    assert [answer for _, answer in seen] == ["http://u: refused"] * 7 + ["an answer"] + ["http://u: refused"] * 8
    assert len(list(answers(*[gone] * 8))) == 8  # these were all


@pytest.mark.parametrize(
    ("flags", "sent"), [([], "Bearer mine"), (["--api-key", "web:mine "], "Bearer web:mine"), (["--api-key", ""], None)]
)
def test_the_key_is_that_of_the_flag_or_of_the_environment(
    flags: list[str], sent: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("authorization"))
        return httpx.Response(401, json=PROBLEM | {"code": "unauthorized"})

    monkeypatch.setenv("VIT_API_KEY", "mine\n")
    monkeypatch.setattr(server_flags, "Client", partial(Client, transport=httpx.MockTransport(answer)))
    assert run(capsys, "classify", "examples/dog.jpg", "--url", "http://there", *flags)[0] == 1
    assert asked == [sent]
