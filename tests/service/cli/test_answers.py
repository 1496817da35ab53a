"""The flags of subcommands that ask a server use the environment of its start."""

import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from service.cli import answers
from tests.service.cli.command_line import run
from tests.vitserve.answers import MODEL
from vitserve.client import Client, Unreachable
from vitserve.documents import Classification

CAT = Classification.model_validate(
    {
        "model": "tiny",
        "predictions": [{"label": "cat", "index": 0, "score": 1.0}],
        "timings_ms": dict.fromkeys(("decode", "queue", "inference", "total"), 1.0),
        "batch_size": 1,
    }
)
PROBLEM = {"type": "about:blank", "title": "", "status": 401, "detail": "no key", "request_id": "r"}


def test_missing_key_names_the_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = httpx.Response(401, json=PROBLEM | {"code": "unauthorized"})
    transport = httpx.MockTransport(lambda _: answer)
    monkeypatch.setattr(answers, "Client", partial(Client, transport=transport))
    code, out, err = run(capsys, "classify", "examples/dog.jpg", "--url", "http://there")
    told = "401 unauthorized: no key: give one of the server's keys, without its name, with"
    assert (code, out, err) == (
        1,
        "",
        f"vitserve: http://there: {told} --api-key or VIT_API_KEY\n",
    )


def test_command_gives_up_on_a_lost_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1000):
        (tmp_path / f"{number:03}.png").touch()

    class Gone(Client):
        def model(self, name: str | None) -> Any:  # type: ignore[override]
            return SimpleNamespace(classes=1)

        def classify(self, image: Any, **_: object) -> Any:
            if image.name != "007.png":
                raise Unreachable(httpx.ConnectError("refused"), httpx.URL("http://there"))
            return CAT

    monkeypatch.setattr(answers, "Client", Gone)
    code, out, err = run(capsys, "classify", tmp_path, "--url", "http://there")
    assert code == 1
    assert out.count("error: http://there: refused") == 15
    assert "the server stopped answering; 984 of 1000 files were not sent" in err


@pytest.mark.parametrize(
    ("flags", "sent"),
    [([], "Bearer mine"), (["--api-key", "web:mine "], "Bearer web:mine")],
)
def test_key_comes_from_flag_or_environment(
    flags: list[str],
    sent: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("authorization"))
        return httpx.Response(401, json=PROBLEM | {"code": "unauthorized"})

    monkeypatch.setenv("VIT_API_KEY", "mine\n")
    monkeypatch.setattr(answers, "Client", partial(Client, transport=httpx.MockTransport(answer)))
    assert run(capsys, "classify", "examples/dog.jpg", "--url", "http://there", *flags)[0] == 1
    assert asked == [sent]


@pytest.mark.parametrize(
    ("flags", "interpolation", "size"),
    [
        ([], "bicubic", (480, 640)),
        (["--shrink"], "bicubic", (120, 160)),
        (["--shrink"], "nearest", (480, 640)),
    ],
)
def test_shrink_sends_smaller_pictures(
    flags: list[str],
    interpolation: str,
    size: tuple[int, int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/model":
            preprocessing = {"resize_size": [56, 56], "interpolation": interpolation}
            return httpx.Response(200, json=MODEL | {"preprocessing": preprocessing})
        sent.append(Image.open(io.BytesIO(request.content)).size)
        return httpx.Response(200, content=CAT.model_dump_json())

    monkeypatch.setattr(answers, "Client", partial(Client, transport=httpx.MockTransport(answer)))
    assert run(capsys, "classify", "examples/dog.jpg", "--url", "http://there", *flags)[0] == 0
    assert sent == [size]


@pytest.mark.parametrize("flags", [["--model", "tiny"], ["--api-key", "k"], ["--shrink"]])
def test_server_flags_need_url(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "classify", "examples/dog.jpg", *flags)
    assert (code, out, err) == (
        1,
        "",
        f"vitserve: {flags[0]}: applies only to a server; add its --url\n",
    )


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("classify", "--checkpoint"),
        ("classify", "--coverage"),
        ("embed -o x.npy", "--labels"),
        ("embed -o x.npy", "--device"),
    ],
)
def test_local_settings_exclude_url(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*command.split(), "examples/dog.jpg", "--url", "http://there", flag, "cpu"]
    code, out, err = run(capsys, *line)
    assert (code, out) == (1, "")
    assert err.startswith(
        f"vitserve: {flag}: applies only to a model loaded here; with --url, leave it out"
    )


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(404, json=PROBLEM | {"status": 404, "code": "not_found"}),
        httpx.Response(404, text="<html>"),
    ],
    ids=["problem", "page"],
)
def test_url_of_a_route_names_the_address(
    answer: httpx.Response, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        answers, "Client", partial(Client, transport=httpx.MockTransport(lambda _: answer))
    )
    _, _, err = run(capsys, "classify", "examples/dog.jpg", "--url", "http://there:8000/classify")
    assert err.endswith(
        ": pass the url of the service without the path of a request, such as http://there:8000\n"
    )
