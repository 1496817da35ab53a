"""The device and dtype of the computation, chosen by name."""

import os
import re

import torch

from model.errors import DeviceError, first_line
from model.runtime.cpu import cpu_has_bfloat16

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def choose_device(name: str) -> torch.device:
    """Return the device for `auto` (CUDA where present, else the CPU), `cpu`, `cuda` or `cuda:N`.

    Raises:
        DeviceError: the name is not a device's, or the device is not on this machine.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    if re.fullmatch(r"cuda(:\d{1,3})?", name) is None:
        raise DeviceError(f"device {name!r}: expected auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r}: no CUDA device can be used: {unusable_reason()}")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA device(s)"
        )
    return torch.device("cuda", index)


def unusable_reason() -> str:
    """Return why CUDA cannot be used, in torch's own words.

    The GPU may be missing, the driver too old, or torch built without CUDA.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f"{first_line(error)} (torch {torch.__version__})"
    return f"torch {torch.__version__} finds none"


def gpu_identifier(device: torch.device) -> str:
    """Return the identifier of a CUDA device's GPU, whatever its number, or of its MIG instance."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible.startswith("MIG-") and "," not in visible:
        return visible  # CUDA may give the identifier of the whole GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name; `auto` is the fastest dtype native to the device.

    On CUDA that is bfloat16 (compute capability 8.0 and later), else float16. On a CPU it is
    bfloat16 if the CPU has instructions for it (emulated, it is slower than float32), else float32.

    Raises:
        DeviceError: the name is not a dtype's, or it is bfloat16 and the GPU only emulates it.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if name == "bfloat16" and capability is not None and capability[0] < 8:
        version = ".".join(map(str, capability))
        raise DeviceError(
            f"dtype 'bfloat16': {device} (compute capability {version}) does not have it: "
            "choose float16"
        )
    if name == "auto":
        if capability is not None:
            return torch.bfloat16 if capability[0] >= 8 else torch.float16
        return torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    if name not in DTYPES:
        raise DeviceError(f"dtype {name!r}: expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]
