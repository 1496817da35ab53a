"""Requests of both clients, how they read answers, and the client's package."""

import asyncio
import copy
import io
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from PIL import Image

import vitserve.pictures
from model.images.decode import decode
from model.images.preprocess import preprocess
from service.web.problems import INTERNAL_ERROR, TABLE
from tests.conftest import REPOSITORY
from tests.model.images.pictures import as_is, encode
from tests.vitserve.answers import CAT, FULL, PNG, URL
from vitserve.client import (
    AsyncClient,
    Client,
    ClientError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ForeignAnswer,
    ImageRefused,
    InferenceFailed,
    InvalidParameter,
    InvalidRequest,
    ModelFailed,
    NotFound,
    ProblemError,
    Retries,
    ServiceFailed,
    Unauthorized,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from vitserve.documents import Classification, ProblemDocument
from vitserve.pictures import file_bytes
from vitserve.requests import form

pytestmark = pytest.mark.timeout(60)  # processes start


ONCE = Retries(tries=1)

Call = Callable[..., Any]


class TextReader:
    """A file that reads text."""

    def read(self, size: int) -> str:
        return "dog"[:size]


def call_blocking(
    handler: Callable[[httpx.Request], httpx.Response], method: str, /, *args: Any, **options: Any
) -> Any:
    with Client(URL, api_key="k", retries=ONCE, transport=httpx.MockTransport(handler)) as client:
        return getattr(client, method)(*args, **options)


def call_asynchronous(
    handler: Callable[[httpx.Request], httpx.Response], method: str, /, *args: Any, **options: Any
) -> Any:
    async def call() -> Any:
        async with AsyncClient(
            URL, api_key="k", retries=ONCE, transport=httpx.MockTransport(handler)
        ) as client:
            return await getattr(client, method)(*args, **options)

    return asyncio.run(call())


@pytest.fixture(params=[call_blocking, call_asynchronous], ids=["Client", "AsyncClient"])
def call(request: pytest.FixtureRequest) -> Call:
    function: Call = request.param
    return function


class Recorder:
    """A server that repeats one answer and keeps the last request."""

    def __init__(self, status: int, **answer: Any) -> None:
        self.answer = httpx.Response(status, **answer)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.request = request
        return self.answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (httpx.Response(404, json=FULL | {"status": 404, "code": "not_found"}), True),
        (httpx.Response(405, json=FULL | {"status": 405, "code": "method_not_allowed"}), True),
        (httpx.Response(404, json={"error": "/v2/labels: no such path"}), True),
        (httpx.Response(404, json=FULL | {"status": 404, "code": "unknown_model"}), False),
        (httpx.Response(503, json=FULL), False),
    ],
)
def test_url_with_a_path_names_the_root(answer: httpx.Response, says: bool) -> None:
    ways = {"GET": answer, "POST": httpx.Response(200, json=CAT)}
    transport = httpx.MockTransport(lambda request: ways[request.method])
    with Client(f"{URL}/classify", retries=ONCE, transport=transport) as client:
        for is_first in (True, False):
            with pytest.raises(ClientError) as raised:
                client.labels()
            assert str(raised.value).endswith(f"such as {URL}") == (says and is_first)
            client.classify(b"pixels")  # then the path is a proxy's prefix


def test_image_is_sent_as_the_body(call: Call, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"pixels")
    for image in (b"pixels", tmp_path / "cat.png", str(tmp_path / "cat.png")):
        server = Recorder(200, json=CAT)
        assert call(
            server, "classify", image, top_k=3, attention=True
        ) == Classification.model_validate(CAT)
        assert str(server.request.url) == f"{URL}/classify?top_k=3&attention=true"
        assert server.request.method == "POST"
        assert server.request.content == b"pixels"
        assert server.request.headers["content-type"] == "application/octet-stream"
        assert server.request.headers["authorization"] == "Bearer k"


RGB = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
"""Return pixels whose rows are all different."""


