"""The steps of `benchmarks.gpu`, which runs `python -m benchmarks.gpu_steps ... --step NAME`."""

import argparse
import io
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from benchmarks import checkpoints, gpu, pictures
from benchmarks.checkpoints import REPOSITORY, Shape
from benchmarks.gpu_engine import TOP_K, Address, EngineProcess, shared_memory_of
from benchmarks.load import Loader, Protocol
from benchmarks.processors import processor_ticks, shares
from benchmarks.record import Record
from benchmarks.servers import OURS, VITSERVE, Running, running
from model.checkpoint import Checkpoint, load_checkpoint
from model.images.preprocess import preprocess
from model.images.resample import is_compiled
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248)
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10)
# Batches that are launched before a wait for the device.
_UNDER_WAY = 4
# Scores of at least this distance keep their order in bfloat16.
_MARGIN = 0.02
# Numbers of clients of an engine process, with the same load together.
_CLIENTS: Final = (1, 2, 4, 8)
# Seconds of the long measurement. In shorter ones, a GPU does not throttle yet.
_SUSTAINED = 20.0
# Loads of `reload`. Torch has 32 streams, and then hands out the same ones again.
_RELOADS: Final = 40
_READINGS = (
    "driver_version,power.limit,power.draw,clocks.max.sm,clocks.sm,temperature.gpu,memory.used"
)


class Bench:
    """The record, the command line, the checkpoint and the pictures of a step."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        self.record = record
        self.arguments = arguments
        self.folder = checkpoints.ensure(SMOKE if arguments.smoke else VITB16)[0]
        self.files, source = pictures.ensure()
        name = "none" if arguments.device == "cpu" else torch.cuda.get_device_name(arguments.device)
        record.data |= {"model": self.folder.name, "pictures": source, "gpu": name}

    def mark(self, name: str, found: float, wanted: float, *, at_most: bool = False) -> None:
        """Record whether a mark is reached."""
        reached = found <= wanted if at_most else found >= wanted
        self.record.note(
            {"wanted": wanted, "found": round(found, 3), "reached": reached}, "marks", name
        )


class Ours:
    """vitserve's predictor, called by as many threads as it has streams, as in a service."""

    def __init__(self, bench: Bench, sizes: Sequence[int], folder: Path) -> None:
        arguments = bench.arguments
        self.checkpoint = load_checkpoint(str(folder))
        began = time.perf_counter()
        self.predictor = Predictor(
            self.checkpoint,
            device=arguments.device,
            dtype=arguments.dtype,
            compile_mode="off" if arguments.smoke else "auto",
            launch_sizes=sorted({1, *sizes}),
        )
        self.predictor.warm_up()
        about = {
            "seconds": round(time.perf_counter() - began, 1),
            "compiled": self.predictor.compiled,
        }
        bench.record.note(about, "engine_start", ", ".join(map(str, sizes)))

    def rate(self, asked: RequestedOutputs, size: int, seconds: float) -> float:
        """Return images per second, from host memory to host memory."""
        # Different batches in turn, because the processor caches a repeated one.
        batches = itertools.cycle(
            [random_pictures(self.checkpoint, size, seed) for seed in range(3)]
        )

        def work() -> None:
            self.predictor.predict(next(batches), [asked] * size)

        with ThreadPoolExecutor(self.predictor.streams) as pool:
            return sum(
                pool.map(lambda _: rate_of(work, size, seconds), range(self.predictor.streams))
            )


class Reference:
    """timm's ViT with the same weights; normalisation, softmax and top-k are compiled with it."""

    def __init__(self, bench: Bench, checkpoint: Checkpoint) -> None:
        import timm  # noqa: PLC0415  it may not run, as with a torchvision of another build

        config = checkpoint.vit
        arguments = bench.arguments
        self.checkpoint = checkpoint
        self.device = torch.device(arguments.device)
        dtype = getattr(torch, arguments.dtype)
        network = timm.models.VisionTransformer(
            img_size=config.image_size,
            patch_size=config.patch_size,
            embed_dim=config.width,
            depth=config.depth,
            num_heads=config.heads,
            num_classes=config.num_classes,
        )
        network.load_state_dict(dict(checkpoint.tensors))
        network = network.to(self.device, dtype).eval().requires_grad_(False)
        normalise = Normalise(checkpoint.preprocess, dtype).to(self.device)

        def answer(pixels: torch.Tensor) -> Any:
            return (
                network(normalise(pixels))
                .float()
                .softmax(dim=-1)
                .topk(min(TOP_K, config.num_classes))
            )

        mode = None if arguments.smoke else arguments.reference_mode
        bench.record.note(f"timm {timm.__version__}, {mode or 'uncompiled'}", "engine", "reference")
        self.answer = answer if mode is None else torch.compile(answer, mode=mode, dynamic=False)

    def rate(self, size: int, seconds: float) -> float:
        """Return images per second; batches and answers stay on the device."""
        pixels = torch.from_numpy(random_pictures(self.checkpoint, size)).to(self.device)

        def work() -> None:
            for _ in range(_UNDER_WAY):
                self.answer(pixels)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        with torch.no_grad():
            return rate_of(work, _UNDER_WAY * size, seconds)


