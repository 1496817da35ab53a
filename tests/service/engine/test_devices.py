"""Names of GPUs, the devices of a machine, and its numbers of workers and threads."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from model.errors import DeviceError
from service.engine import devices
from service.engine.devices import (
    VISIBLE,
    all_gpus,
    decode_threads,
    fit_to_machine,
    gpus_are_here,
    uses_gpu,
    visible_devices,
)
from service.settings import load_settings

WHOLE = """\
GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA H200 (UUID: GPU-1c6b5d1c-0f3a-7d6e-9a1b-aaaaaaaaaaaa)
"""


DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 2g.10gb     Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-1c6b5d1c-0f3a-7d6e-9a1b-aaaaaaaaaaaa)
"""


@pytest.mark.parametrize(
    ("environment", "listing", "expected"),
    [
        ({}, WHOLE, ("cuda:0", "cuda:1")),
        (
            {},
            DIVIDED,
            (
                "cuda:MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
                "cuda:MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
                "cuda:GPU-1c6b5d1c-0f3a-7d6e-9a1b-aaaaaaaaaaaa",
            ),
        ),
        ({"CUDA_VISIBLE_DEVICES": "3"}, WHOLE, ("cuda:0",)),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,MIG-c"}, WHOLE, ("cuda:0", "cuda:1", "cuda:2")),
    ],
    ids=["whole", "divided", "one is visible", "three are visible"],
)
def test_all_means_every_usable_gpu(
    environment: dict[str, str],
    listing: str,
    expected: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(devices, "output_of", lambda *_, **__: listing)
    assert all_gpus() == expected
    assert load_settings({"device": ",".join(expected)}).devices == expected


def test_no_gpu_at_all_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": ""})
    with monkeypatch.context() as patched:
        patched.setattr(devices, "output_of", lambda *_, **__: "No devices were found\n")
        with pytest.raises(DeviceError, match=r"^device 'all': the driver lists no GPU$"):
            all_gpus()
    with pytest.raises(
        DeviceError, match=r"^device 'all': nvidia-smi -L does not list the GPUs: .*nvidia-smi"
    ) as found:
        all_gpus()
    assert "\n" not in str(found.value)


def test_the_driver_is_asked_with_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert (command, options.pop("timeout")) == (("nvidia-smi", "-L"), 60)
        return ended(["sh", "-c", script], **options)

    monkeypatch.delenv(VISIBLE, raising=False)
    ended = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    script = "echo 'GPU 0: H200 (UUID: GPU-a)'"
    assert all_gpus() == ("cuda:0",)
    script += "; exit 9"
    with pytest.raises(DeviceError, match="exit status 9"):
        all_gpus()


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda", None, "0"),
        ("cuda:3", None, "3"),
        ("cuda:1", "4,5", "5"),
        ("cuda:0", "MIG-a, MIG-b", "MIG-a"),
        ("cuda:1", "MIG-a, MIG-b", "MIG-b"),
        ("cuda:MIG-b", "MIG-a,MIG-b", "MIG-b"),
        ("cuda:GPU-5d5ba0d6", None, "GPU-5d5ba0d6"),
    ],
)
def test_an_engine_sees_its_own_device_alone(
    device: str, visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert visible_devices(device) == expected


def test_an_invisible_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "4,5")
    with pytest.raises(DeviceError, match=r"^device 'cuda:2': CUDA_VISIBLE_DEVICES=4,5 names 2$"):
        visible_devices("cuda:2")


@pytest.mark.parametrize(
    ("nodes", "environment", "here"),
    [
        ((), {}, False),
        (("nvidiactl", "nvidia-uvm"), {}, False),
        (("nvidia0", "nvidiactl"), {}, True),
        (("nvidia12",), {}, True),
        (("dxg",), {}, True),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": ""}, False),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        (("nvidia0",), {"CUDA_VISIBLE_DEVICES": "0"}, True),
    ],
)
def test_gpus_are_found_by_their_files(
    nodes: tuple[str, ...],
    environment: dict[str, str],
    here: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    for node in nodes:
        (tmp_path / node).touch()
    assert gpus_are_here(tmp_path) is here


@pytest.mark.parametrize(
    ("given", "cores", "here", "expected"),
    [
        ({"device": "cuda"}, 16, True, (8, 256)),
        ({"device": "cuda:0,cuda:1"}, 64, True, (32, 512)),
        ({"device": "cuda"}, 6, True, (3, 256)),
        ({"device": "cuda"}, 1, True, (1, 256)),
        ({"device": "auto"}, 16, True, (8, 256)),
        ({"device": "auto"}, 16, False, (1, 256)),
        ({"device": "cpu"}, 16, True, (1, 256)),
        ({"device": "cuda", "workers": 1}, 16, True, (1, 256)),
        ({"device": "cuda", "workers": 3, "max_batch": 256}, 16, True, (3, 1024)),
        ({"device": "cuda", "max_batch": 128}, 16, True, (8, 512)),
        ({"device": "cuda"}, 26, True, (13, 256)),
        ({"device": "cuda"}, 200, True, (24, 256)),
        ({"device": "cuda:0,cuda:1"}, 200, True, (48, 512)),
        ({"device": ",".join(f"cuda:{each}" for each in range(8))}, 200, True, (100, 2048)),
        ({"device": "cuda", "max_batch": 256, "queue_size": 7}, 16, True, (8, 7)),
    ],
    ids=str,
)
def test_the_machine_decides_the_workers(
    given: dict[str, Any],
    cores: int,
    here: bool,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "gpus_are_here", lambda: here)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(cores)) if process == 0 else {0}
    )
    fitted = fit_to_machine(load_settings(given))
    assert (fitted.workers, fitted.queue_size) == expected


@pytest.mark.parametrize(
    ("given", "cores", "threads"),
    [
        ({"device": "cpu"}, 64, 16),
        ({"device": "cuda", "workers": 8}, 16, 2),
        ({"device": "cuda", "workers": 13}, 26, 2),
        ({"device": "cuda", "workers": 1}, 200, 48),
        ({"device": "cuda:0,cuda:1", "workers": 10}, 200, 10),
    ],
    ids=str,
)
def test_decode_threads_follow_the_cores(
    given: dict[str, Any], cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert decode_threads(load_settings(given)) == threads


def test_all_devices_become_an_engine_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "all_gpus", lambda: ("cuda:0", "cuda:1"))
    settings = fit_to_machine(load_settings({"device": "all"}))
    assert settings.devices == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("device", "here", "used"),
    [
        ("cpu", True, False),
        ("auto", False, False),
        ("auto", True, True),
        ("cuda", False, True),
        ("cuda:1", True, True),
    ],
)
def test_a_gpu_engine_has_its_own_process(
    device: str, here: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "gpus_are_here", lambda: here)
    assert uses_gpu(load_settings({"device": device})) is used
