from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from model.zero_shot import ZeroShot
from service.http.lifecycle import Terminal
from service.http.watchdog import Watchdog
from service.settings import load_settings
from service.web import single_process
from service.web.single_process import log_address, run_single_process
from tests.launcher import free_port, until
from tests.service.fakes import PATIENCE, FakePredictor, model_info, on_a_loop, png
from tests.service.web.apps import Clock
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


def test_the_engine_is_made_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        """The engine has been made."""

    def make(load: object, *, on_batch: object, **options: object) -> None:
        raise Made(options)

    monkeypatch.setattr(single_process, "LocalEngine", make)
    wanted = {"device": "cpu", "queue_size": 9, "max_delay_ms": 5, "batch_timeout": 7}
    with pytest.raises(Made) as made:
        run_single_process(load_settings(wanted), lambda _: (FakePredictor(), model_info()))
    asked = {"device": "cpu", "queue_size": 9, "max_delay": 0.005, "batch_timeout": 7}
    options = made.value.args[0]
    assert options.pop("load_timeout") is None  # the first checkpoint may take any time
    assert options.pop("on_queue") is None  # nobody counts what waits
    assert options == asked


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
        should_exit, started, port = False, True, 8000

        def __init__(self, changed: Any, settings: object, lifecycle: Any, watch: object, hung_up: Any) -> None:
            self._changed, self._lifecycle, self._hung_up = changed, lifecycle, hung_up

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
            terminal.was_closed = lambda: True
            assert self._hung_up() is False
            self._lifecycle.exit_code = 7

    parts = {"LocalSwap": lambda make, on_retired: swap, "create_app": make_app, "Server": Server}
    parts |= {"Terminal": lambda: terminal, "freeze_objects": lambda: None}
    parts |= {"trim_regularly": lambda: done.append("trimming")}
    for name, part in parts.items():
        monkeypatch.setattr(single_process, name, part)
    assert run_single_process(load_settings(), lambda _: (FakePredictor(), model_info())) == 7
    trim, loading, first, second, closed, *rest = done
    assert (trim, loading, closed, rest) == ("trimming", [], [], [1, "reload"])
    assert (len(first), len(second)) == (2, 1), "where it is ready is said once"


def test_a_loop_that_is_held_up_for_seconds_ends_no_service_however_little_time_a_batch_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, ended, looks = Clock(), list[int](), list[list[int]]()

    class Server:
        def __init__(self, app: object, settings: object, lifecycle: object, watch: Any, hung_up: object) -> None:
            self._watchdog: Watchdog = watch.__self__

        def run(self) -> None:
            for seconds in (29, 1):
                for _ in range(seconds):
                    clock.now += 1
                    self._watchdog.look()
                looks.append(list(ended))

    monkeypatch.setattr(single_process, "Watchdog", partial(Watchdog, clock=clock, end=ended.append))
    monkeypatch.setattr(single_process, "Server", Server)
    monkeypatch.setattr(single_process, "trim_regularly", lambda: None)
    run_single_process(load_settings({"batch_timeout": 0.2}), lambda _: (FakePredictor(), model_info()))
    assert looks == [[], [1]]


@on_a_loop
async def test_a_model_that_is_ready_before_the_listener_is_announced_soon_after_it(
    hint: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later: list[tuple[Any, ...]] = []
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda *call: later.append(call))
    monkeypatch.setattr(single_process, "freeze_objects", lambda: None)
    server: Any = SimpleNamespace(should_exit=False, started=False, port=8000)
    engine: Any = FakeEngine()
    single_process._announce(engine, load_settings(), server)
    assert hint.messages == []
    [(seconds, again, *arguments)] = later
    assert seconds == 0.05
    server.started = True
    again(*arguments)
    assert any(message.startswith("ready: http://") for message in hint.messages)
    hint.clear()
    server.should_exit = True
    again(*arguments)
    assert hint.messages == []


@on_a_loop
async def test_the_hint_is_a_request_that_a_model_without_labels_answers(
    hint: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_process, "freeze_objects", lambda: None)
    server: Any = SimpleNamespace(should_exit=False, started=True, port=8000)
    bare = model_info(labels=())
    texts = model_info(labels=(), zero_shot=ZeroShot(scale=1.0, bias=0.0, independent=False, templates=("{}",)))
    for info, path in ((model_info(), "classify"), (bare, "embed"), (texts, "classify?labels=cat,dog")):
        hint.clear()
        engine: Any = FakeEngine(info)
        single_process._announce(engine, load_settings(), server)
        assert f"-F file=@photo.jpg 'http://127.0.0.1:8000/{path}'" in hint.text


def test_a_batch_that_never_ends_is_503_for_its_caller_and_ends_the_service_with_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    predictor, port = FakePredictor(), free_port()
    predictor.gate.clear()
    settings = load_settings({"port": port, "batch_timeout": 0.2, "drain_delay": 600, "drain_timeout": 600})

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
