"""What all steps of the GPU benchmark share: the record, the model and pictures, the settings found to be best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import checkpoints, pictures
from benchmarks.checkpoints import Shape
from benchmarks.record import Record

if TYPE_CHECKING:
    from benchmarks.gpu_engine import Ours
    from benchmarks.gpu_reference import ReferenceProcess
    from model.checkpoint import Checkpoint

VITB16 = Shape("vitb16", 224, 16, 768, 12, 12, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMOKE = Shape("smoke", 32, 16, 32, 2, 2, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Bench:
    """The record and everything that a step needs to fill its part of it.

    Attributes:
        gpu: the GPU's id for nvidia-smi; None on a CPU.
        files: the JPEGs that are sent.
    """

    def __init__(self, record: Record, arguments: argparse.Namespace) -> None:
        self.record = record
        self.arguments = arguments
        self.seconds: float = arguments.seconds
        self.gpu: str | None = record.data.get("gpu", {}).get("uuid")
        shape = SMOKE if arguments.smoke else VITB16
        checkpoints.SHAPES.setdefault(shape.name, shape)
        self.folder, origin = checkpoints.ensure(shape.name)
        self.files, source = pictures.ensure()
        record.data |= {"model": shape.name, "weights": origin, "pictures": source}
        self._reference: ReferenceProcess | None = None
        self._ours: tuple[str, frozenset[int], Ours] | None = None

    def checkpoint(self) -> Checkpoint:
        """Read the model's checkpoint."""
        from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

        return load_checkpoint(str(self.folder))

    def ours(self, variant: str, batches: Sequence[int] = (), *, dtype: str | None = None) -> Ours:
        """Return our engine for these batch sizes, the one that is there if it has them; a start is recorded.

        Args:
            batches: none are the sizes and the largest batch of a service without settings.
            dtype: another one than the command line's; such an engine is not kept for others.
        """
        wanted = frozenset({1, *batches} if batches else ())
        if self._ours is not None and dtype is None:
            kept_variant, kept, made = self._ours
            if kept_variant == variant and (wanted <= kept if wanted else not kept):
                return made
        self.release()
        from benchmarks.gpu_engine import Ours  # noqa: PLC0415

        arguments = self.arguments
        made = Ours(
            self.checkpoint(),
            device=arguments.device,
            dtype=dtype or arguments.dtype,
            compile_mode=variant,  # type: ignore[arg-type]
            batches=batches,
        )
        self._ours = f"{dtype} {variant}" if dtype else variant, wanted, made
        sizes = ", ".join(map(str, sorted(batches))) or "of a service"
        about = {"compiled": made.predictor.compiled, **made.seconds, **made.peak_memory()}
        self.note(self.record.section("engine_start"), f"{self._ours[0]}, batches {sizes}", about)
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
                device=arguments.device,
                dtype=arguments.dtype,
                mode=None if arguments.smoke else "max-autotune",
                library=arguments.reference,
            )
        return self._reference

    def close(self) -> None:
        """Give back the memory of both engines."""
        self.release()
        if self._reference is not None:
            self._reference.close()
            self._reference = None

    def best_of_ours(self) -> tuple[str, int]:
        """Variant and batch size of the sweep's best rate; without a sweep the first variant and 64."""
        sweep = self.record.data.get("sweep", {})
        rates = {
            (variant, int(batch)): rate
            for variant in self.arguments.variants
            for batch, rate in sweep.get(f"ours, {variant}", {}).items()
        }
        return max(rates, key=lambda key: float(rates[key])) if rates else (self.arguments.variants[0], self.default)

    def best_of_reference(self) -> int:
        """Batch size of the reference's best rate; without a sweep 64."""
        found = self.record.data.get("sweep", {}).get("reference", {})
        return int(max(found, key=lambda batch: float(found[batch]))) if found else self.default

    @property
    def default(self) -> int:
        """The batch size without a sweep: 64, or the first of those asked for."""
        return 64 if 64 in self.arguments.batches else int(self.arguments.batches[0])

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
