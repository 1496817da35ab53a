"""vitserve's own folder: `config.json` and `model.safetensors`.

`vitserve train` and `vitserve convert` write it. `vitserve calibrate` adds `calibration.json`,
which names its weights and its preprocessing: a folder with the calibration of another model is
refused.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, SerializeAsAny
from safetensors.torch import save_file

from model.calibration import CALIBRATION_FILE, Calibration
from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, Files
from model.checkpoint.local_files import open_file, reading, validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.timm_architectures import runs_in_library
from model.config import LibraryConfig, NetworkConfig, PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.heads import SOFTMAX, Form
from model.layer_config import Frozen, Size

FORMAT = "vitserve"


class NativeConfig(Frozen):
    """`config.json` of a native folder. Fields that change an answer have no default."""

    format: Literal["vitserve"]
    version: Literal[1]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    architecture: SerializeAsAny[NetworkConfig]
    preprocess: PreprocessConfig
    labels: tuple[str, ...]
    # `vitserve train` fits 0.05 to 20. Far below, scores overflow.
    temperature: Annotated[float, Field(ge=1e-3, le=1e3)]
    # A softmax, unless `vitserve train` found that another form fits better. Folders of older
    # versions lack the field.
    form: Form = SOFTMAX
    multi_label: bool
    # As of the source; see `Checkpoint.antialias`. Folders of older versions lack the field.
    antialias: bool = True
    # See `StoredNetwork`. Only folders with resized positions have the field.
    resized_from: Size | None = None
    # See `Description.assumed`.
    assumed: tuple[str, ...] = ()
    # Recipe, accuracy and versions, for people. The service never reads it.
    training: dict[str, Any] = Field(default_factory=dict)


def recognises(files: Files) -> bool:
    """Return whether a folder's `config.json` is vitserve's own."""
    return files.config.get("format") == FORMAT


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a native folder."""
    where = files.where(CONFIG_FILE)
    with validating(where):
        native = NativeConfig.model_validate(files.config)
    if isinstance(native.architecture, LibraryConfig):
        runs_in_library(native.architecture.architecture, where)
    checkpoint = Checkpoint(
        name=native.name,
        source=files.source,
        format=FORMAT,
        architecture=describe_architecture(native.architecture),
        config=native.architecture,
        preprocess=options.preprocess_or(native.preprocess, where),
        labels=options.labels_or(native.labels, native.architecture.num_classes, where),
        tensors=native_tensors(files.tensors(), native.architecture, files.title),
        temperature=native.temperature,
        form=native.form,
        multi_label=native.multi_label,
        antialias=native.antialias,
        resized_from=native.resized_from,
        assumed=native.assumed,
    )
    if files.path(CALIBRATION_FILE) is None:
        return checkpoint
    return _calibrated(checkpoint, native.preprocess, files, options)


def _calibrated(
    checkpoint: Checkpoint, preprocess: PreprocessConfig, files: Files, options: CheckpointOptions
) -> Checkpoint:
    """Return the checkpoint with its folder's calibration.

    If the operator changes the preprocessing or the input size, the calibration is left out.

    Args:
        preprocess: the folder's own preprocessing.

    Raises:
        CheckpointError: the calibration was written for another model, or changed afterwards.
    """
    where = files.where(CALIBRATION_FILE)
    with validating(where):
        calibration = Calibration.model_validate(files.json(CALIBRATION_FILE))
    if calibration.digest != _digest(calibration, files):
        raise CheckpointError(
            f"{where}: is not what vitserve calibrate wrote for these weights and this "
            "preprocessing: remove the file, and calibrate again"
        )
    if checkpoint.preprocess != preprocess or options.image_size not in (None, preprocess.size):
        note = (
            f"{CALIBRATION_FILE} is not used: it is for the folder's own preprocessing and image "
            "size: leave VIT_PREPROCESS and VIT_IMAGE_SIZE out, or calibrate with them into "
            "another folder (--out)"
        )
        return replace(checkpoint, notes=(*checkpoint.notes, note), unused_calibration=note)
    return replace(
        checkpoint,
        temperature=calibration.temperature,
        form=calibration.form,
        calibration=calibration,
    )


def _digest(calibration: Calibration, files: Files) -> str:
    """Return the SHA-256 of a calibration, the weights and the preprocessing that it is for."""
    weights_path = files.required(WEIGHTS_FILE)
    with open_file(weights_path, files.where(WEIGHTS_FILE)) as file, reading(files.title):
        weights = hashlib.file_digest(file, "sha256").hexdigest()
    model = [weights, files.config.get("architecture"), files.config.get("preprocess")]
    # Calibrations of older versions lack a form, so their digest does not cover one.
    unsigned = {"digest", "form"} if calibration.form == SOFTMAX else {"digest"}
    document = [calibration.model_dump(mode="json", exclude=unsigned), *model]
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write the calibration of a native folder's weights; replace another. Raises `OSError`.

    A concurrent reader sees the old file or the new file.
    """
    files = Files(folder, str(folder))
    signed = calibration.model_copy(update={"digest": _digest(calibration, files)})
    part = folder / f"{CALIBRATION_FILE}.part"
    part.write_text(signed.model_dump_json() + "\n", encoding="utf-8")
    part.replace(folder / CALIBRATION_FILE)


def write(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype = torch.float32,
    training: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint as a native folder; replace existing files one by one.

    The calibration is written too, unless the weights are rounded.

    Args:
        folder: the folder to write; created if absent.
        checkpoint: the checkpoint to write.
        dtype: type of the stored tensors; half precision halves the file.
        training: free-form record for people.
    """
    native = NativeConfig(
        format="vitserve",
        version=1,
        name=checkpoint.name,
        architecture=checkpoint.config,
        preprocess=checkpoint.preprocess,
        labels=checkpoint.labels,
        temperature=checkpoint.temperature,
        form=checkpoint.form,
        multi_label=checkpoint.multi_label,
        antialias=checkpoint.antialias,
        resized_from=checkpoint.resized_from,
        assumed=checkpoint.assumed,
        training=training or {},
    )
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().to(dtype).contiguous()
        for name, tensor in checkpoint.tensors.items()
    }
    weights = folder / f"{WEIGHTS_FILE}.part"
    save_file(tensors, weights, metadata={"format": "pt"})
    config = folder / f"{CONFIG_FILE}.part"
    unused = {"resized_from"} if native.resized_from is None else None
    fields = native.model_dump(mode="json", exclude=unused)
    text = json.dumps(fields, indent=1, ensure_ascii=False)
    config.write_text(f"{text}\n", encoding="utf-8")
    # safetensors makes files that only their owner can read; a service often runs as another user.
    weights.chmod(config.stat().st_mode)
    # An existing calibration is for other weights.
    (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    # The files are complete before they get their names, so a reader never sees half a file.
    weights.replace(folder / WEIGHTS_FILE)
    config.replace(folder / CONFIG_FILE)
    if checkpoint.calibration is not None and dtype == torch.float32:
        write_calibration(folder, checkpoint.calibration)


def describe_architecture(config: NetworkConfig) -> str:
    """Return a short name of an architecture: `vit_w192_d9_h3_patch4_32x32`, or a library's own."""
    if isinstance(config, LibraryConfig):
        return config.architecture
    assert isinstance(config, ViTConfig)
    rows, columns = config.image_size
    sizes = f"w{config.width}_d{config.depth}_h{config.heads}_patch{config.patch_size}"
    return f"vit_{sizes}_{rows}x{columns}"
