"""Builds the predictor that the settings name; no other file of the service loads a model, and torch with it."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from service.engine.devices import VISIBLE, gpus_are_here, visible_devices
from service.engine.messages import ModelInfo, attributes
from service.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.predictor import Predictor

logger = logging.getLogger(__name__)


def checkpoint_from(settings: Settings) -> Checkpoint:
    """Read the checkpoint that the settings name; raises `CheckpointError` if it cannot be read exactly."""
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

    folder = None if settings.checkpoint_folder is None else Path(settings.checkpoint_folder).resolve()
    is_below = folder is not None and Path(settings.checkpoint).resolve().is_relative_to(folder)
    return load_checkpoint(
        settings.checkpoint,
        image_size=settings.image_size,
        preprocess=settings.preprocess,
        labels=settings.labels,
        architecture=settings.architecture,
        weights=settings.weights,
        keys=settings.keys,
        base=settings.base,
        bases_below=folder if is_below else None,
        templates=settings.templates,
    )


def load_predictor(settings: Settings) -> tuple[Predictor, ModelInfo]:
    """Read the checkpoint and put its model on the device; the caller warms it up.

    Raises:
        CheckpointError: the checkpoint cannot be read exactly.
        DeviceError: the device, dtype or backend is not available here.
    """
    device = settings.device
    if device.startswith("cuda"):
        os.environ[VISIBLE], device = visible_devices(device), "cuda:0"
    # OpenMP threads that spin between operators starve the decode threads beside them. Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from model.runtime.device import unusable_reason  # noqa: PLC0415  torch takes seconds to import
    from model.runtime.predictor import Predictor  # noqa: PLC0415

    checkpoint = checkpoint_from(settings)
    for assumption in checkpoint.assumed:
        logger.info("%s: assumed: %s", checkpoint.name, assumption)
    for note in checkpoint.notes:
        logger.info("%s: %s", checkpoint.name, note)
    predictor = Predictor(
        checkpoint,
        device=device,
        device_name=settings.device if settings.device.startswith("cuda:") else None,
        dtype=settings.dtype,
        least_agreement=settings.agreement,
        compile_mode="auto" if settings.compile == "no-graphs" else settings.compile,
        backend=settings.backend,
        max_batch=settings.max_batch,
        threads=settings.threads or _torchs_threads(device),
        streams=settings.streams,
        graphs=settings.compile != "no-graphs",
    )
    if predictor.device == "cpu" and settings.device == "auto" and gpus_are_here():
        logger.error("THE GPU IS NOT USED: %s", unusable_reason())
    facts = attributes(ModelInfo.__dataclass_fields__, checkpoint, predictor)
    return predictor, ModelInfo(**facts | {"name": settings.model_name or checkpoint.name})


@functools.cache
def _torchs_threads(device: str) -> int | None:
    """Return how many threads torch takes by itself on a CPU; when a batch has run, it tells what that was given."""
    import torch  # noqa: PLC0415  it takes seconds

    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return torch.get_num_threads() if on_cpu else None
