"""The GPU benchmark's script, in tiny form on the CPU: what it records, and that it goes on after a failure."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
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
    gpu_engine_process,
    gpu_machine,
    gpu_reference,
    gpu_stages,
    loadgen,
    pictures,
)
from benchmarks.record import Record
from benchmarks.servers import OURS
from model.checkpoint import load_checkpoint
from model.runtime import torch_backend
from model.runtime.predictor import Predictor
from tests import timm_reference
from tests.conftest import REPOSITORY
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.test_predictor import make_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints and pictures are made here."""
    for module in (checkpoints, pictures):
        monkeypatch.setattr(module, "CACHE", tmp_path)
    monkeypatch.setattr(pictures, "_photographs", lambda folder: [])
    monkeypatch.setattr(pictures, "COUNT", 2)
    return tmp_path


SMOKE = ["--device", "cpu", "--smoke"]


def ended(record: Record, codes: dict[str, int | None], seen: dict[str, float]) -> gpu.RunStep:
    """A stand-in for a step's process: it writes a figure, and ends with its code."""

    def run(name: str, seconds: float) -> int | None:
        seen[name] = seconds
        other = Record(record.path, dtype="float32", about={})
        other.section("figures")[name] = 1
        other.save()
        return codes.get(name, 0)

    return run


