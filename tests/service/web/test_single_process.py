from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from model.zero_shot import ZeroShot
from service.engine.local import LocalEngine
from service.lifecycle import Terminal
from service.settings import load_settings
from service.web import single_process
from service.web.single_process import log_address, run_single_process
from tests.launcher import free_port, until
from tests.service.fakes import PATIENCE, FakePredictor, model_info, on_a_loop, png
from tests.service.web.fake_engine import FakeEngine


@pytest.fixture
def hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "vitserve")
    return caplog


def test_the_hint_names_the_example_where_there_is_one(hint: pytest.LogCaptureFixture) -> None:
    Path("examples").mkdir()
    Path("examples/dog.jpg").touch()
    log_address(load_settings(), 8000)
    assert "curl -F file=@examples/dog.jpg 'http://127.0.0.1:8000/classify'" in hint.text


def test_the_hint_names_the_callers_own_picture_where_no_examples_are(hint: pytest.LogCaptureFixture) -> None:
    log_address(load_settings({"host": "::"}), 9000, container_marks=())
    assert "curl -F file=@photo.jpg 'http://127.0.0.1:9000/classify'" in hint.text


def test_the_hint_brings_a_key_where_one_is_needed_and_does_not_show_it(hint: pytest.LogCaptureFixture) -> None:
    log_address(load_settings({"api_keys": "web:secret"}), 9000)
    curl = """curl -H "Authorization: Bearer $VIT_API_KEY" -F file=@photo.jpg 'http://127.0.0.1:9000/classify'"""
    assert curl in hint.text
    assert "secret" not in hint.text


@pytest.mark.parametrize(
    ("host", "address"),
    [("::1", "[::1]"), ("2001:db8::7", "[2001:db8::7]"), ("localhost", "localhost"), ("0.0.0.0", "127.0.0.1")],
)
def test_the_hint_names_an_address_that_a_browser_can_open(
    host: str, address: str, hint: pytest.LogCaptureFixture
) -> None:
    log_address(load_settings({"host": host}), 8000, container_marks=())
    assert f"ready: http://{address}:8000 (API: http://{address}:8000/docs)" in hint.text


def test_the_port_of_grpc_is_named_where_it_is_served(hint: pytest.LogCaptureFixture) -> None:
    log_address(load_settings(), 8000)
    assert "gRPC" not in hint.text
    log_address(load_settings({"host": "::1", "grpc_port": 9001}), 8000)
    assert "gRPC: [::1]:9001" in hint.text
    log_address(load_settings({"host": "0.0.0.0", "grpc_port": 9002}), 8000, container_marks=())
    assert "gRPC: 127.0.0.1:9002" in hint.text


