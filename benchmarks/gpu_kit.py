"""Write the kit of the GPU benchmark: `python -m benchmarks.gpu_kit FOLDER`, or `make gpu-kit`.

The folder holds the wheels of what vitserve needs and a machine with torch, numpy, timm and triton
lacks, the metadata of vitserve, and the compiled resize, which is of no version of Python.
`benchmarks.gpu` unpacks it, so that nothing is installed there.
"""

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.checkpoints import REPOSITORY

# What the machine has: its torch is of its CUDA, and its numpy of its torch.
_THERE = {"torch", "numpy", "jinja2"}
# Further packages that the tests of CUDA import.
_MORE = ("pytest>=8.3", "pytest-timeout")
_RESIZE = REPOSITORY / "model" / "images" / "_resample.abi3.so"
# Minor versions of glibc 2 that wheels are built for: pip compares them for equality.
_GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)


def make_kit(folder: Path, *, python: str = "3.12", resize: Path = _RESIZE) -> None:
    """Write the kit into a folder that is absent.

    Args:
        python: version of the interpreter that the wheels are for.
        resize: compiled resize.

    Raises:
        subprocess.CalledProcessError: pip finds no wheel.
        FileExistsError: the folder is there.
        FileNotFoundError: the resize is not compiled here: it takes a C compiler and `pip install
        -e .`.
    """
    about = importlib.metadata.distribution("vitserve")
    (folder / f"vitserve-{about.version}.dist-info").mkdir(parents=True)
    metadata = (
        about.read_text("METADATA") or about.read_text("PKG-INFO") or ""
    )  # the latter of an editable installation
    (folder / f"vitserve-{about.version}.dist-info" / "METADATA").write_text(metadata)
    shutil.copy(resize, folder)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = [
        line for line in (*project["dependencies"], *_MORE) if Requirement(line).name not in _THERE
    ]
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--only-binary",
            ":all:",
            "--dest",
            str(folder),
        ),
        *("--constraint", str(REPOSITORY / "constraints.txt"), "--python-version", python),
        *(f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC),
        "--platform=manylinux2014_x86_64",
        *(line.partition(";")[0] for line in needed),
    ]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_kit", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    make_kit(**vars(parser.parse_args()))