def test_the_script_needs_only_python_until_its_first_step() -> None:
    """Whatever else is missing is found within a step, and recorded."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.gpu"
    # -S: what is installed is not there to be imported
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(REPOSITORY)], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_it_says_so_and_runs_no_further_step(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITSERVE_BENCHMARK_CACHE", str(tmp_path / "cache"))
    assert gpu.main(["--out", str(tmp_path)]) == 2
    told = capfd.readouterr()
    assert "versions: device 'cuda:0': no CUDA device can be used" in told.err
    assert "== smoke" not in told.out
    assert set(json.loads((tmp_path / "gpu.json").read_text())["errors"]) == {"versions"}


def test_steps_are_named_one_by_one_or_with_commas_and_an_unknown_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.parse(["--only", "http", "sweep,engine"]).only == ["sweep", "engine", "http"]
    with pytest.raises(SystemExit):
        gpu.parse(["--only", "engine,htpp"])
    steps = "versions, smoke, sweep, engine, http, decode, profile, attention, latency, mixed, start, faults"
    assert f"htpp: steps are {steps}, tests" in capsys.readouterr().err


def test_a_quick_run_is_over_within_nine_minutes() -> None:
    assert gpu.parse(["--quick"]).limit == 540
    assert gpu.parse([]).limit is None
    assert gpu.parse(["--quick", "--limit", "300"]).limit == 300


def test_a_step_that_fails_hangs_or_dies_is_recorded_and_the_next_one_runs(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", dtype="float32", about={})
    seen: dict[str, float] = {}
    run = ended(record, {"smoke": 1, "sweep": None, "engine": -9}, seen)
    failed = gpu.run_steps(["smoke", "sweep", "engine", "http"], record, run)
    found = json.loads(record.path.read_text())
    assert failed == ["smoke", "sweep", "engine"]
    assert found["errors"] == {
        "smoke": "ended with code 1",
        "sweep": "stopped after 2000 s",
        "engine": "ended with code -9",
    }
    assert found["figures"] == dict.fromkeys(("smoke", "sweep", "engine", "http"), 1), "what a step wrote is kept"

    assert gpu.run_steps(["smoke"], record, ended(record, {}, seen)) == []
    assert set(json.loads(record.path.read_text())["errors"]) == {"sweep", "engine"}


def test_a_step_gets_the_seconds_that_remain_and_none_begins_when_the_time_is_up(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.json", dtype="float32", about={})
    times = iter([0, 0, 60, 60, 245, 245, 400, 400, 532, 532])
    seen: dict[str, float] = {}
    names = ["versions", "sweep", "engine", "http", "tests"]
    run = ended(record, {}, seen)
    assert gpu.run_steps(names, record, run, limit=540, clock=lambda: next(times)) == []
    assert seen == {"versions": 60, "sweep": 200, "engine": 200, "http": 140}
    assert record.section("step_seconds") == {"versions": 60, "sweep": 185, "engine": 155, "http": 132}


@pytest.mark.timeout(60)
def test_a_step_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "own = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"  # as servers are started
        "pathlib.Path(sys.argv[1]).write_text(str(own.pid))\n"
        "own.wait()\n"
    )
    file = tmp_path / "pid"
    command = [sys.executable, "-c", code, str(file)]
    assert gpu.run_in_child(command, dict(os.environ), "sweep", 3) is None
    left = Path(f"/proc/{file.read_text()}/stat")  # a zombie, where nobody takes care of orphans
    assert not left.exists() or left.read_text().rpartition(")")[2].split()[0] == "Z"
    assert gpu.run_in_child([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), "sweep", 60) == 3


def test_what_a_step_cannot_import_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", {"versions": gpu.Step("gpu_absent", 60)})
    arguments = gpu.parse([*SMOKE, "--out", str(tmp_path)])
    assert gpu.run_step(arguments, "versions", 0) == 1
    errors = json.loads((tmp_path / "gpu-smoke.json").read_text())["errors"]
    assert errors == {"versions": "ModuleNotFoundError: No module named 'benchmarks.gpu_absent'"}


def test_what_is_done_is_left_out_and_what_failed_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    codes = {"http": 1}

    def run(command: Any, environment: Any, name: str, seconds: float) -> int:
        ran.append(name)
        return codes.get(name, 0)

    monkeypatch.setattr(gpu, "run_in_child", run)
    command = [*SMOKE, "--out", str(tmp_path)]
    assert gpu.main(command) == 1
    assert ran == list(gpu.STEPS)
    ran.clear()
    codes.clear()
    assert gpu.main(command) == 0
    assert ran == ["http"]
    assert gpu.main([*command, "--only", "profile"]) == 0
    assert ran == ["http", "profile"]


def test_a_tree_that_cannot_be_written_has_its_checkpoints_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VITSERVE_BENCHMARK_CACHE", raising=False)
    assert "VITSERVE_BENCHMARK_CACHE" not in gpu.environment_of_steps(tmp_path / "none", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = gpu.environment_of_steps(tmp_path / "none", tmp_path)["VITSERVE_BENCHMARK_CACHE"]
    assert Path(found).is_relative_to(tempfile.gettempdir())


def test_a_service_takes_a_smaller_batch_that_is_nearly_as_fast(cache: Path) -> None:
    arguments = gpu.parse([*SMOKE, "--out", str(cache)])
    record = Record(cache / "record.json", dtype="float32", about={})
    bench = gpu_bench.Bench(record, arguments, 0)
    assert bench.best_of_ours() == ("off", 2), "the first that there is, without a sweep"
    record.section("sweep")["ours, off"] = {"57": 11_000.0, "64": 11_700.0, "128": 12_000.0, "256": 11_900.0}
    assert bench.best_of_ours() == ("off", 128)
    assert bench.best_of_ours(0.97) == ("off", 64)
    assert bench.gpu is None
    assert record.data["gpu"] == {"name": "cpu"}


def test_the_arithmetic_of_decoding_is_that_of_its_rate() -> None:
    assert gpu_stages.cores_for(5_800, 16) == {
        "milliseconds of a core a picture": 2.76,
        "cores' worth at 4000/s": 11.0,
        "cores' worth at 5000/s": 13.8,
    }


def test_the_fastest_attention_is_named_with_what_it_saves_of_a_batch() -> None:
    times = {"as torch chooses": 50.0, "CUDNN_ATTENTION": 90.0, "FLASH_ATTENTION": 100.0, "EFFICIENT_ATTENTION": 150.0}
    # 12 layers save 10 microseconds each, of 128 images at 12,000 a second: 10,667 microseconds.
    told = gpu_stages.attention_verdict(times, 128, 12_000)
    assert told == "CUDNN_ATTENTION is the fastest; beside FLASH_ATTENTION it saves 1.1% of a batch of 128"
    refused = times | {"FLASH_ATTENTION": "refused: no"}
    assert gpu_stages.attention_verdict(refused, 128, 12_000) == "flash attention does not run here"


@pytest.mark.timeout(60)
def test_resident_pictures_are_neither_uploaded_nor_answered() -> None:
    ops = StandInOps(strict=False)
    ours = gpu_engine.Ours(make_checkpoint(), device="cpu", dtype="float32", compile_mode="auto", batches=[4], ops=ops)
    before = ops.replays
    rate = ours.resident_rate(4, 0.05)
    downloads = [what for what, _ in ops.log].count("synchronize")
    assert rate is not None
    assert rate > 0
    assert ops.replays > before + 10
    more = ours.resident_rate(4, 0.05)
    assert more is not None
    assert [what for what, _ in ops.log].count("synchronize") == downloads + 1, "one batch finds the graph"


@pytest.mark.timeout(60)
def test_nothing_is_resident_without_a_graph() -> None:
    ours = gpu_engine.Ours(make_checkpoint(), device="cpu", dtype="float32", compile_mode="off", batches=[4])
    assert ours.resident_rate(4, 0.05) is None


@pytest.mark.timeout(60)
def test_the_exact_scores_are_computed_on_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = gpu_engine.Ours(make_checkpoint(), device="cpu", dtype="float32", compile_mode="off", batches=[4])
    torch.set_num_threads(1)  # as ours leaves it beside a GPU
    threads: list[int] = []
    original = Predictor.logits

    def logits(self: Predictor, images: Any) -> Any:
        threads.append(torch.get_num_threads())
        return original(self, images)

    monkeypatch.setattr(Predictor, "logits", logits)
    ours.agreement(gpu_engine.random_pictures(ours.checkpoint, 4))
    assert threads[0] == len(os.sched_getaffinity(0))


@pytest.mark.timeout(60)
def test_an_engine_process_that_does_not_start_is_told(tmp_path: Path) -> None:
    settings = {"VIT_CHECKPOINT": str(tmp_path / "none"), "VIT_DEVICE": "cpu"}
    with (
        gpu_engine_process.EngineProcess(settings, 2, lambda: 50) as process,
        pytest.raises(RuntimeError, match=r"the engine's process: a process ended: \(pid, code\) \(\d+, 1\)"),
    ):
        process.rate(0.1)


@pytest.mark.timeout(120)
def test_the_reference_answers_from_its_process_and_tells_what_fails(cache: Path) -> None:
    timm = timm_reference.timm()
    checkpoints.SHAPES.setdefault(gpu_bench.SMOKE.name, gpu_bench.SMOKE)
    folder = str(checkpoints.ensure(gpu_bench.SMOKE.name)[0])
    ours, theirs = multiprocessing.Pipe()
    options = {"device": "cpu", "dtype": "float32", "mode": None}
    thread = threading.Thread(target=gpu_reference._serve, args=(theirs, folder, options))
    thread.start()
    assert ours.recv() == (True, f"timm {timm.__version__}, uncompiled")
    pictures = gpu_engine.random_pictures(load_checkpoint(folder), 4)
    for batch, same in ((2, True), (4, True)):
        ours.send(("top1", (pictures, batch)))
        done, classes = ours.recv()
        assert (done, len(classes)) == (same, 4)
    ours.send(("top1", (pictures[:, :5], 4)))
    done, words = ours.recv()
    assert not done
    assert words == "AssertionError: Input height (5) doesn't match model (32)."
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


def test_what_a_kernel_takes_is_counted_once() -> None:
    def event(key: str, kind: str, cpu: float, device: float, note: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            key=key,
            device_type=SimpleNamespace(name=kind),
            self_cpu_time_total=cpu,
            self_device_time_total=device,
            is_user_annotation=note,
        )

    events = [
        event("aten::mm", "CPU", 12, 70),  # charged with the kernel that it launched
        event("nvjet_tst_192x192", "CUDA", 0, 70),
        event("triton_poi_fused_gelu_1", "CUDA", 0, 30),
        event("one batch", "CUDA", 0, 110, note=True),
        event("cudaLaunchKernel", "CPU", 5, 0),
    ]
    expected = {"nvjet_tst_192x192": 70, "triton_poi_fused_gelu_1": 30}
    assert gpu_machine.kernel_times(events, on_gpu=True) == expected
    assert gpu_machine.kernel_times(events, on_gpu=False) == {"aten::mm": 12, "cudaLaunchKernel": 5}


class Nvml:
    """NVIDIA's library, of one GPU that does not tell its power."""

    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.clocks = itertools.chain([1980, 1755], itertools.repeat(1800))

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=2000 << 20)

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return next(self.clocks)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        raise self.NVMLError("Not Supported")

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        return 65


