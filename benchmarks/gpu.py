"""vitserve on a GPU: `python -m benchmarks.gpu`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    smoke      a tiny model: does it compute, compile and answer over HTTP here?
    maps       maps and classes beside those of float32 on the CPU
    engine     images a second at each batch size: from host memory, with maps, with relevance, in an engine process
               that workers ask; and timm under torch.compile, with pixels that lie on the device
    http       JPEGs of about 500 x 375 and 124 kB over HTTP, with several numbers of web workers; p99 at half load
    start      seconds from start to ready, with an empty and with a warm compile cache
    faults     kill -9 of the engine under load, by `benchmarks.reliability`
    tests      the tests of CUDA

Each step is a process of its own, which ends when its time is up; a step that fails or hangs is recorded, and the next
one runs. Every figure is saved as soon as it is there. The same command goes on where the record stops. `--limit` is
the seconds of a whole run, of which each step has its share. Packages that the machine lacks come from the folder that
`make gpu-kit` has written, if it is there. `--device cpu --smoke` runs all of it in tiny form, to test the script, not
to measure. GPU.md says what to run in an hour.

benchmarks/results/gpu.json has what an H200 gave: smoke, maps, http and engine. The other steps have no record yet.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkpoints
from benchmarks.checkpoints import REPOSITORY, Shape
from benchmarks.record import Record, table

if TYPE_CHECKING:
    from benchmarks.servers import Running
    from model.checkpoint import Checkpoint
    from model.outputs import Outputs, RequestedOutputs
    from model.runtime.predictor import Predictor

# What is imported above comes with Python. All else may be missing or broken, and is imported within a step.

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_TOP_K = 5
_UNDER_WAY = 4
"""Batches that are launched before the device is waited for."""
_MARGIN = 0.02
"""Least distance of two scores that rounding to half the digits does not turn round."""
_READINGS = "driver_version,power.limit,power.draw,clocks.max.sm,clocks.sm,temperature.gpu,memory.used"
_LIMIT = 540.0
"""Seconds of a run, which `STEPS` shares out."""


class Bench:
    """What a step needs: the record, the command line, the checkpoint and the pictures."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        import torch  # noqa: PLC0415

        from benchmarks import pictures  # noqa: PLC0415

        self.record, self.arguments = record, arguments
        self.seconds: float = arguments.seconds
        self.folder = checkpoints.ensure(SMOKE if arguments.smoke else VITB16)[0]
        self.files, source = pictures.ensure()
        gpu = "none" if arguments.device == "cpu" else torch.cuda.get_device_name(arguments.device)
        record.data |= {"model": self.folder.name, "pictures": source, "gpu": gpu}

    def note(self, section: dict[str, Any], name: str, value: Any) -> None:
        """Put a value into the record, save it at once, and print it."""
        section[name] = round(value, 3) if isinstance(value, float) else value
        self.record.save()
        print(f"{name}: {section[name]}", flush=True)

    def mark(self, name: str, found: float, wanted: float, *, at_most: bool = False) -> None:
        """Record whether a mark is reached."""
        reached = found <= wanted if at_most else found >= wanted
        self.note(self.record.section("marks"), name, {"wanted": wanted, "found": found, "reached": reached})


class Ours:
    """Our predictor as a service runs it, given batches by as many threads as it has streams."""

    def __init__(self, bench: Bench, sizes: Sequence[int], folder: Path) -> None:
        from model.checkpoint import load_checkpoint  # noqa: PLC0415
        from model.runtime.predictor import Predictor  # noqa: PLC0415

        arguments = bench.arguments
        self.checkpoint = load_checkpoint(str(folder))
        began = time.perf_counter()
        self.predictor: Predictor = Predictor(
            self.checkpoint,
            device=arguments.device,
            dtype=arguments.dtype,
            compile_mode="off" if arguments.smoke else "auto",
            launch_sizes=sorted({1, *sizes}),
        )
        self.predictor.warm_up()
        about = {"seconds": round(time.perf_counter() - began, 1), "compiled": self.predictor.compiled}
        bench.note(bench.record.section("engine_start"), ", ".join(map(str, sizes)), about)

    def rate(self, asked: RequestedOutputs, size: int, seconds: float) -> float:
        """Images a second from host memory to host memory."""
        # Several batches in turn, so that none is answered from a cache.
        batches = itertools.cycle([random_pictures(self.checkpoint, size, seed) for seed in range(3)])

        def work() -> None:
            self.predictor.predict(next(batches), [asked] * size)

        with ThreadPoolExecutor(self.predictor.streams) as pool:
            return sum(pool.map(lambda _: rate_of(work, size, seconds), range(self.predictor.streams)))


