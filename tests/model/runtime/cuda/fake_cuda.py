"""A CUDA device that computes nothing: torch's build for the CPU knows every kernel's shapes, dtypes and devices there.

`FakeTensorMode` runs a model on tensors without memory whose device is `cuda:0`. Four things of that build need help:
tensors are indexed and copied in Python, as its own ways ask for a CUDA driver; attention is one of CUDA's fused
kernels, as without them torch spells it out in float32; modules are moved by hand, as `Module.to` swaps tensors that
have weak references; and gradients are off, as their engine asks for a driver too.

`captured` holds what a CUDA graph must hold to: tensors of the device alone, no answer that the host waits for, no
float64, and matrix products in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model.network.layers.position import relative_position_index
from tests.model.runtime.cuda.device_stand_in import StandInOps

try:
    from torch._subclasses.fake_tensor import FakeTensorMode
except ImportError:  # its module is private, and may move
    pytest.skip(f"torch {torch.__version__} has no FakeTensorMode where it was", allow_module_level=True)

CUDA: Final = torch.device("cuda", 0)

_HOST_WAITS: Final = {"_local_scalar_dense", "masked_select", "equal", "is_nonzero", "_assert_async", "item"}
_PRODUCTS: Final = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_efficient_attention"}


class NotCapturable(AssertionError):
    """What a CUDA graph cannot hold, or what would be slow in it, was computed."""


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Let tensors be made on `cuda:0`, without gradients; nothing of it is left behind in caches."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    _clear_caches()
    try:
        with _ModuleTo(), mode, torch.no_grad(), _CudaOnly():
            yield mode
    finally:
        _clear_caches()


def _clear_caches() -> None:
    relative_position_index.cache_clear()


def require_fake_cuda() -> None:
    """Skip the module of tests that calls this, where this version of torch does not run on a fake device."""
    try:
        with fake_cuda():
            layer = nn.Linear(8, 8).to(CUDA, torch.float16)
            layer(torch.zeros(2, 8, dtype=torch.float16, device=CUDA))[:, :1].float().softmax(dim=-1)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        pytest.skip(f"torch {torch.__version__} does not run on a fake device: {error}", allow_module_level=True)


@contextmanager
def captured(dtype: torch.dtype, *, float_products: bool = False) -> Iterator[list[str]]:
    """Refuse what a CUDA graph of a model of this dtype must not do; gives the names of the kernels that ran.

    Args:
        float_products: whether products in float32 are allowed, too, as gradients are computed.

    Raises:
        NotCapturable: at the call at fault.
    """
    kernels: list[str] = []
    with _Capture({dtype, torch.float32} if float_products else {dtype}, kernels):
        yield kernels


class _Capture(TorchDispatchMode):
    def __init__(self, allowed: set[torch.dtype], kernels: list[str]) -> None:
        super().__init__()
        self._allowed, self._kernels = allowed, kernels

    def __torch_dispatch__(
        self, kernel: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = kernel.overloadpacket.__name__
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(kernel.tags)
        masks = [t for t in tree_leaves(args[1:]) if isinstance(t, Tensor) and t.dtype == torch.bool]
        if (waits and (name != "index" or masks)) or name in _HOST_WAITS:
            raise NotCapturable(f"{kernel}: the host waits for what the device computes")
        self._check(kernel, (args, kwargs))
        found = {t.dtype for t in _tensors(args)}
        if name in _PRODUCTS and (len(found) > 1 or not found <= self._allowed):
            raise NotCapturable(f"{kernel}: a product of {_words(found)} in a model of {_words(self._allowed)}")
        result = kernel(*args, **kwargs)
        self._check(kernel, result)
        self._kernels.append(name)
        return result

    @staticmethod
    def _check(kernel: Any, values: Any) -> None:
        tensors = _tensors(values)
        if devices := {tensor.device for tensor in tensors} - {CUDA}:
            raise NotCapturable(f"{kernel}: a tensor on {_words(devices)}")
        if torch.float64 in {tensor.dtype for tensor in tensors}:
            raise NotCapturable(f"{kernel}: float64")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _words(found: set[Any]) -> str:
    return ", ".join(sorted(map(str, found)))


class _CudaOnly(TorchFunctionMode):
    """Computes `tensor[...]` and `copy_` by the operators that C++ would call, and attention by a fused kernel."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__getitem__ and args[0].device.type == "cuda":
            return _index(args[0], args[1])
        if function is Tensor.copy_ and args[0].device.type == "cuda":
            return torch.ops.aten.copy_.default(args[0], args[1])
        if function is F.scaled_dot_product_attention and args[0].device.type == "cuda":
            return _attention(*args, **(kwargs or {}))
        if function in (Tensor.nonzero, torch.nonzero):
            raise NotCapturable("nonzero: the host waits for what the device computes")
        return function(*args, **(kwargs or {}))


def _index(tensor: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    if Ellipsis in [part for part in keys if not isinstance(part, Tensor)]:
        at = next(place for place, part in enumerate(keys) if part is Ellipsis)
        taken = sum(part is not None for part in keys) - 1
        keys[at : at + 1] = [slice(None)] * (tensor.ndim - taken)
    axis, gathers = 0, {}
    for part in keys:
        if part is None:
            tensor, axis = tensor.unsqueeze(axis), axis + 1
        elif isinstance(part, int):
            tensor = tensor.select(axis, part)
        elif isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, axis, part.start, part.stop, part.step or 1)
            axis += 1
        else:
            gathers[axis] = part
            axis += part.ndim if part.dtype == torch.bool else 1
    if not gathers:
        return tensor
    found: Tensor = torch.ops.aten.index.Tensor(tensor, [gathers.get(place) for place in range(max(gathers) + 1)])
    return found


def _attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, False)[0]
    return found


class _ModuleTo:
    """`nn.Module.to` in Python, parameters and buffers one by one; torch's own is back afterwards."""

    def __enter__(self) -> None:
        self._own = nn.Module.to
        nn.Module.to = _module_to  # type: ignore[assignment, method-assign]

    def __exit__(self, *_: object) -> None:
        nn.Module.to = self._own  # type: ignore[method-assign]


def _module_to(module: nn.Module, device: Any = None, dtype: torch.dtype | None = None, **_: Any) -> nn.Module:
    if isinstance(device, torch.dtype):
        device, dtype = None, device
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(_moved(parameter.data, device, dtype), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _moved(buffer, device, dtype)
    return module


def _moved(tensor: Tensor, device: Any, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device or tensor.device, dtype if tensor.is_floating_point() else None)


class FakeCudaOps(StandInOps):
    """The launcher's operations on `cuda:0`."""

    def __init__(self) -> None:
        super().__init__()
        self.device = CUDA

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """Run the work as it would be captured."""
        work()
        return work
