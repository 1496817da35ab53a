"""Devices, dtypes, threads and memory of a machine."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from model.cores import compute_threads, usable_cores
from model.errors import DeviceError
from model.runtime import build
from model.runtime.device import choose_device, choose_dtype, gpu_identifier
from model.runtime.memory import Meter
from model.runtime.predictor import Predictor
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import predict
from tests.model.runtime.small_models import make_checkpoint, make_images

GPU = torch.device("cuda", 0)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver"
)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_an_unusable_gpu_says_why(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise error(f"{TOO_OLD}\nmore lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(DeviceError) as found:
        choose_device("cuda:1")
    version = torch.__version__
    assert (
        str(found.value)
        == f"device 'cuda:1': no CUDA device can be used: {TOO_OLD} (torch {version})"
    )


@pytest.mark.parametrize(
    ("capability", "name", "dtype"),
    [
        ((8, 0), "auto", torch.bfloat16),
        ((8, 0), "bfloat16", torch.bfloat16),
        ((7, 5), "auto", torch.float16),
        ((7, 5), "float16", torch.float16),
        ((7, 5), "float32", torch.float32),
    ],
)
def test_a_gpu_computes_in_its_native_type(
    capability: tuple[int, int], name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_dtype(name, GPU) is dtype


def test_emulated_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(
        DeviceError, match=r"^dtype 'bfloat16': cuda:0 \(compute capability 7.5\) does not have it"
    ):
        choose_dtype("bfloat16", GPU)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("MIG-abc", "MIG-abc"), ("MIG-abc,MIG-def", "5d5b"), ("0", "5d5b"), (None, "5d5b")],
)
def test_a_gpu_has_its_own_identifier(
    visible: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="5d5b"))
    assert gpu_identifier(GPU) == expected


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, "float16"), (1e6, "float32")])
def test_an_overflowing_model_uses_float32(
    scale: float, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build, "choose_dtype", lambda name, _: torch.float32 if name == "float32" else torch.float16
    )
    checkpoint = make_checkpoint()
    tensors = dict(checkpoint.tensors)
    tensors["head.weight"] = tensors["head.weight"] * scale
    predictor = Predictor(
        make_checkpoint(tensors=tensors), device="cpu", max_batch=2, ops=StandInOps()
    )
    assert predictor.dtype == dtype
    predictor.warm_up()
    assert predict(predictor, make_images(2), top_k=1).finite.all()


def test_requested_float16_is_never_widened() -> None:
    tensors = dict(make_checkpoint().tensors)
    tensors["head.weight"] = tensors["head.weight"] * 1e6
    checkpoint = make_checkpoint(tensors=tensors)
    predictor = Predictor(checkpoint, device="cpu", dtype="float16", max_batch=1, ops=StandInOps())
    with pytest.raises(DeviceError, match="not finite in float16"):
        predictor.warm_up()


def test_a_half_imported_torch_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert Meter().size(1000, "float32") == 4000


def test_memory_counts_on_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated = [5000, 0]
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: len(allocated),
        memory_allocated=lambda device=0: allocated[device],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    meter = Meter()
    allocated[1] += 7000
    assert meter.size(1000, "float32") == 7000


def test_other_memory_is_not_the_models() -> None:
    meter = Meter()
    other = bytearray(b"x") * (64 << 20)
    assert (meter.size(1000, "float32"), meter.size(1000, "bfloat16")) == (4000, 2000)
    assert other


CORES = 8


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine of eight logical cores on four physical cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(CORES)))
    for core in range(CORES):
        place = tmp_path / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        place.parent.mkdir(parents=True)
        place.write_text(f"{core % 4},{core % 4 + 4}\n")
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "usable", "computing"),
    [
        (None, 8, 4),
        ("max 100000", 8, 4),
        ("650000 100000", 7, 4),
        ("250000 100000", 3, 3),
        ("50000 100000", 1, 1),
    ],
)
def test_threads_follow_usable_cores(
    quota: str | None, usable: int, computing: int, system: Path
) -> None:
    if quota is not None:
        (system / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    assert (usable_cores(system), compute_threads(system)) == (usable, computing)


@pytest.mark.parametrize(
    ("own", "quotas", "usable"),
    [
        (
            "0::/a.slice/b.service",
            {"a.slice/b.service/cpu.max": "max 100000", "a.slice/cpu.max": "200000 100000"},
            2,
        ),
        (
            "0::/a.slice/b.service",
            {"a.slice/b.service/cpu.max": "300000 100000", "a.slice/cpu.max": "5000 1000"},
            3,
        ),
        ("0::/a.slice", {"other.slice/cpu.max": "100000 100000"}, 8),
        ("0::/host/path", {"cpu.max": "150000 100000"}, 2),
        ("0::/../outside", {"cpu.max": "max 100000"}, 8),
        ("4:cpu,cpuacct:/docker/1", {"cpu,cpuacct/docker/1/cpu.cfs_quota_us": "250000"}, 3),
        ("4:cpuacct,cpu:/docker/1", {"cpuacct,cpu/docker/cpu.cfs_quota_us": "100000"}, 1),
        ("4:cpu:/host/path", {"cpu/cpu.cfs_quota_us": "400000"}, 4),
        ("4:cpu:/a", {"cpu/a/cpu.cfs_quota_us": "-1"}, 8),
        (
            "4:cpuset:/a\n0::/b",
            {"cpuset/a/cpu.cfs_quota_us": "100000", "unified/b/cpu.max": "500000 100000"},
            5,
        ),
    ],
)
def test_the_smallest_quota_counts(
    own: str, quotas: dict[str, str], usable: int, system: Path
) -> None:
    for name, quota in quotas.items():
        file = system / "fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{quota}\n")
        if file.name == "cpu.cfs_quota_us":
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    groups = system / "own-groups"
    groups.write_text(f"1:name=systemd:/a:b\n{own}\n")
    assert usable_cores(system, groups) == usable


def test_openmp_decides_the_thread_count(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (usable_cores(system), compute_threads(system)) == (3, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert usable_cores(system) == CORES
