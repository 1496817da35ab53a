"""The GPU benchmark's script, in tiny form on the CPU: what it records, and that it goes on after a failure."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import (
    checkpoints,
    gpu,
    gpu_bench,
    gpu_engine,
    gpu_machine,
    gpu_reference,
    gpu_servers,
    gpu_stages,
    loadgen,
    pictures,
)
from benchmarks.record import Record
from benchmarks.servers import OURS, Config, Running, Server, running
from model.checkpoint import load_checkpoint
from model.runtime import torch_backend
from service.settings import ENV_PREFIX, Settings


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints and pictures are made here."""
    for module in (checkpoints, pictures):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(pictures, "_photographs", lambda folder: [])
    monkeypatch.setattr(pictures, "COUNT", 2)
    return tmp_path


def smoke(out: Path, steps: str, *more: str) -> dict[str, Any]:
    command = ["--device", "cpu", "--smoke", "--reference", "plain", "--only", steps, "--out", str(out), *more]
    assert gpu.main(command) == 0
    found: dict[str, Any] = json.loads((out / "gpu-cpu-smoke.json").read_text())
    assert found["errors"] == {}
    assert set(steps.split(",")) <= set(found["step_seconds"])
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "device 'cuda:0'" in error
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_step_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "engine,htpp"])
    steps = "versions, tests, sweep, profile, engine, start, latency, http, mixed, float8, faults"
    assert f"htpp: steps are {steps}" in capsys.readouterr().err


def test_a_step_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", dtype="float32", about={})
    ran = []

    def bad() -> None:
        raise RuntimeError("CUDA out of memory")

    assert gpu.run_steps([("first", bad), ("second", lambda: ran.append(2))], record) == ["first"]
    assert ran == [2]
    assert json.loads(record.path.read_text())["errors"] == {"first": "RuntimeError: CUDA out of memory"}

    assert gpu.run_steps([("first", lambda: None)], record) == []
    assert json.loads(record.path.read_text())["errors"] == {}