@pytest.mark.parametrize(
    ("array", "mode"),
    [
        (RGB, "RGB"),
        (RGB[..., :1], "L"),
        (RGB[..., 0], "L"),
        (np.dstack([RGB, RGB[..., 0]]), "RGBA"),
        (RGB[::-2], "RGB"),
    ],
    ids=["RGB", "one channel", "grey", "RGBA", "a view"],
)
def test_array_is_sent_as_png(call: Call, array: Any, mode: str) -> None:
    server = Recorder(200, json=CAT)
    call(server, "classify", array)
    sent = Image.open(io.BytesIO(server.request.content))
    assert (sent.format, sent.mode) == ("PNG", mode)
    np.testing.assert_array_equal(np.asarray(sent), array.squeeze())


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "I;16", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"]
)
def test_pil_image_is_sent_as_png(call: Call, mode: str) -> None:
    server = Recorder(200, json=CAT)
    image = Image.new("L", (7, 5), 200).convert(mode)
    call(server, "classify", image)
    sent = Image.open(io.BytesIO(server.request.content))
    assert sent.format == "PNG"
    np.testing.assert_array_equal(np.asarray(sent.convert("RGB")), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize(("mode", "highest"), [("F", 255), ("F", 1), ("I", 255), ("I", 65535)])
def test_32_bit_samples_are_read_as_in_a_tiff(call: Call, mode: str, highest: int) -> None:
    values = np.linspace(0, highest, 35, dtype=np.float32).reshape(5, 7)
    image = Image.fromarray(values).convert(mode)
    server = Recorder(200, json=CAT)
    call(server, "classify", image)
    sent, tiff = (
        preprocess(data, as_is(image)) for data in (server.request.content, encode(image, "TIFF"))
    )
    np.testing.assert_array_equal(sent, tiff)


def test_pil_image_keeps_its_orientation(call: Call) -> None:
    file = encode(Image.fromarray(RGB), "PNG", 6)  # a quarter turn
    server = Recorder(200, json=CAT)
    call(server, "classify", Image.open(io.BytesIO(file)))
    expected, sent = (decode(data, max_pixels=1000) for data in (file, server.request.content))
    assert expected.orientation == sent.orientation == 6
    np.testing.assert_array_equal(np.asarray(expected.image), np.asarray(sent.image))


def test_any_bytes_are_sent_unchanged(call: Call, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"pixels")
    server = Recorder(200, json={"results": [CAT] * 5})
    with (tmp_path / "cat.png").open("rb") as file:
        held = (
            file,
            io.BytesIO(b"pixels"),
            bytearray(b"pixels"),
            memoryview(b"pixels"),
            np.frombuffer(b"pixels", "u1"),
        )
        call(server, "classify_batch", held)
    assert server.request.content.count(b"\r\n\r\npixels\r\n") == len(held)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (RGB.astype(np.float32), r"float32 \[5, 7, 3\]"),
        (RGB.transpose(2, 0, 1), r"uint8 \[3, 5, 7\]"),
        (RGB[None], r"uint8 \[1, 5, 7, 3\]"),
        ([1, 2], "list"),
        (None, "NoneType"),
        (io.StringIO("pixels"), "StringIO"),
    ],
    ids=["floats", "channels first", "a batch", "a list", "None", "text"],
)
def test_other_object_names_its_type(call: Call, source: Any, what: str) -> None:
    with pytest.raises(TypeError, match=rf"^expected a path, .*, not {what}$"):
        call(Recorder(200, json=CAT), "classify", source)


@pytest.mark.parametrize(
    ("method", "image", "shape"), [("embed", b"p", (4,)), ("embed_batch", [b"p", b"q"], (2, 4))]
)
def test_embeddings_are_an_array(
    call: Call, method: str, image: Any, shape: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).random(shape, np.float32)
    buffer = io.BytesIO()
    np.save(buffer, values)
    server = Recorder(200, content=buffer.getvalue())
    np.testing.assert_array_equal(call(server, method, image, pool="cls", normalize=True), values)
    path = "/embed" if len(shape) == 1 else "/embed/batch"
    assert str(server.request.url) == f"{URL}{path}?pool=cls&normalize=true&format=npy"
    assert b"p" in server.request.content


def test_labels_are_sent_as_json(call: Call) -> None:
    server = Recorder(200, json=CAT)
    call(server, "classify", b"p", labels=["cat", "a red car, parked"])
    assert json.loads(server.request.url.params["labels"]) == ["cat", "a red car, parked"]