class Reference:
    """timm's ViT of the same weights under torch.compile, with normalisation, softmax and top-k in one function."""

    def __init__(self, bench: Bench, checkpoint: Checkpoint) -> None:
        import timm  # noqa: PLC0415
        import torch  # noqa: PLC0415

        config, arguments = checkpoint.vit, bench.arguments
        self.checkpoint, self.device = checkpoint, torch.device(arguments.device)
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
        statistics_of = (checkpoint.preprocess.mean, checkpoint.preprocess.std)
        mean, std = (torch.tensor(each).reshape(1, -1, 1, 1).to(self.device) for each in statistics_of)

        def answer(pixels: torch.Tensor) -> Any:
            normal = ((pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std).to(dtype)
            return network(normal).float().softmax(dim=-1).topk(min(_TOP_K, config.num_classes))

        mode = None if arguments.smoke else arguments.reference_mode
        self.name = f"timm {timm.__version__}, {mode or 'uncompiled'}"
        self.answer = answer if mode is None else torch.compile(answer, mode=mode, dynamic=False)

    def rate(self, size: int, seconds: float) -> float:
        """Images a second of batches that lie on the device, whose answers stay there."""
        import torch  # noqa: PLC0415

        pixels = torch.from_numpy(random_pictures(self.checkpoint, size)).to(self.device)

        def work() -> None:
            for _ in range(_UNDER_WAY):
                self.answer(pixels)
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        with torch.no_grad():
            return rate_of(work, _UNDER_WAY * size, seconds)


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


@contextmanager
def meter(bench: Bench) -> Iterator[list[str]]:
    """Read the GPU twice a second; the list is filled when the block ends, and stays empty without nvidia-smi."""
    readings: list[str] = []
    if bench.arguments.device == "cpu" or shutil.which("nvidia-smi") is None:
        yield readings
        return
    command = ["nvidia-smi", f"--query-gpu={_READINGS}", "--format=csv,noheader,nounits", "--loop-ms=500"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        yield readings
        reader.terminate()
        readings += reader.communicate()[0].splitlines()


def smoke(bench: Bench) -> None:
    """A tiny model: computed, compiled, and one answer over HTTP. And what the machine is."""
    from benchmarks.load import Loader  # noqa: PLC0415
    from benchmarks.servers import OURS  # noqa: PLC0415
    from model.images.resample import is_compiled  # noqa: PLC0415
    from model.outputs import RequestedOutputs  # noqa: PLC0415

    section = bench.record.section("tiny model")
    bench.note(section, "resize", "compiled" if is_compiled() else "Pillow's")
    folder = checkpoints.ensure(SMOKE)[0]
    bench.note(section, "images/s", Ours(bench, [4], folder).rate(RequestedOutputs(_TOP_K), 4, 0.2))
    with _server(bench, 2, VIT_CHECKPOINT=str(folder)) as server:
        bench.note(section, "seconds to the first answer", server.answer_seconds)
        bench.note(section, "HTTP", Loader(bench.files, OURS).closed(server.url, connections=4, seconds=0.3).as_json())


def maps(bench: Bench) -> None:
    """Logits, classes and maps of photographs and noise beside float32's on the CPU, the worst picture counting."""
    import numpy as np  # noqa: PLC0415

    from model.images.preprocess import preprocess  # noqa: PLC0415
    from model.outputs import MapRequest, RequestedOutputs  # noqa: PLC0415
    from model.runtime.predictor import Predictor  # noqa: PLC0415

    section, ours = bench.record.section("beside float32 on the CPU"), Ours(bench, [16], bench.folder)
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


def engine(bench: Bench) -> None:
    """Rounds of one measurement each, for each batch size; ratios are taken within a round, marks are of the first."""
    from model.outputs import MapRequest, RequestedOutputs  # noqa: PLC0415

    sizes, section = bench.arguments.batches, bench.record.section("engine")
    ours = Ours(bench, sizes, bench.folder)
    row = MapRequest.row(ours.checkpoint.vit.depth - 1)
    kinds = {"ours": None, "with maps": row, "with relevance": MapRequest("relevance")}
    asked = {name: RequestedOutputs(_TOP_K, request) for name, request in kinds.items()}
    wanted = {"with maps / ours": 0.97, "with relevance / ours": 0.9, "engine process / ours": 0.93}
    try:
        reference = Reference(bench, ours.checkpoint)
        wanted["ours / reference"] = 1.15
    except (ImportError, RuntimeError) as error:  # as with a torchvision of another build
        reference = None
        bench.note(section, "no reference", f"{type(error).__name__}: {error}"[:500])
    for size in sizes:
        rounds: list[dict[str, float]] = []
        with _engine_process(bench, size) as process, meter(bench) as readings:
            for _ in range(bench.arguments.rounds):
                found = {name: ours.rate(each, size, bench.seconds) for name, each in asked.items()}
                found["engine process"] = process(bench.seconds)
                if reference is not None:
                    found["reference"] = reference.rate(size, bench.seconds)
                rounds.append({name: round(rate, 1) for name, rate in found.items()})
                bench.note(section, f"batches of {size}", rounds)
        bench.note(section, f"batches of {size}: {_READINGS}", readings)
        ratios = {}
        for pair in wanted:
            of, _, to = pair.partition(" / ")
            ratios[pair] = round(statistics.median(each[of] / each[to] for each in rounds), 3)
        bench.note(section, f"batches of {size}: ratios", ratios)
        if size == sizes[0]:
            bench.mark("images/s", statistics.median(each["ours"] for each in rounds), 12_000)
            for pair, mark in wanted.items():
                bench.mark(pair, ratios[pair], mark)


@contextmanager
def _engine_process(bench: Bench, size: int) -> Iterator[Callable[[float], float]]:
    """Start a service, and measure the rate of its engine's process: asked as by web workers, who decode nothing."""
    from benchmarks import engine_load  # noqa: PLC0415

    workers, pictures = bench.arguments.workers[0], _UNDER_WAY * size
    with (
        tempfile.TemporaryDirectory(prefix="vitserve-bench-") as folder,
        _server(bench, 2, TMPDIR=folder, VIT_MAX_BATCH=str(size)),
    ):
        [socket] = Path(folder).glob("vitserve-*/engine-*")
        yield lambda seconds: engine_load.rate(socket, workers=workers, pictures=pictures, seconds=seconds)


def http(bench: Bench) -> None:
    """Each number of workers, then half of the best rate as an open loop."""
    from benchmarks.load import Loader  # noqa: PLC0415
    from benchmarks.servers import OURS  # noqa: PLC0415

    arguments, seconds, section = bench.arguments, bench.seconds, bench.record.section("http")
    load = Loader(bench.files, OURS, processes=arguments.load_processes)
    for workers in arguments.workers:
        with _server(bench, workers) as server:
            peaks = [load.closed(server.url, connections=arguments.connections, seconds=seconds) for _ in range(4)]
            rate = statistics.median(each.rate for each in peaks[1:])  # the first finds sizes of pools and caches
            half = load.open(server.url, rate=rate / 2, seconds=seconds)
            alone = load.closed(server.url, connections=1, seconds=seconds)
            # Late itself, the generator would be measured, not the server.
            found = {"rate": rate, "half": half.as_json() | {"kept_up": half.rate > 0.95 * rate / 2}}
            bench.note(section, f"{workers} workers", found | {"alone": alone.as_json()})
    best = max(section.values(), key=lambda each: float(each["rate"]))
    cores = len(os.sched_getaffinity(0))
    bench.mark(f"JPEG over HTTP on {cores} cores, images/s", best["rate"], 5_000)
    bench.mark("HTTP, p99 at half load, ms", best["half"]["p99"], 25, at_most=True)


def start(bench: Bench) -> None:
    """The same start twice, with a compile cache of its own that is empty the first time."""
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
        own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton", "VIT_MAX_BATCH": ""}
        for name, mark in (("cold", 60), ("warm", 25)):
            with _server(bench, 1, **own) as server:
                bench.mark(f"seconds to ready, {name} compile cache", server.start_seconds, mark, at_most=True)


def faults(bench: Bench) -> None:
    """kill -9 of the engine while requests come, by `benchmarks.reliability`, whose record lies beside this one."""
    options = ["--only", "kill-engine", "--workers", "2", "--rate", "50", "--seconds", "10"]
    options += itertools.chain.from_iterable(["--setting", f"{n}={v}"] for n, v in _settings(bench, 2).items())
    _become("benchmarks.reliability", *options, "--record", str(bench.arguments.out / "faults.json"))


def tests(bench: Bench) -> None:
    """Become the tests that need CUDA."""
    _become("pytest", "-q", "-p", "no:cacheprovider", "--tb=short", str(REPOSITORY / "tests/model/runtime/cuda"))


def _become(module: str, *options: str) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *options])


