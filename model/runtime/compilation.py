"""Compilation of the network by `torch.compile`, and its state."""

from __future__ import annotations

import enum
import logging
import shutil
from dataclasses import dataclass
from typing import Literal

import torch

from model.network.layers.attention import Attention
from model.network.layers.attention_kernels import chunked_attention
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer

logger = logging.getLogger(__name__)

CompileMode = Literal["auto", "on", "max", "off"]


class CompilationState(enum.Enum):
    """The states of compiling the network."""

    OFF = "off"
    SKIPPED = "skipped"
    COMPILING = "compiling"
    COMPILED = "compiled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Compilation:
    """The state of the compilation; as a string it is one line for `/model`.

    Attributes:
        state: what became of it.
        reason: why it was skipped or failed; empty in other states.
        graphs: what became of the CUDA graphs, where that is not a matter of course.
    """

    state: CompilationState
    reason: str = ""
    graphs: str = ""

    def __str__(self) -> str:
        texts = {CompilationState.SKIPPED: self.reason, CompilationState.FAILED: f"failed: {self.reason}"}
        text = texts.get(self.state, self.state.value)
        return f"{text}; {self.graphs}" if self.graphs else text


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


def powers_of_two(largest: int) -> tuple[int, ...]:
    """Return the batch sizes 1, 2, 4, ... that are below the largest, and the largest."""
    return (*(1 << power for power in range((largest - 1).bit_length())), largest)


def choose_kernels(model: VisionTransformer, device: torch.device) -> None:
    """Replace the kernels that are slow on the device by equivalent ones."""
    for module in model.modules():
        if isinstance(module, Attention) and device.type == "cpu":
            module.attend = chunked_attention
        elif isinstance(module, PatchEmbed) and device.type == "cuda":
            module.as_product = True


def compiled_twin(
    model: VisionTransformer, device: torch.device, *, shapes: int, autotune: bool, embedding: bool
) -> VisionTransformer:
    """Return a model that shares the weights and compiles itself at its first run with each shape.

    Args:
        shapes: number of batch sizes that it will be run with.
        autotune: whether several kernels are timed for every matrix product first.
        embedding: whether the embedding is compiled as the blocks are.
    """
    # Five kinds of block a size (the last without and with the attention row, any other, and both when kept for the
    # relevance); beyond the limit torch gives up in silence.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, 6 * shapes)
    mode = "max-autotune-no-cudagraphs" if autotune else None
    with torch.device("meta"):
        twin = VisionTransformer(model.config)
    twin.load_state_dict(model.state_dict(), assign=True)
    twin.eval().requires_grad_(False)
    choose_kernels(twin, device)
    for block in twin.blocks:
        # One block's code serves all of them: compiling regions takes a fraction of the whole model's time.
        # Fixed shapes only, as dynamic ones ran no faster than uncompiled.
        block.compile(dynamic=False, mode=mode)
    if embedding:
        twin.embed = torch.compile(twin.embed, dynamic=False, mode=mode)  # type: ignore[method-assign]
    return twin