def test_texts_are_sent_one_by_one(call: Call) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 3), np.float32))
    server = Recorder(200, content=buffer.getvalue())
    assert call(server, "embed_texts", ["a, b", "c"], normalize=True).shape == (2, 3)
    assert server.request.url.params.get_list("text") == ["a, b", "c"]
    assert (server.request.method, server.request.content) == ("POST", b"")


def test_every_option_of_a_map_is_sent(call: Call) -> None:
    server = Recorder(200, content=PNG)
    options = {
        "method": "relevance",
        "view": "photo",
        "smooth": False,
        "caption": True,
        "alpha": 0.5,
    }
    for class_, sent in (("tabby", "tabby"), (281, "281"), (["tabby", 282], "tabby,282")):
        call(server, "heat_map", b"pixels", class_=class_, **options)
        expected = {
            "method": "relevance",
            "view": "photo",
            "smooth": "false",
            "caption": "true",
            "alpha": "0.5",
            "format": "png",
        }
        assert dict(server.request.url.params) == {"class": sent} | expected


def test_an_answer_names_its_kept_picture(call: Call) -> None:
    server = Recorder(200, content=PNG)
    call(server, "heat_map", Classification.model_validate({"id": "kept", **CAT}), size=100)
    assert (server.request.method, str(server.request.url)) == (
        "GET",
        f"{URL}/attention?id=kept&model=tiny&size=100&format=png",
    )
    with pytest.raises(ValueError, match="did not keep the picture"):
        call(server, "attention", Classification.model_validate(CAT))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ({"Retry-After": "2"}, 2),
        ({}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT"}, None),
        ({"Retry-After": "9" * 5000}, 999_999_999),
    ],
)
def test_refusal_has_the_problem_document(
    call: Call, header: dict[str, str], seconds: int | None
) -> None:
    with pytest.raises(ProblemError, match="503 queue_full: no slot is free") as raised:
        call(Recorder(503, json=FULL, headers=header), "heat_map", b"pixels")
    assert raised.value.problem.model_dump() == FULL
    assert raised.value.retry_after == seconds


@pytest.mark.parametrize(
    ("status", "message"),
    [(502, "502 from http://service/model, which is not an answer"), (200, "did not answer as")],
)
def test_other_server_is_an_error(call: Call, status: int, message: str) -> None:
    with pytest.raises(ClientError, match=message) as raised:
        call(Recorder(status, text="<html>"), "model")
    assert not isinstance(raised.value, ProblemError)


KINDS = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: InvalidRequest,
    408: DeadlineExceeded,
    409: Conflict,
    413: InvalidRequest,
    415: InvalidRequest,
    421: InvalidRequest,
    422: InvalidRequest,
    429: Unavailable,
    500: ServiceFailed,
    503: Unavailable,
    504: DeadlineExceeded,
}
FINER: dict[str, type[ProblemError]] = {
    "unknown_model": UnknownModel,
    "upload_too_large": ImageRefused,
    "image_too_large": ImageRefused,
    "image_too_costly": ImageRefused,
    "invalid_image": ImageRefused,
    "unsupported_media_type": ImageRefused,
    "invalid_parameter": InvalidParameter,
    "inference_failed": InferenceFailed,
    "model_failed": ModelFailed,
}


@pytest.mark.parametrize(
    ("status", "code"),
    sorted({*TABLE.values(), (500, INTERNAL_ERROR), (418, "of_tomorrow"), (507, "of_tomorrow")}),
)
def test_status_with_code_selects_the_error(status: int, code: str) -> None:
    with pytest.raises(ProblemError) as raised:
        call_blocking(Recorder(status, json=FULL | {"status": status, "code": code}), "labels")
    by_status = KINDS.get(status, InvalidRequest if status < 500 else ServiceFailed)
    assert isinstance(raised.value, by_status)
    assert type(raised.value) is FINER.get(code, by_status)
    assert (raised.value.status, raised.value.code) == (status, code)


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused")


def test_absent_server_is_unreachable(call: Call) -> None:
    message = "^http://service: Connection refused$"
    with pytest.raises(Unreachable, match=message) as raised:
        call(refuse, "labels")
    assert (
        isinstance(raised.value, ClientError)
        and isinstance(raised.value, httpx.TransportError)
        and isinstance(raised.value.__cause__, httpx.ConnectError)
    )


