"""Files, fields and options that the reader of a checkpoint does not read.

They are refused if they would change the answer, and noted otherwise.
"""

from typing import Final

from model.calibration import CALIBRATION_FILE
from model.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    OPEN_CLIP_CONFIG,
    Files,
)
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE, PROCESSOR_FILE
from model.checkpoint.known_fields import unknown_fields
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.unread_tensors import QUANTISED_REMEDY
from model.errors import CheckpointError

# Names that diffusers and others give to LoRA weights, which no config describes.
_LORA: Final = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
_MERGE: Final = "merge it where it was trained, with merge_and_unload(), and save the model"
# Alternatives to the files that a reader reads.
_ALTERNATIVES: Final = (
    *Files.weights,
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    OPEN_CLIP_CONFIG,
)


def refuse_unread(
    files: Files, options: CheckpointOptions, *, reads_calibration: bool = False
) -> None:
    """Refuse options, files and fields that change the answer and that the reader does not read.

    Args:
        files: files of the model; files of the base if there is an adapter.
        options: options of the operator.
        reads_calibration: whether the format has calibrations.

    Raises:
        CheckpointError: an option for plain state dicts, quantised weights, pruned heads, an
            adapter without a config, or a calibration.
    """
    of_state_dicts = {"VIT_ARCHITECTURE": options.architecture, "VIT_KEYS": options.keys}
    for setting, value in of_state_dicts.items():
        if value is not None:
            raise CheckpointError(
                f"{files.title}: states its own architecture and names; {setting} is for plain "
                "state dicts"
            )
    _refuse_fields(files)
    adapter = next((name for name in (*ADAPTER_WEIGHTS, *_LORA) if files.is_on_disk(name)), None)
    if adapter is not None and not files.is_on_disk(ADAPTER_CONFIG):
        raise CheckpointError(
            f"{files.where(adapter)}: an adapter without {ADAPTER_CONFIG} is not merged: add that "
            f"file to the folder, or {_MERGE}; without {adapter} the model is read as it is"
        )
    if not reads_calibration and files.is_on_disk(CALIBRATION_FILE):
        raise CheckpointError(
            f"{files.where(CALIBRATION_FILE)}: calibrations are read in folders that vitserve "
            f"writes: run vitserve convert {files.source} -o FOLDER and calibrate that folder; "
            f"without {CALIBRATION_FILE} the model is read as it is"
        )


def _refuse_fields(files: Files) -> None:
    where = files.where(CONFIG_FILE)
    quantisation = files.config.get("quantization_config") or files.config.get("compression_config")
    if quantisation:
        kind = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise CheckpointError(f"{where}: quantization_config {kind!r:.100}: {QUANTISED_REMEDY}")
    if files.config.get("pruned_heads"):
        raise CheckpointError(
            f"{where}: pruned_heads is not read: give the model with all its attention heads"
        )


def unread_fields(files: Files) -> tuple[str, ...]:
    """Return a note of the fields of a library's config that its class does not have."""
    config = files.config
    if CONFIG_FILE not in files.read_names or "format" in config:
        return ()
    is_timms = "architecture" in config
    pretrained = config.get("pretrained_cfg")
    kinds = [str(config.get("model_type"))]
    if is_timms:
        kinds = ["timm", "pretrained_cfg"]
    names = unknown_fields(config, "common", *kinds)
    if is_timms and isinstance(pretrained, dict):
        inner = unknown_fields(pretrained, "pretrained_cfg", "common")
        names += [f"pretrained_cfg.{name}" for name in inner]
    if not names:
        return ()
    return (f"{CONFIG_FILE}: not read, because its class has no such field: {', '.join(names)}",)


def unread_files(files: Files) -> tuple[str, ...]:
    """Return a note of the files on this machine that could have been read but were not."""
    names = [
        name for name in _ALTERNATIVES if name not in files.read_names and files.is_on_disk(name)
    ]
    if not names:
        return ()
    read = ", ".join(sorted(files.read_names))
    return (f"not read: {', '.join(names)}; read instead: {read:.300}",)
