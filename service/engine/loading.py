"""Builds the predictor that the settings name, from kept graphs if there are some, or with torch.

Only this file and `checkpoint_files` load a model, or torch.

If the process already has the backbone of a model, the model becomes another head of its predictor.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import zlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from model.errors import CheckpointError
from model.heads import Head
from model.outputs import embedding_width
from model.runtime.backend import WITHOUT_GRAPHS
from service.engine.cache_folder import graph_entry, keep_kernels
from service.engine.checkpoint_files import checkpoint_from, link_torch
from service.engine.devices import VISIBLE, gpus_are_here, visible_devices
from service.engine.messages import ModelInfo, attributes
from service.extension import extensions, naming
from service.settings import Settings

if TYPE_CHECKING:
    from model.calibration import LabelSets
    from model.checkpoint import Checkpoint
    from model.description import Description
    from model.features import Floats
    from model.runtime.openvino.kept import Keep
    from model.runtime.predictor import Predictor
    from service.engine.backbones import FindRunner

logger = logging.getLogger(__name__)


def load_predictor(
    settings: Settings, find: FindRunner = lambda _: None
) -> tuple[Predictor, ModelInfo]:
    """Read the checkpoint and put its model on the device; the caller warms it up.

    Args:
        settings: settings of the model.
        find: returns the predictor that already has a backbone, by the backbone's key.

    Raises:
        CheckpointError: the checkpoint cannot be read exactly.
        DeviceError: the device, dtype or backend is not available here.
    """
    kept = _load_kept(settings, find)
    return kept or _load(settings, find)


def _load_kept(settings: Settings, find: FindRunner) -> tuple[Predictor, ModelInfo] | None:
    """Load the predictor from kept graphs; return None if they were not kept."""
    # OpenMP threads that spin between operators starve the decode threads. torch reads this when it
    # is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    entry = graph_entry(settings)
    manifest = None if entry is None else entry.manifest()
    if entry is None or manifest is None:
        return None
    key = _key(settings, manifest.backbone)
    shared = cast("Predictor | None", find(key))
    if shared is not None:
        head = entry.head(manifest)
        return shared, _add_further_model(settings, manifest.checkpoint, shared, key, head)
    from model.runtime.start import kept_predictor  # noqa: PLC0415

    def on_read(checkpoint: Description) -> None:
        _label_sets(settings, checkpoint)  # refuses a wrong coverage before a compilation

    read = partial(checkpoint_from, settings)
    kept = kept_predictor(entry, read, on_read, manifest=manifest, max_batch=settings.max_batch)
    if kept is None:
        return None
    return kept, _add_first_model(settings, kept.checkpoint, kept, key)


class _Read(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        key: key of its backbone.
        head: its head, for a predictor that another model shares; None if the backbone has it.
        keep: keeps its graph; None if graphs are not kept.
    """

    checkpoint: Checkpoint
    key: str
    head: Head | None
    keep: Keep | None


def _load(settings: Settings, find: FindRunner) -> tuple[Predictor, ModelInfo]:
    """Load the predictor from the checkpoint, with torch."""
    read = _read(settings)
    shared = cast("Predictor | None", find(read.key))
    if shared is None:
        return _build(settings, read)
    info = _add_further_model(settings, read.checkpoint, shared, read.key, read.head)
    if read.keep is not None:  # only the head, because the other model has kept the graph
        read.keep(None, read.checkpoint, info.parameters, shared.dtype)
    return shared, info


def _key(settings: Settings, backbone: str) -> str:
    """Return the key that models with the same predictor have in common."""
    return f"{backbone}-{settings.dtype}"


def _read(settings: Settings) -> _Read:
    if settings.device.startswith("cuda"):
        show_alone(settings.device)
    link_torch()
    # torch takes seconds to import.
    from model.checkpoint.checkpoint import backbone_and_head  # noqa: PLC0415
    from model.checkpoint.local_files import recording  # noqa: PLC0415
    from model.runtime.openvino.kept import Keep  # noqa: PLC0415

    entry = graph_entry(settings)
    with recording() as files:
        checkpoint = checkpoint_from(settings)
    _label_sets(settings, checkpoint)
    backbone, head = backbone_and_head(checkpoint)
    keep = None if entry is None else Keep(entry, files, backbone, head)
    return _Read(checkpoint, _key(settings, backbone), head, keep)


def _build(settings: Settings, read: _Read) -> tuple[Predictor, ModelInfo]:
    # torch takes seconds to import.
    from model.runtime.device import unusable_reason  # noqa: PLC0415
    from model.runtime.predictor import Predictor  # noqa: PLC0415

    keep_kernels(settings)
    is_cuda = settings.device.startswith("cuda")
    # A process whose capture of graphs broke off is started again without graphs.
    compile_mode: str = settings.compile
    has_graphs = compile_mode != WITHOUT_GRAPHS
    predictor = Predictor(
        read.checkpoint,
        device="cuda:0" if is_cuda else settings.device,
        device_name=settings.device if settings.device.startswith("cuda:") else None,
        dtype=settings.dtype,
        compile_mode=settings.compile if has_graphs else "auto",
        max_batch=settings.max_batch,
        graphs=has_graphs,
        transfer=_needs_transfer_features(settings),
        keep=read.keep,
    )
    if predictor.device == "cpu" and settings.device == "auto" and gpus_are_here():
        logger.error("THE GPU IS NOT USED: %s", unusable_reason())
    return predictor, _add_first_model(settings, read.checkpoint, predictor, read.key)


