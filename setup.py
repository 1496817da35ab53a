"""What pyproject.toml cannot say: the wheel holds a library of C, and is of no version of Python.

The resize of pictures is loaded by ctypes and includes nothing of Python. So one wheel a platform
is enough, and one without it (`VITSERVE_KERNEL=no`) is for any platform: Pillow resizes there.
"""

import os

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

KERNEL = os.environ.get("VITSERVE_KERNEL", "")
"""`no` leaves the resize out, `yes` ends the build where it cannot be compiled; else it is left out
there.
"""


class WheelOfAPlatform(bdist_wheel):
    """A wheel whose tags name the platform alone."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, its ABI and the platform."""
        return "py3", "none", super().get_tag()[2]


resize = Extension(
    "model.images._resample",
    ["model/images/resample.c"],
    extra_compile_args=["-O3"],
    py_limited_api=True,  # for its name alone, `_resample.abi3.so`
    optional=KERNEL != "yes",
)
setup(ext_modules=[] if KERNEL == "no" else [resize], cmdclass={"bdist_wheel": WheelOfAPlatform})
