"""The checkpoint in memory, in whatever format it was stored.

Its model consists of a backbone, which other checkpoints may share, and a head of a few kilobytes.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

from torch import Tensor, nn

from model.checkpoint.input_size import resized_network, resized_preprocess
from model.checkpoint.local_files import validating
from model.checkpoint.tensors import checked, digest_of, require_finite
from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.description import Description
from model.errors import CheckpointError
from model.heads import Head
from model.label_texts import CONTROL
from model.layer_config import Size
from model.network.library import LibraryNetwork, library_config, linear_head, meta_tensors
from model.network.vit import VisionTransformer, meta_model, placeholder_heads

# Characters of a label and of a name, which every answer repeats.
MAX_TEXT: Final = 1000


@dataclass(frozen=True)
class Checkpoint(Description):
    """A model's description with its weights.

    Attributes:
        tensors: float32 on the CPU, under the network's own names for its parameters; see
            `meta_tensors`. These names tell the head's tensors from the backbone's.
        antialias: whether position embeddings are low-passed before they shrink; the source
            library decides.
        resized_from: as in `StoredNetwork`. A second resize would not give the source's scores.
        stored: the file's names of tensors by the model's names, if they differ.
    """

    tensors: Mapping[str, Tensor]
    _: KW_ONLY
    antialias: bool = True
    resized_from: Size | None = None
    stored: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse parts that contradict each other.

        Raises:
            CheckpointError: labels or channels disagree with the architecture, or a label or the
                name is longer than `MAX_TEXT`, or has characters of `CONTROL`.
        """
        if len(self.labels) != self.config.num_classes:
            raise CheckpointError(
                f"{self.source}: {len(self.labels)} labels for {self.config.num_classes} classes: "
                "name one for each class with --labels FILE (VIT_LABELS)"
            )
        texts = {f"label {index}": label for index, label in enumerate(self.labels)}
        for what, text in ({"name": self.name} | texts).items():
            if len(text) > MAX_TEXT:
                raise CheckpointError(
                    f"{self.source}: {what} has {len(text)} characters, at most {MAX_TEXT} are "
                    "allowed"
                )
            if CONTROL.search(text):
                raise CheckpointError(
                    f"{self.source}: {what}, {text!a:.100}, has control characters or cannot be "
                    "written as UTF-8: correct it, or name the labels with --labels FILE "
                    "(VIT_LABELS)"
                )
        channels = self.config.in_channels
        if len(self.preprocess.mean) != channels:
            raise CheckpointError(
                f"{self.source}: mean and std have {len(self.preprocess.mean)} channels, the model "
                f"takes {channels}: give a preprocessing for {channels} with --preprocess FILE "
                "(VIT_PREPROCESS)"
            )
        if channels not in (1, 3):
            raise CheckpointError(f"{self.source}: takes {channels} channels; pictures have 1 or 3")

    def resized(self, size: Size) -> "Checkpoint":
        """Return the same model for an input of (rows, columns) pixels.

        Position embeddings and preprocessing change if they are of another size.

        Raises:
            CheckpointError: `size` is too large or not a multiple of the patch size; or the model's
                positions cannot be resized, or were resized before.
        """
        preprocess = resized_preprocess(self.preprocess, size)
        if size == self.config.image_size:
            return replace(self, preprocess=preprocess)
        if isinstance(self.config, LibraryConfig):
            config = _resized_library_config(self.config, size, self.source)
            return replace(self, config=config, preprocess=preprocess)
        old = self.vit
        if size[0] % old.patch_size or size[1] % old.patch_size:
            patch = old.patch_size
            near = (max(1, round(size[0] / patch)) * patch, max(1, round(size[1] / patch)) * patch)
            raise CheckpointError(
                f"{self.source}: image size {_by(size)} is not a multiple of the patch size "
                f"{patch}: give --image-size {_by(near)} (VIT_IMAGE_SIZE)"
            )
        if old.relative_position_bias:
            raise CheckpointError(
                f"{self.source}: relative position biases are not resized: leave --image-size "
                f"(VIT_IMAGE_SIZE) out, or give {_by(old.image_size)}"
            )
        if self.resized_from is not None:
            raise CheckpointError(
                f"{self.source}: its positions were resized from {_by(self.resized_from)} to "
                f"{_by(old.image_size)}, and a second resize would change the scores: run vitserve "
                f"convert SOURCE --image-size {_by(size)} -o FOLDER with the model that it was "
                f"made of, or leave --image-size (VIT_IMAGE_SIZE) out"
            )
        network = resized_network(self.tensors, old, size, self.source, antialias=self.antialias)
        return replace(
            self,
            config=network.config,
            preprocess=preprocess,
            tensors=network.tensors,
            resized_from=network.resized_from,
        )

    def require_one_size(self) -> "Checkpoint":
        """Return the checkpoint if its preprocessing gives pictures of the size the model takes.

        Raises:
            CheckpointError: the sizes differ.
        """
        size = _by(self.preprocess.size)
        taken = _by(self.config.image_size)
        if size != taken:
            raise CheckpointError(
                f"{self.source}: the preprocessing gives {size} pixels, the model takes {taken}: "
                f"--image-size {size} (VIT_IMAGE_SIZE) resizes the model's positions, "
                f"--image-size {taken} (VIT_IMAGE_SIZE) resizes the pictures instead"
            )
        return self

    @property
    def vit(self) -> ViTConfig:
        """Return the configuration of a network that vitserve itself computes.

        Raises:
            CheckpointError: a library computes the network.
        """
        if not isinstance(self.config, ViTConfig):
            raise CheckpointError(
                f"{self.source}: is {self.config.kind}: this is for vitserve's own networks"
            )
        return self.config

    def build(self) -> VisionTransformer:
        """Return the Vision Transformer with exactly these weights, on the CPU, for evaluation.

        Raises:
            CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not finite; or
                a library computes the network.
        """
        model = meta_model(self.vit)  # no memory, and no random weights that could remain
        self._load(model)
        return model

    def network(self) -> VisionTransformer | LibraryNetwork:
        """Return the network with exactly these weights, as `build` does; ours or a library's."""
        if not isinstance(self.config, LibraryConfig):
            return self.build()
        network = LibraryNetwork(self.config)
        self._load(network.module)
        return network.eval()

    def _load(self, module: nn.Module) -> None:
        tensors = native_tensors(self.tensors, self.config, self.source)
        require_finite(tensors, self.source, self.stored)
        if isinstance(self.config, ViTConfig):
            tensors |= placeholder_heads(self.config)
        # `native_tensors` has checked all names; a library itself makes its buffers of integers.
        module.load_state_dict(
            tensors, strict=not isinstance(self.config, LibraryConfig), assign=True
        )
        module.eval().requires_grad_(False)