def random_pictures(checkpoint: Checkpoint, count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return noise, uint8 [count, H, W, C], because matrix products run faster on zeros."""
    config = checkpoint.config
    shape = (count, *config.image_size, config.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def rate_of(work: Callable[[], None], images: int, seconds: float) -> float:
    """Return images per second of calls that each compute a number of images."""
    for _ in range(3):  # compiles, and records CUDA graphs
        work()
    done = 0
    began = time.perf_counter() + 0.25 * seconds
    while (now := time.perf_counter()) < began + seconds:
        work()
        done += images * (now >= began)
    return done / (time.perf_counter() - began)


@contextmanager
def meter(bench: Bench) -> Iterator[list[str]]:
    """Read the GPU twice per second during the context, which fills the list at its end.

    Without nvidia-smi, the list stays empty.
    """
    readings: list[str] = []
    if bench.arguments.device == "cpu" or shutil.which("nvidia-smi") is None:
        yield readings
        return
    command = [
        "nvidia-smi",
        f"--query-gpu={_READINGS}",
        "--format=csv,noheader,nounits",
        "--loop-ms=500",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        yield readings
        reader.terminate()
        readings += reader.communicate()[0].splitlines()


def smoke(bench: Bench) -> None:
    """Compute and compile a tiny model, answer once over HTTP, and record the machine."""
    note = bench.record.note
    name = "tiny model"
    folder = checkpoints.ensure(SMOKE)[0]
    note("compiled" if is_compiled() else "Pillow's", name, "resize")
    note(Ours(bench, [4], folder).rate(RequestedOutputs(TOP_K), 4, 0.2), name, "images/s")
    with _server(bench, 2, VIT_CHECKPOINT=str(folder)) as server:
        note(server.start_seconds, name, "seconds to ready")
        note(
            Loader(bench.files, OURS).run(server.url, connections=4, seconds=0.3).as_json(),
            name,
            "HTTP",
        )


def maps(bench: Bench) -> None:
    """Compare classes and maps with float32 on the CPU, and record the worst picture."""
    note = bench.record.note
    section = "beside float32 on the CPU"
    ours = Ours(bench, [16], bench.folder)
    images = random_pictures(ours.checkpoint, 16, seed=9)
    for index, file in enumerate(bench.files[:8]):
        images[index] = preprocess(file.read_bytes(), ours.checkpoint.preprocess)
    exact = Predictor(
        ours.checkpoint, device="cpu", dtype="float32", compile_mode="off", max_batch=len(images)
    )
    last = ours.checkpoint.vit.depth - 1
    classes = ours.checkpoint.config.num_classes
    for name, request in (
        ("row", MapRequest.attention_row(last)),
        ("relevance", MapRequest("relevance")),
    ):
        asked = [RequestedOutputs(min(2, classes), request)] * len(images)
        pairs = list(
            zip(exact.predict(images, asked), ours.predictor.predict(images, asked), strict=True)
        )
        sure = [(a, b) for a, b in pairs if a.scores[0] - a.scores[-1] >= _MARGIN]
        same = [(a, b) for a, b in sure if a.indices[0] == b.indices[0]]
        note(
            f"{len(same)} of {len(sure)}",
            section,
            f"{name}: the same class, of those that are sure",
        )
        found = [
            np.abs(a.map.values - b.map.values).sum() for a, b in same or pairs if a.map and b.map
        ]
        note(float(max(found)), section, f"{name}: largest sum of differences of a map")


def engine(bench: Bench) -> None:
    """Measure each batch size in rounds; a ratio compares figures of one round."""
    sizes = bench.arguments.batches
    note = bench.record.note
    ours = Ours(bench, sizes, bench.folder)
    asked = {
        "ours": RequestedOutputs(TOP_K),
        "with maps": RequestedOutputs(
            TOP_K, MapRequest.attention_row(ours.checkpoint.vit.depth - 1)
        ),
        "with relevance": RequestedOutputs(TOP_K, MapRequest("relevance")),
    }
    wanted = {
        ("with maps", "ours"): 0.97,
        ("with relevance", "ours"): 0.9,
        ("engine process", "ours"): 0.93,
    }
    try:
        reference = Reference(bench, ours.checkpoint)
        wanted["ours", "reference"] = 1.15
    except (ImportError, RuntimeError) as error:
        reference = None
        note(f"{type(error).__name__}: {error}"[:500], "engine", "reference")
    for size in sizes:
        rounds: list[dict[str, Any]] = []
        with _engine_process(bench, size) as process, meter(bench) as readings:
            for _ in range(bench.arguments.rounds):
                found: dict[str, Any] = {
                    name: ours.rate(each, size, bench.arguments.seconds)
                    for name, each in asked.items()
                }
                found["engine process"] = process.rate(bench.arguments.seconds)
                found |= process.used
                if reference is not None:
                    found["reference"] = reference.rate(size, bench.arguments.seconds)
                rounds.append(
                    {
                        key: round(each, 1) if isinstance(each, float) else each
                        for key, each in found.items()
                    }
                )
                note(rounds, "engine", f"batches of {size}")
            for clients in [1] if bench.arguments.smoke else _CLIENTS:
                found = {"images/s": process.rate(bench.arguments.seconds, clients), **process.used}
                note(found, "engine", f"batches of {size}, {clients} clients")
        note(readings, "engine", f"batches of {size}: {_READINGS}")
        bench.mark(
            f"batches of {size}: images/s",
            statistics.median(each["ours"] for each in rounds),
            12_000,
        )
        for (of, to), mark in wanted.items():
            bench.mark(
                f"batches of {size}: {of} / {to}",
                statistics.median(e[of] / e[to] for e in rounds),
                mark,
            )
    with meter(bench) as readings:
        rate = ours.rate(asked["ours"], sizes[0], 0.5 if bench.arguments.smoke else _SUSTAINED)
    note(
        {"images/s": round(rate, 1), _READINGS: readings},
        "engine",
        f"batches of {sizes[0]}, sustained",
    )


@contextmanager
def _engine_process(bench: Bench, size: int) -> Iterator[EngineProcess]:
    """Start a service, and yield its engine process for measurements."""
    clients = bench.arguments.workers[0]
    # Each client takes the buffers of a worker.
    workers = clients if bench.arguments.smoke else max(clients, *_CLIENTS)
    pictures = _UNDER_WAY * size
    with (
        tempfile.TemporaryDirectory(prefix="vitserve-bench-") as folder,
        _server(bench, workers, TMPDIR=folder, VIT_MAX_BATCH=str(size)) as server,
    ):
        [socket] = Path(folder).glob("vitserve-*/engine-*")
        memory = shared_memory_of(server.pids()[0], workers)
        yield EngineProcess(server, Address(socket, memory), clients, pictures)


def profile(bench: Bench) -> None:
    """Record torch's table of the kernels of one batch."""
    size = bench.arguments.batches[0]
    on_gpu = bench.arguments.device != "cpu"
    ours = Ours(bench, [size], bench.folder)
    images = random_pictures(ours.checkpoint, size)
    asked = [RequestedOutputs(TOP_K)] * size
    ours.predictor.predict(images, asked)
    activity = (
        torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    )
    with torch.profiler.profile(activities=[activity]) as seen:
        ours.predictor.predict(images, asked)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    found = seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=100)
    bench.record.note(found, "profile", f"a batch of {size}")


