"""The checkpoint in memory, whatever format it came from: to a model, strictly, and to another
input size.

A model is made of its backbone, which others may have as well, and its head, a value of a few
kilobytes.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from model.checkpoint.local_files import validating
from model.checkpoint.tensors import checked, digest_of
from model.config import LibraryConfig, NetworkConfig, PreprocessConfig, ViTConfig, cropped_from
from model.description import Description
from model.errors import CheckpointError
from model.heads import Head
from model.layer_config import Size
from model.network.layers.position import resize_position_embedding, resize_relative_table
from model.network.library import LibraryNetwork, library_config, linear_head, meta_tensors
from model.network.vit import VisionTransformer, meta_model, placeholder_heads

# Characters of a label and of a name: every answer repeats them.
MAX_TEXT: Final = 1000
# Steers a terminal, ends a line, turns the text after it around, or is half a character.
_CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Checkpoint(Description):
    """A model's description with its weights.

    Attributes:
        tensors: float32 on the CPU, keyed as the network names its parameters; see `meta_tensors`.
            Here, and not in a file, the head's are told from the backbone's, by the network's
            names.
        antialias: whether position embeddings are low-passed before they shrink, as the source
        library does.
    """

    tensors: Mapping[str, Tensor]
    _: KW_ONLY
    antialias: bool = True

    def __post_init__(self) -> None:
        """Refuse parts that contradict each other.

        Raises:
            CheckpointError: labels or channels disagree with the architecture, or a label or the
                name is longer than `MAX_TEXT`, has characters of `_CONTROL`, or cannot be written
                as UTF-8.
        """
        config, preprocess, labels = self.config, self.preprocess, enumerate(self.labels)
        texts = {"name": self.name, **{f"label {index}": label for index, label in labels}}
        long = next((what for what, text in texts.items() if len(text) > MAX_TEXT), None)
        unprintable = next((what for what, text in texts.items() if _CONTROL.search(text)), None)
        problems = {
            f"{len(self.labels)} labels for {config.num_classes} classes": len(self.labels)
            != config.num_classes,
            f"{long} has {len(texts.get(long or '', ''))} characters, at most {MAX_TEXT} are allowed": long
            is not None,
            f"{unprintable}, {texts.get(unprintable or '', '')!a:.100}, has control characters or cannot be written as "
            "UTF-8": unprintable is not None,
            f"mean and std have {len(preprocess.mean)} channels, the model takes {config.in_channels}": (
                len(preprocess.mean) != config.in_channels
            ),
            f"takes {config.in_channels} channels; pictures have 1 or 3": config.in_channels
            not in (1, 3),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise CheckpointError(f"{self.source}: {problem}")

    def resized(self, size: Size) -> "Checkpoint":
        """Return the same model for an input of (rows, columns) pixels: position embeddings and
        preprocessing follow.

        Only the one that is of another size changes.

        Raises:
            CheckpointError: `size` is no multiple of the patch size, too large, or the model's
                positions cannot be resized.
        """
        old = self.config
        preprocess = (
            self.preprocess
            if size == self.preprocess.size
            else resized_preprocess(self.preprocess, size)
        )
        if size == old.image_size:
            return replace(self, preprocess=preprocess)
        if isinstance(old, LibraryConfig):
            if old.fixed_size:
                raise CheckpointError(
                    f"{self.source}: image size {size[0]}x{size[1]}: timm's {old.architecture} is made for "
                    f"{old.image_size[0]}x{old.image_size[1]}, and is not resized"
                )
            with validating(self.source):
                other = library_config(
                    old.architecture,
                    old.arguments,
                    old.num_classes,
                    old.in_channels,
                    size,
                    fixed_size=False,
                )
            return replace(self, config=other, preprocess=preprocess)
        old = self.vit
        if size[0] % old.patch_size or size[1] % old.patch_size:
            raise CheckpointError(
                f"{self.source}: image size {size[0]}x{size[1]} is not a multiple of the patch size {old.patch_size}"
            )
        if old.relative_position_bias:
            raise CheckpointError(
                f"{self.source}: relative position biases are not resized; keep {old.image_size}"
            )
        config = resized_config(old, size, self.source)
        tensors = resized_positions(self.tensors, old, config, antialias=self.antialias)
        return replace(self, config=config, preprocess=preprocess, tensors=tensors)

    def of_one_size(self) -> "Checkpoint":
        """Return the checkpoint; raises `CheckpointError` if its pictures are not of the size that
        the model takes.
        """
        given = _by(self.preprocess.size)
        taken = _by(self.config.image_size)
        if given != taken:
            raise CheckpointError(
                f"{self.source}: the preprocessing gives {given} pixels, the model takes {taken}: --image-size {given} "
                f"(VIT_IMAGE_SIZE) resizes the model's positions, --image-size {taken} resizes the pictures instead"
            )
        return self

    @property
    def vit(self) -> ViTConfig:
        """Return the configuration of a network that vitserve computes itself.

        Raises:
            CheckpointError: it is a library's.
        """
        if not isinstance(self.config, ViTConfig):
            raise CheckpointError(
                f"{self.source}: is {self.config.kind}: this is for vitserve's own networks"
            )
        return self.config

    def build(self) -> VisionTransformer:
        """Return the Vision Transformer with exactly these weights, float32 on the CPU, in
        evaluation mode.

        Raises:
            CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not finite; or
                the network is a library's.
        """
        model = meta_model(self.vit)  # no memory and no random weights that could be left in place
        self._load(model)
        return model

    def network(self) -> VisionTransformer | LibraryNetwork:
        """Return the network with exactly these weights, as `build` does, whosever it is."""
        if not isinstance(self.config, LibraryConfig):
            return self.build()
        network = LibraryNetwork(self.config)
        self._load(network.module)
        return network.eval()

    def _load(self, module: nn.Module) -> None:
        tensors = native_tensors(self.tensors, self.config, self.source)
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{self.source}: {name} holds values that are not finite")
        heads = placeholder_heads(self.config) if isinstance(self.config, ViTConfig) else {}
        # All names were checked; what is left of a library's are the integers that it makes itself.
        module.load_state_dict(
            {**tensors, **heads}, strict=isinstance(self.config, ViTConfig), assign=True
        )
        module.eval().requires_grad_(False)


def backbone_and_head(checkpoint: Checkpoint) -> tuple[str, Head | None]:
    """Return a name of the backbone, the same for equal ones, and the head with its weights, None
    without one.

    Equal are all tensors but the head's, the architecture with its input size, and the mean and
    deviation of pixels, which the network's graph divides by. A head that is no linear layer on the
    features of an image, as two heads of a distilled model, is a part of its backbone; so is a text
    tower.
    """
    tensors, config, layer = (
        dict(checkpoint.tensors),
        checkpoint.config,
        linear_head(checkpoint.config),
    )
    weight, head = tensors.pop(f"{layer}.weight", None), None
    if weight is not None:
        values = weight.float().numpy(), tensors.pop(f"{layer}.bias").float().numpy()
        head = replace(checkpoint.head, weight=values[0].copy(), bias=values[1].copy())
    if layer is not None:
        config = config.model_copy(update={"num_classes": 0})
    pixels, texts = (
        (checkpoint.preprocess.mean, checkpoint.preprocess.std),
        checkpoint.zero_shot and checkpoint.content,
    )
    parts = digest_of(tensors), config.model_dump_json(), pixels, texts
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16], head


def native_tensors(
    tensors: Mapping[str, Tensor], config: NetworkConfig, where: str
) -> dict[str, Tensor]:
    """Return tensors that bear the model's own names as float32, their names and shapes checked.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not floating point.
    """
    return checked(
        tensors, {name: tuple(tensor.shape) for name, tensor in meta_tensors(config).items()}, where
    )


def resized_config(config: ViTConfig, size: Size, source: str) -> ViTConfig:
    """Return `config` for another input size, checked again as a whole; a remainder is dropped.

    Raises:
        CheckpointError: more tokens than are allowed, or smaller than a patch.
    """
    remainder = bool(size[0] % config.patch_size or size[1] % config.patch_size)
    with validating(f"{source}: image size {size[0]}x{size[1]}"):
        return ViTConfig.model_validate(
            {**config.model_dump(), "image_size": size, "drop_remainder": remainder}
        )


def resized_positions(
    tensors: Mapping[str, Tensor], old: ViTConfig, new: ViTConfig, *, antialias: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of a model of configuration `old` for `new`, whose grid alone differs.

    `antialias` is `resize_position_embedding`'s.
    """
    resized = dict(tensors)
    if old.position_embedding == "sincos2d":
        resized["pos_embed"] = meta_model(new).fixed_position_embedding()
    elif old.position_embedding == "learned":
        resized["pos_embed"] = resize_position_embedding(
            tensors["pos_embed"],
            prefix_tokens=old.prefix_tokens if old.position_prefix else 0,
            old_grid=old.grid,
            new_grid=new.grid,
            antialias=antialias,
        )
    for name in tensors:
        if name.endswith(".relative_position_bias_table"):
            resized[name] = resize_relative_table(tensors[name], old.grid, new.grid)
    return resized


def _by(size: Size) -> str:
    """Return (rows, columns) as VIT_IMAGE_SIZE takes them."""
    return f"{size[0]}x{size[1]}"


def resized_preprocess(preprocess: PreprocessConfig, size: Size) -> PreprocessConfig:
    """Return `preprocess` for another input size; the share of the picture that the crop keeps
    stays as it was.

    The share is `crop_pct` where that is stated: `resize_size` is rounded and tells it only nearly.
    """
    if preprocess.crop_pct is not None:
        resize_size = cropped_from(size, preprocess.crop_pct)
        return preprocess.model_copy(update={"size": size, "resize_size": resize_size})
    kept = [
        have / total for have, total in zip(preprocess.size, preprocess.resize_size, strict=True)
    ]
    sizes = tuple(max(n, int(n / share)) for n, share in zip(size, kept, strict=True))
    return preprocess.model_copy(update={"size": size, "resize_size": sizes})