STEPS: Mapping[str, tuple[Callable[[Bench], None], float]] = {
    "smoke": (smoke, 90),
    "maps": (maps, 90),
    "engine": (engine, 240),
    "http": (http, 200),
    "start": (start, 200),
    "faults": (faults, 120),
    "tests": (tests, 200),
}
"""In the order of their worth, with the seconds of `_LIMIT` that each has at most."""


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
        "VIT_MAX_BATCH": str(arguments.batches[0]),
        **dict(pair.split("=", 1) for pair in arguments.settings),
    }


@contextmanager
def _server(bench: Bench, workers: int, **more: str) -> Iterator[Running]:
    """Start a service of what is measured, or with other settings."""
    from benchmarks.servers import VITSERVE, running  # noqa: PLC0415

    config, picture = _settings(bench, workers) | more, bench.files[0].read_bytes()
    with running(VITSERVE, Path(config["VIT_CHECKPOINT"]), config, picture=picture, timeout=300) as server:
        yield server


def run_step(arguments: argparse.Namespace, name: str) -> None:
    """Run one step in this process; what it raises is recorded."""
    record = Record(_path(arguments), dtype=arguments.dtype, about={})
    try:
        STEPS[name][0](Bench(record, arguments))
    except Exception as error:
        record.section("errors")[name] = f"{type(error).__name__}: {error}"[:2000]
        record.save()
        raise


