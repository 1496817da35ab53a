"""Import timm and transformers as references, if they are installed.

Both need torchvision's Python part. Its compiled operators may be built for another torch; the
classifiers here do not use them, so missing names are declared.
"""

from typing import Any

import pytest
import torch

_OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "qroi_align",
    "_roi_align_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)

_library: Any = None


def declare_torchvision_operators() -> None:
    """Declare the names of torchvision's operators unless its compiled library has them."""
    global _library  # noqa: PLW0603 - a torch library lives as long as its object
    if _library is not None:
        return
    try:
        import torchvision  # noqa: F401
    except (RuntimeError, OSError):
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                _library.define(f"{name}(Tensor a) -> Tensor")
    except ImportError:
        pytest.skip("torchvision is not installed")


def timm() -> Any:
    """Return timm, or skip the test."""
    declare_torchvision_operators()
    return pytest.importorskip("timm", reason="timm is not installed")


def transformers() -> Any:
    """Return transformers, or skip the test."""
    declare_torchvision_operators()
    return pytest.importorskip("transformers", reason="transformers is not installed")


def torchvision() -> Any:
    """Return torchvision, or skip the test."""
    declare_torchvision_operators()
    return pytest.importorskip("torchvision", reason="torchvision is not installed")
