"""Write the kit of the GPU benchmark: `python -m benchmarks.gpu_kit FOLDER`, or `make gpu-kit`.

The folder holds the wheels of what vitserve needs and a machine with torch, numpy, timm and triton lacks, the
metadata of vitserve, as a wheel without its code, and the compiled resize, which is of no version of Python.
`benchmarks.gpu` unpacks it, so that nothing is installed there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.checkpoints import REPOSITORY

_THERE = {"torch", "numpy", "jinja2"}
"""What the machine has: its torch is of its CUDA, and its numpy of its torch."""
_MORE = ("nvidia-ml-py", "pytest>=8.3", "pytest-timeout")
"""What the benchmark and the tests of CUDA import beside what vitserve requires."""
_RESIZE = REPOSITORY / "model" / "images" / "_resample.abi3.so"
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 that wheels are built for: pip compares them for equality."""


def make_kit(folder: Path, *, python: str = "3.12") -> list[Path]:
    """Write the kit into a folder that is empty or absent, and return its files.

    Args:
        python: version of the interpreter that the wheels are for.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel.
        FileExistsError: the folder has files.
        FileNotFoundError: the resize is not compiled here.
    """
    if not _RESIZE.exists():
        raise FileNotFoundError(f"{_RESIZE} is not there: it takes a C compiler and `pip install -e .`")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: name another folder or remove it")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    environment = {"python_version": python, "sys_platform": "linux"}
    needed = [Requirement(line) for line in (*project["dependencies"], *_MORE)]
    asked = [
        f"{each.name}{each.specifier}"
        for each in needed
        if each.name not in _THERE and (each.marker is None or each.marker.evaluate(environment))
    ]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(folder)]
    command += ["--constraint", str(REPOSITORY / "constraints.txt"), "--python-version", python]
    for minor in _GLIBC:
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    subprocess.run([*command, "--platform", "manylinux2014_x86_64", *asked], check=True)
    inside = f"vitserve-{project['version']}.dist-info"
    about = ["Metadata-Version: 2.1", "Name: vitserve", f"Version: {project['version']}"]
    about += [f"Requires-Dist: {line}" for line in project["dependencies"]]
    with zipfile.ZipFile(folder / f"vitserve-{project['version']}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{inside}/METADATA", "\n".join(about) + "\n")
        archive.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(
            f"{inside}/RECORD", "".join(f"{inside}/{name},,\n" for name in ("METADATA", "WHEEL", "RECORD"))
        )
    shutil.copy(_RESIZE, folder)
    return sorted(folder.iterdir())


def main() -> int:
    """Write the kit, and print what is in it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_kit", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    arguments = parser.parse_args()
    for file in make_kit(arguments.folder, python=arguments.python):
        print(f"{file.stat().st_size / 2**20:6.2f} MiB  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
