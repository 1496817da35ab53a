"""Removes unused files from the environment of an image: `python slim.py /opt/venv`.

A pattern may match nothing, because files differ by version, by processor and by torch's build.
"""

import shutil
import subprocess
import sys
from pathlib import Path

UNUSED = (
    # Test programs of torch, and the protobuf compiler.
    "torch/bin/*Test",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "torch/lib/*_test.so",
    "torch/test",
    # Files for linking C++ programs. torch/include stays, because torch.compile needs it.
    "torch/share",
    "torch/lib/*.a",
    "openvino/cmake",
    "openvino/include",
    # The service uses OpenVINO only on the CPU, and only with torch's graphs.
    "openvino/libs/cache.json",
    "openvino/libs/libopenvino_intel_gpu_plugin.so*",
    "openvino/libs/libopenvino_intel_npu_*",
    "openvino/libs/libopenvino_gguf_frontend.so*",
    "openvino/libs/libopenvino_jax_frontend.so*",
    "openvino/libs/libopenvino_onnx_frontend.so*",
    "openvino/libs/libopenvino_paddle_frontend.so*",
    "openvino/libs/libopenvino_tensorflow_*frontend.so*",
    # Tests of packages.
    "mpmath/tests",
    "networkx/**/tests",
    "numpy/**/tests",
    "sympy/**/tests",
)
# Libraries with large symbol tables, which only debuggers read. CUDA's libraries stay unchanged.
STRIPPED = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "uvloop/*.so")


def slim(packages: Path) -> None:
    """Remove unused files and strip libraries in a site-packages folder.

    Raises:
        subprocess.CalledProcessError: `strip` (binutils) cannot read a library.
    """
    for path in [path for pattern in UNUSED for path in packages.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for library in [path for pattern in STRIPPED for path in packages.glob(pattern)]:
        subprocess.run(["strip", "--strip-unneeded", library], check=True)


if __name__ == "__main__":
    for folder in Path(sys.argv[1]).glob("lib/python*/site-packages"):
        slim(folder)
