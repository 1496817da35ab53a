"""Write the kit of the GPU benchmark: `python -m benchmarks.gpu_kit FOLDER`, or `make gpu-kit`.

The folder holds the wheels of what vitserve needs and a machine with a GPU lacks, and the metadata of vitserve, as a
wheel without its code. What the machine has stands in `gpu_packages.txt`. A package that is listed without a version
counts as lacking where a version is required: what is not known to be there is taken along. `benchmarks.gpu` unpacks
the kit by itself, so that nothing has to be installed there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.checkpoints import REPOSITORY

PACKAGES = REPOSITORY / "benchmarks" / "gpu_packages.txt"
LIMIT = 50 << 20
"""Bytes of the folder at most."""

_MORE = ("nvidia-ml-py", "pytest", "pytest-timeout", "timm", "torchvision", "triton")
"""What the benchmark and the tests of CUDA import beside what vitserve requires."""

_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 that wheels are built for: pip compares them for equality."""


class KitFailed(Exception):
    """The kit cannot be made; the message says why."""


def read_packages(file: Path = PACKAGES) -> dict[str, str | None]:
    """Return what a machine has: its packages by canonical name, with their versions where these are known."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version or None for name, _, version in pairs}


def missing(requirements: Iterable[Requirement], has: dict[str, str | None], python: str) -> list[Requirement]:
    """Return the requirements that such a machine does not meet, or is not known to meet."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    needed = [each for each in requirements if each.marker is None or each.marker.evaluate(environment)]
    return [each for each in needed if not _is_met(each, has)]


def _is_met(requirement: Requirement, has: dict[str, str | None]) -> bool:
    name = canonicalize_name(requirement.name)
    if name not in has:
        return False
    version = has[name]
    return requirement.specifier.contains(version, prereleases=True) if version else not requirement.specifier


def make_kit(folder: Path, *, python: str = "3.12", packages: Path = PACKAGES) -> list[Path]:
    """Write the kit into a folder that is empty or absent, and return its files.

    Args:
        python: version of the interpreter that the wheels are for.

    Raises:
        KitFailed: the folder has files, pip finds no wheel, or the kit is too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise KitFailed(f"{folder} is not empty: name another folder or remove it")
    has, done = read_packages(packages), set[str]()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = [Requirement(line) for line in (*project["dependencies"], *_MORE)]
    while waiting := [each for each in missing(requirements, has, python) if canonicalize_name(each.name) not in done]:
        names = {canonicalize_name(each.name): each.name for each in waiting}
        if heavy := [name for name in names if name == "torch" or name.startswith("nvidia-c")]:
            raise KitFailed(f"{packages.name} lists no {heavy[0]} that is recent enough: a kit does not bring it")
        _download(folder, [f"{each.name}{each.specifier}" for each in waiting], python)
        done |= set(names)
        new = [file for file in folder.glob("*.whl") if parse_wheel_filename(file.name)[0] in names]
        requirements = [Requirement(line) for file in new for line in _requires_of(file)]
    _write_metadata(folder, project)
    files = sorted(folder.iterdir())
    if (size := sum(file.stat().st_size for file in files)) > LIMIT:
        raise KitFailed(f"the kit has {size >> 20} MiB, and {LIMIT >> 20} MiB are allowed")
    return files


def _requires_of(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def _download(folder: Path, requirements: Sequence[str], python: str) -> None:
    abi = f"cp{python.replace('.', '')}"
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in _GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
        *("--constraint", str(REPOSITORY / "constraints.txt"), "--only-binary", ":all:"),
        *("--python-version", python, "--implementation", "cp", "--abi", abi, "--abi", "abi3", "--abi", "none"),
        *(word for platform in platforms for word in ("--platform", platform)),
        *("--dest", str(folder), *requirements),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KitFailed(f"pip download failed:\n{done.stderr[-2000:]}")


def _write_metadata(folder: Path, project: dict[str, Any]) -> None:
    """Write a wheel that holds nothing but vitserve's metadata: its code is that of the working tree."""
    inside = f"vitserve-{project['version']}.dist-info"
    about = ["Metadata-Version: 2.1", "Name: vitserve", f"Version: {project['version']}"]
    about += [f"Requires-Dist: {line}" for line in project["dependencies"]]
    wheel = ["Wheel-Version: 1.0", "Generator: benchmarks.gpu_kit", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    record = [f"{inside}/{name},," for name in ("METADATA", "WHEEL", "RECORD")]
    with zipfile.ZipFile(folder / f"vitserve-{project['version']}-py3-none-any.whl", "w") as archive:
        for name, lines in (("METADATA", about), ("WHEEL", wheel), ("RECORD", record)):
            archive.writestr(f"{inside}/{name}", "\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the kit, and print what is in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    arguments = parser.parse_args(argv)
    try:
        files = make_kit(arguments.folder, python=arguments.python)
    except KitFailed as error:
        print(f"benchmarks/gpu_kit.py: {error}", file=sys.stderr)
        return 1
    for file in files:
        print(f"{file.stat().st_size / 2**20:6.2f} MiB  {file.name}")
    print(f"{sum(file.stat().st_size for file in files) / 2**20:6.2f} MiB in {len(files)} files: {arguments.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
