"""Files and fields of a folder that its reader does not read: refused where they change the answer,
else named.
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
from model.errors import CheckpointError

# diffusers' and others' names of LoRA weights, which no config describes.
_LORA: Final = ("pytorch_lora_weights.safetensors", "pytorch_lora_weights.bin")
_MERGE: Final = "merge it where it was trained, with merge_and_unload(), and save the model"
# Files that could be read instead of those that are.
_ALTERNATIVES: Final = (
    *Files.weights,
    *("open_clip_model.safetensors", "open_clip_pytorch_model.bin"),
    *(PREPROCESSOR_FILE, PROCESSOR_FILE, OPEN_CLIP_CONFIG),
)


def refuse_unread(files: Files, *, reads_calibration: bool) -> None:
    """Refuse a folder with a file or field that changes the answer and is not read.

    Args:
        files: of the model; of the base, if there is an adapter.
        reads_calibration: whether its format has calibrations.

    Raises:
        CheckpointError: quantised weights, pruned heads, an adapter without a config, or a
        calibration.
    """
    where = files.where(CONFIG_FILE)
    quantisation = files.config.get("quantization_config") or files.config.get("compression_config")
    if quantisation:
        kind = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise CheckpointError(
            f"{where}: quantization_config {kind!r:.100}: quantised weights are not read: save floating-point ones, "
            "model.dequantize().save_pretrained(FOLDER), or give the model that was quantised"
        )
    if files.config.get("pruned_heads"):
        raise CheckpointError(
            f"{where}: pruned_heads: is not read: give the model with all heads of its attention"
        )
    adapter = next((name for name in (*ADAPTER_WEIGHTS, *_LORA) if files.is_on_disk(name)), None)
    if adapter is not None and not files.is_on_disk(ADAPTER_CONFIG):
        raise CheckpointError(
            f"{files.where(adapter)}: an adapter without {ADAPTER_CONFIG} is not merged: put that file beside it, or "
            f"{_MERGE}; without {adapter} the model is read as it is"
        )
    if not reads_calibration and files.is_on_disk(CALIBRATION_FILE):
        raise CheckpointError(
            f"{files.where(CALIBRATION_FILE)}: calibrations are read in folders that vitserve writes: run "
            f"vitserve convert {files.source} -o FOLDER and calibrate that; without {CALIBRATION_FILE} "
            "the model is read as it is"
        )


def unread_files(files: Files) -> tuple[str, ...]:
    """Return a note of the files on this machine that could have been read instead of those that
    were.
    """
    names = [
        name for name in _ALTERNATIVES if name not in files.read_names and files.is_on_disk(name)
    ]
    if not names:
        return ()
    return (
        f"not read: {', '.join(names)}; read instead: {', '.join(sorted(files.read_names)):.300}",
    )
