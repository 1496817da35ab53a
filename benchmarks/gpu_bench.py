"""What the steps of the GPU benchmark share: the record, the time, models and pictures, the settings that are best."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import checkpoints, gpu_machine, pictures
from benchmarks.checkpoints import Shape
from benchmarks.record import Record

if TYPE_CHECKING:
    from benchmarks.gpu_engine import Ours
    from benchmarks.gpu_reference import ReferenceProcess

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Bench:
    """The record and everything that a step needs to fill its part of it.

    Args:
        end: the monotonic second at which the step is stopped.

    Attributes:
        gpu: the GPU's id for NVML; None on a CPU.
        folder: the checkpoint that is measured.
        files: the JPEGs that are sent.
    """

    def __init__(self, record: Record, arguments: argparse.Namespace, end: float) -> None:
        self.record = record
        self.arguments = arguments
        self.seconds: float = arguments.seconds
        record.data["gpu"] = about = gpu_machine.facts(arguments.device)
        self.gpu: str | None = about.get("uuid")
        self._end = end
        self.folder = self.checkpoint_of(SMOKE if arguments.smoke else VITB16)
        self.files, source = pictures.ensure()
        record.data |= {"model": self.folder.name, "weights": (self.folder / "SOURCE").read_text(), "pictures": source}
        self._reference: ReferenceProcess | None = None
        self._ours: Ours | None = None

    def left(self) -> float:
        """Return the seconds until the step is stopped, one at least."""
        return max(1.0, self._end - time.monotonic())

    @staticmethod
    def checkpoint_of(shape: Shape) -> Path:
        """Return the folder of a model of this shape, made if absent."""
        checkpoints.SHAPES.setdefault(shape.name, shape)
        return checkpoints.ensure(shape.name)[0]

    def ours(
        self, variant: str, batches: Sequence[int] = (), *, dtype: str | None = None, folder: Path | None = None
    ) -> Ours:
        """Start our engine for these batch sizes in place of the one that there was, and record what that took.

        Args:
            batches: none are the sizes and the largest batch of a service without settings.
            dtype: another one than the command line's.
            folder: another checkpoint than the one that is measured.
        """
        self.release()
        from benchmarks.gpu_engine import Ours  # noqa: PLC0415  torch takes seconds to import
        from model.checkpoint import load_checkpoint  # noqa: PLC0415

        arguments = self.arguments
        made = self._ours = Ours(
            load_checkpoint(str(folder or self.folder)),
            device=arguments.device,
            dtype=dtype or arguments.dtype,
            compile_mode=variant,  # type: ignore[arg-type]
            batches=batches,
        )
        sizes = ", ".join(map(str, sorted(batches))) or "of a service"
        name = f"{(folder or self.folder).name}, {dtype or arguments.dtype}, {variant}, batches {sizes}"
        about = {"compiled": made.predictor.compiled, **made.seconds, **made.peak_memory()}
        self.note(self.record.section("engine_start"), name, about)
        return made

    def release(self) -> None:
        """Give back the memory of our engine, which servers need."""
        if self._ours is not None:
            from benchmarks.gpu_engine import give_memory_back  # noqa: PLC0415

            self._ours = None
            give_memory_back()

    def reference(self) -> ReferenceProcess:
        """Return the reference, started at the first call; what it has compiled it keeps."""
        if self._reference is None:
            from benchmarks.gpu_reference import ReferenceProcess  # noqa: PLC0415

            arguments = self.arguments
            self._reference = ReferenceProcess(
                self.folder,
                patience=self.left,
                device=arguments.device,
                dtype=arguments.dtype,
                mode=arguments.reference_mode,
            )
        return self._reference

    def close(self) -> None:
        """Give back the memory of both engines."""
        self.release()
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    def best_of_ours(self, share: float = 1) -> tuple[str, int]:
        """Return variant and batch size of the sweep's best rate; without a sweep the first variant and 64.

        Args:
            share: the smallest batch that reaches so much of the best rate is taken.
        """
        sweep = self.record.data.get("sweep", {})
        rates = {
            (variant, int(batch)): rate
            for variant in self.arguments.variants
            for batch, rate in sweep.get(f"ours, {variant}", {}).items()
        }
        if not rates:
            return self.arguments.variants[0], self.default
        enough = [key for key, rate in rates.items() if rate >= share * max(rates.values())]
        return min(enough, key=lambda key: key[1])

    def best_of_reference(self) -> int:
        """Return the batch size of the reference's best rate; without a sweep the first that was to be swept."""
        rates = self.record.data.get("sweep", {}).get("reference", {})
        default = int(self.arguments.reference_batches[0])
        return int(max(rates, key=lambda batch: float(rates[batch]))) if rates else default

    @property
    def default(self) -> int:
        """The batch size without a sweep: 64, or the first of those asked for."""
        return 64 if 64 in self.arguments.batches else int(self.arguments.batches[0])

    def service_settings(self, workers: int, variant: str, batch: int | None) -> dict[str, str]:
        """Return the environment of a service that serves what is measured; None is the service's own largest batch."""
        arguments = self.arguments
        return {
            "VIT_CHECKPOINT": str(self.folder),
            "VIT_DEVICE": arguments.device,
            "VIT_DTYPE": arguments.dtype,
            "VIT_COMPILE": variant,
            "VIT_WORKERS": str(workers),
            "VIT_DRAIN_DELAY": "0",
            "VIT_QUEUE_SIZE": str(max(1024, 2 * arguments.connections)),
            **({} if batch is None else {"VIT_MAX_BATCH": str(batch)}),
            **dict(pair.split("=", 1) for pair in arguments.settings),
        }

    def note(self, section: dict[str, Any], name: str, value: Any) -> None:
        """Put a value into the record, save it at once, and print it."""
        section[name] = value
        self.record.save()
        print(f"{name}: {value}", flush=True)

    def mark(self, name: str, found: float, wanted: float, *, at_most: bool = False) -> None:
        """Record whether a mark is reached."""
        reached = found <= wanted if at_most else found >= wanted
        self.note(self.record.section("marks"), name, {"wanted": wanted, "found": found, "reached": reached})


def read(files: Sequence[Path]) -> list[bytes]:
    """Read the pictures that are sent."""
    return [file.read_bytes() for file in files]
