"""Networks of timm, made by name of a registered architecture, never by code of a checkpoint.

timm is an optional package. It is imported when the first of its networks is made.
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

# Command that installs the library.
INSTALL: Final = "pip install 'vitserve[timm]'"

# Most numbers in all buffers of a network, such as masks and position tables, which no file holds.
_MAX_BUFFERS: Final = 1 << 28

# Exceptions of networks for an argument or a size that does not fit.
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
    """Return whether timm is installed and has this architecture; never ask a hub."""
    return is_installed() and name.isidentifier() and bool(_timm().is_model(name))


def published(name: str) -> dict[str, Any]:
    """Return timm's description of an architecture's first released weights.

    It has sizes, names of layers and statistics.
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
    """Return the configuration of an architecture, without allocating its weights.

    Args:
        name: an architecture that `knows` accepts.
        arguments: arguments for making the network.
        fixed_size: whether the input size is an argument too; None takes timm's description.

    Raises:
        pydantic.ValidationError: an argument is not allowed.
        CheckpointError: timm cannot make this network, or it does not take pictures of this size.
    """
    if fixed_size is None:
        fixed_size = bool(published(name).get("fixed_input_size"))
    fields = {
        "library": "timm",
        "architecture": name,
        "arguments": dict(arguments),
        "fixed_size": fixed_size,
        "num_classes": classes,
        "in_channels": channels,
        "image_size": size,
    }
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
    """A classifier of timm with the interface of `VisionTransformer`.

    Its output lacks attention rows and has only one embedding.

    Raises:
        CheckpointError: timm cannot make this network.
    """

    def __init__(self, config: LibraryConfig) -> None:
        super().__init__()
        self.config = config
        described = {
            "input_size": (config.in_channels, *config.image_size),
            "num_classes": config.num_classes,
            "fixed_input_size": config.fixed_size,
        }
        with _timms_errors(f"{config.architecture}: timm does not make it"):
            # Only the architecture is used, never timm's sources of weights.
            self.module: nn.Module = _timm().create_model(
                config.architecture, pretrained=False, pretrained_cfg=described, **config.arguments
            )

    def forward(self, pixels: Tensor, *_: object) -> ViTOutput:
        """Return the logits and the head's input for normalised pixels [B, C, H, W].

        The pixels are in the model's dtype. Other arguments of `VisionTransformer.forward` are
        ignored, because `parse_embedding` and `parse_maps` refuse them.
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
    """Return the largest number of values that one layer outputs for one image.

    Raises:
        CheckpointError: timm cannot make this network, or it does not take pictures of its size.
    """
    if isinstance(config, ViTConfig):
        return config.largest_layer
    return _measured_layer(config.model_dump_json())


@functools.lru_cache(maxsize=8)
def _measured_layer(described: str) -> int:
    """Return `largest_layer`, measured by a pass without storage.

    Args:
        described: library configuration in JSON.
    """
    config = LibraryConfig.model_validate_json(described)
    network = meta_network(config).eval()
    sizes = [0]

    def record(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    for module in network.modules():
        module.register_forward_hook(record)
    with torch.no_grad(), _timms_errors(f"{config.kind}: does not take its own image size"):
        network(torch.empty(1, config.in_channels, *config.image_size, device="meta"))
    return max(sizes)


def linear_head(config: NetworkConfig) -> str | None:
    """Return the name of the linear layer with a bias that maps the embedding `head` to logits.

    Return None if the network does not have such a layer.
    """
    if isinstance(config, ViTConfig):
        return None if config.distillation_head else "head"
    module: Any = meta_network(config).module
    last = module.get_classifier()
    if type(last) is not nn.Linear or last.bias is None or last.in_features != config.width:
        return None
    return next((name for name, layer in module.named_modules() if layer is last), None)


def meta_tensors(config: NetworkConfig) -> dict[str, Tensor]:
    """Return the tensors of an architecture that a checkpoint holds, without storage.

    They include heads if there are classes. They do not include integers, because a library's
    network makes its indices itself.

    Raises:
        CheckpointError: a library cannot make this network, or its buffers or layers are too large.
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
            f"{config.kind}: too many numbers in its buffers; at most {_MAX_BUFFERS:,} are allowed"
        )
    if (largest := largest_layer(config)) > LARGEST_LAYER:
        raise CheckpointError(
            f"{config.kind}: {largest:,} numbers in a layer: at most {LARGEST_LAYER:,} are allowed"
        )
    return _floats(network.module.state_dict())


def renamed_by_library(config: LibraryConfig, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point tensors of a file under the names of the library's network.

    timm's own function maps names of an architecture's original code.
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
        reason = first_line(error)
        if "torchvision" in str(error):
            reason = (
                f"torchvision does not match torch {torch.__version__}; pip install "
                "--force-reinstall --no-deps torchvision, with torch's --index-url"
            )
        raise CheckpointError(f"timm cannot be imported: {reason}") from error
    return timm


@contextmanager
def _timms_errors(what: str) -> Iterator[None]:
    """Turn timm's exceptions, for example for sizes that do not fit, into a CheckpointError."""
    try:
        yield
    except _ERRORS as error:
        raise CheckpointError(f"{what}: {first_line(error)}") from error
