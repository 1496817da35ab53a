"""Removes from an environment what the service never reads: `python slim.py /opt/venv`, in the image's build.

It prints how much each pattern frees. A pattern that finds nothing is no error, as packages and their files differ by
version, by processor and by whether torch is built for CUDA.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

UNUSED = (
    # Programs that test torch, and the compiler of protocol buffers.
    "torch/bin/*Test",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "torch/lib/*_test.so",
    "torch/test",
    # What a program in C++ needs to be linked with them. torch/include stays: torch.compile includes it.
    "torch/share",
    "torch/lib/*.a",
    "openvino/cmake",
    "openvino/include",
    # The service uses OpenVINO on the CPU alone, and gives it torch's graphs alone.
    "openvino/libs/cache.json",
    "openvino/libs/libopenvino_intel_gpu_plugin.so*",
    "openvino/libs/libopenvino_intel_npu_*",
    "openvino/libs/libopenvino_gguf_frontend.so*",
    "openvino/libs/libopenvino_jax_frontend.so*",
    "openvino/libs/libopenvino_onnx_frontend.so*",
    "openvino/libs/libopenvino_paddle_frontend.so*",
    "openvino/libs/libopenvino_tensorflow_*frontend.so*",
    # Tests of packages, which nothing but those tests imports.
    "mpmath/tests",
    "networkx/**/tests",
    "numpy/**/tests",
    "sympy/**/tests",
)
STRIPPED = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "uvloop/*.so")
"""Libraries whose symbol tables are large: only debuggers read them. Those of CUDA are left as they are."""


def unused_paths(packages: Path) -> Iterator[tuple[str, Path]]:
    """Yield each pattern of `UNUSED` with each file or folder that it finds in a site-packages folder."""
    for pattern in UNUSED:
        for path in sorted(packages.glob(pattern)):
            yield pattern, path


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.lstat().st_size for file in files)


def slim(packages: Path) -> dict[str, int]:
    """Remove unused files and strip libraries in a site-packages folder; return the bytes that each pattern freed.

    Raises:
        subprocess.CalledProcessError: `strip`, of binutils, cannot read a library.
    """
    freed: dict[str, int] = {}
    for pattern, path in unused_paths(packages):
        freed[pattern] = freed.get(pattern, 0) + size_of(path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for pattern in STRIPPED:
        for library in sorted(packages.glob(pattern)):
            before = size_of(library)
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
            freed[pattern] = freed.get(pattern, 0) + before - size_of(library)
    return freed


def main() -> None:
    """Slim the environment that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="folder of a virtual environment")
    for packages in sorted(parser.parse_args().environment.glob("lib/python*/site-packages")):
        for pattern, size in slim(packages).items():
            print(f"{size / 1e6:7.1f} MB  {pattern}")  # noqa: T201


if __name__ == "__main__":
    main()