def test_error_hides_the_password() -> None:
    with (
        Client(
            "http://me:secret@there:8000/vit/", retries=ONCE, transport=httpx.MockTransport(refuse)
        ) as client,
        pytest.raises(Unreachable, match=r"^http://there:8000/vit: Connection refused$"),
    ):
        client.labels()


SERVER_ONLY = {
    "fastapi",
    "model",
    "numpy",
    "PIL",
    "python_multipart",
    "service",
    "starlette",
    "torch",
    "uvicorn",
}

FOREIGN = "raise SystemExit('another package')"


@pytest.fixture(params=["{}.py", "{}/__init__.py"], ids=["file", "package"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder of a user with the names of the server's packages."""
    for name in ("service", "model"):
        file = tmp_path / request.param.format(name)
        file.parent.mkdir(exist_ok=True)
        file.write_text(FOREIGN)
    return tmp_path


def run_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder that comes first in the search for modules."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_client_imports_no_server_module(
    folder: Path,
) -> None:
    (folder / "program.py").write_text("import sys, vitserve.client; print(*sys.modules)")
    done = run_in(folder, "program.py")
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert "httpx" in modules
    assert not modules & SERVER_ONLY


def test_clients_are_in_the_package_on_demand(folder: Path) -> None:
    lines = (
        "import sys, vitserve",
        "assert 'httpx' not in sys.modules",
        "from vitserve import AsyncClient, Client",
        "assert Client is vitserve.client.Client",
    )
    (folder / "program.py").write_text("\n".join(lines))
    done = run_in(folder, "program.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_command_ignores_equal_file_names(folder: Path) -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["vitserve"].split(":")
    script = f"import sys; from {module} import {function}; sys.exit({function}())"
    for command in (["-c", script], ["-m", "vitserve"]):
        done = run_in(folder, *command, "attention", "--help")  # with the subcommand's modules
        assert "usage: vitserve attention" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("ftp://host", "http://host"),
        ("", "http://localhost:8000"),
        ("http://", "http://localhost:8000"),
        ("http://host/?model=cats", "without ?"),
        ("http://host/#cats", "without ? and #"),
        ("http://host:99999", "a port from 1 to 65535, not 99999"),
        ("http://host:0", "a port from 1 to 65535, not 0"),
        ("unix:/run/v.sock", "transport=HTTPTransport(uds=PATH)"),
        ("/run/v.sock", "transport=HTTPTransport(uds=PATH)"),
        ("http+unix://%2Frun%2Fv.sock", "transport=HTTPTransport(uds=PATH)"),
        ("http://user:word@host", "give only one"),
        ("http://host/?", "without ?"),
        ("http:///path", "such as http://path"),
        ("//host", "such as http://host"),
        ("http:/host:80", "such as http://host:80"),
        ("http://::1:8000", "an IPv6 address in brackets"),
    ],
)
def test_address_of_another_kind_is_refused(url: str, remedy: str) -> None:
    with pytest.raises(ClientError, match=re.escape(remedy)):
        Client(url, api_key="K")


@pytest.mark.parametrize(
    ("source", "error", "remedy"),
    [
        ("https://example.org/dog.jpg", FileNotFoundError, "path of a local file"),
        ("FILE:///dog.jpg", FileNotFoundError, "path of a local file"),
        ("DATA:image/png;base64,AAAA", FileNotFoundError, "pass b64decode"),
        (io.StringIO("dog"), TypeError, "a file open for binary reading"),
        (TextReader(), TypeError, "whose read() returns str"),
        (Image.new("I;16B", (3, 2)), TypeError, "convert it to L, RGB or I;16"),
        ("data:image/png;base64,AAAA", FileNotFoundError, "pass b64decode"),
        ("A" * 5000, FileNotFoundError, "pass b64decode"),
        ("", FileNotFoundError, "the path of the picture is empty"),
        (io.BytesIO(), ValueError, "call its seek(0) first"),
        (np.zeros((0, 5, 3), np.uint8), ValueError, "a picture of size (5, 0) has no pixels"),
    ],
)
def test_an_unfit_source_names_its_remedy(source: Any, error: type[Exception], remedy: str) -> None:
    with pytest.raises(error, match=re.escape(remedy)):
        file_bytes(source)


