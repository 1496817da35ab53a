"""The kit of the GPU benchmark: what is in it, and that every step runs with it where nothing else can be had."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks import gpu, gpu_kit
from tests.conftest import REPOSITORY

OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# Of a process, before it becomes another one: a network that holds nothing but itself, where that may be had.
WITHOUT_NETWORK = """
import ctypes, fcntl, os, socket, struct, sys
user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None)
if not libc.unshare(0x50000000):  # CLONE_NEWUSER | CLONE_NEWNET
    for file, line in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as map:
            map.write(line)
    with socket.socket() as any:
        fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
else:
    print("WITH A NETWORK")
os.execv(sys.argv[1], sys.argv[1:])
"""


@cache
def kit_for(python: str, folder: Path) -> Path:
    """Made once: it downloads. Without an index the tests skip, but not where all checks are to run."""
    kit = folder / f"kit-{python}"
    try:
        gpu_kit.make_kit(kit, python=python)
    except gpu_kit.KitFailed as error:
        if os.environ.get("CI") or "pip download" not in str(error):
            raise
        pytest.skip(str(error))
    return kit


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


def test_a_package_of_unknown_version_is_taken_along_where_a_version_is_required() -> None:
    has = {"numpy": "2.5.2", "click": None, "torch": "2.11.0"}
    lines = ["numpy>=1.26", "numpy>=3", "click", "click>=7", "pydantic", 'tzdata; sys_platform == "win32"']
    missing = gpu_kit.missing(map(Requirement, lines), has, "3.12")
    assert [str(each) for each in missing] == ["numpy>=3", "click>=7", "pydantic"]


def test_a_kit_brings_no_torch_and_is_not_written_over_another(tmp_path: Path) -> None:
    packages = tmp_path / "packages.txt"
    packages.write_text("# without torch\nnumpy==2.5.2\n")
    with pytest.raises(gpu_kit.KitFailed, match=r"packages.txt lists no torch that is recent enough"):
        gpu_kit.make_kit(tmp_path / "kit", packages=packages)
    (tmp_path / "kit" / "a").touch()
    with pytest.raises(gpu_kit.KitFailed, match="is not empty"):
        gpu_kit.make_kit(tmp_path / "kit", packages=packages)


@pytest.mark.timeout(180)
def test_the_kit_holds_what_the_machine_lacks_and_nothing_else(downloads: Path) -> None:
    files = sorted(kit_for("3.12", downloads).iterdir())
    names = {str(parse_wheel_filename(file.name)[0]) for file in files}
    assert {"vitserve", "fastapi", "starlette", "uvicorn", "pydantic", "pydantic-core", "msgspec", "httptools"} <= names
    assert {"python-multipart", "opentelemetry-api"} <= names
    versions = gpu_kit.read_packages()
    assert not names & {name for name, version in versions.items() if version is not None}
    assert not any(name.startswith(("torch", "nvidia", "triton", "timm")) for name in names)
    assert sum(file.stat().st_size for file in files) <= 50 << 20
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    tags = {*cpython_tags((3, 12), platforms=platforms), *compatible_tags((3, 12), "cp312", platforms)}
    for file in files:
        assert parse_wheel_filename(file.name)[3] & tags, f"{file.name} does not fit"
        with zipfile.ZipFile(file) as wheel:  # what is only unpacked is not moved to its place
            assert not [name for name in wheel.namelist() if ".data/purelib/" in name or ".data/platlib/" in name]
    [own] = [file for file in files if file.name.startswith("vitserve-")]
    assert {name.split("/")[0] for name in zipfile.ZipFile(own).namelist()} == {
        f"{own.name.split('-py3')[0]}.dist-info"
    }


def machine(folder: Path) -> Path:
    """Make an environment of what the machine has, as far as it is installed here, and return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for name in gpu_kit.read_packages():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


