"""Removes from an environment what the service never reads: `python slim.py /opt/venv`, in the
image's build.

A pattern that finds nothing is no error, as packages and their files differ by version, by
processor and by whether torch is built for CUDA.
"""

import shutil
import subprocess
import sys
from pathlib import Path

UNUSED = (
    # Programs that test torch, and the compiler of protocol buffers.
    "torch/bin/*Test",
    "torch/bin/test_*",
    "torch/bin/protoc*",
    "torch/lib/*_test.so",
    "torch/test",
    # What a program in C++ needs to be linked with them. torch/include stays: torch.compile
    # includes it.
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
# Libraries whose symbol tables are large: only debuggers read them. Those of CUDA are left as they
# are.
STRIPPED = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "uvloop/*.so")


def slim(packages: Path) -> None:
    """Remove unused files and strip libraries in a site-packages folder.

    Raises:
        subprocess.CalledProcessError: `strip`, of binutils, cannot read a library.
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