def test_no_step_begins_when_the_time_is_up_and_the_next_run_begins_with_it(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", dtype="float32", about={})
    times = iter([0, 0, 500, 501, 541, 542])
    ran: list[str] = []
    steps = [(name, partial(ran.append, name)) for name in ("sweep", "engine", "http")]
    assert gpu.run_steps(steps, record, seconds=540, clock=lambda: next(times)) == []
    assert ran == ["sweep", "engine"]
    assert record.section("step_seconds") == {"sweep": 500, "engine": 40}


def test_what_is_done_is_left_out_and_what_failed_is_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in gpu.STEPS:
        monkeypatch.setitem(gpu.STEPS, name, partial(lambda name, bench: ran.append(name), name))
    monkeypatch.setitem(gpu.STEPS, "http", lambda bench: 1 / 0)
    command = ["--device", "cpu", "--smoke", "--out", str(cache)]
    assert gpu.main(command) == 1
    assert ran == [name for name in gpu.STEPS if name != "http"]
    ran.clear()
    monkeypatch.setitem(gpu.STEPS, "http", lambda bench: ran.append("http"))
    assert gpu.main(command) == 0
    assert ran == ["http"]
    assert gpu.main([*command, "--only", "profile"]) == 0
    assert ran == ["http", "profile"]


def test_float8_is_measured_beside_the_other_dtype_where_it_is_computed(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.runtime.predictor.choose_dtype", lambda name, device: torch.bfloat16)
    found = smoke(cache / "out", "float8", "--seconds", "0.1")
    rates = found["float8"]
    assert rates["ratio"] == pytest.approx(rates["float8"] / rates["float32"], abs=0.001)
    assert rates["agreement"].startswith("bfloat16's best class on ")
    assert set(found["engine_start"]) == {"off, batches 2", "float8 off, batches 2"}


@pytest.mark.timeout(180)
def test_the_engine_is_compared_with_the_reference_at_the_best_batch_sizes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_stages, "TESTS", ["-c", "print('7 passed')"])
    found = smoke(cache / "out", "versions,tests,sweep,profile,engine,float8,mixed", "--seconds", "0.1")
    sweep, engine = found["sweep"], found["engine"]
    for side, name in (("ours", "ours, off"), ("reference", "reference")):
        assert set(sweep[name]) == {"2", "4"}
        assert str(engine[side]["batch"]) == max(sweep[name], key=sweep[name].get)
    assert engine["ratio"] == pytest.approx(engine["ours_rate"] / engine["reference_rate"], abs=0.01)
    assert engine["with_maps"] == pytest.approx(engine["rounds"][0]["maps"] / engine["ours_rate"], abs=0.01)
    assert engine["equal_top1"] == 1
    assert engine["exact"]["equal_top1"] == 1
    assert engine["exact"]["logit_difference"] < 1e-3
    assert found["mixed"]["off"]["rate"] > 0
    assert found["mixed"]["off"]["padding"] == 0  # nothing is compiled, so nothing is padded
    assert found["float8"].pop("float32") > 0
    assert found["float8"] == {"refused": "dtype 'float8': it needs a GPU of compute capability 8.9 or later, not cpu"}
    assert set(found["engine_start"]) == {"off, batches 2, 4", "off, batches of a service"}, "one start serves most"
    marks = {name: mark for name, mark in found["marks"].items() if name.startswith("engine / plain ViT")}
    assert [mark["wanted"] for mark in marks.values()] == [1.15, 1.25]
    assert {mark["found"] for mark in marks.values()} == {engine["ratio"]}
    assert found["marks"]["same class as float32 on the CPU, where it is sure"]["reached"]
    assert found["gpu"] == {"name": "cpu"}
    assert found["tests"]["plain"] == {"exit": 0, "output": "7 passed\n"}
    for side in ("ours", "reference"):
        shares = found["profile"][f"{side}, batch 2"]["shares"]
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
        assert shares["products"] > 0

    monkeypatch.setattr(gpu_stages, "TESTS", ["-c", "import sys; sys.exit('1 failed')"])
    again = ["--device", "cpu", "--smoke", "--only", "tests,sweep", "--out", str(cache / "out")]
    assert gpu.main(again) == 1, "tests that fail are told"
    after = json.loads((cache / "out" / "gpu-cpu-smoke.json").read_text())
    assert "tests failed (plain)" in after["errors"]["tests"]
    assert after["sweep"] == sweep, "what is recorded is not measured again"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_servers_are_measured_against_decoding_and_the_engine_and_lose_their_engine(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[Config] = []
    with ExitStack() as stack:

        @contextmanager
        def running_once(server: Server, model: Path, config: Config, **how: Any) -> Iterator[Running]:
            """Start the first one, and take it for the others: what differs is their settings."""
            if not configs:
                started.append(stack.enter_context(running(server, model, config, **how)))
            configs.append(config)
            yield started[0]

        started: list[Running] = []
        monkeypatch.setattr(gpu_servers, "running", running_once)
        monkeypatch.setattr(
            gpu_bench.Bench, "reference", lambda bench: SimpleNamespace(call=lambda *_: {"p50_ms": 1.0})
        )
        monkeypatch.setattr(gpu_servers, "_FILL", "import sys; print(0, flush=True); sys.stdin.read()")
        found = smoke(cache / "out", "http,latency,start,faults", "--seconds", "0.5", "--settings", "VIT_STREAMS=1")
    assert [config["VIT_WORKERS"] for config in configs] == ["2", "2", "1", "1", "2"]
    assert {config["VIT_STREAMS"] for config in configs} == {"1"}
    assert {name for config in configs for name in config if name.startswith("VIT_")} <= known_variables()
    caches = [config["TORCHINDUCTOR_CACHE_DIR"] for config in configs[2:4]]
    assert caches[0] == caches[1]

    http = found["http"]
    assert http["share"] == pytest.approx(http["rate"] / min(http["decode_rate"], http["engine_rate"]), abs=0.01)
    assert http["rounds"][0]["http"]["refused"] == http["rounds"][0]["http"]["broken"] == 0
    assert http["rate"] > 0
    assert {"engine, batch 1", "reference, batch 1", "HTTP, one at a time", "HTTP, full", "HTTP, 50% load"} <= set(
        found["latency"]
    )
    assert 0 < found["start"]["cold_seconds"] <= found["start"]["cold_seconds_compiled"]
    assert found["marks"]["seconds to ready, warm compile cache"]["found"] == found["start"]["warm_seconds"]
    faults = found["faults"]
    assert faults["seconds to an answer after kill -9 of the engine"] > 0
    assert 'vit_engine_restarts_total{device="cpu"} 1.0' in faults["metrics"]
    assert faults["MiB taken by a second process"] == 0
    assert faults["HTTP while the memory is full"]["rate"] > 0


def known_variables() -> set[str]:
    return {f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields}


@pytest.mark.timeout(120)
def test_the_reference_answers_from_its_process_and_tells_what_fails(cache: Path) -> None:
    checkpoints.SHAPES.setdefault(gpu_bench.SMOKE.name, gpu_bench.SMOKE)
    folder = str(checkpoints.ensure(gpu_bench.SMOKE.name)[0])
    ours, theirs = multiprocessing.Pipe()
    options = {"device": "cpu", "dtype": "float32", "mode": None, "library": "plain"}
    thread = threading.Thread(target=gpu_reference._serve, args=(theirs, folder, options))
    thread.start()
    assert ours.recv() == (True, "plain ViT (scaled_dot_product_attention)")
    pictures = gpu_engine.random_pictures(load_checkpoint(folder), 4)
    for batch, same in ((2, True), (4, True)):
        ours.send(("top1", (pictures, batch)))
        done, classes = ours.recv()
        assert (done, len(classes)) == (same, 4)
    ours.send(("top1", (pictures[:, :5], 4)))
    done, words = ours.recv()
    assert not done
    assert words.startswith("RuntimeError: ")
    ours.close()
    thread.join()

    ours, theirs = multiprocessing.Pipe()
    gpu_reference._serve(theirs, str(cache / "none"), options)
    done, words = ours.recv()
    assert not done
    assert "no such folder or file" in words


def test_kernels_are_sorted_by_what_they_are_for() -> None:
    times = {
        "void pytorch_flash::flash_fwd_kernel<...>": 20.0,
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN": 30.0,
        "sm90_xmma_gemm_bf16bf16_gelu_epilogue": 10.0,
        "triton_poi_fused_addmm_gelu_3": 8.0,
        "triton_per_fused_add_native_layer_norm_2": 6.0,
        "Memcpy DtoH (Device -> Pinned)": 4.0,
        "gatherTopK": 2.0,
        "vectorized_elementwise_kernel": 20.0,
    }
    found = gpu_machine.shares(times)
    wanted = [("attention", 0.2), ("GELU", 0.08), ("products", 0.4), ("normalisation", 0.06), ("scores", 0.02)]
    assert found["shares"] == dict(wanted) | {"copies": 0.04, "other": 0.2}
    assert next(iter(found["largest"])).startswith("nvjet")
    with pytest.raises(RuntimeError, match="the profile holds no kernel"):
        gpu_machine.shares({})


def test_the_machine_is_watched_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *--id=GPU-1*) echo "2000, 1755, 700.5, 65";; *) echo "GPU 0";; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with gpu_machine.meter("GPU-1") as state:
        pass
    assert state["readings"] >= 1
    assert (state["peak_memory_mib"], state["power_watts_mean"]) == (2000, 700.5)
    assert gpu_machine.listing() == "GPU 0\n"
    for gpu_id in (None, "GPU-2"):
        with gpu_machine.meter(gpu_id) as nothing:
            pass
        assert nothing == {}

    assert gpu_machine._summary(["1000, 1980, 650.5, 60", "2000, 1755, 700.5, 65", "[N/A], 1, 2, 3", "17"]) == {
        "peak_memory_mib": 2000,
        "clock_mhz_lowest": 1755,
        "clock_mhz_highest": 1980,
        "power_watts_mean": 675.5,
        "power_watts_peak": 700.5,
        "temperature_peak": 65,
        "readings": 2,
    }


@pytest.mark.parametrize("message", ["compiled", "captured"])
def test_seconds_of_the_compiler_and_of_captures_are_read_from_the_log(message: str) -> None:
    with gpu_engine._logged_seconds() as parts:
        torch_backend.logger.info("%s for batches of %s in %.0f s", message, "1, 64", 12.345)
        torch_backend.logger.info("something else")
    assert parts == {message: 12.35}
    torch_backend.logger.info("%s for batches of %s in %.0f s", message, "1, 64", 1.0)
    assert parts == {message: 12.35}


@pytest.mark.timeout(120)
def test_the_plain_reference_is_the_same_function_as_our_model(cache: Path) -> None:
    checkpoints.SHAPES.setdefault(gpu_bench.SMOKE.name, gpu_bench.SMOKE)
    checkpoint = load_checkpoint(str(checkpoints.ensure(gpu_bench.SMOKE.name)[0]))
    plain = gpu_reference.PlainViT(checkpoint.config)
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