def copy_of_the_tree(folder: Path) -> Path:
    """Copy what is needed as a machine gets it: no git, no metadata, no shared folder, nothing that was made before."""
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", ".cache", ".peers", "results")
    for name in ("model", "service", "vitserve", "benchmarks", "tests"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=left_out)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_step_runs_on_a_machine_with_the_kit_and_no_network(downloads: Path, tmp_path: Path) -> None:
    python = machine(tmp_path / "machine")
    tree = copy_of_the_tree(tmp_path / "tree")
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ}
    environment = kept | {"HOME": str(tmp_path), "OMP_WAIT_POLICY": "PASSIVE"}
    for name in ("fastapi", "pydantic", "opentelemetry", "vitserve"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
        subprocess.run([python, "-c", code], env=environment, cwd=tmp_path, check=True)

    command = [
        str(python),
        "-m",
        "benchmarks.gpu",
        "--device",
        "cpu",
        "--smoke",
        "--kit",
        str(kit_for(OWN_PYTHON, downloads)),
    ]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK, *command],
        env=environment,
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["gpu-smoke.json"]
    found: dict[str, Any] = json.loads((tmp_path / "out" / "gpu-smoke.json").read_text())
    assert found["errors"] == {}
    assert list(found["step_seconds"]) == list(gpu.STEPS)
    assert found["host"]["requirements that are not met"] == []
    assert found["versions"]["vitserve"] == importlib.metadata.version("vitserve")

    for side in ("ours, off", "reference"):
        assert all(rate > 0 for rate in found["sweep"][side].values())
    engine = found["engine"]
    assert engine["reference"]["name"].startswith("timm ")
    assert set(engine["rates"]) == {"ours", "ours with maps", "reference", "reference resident", "engine process"}
    one = engine["rounds"][0]
    assert engine["ratios"]["ours / reference"] == pytest.approx(one["ours"] / one["reference"], abs=0.001)
    assert engine["ratios"]["engine process / ours"] == pytest.approx(one["engine process"] / one["ours"], abs=0.001)
    assert engine["exact"]["equal_top1"] == engine["equal_top1"] == 1
    assert engine["exact"]["logit_difference"] < 1e-3
    http = found["http"]
    assert http["rounds"][0]["http"]["refused"] == http["rounds"][0]["http"]["broken"] == 0
    assert http["share"] == pytest.approx(http["rate"] / min(http["decode_rate"], http["engine_rate"]), abs=0.01)
    assert http["half load"]["rate"] > 0
    assert all(rate > 0 for rate in found["decode"]["pictures per second, by processes"].values())
    for shares in (each["shares"] for each in found["profile"].values()):
        assert sum(shares.values()) == pytest.approx(1, abs=0.01)
    assert found["attention"]["microseconds, batch 4, 50 tokens"]["FLASH_ATTENTION"] > 0
    assert {"engine, batch 1", "reference, batch 1", "HTTP, one at a time", "HTTP, 90% load"} <= set(found["latency"])
    assert found["mixed"]["off"]["padding"] == 0  # nothing is compiled, so nothing is padded
    assert 0 < found["start"]["warm_seconds"] <= found["start"]["warm_seconds_compiled"]
    for name in ("kill -9 of the engine", "an abort in a GPU's place"):
        assert found["faults"][name]["lost or mixed up"] == 0
        assert found["faults"][name]["503"] > 0, "it was hurt while requests came"
        assert found["faults"][f"seconds to an answer after {name}"] > 0
    assert 'vit_engine_restarts_total{device="cpu"} 2.0' in found["faults"]["metrics"]
    assert found["tests"]["plain"]["exit"] == 0
    assert {"seconds to ready, warm compile cache", "HTTP, p99 at half load, ms"} < set(found["marks"])


def test_packages_are_listed_by_name_with_versions_where_known() -> None:
    packages = gpu_kit.read_packages()
    assert packages["torch"] == "2.11.0"
    assert "uvloop" in packages
    assert not {"fastapi", "starlette", "uvicorn", "pydantic", "msgspec", "httptools", "python-multipart"} & set(
        packages
    )
    assert all(name == canonicalize_name(name) for name in packages)
