"""How many threads work at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.cores import compute_threads, usable_cores

CORES = 8


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of eight logical cores, of which each two are one physical core."""
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
def test_affinity_quota_and_physical_cores_bound_the_threads(
    quota: str | None, usable: int, computing: int, system: Path
) -> None:
    if quota is not None:
        (system / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
    assert (usable_cores(system), compute_threads(system)) == (usable, computing)


def test_openmps_variable_decides_as_it_does_for_torch(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (usable_cores(system), compute_threads(system)) == (3, 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert usable_cores(system) == CORES
