"""Checkpoints: strict readers for several formats, each of which gives a `Checkpoint`.

The core reads folders of vitserve, timm and transformers. To add a format to the core, write one
module here with `FORMAT`, `recognises(files)` and `read(files, options)`, and add it to `_FORMATS`.
To add a class of transformers, add one `Family` to `huggingface.families`.

Extensions add readers of other formats, as functions; see `Reader`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from model.checkpoint import huggingface, native, timm
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.files import ADAPTER_CONFIG, CONFIG_FILE, Files
from model.checkpoint.labels import LABEL_PRESETS, read_labels
from model.checkpoint.options import PREPROCESS_PRESETS, CheckpointOptions, read_preprocess
from model.checkpoint.sources import BUNDLED, open_source
from model.checkpoint.stated_head import (
    activated,
    require_classes_of_adapter,
    require_use_of_labels,
)
from model.checkpoint.unread_files import refuse_unread, unread_fields, unread_files
from model.checkpoint.unrecognised import unrecognised
from model.errors import CheckpointError
from model.extension import extensions, naming, resolve

__all__ = [
    "BUNDLED",
    "LABEL_PRESETS",
    "PREPROCESS_PRESETS",
    "Checkpoint",
    "Reader",
    "load_checkpoint",
]

# A reader returns the checkpoint in the files, or None if it does not recognise the files. It may
# also return other files, which are then read instead: the subfolder that holds the model, or the
# base with an adapter merged into it. A reader passes each option on, or refuses it by calling
# `refuse_unread`.
Reader = Callable[[Files, CheckpointOptions], Checkpoint | Files | None]

_FORMATS: Final = (native, timm, huggingface)


def load_checkpoint(source: str, **fields: Any) -> Checkpoint:
    """Read a checkpoint of any format.

    The core's readers are asked first, then those of other packages in the order of the extensions'
    names, then those of built-in extensions. Nothing about the tensors' values is checked until the
    model is built.

    Args:
        source: the source, as for `open_source`.
        fields: options of the operator, by the names in `CheckpointOptions`.

    Raises:
        CheckpointError: no such source, no reader recognises it, or it does not have exactly the
            content that its format demands.
    """
    options = CheckpointOptions(**fields)
    # Refuse a missing file before the weights are read, which may take minutes.
    if options.preprocess is not None:
        read_preprocess(options.preprocess)
    if options.labels not in (None, "numbers"):
        read_labels(options.labels, None)
    files = open_source(source)
    result = _read(files, options)
    while isinstance(result, Files):
        files = result
        result = _read(files, options)
    checkpoint = _completed(result, files, options)
    if options.image_size is None:
        return checkpoint.require_one_size()
    return checkpoint.resized(options.image_size)


def _read(files: Files, options: CheckpointOptions) -> Checkpoint | Files:
    """Return the answer of the first reader that recognises the files."""
    result: Checkpoint | Files | None = _read_core_format(files, options)
    if result is not None:
        return result
    with_readers = [extension for extension in extensions() if extension.readers]
    # The built-in readers come last, because they refuse each single file that they do not read.
    with_readers.sort(key=lambda extension: extension.readers[0].startswith("model."))
    for extension in with_readers:
        for name in extension.readers:
            reader: Reader = resolve(name, extension)
            with naming(extension, "readers"):
                result = reader(files, options)
                if result is files or not isinstance(result, Checkpoint | Files | None):
                    raise TypeError(f"{name} returned {type(result).__name__}, see `Reader`")
            if result is not None:
                return result
    formats = [module.FORMAT for module in _FORMATS]
    raise unrecognised(files, formats, [extension.name for extension in with_readers])


def _read_core_format(files: Files, options: CheckpointOptions) -> Checkpoint | None:
    # Without its adapter, the base would give other answers.
    if files.overlay is None and files.path(ADAPTER_CONFIG) is not None:
        return None
    for module in _FORMATS:
        if module.recognises(files):
            refuse_unread(files, options, reads_calibration=module is native)
            checkpoint: Checkpoint = module.read(files, options)
            return checkpoint
    return None


def _completed(checkpoint: Checkpoint, files: Files, options: CheckpointOptions) -> Checkpoint:
    """Add the operator's activation, notes about the files, their revision, and a hash."""
    require_use_of_labels(checkpoint, options.labels)
    adapter = files.overlay
    if adapter is not None:
        where = adapter.where(CONFIG_FILE)
        require_classes_of_adapter(checkpoint, adapter.config, where, options.labels)
    if options.base is not None and adapter is None:
        raise CheckpointError(
            f"{files.title}: not an adapter (no {ADAPTER_CONFIG}), so VIT_BASE (--base) has no "
            "effect; leave the setting out, or name the adapter's folder as the checkpoint"
        )
    checkpoint = activated(checkpoint, options.activation)
    parts = (
        files.digest,
        checkpoint.config.model_dump_json(),
        checkpoint.preprocess.model_dump_json(),
        checkpoint.labels,
        checkpoint.temperature,
        checkpoint.form,
        checkpoint.calibration,
        checkpoint.multi_label,
    )
    return replace(
        checkpoint,
        revision=files.revision,
        notes=checkpoint.notes + files.notes + unread_files(files) + unread_fields(files),
        assumed=checkpoint.assumed + files.assumed,
        content=hashlib.sha256(repr(parts).encode()).hexdigest()[:16],
    )
