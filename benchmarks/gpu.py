"""vitserve on a GPU: `python -m benchmarks.gpu`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    versions   the GPU, its driver, versions, and which code resizes pictures here
    smoke      a tiny model: does it compute, compile and answer over HTTP here?
    maps       maps and classes beside those of float32 on the CPU
    sweep      images a second over batch sizes, pixels resident on the device: ours and timm under torch.compile
    engine     both at their best size in turn: resident, from host memory, with maps, with relevance, in an engine
               process that workers ask; 20 s of one
    http       JPEGs of about 500 x 375 and 124 kB over HTTP, with several numbers of web workers; p99 at half load
    profile    the kernels of one batch
    start      seconds from start to ready, with an empty and with a warm compile cache
    faults     kill -9 of the engine under load
    tests      the tests of CUDA

Each step is a process of its own, which ends when its time is up; a step that fails or hangs is recorded, and the next
one runs. Every figure is saved as soon as it is there. The same command goes on where the record stops. `--limit` is
the seconds of a whole run; `--quick` is one of 540. Packages that the machine lacks come from the folder that `make
gpu-kit` has written, if it is there. `--device cpu --smoke` runs all of it in tiny form, to test the script, not to
measure. GPU.md says what to run in an hour.

benchmarks/results/gpu.json has what an H200 gave: smoke, maps, http and engine. The other steps have no record yet.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkpoints
from benchmarks.checkpoints import REPOSITORY, Shape
from benchmarks.record import Record, table

if TYPE_CHECKING:
    from benchmarks.load import Load
    from benchmarks.servers import Running
    from model.checkpoint import Checkpoint
    from model.outputs import Outputs, RequestedOutputs

# What is imported above comes with Python. All else may be missing or broken, and is imported within a step.

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_TOP_K = 5
_REPLAYS = 4
"""Batches that are launched before the device is waited for."""
_SUSTAINED = 20.0
"""Seconds of one size: shorter measurements come before the GPU throttles."""
_MARGIN = 0.02
"""Least distance of two scores that rounding to half the digits does not turn round."""


class Bench:
    """What a step needs: the record, the command line and the checkpoint."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        from benchmarks import gpu_machine, pictures  # noqa: PLC0415

        self.record = record
        self.arguments = arguments
        self.seconds: float = arguments.seconds
        record.data["gpu"] = about = gpu_machine.facts(arguments.device)
        self.gpu: str | None = about.get("uuid")
        self.folder = self.checkpoint_of(SMOKE if arguments.smoke else VITB16)
        self.files, source = pictures.ensure()
        record.data |= {"model": self.folder.name, "pictures": source}

    @staticmethod
    def checkpoint_of(shape: Shape) -> Path:
        """Return the folder of a model of this shape, made if absent."""
        checkpoints.SHAPES.setdefault(shape.name, shape)
        return checkpoints.ensure(shape.name)[0]

    def note(self, section: dict[str, Any], name: str, value: Any) -> None:
        """Put a value into the record, save it at once, and print it."""
        section[name] = round(value, 3) if isinstance(value, float) else value
        self.record.save()
        print(f"{name}: {section[name]}", flush=True)

    def mark(self, name: str, found: float, wanted: float, *, at_most: bool = False) -> None:
        """Record whether a mark is reached."""
        reached = found <= wanted if at_most else found >= wanted
        self.note(self.record.section("marks"), name, {"wanted": wanted, "found": found, "reached": reached})

    def best(self, who: str) -> int:
        """Return the batch size of the sweep's best rate; without a sweep the first that was to be swept."""
        rates = self.record.section("sweep").get(who, {})
        return int(max(rates, key=lambda size: float(rates[size]))) if rates else int(self.arguments.batches[0])


