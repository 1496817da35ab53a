"""A device without computation: on torch's device `meta`, kernels have only shapes and dtypes.

`captured` enforces the rules of a CUDA graph: only tensors of the device, no waits of the host, no
float64, and matrix products in the model's own dtype.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.model.runtime.cuda.device_stand_in import StandInOps

META: Final = torch.device("meta")

_HOST_WAITS: Final = {
    "_local_scalar_dense",
    "masked_select",
    "equal",
    "is_nonzero",
    "nonzero",
    "item",
}
_PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm", "convolution"}


class NotCapturable(AssertionError):
    """An operation ran that a CUDA graph cannot hold, or that would be slow in it."""


@contextmanager
def captured(dtype: torch.dtype, *, float_products: bool = False) -> Iterator[list[str]]:
    """Enforce the rules of a CUDA graph, and give the names of the kernels that ran.

    Args:
        float_products: whether products in float32 are allowed, too, as gradients are computed.

    Raises:
        NotCapturable: at the call at fault.
    """
    kernels: list[str] = []
    with (
        torch.no_grad(),
        _OnDevice(),
        _Capture({dtype, torch.float32} if float_products else {dtype}, kernels),
    ):
        yield kernels


class _OnDevice(TorchFunctionMode):
    """Attention in one step, like CUDA's kernels; other devices split it. Counts uploads."""

    def __torch_function__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return args[0] + args[1][..., :1, :] + args[2][..., :1, :]  # same dtype and device
        if function in (torch.tensor, torch.as_tensor):
            raise NotCapturable(f"{function.__name__}: a tensor on cpu")
        return function(*args, **(kwargs or {}))


class _Capture(TorchDispatchMode):
    def __init__(self, allowed: set[torch.dtype], kernels: list[str]) -> None:
        super().__init__()
        self._allowed = allowed
        self._kernels = kernels

    def __torch_dispatch__(
        self,
        kernel: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = kernel.overloadpacket.__name__
        masks = [
            t for t in tree_leaves(args[1:]) if isinstance(t, Tensor) and t.dtype == torch.bool
        ]
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(kernel.tags)
        if (waits and (name != "index" or masks)) or name in _HOST_WAITS:
            raise NotCapturable(f"{kernel}: the host waits for what the device computes")
        self._check(kernel, (args, kwargs))
        found = {t.dtype for t in _tensors(args)}
        if name in _PRODUCTS and not (len(found) == 1 and found <= self._allowed):
            raise NotCapturable(
                f"{kernel}: a product of {_words(found)} in a model of {_words(self._allowed)}"
            )
        try:
            result = kernel(*args, **(kwargs or {}))
        except NotImplementedError as error:
            raise NotCapturable(f"{kernel}: a tensor on cpu") from error
        self._check(kernel, result)
        self._kernels.append(name)
        return result

    @staticmethod
    def _check(kernel: Any, values: Any) -> None:
        tensors = _tensors(values)
        if devices := {tensor.device for tensor in tensors} - {META}:
            raise NotCapturable(f"{kernel}: a tensor on {_words(devices)}")
        if torch.float64 in {tensor.dtype for tensor in tensors}:
            raise NotCapturable(f"{kernel}: float64")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _words(found: set[Any]) -> str:
    return ", ".join(sorted(map(str, found)))


class MetaOps(StandInOps):
    """The launcher's operations on `meta`."""

    def __init__(self) -> None:
        super().__init__()
        self.device = META

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """Run the work under the rules of a capture."""
        work()
        return work