@functools.cache
def show_alone(device: str) -> None:
    """Make only one device visible to this process, at the first load."""
    os.environ[VISIBLE] = visible_devices(device)


def _needs_transfer_features(settings: Settings) -> bool:
    for extension in extensions():
        if extension.reads_transfer_features is not None:
            with naming(extension, "reads_transfer_features"):
                if extension.reads_transfer_features(settings):
                    return True
    return False


# A model in its predictor


def _add_first_model(
    settings: Settings, checkpoint: Description, predictor: Predictor, key: str
) -> ModelInfo:
    """Give a new predictor the coverage and thresholds of its model; return its description."""
    thresholds = _thresholds(settings, checkpoint)
    if settings.coverage is not None:
        predictor.set_coverage(settings.coverage)
    predictor.own = replace(predictor.own, thresholds=thresholds)
    facts = _facts(settings, checkpoint, predictor, key, thresholds)
    predictor.heads[facts["head"]] = predictor.own
    return ModelInfo(**facts)


def _add_further_model(
    settings: Settings,
    checkpoint: Description,
    predictor: Predictor,
    key: str,
    head: Head | None,
) -> ModelInfo:
    """Add a model to the predictor of its backbone, and return the model's description.

    Args:
        settings: settings of the model.
        checkpoint: description of its checkpoint.
        predictor: predictor of the other models with this backbone.
        key: key of the backbone.
        head: head of the model; None if the head is part of the backbone.
    """
    label_sets = _label_sets(settings, checkpoint)
    thresholds = _thresholds(settings, checkpoint)
    facts = _facts(settings, checkpoint, predictor, key, thresholds)
    if head is None:
        # `np.asarray` compares None, too.
        if not np.array_equal(np.asarray(thresholds), np.asarray(predictor.own.thresholds)):
            raise CheckpointError(
                "thresholds: another model with the same backbone and head has other thresholds"
            )
        head = predictor.own
    else:
        further_logits = checkpoint.config.logits - predictor.config.logits
        weights_a_logit = 1 + embedding_width(checkpoint.config)
        facts["parameters"] = predictor.parameters + further_logits * weights_a_logit
        head = replace(head, label_sets=label_sets, thresholds=thresholds)
    predictor.heads.setdefault(facts["head"], head)
    return ModelInfo(**facts)


def _facts(
    settings: Settings,
    checkpoint: Description,
    predictor: Predictor,
    key: str,
    thresholds: Floats | None,
) -> dict[str, Any]:
    """Return the fields of a model's description, and log what was assumed about its checkpoint."""
    for assumption in checkpoint.assumed:
        logger.info("%s: assumed: %s", checkpoint.name, assumption)
    for note in checkpoint.notes:
        level = logging.WARNING if note == checkpoint.unused_calibration else logging.INFO
        logger.log(level, "%s: %s", checkpoint.name, note)
    suffix = "" if thresholds is None else f"-{zlib.crc32(thresholds.tobytes()):x}"
    calibration = checkpoint.calibration
    return attributes(ModelInfo.__dataclass_fields__, checkpoint, predictor) | {
        "name": settings.model_name or checkpoint.name,
        "loaded_at": int(time.time()),
        "backbone": key,
        "coverage": settings.coverage,
        "head": f"{checkpoint.content}-{settings.coverage}{suffix}",
        "has_thresholds": thresholds is not None,
        "calibrated_on": calibration and len(calibration.scores),
    }


def _label_sets(settings: Settings, checkpoint: Description) -> LabelSets | None:
    """Return the label sets of the settings' coverage, or None without one.

    Raises:
        CheckpointError: the checkpoint is not calibrated.
    """
    from model.calibration import label_sets_of  # noqa: PLC0415

    if settings.coverage is None:
        return None
    return label_sets_of(
        checkpoint.calibration, settings.coverage, checkpoint.source, checkpoint.unused_calibration
    )


def _thresholds(settings: Settings, checkpoint: Description) -> Floats | None:
    """Return the least score of each class, or None without thresholds.

    Raises:
        CheckpointError: a threshold's label is unknown.
    """
    thresholds = settings.thresholds
    if thresholds is None:
        return None
    unknown = next((label for label in thresholds if label not in checkpoint.labels), None)
    if unknown is not None:
        raise CheckpointError(f"thresholds: {checkpoint.source} has no label {unknown!r:.80}")
    return np.array([thresholds.get(label, 0.0) for label in checkpoint.labels], np.float32)