def test_the_machine_is_watched_without_a_process_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(gpu_machine, "_EVERY", 0)
    monkeypatch.setattr(subprocess, "Popen", None)
    with gpu_machine.meter("GPU-1") as state:
        while next(nvml.clocks) != 1800:
            pass
    spans = state["least, mean, most"]
    assert state["readings"] >= 1
    assert spans["memory_mib"] == [2000, 2000, 2000]
    assert set(spans) == {"memory_mib", "clock_mhz", "temperature"}, "what the GPU does not tell is absent"
    with gpu_machine.meter("GPU-2") as unknown:
        pass
    assert unknown == {"unknown": "NVML: Not Found"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with gpu_machine.meter("GPU-1") as absent:
        pass
    assert "pynvml" in absent["unknown"]
    with gpu_machine.meter(None) as nothing:
        pass
    assert nothing == {}


def test_readings_are_told_as_their_span() -> None:
    readings = [{"clock_mhz": 1980.0}, {"clock_mhz": 1755.0, "power_watts": 700.5}]
    assert gpu_machine._summary(readings) == {
        "least, mean, most": {"clock_mhz": [1755, 1867.5, 1980], "power_watts": [700.5, 700.5, 700.5]},
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
def test_the_reference_is_the_same_function_as_our_model(cache: Path) -> None:
    timm_reference.timm()
    checkpoints.SHAPES.setdefault(gpu_bench.SMOKE.name, gpu_bench.SMOKE)
    checkpoint = load_checkpoint(str(checkpoints.ensure(gpu_bench.SMOKE.name)[0]))
    model, _ = gpu_reference.timm_model(checkpoint)
    pixels = torch.from_numpy(gpu_engine.random_pictures(checkpoint, 3)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(pixels), checkpoint.build()(pixels).logits, atol=1e-4, rtol=1e-4)
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