def environment_of_steps(kit: Path, folder: Path) -> dict[str, str]:
    """Return the environment of the steps, which import what is in the kit; its compiled resize goes to its place.

    Args:
        kit: see `benchmarks.gpu_kit`; it may be absent.
        folder: an empty one, where its wheels are unpacked.
    """
    for library in kit.glob("*.so"):
        shutil.copy(library, REPOSITORY / "model" / "images")
    for wheel in kit.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    path = [str(folder), str(kit), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
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
    parser.add_argument("--reference-mode", default="reduce-overhead", help="of torch.compile for timm")
    parser.add_argument("--batches", type=int, nargs="+", default=[128], help="all but `engine` takes the first")
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of web workers to try (default: by the cores)")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="of one measurement")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds of the whole run")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="folder of the record")
    parser.add_argument("--kit", type=Path, default=REPOSITORY / "dist" / "gpu-kit", help="folder of `make gpu-kit`")
    parser.add_argument("--smoke", action="store_true", help="tiny model and times, nothing compiled: tests the script")
    arguments = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    arguments.workers = arguments.workers or [max(2, share * cores // 16) for share in (8, 12)]
    if arguments.smoke:
        arguments.batches, arguments.dtype, arguments.rounds, arguments.seconds = [4], "float32", 1, 0.3
        arguments.workers, arguments.connections, arguments.load_processes = [2], 4, 1
    return arguments


def main(argv: Sequence[str]) -> int:
    """Measure, print, save. 0: no step failed; 1: some did."""
    arguments = parse(argv)
    if arguments.step is not None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("its time is up"))  # servers that it has started are stopped
        run_step(arguments, arguments.step)
        return 0
    record = Record(_path(arguments), dtype=arguments.dtype, about={"smoke": arguments.smoke})
    done = set(record.section("seconds")) - set(record.section("errors"))
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory(prefix="vitserve-kit-") as folder:
        environment = environment_of_steps(arguments.kit, Path(folder))
        for name in arguments.only or [name for name in STEPS if name not in done]:
            began = time.monotonic()
            allowed = min(STEPS[name][1] * arguments.limit / _LIMIT, end - began)
            if allowed < 10:
                print(f"\n== {name}: left for the next run, the time is up", flush=True)
                continue
            print(f"\n== {name}, at most {allowed:.0f} s", flush=True)
            record.section("errors").pop(name, None)
            record.save()
            command = [sys.executable, "-m", "benchmarks.gpu", *argv, "--step", name]
            timed = ["timeout", "--foreground", "--kill-after=20", str(allowed), *command]
            code = subprocess.run(timed, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
            record.reload()  # the step has written into it
            if code:
                record.section("errors").setdefault(name, f"ended with {code}; 124: its time was up")
            record.section("seconds")[name] = round(time.monotonic() - began, 1)
            record.save()
    rows = [(name, *mark.values()) for name, mark in record.section("marks").items()]
    print("\n" + table(["mark", "wanted", "found", "reached"], rows))
    errors = record.section("errors")
    print(f"record: {record.path}; failed: {', '.join(errors) or 'none'}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
