import gc
import logging
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from model.heads import ZeroShot
from service.engine import backbones
from service.engine.engine import LocalEngine
from service.engine.messages import ModelInfo
from service.settings import load_settings
from service.single_process import SingleProcess, log_address, run_single_process
from tests.launcher import free_port, listens, until
from tests.service.fakes import PATIENCE, FakePredictor, model_info, png


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the modules of all tests exempt from the collections of a start, each half a second."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "vitserve")
    return caplog


def test_the_hint_shows_a_safe_command(hint: pytest.LogCaptureFixture) -> None:
    log_address(
        load_settings({"api_keys": "web:secret", "host": "::1"}),
        9000,
        path="/embed",
    )
    assert (
        """curl -H "Authorization: Bearer $VIT_API_KEY" -F file=@photo.jpg 'http://[::1]:9000/embed'"""
        in hint.text
    )
    assert "secret" not in hint.text
    Path("examples").mkdir()
    Path("examples/dog.jpg").touch()
    log_address(load_settings(), 8000)
    assert "curl -F file=@examples/dog.jpg 'http://127.0.0.1:8000/classify'" in hint.text


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("::1", "[::1]:8000"),
        ("2001:db8::7", "[2001:db8::7]:8000"),
        ("localhost", "localhost:8000"),
        ("::", "127.0.0.1:8000 here, port 8000 for others"),
        (
            "0.0.0.0",
            "127.0.0.1:8000 here, port 8000 for others",
        ),  # in a container, too, whichever port is published
    ],
)
def test_log_names_an_address_for_browsers(
    host: str, address: str, hint: pytest.LogCaptureFixture
) -> None:
    log_address(load_settings({"host": host}), 8000)
    assert f"ready: http://{address} (API: http://{address.partition(' ')[0]}/docs)" in hint.text


@pytest.mark.parametrize(
    ("host", "lines"),
    [
        (
            "127.0.0.1,10.0.0.7,unix:/run/a",
            ["ready: http://127.0.0.1:8000, http://10.0.0.7:8000, unix:/run/a (API: "],
        ),
        (
            "unix:/run/a",
            [
                "ready: unix:/run/a (API: ",
                "curl --unix-socket /run/a -F",
                "'http://localhost/classify'",
            ],
        ),
    ],
)
def test_the_hint_names_every_address(
    host: str, lines: list[str], hint: pytest.LogCaptureFixture
) -> None:
    log_address(load_settings({"host": host}), 8000)
    assert [line for line in lines if line not in hint.text] == []


def test_endless_batch_ends_the_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backbones, "LocalEngine", partial(LocalEngine, batch_seconds=0.2))
    predictor = FakePredictor()
    port = free_port()
    predictor.gate.clear()
    settings = load_settings({"port": port, "drain_delay": 10, "drain_timeout": 10})

    def ask() -> httpx.Response:
        until(lambda: "ready:" in caplog.text)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE, verify=False
        ) as own:
            assert own.get("/readyz").status_code == 200
            return own.post("/classify", content=png(1))

    def end_server(asked: Future[httpx.Response]) -> None:
        if asked.exception() is not None:  # no batch ends the server
            predictor.gate.set()
            os.kill(os.getpid(), signal.SIGTERM)

    caplog.set_level(logging.INFO, "vitserve")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        answer.add_done_callback(end_server)
        assert run_single_process(settings, lambda *_: (predictor, model_info())) == 1
        refused = answer.result(PATIENCE)
    predictor.gate.set()
    assert refused.status_code == 503
    assert refused.json()["detail"] == "a batch computed for more than 0.2 s: the device hangs"
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == [
        "CRITICAL"
    ]


def test_it_can_be_stopped_while_it_loads(hint: pytest.LogCaptureFixture) -> None:
    port = free_port()

    def load(*_: object) -> tuple[FakePredictor, ModelInfo]:
        until(lambda: listens(port))
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: not listens(port))
        return FakePredictor(), model_info()

    assert run_single_process(load_settings({"port": port, "drain_delay": 0}), load) == 0
    assert "Exception in callback" not in hint.text


BARE = model_info(labels=())
TEXTS = model_info(
    labels=(), zero_shot=ZeroShot(scale=1.0, bias=0.0, independent=False, templates=("{}",))
)


@pytest.mark.parametrize(
    ("info", "path"),
    [(model_info(), "classify"), (BARE, "embed"), (TEXTS, "classify?labels=cat,dog")],
)
def test_each_loaded_model_is_logged(
    info: ModelInfo, path: str, hint: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    process = SingleProcess(
        load_settings({"port": port, "drain_delay": 0}), lambda *_: (FakePredictor(), info)
    )

    def follow() -> None:
        until(lambda: "ready:" in hint.text)
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: hint.text.count("fake from nowhere") == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        process.server.run()
        following.result(PATIENCE)
    signal.signal(signal.SIGHUP, before)
    assert process.lifecycle.exit_code == 0
    assert hint.text.count(f"-F file=@photo.jpg 'http://127.0.0.1:{port}/{path}'") == 1
