"""Builds the predictor that the settings name; no other file of the service loads a model, and torch with it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from service.engine.messages import ModelInfo, attributes
from service.settings import Settings

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.predictor import Predictor

logger = logging.getLogger(__name__)


def checkpoint_from(settings: Settings) -> Checkpoint:
    """Read the checkpoint that the settings name; raises `CheckpointError` if it cannot be read exactly."""
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

    return load_checkpoint(
        settings.checkpoint,
        image_size=settings.image_size,
        preprocess=settings.preprocess,
        labels=settings.labels,
        architecture=settings.architecture,
    )


def load_predictor(settings: Settings) -> tuple[Predictor, ModelInfo]:
    """Read the checkpoint and put its model on the device; the caller warms it up.

    Raises:
        CheckpointError: the checkpoint cannot be read exactly.
        DeviceError: the device, dtype or backend is not available here.
    """
    # OpenMP threads that spin between operators starve the decode threads beside them. Read when torch loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from model.runtime.predictor import Predictor  # noqa: PLC0415  torch takes seconds to import

    checkpoint = checkpoint_from(settings)
    for note in checkpoint.notes:
        logger.info("%s: %s", checkpoint.name, note)
    predictor = Predictor(
        checkpoint,
        device=settings.device,
        dtype=settings.dtype,
        compile_mode=settings.compile,
        backend=settings.backend,
        max_batch=settings.max_batch,
        threads=settings.threads,
        streams=settings.streams,
        graphs=settings.cuda_graphs == "auto",
    )
    facts = attributes(ModelInfo.__dataclass_fields__, checkpoint, predictor)
    return predictor, ModelInfo(**facts | {"name": settings.model_name or checkpoint.name})
