"""The network's pass in torch, from uint8 pixels to its outputs, uncompiled and compiled."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from model.config import PreprocessConfig
from model.explanation.class_relevance import (
    class_relevance,
    kept_for_class,
    kept_for_transfer,
    transfer_relevance,
)
from model.explanation.folded_weights import FoldedWeights
from model.network.layers.block import Kept
from model.network.library import Classifier
from model.network.vit import KeptPass, VisionTransformer, ViTOutput
from model.outputs import Pooling
from model.runtime.backend import (
    Aim,
    Compilation,
    CompilationState,
    CompileMode,
    HostOutputs,
)
from model.runtime.batch_request import BatchRequest

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# `model.runtime.backend.HostOutputs` that are still on the device, in the model's dtype.
DeviceOutputs = dict[str, Tensor]

# (uint8 [B, H, W, C] on the device, request) -> the network's outputs.
Network = Callable[[Tensor, BatchRequest], DeviceOutputs]


class Normalise(nn.Module):
    """Computes (x/255 - mean) / std in float32, as one multiplication and one addition.

    Args:
        preprocess: mean and std of the model.
        dtype: dtype of the result.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        std = torch.tensor(preprocess.std, dtype=torch.float64)
        mean = torch.tensor(preprocess.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().reshape(1, -1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().reshape(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [B, H, W, C] to the dtype, [B, C, H, W]."""
        pixels = images.permute(0, 3, 1, 2).float()
        return (pixels * self.scale + self.shift).to(self.dtype)


def run_network(
    model: Classifier,
    pixels: Tensor,
    request: BatchRequest,
    folded: FoldedWeights | None = None,
    aims: Sequence[Aim] = (),
) -> DeviceOutputs:
    """Run a model on normalised pixels [B, C, H, W], without scores.

    Args:
        model: the network.
        pixels: on the device.
        request: the requested outputs.
        folded: see `class_relevance`; needed for relevance and aims.
        aims: classes of other heads whose relevance to compute.
    """
    if not (request.relevance or aims):
        return _by_name(model(pixels, request.layers, 0, request.all_tokens, request.transfer))
    assert isinstance(model, VisionTransformer), "`parse_maps` refuses other networks"
    assert folded is not None
    keep = kept_for_class(model.config)
    if any(aim.head.features == "transfer" for aim in aims):
        keep = kept_for_transfer(model.config)
    output = model(pixels, request.layers, keep, request.all_tokens, request.transfer)
    outputs = _by_name(output)
    with one_thread():
        if request.relevance:
            outputs["relevance"] = class_relevance(model, output, folded)
        if aims:
            outputs["aimed"] = _aimed(model, output, folded, aims)
    return outputs


def _by_name(output: ViTOutput) -> DeviceOutputs:
    """Return the outputs of a pass besides relevance."""
    outputs: DeviceOutputs = {"logits": output.logits, **output.embeddings}
    if output.attention is not None:
        outputs["attention"] = output.attention
    return outputs


def _aimed(
    model: VisionTransformer, output: ViTOutput, folded: FoldedWeights, aims: Sequence[Aim]
) -> Tensor:
    """Return the relevance of aims from the output of a pass, [aims, N]."""
    assert output.kept is not None
    features = {
        pool: output.embeddings[pool].float().cpu().numpy()
        for pool in {aim.head.features for aim in aims}
    }
    relevance = torch.empty((len(aims), model.config.tokens), device=output.logits.device)
    for pool in features:
        numbers = [number for number, aim in enumerate(aims) if aim.head.features == pool]
        chosen = [aims[number] for number in numbers]
        directions = np.stack([aim.target(features[pool])[1] for aim in chosen])
        on_device = torch.from_numpy(directions).to(relevance.device)
        part = _of_images(output, [aim.image for aim in chosen], pool)
        if pool == "transfer":
            relevance[numbers] = transfer_relevance(model, part, on_device)
        else:
            relevance[numbers] = class_relevance(model, part, folded, on_device)
    return relevance


def _of_images(output: ViTOutput, images: Sequence[int], pool: Pooling) -> ViTOutput:
    """Return the output of a pass for some of its images."""
    assert output.kept is not None
    rows = torch.tensor(images, device=output.logits.device)
    blocks = [
        Kept._make(None if tensor is None else tensor[rows] for tensor in block)
        for block in output.kept.blocks
    ]
    kept = KeptPass(blocks, output.kept.tokens[rows])
    return output._replace(kept=kept, embeddings={pool: output.embeddings[pool][rows]})


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute only with the calling thread in this context, on a CPU.

    Threads wait for each other at the end of each operation. That takes longer than a small
    operation, most of all if another process uses the core of one of them.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def on_host(outputs: DeviceOutputs) -> HostOutputs:
    """Return outputs as arrays, floats as float32."""
    arrays: HostOutputs = {}
    for name, tensor in outputs.items():
        exact = tensor.float() if tensor.is_floating_point() else tensor
        arrays[name] = exact.cpu().numpy()
    return arrays


def plan_compilation(mode: CompileMode, device: torch.device) -> Compilation:
    """Return `COMPILING` if the network will be compiled, else why it will not."""
    if mode == "off":
        return Compilation(CompilationState.OFF)
    if mode == "auto" and device.type == "cpu":
        return Compilation(CompilationState.SKIPPED, "off on the CPU unless asked for")
    return Compilation(CompilationState.COMPILING)


def compiled_network(
    model: Classifier,
    normalise: Callable[[Tensor], Tensor],
    folded: FoldedWeights | None,
    *,
    any_batch: bool,
    backend: str = "inductor",
) -> Network:
    """Return the network for uint8 pixels, compiled at its first runs.

    The embedding and each kind of block become a graph, because compiling a whole pass for each
    request would take several times as long. The plain pass for any batch size is one graph, in
    which normalisation fuses with the patch embedding, and the end of a block with the next norm.

    Args:
        model: the network.
        normalise: turns uint8 pixels into the network's input.
        folded: see `model.explanation.class_relevance.class_relevance`.
        any_batch: whether code is for any batch size; on a CPU it ran no faster than uncompiled.
        backend: backend of `torch.compile`.
    """
    compiled = partial(_compiled, any_batch=any_batch, backend=backend)
    whole = compiled(lambda pixels: run_network(model, normalise(pixels), BatchRequest()))
    if not isinstance(model, VisionTransformer):
        return lambda pixels, request: whole(pixels)
    tensors: dict[int, Any] = {
        id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())
    }
    twin = copy.deepcopy(model, tensors)  # new modules, which share the model's tensors
    embed = model.embed
    twin.embed = compiled(lambda pixels: embed(normalise(pixels)))  # type: ignore[method-assign]
    for block in twin.blocks:
        block.forward = compiled(block.forward)

    def network(pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        if any_batch and request.network_part == BatchRequest():
            return whole(pixels)
        return run_network(twin, pixels, request, folded)

    return network


def _compiled(function: Callable[P, T], *, any_batch: bool, backend: str) -> Callable[P, T]:
    """Return a function that compiles itself at its first calls.

    It compiles once for all sizes of its tensors' first dimension, or once for each size. In the
    first case it computes a single row uncompiled, because that would be compiled once more.
    """
    compiled = torch.compile(function, dynamic=None if any_batch else False, backend=backend)
    if not any_batch:
        return compiled

    def run(*arguments: P.args, **keywords: P.kwargs) -> T:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if len(tensors[0]) == 1:
            return function(*arguments, **keywords)
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(*arguments, **keywords)

    return run
