"""The GPUs of this machine as an operator names them, and as one engine's process sees them.

This file does not load CUDA, because CUDA does not survive a fork: the supervisor looks for GPUs,
and its children compute on them.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from model.cores import allowed_cores, usable_cores
from model.errors import DeviceError
from service.children import output_of
from service.settings import Settings

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

# Most cores that decode for one GPU: an H200 computed 12,100 images/s, and 16 cores decoded 3,900
# JPEGs of 124 kB.
_CORES_OF_A_GPU: Final = 48
# Most cores that decode for a model on the CPU, which needs the others.
_CORES_BESIDE_A_CPU: Final = 16
# Most web processes, see `Settings.workers`.
_MOST_WORKERS: Final = 256

# Streams and largest batch of an engine on CUDA, unless the settings name others.
_STREAMS: Final = 2
_MAX_BATCH: Final = 64


def fit_to_machine(settings: Settings) -> Settings:
    """Return the settings with the devices, web workers and queue size that suit this machine.

    Only values that are not set are chosen, and devices for `all`.

    Raises:
        DeviceError: `device` is `all`, and the machine has no GPU.
    """
    chosen: dict[str, object] = {}
    if settings.device == "all":
        chosen["device"] = ",".join(all_gpus())
    count = len(str(chosen.get("device", settings.device)).split(","))
    if "workers" not in settings.model_fields_set and uses_gpu(settings):
        cores = min(allowed_cores(), count * _CORES_OF_A_GPU)
        chosen["workers"] = min(_MOST_WORKERS, max(1, cores // 2))
    if "queue_size" not in settings.model_fields_set:
        # While a stream computes a batch, its next one is received and decoded.
        images = 2 * _STREAMS * (settings.max_batch or _MAX_BATCH) * count
        chosen["queue_size"] = max(settings.queue_size, images)
    return settings.model_copy(update=chosen)


def decode_threads(settings: Settings) -> int:
    """Return the number of decode threads of each web worker: about one a core in all workers."""
    most = _CORES_BESIDE_A_CPU
    if uses_gpu(settings):
        most = _CORES_OF_A_GPU * len(settings.devices)
    return math.ceil(min(usable_cores(), most) / settings.workers)


def uses_gpu(settings: Settings) -> bool:
    """Return whether engines run on GPUs.

    Such engines have processes of their own, so that the service survives the fault of a GPU.
    """
    if not sys.platform.startswith("linux") or settings.device == "cpu":
        return False
    return settings.device != "auto" or gpus_are_here()


def gpus_are_here(folder: Path = Path("/dev")) -> bool:
    """Return whether this machine or container has GPUs, even if CUDA cannot use them."""
    if os.environ.get(VISIBLE) in ("", "-1"):
        return False
    return any(re.fullmatch(r"nvidia\d+|dxg", node.name) for node in folder.iterdir())


def all_gpus() -> tuple[str, ...]:
    """Return the device of each GPU, or of each MIG instance if a GPU is divided.

    Raises:
        DeviceError: the driver lists no GPU, or does not answer.
    """
    visible = os.environ.get(VISIBLE)
    if visible:
        return tuple(f"cuda:{index}" for index in range(len(visible.split(","))))
    try:
        text = output_of("nvidia-smi", "-L", timeout_seconds=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"device 'all': nvidia-smi -L does not list the GPUs: {error}") from error
    gpus = [
        re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", part)
        for part in re.split(r"^(?=GPU \d)", text, flags=re.M)[1:]
    ]
    if not gpus:
        raise DeviceError("device 'all': the driver lists no GPU")
    if all(len(gpu) == 1 for gpu in gpus):
        return tuple(f"cuda:{index}" for index in range(len(gpus)))
    return tuple(f"cuda:{name}" for gpu in gpus for name in gpu[1:] or gpu)


def visible_devices(device: str) -> str:
    """Return the `CUDA_VISIBLE_DEVICES` of a process that sees only this device, as `cuda:0`.

    Each process then calls its device `cuda:0`, so all GPUs of a kind share compiled kernels.
    CUDA shows a process only one MIG instance, which has no number.

    Args:
        device: `cuda`, `cuda:N`, or `cuda:` and an identifier. N counts the visible devices.

    Raises:
        DeviceError: at most N devices are visible.
    """
    identifier = device.removeprefix("cuda").removeprefix(":") or "0"
    visible = os.environ.get(VISIBLE)
    if not visible or not identifier.isdecimal():
        return identifier
    devices = visible.split(",")
    index = int(identifier)
    if index >= len(devices):
        raise DeviceError(f"device {device!r}: {VISIBLE}={visible} names {len(devices)}")
    return devices[index].strip()
