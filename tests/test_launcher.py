"""What a failed test shows of the processes that it started."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.launcher import ServerProcess, VitserveProcess, forget_ended, recent_logs, run_vitserve

pytestmark = pytest.mark.timeout(120)  # processes start, each of which imports torch


def test_the_log_of_a_process_is_shown_until_it_has_ended_and_is_forgotten(tmp_path: Path) -> None:
    forget_ended()
    before = recent_logs()
    with VitserveProcess(tmp_path / "log", "--version") as process:
        assert process.process.wait(60) == 0
    assert process.log.startswith("vitserve ")
    assert recent_logs() == [*before, ("vitserve --version", process.log)]
    forget_ended()
    assert recent_logs() == before


def test_a_server_that_does_not_start_fails_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with 1:.*VIT_MAX_BATCH='0'"):
        ServerProcess(tmp_path / "log", max_batch=0)


def test_settings_of_the_tests_own_environment_do_not_reach_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIT_MAX_BATCH", "0")
    done = run_vitserve("serve", port="http")
    assert done.returncode == 1
    assert done.stderr.startswith("vitserve: VIT_PORT='http': ")


def test_a_warm_process_has_the_output_settings_and_exit_code_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "log", warm=True, model_name="warm") as server:
        assert httpx.get(f"{server.url}/model").json()["name"] == "warm"
        assert server.process.poll() is None
        assert "tests.template" in Path(f"/proc/{server.process.pid}/cmdline").read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.01)
        assert server.terminate() == server.process.returncode == 0
    with VitserveProcess(tmp_path / "killed", "serve", warm=True, port=0) as process:
        pass
    assert process.process.returncode == -signal.SIGKILL
    with pytest.raises(AssertionError, match=r"(?s)ended with 1:.*VIT_MAX_BATCH='0'"):
        ServerProcess(tmp_path / "wrong", warm=True, max_batch=0)


def test_a_process_that_python_is_to_start_otherwise_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.exit('started anew')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with VitserveProcess(tmp_path / "log", "--version", warm=True) as process:
        assert process.process.wait(60) != 0
    assert "started anew" in process.log