@pytest.mark.parametrize(
    ("images", "error"),
    [
        ("dog.jpg", TypeError),
        (b"x", TypeError),
        (bytearray(b"x"), TypeError),
        (io.BytesIO(b"x\n"), TypeError),
        (RGB, TypeError),
        (RGB[:, :, 0], TypeError),
        ([], ValueError),
    ],
)
def test_batch_expects_a_list_of_pictures(images: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"list of pictures"):
        form(images)


@pytest.mark.parametrize("label", [["a", "b"], ["a"], 7, None])
def test_teach_expects_one_text_as_label(label: Any) -> None:
    with Client("http://host") as client, pytest.raises(TypeError, match="expected one text"):
        client.teach("pets", label, b"x")


def test_top_k_is_not_a_truth_value() -> None:
    with Client("http://host") as client, pytest.raises(TypeError, match="expected a whole number"):
        client.classify(b"x", top_k=True)


@pytest.mark.parametrize("timeout", [0, None, "5", math.inf, math.nan, 10**400])
def test_timeout_must_be_above_zero(timeout: Any) -> None:
    with pytest.raises(ValueError, match=f"timeout {timeout!r}: expected seconds above 0"):
        Client("http://host", timeout=timeout)


@pytest.mark.parametrize("key", ["secret\nkey", "Bearer secret", '"secret"', "secret,key"])
def test_refused_key_is_not_shown(key: str) -> None:
    with pytest.raises(
        ClientError, match=r"the api_key contains '.*': give the key alone"
    ) as raised:
        Client("http://host", api_key=key)

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, "url None: expected an address such as http://localhost:8000"),
        ({"api_key": b"K"}, "the api_key is of type bytes"),
        ({"retries": 3}, "retries 3: expected Retries"),
    ],
)
def test_argument_of_a_wrong_type_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Client(**{"url": "http://host", **options})


def test_tries_must_be_at_least_one() -> None:
    with pytest.raises(ValueError, match="tries 0: expected an integer of at least 1"):
        Retries(tries=0)


@pytest.mark.parametrize("seconds", [-1, math.nan])
def test_pauses_are_not_negative(seconds: float) -> None:
    with pytest.raises(ValueError, match="expected seconds of at least 0"):
        Retries(first_pause=seconds)
    with pytest.raises(ValueError, match="expected seconds of at least 0"):
        Retries(seconds=seconds)


@pytest.mark.parametrize("model", ["a,b", "*"])
def test_several_models_have_their_own_method(call: Call, model: str) -> None:
    with pytest.raises(ValueError, match="is not one name: call classify_by"):
        call(Recorder(200, json=CAT), "classify", b"x", model=model)


def test_models_of_an_answer_are_never_empty(call: Call) -> None:
    with pytest.raises(ValueError, match="models is empty"):
        call(Recorder(200, json=CAT), "classify_by", b"x", [])


def test_one_name_is_one_model(call: Call) -> None:
    server = Recorder(200, json={"models": {}, "timings_ms": CAT["timings_ms"]})
    call(server, "classify_by", b"x", "pets")

    assert server.request.url.params["model"] == "pets,pets"


@pytest.mark.parametrize(
    ("images", "concurrency", "error"),
    [
        ("dog.jpg", 8, TypeError),
        (Path(), 8, TypeError),
        (io.BytesIO(b"one\ntwo"), 8, TypeError),
        (np.zeros((4, 5, 3), np.uint8), 8, TypeError),
        ([b"x"], 0, ValueError),
        ([b"x"], 2.5, ValueError),
    ],
)
def test_wrong_streams_are_refused(images: Any, concurrency: int, error: type[Exception]) -> None:
    async def collect() -> None:
        async with AsyncClient("http://host") as client:
            async for _ in client.stream(images, client.classify, concurrency=concurrency):
                pass

    with pytest.raises(error, match="expected"):
        asyncio.run(collect())
    with Client("http://host") as client, pytest.raises(error, match="expected"):
        list(client.stream(images, client.classify, concurrency=concurrency))


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "use http://"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "SSL_CERT_FILE"),
    ],
)
def test_error_of_tls_names_its_remedy(message: str, remedy: str) -> None:
    error = Unreachable(httpx.ConnectError(message), httpx.URL("https://host"))
    assert remedy in str(error)
    assert error.has_remedy


def test_redirect_is_named(call: Call) -> None:
    server = Recorder(301, headers={"Location": "https://there/models"})
    with pytest.raises(ForeignAnswer, match="it leads to https://there/models"):
        call(server, "models")


