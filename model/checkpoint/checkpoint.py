"""A checkpoint in memory, whatever format it came from, and the strict way from it to a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError
from torch import Tensor

from model.checkpoint.files import as_float32
from model.config import PreprocessConfig, Size, ViTConfig
from model.errors import CheckpointError, first_problem
from model.network.vit import VisionTransformer, resize_position_embedding


@dataclass(frozen=True)
class Checkpoint:
    """Everything the service needs to know of a model.

    Attributes:
        name: what answers, metrics and /model call it.
        source: where it was read from, as the operator wrote it.
        format: the reader that read it, e.g. `timm`.
        architecture: the format's own name for the architecture, e.g. `deit_tiny_patch16_224`.
        config, preprocess: see `model.config`.
        labels: one human description a class, in index order; may repeat.
        tensors: float32 on the CPU, keyed as `model.network.vit.VisionTransformer` names its parameters.
        temperature: logits are divided by it before the softmax (Guo et al. 2017).
        multi_label: scores are independent sigmoids instead of one softmax.
        revision: commit of a hub id; None for a local path.
        notes: what was chosen that the files themselves do not say (a preset, by name); to be told at start-up.
        antialias: whether position embeddings are low-passed before they shrink, as the source library does.
    """

    name: str
    source: str
    format: str
    architecture: str
    config: ViTConfig
    preprocess: PreprocessConfig
    labels: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    temperature: float = 1.0
    multi_label: bool = False
    revision: str | None = None
    notes: tuple[str, ...] = ()
    antialias: bool = True

    def __post_init__(self) -> None:
        """Refuse parts that contradict each other.

        Raises:
            CheckpointError: labels, input size or channels disagree with the architecture.
        """
        classes, size = self.config.num_classes, self.config.image_size
        if len(self.labels) != classes:
            raise CheckpointError(f"{self.source}: {len(self.labels)} labels for {classes} classes")
        if self.preprocess.size != size:
            raise CheckpointError(f"{self.source}: preprocessing gives {self.preprocess.size}, the model takes {size}")
        if len(self.preprocess.mean) != self.config.in_channels:
            raise CheckpointError(
                f"{self.source}: mean and std have {len(self.preprocess.mean)} channels, "
                f"the model takes {self.config.in_channels}"
            )
        if self.config.in_channels not in (1, 3):
            raise CheckpointError(f"{self.source}: takes {self.config.in_channels} channels; pictures have 1 or 3")

    def resized(self, size: Size) -> Checkpoint:
        """The same model for another input size: position embeddings and preprocessing follow.

        Args:
            size: (rows, columns) in pixels.

        Raises:
            CheckpointError: `size` is no multiple of the patch size, too large, or the model's
                positions cannot be resized.
        """
        old = self.config
        if size == old.image_size:
            return self
        if size[0] % old.patch_size or size[1] % old.patch_size:
            raise CheckpointError(
                f"{self.source}: image size {size[0]}x{size[1]} is not a multiple of the patch size {old.patch_size}"
            )
        if old.relative_position_bias:
            raise CheckpointError(f"{self.source}: relative position biases are not resized; keep {old.image_size}")
        config = resized_config(old, size, self.source)
        model = _meta_model(config)
        tensors = dict(self.tensors)
        if old.position_embedding == "sincos2d":
            tensors["pos_embed"] = model.fixed_position_embedding()
        elif old.position_embedding == "learned":
            tensors["pos_embed"] = resize_position_embedding(
                tensors["pos_embed"],
                prefix_tokens=old.prefix_tokens if old.position_prefix else 0,
                old_grid=old.grid,
                new_grid=config.grid,
                antialias=self.antialias,
            )
        return replace(self, config=config, preprocess=resized_preprocess(self.preprocess, size), tensors=tensors)

    def build(self) -> VisionTransformer:
        """The model with exactly these weights, float32 on the CPU, in evaluation mode.

        Raises:
            CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not finite.
        """
        model = _meta_model(self.config)  # no memory and no random weights that could be left in place
        expected = model.state_dict()
        check_tensors(self.source, self.tensors, {name: tuple(t.shape) for name, t in expected.items()})
        for name, tensor in self.tensors.items():
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{self.source}: {name} holds values that are not finite")
        model.load_state_dict(dict(self.tensors), strict=True, assign=True)
        return model.eval().requires_grad_(False)


def resized_config(config: ViTConfig, size: Size, source: str) -> ViTConfig:
    """`config` for another input size, checked again as a whole; a remainder is dropped.

    Raises:
        CheckpointError: more tokens than are allowed, or smaller than a patch.
    """
    try:
        remainder = bool(size[0] % config.patch_size or size[1] % config.patch_size)
        return ViTConfig.model_validate({**config.model_dump(), "image_size": size, "drop_remainder": remainder})
    except ValidationError as error:
        raise CheckpointError(f"{source}: image size {size[0]}x{size[1]}: {first_problem(error)}") from None


def resized_preprocess(preprocess: PreprocessConfig, size: Size) -> PreprocessConfig:
    """`preprocess` for another input size; the share of the picture that the crop keeps stays as it was."""
    kept = [have / total for have, total in zip(preprocess.size, preprocess.resize_size, strict=True)]
    resize_size = tuple(max(n, int(n / share)) for n, share in zip(size, kept, strict=True))
    return preprocess.model_copy(update={"size": size, "resize_size": resize_size})


def native_tensors(tensors: Mapping[str, Tensor], config: ViTConfig, where: str) -> dict[str, Tensor]:
    """Tensors that already bear the model's own names: names and shapes checked, then brought to float32.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not floating point.
    """
    shapes = {name: tuple(t.shape) for name, t in _meta_model(config).state_dict().items()}
    check_tensors(where, tensors, shapes)
    return {name: as_float32(tensor, name, where) for name, tensor in tensors.items()}


def check_tensors(source: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare tensors with what the architecture expects, by name and shape.

    Raises:
        CheckpointError: names the first offending tensor of each kind and counts the rest.
    """
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{source}: missing key {_first(missing)}")
    unexpected = sorted(tensors.keys() - shapes.keys())
    if unexpected:
        raise CheckpointError(f"{source}: unexpected key {_first(unexpected)}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{source}: {name} has shape {list(tensors[name].shape)}, expected {list(shape)}")


def _meta_model(config: ViTConfig) -> VisionTransformer:
    with torch.device("meta"):
        return VisionTransformer(config)


def _first(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