def http(bench: Bench) -> None:
    """Measure the peak rate with each number of workers, then the latency at half of that rate."""
    arguments = bench.arguments
    seconds = bench.arguments.seconds
    load = Loader(bench.files, OURS, processes=arguments.load_processes)
    for workers in arguments.workers:
        with _server(bench, workers) as server:
            peaks = [
                load.run(server.url, connections=arguments.connections, seconds=seconds)
                for _ in range(4)
            ]
            rate = statistics.median(
                each.rate for each in peaks[1:]
            )  # the first one fills pools and caches
            before = processor_ticks()
            load.run(server.url, connections=arguments.connections, seconds=seconds)
            processors = shares(before, processor_ticks())
            half = load.run(server.url, rate=rate / 2, seconds=seconds)
            alone = load.run(server.url, connections=1, seconds=seconds)
            # If the generator is late, its own delay is measured.
            kept_up = {"kept_up": half.rate > 0.95 * rate / 2}
            found: dict[str, Any] = {"processors at the peak": processors}
            found |= {"rate": rate, "half": half.as_json() | kept_up, "alone": alone.as_json()}
            bench.record.note(found, "http", f"{workers} workers")
    best = max(bench.record.section("http").values(), key=lambda each: float(each["rate"]))
    bench.mark(
        f"JPEG over HTTP on {len(os.sched_getaffinity(0))} cores, images/s", best["rate"], 5_000
    )
    bench.mark("HTTP, p99 at half load, ms", best["half"]["p99"], 25, at_most=True)


