"""The GPU benchmark's script, in tiny form on the CPU: what it records, and that it goes on after a failure."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import checkpoints, gpu, gpu_engine, gpu_stages, loadgen, pictures
from benchmarks.record import Record
from benchmarks.servers import OURS
from model.checkpoint import load_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints and pictures are made here."""
    for module in (checkpoints, pictures):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(pictures, "_photographs", lambda folder: [])
    monkeypatch.setattr(pictures, "COUNT", 2)
    return tmp_path


def smoke(out: Path, stages: str, *more: str) -> dict[str, Any]:
    assert gpu.main(["--device", "cpu", "--smoke", "--only", stages, "--out", str(out), *more]) == 0
    found: dict[str, Any] = json.loads((out / "gpu-cpu-smoke.json").read_text())
    assert found["errors"] == {}
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no CUDA device" in error
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_stage_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "engine,htpp"])
    assert "htpp: stages are sweep, engine, http, latency, start" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_stage_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", dtype="float32", about={})
    ran = []

    def bad() -> None:
        raise RuntimeError("CUDA out of memory")

    assert gpu.run_stages([("first", bad), ("second", lambda: ran.append(2))], record) == ["first"]
    assert ran == [2]
    assert json.loads(record.path.read_text())["errors"] == {"first": "RuntimeError: CUDA out of memory"}

    assert gpu.run_stages([("first", lambda: None)], record) == []
    assert json.loads(record.path.read_text())["errors"] == {}


@pytest.mark.timeout(180)
def test_the_engine_is_compared_with_the_reference_at_the_best_batch_sizes(cache: Path) -> None:
    found = smoke(cache / "out", "sweep,engine")
    sweep, engine = found["sweep"], found["engine"]
    for side, name in (("ours", "ours, off"), ("reference", "reference")):
        assert set(sweep[name]) == {"2", "4"}
        assert str(engine[side]["batch"]) == max(sweep[name], key=sweep[name].get)
    assert engine["ratio"] == pytest.approx(engine["ours_rate"] / engine["reference_rate"], abs=0.01)
    assert engine["equal_top1"] == 1
    marks = [mark for name, mark in found["marks"].items() if name.startswith("engine /")]
    assert marks == [{"wanted": 1.25, "found": engine["ratio"], "reached": engine["ratio"] >= 1.25}]
    assert found["gpu"] == {"name": "cpu"}

    again = smoke(cache / "out", "sweep")
    assert again["sweep"] == sweep, "what is recorded is not measured again"
    assert again["engine"] == engine


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_servers_are_measured_against_decoding_and_the_engine(cache: Path) -> None:
    found = smoke(cache / "out", "http,latency,start", "--seconds", "0.7")
    http = found["http"]
    assert http["share"] == pytest.approx(http["rate"] / min(http["decode_rate"], http["engine_rate"]), abs=0.01)
    assert http["rounds"][0]["http"]["refused"] == http["rounds"][0]["http"]["broken"] == 0
    assert http["rate"] > 0
    assert {"engine, batch 1", "reference, batch 1", "HTTP, one at a time", "HTTP, full", "HTTP, 50% load"} <= set(
        found["latency"]
    )
    assert found["start"]["cold_seconds"] > 0
    assert found["marks"]["seconds to ready, warm compile cache"]["found"] == found["start"]["warm_seconds"]


@pytest.mark.timeout(120)
def test_the_plain_reference_is_the_same_function_as_our_model(cache: Path) -> None:
    checkpoints.SHAPES.setdefault(gpu_stages.SMOKE.name, gpu_stages.SMOKE)
    checkpoint = load_checkpoint(str(checkpoints.ensure(gpu_stages.SMOKE.name)[0]))
    plain = gpu_engine.PlainViT(checkpoint.config)
    plain.load_state_dict(dict(checkpoint.tensors))
    pixels = torch.from_numpy(gpu_engine.random_pictures(checkpoint, 3)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(pixels), checkpoint.build()(pixels).logits, atol=1e-4, rtol=1e-4)
    assert np.ptp(gpu_engine.random_pictures(checkpoint, 1)) > 200


@pytest.mark.timeout(120)
@pytest.mark.parametrize("open_loop", [False, True])
def test_the_load_of_several_processes_is_added_up(open_loop: bool) -> None:
    seen: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                seen.append(head)
                await reader.readexactly(7)
                status = b"503 Service Unavailable" if len(seen) % 5 == 0 else b"200 OK"
                writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")
        except asyncio.IncompleteReadError:
            writer.close()

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        how: dict[str, Any] = {"rate": 100.0} if open_loop else {"connections": 3}
        found = loadgen.load(loadgen.Plan(url, OURS, [b"picture"], 0.4, **how), processes=2)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    assert found.broken == 0
    assert found.refused == len(seen) // 5 >= 1
    answered = round(found.rate * 0.4)
    # Of a closed loop, what is answered after the end does not count: one a connection at most.
    late = len(seen) - found.refused - answered
    assert 0 <= late <= (0 if open_loop else 3)
    assert 0 < found.p50 <= found.p99 <= found.max