def test_in_a_container_the_hint_names_no_address_as_none_is_known(
    hint: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    mark = tmp_path / ".dockerenv"
    mark.touch()
    log_address(load_settings({"host": "0.0.0.0", "grpc_port": 8001}), 8000, container_marks=[str(mark)])
    assert "gRPC: port 8001 of this container" in hint.text
    assert "ready: port 8000 of this container (API: /docs)" in hint.text
    assert "127.0.0.1" not in hint.text
    log_address(load_settings({"host": "10.0.0.7"}), 8000, container_marks=[str(mark)])
    assert "ready: http://10.0.0.7:8000" in hint.text


def test_a_model_is_announced_once_each_next_one_is_logged_and_a_failed_engine_ends_the_service(
    hint: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    engine: Any = FakeEngine(model_info(name="first"))
    swap = SimpleNamespace(current=SimpleNamespace(engine=engine), reload=lambda: done.append("reload"))
    terminal: Any = Terminal(())

    def make_app(
        settings: object, served: object, metrics: object, lifecycle: object, changed: Any, **more: Any
    ) -> Any:
        assert (served, more) == (swap, {})
        return changed

    class Server:
        is_listening, port = True, 8000

        def __init__(self, changed: Any, settings: object, lifecycle: Any, on_hang_up: Any) -> None:
            self._changed, self._lifecycle, self._hung_up = changed, lifecycle, on_hang_up

        def stop(self, *, exit_code: int) -> None:
            done.append(exit_code)

        def run(self) -> None:
            for state, name in (("loading", ""), ("ready", "first"), ("ready", "second"), ("closed", "second")):
                engine.state, engine.info = state, model_info(name=name) if name else None
                self._changed()
                done.append([message for message in hint.messages if "ready" in message or (name and name in message)])
                hint.clear()
            engine.state = "failed"
            self._changed()
            assert self._hung_up()
            self._lifecycle.exit_code = 7

    parts = {"LocalModel": lambda make, on_retired: swap, "create_app": make_app, "Server": Server}
    parts |= {"Terminal": lambda: terminal, "freeze_objects": lambda: None}
    parts |= {"trim_regularly": lambda: done.append("trimming")}
    for name, part in parts.items():
        monkeypatch.setattr(single_process, name, part)
    assert run_single_process(load_settings(), lambda _: (FakePredictor(), model_info())) == 7
    trim, loading, first, second, closed, *rest = done
    assert (trim, loading, closed, rest) == ("trimming", [], [], [1, "reload"])
    assert (len(first), len(second)) == (2, 1), "where it is ready is said once"


@on_a_loop
async def test_a_model_that_is_ready_before_the_listener_is_announced_soon_after_it(
    hint: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[tuple[Any, ...]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *call: later.append(call))
    monkeypatch.setattr(single_process, "freeze_objects", lambda: None)
    server: Any = SimpleNamespace(is_listening=False, port=8000)
    engine: Any = FakeEngine()
    single_process._announce(engine, load_settings(), server)
    assert hint.messages == []
    [(seconds, again, *arguments)] = later
    assert seconds == 0.05
    server.is_listening = True
    again(*arguments)
    assert any(message.startswith("ready: http://") for message in hint.messages)


@on_a_loop
async def test_the_hint_is_a_request_that_a_model_without_labels_answers(
    hint: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_process, "freeze_objects", lambda: None)
    server: Any = SimpleNamespace(is_listening=True, port=8000)
    bare = model_info(labels=())
    texts = model_info(labels=(), zero_shot=ZeroShot(scale=1.0, bias=0.0, independent=False, templates=("{}",)))
    for info, path in ((model_info(), "classify"), (bare, "embed"), (texts, "classify?labels=cat,dog")):
        hint.clear()
        engine: Any = FakeEngine(info)
        single_process._announce(engine, load_settings(), server)
        assert f"-F file=@photo.jpg 'http://127.0.0.1:8000/{path}'" in hint.text


def test_a_batch_that_never_ends_is_503_for_its_caller_and_ends_the_service_with_one(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def engine_of(settings: object, load: Any, on_batch: Any) -> LocalEngine:
        own: dict[str, Any] = {"device": "cpu", "queue_size": 4, "max_delay": 0, "batch_seconds": 0.2}
        return LocalEngine(lambda: load(settings), on_batch=on_batch, **own)

    monkeypatch.setattr(single_process, "engine_of", engine_of)
    predictor, port = FakePredictor(), free_port()
    predictor.gate.clear()
    settings = load_settings({"port": port, "drain_delay": 600, "drain_timeout": 600})

    def ask() -> httpx.Response:
        until(lambda: "ready:" in caplog.text)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE, verify=False) as own:
            assert own.get("/readyz").status_code == 200
            return own.post("/classify", content=png(1))

    caplog.set_level(logging.INFO, "vitserve")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask)
        assert run_single_process(settings, lambda _: (predictor, model_info())) == 1
        refused = answer.result(PATIENCE)
    predictor.gate.set()
    assert refused.status_code == 503
    assert refused.json()["detail"] == "a batch computed for more than 0.2 s: the device hangs"
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == ["CRITICAL"]