@pytest.mark.parametrize("labels", [{"cat": 1}, ("cat",), np.array(["cat"])])
def test_labels_of_any_iterable_are_sent(call: Call, labels: Any) -> None:
    server = Recorder(200, json=CAT)
    call(server, "classify", b"pixels", labels=labels)
    assert server.request.url.params["labels"] == '["cat"]'


@pytest.mark.parametrize("labels", [[1, 2], ["cat", None], b"cat"])
def test_labels_that_are_not_text_are_refused(call: Call, labels: Any) -> None:
    with pytest.raises(TypeError, match="labels: expected a list of str"):
        call(Recorder(200, json=CAT), "classify", b"pixels", labels=labels)


def test_texts_of_a_generator_are_sent_singly(call: Call) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros((2, 3), np.float32))
    server = Recorder(200, content=file.getvalue())
    call(server, "embed_texts", (text for text in ("a", "b")))
    assert server.request.url.params.get_list("text") == ["a", "b"]


@pytest.mark.parametrize("classes", [{5}, np.array([5]), range(5, 6)])
def test_classes_of_any_iterable_are_sent(call: Call, classes: Any) -> None:
    server = Recorder(200, content=PNG)
    call(server, "heat_map", b"pixels", class_=classes)
    assert server.request.url.params["class"] == "5"


@pytest.mark.parametrize("model", [["a", "b"], 3, Path("a")])
def test_model_is_one_name(call: Call, model: Any) -> None:
    with pytest.raises(ValueError, match="is not one name: call classify_by"):
        call(Recorder(200, json=CAT), "classify", b"pixels", model=model)


def test_page_of_a_proxy_is_not_a_drawing(call: Call) -> None:
    with pytest.raises(ClientError, match="did not answer as vitserve does"):
        call(Recorder(200, text="<html>"), "heat_map", b"pixels")


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_head_has_a_name_of_its_own(call: Call, name: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a head"):
        call(Recorder(200, json=CAT), "head", name)


class Endless(io.RawIOBase):
    """A file without an end."""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def test_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitserve.pictures, "MAX_FILE_BYTES", 1000)
    with pytest.raises(OSError, match="without an end: not a picture"):
        file_bytes(cast("io.BufferedReader", Endless()))


@pytest.mark.parametrize(
    "error",
    [
        UnknownModel(ProblemDocument.model_validate(FULL), 3),
        Unreachable(httpx.ConnectError("refused"), httpx.URL("http://host")),
        ForeignAnswer("not ours", 503, 3),
        ClientError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_cross_processes(error: ClientError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert there.retry_after == error.retry_after
    assert there.temporary == error.temporary
    assert vars(copy.copy(error)) == vars(error)


@pytest.mark.parametrize("parameter", ["labels", "class_"])
def test_empty_list_is_refused(call: Call, parameter: str) -> None:
    options: dict[str, Any] = {parameter: []}
    with pytest.raises(ValueError, match="is empty: name some, or leave it out"):
        call(Recorder(200, content=PNG), "heat_map", b"x", **options)


def test_example_must_have_been_kept(call: Call) -> None:
    answer = Classification.model_validate(CAT | {"id": None})
    with pytest.raises(ValueError, match="the service did not keep the picture"):
        call(Recorder(201, json={}), "teach", "pets", "cat", answer)


@pytest.mark.parametrize("method", ["attention", "attention_array", "heat_map"])
def test_method_chooses_the_format(call: Call, method: str) -> None:
    with pytest.raises(TypeError, match="'format'"):
        call(Recorder(200, content=PNG), method, b"x", format="json")


@pytest.mark.parametrize("name", [None, 3, "a/b", ".."])
def test_head_is_one_name(call: Call, name: Any) -> None:
    with pytest.raises(ValueError, match="expected the name of a head, without a slash"):
        call(Recorder(200, json={}), "head", name)


@pytest.mark.parametrize(
    "options", [{"tries": 2.5}, {"tries": "3"}, {"seconds": None}, {"first_pause": "1"}]
)
def test_retries_are_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Retries(**options)


def test_timeout_is_not_a_truth_value() -> None:
    with pytest.raises(ValueError, match="timeout True: expected seconds above 0"):
        Client("http://host", timeout=True)