def backbone_and_head(checkpoint: Checkpoint) -> tuple[str, Head | None]:
    """Return a name of the backbone, and the head with its weights, or None without a head.

    The name is a hash of all tensors but the head's, the architecture with its input size, and the
    mean and deviation of pixels, which the network's graph divides by. A text tower belongs to the
    backbone. So does a head that is not one linear layer on the features of an image, such as the
    two heads of a distilled model.

    Raises:
        CheckpointError: a value of the head is not finite; `build` checks the backbone's.
    """
    tensors = dict(checkpoint.tensors)
    config = checkpoint.config
    layer = linear_head(config)
    head = None
    weight = tensors.pop(f"{layer}.weight", None)
    if weight is not None:
        bias = tensors.pop(f"{layer}.bias")
        of_head = {f"{layer}.weight": weight, f"{layer}.bias": bias}
        require_finite(of_head, checkpoint.source, checkpoint.stored)
        head = replace(
            checkpoint.head,
            weight=weight.float().numpy().copy(),
            bias=bias.float().numpy().copy(),
        )
    if layer is not None:
        config = config.model_copy(update={"num_classes": 0})
    pixels = (checkpoint.preprocess.mean, checkpoint.preprocess.std)
    texts = checkpoint.zero_shot and checkpoint.content
    parts = (digest_of(tensors), config.model_dump_json(), pixels, texts)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16], head


def native_tensors(
    tensors: Mapping[str, Tensor],
    config: NetworkConfig,
    where: str,
    stored: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Return tensors under the model's own names as float32, their names and shapes checked.

    Args:
        tensors: tensors by the model's names.
        config: architecture of the network.
        where: name of the file in messages.
        stored: the file's names by the model's names, if they differ.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of the wrong shape, or not floating point.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in meta_tensors(config).items()}
    return checked(tensors, shapes, where, stored or {})


def _resized_library_config(config: LibraryConfig, size: Size, source: str) -> LibraryConfig:
    """Return the configuration of a library's network for another input size."""
    if config.fixed_size:
        raise CheckpointError(
            f"{source}: image size {_by(size)}: timm's {config.architecture} is made for "
            f"{_by(config.image_size)}, and is not resized"
        )
    with validating(source):
        return library_config(
            config.architecture,
            config.arguments,
            config.num_classes,
            config.in_channels,
            size,
            fixed_size=False,
        )


def _by(size: Size) -> str:
    """Return (rows, columns) as VIT_IMAGE_SIZE takes them."""
    return f"{size[0]}x{size[1]}"