def start(bench: Bench) -> None:
    """Start twice with a separate compile cache, which is empty at first."""
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
        own = {
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "VIT_MAX_BATCH": "",
        }
        for name, mark in (("cold", 60), ("warm", 25)):
            with _server(bench, 1, **own) as server:
                bench.record.note(
                    server.answer_seconds,
                    "start",
                    f"seconds to the first answer, {name} compile cache",
                )
                bench.mark(
                    f"seconds to compiled, {name} compile cache",
                    server.start_seconds,
                    mark,
                    at_most=True,
                )


def decode(bench: Bench) -> None:
    """Decode JPEGs on the device, and compare the pixels with Pillow's.

    A decoder on the device is worth its code from 6,000 pictures per second.
    """
    try:
        from torchvision.io import ImageReadMode, decode_jpeg  # noqa: PLC0415  it may not run, as of another build

        decode_jpeg(torch.frombuffer(bytearray(bench.files[0].read_bytes()), dtype=torch.uint8))
    except (ImportError, RuntimeError) as error:
        bench.record.note(f"{type(error).__name__}: {error}"[:500], "decode", "torchvision")
        return
    device = torch.device(bench.arguments.device)
    sources = [file.read_bytes() for file in bench.files]
    files = [torch.frombuffer(bytearray(source), dtype=torch.uint8) for source in sources]

    def decoded(batch: list[torch.Tensor]) -> Any:
        if device.type == "cpu":
            return [decode_jpeg(each, ImageReadMode.RGB) for each in batch]
        return decode_jpeg(batch, ImageReadMode.RGB, device=device)

    for size in [4] if bench.arguments.smoke else [1, 16, 64, 128, 256]:
        batch = [files[place % len(files)] for place in range(size)]
        began = time.process_time()
        rate = rate_of(partial(decoded, batch), size, bench.arguments.seconds)
        spent = time.process_time() - began
        pictures_done = (
            rate * 1.25 * bench.arguments.seconds
        )  # including those before the measurement
        found = {"pictures/s": round(rate), "host us": round(1e6 * spent / pictures_done)}
        bench.record.note(found, "decode", f"batches of {size}")
    levels: list[list[float]] = []
    for source, pixels in zip(sources, decoded(files), strict=True):
        theirs = np.asarray(Image.open(io.BytesIO(source)).convert("RGB")).astype(int)
        away = np.abs(pixels.permute(1, 2, 0).cpu().numpy().astype(int) - theirs)
        levels.append([round(float(away.mean()), 3), float(away.max())])
    bench.record.note(levels, "decode", "levels from Pillow's, mean and worst of each picture")
    progressive = io.BytesIO()
    Image.open(io.BytesIO(sources[0])).save(progressive, "JPEG", progressive=True)
    odd = {
        "half a file": sources[0][: len(sources[0]) // 2],
        "a progressive file": progressive.getvalue(),
    }
    for name, source in odd.items():
        try:
            answer = str(
                tuple(decoded([torch.frombuffer(bytearray(source), dtype=torch.uint8)])[0].shape)
            )
        except RuntimeError as error:
            answer = f"refused: {error}"[:200]
        bench.record.note(answer, "decode", name)


def pixels(bench: Bench) -> None:
    """Send raw pixels by the Open Inference Protocol: all steps of a request except decoding."""
    arguments = bench.arguments
    with _server(bench, arguments.workers[0]) as server:
        with urllib.request.urlopen(f"{server.url}/model", timeout=30) as answer:
            name = json.load(answer)["name"]
        noise = random_pictures(load_checkpoint(str(bench.folder)), 1)
        tensor = {"name": "pixels", "datatype": "UINT8", "shape": noise.shape}
        head = json.dumps(
            {"inputs": [tensor | {"parameters": {"binary_data_size": noise.nbytes}}]}
        ).encode()
        headers = {
            "Inference-Header-Content-Length": str(len(head)),
            "Content-Type": "application/octet-stream",
        }
        protocol = Protocol(
            f"/v2/models/{name}/infer", headers, lambda _: head + noise.tobytes(), lambda _: 0
        )
        load = Loader(bench.files[:1], protocol, processes=arguments.load_processes)
        for _ in range(arguments.rounds):
            before = processor_ticks()
            found = load.run(
                server.url, connections=arguments.connections, seconds=arguments.seconds
            ).as_json()
            found["processors"] = shares(before, processor_ticks())
            rounds = [*bench.record.section("pixels").get("HTTP", []), found]
            bench.record.note(rounds, "pixels", "HTTP")


def pair(bench: Bench) -> None:
    """Measure two engine processes on one device at the same time."""
    size = bench.arguments.batches[0]
    seconds = bench.arguments.seconds
    with (
        _engine_process(bench, size) as first,
        _engine_process(bench, size) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        for _ in range(bench.arguments.rounds):
            rates = list(pool.map(lambda engine: engine.rate(seconds), (first, second)))
            found = {
                "images/s": [round(rate, 1) for rate in rates],
                "used": [first.used, second.used],
            }
            bench.record.note(
                [*bench.record.section("pair").get("rounds", []), found], "pair", "rounds"
            )


def _logits(ours: Ours, images: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the logits of images, [B, classes]."""
    outputs = ours.predictor.predict(images, RequestedOutputs(1, logits=True))
    return np.array([output.logits for output in outputs])


def reload(bench: Bench) -> None:
    """Load a tiny model repeatedly while another model is served, and compare all answers.

    The tiny model compiles fast, and takes as many streams as any. Each load is recorded at once.
    """
    size = bench.arguments.batches[0]
    models = [Ours(bench, [size], bench.folder), Ours(bench, [size], checkpoints.ensure(SMOKE)[0])]
    images = [random_pictures(ours.checkpoint, size) for ours in models]
    expected = [_logits(*pair) for pair in zip(models, images, strict=True)]
    worst = 0.0
    for number in range(3 if bench.arguments.smoke else _RELOADS):
        models[1] = Ours(bench, [size], checkpoints.ensure(SMOKE)[0])
        for ours, pictures_of, logits in zip(models, images, expected, strict=True):
            worst = max(worst, float(np.abs(_logits(ours, pictures_of) - logits).max()))
        bench.record.note(number + 1, "reload", "loads")
        bench.mark("largest difference of a logit over all loads", worst, _MARGIN, at_most=True)


def faults(bench: Bench) -> None:
    """Kill the engine under load, by `benchmarks.reliability`, which writes its own record."""
    options = ["--only", "kill-engine", "--workers", "2", "--rate", "50", "--seconds", "10"]
    options += itertools.chain.from_iterable(
        ["--setting", f"{n}={v}"] for n, v in _settings(bench, 2).items()
    )
    _become(
        "benchmarks.reliability", *options, "--record", str(bench.arguments.out / "faults.json")
    )


def tests(bench: Bench) -> None:
    """Run the tests that need CUDA."""
    _become(
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        str(REPOSITORY / "tests/model/runtime/cuda"),
    )


def _become(module: str, *options: str) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *options])


def _settings(bench: Bench, workers: int) -> dict[str, str]:
    """Return the environment of the measured service."""
    arguments = bench.arguments
    return {
        "VIT_CHECKPOINT": str(bench.folder),
        "VIT_DEVICE": arguments.device,
        "VIT_DTYPE": arguments.dtype,
        "VIT_COMPILE": "off" if arguments.smoke else "auto",
        "VIT_WORKERS": str(workers),
        "VIT_DRAIN_DELAY": "0",
        "VIT_QUEUE_SIZE": str(max(1024, 2 * arguments.connections)),
        "VIT_MAX_BATCH": str(arguments.batches[0]),
        **dict(pair.split("=", 1) for pair in arguments.settings),
    }


@contextmanager
def _server(bench: Bench, workers: int, **more: str) -> Iterator[Running]:
    """Start the measured service, with further settings."""
    config = _settings(bench, workers) | more
    picture = bench.files[0].read_bytes()
    with running(
        VITSERVE, Path(config["VIT_CHECKPOINT"]), config, picture=picture, timeout=300
    ) as server:
        yield server


STEPS: Final = {
    step.__name__: step
    for step in (
        smoke,
        maps,
        engine,
        profile,
        http,
        start,
        decode,
        pixels,
        pair,
        reload,
        faults,
        tests,
    )
}


def run_step(arguments: argparse.Namespace, name: str) -> None:
    """Run one step in this process, and record its error if it raises."""
    record = Record(arguments.out / "gpu.json", dtype=arguments.dtype, about={})
    try:
        STEPS[name](Bench(record, arguments))
    except Exception as error:
        record.section("errors")[name] = f"{type(error).__name__}: {error}"[:2000]
        record.save()
        raise


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("its time is up")
    )  # servers that it has started are stopped
    chosen = gpu.parse(sys.argv[1:])
    run_step(chosen, chosen.step)