class _Noting:
    """The device's operations, and in `replay` what ran the graph of the last batch."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.replay: Callable[[], None] | None = None

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """Capture a graph; its replay is noted when it runs."""
        replay: Callable[[], None] = self._ops.capture(work, stream)

        def noted() -> None:
            self.replay = replay
            replay()

        return noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)


class Ours:
    """Our predictor as a service runs it, given batches by as many threads as it has streams."""

    def __init__(self, bench: Bench, sizes: Sequence[int], folder: Path | None = None) -> None:
        from model.checkpoint import load_checkpoint  # noqa: PLC0415
        from model.runtime.cuda.ops import CudaOps  # noqa: PLC0415
        from model.runtime.device import choose_device  # noqa: PLC0415
        from model.runtime.predictor import Predictor  # noqa: PLC0415

        arguments = bench.arguments
        device = choose_device(arguments.device)
        self.noting = _Noting(CudaOps(device)) if device.type == "cuda" else None
        self.checkpoint = load_checkpoint(str(folder or bench.folder))
        began = time.perf_counter()
        self.predictor = Predictor(
            self.checkpoint,
            device=arguments.device,
            dtype=arguments.dtype,
            compile_mode="off" if arguments.smoke else "auto",
            launch_sizes=sorted({1, *sizes}),
            ops=self.noting,
        )
        self.predictor.warm_up()
        about = {"seconds": round(time.perf_counter() - began, 1), "compiled": self.predictor.compiled}
        bench.note(bench.record.section("engine_start"), ", ".join(map(str, sizes)), about)

    def resident(self, size: int, seconds: float) -> float:
        """Images a second of batches that lie on the device, whose answers stay there; on a CPU `rate`."""
        import torch  # noqa: PLC0415

        if self.noting is not None:
            self.noting.replay = None  # of a start that has gone back to no graphs
        self.rate(size, 0.1)
        replay = None if self.noting is None else self.noting.replay
        if replay is None:
            return self.rate(size, seconds)

        def work() -> None:
            for _ in range(_REPLAYS):
                replay()
            torch.cuda.synchronize()

        with torch.inference_mode():
            return rate_of(work, _REPLAYS * size, seconds)

    def rate(self, size: int, seconds: float, requested: RequestedOutputs | None = None) -> float:
        """Images a second from host memory to host memory."""
        from model.outputs import RequestedOutputs  # noqa: PLC0415

        asked = requested or RequestedOutputs(min(_TOP_K, self.checkpoint.config.num_classes))
        # Several batches in turn, so that none is answered from a cache.
        batches = [random_pictures(self.checkpoint, size, seed) for seed in range(3)]
        done, stop = [0] * self.predictor.streams, threading.Event()

        def work(stream: int) -> None:
            for images in itertools.cycle(batches):
                if stop.is_set():
                    return
                self.predictor.predict(images, [asked] * size)
                done[stream] += size

        threads = [threading.Thread(target=work, args=(stream,), daemon=True) for stream in range(len(done))]
        for thread in threads:
            thread.start()
        time.sleep(0.25 * seconds)
        before, began = sum(done), time.perf_counter()
        time.sleep(seconds)
        rate = (sum(done) - before) / (time.perf_counter() - began)
        stop.set()
        for thread in threads:
            thread.join()
        return rate


class Reference:
    """timm's ViT of the same weights under torch.compile, with normalisation, softmax and top-k in one function."""

    def __init__(self, bench: Bench) -> None:
        import timm  # noqa: PLC0415
        import torch  # noqa: PLC0415

        from model.checkpoint import load_checkpoint  # noqa: PLC0415
        from model.runtime.device import choose_device, choose_dtype  # noqa: PLC0415

        self.checkpoint = load_checkpoint(str(bench.folder))
        config, arguments = self.checkpoint.vit, bench.arguments
        self.device = choose_device(arguments.device)
        dtype = choose_dtype(arguments.dtype, self.device)
        network = timm.models.VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            num_classes=config.num_classes,
        )
        network.load_state_dict(dict(self.checkpoint.tensors))
        network = network.to(self.device, dtype).eval().requires_grad_(False)
        statistics_of = (self.checkpoint.preprocess.mean, self.checkpoint.preprocess.std)
        mean, std = (torch.tensor(each).reshape(1, -1, 1, 1).to(self.device) for each in statistics_of)

        def answer(pixels: torch.Tensor) -> Any:
            normal = ((pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std).to(dtype)
            return network(normal).float().softmax(dim=-1).topk(min(_TOP_K, config.num_classes))

        mode = None if arguments.smoke else arguments.reference_mode
        self.name = f"timm {timm.__version__}, {mode or 'uncompiled'}"
        self.answer = answer if mode is None else torch.compile(answer, mode=mode, dynamic=False)

    def resident(self, size: int, seconds: float) -> float:
        """Images a second of batches that lie on the device, whose answers stay there."""
        import torch  # noqa: PLC0415

        pixels = torch.from_numpy(random_pictures(self.checkpoint, size)).to(self.device)

        def work() -> None:
            for _ in range(_REPLAYS):
                self.answer(pixels)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        with torch.no_grad():
            return rate_of(work, _REPLAYS * size, seconds)

    def rate(self, size: int, seconds: float) -> float:
        """Images a second from pinned host memory to host memory."""
        import torch  # noqa: PLC0415

        pinned = [torch.from_numpy(random_pictures(self.checkpoint, size, seed)) for seed in range(3)]
        turn = itertools.cycle([each.pin_memory() if self.device.type == "cuda" else each for each in pinned])

        def work() -> None:
            scores, indices = self.answer(next(turn).to(self.device, non_blocking=True))
            scores.cpu(), indices.cpu()

        with torch.no_grad():
            return rate_of(work, size, seconds)


def random_pictures(checkpoint: Checkpoint, count: int, seed: int = 0) -> Any:
    """uint8 [count, H, W, C]; noise, as matrix products run faster on zeros."""
    import numpy as np  # noqa: PLC0415

    config = checkpoint.config
    shape = (count, *config.image_size, config.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def rate_of(work: Callable[[], None], images: int, seconds: float) -> float:
    """Images a second of calls that do so many images each."""
    for _ in range(3):  # compiles, and records CUDA graphs
        work()
    done, began = 0, time.perf_counter() + 0.25 * seconds
    while (now := time.perf_counter()) < began + seconds:
        work()
        done += images * (now >= began)
    return done / (time.perf_counter() - began)


def versions(bench: Bench) -> None:
    """The GPU, what it says of itself, and which code resizes pictures."""
    from model.images.resample import is_compiled  # noqa: PLC0415

    host = bench.record.section("host")
    bench.note(host, "gpu", bench.record.data["gpu"])
    bench.note(host, "resize", "compiled" if is_compiled() else "Pillow's")
    packages = ("torch", "triton", "timm", "fastapi", "uvicorn", "pydantic", "pillow", "numpy")
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    bench.note(host, "packages", found)
    done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False) if bench.gpu else None
    bench.note(host, "nvidia-smi", "" if done is None else done.stdout + done.stderr)


def smoke(bench: Bench) -> None:
    """A tiny model: computed, compiled, and one answer over HTTP."""
    folder, section = bench.checkpoint_of(SMOKE), bench.record.section("tiny model")
    ours = Ours(bench, [4], folder)
    bench.note(section, "images/s", ours.rate(4, 0.2))
    with _server(bench, 2, {"VIT_CHECKPOINT": str(folder)}) as server:
        bench.note(section, "seconds to the first answer", server.answer_seconds)
        bench.note(section, "HTTP", _closed(bench, server, 4, 0.3).as_json())


def maps(bench: Bench) -> None:
    """Logits, classes and maps of photographs and noise beside float32's on the CPU, the worst picture counting."""
    import numpy as np  # noqa: PLC0415

    from model.images.preprocess import preprocess  # noqa: PLC0415
    from model.outputs import MapRequest, RequestedOutputs  # noqa: PLC0415
    from model.runtime.predictor import Predictor  # noqa: PLC0415

    section, ours = bench.record.section("beside float32 on the CPU"), Ours(bench, [16])
    images = random_pictures(ours.checkpoint, 16, seed=9)
    for index, file in enumerate(bench.files[:8]):
        images[index] = preprocess(file.read_bytes(), ours.checkpoint.preprocess)
    exact = Predictor(ours.checkpoint, device="cpu", dtype="float32", compile_mode="off", max_batch=len(images))
    last, classes = ours.checkpoint.vit.depth - 1, ours.checkpoint.config.num_classes
    for name, request in (("row", MapRequest.row(last)), ("relevance", MapRequest("relevance"))):
        asked = [RequestedOutputs(min(2, classes), request)] * len(images)
        pairs = list(zip(exact.predict(images, asked), ours.predictor.predict(images, asked), strict=True))
        sure = [(a, b) for a, b in pairs if a.scores[0] - a.scores[-1] >= _MARGIN]
        same = [(a, b) for a, b in sure if a.indices[0] == b.indices[0]]
        bench.note(section, f"{name}: the same class, of those that are sure", f"{len(same)} of {len(sure)}")
        found = [np.abs(_values(a) - _values(b)).sum() for a, b in same or pairs]
        bench.note(section, f"{name}: largest sum of differences of a map", float(max(found)))


def _values(outputs: Outputs) -> Any:
    """The values of an image's map, float32 [rows, columns]."""
    assert outputs.map is not None
    return outputs.map.values


def sweep(bench: Bench) -> None:
    """Each batch size once, ours and the reference's; what the record has is not measured again."""
    from benchmarks import gpu_machine  # noqa: PLC0415

    sizes = bench.arguments.batches
    for who, make in (("ours", lambda: Ours(bench, sizes)), ("reference", lambda: _reference(bench))):
        rates = bench.record.section("sweep", who)
        missing = [size for size in sizes if str(size) not in rates]
        engine = make() if missing else None
        if engine is None:
            continue
        for size in missing:
            with gpu_machine.meter(bench.gpu) as state:
                bench.note(rates, str(size), engine.resident(size, bench.seconds))
            bench.record.section("machine")[f"{who}, batch {size}"] = state


def _reference(bench: Bench) -> Reference | None:
    """The reference, or None where timm does not run, as with a torchvision of another build."""
    try:
        return Reference(bench)
    except (ImportError, RuntimeError) as error:
        bench.note(bench.record.section("host"), "no reference", f"{type(error).__name__}: {error}"[:500])
        return None


def engine(bench: Bench) -> None:
    """Rounds of one measurement each; ratios are taken within a round. Then one size for long."""
    from benchmarks import gpu_machine  # noqa: PLC0415
    from model.outputs import MapRequest, RequestedOutputs  # noqa: PLC0415

    section = bench.record.section("engine")
    size, theirs = bench.best("ours"), bench.best("reference")
    ours, reference = Ours(bench, [size]), _reference(bench)
    row = RequestedOutputs(_TOP_K, MapRequest.row(ours.checkpoint.vit.depth - 1))
    relevance = RequestedOutputs(_TOP_K, MapRequest("relevance"))
    measures: dict[str, Callable[[float], float]] = {
        "ours resident": lambda seconds: ours.resident(size, seconds),
        "ours": lambda seconds: ours.rate(size, seconds),
        "with maps": lambda seconds: ours.rate(size, seconds, row),
        "with relevance": lambda seconds: ours.rate(size, seconds, relevance),
    }
    pairs = [("ours", "ours resident"), ("with maps", "ours"), ("with relevance", "ours")]
    pairs.append(("engine process", "ours resident"))
    if reference is not None:
        measures["reference resident"] = lambda seconds: reference.resident(theirs, seconds)
        measures["reference"] = lambda seconds: reference.rate(theirs, seconds)
        pairs.append(("ours resident", "reference resident"))
    rounds: list[dict[str, float]] = []
    with _engine_process(bench) as measures["engine process"]:
        for _ in range(bench.arguments.rounds):
            rounds.append({name: round(measure(bench.seconds), 1) for name, measure in measures.items()})
            bench.note(section, "rounds", rounds)
    for of, to in pairs:
        bench.note(section, f"{of} / {to}", statistics.median(each[of] / each[to] for each in rounds))
    with gpu_machine.meter(bench.gpu) as state:
        bench.note(section, "sustained", ours.resident(size, 0.5 if bench.arguments.smoke else _SUSTAINED))
    bench.note(section, "machine", state)
    bench.mark("resident, images/s", section["sustained"], 12_000)
    if reference is not None:
        bench.mark(f"resident / {reference.name}", section["ours resident / reference resident"], 1.15)
    bench.mark("engine process / resident", section["engine process / ours resident"], 0.93)
    bench.mark("a map of every image / none", section["with maps / ours"], 0.97)
    bench.mark("relevance of every image / none", section["with relevance / ours"], 0.9)


@contextmanager
def _engine_process(bench: Bench) -> Iterator[Callable[[float], float]]:
    """Start a service, and measure the rate of its engine's process: asked as by web workers, who decode nothing."""
    from benchmarks import engine_load  # noqa: PLC0415

    workers, pictures = bench.arguments.workers[0], _REPLAYS * bench.best("ours")
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as folder, _server(bench, 2, {"TMPDIR": folder}):
        socket = engine_load.socket_in(Path(folder))
        yield lambda seconds: engine_load.rate(socket, workers=workers, pictures=pictures, seconds=seconds)


def http(bench: Bench) -> None:
    """Each number of workers, then half of the best rate as an open loop."""
    section = bench.record.section("http")
    for workers in bench.arguments.workers:
        with _server(bench, workers) as server:
            _closed(bench, server, bench.arguments.connections, bench.seconds)  # sizes of pools and caches are found
            rounds = [_closed(bench, server, bench.arguments.connections, bench.seconds) for _ in range(3)]
            rate = statistics.median(each.rate for each in rounds)
            half = _open(bench, server, rate / 2)
            alone = _closed(bench, server, 1, bench.seconds)
            bench.note(section, f"{workers} workers", {"rate": rate, "half": half, "alone": alone.as_json()})
    best = max((each for each in section.values()), key=lambda each: float(each["rate"]))
    cores = len(os.sched_getaffinity(0))
    bench.mark(f"JPEG over HTTP on {cores} cores, images/s", best["rate"], 5_000)
    bench.mark("HTTP, p99 at half load, ms", best["half"]["p99"], 25, at_most=True)


def profile(bench: Bench) -> None:
    """The kernels of one batch of ours."""
    from benchmarks import gpu_machine  # noqa: PLC0415
    from model.outputs import RequestedOutputs  # noqa: PLC0415

    size = bench.best("ours")
    ours = Ours(bench, [size])
    images, asked = random_pictures(ours.checkpoint, size), [RequestedOutputs(_TOP_K)] * size
    ours.predictor.predict(images, asked)
    found = gpu_machine.kernels(lambda: ours.predictor.predict(images, asked), bench.arguments.device)
    bench.note(bench.record.section("profile"), f"batch {size}", found)


def start(bench: Bench) -> None:
    """The same start twice, with a compile cache of its own that is empty the first time."""
    section = bench.record.section("start")
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton", "VIT_MAX_BATCH": ""}
        for name, mark in (("cold", 60), ("warm", 25)):
            with _server(bench, 1, environment) as server:
                bench.note(section, name, server.start_seconds)
            bench.mark(f"seconds to ready, {name} compile cache", section[name], mark, at_most=True)


def faults(bench: Bench) -> None:
    """kill -9 of the engine while requests come: what became of them, and when it answered again."""
    from benchmarks.reliability import Honest, Service, learn, told_apart  # noqa: PLC0415

    section = bench.record.section("faults")
    files = [file.read_bytes() for file in bench.files]

    async def run(service: Service) -> tuple[Honest, float]:
        await service.until_ready(300)
        scores = await learn(service.url, files)
        chosen = told_apart(files, scores)
        honest = Honest(service, [files[n] for n in chosen], [[scores[n]] for n in chosen])
        sending = asyncio.ensure_future(honest.run(50, 4 * bench.seconds))
        await asyncio.sleep(bench.seconds)
        service.kill(service.children(torch=True), signal.SIGKILL, cuts=False)
        await asyncio.sleep(0.5)
        again = await service.until_ready(300)
        await sending
        return honest, again

    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as name:
        service = Service(Path(name), _settings(bench, 2))
        try:
            honest, again = asyncio.run(run(service))
        finally:
            service.stop()
    bench.note(section, "outcomes", dict(honest.counts))
    bench.note(section, "seconds to ready", again)
    bench.mark("requests lost or mixed up", honest.told()["faults"], 0, at_most=True)


def tests(bench: Bench) -> None:
    """The tests that need CUDA."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "tests/model/runtime/cuda"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    bench.note(bench.record.section("tests"), "output", (done.stdout + done.stderr)[-4000:])
    if done.returncode:
        raise RuntimeError(f"tests failed with {done.returncode}; the record has the end of their output")


STEPS: Mapping[str, tuple[Callable[[Bench], None], float]] = {
    "versions": (versions, 60),
    "smoke": (smoke, 90),
    "maps": (maps, 90),
    "sweep": (sweep, 200),
    "engine": (engine, 240),
    "http": (http, 200),
    "profile": (profile, 60),
    "start": (start, 200),
    "faults": (faults, 120),
    "tests": (tests, 200),
}
"""In the order of their worth, with the seconds that a run with a limit gives each at most."""


def _settings(bench: Bench, workers: int) -> dict[str, str]:
    """The environment of a service that serves what is measured."""
    arguments = bench.arguments
    return {
        "VIT_CHECKPOINT": str(bench.folder),
        "VIT_DEVICE": arguments.device,
        "VIT_DTYPE": arguments.dtype,
        "VIT_COMPILE": "off" if arguments.smoke else "auto",
        "VIT_WORKERS": str(workers),
        "VIT_DRAIN_DELAY": "0",
        "VIT_QUEUE_SIZE": str(max(1024, 2 * arguments.connections)),
        "VIT_MAX_BATCH": str(bench.best("ours")),
        **dict(pair.split("=", 1) for pair in arguments.settings),
    }


@contextmanager
def _server(bench: Bench, workers: int, more: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Start a service of what is measured, or of another checkpoint."""
    from benchmarks.servers import VITSERVE, running  # noqa: PLC0415

    config = {name: value for name, value in (_settings(bench, workers) | dict(more or {})).items() if value}
    picture = bench.files[0].read_bytes()
    with running(VITSERVE, Path(config["VIT_CHECKPOINT"]), config, picture=picture, timeout=300) as server:
        yield server


def _closed(bench: Bench, server: Running, connections: int, seconds: float) -> Load:
    from benchmarks.load import Loader  # noqa: PLC0415
    from benchmarks.servers import OURS  # noqa: PLC0415

    load = Loader(bench.files, OURS, bench.arguments.load_processes)
    return load.closed(server.url, connections=connections, seconds=seconds)


def _open(bench: Bench, server: Running, rate: float) -> dict[str, Any]:
    """Send at a rate, and say whether the generator kept it up: late itself, it would be measured, not the server."""
    from benchmarks.load import Loader  # noqa: PLC0415
    from benchmarks.servers import OURS  # noqa: PLC0415

    load = Loader(bench.files, OURS, bench.arguments.load_processes)
    found = load.open(server.url, rate=rate, seconds=bench.seconds)
    return found.as_json() | {"wanted": round(rate, 1), "kept_up": found.rate > 0.95 * rate}


def run_step(arguments: argparse.Namespace, name: str) -> int:
    """Run one step in this process, and return its exit code; what it raises is recorded."""
    record = Record(_path(arguments), dtype=arguments.dtype, about={})
    try:
        STEPS[name][0](Bench(record, arguments))
    except Exception as error:
        record.section("errors")[name] = f"{type(error).__name__}: {error}"[:2000]
        record.save()
        raise
    return 0


def environment_of_steps(kit: Path, folder: Path) -> dict[str, str]:
    """Return the environment of the steps, which import what is in the kit; its compiled resize goes to its place.

    Args:
        kit: see `benchmarks.gpu_kit`; it may be absent.
        folder: an empty one, where its wheels are unpacked.
    """
    place = REPOSITORY / "model" / "images"
    for library in kit.glob("*.so"):
        if not (place / library.name).exists():
            shutil.copy(library, place)
    wheels = sorted(kit.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    path = [*([str(folder)] if wheels else []), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONFAULTHANDLER": "1"}


def _path(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.out / ("gpu-smoke.json" if arguments.smoke else "gpu.json")
    return path


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", choices=list(STEPS), metavar="STEP", help="(default: all that are not done)"
    )
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--reference-mode", default="max-autotune", help="of torch.compile for timm")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 114, 128, 228, 256], help="sizes to sweep")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of web workers to try (default: by the cores)")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4, help="of one measurement")
    parser.add_argument("--limit", type=float, help="seconds of the whole run")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="folder of the record")
    parser.add_argument("--kit", type=Path, default=REPOSITORY / "dist" / "gpu-kit", help="folder of `make gpu-kit`")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, within nine minutes")
    parser.add_argument("--smoke", action="store_true", help="tiny model and times, nothing compiled: tests the script")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.limit = 2, 2, arguments.limit or 540
        arguments.batches, arguments.reference_mode = [64, 128, 256], "reduce-overhead"
    cores = len(os.sched_getaffinity(0))
    arguments.workers = arguments.workers or [max(2, share * cores // 16) for share in (8, 12)]
    if arguments.smoke:
        arguments.batches, arguments.dtype, arguments.rounds, arguments.seconds = [2, 4], "float32", 1, 0.3
        arguments.workers, arguments.connections, arguments.load_processes = [2], 4, 1
    return arguments


def main(argv: Sequence[str]) -> int:
    """Measure, print, save. 0: no step failed; 1: some did."""
    arguments = parse(argv)
    if arguments.step is not None:
        return run_step(arguments, arguments.step)
    record = Record(_path(arguments), dtype=arguments.dtype, about={"smoke": arguments.smoke})
    done, failed = set(record.section("seconds")) - set(record.section("errors")), []
    end = time.monotonic() + (arguments.limit or 10 * sum(seconds for _, seconds in STEPS.values()))
    with tempfile.TemporaryDirectory(prefix="vitserve-kit-") as folder:
        environment = environment_of_steps(arguments.kit, Path(folder))
        for name in arguments.only or [name for name in STEPS if name not in done]:
            began = time.monotonic()
            allowed = min(STEPS[name][1] * (1 if arguments.limit else 10), end - began)
            if allowed < 10:
                print(f"\n== {name}: left for the next run, the time is up", flush=True)
                continue
            print(f"\n== {name}, at most {allowed:.0f} s", flush=True)
            record.section("errors").pop(name, None)
            record.save()
            code = _in_child([sys.executable, "-m", "benchmarks.gpu", *argv, "--step", name], environment, allowed)
            record.reload()  # the step has written into it
            if code:
                failed.append(name)
                record.section("errors").setdefault(name, f"ended with {code}")
            record.section("seconds")[name] = round(time.monotonic() - began, 1)
            record.save()
    marks = record.section("marks").items()
    rows = [(name, mark["wanted"], mark["found"], "yes" if mark["reached"] else "NO") for name, mark in marks]
    print("\n" + table(["mark", "wanted", "found", "reached"], rows))
    print(f"record: {record.path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


def _in_child(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> int | str:
    """Run a step in a process group of its own, which ends with it; return its exit code, or that its time was up."""
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"its time: {seconds:.0f} s were over"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # servers that it has started stop theirs
            time.sleep(2)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
