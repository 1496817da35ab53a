"""Networks that are timm's own modules: made by the name of a registered architecture, never by
code of a checkpoint.

timm is an optional package, and is imported when the first of its networks is made.
https://github.com/huggingface/pytorch-image-models
"""

import functools
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from model.config import LARGEST_LAYER, LibraryConfig, NetworkConfig, ViTConfig
from model.errors import CheckpointError, first_line
from model.layer_config import Size
from model.network.vit import HEADS, VisionTransformer, ViTOutput, meta_model

# What installs the library.
INSTALL: Final = "pip install 'vitserve[timm]'"

# Numbers in all buffers of a network, such as masks and tables of positions, which no file holds.
_MAX_BUFFERS: Final = 1 << 28

# What networks raise where an argument or a size does not fit.
_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def is_installed() -> bool:
    """Return whether timm is installed."""
    return importlib.util.find_spec("timm") is not None


def knows(name: str) -> bool:
    """Return whether timm is installed and has an architecture of this name, which is never looked
    up on a hub.
    """
    return is_installed() and name.isidentifier() and bool(_timm().is_model(name))


def published(name: str) -> dict[str, Any]:
    """Return what timm says of an architecture's first released weights: sizes, names of layers,
    statistics.
    """
    config = _timm().get_pretrained_cfg(name)
    fields: dict[str, Any] = {} if config is None else config.to_dict()
    return fields


def library_config(
    name: str,
    arguments: Mapping[str, Any],
    classes: int,
    channels: int,
    size: Size,
    *,
    fixed_size: bool | None = None,
) -> LibraryConfig:
    """Return the configuration of an architecture; nothing of its size is allocated.

    Args:
        name: of timm's, which `knows` it.
        arguments: it is made with these.
        fixed_size: whether the input size is an argument, too; None: as timm says of it.

    Raises:
        pydantic.ValidationError: an argument that is not allowed.
        CheckpointError: timm does not make this network, or it does not take pictures of this size.
    """
    if fixed_size is None:
        fixed_size = bool(published(name).get("fixed_input_size"))
    fields = {
        "library": "timm",
        "architecture": name,
        "arguments": dict(arguments),
        "fixed_size": fixed_size,
    }
    fields |= {"num_classes": classes, "in_channels": channels, "image_size": size}
    config = LibraryConfig.model_validate(fields | {"width": 1})
    with torch.device("meta"), torch.no_grad():
        network = LibraryNetwork(config)
        with _timms_errors(
            f"{name}: does not take {size[0]}x{size[1]} pixels of {channels} channels"
        ):
            output = network(torch.empty(2, channels, *size))
    shape = tuple(output.logits.shape)
    if shape != (2, classes):
        raise CheckpointError(
            f"{name}: gives {list(shape[1:])} numbers for a picture, expected [{classes}]"
        )
    return LibraryConfig.model_validate(fields | {"width": output.embeddings["head"].shape[1]})


class LibraryNetwork(nn.Module):
    """A classifier of timm's, which answers as `VisionTransformer` does: no attention rows, one
    embedding.

    Raises:
        CheckpointError: timm does not make this network.
    """

    def __init__(self, config: LibraryConfig) -> None:
        super().__init__()
        self.config = config
        described = {
            "input_size": (config.in_channels, *config.image_size),
            "num_classes": config.num_classes,
            "fixed_input_size": config.fixed_size,
        }
        with _timms_errors(
            f"{config.architecture}: timm does not make it"
        ):  # none of its sources of weights is used
            self.module: nn.Module = _timm().create_model(
                config.architecture, pretrained=False, pretrained_cfg=described, **config.arguments
            )

    def forward(self, pixels: Tensor, *_: object) -> ViTOutput:
        """Return logits and what the head reads, of normalised pixels [B, C, H, W] in the model's
        dtype.

        What else is asked of a Vision Transformer's pass has no effect: `parse_embedding` and
        `parse_maps` refuse it.
        """
        module: Any = self.module
        features = module.forward_features(pixels)
        return ViTOutput(
            module.forward_head(features),
            None,
            embeddings={"head": module.forward_head(features, pre_logits=True)},
        )


Classifier = VisionTransformer | LibraryNetwork


