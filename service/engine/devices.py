"""The GPUs of this machine as an operator names them, and as one engine's process sees them.

Nothing here loads CUDA, which does not survive a fork: the supervisor asks, and its children
compute.
"""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from model.cores import allowed_cores, usable_cores
from model.errors import DeviceError
from service.children import output_of
from service.settings import Settings

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

# Cores that decode for one GPU at most: an H200 computed 12,100 images/s, and 16 cores decoded
# 3,900 JPEGs of 124 kB.
_CORES_OF_A_GPU: Final = 48
# Cores that decode beside a model on the CPU at most: the model needs the others.
_CORES_BESIDE_A_CPU: Final = 16
# Web processes at most, see `Settings.workers`.
_MOST_WORKERS: Final = 256

# What an engine takes on CUDA where the settings say nothing.
_STREAMS: Final = 2
_MAX_BATCH: Final = 64


def fit_to_machine(settings: Settings) -> Settings:
    """Return the settings with what was left to this machine filled in: `all` devices, web workers,
    the queue's size.

    Raises:
        DeviceError: `device` is `all`, and there is no GPU.
    """
    chosen: dict[str, object] = {}
    if settings.device == "all":
        chosen["device"] = ",".join(all_gpus())
    count = len(str(chosen.get("device", settings.device)).split(","))
    if "workers" not in settings.model_fields_set and uses_gpu(settings):
        cores = min(allowed_cores(), count * _CORES_OF_A_GPU)
        chosen["workers"] = min(_MOST_WORKERS, max(1, cores // 2))
    if "queue_size" not in settings.model_fields_set:
        # Each stream's batch is computed while the next one is received and decoded.
        images = 2 * _STREAMS * (settings.max_batch or _MAX_BATCH) * count
        chosen["queue_size"] = max(settings.queue_size, images)
    return settings.model_copy(update=chosen)


def decode_threads(settings: Settings) -> int:
    """Return how many threads of each web worker decode pictures: all together one a core, within
    bounds.
    """
    most = _CORES_BESIDE_A_CPU
    if uses_gpu(settings):
        most = _CORES_OF_A_GPU * len(settings.devices)
    return math.ceil(min(usable_cores(), most) / settings.workers)


def uses_gpu(settings: Settings) -> bool:
    """Return whether engines are to run on GPUs, and in processes of their own: these survive what
    a GPU does not.
    """
    if not sys.platform.startswith("linux") or settings.device == "cpu":
        return False
    return settings.device != "auto" or gpus_are_here()


def gpus_are_here(folder: Path = Path("/dev"), environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this machine or container was given GPUs, whether or not CUDA can use them."""
    if environment.get(VISIBLE) in ("", "-1"):
        return False
    return any(re.fullmatch(r"nvidia\d+|dxg", node.name) for node in folder.iterdir())


def all_gpus(
    environment: Mapping[str, str] = os.environ, listing: Callable[[], str] | None = None
) -> tuple[str, ...]:
    """Return the device of each GPU, and of each MIG instance where a GPU is divided.

    Args:
        listing: returns what `nvidia-smi -L` prints; that command by default.

    Raises:
        DeviceError: there is none, or the driver does not answer.
    """
    visible = environment.get(VISIBLE)
    if visible:
        return tuple(f"cuda:{index}" for index in range(len(visible.split(","))))
    text = (listing or _listing)()
    gpus = [
        re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", part)
        for part in re.split(r"^(?=GPU \d)", text, flags=re.M)[1:]
    ]
    if not gpus:
        raise DeviceError("device 'all': the driver lists no GPU")
    if all(len(gpu) == 1 for gpu in gpus):
        return tuple(f"cuda:{index}" for index in range(len(gpus)))
    return tuple(f"cuda:{name}" for gpu in gpus for name in gpu[1:] or gpu)


def _listing() -> str:
    try:
        return output_of("nvidia-smi", "-L", timeout_seconds=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceError(f"device 'all': nvidia-smi -L does not list the GPUs: {error}") from error


def visible_devices(device: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what `CUDA_VISIBLE_DEVICES` is to be in a process for which this device alone is
    there, as `cuda:0`.

    So an instance of MIG, which CUDA shows alone, has a name, and compiled kernels serve every GPU
    of a kind.

    Args:
        device: `cuda`, `cuda:N`, or `cuda:` and an identifier. N counts the devices that are
        visible so far.

    Raises:
        DeviceError: fewer than N devices are visible.
    """
    own = device.removeprefix("cuda").removeprefix(":") or "0"
    visible = environment.get(VISIBLE)
    if not visible or not own.isdecimal():
        return own
    listed = visible.split(",")
    if int(own) >= len(listed):
        raise DeviceError(f"device {device!r}: {VISIBLE}={visible} names {len(listed)}")
    return listed[int(own)].strip()
