"""Import before timm: lets torchvision's Python part load beside a torch that its compiled part was not built for.

The package index has torchvision built for CUDA. Beside a CPU build of torch its library does not load, and
its Python part then fails where it refers to the library's operators. timm needs only the Python part.
"""

from importlib.util import find_spec
from pathlib import Path

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


def _loads() -> bool:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # nothing to stand in for
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        return False
    return True


if not _loads():
    _library = torch.library.Library("torchvision", "DEF")
    for _name in _OPERATORS:
        _library.define(f"{_name}(Tensor a) -> Tensor")
