"""Compilation of the network by `torch.compile`, and its state."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from model.explanation.folded_weights import FoldedWeights
from model.network.layers.attention import Attention, chunked_attention, mean_row_at_once
from model.network.layers.block import Mlp
from model.network.layers.patch_embed import PatchEmbed
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.runtime.backend import Compilation, CompilationState, CompileMode
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.postprocess import run_network

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Classifier)

Network = Callable[[Tensor, BatchRequest], BatchOutputs[Tensor]]
"""(uint8 [B, H, W, C] on the device, request) -> the network's outputs there."""

_RECOMPILE_LIMIT: Final = 256
"""How often a function may be compiled in a process: dynamo's own limit over all of a function's callers."""


def plan_compilation(mode: CompileMode, device: torch.device) -> Compilation:
    """Return `COMPILING` where the network is to be compiled, else why it is not."""
    if mode == "off":
        return Compilation(CompilationState.OFF)
    if mode == "auto" and device.type == "cpu":
        return Compilation(CompilationState.SKIPPED, "off on the CPU unless asked for")
    if shutil.which("g++") is None:
        logger.warning("not compiled: no C++ compiler (g++) on this machine")
        return Compilation(CompilationState.SKIPPED, "no C++ compiler (g++) on this machine")
    return Compilation(CompilationState.COMPILING)


def choose_kernels(model: Classifier, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Replace the kernels that are slow on the device by ones that are equivalent in the dtype."""
    if not isinstance(model, VisionTransformer):
        return
    # The tanh approximation is at most 0.0005 away, a sixteenth of what bfloat16 rounds off, and half of float16's.
    gelu = {torch.bfloat16: ("gelu", "gelu_tanh"), torch.float16: ("gelu_tanh",)}.get(dtype, ())
    for module in model.modules():
        if isinstance(module, Attention) and device.type == "cpu":
            module.attend = chunked_attention
        elif isinstance(module, Attention):
            module.mean_row = mean_row_at_once
        elif isinstance(module, Mlp) and device.type == "cuda":
            module.fused = module.fc1.bias is not None and model.config.activation in gelu
        elif isinstance(module, PatchEmbed) and device.type == "cuda":
            module.as_product = True


@contextmanager
def strict_compiler() -> Iterator[None]:
    """Let torch compile in this context for every model that a process meets, and fail where it would give up.

    By default it compiles a function eight times, and from then on runs it uncompiled in silence. Several models, kinds
    of block and batch sizes need more.
    """
    with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
        yield


def compiled_twin(model: M) -> M:
    """Return a model that shares the weights and compiles its blocks, or all of it, at its first run with each shape.

    On a CPU code for any batch size ran no faster than uncompiled.
    """
    twin = _twin(model)
    for block in twin.blocks if isinstance(twin, VisionTransformer) else (twin,):
        # One block's code serves all of them: compiling regions takes a fraction of the whole model's time.
        block.compile(dynamic=False)
    return twin


def compiled_network(
    model: Classifier,
    normalise: Callable[[Tensor], Tensor],
    folded: FoldedWeights | None,
    *,
    backend: str = "inductor",
) -> Network:
    """Return the network for uint8 pixels, compiled once for any batch size at its first runs.

    Where no map is asked for, the whole pass is one graph, in which normalisation fuses with the patch embedding, and
    the end of a block with the norm that follows. With a map, the embedding and each kind of block are a graph: a
    whole pass for each request would take a multiple of the time to compile.

    Args:
        folded: see `model.explanation.relevance.token_relevance`.
        backend: see `compiled_for_any_batch`.
    """
    compiled = partial(compiled_for_any_batch, backend=backend)
    whole = compiled(lambda pixels: run_network(model, normalise(pixels), BatchRequest()))
    if not isinstance(model, VisionTransformer):
        return lambda pixels, request: whole(pixels)
    twin = _twin(model)
    embed = twin.embed
    twin.embed = compiled(lambda pixels: embed(normalise(pixels)))  # type: ignore[method-assign]
    for block in twin.blocks:
        block.forward = compiled(block.forward)

    def run(pixels: Tensor, request: BatchRequest) -> BatchOutputs[Tensor]:
        if request.of_network == BatchRequest():
            return whole(pixels)
        return run_network(twin, pixels, request, folded)

    return run


def compiled_for_any_batch(function: Callable[P, T], *, backend: str = "inductor") -> Callable[P, T]:
    """Return a function that compiles itself once for all sizes of its tensors' first dimension.

    Tensors are arguments, or parts of one that is a tuple. A single row is computed without compiling: code for any
    size would be compiled once more for it.

    Args:
        backend: of `torch.compile`.
    """
    compiled = torch.compile(function, backend=backend)

    def run(*arguments: P.args, **keywords: P.kwargs) -> T:
        parts = [part for each in arguments for part in (each if isinstance(each, tuple) else (each,))]
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if len(tensors[0]) == 1:
            return function(*arguments, **keywords)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*arguments, **keywords)

    return run


def _twin(model: M) -> M:
    """Return a model whose modules are its own, and whose tensors are the model's."""
    # Those that a state dict leaves out, too.
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, tensors)