def meta_network(config: NetworkConfig) -> Classifier:
    """Return the network without storage."""
    if isinstance(config, ViTConfig):
        return meta_model(config)
    assert isinstance(config, LibraryConfig)
    with torch.device("meta"):
        return LibraryNetwork(config)


def largest_layer(config: NetworkConfig) -> int:
    """Return the most numbers that a layer gives for one image.

    Raises:
        CheckpointError: a library does not make this network, or it does not take pictures of its
        size.
    """
    return (
        config.largest_layer
        if isinstance(config, ViTConfig)
        else _measured_layer(config.model_dump_json())
    )


@functools.lru_cache(maxsize=8)
def _measured_layer(described: str) -> int:
    """Return `largest_layer` of a library's configuration in JSON, as a pass measures it that
    allocates nothing.
    """
    config = LibraryConfig.model_validate_json(described)
    network, largest = meta_network(config).eval(), [0]

    def record(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            largest.append(output.numel())

    for module in network.modules():
        module.register_forward_hook(record)
    with torch.no_grad(), _timms_errors(f"{config.kind}: does not take its own image size"):
        network(torch.empty(1, config.in_channels, *config.image_size, device="meta"))
    return max(largest)


def linear_head(config: NetworkConfig) -> str | None:
    """Return the name of the linear layer, with a bias, that makes logits of the embedding `head`;
    None without one.
    """
    if isinstance(config, ViTConfig):
        return None if config.distillation_head else "head"
    module: Any = meta_network(config).module
    last = module.get_classifier()
    names: list[str] = [
        name for name, layer in module.named_modules() if layer is last and type(layer) is nn.Linear
    ]
    return (
        names[0] if names and last.bias is not None and last.in_features == config.width else None
    )


def meta_tensors(config: NetworkConfig) -> dict[str, Tensor]:
    """Return the tensors of an architecture that a checkpoint holds, without storage.

    Heads are among them where there are classes. Integers are not: a library's network makes its
    indices itself.

    Raises:
        CheckpointError: a library does not make this network, or its buffers or layers are too
        large.
    """
    network = meta_network(config)
    if isinstance(network, VisionTransformer):
        tensors = network.state_dict()
        return {
            name: tensors[name]
            for name in tensors
            if config.num_classes or not name.startswith(HEADS)
        }
    if sum(buffer.numel() for buffer in network.buffers()) > _MAX_BUFFERS:
        raise CheckpointError(
            f"{config.kind}: its buffers hold more than the {_MAX_BUFFERS:,} numbers that are allowed"
        )
    if (largest := largest_layer(config)) > LARGEST_LAYER:
        raise CheckpointError(
            f"{config.kind}: {largest:,} numbers in a layer: at most {LARGEST_LAYER:,} are allowed"
        )
    return _floats(network.module.state_dict())


def renamed_by_library(config: LibraryConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point tensors of a file under the names of the library's network.

    Where the names are others, timm's own function maps those of the code that an architecture
    comes from.
    """
    tensors = _floats(stored)
    convert = getattr(
        sys.modules[_timm().model_entrypoint(config.architecture).__module__],
        "checkpoint_filter_fn",
        None,
    )
    if convert is None or tensors.keys() == meta_tensors(config).keys():
        return tensors
    network = meta_network(config)
    assert isinstance(network, LibraryNetwork)
    try:
        return _floats(convert(dict(stored), network.module))
    except _ERRORS:
        return tensors


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _timm() -> Any:
    try:
        import timm  # noqa: PLC0415  an optional package, which takes seconds
    except (ImportError, OSError, RuntimeError) as error:
        raise CheckpointError(
            f"timm cannot be imported, as its torchvision is of another build than torch {torch.__version__}: "
            "pip install --force-reinstall --no-deps torchvision, with torch's --index-url"
            if "torchvision" in str(error)
            else f"timm cannot be imported: {first_line(error)}"
        ) from error
    return timm


@contextmanager
def _timms_errors(what: str) -> Iterator[None]:
    """Turn what timm raises, of sizes that do not fit for example, into a CheckpointError."""
    try:
        yield
    except _ERRORS as error:
        raise CheckpointError(f"{what}: {first_line(error)}") from error
