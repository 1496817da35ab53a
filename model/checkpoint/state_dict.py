"""Plain state dicts, named as timm or Facebook's DeiT, MAE and DINOv2 code names a ViT's tensors.

The operator names the architecture (`VIT_ARCHITECTURE`, a timm name, optionally followed by arguments
that differ: `vit_base_patch16_224,global_pool=avg`); what the tensors say of themselves (head, depth,
width, patch, position grid) is inferred from them and compared with it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.refusals import validating
from model.checkpoint.tensors import TensorSource, renamed
from model.checkpoint.timm_architectures import TimmArguments, architecture_arguments, native_names
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError

FORMAT: Final = "state_dict"

_INFERRED: Final = frozenset({"img_size", "num_classes", "in_chans"})
_UNUSED: Final = "mask_token"
"""Of DINOv2's pre-training."""
_RENAMES: Final = (
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),  # DeiT III
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),  # DINOv2
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
)
"""From the original repositories' names to timm's, as its `checkpoint_filter_fn` does."""
_TRANSFORMERS_NAMES: Final = ("vit.", "deit.", "dinov2", "beit.", "vision_model.")
_EXPECTED_NAMES: Final = "timm's names (cls_token, patch_embed.proj.weight, blocks.0.norm1.weight, …)"
_FIRST_BLOCK: Final = re.compile(r"((?:\w+\.)*?)blocks\.0\.")
_SHOWN_NAMES: Final = 4


def recognises(files: Files) -> bool:
    """Return whether it is a single file; readers that know it better are asked first."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() != ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a state dict."""
    assert isinstance(files, SingleFile)
    where = files.place
    tensors = dict(files.tensors())
    _check_names(tensors, where)
    if options.architecture is None:
        raise CheckpointError(f"{where}: a plain state dict: set VIT_ARCHITECTURE, e.g. to vit_base_patch16_224")
    name, given = parse_architecture(options.architecture)
    tensors = renamed({name: tensor for name, tensor in tensors.items() if name != _UNUSED}, _RENAMES)
    if "register_tokens" in tensors:
        tensors = _with_registers(tensors, where)
    preprocess = options.preprocess_or(None, where)
    config = _config(name, given, TensorSource(tensors, where), preprocess)
    flat = tensors["patch_embed.proj.weight"]
    if flat.ndim == 2 and config.stem is None:  # a linear layer over flattened patches is the same map
        tensors["patch_embed.proj.weight"] = flat.reshape(-1, config.in_channels, config.patch_size, config.patch_size)
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=config,
        preprocess=preprocess,
        labels=options.labels_or(None, config.num_classes, where),
        tensors=native_tensors(native_names(tensors, config), config, where),
    )


def parse_architecture(text: str) -> tuple[str, dict[str, Any]]:
    """Return a timm name and the arguments that differ from it: `name[,argument=value]...`, values as in JSON.

    Raises:
        CheckpointError: an unknown name, or arguments that cannot be read.
    """
    name, *pairs = text.split(",")
    architecture_arguments(name, "VIT_ARCHITECTURE")
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if key in _INFERRED:
            raise CheckpointError(
                f"VIT_ARCHITECTURE {pair!r}: {key} is read from the file and need not be given: leave it out"
            )
        if not equals:
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: expected argument=value")
        try:
            given[key] = json.loads(value)
        except (ValueError, RecursionError):
            given[key] = value
    return name, given


