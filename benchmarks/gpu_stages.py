"""The stages of the GPU benchmark, and the record that they fill; see `benchmarks.gpu`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks import checkpoints, pictures
from benchmarks.checkpoints import Shape
from benchmarks.load import Load
from benchmarks.loadgen import Plan, load
from benchmarks.record import Record, table
from benchmarks.servers import OURS, VITSERVE, Running, running

if TYPE_CHECKING:
    from benchmarks.gpu_engine import Ours, Reference
    from model.checkpoint import Checkpoint
    from model.config import PreprocessConfig

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

_ENGINE_RATIO, _ENGINE_RATE, _HTTP_SHARE, _HTTP_RATE, _START_SECONDS = 1.25, 12_000, 0.85, 5_000, 60
_AGREEMENT_PICTURES = 512


class Benchmark:
    """The stages, and the record that they fill."""

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        self._record = record
        self._arguments = arguments
        self._seconds: float = arguments.seconds
        self._shape = SMOKE if arguments.smoke else VITB16
        checkpoints.SHAPES.setdefault(self._shape.name, self._shape)
        self._folder, origin = checkpoints.ensure(self._shape.name)
        self._files, source = pictures.ensure()
        record.data |= {"model": self._shape.name, "weights": origin, "pictures": source}

    @property
    def _checkpoint(self) -> Checkpoint:
        from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

        return load_checkpoint(str(self._folder))

    def _ours(self, variant: str, batches: Sequence[int]) -> Ours:
        from benchmarks.gpu_engine import Ours  # noqa: PLC0415

        made = Ours(
            self._checkpoint,
            device=self._arguments.device,
            dtype=self._arguments.dtype,
            compile_mode=variant,  # type: ignore[arg-type]
            batches=batches,
        )
        print(f"ours ({variant}): {made.predictor.compiled}, ready in {made.ready_seconds:.1f} s", flush=True)
        return made

    def _reference(self) -> Reference:
        from benchmarks.gpu_engine import Reference  # noqa: PLC0415

        mode = None if self._arguments.smoke else "max-autotune"
        return Reference(self._checkpoint, device=self._arguments.device, dtype=self._arguments.dtype, mode=mode)

    def sweep(self) -> None:
        """Each variant and batch size once; what the record has is not measured again."""
        sweep = self._record.section("sweep")
        for variant in self._arguments.variants:
            found = sweep.setdefault(f"ours, {variant}", {})
            if missing := [batch for batch in self._arguments.batches if str(batch) not in found]:
                with _memory_given_back():
                    ours = self._ours(variant, missing)
                    sweep.setdefault("compiled", {})[variant] = ours.predictor.compiled
                    for batch in missing:
                        self._note(found, str(batch), ours.rate(batch, self._seconds), f"sweep, ours ({variant})")
                    del ours
        found = sweep.setdefault("reference", {})
        if missing := [batch for batch in self._arguments.batches if str(batch) not in found]:
            with _memory_given_back():
                reference = self._reference()
                sweep["reference is"] = reference.name
                for batch in missing:
                    self._note(found, str(batch), reference.rate(batch, self._seconds), f"sweep, {reference.name}")
                del reference

    def engine(self) -> None:
        """Rounds of one measurement each; the ratio is taken within a round."""
        variant, ours_batch = self._best_of_ours()
        reference_batch = self._best("reference")
        with _memory_given_back():
            ours, reference = self._ours(variant, [ours_batch]), self._reference()
            rounds = []
            for _ in range(self._arguments.rounds):
                mine = ours.rate(ours_batch, self._seconds)
                theirs = reference.rate(reference_batch, self._seconds)
                resident = reference.resident_rate(reference_batch, self._seconds)
                rounds.append({"ours": round(mine, 1), "reference": round(theirs, 1), "resident": round(resident, 1)})
            count = max(1, _AGREEMENT_PICTURES // reference_batch) * reference_batch
            equal = self._agreement(ours, reference, count, reference_batch)
            section = self._record.section("engine")
            section |= {
                "ours": {"variant": variant, "batch": ours_batch, "compiled": ours.predictor.compiled},
                "reference": {"name": reference.name, "batch": reference_batch},
                "rounds": rounds,
                "ours_rate": statistics.median(r["ours"] for r in rounds),
                "reference_rate": statistics.median(r["reference"] for r in rounds),
                "reference_resident_rate": statistics.median(r["resident"] for r in rounds),
                "ratio": round(statistics.median(r["ours"] / r["reference"] for r in rounds), 3),
                "ratio_to_resident": round(statistics.median(r["ours"] / r["resident"] for r in rounds), 3),
                "equal_top1": equal,
            }
            del ours, reference
        names = ("ours_rate", "reference_rate", "reference_resident_rate", "ratio", "ratio_to_resident", "equal_top1")
        print(table(["engine", "images/s or ratio"], [(name, section[name]) for name in names]), flush=True)
        other = "timm" if section["reference"]["name"].startswith("timm ") else "a plain ViT (no timm)"
        self._mark(f"engine / {other} at its best", section["ratio"], _ENGINE_RATIO)
        self._mark("engine, images/s", section["ours_rate"], _ENGINE_RATE)

    def _agreement(self, ours: Ours, reference: Reference, count: int, batch: int) -> float:
        """Share of the pictures whose best class is the same: the photographs, and noise."""
        import numpy as np  # noqa: PLC0415

        from benchmarks.gpu_engine import random_pictures  # noqa: PLC0415
        from model.images.preprocess import preprocess  # noqa: PLC0415

        subject = random_pictures(ours.checkpoint, count, seed=9)
        for index, file in enumerate(self._files[:count]):
            subject[index] = preprocess(file.read_bytes(), ours.checkpoint.preprocess)
        return float(np.mean(ours.top1(subject) == reference.top1(subject, batch=batch)))

    def http(self) -> None:
        """The number of workers is chosen first; then rounds of decoding alone, engine alone, and HTTP."""
        variant, batch = self._best_of_ours()
        section = self._record.section("http")
        tried = section.setdefault("workers", {})
        for workers in self._arguments.workers:
            with self._server(workers, variant, batch) as server:
                found = self._closed(server, self._arguments.connections, self._seconds)
                tried[str(workers)] = found.as_json()
                self._record.save()
                print(f"http, {workers} workers: {found.rate:.0f}/s", flush=True)
        workers = int(max(tried, key=lambda name: float(tried[name]["rate"])))
        rounds: list[dict[str, Any]] = []
        with _memory_given_back(), self._server(workers, variant, batch) as server:
            ours = self._ours(variant, [batch])
            preprocess = ours.checkpoint.preprocess
            for _ in range(self._arguments.rounds):
                decode = decode_rate([file.read_bytes() for file in self._files], preprocess, self._seconds)
                engine = ours.rate(batch, self._seconds)
                found = self._closed(server, self._arguments.connections, self._seconds)
                share = found.rate / min(decode, engine)
                rounds.append(
                    {
                        "decode": round(decode, 1),
                        "engine": round(engine, 1),
                        "http": found.as_json(),
                        "share": round(share, 3),
                    }
                )
            del ours
        section |= {
            "settings": {"workers": workers, "variant": variant, "max_batch": batch},
            "connections": self._arguments.connections,
            "load_processes": self._arguments.load_processes,
            "rounds": rounds,
            "rate": statistics.median(r["http"]["rate"] for r in rounds),
            "decode_rate": statistics.median(r["decode"] for r in rounds),
            "engine_rate": statistics.median(r["engine"] for r in rounds),
            "share": round(statistics.median(r["share"] for r in rounds), 3),
        }
        names = ("rate", "decode_rate", "engine_rate", "share")
        print(table(["http", "images/s or share"], [(name, section[name]) for name in names]), flush=True)
        self._mark("HTTP / the smaller of decoding and engine", section["share"], _HTTP_SHARE)
        self._mark("HTTP, images/s (the aim)", section["rate"], _HTTP_RATE)

    def latency(self) -> None:
        """In-process and over HTTP; the full rate is measured here, so that the stage stands alone."""
        variant, batch = self._best_of_ours()
        section = self._record.section("latency")
        with _memory_given_back():
            ours, reference = self._ours(variant, [1]), self._reference()
            section["engine, batch 1"] = ours.latency(self._seconds)
            section["reference, batch 1"] = reference.latency(self._seconds) | {"name": reference.name}
            del ours, reference
        tried = self._record.section("http").get("workers", {})
        workers = int(max(tried, key=lambda name: float(tried[name]["rate"]))) if tried else self._arguments.workers[0]
        with self._server(workers, variant, batch) as server:
            section["HTTP, one at a time"] = self._closed(server, 1, self._seconds).as_json()
            full = self._closed(server, self._arguments.connections, self._seconds)
            section["HTTP, full"] = full.as_json()
            if not full.rate:
                raise RuntimeError(f"the server answered nothing within {self._seconds:g} s: {full}")
            for share in (0.5, 0.9):
                wanted = share * full.rate
                found = load(self._plan(server, rate=wanted), processes=self._arguments.load_processes)
                # A generator that is late itself would be measured instead of the server.
                kept = {"wanted": round(wanted, 1), "kept_up": found.rate > 0.95 * wanted}
                section[f"HTTP, {share:.0%} load"] = found.as_json() | kept
        rows = [
            (name, value.get("rate"), value.get("p50", value.get("p50_ms")), value.get("p99", value.get("p99_ms")))
            for name, value in section.items()
        ]
        print(table(["latency", "per second", "p50 ms", "p99 ms"], rows), flush=True)

    def start(self) -> None:
        """The same start twice, with a compile cache of its own that is empty the first time."""
        variant, _ = self._best_of_ours()
        section = self._record.section("start")
        with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
            environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
            for name in ("cold", "warm"):
                with self._server(1, variant, None, environment) as server:
                    section[f"{name}_seconds"] = round(server.start_seconds, 1)
                print(f"start, {name} compile cache: {section[f'{name}_seconds']} s", flush=True)
                self._record.save()
        self._mark("seconds to ready, warm compile cache", section["warm_seconds"], _START_SECONDS, at_most=True)

    @contextmanager
    def _server(
        self, workers: int, variant: str, batch: int | None, environment: dict[str, str] | None = None
    ) -> Iterator[Running]:
        connections = self._arguments.connections
        config = {
            "VIT_DEVICE": self._arguments.device,
            "VIT_DTYPE": self._arguments.dtype,
            "VIT_COMPILE": variant,
            "VIT_WORKERS": str(workers),
            "VIT_DRAIN_DELAY": "0",
            "VIT_QUEUE_SIZE": str(max(256, 4 * connections)),
            **({} if batch is None else {"VIT_MAX_BATCH": str(batch)}),
            **dict(pair.split("=", 1) for pair in self._arguments.settings),
            **(environment or {}),
        }
        first = self._files[0].read_bytes()
        with running(VITSERVE, self._folder, config, picture=first, timeout=900) as server:
            self._closed(server, connections, min(2, self._seconds))  # threads and allocators find their sizes
            yield server

    def _closed(self, server: Running, connections: int, seconds: float) -> Load:
        plan = self._plan(server, connections=connections, seconds=seconds)
        return load(plan, processes=self._arguments.load_processes)

    def _plan(
        self, server: Running, *, connections: int | None = None, rate: float | None = None, seconds: float = 0
    ) -> Plan:
        files = [file.read_bytes() for file in self._files]
        return Plan(server.url, OURS, files, seconds or self._seconds, connections, rate)

    def _best_of_ours(self) -> tuple[str, int]:
        """Variant and batch size of the sweep's best rate; without a sweep the first variant and 64."""
        sweep = self._record.data.get("sweep", {})
        rates = {
            (variant, int(batch)): rate
            for variant in self._arguments.variants
            for batch, rate in sweep.get(f"ours, {variant}", {}).items()
        }
        return max(rates, key=lambda key: float(rates[key])) if rates else (self._arguments.variants[0], self._default)

    def _best(self, name: str) -> int:
        found = self._record.data.get("sweep", {}).get(name, {})
        return int(max(found, key=lambda batch: float(found[batch]))) if found else self._default

    @property
    def _default(self) -> int:
        return 64 if 64 in self._arguments.batches else int(self._arguments.batches[0])

    def _note(self, found: dict[str, Any], key: str, rate: float, what: str) -> None:
        found[key] = round(rate, 1)
        self._record.save()
        print(f"{what}, batch {key}: {rate:.0f}/s", flush=True)

    def _mark(self, name: str, found: float, wanted: float, *, at_most: bool = False) -> None:
        reached = found <= wanted if at_most else found >= wanted
        self._record.section("marks")[name] = {"wanted": wanted, "found": found, "reached": reached}
        self._record.save()


@contextmanager
def _memory_given_back() -> Iterator[None]:
    """The servers that are started later need the GPU's memory, and the compiler a clean table."""
    import torch  # noqa: PLC0415

    try:
        yield
    finally:
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode_rate(files: Sequence[bytes], config: PreprocessConfig, seconds: float) -> float:
    """Pictures per second that all cores decode when they do nothing else; one process a core."""
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(cores)
    results: Any = context.Queue()
    workers = [
        context.Process(target=_decode, args=(list(files), config.model_dump_json(), seconds, begin, results))
        for _ in range(cores)
    ]
    for worker in workers:
        worker.start()
    rates = [float(results.get(timeout=seconds + 120)) for _ in workers]
    for worker in workers:
        worker.join()
    return sum(rates)


def _decode(files: Sequence[bytes], config: str, seconds: float, begin: Any, results: Any) -> None:
    from model.config import PreprocessConfig  # noqa: PLC0415
    from model.images.preprocess import preprocess  # noqa: PLC0415

    parsed = PreprocessConfig.model_validate_json(config)
    preprocess(files[0], parsed)
    begin.wait(100)
    done, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        preprocess(files[done % len(files)], parsed)
        done += 1
    results.put(done / (now - started))