def _with_registers(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors of a DINOv2 model with registers as timm has them.

    DINOv2 gives registers no position; timm's model has none for CLS either, so it is added to its token here.
    """
    names = ("register_tokens", "cls_token", "pos_embed")
    stored = TensorSource({name: tensors[name] for name in names if name in tensors}, where)
    registers, cls, position = (stored.shape(name) for name in names)
    if len(registers) != 3 or len(cls) != 3 or len(position) != 3 or position[1] < 2:
        raise CheckpointError(f"{where}: pos_embed has shape {list(position)}: expected [1, tokens, width]")
    table = stored.take("pos_embed", 1, position[1], cls[2])
    return {name: tensor for name, tensor in tensors.items() if name not in names} | {
        "reg_token": stored.take("register_tokens", 1, registers[1], cls[2]),
        "cls_token": stored.take("cls_token", 1, 1, cls[2]) + table[:, :1],
        "pos_embed": table[:, 1:],
    }


def _config(name: str, given: dict[str, Any], stored: TensorSource, preprocess: PreprocessConfig) -> ViTConfig:
    where = stored.where
    arguments = architecture_arguments(name, where) | given
    head = stored.shape("head.weight")
    if len(head) != 2:
        raise CheckpointError(f"{where}: head.weight has shape {list(head)}: expected [classes, width]")
    arguments["num_classes"] = head[0]
    with validating(where):
        # An image of one patch always fits, and tells everything that does not depend on the size.
        fields = TimmArguments.model_validate(arguments | {"img_size": 1})
        probe = fields.model_copy(update={"img_size": (fields.patch_edge, fields.patch_edge)}).vit_config()

    depth = len({n.split(".")[1] for n in stored.names if n.startswith("blocks.")})
    if depth != probe.depth:
        raise CheckpointError(f"{where}: has {depth} blocks, {name} has {probe.depth}")
    if head[1] != probe.width:
        raise CheckpointError(f"{where}: is {head[1]} wide, {name} is {probe.width}")
    channels = _channels(stored, probe, name)
    rows, columns = _grid(stored, probe, preprocess, name)
    size = preprocess.size
    fits = (size[0] // probe.patch_size, size[1] // probe.patch_size) == (rows, columns)
    image_size = size if fits else (rows * probe.patch_size, columns * probe.patch_size)
    with validating(where):
        return TimmArguments.model_validate(arguments | {"img_size": image_size, "in_chans": channels}).vit_config()


def _channels(stored: TensorSource, probe: ViTConfig, name: str) -> int:
    patch = probe.patch_size
    if probe.stem is not None:
        root = "patch_embed.backbone.stem.conv.weight" if probe.stem.layers else "patch_embed.backbone.conv.weight"
        shape = stored.shape(root)
    else:
        shape = stored.shape("patch_embed.proj.weight")
        if len(shape) == 2 and shape[1] % patch**2 == 0:
            shape = shape[0], shape[1] // patch**2, patch, patch
        if len(shape) != 4 or shape[2:] != (patch, patch):
            raise CheckpointError(
                f"{stored.where}: patch_embed.proj.weight has shape {list(shape)}, "
                f"{name} has patches of {patch}x{patch}"
            )
    if len(shape) != 4 or not 1 <= shape[1] <= 4:
        raise CheckpointError(f"{stored.where}: takes pictures of {list(shape)[1:2]} channels, expected 1 to 4")
    return shape[1]


def _grid(stored: TensorSource, probe: ViTConfig, preprocess: PreprocessConfig, name: str) -> tuple[int, int]:
    """Return the position embedding's grid: the preprocessing's where it has as many patches, else a square."""
    rows, columns = (edge // probe.patch_size for edge in preprocess.size)
    if probe.position_embedding == "none":
        return rows, columns
    shape = stored.shape("pos_embed")
    prefix = probe.prefix_tokens if probe.position_prefix else 0
    count = shape[1] - prefix if len(shape) == 3 else 0
    if count == rows * columns:
        return rows, columns
    edge = math.isqrt(max(count, 0))
    if edge < 1 or edge * edge != count:
        raise CheckpointError(
            f"{stored.where}: pos_embed has shape {list(shape)}: with the {prefix} prefix tokens of {name} "
            f"no square grid, and not the {rows}x{columns} of its preprocessing"
        )
    return edge, edge


def _check_names(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse a state dict whose names cannot be those of a ViT's patches, blocks and head.

    Raises:
        CheckpointError: it says what the names look like instead.
    """
    if any(name.startswith(_TRANSFORMERS_NAMES) for name in tensors):
        raise CheckpointError(f"{where}: transformers' names: give its folder, with config.json, instead")
    prefix = _prefix(tensors)
    if prefix is None:
        raise CheckpointError(f"{where}: {_description(tensors)}; this version reads {_EXPECTED_NAMES}")
    if prefix:
        others = [name for name in tensors if not name.startswith(prefix)]
        which = (
            f"a ViT's names begin with {prefix!r:.100}, {others[0]!r:.100} does not"
            if others
            else f"all begin with {prefix!r:.100}"
        )
        raise CheckpointError(f"{where}: {which}: save the tensors under timm's names, without this prefix")
    if "head.weight" not in tensors:
        raise CheckpointError(f"{where}: missing key 'head.weight': a ViT without a classification head")


def _prefix(tensors: Mapping[str, Tensor]) -> str | None:
    """Return what stands before a ViT's own names, mostly nothing, or None where they are not a ViT's."""
    prefixes = {match[1] for name in tensors if (match := _FIRST_BLOCK.match(name))}
    return next((p for p in sorted(prefixes) if any(name.startswith(f"{p}patch_embed.") for name in tensors)), None)


def _description(tensors: Mapping[str, Tensor]) -> str:
    first = {name.partition(".")[0]: name for name in reversed(list(tensors))}
    shown = ", ".join(repr(name)[:80] for name in list(reversed(first.values()))[:_SHOWN_NAMES])
    convolutions = sum(tensor.ndim == 4 for tensor in tensors.values())
    if convolutions > 1:
        return (
            f"not a Vision Transformer but a convolutional network: {convolutions} convolutions, names such as {shown}"
        )
    return f"not a Vision Transformer that is read: names such as {shown}"
