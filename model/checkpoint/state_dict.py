"""Plain state dicts, in one of the layouts of `layouts` or with a map of names (`VIT_KEYS`).

The operator names the architecture (`VIT_ARCHITECTURE`): a timm name, optionally followed by
arguments that differ (`vit_base_patch16_224,global_pool=avg`), with which the tensors are compared;
or `vit`, whose sizes are the tensors'. Shapes do not tell the number of heads, the place of the
norms, the activation and the pooling, and an absent tensor may be one that was lost. All that is
neither told nor stated is asked for at once, with the command that states it.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.key_map import mapped
from model.checkpoint.layouts import Layout, in_layout
from model.checkpoint.local_files import validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.tensors import shape_of
from model.checkpoint.timm_architectures import (
    POOL,
    EvaArguments,
    TimmArguments,
    architectures,
    native_names,
    parse_arguments,
    runs_in_library,
)
from model.config import NetworkConfig, PreprocessConfig, ViTConfig
from model.errors import CheckpointError, nearest
from model.layer_config import Size
from model.network import library
from model.network.vit import meta_model

FORMAT: Final = "state_dict"
OWN: Final = "vit"  # the architecture whose sizes are those of the tensors

# What is shown for an argument that is asked for; a part that is absent, and not here, is false.
_USUAL: Final = {
    "num_heads": "N",
    "norm_order": "pre",
    "act_layer": "gelu",
    "norm_eps": 1e-6,
    "qkv_order": "3hd",
    "global_pool": "token",
    "pos_embed": "none",
    "patch_order": "channels_last",
    "num_classes": 0,
}
# Arguments that no tensor of any network tells, and the fields of `ViTConfig` that they become.
_UNSAID: Final = {
    "num_heads": "heads",
    "norm_order": "norm_order",
    "act_layer": "activation",
    "norm_eps": "norm_eps",
}
# Parts whose tensors are absent where the argument is false; they could also have been lost.
_PARTS: Final = {
    "class_token": ("cls_token",),
    "patch_bias": ("patch_embed.proj.bias",),
    "qkv_bias": ("blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"),
    "proj_bias": ("blocks.0.attn.proj.bias",),
    "final_norm": ("norm.weight", "fc_norm.weight"),
}
_INFERRED: Final = frozenset({"img_size", "num_classes", "in_chans"})
_SIZES: Final = frozenset({"embed_dim", "depth", "num_heads", "mlp_ratio", "final_norm"})
_OF_LAYOUT: Final = frozenset({"qkv_order", "patch_order"})
# How the rows of a fused projection are counted: 3 of queries, keys and values, h heads, d numbers
# of a head.
_ORDERS: Final = ("3hd", "3dh", "h3d", "hd3", "d3h", "dh3")
_PRESETS: Final = (
    "of the presets of preprocessing deit-224 is for DeiT's and most of timm's networks, google-224 and google-384 for "
    "those that saw pixels from -1 to 1, torchvision-224 for torchvision's; another is written as JSON"
)

# torchvision's models: name and heads by width, edge of a patch, depth and width of the MLP.
TORCHVISION: Final = {
    (768, 16, 12, 3072): ("vit_b_16", 12),
    (768, 32, 12, 3072): ("vit_b_32", 12),
    (1024, 16, 24, 4096): ("vit_l_16", 16),
    (1024, 32, 24, 4096): ("vit_l_32", 16),
    (1280, 14, 32, 5120): ("vit_h_14", 16),
}


def recognises(files: Files) -> bool:
    """Return whether it is a single file; readers that know it better are asked first."""
    return isinstance(files, SingleFile)


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a state dict."""
    assert isinstance(files, SingleFile)
    where = files.place
    name, given = parse_architecture(options.architecture) if options.architecture else ("", {})
    tensors = mapped(files.tensors(), files.keys)
    if name not in ("", OWN) and runs_in_library(name, "VIT_ARCHITECTURE"):
        return _of_library(files, options, name, given, tensors)
    layout, tensors = in_layout(tensors, where)
    network = Network(where, name, given, layout, tensors, {**layout.habits, **given})
    if (
        any(len(entry.source) == 1 and ".qkv." in entry.to for entry in files.keys.tensor)
        and "qkv_order" not in given
    ):
        del network.stated["qkv_order"]  # the map names it, and says nothing of its rows
    label = "" if name else network.torchvisions()
    asked = network.asked() or ([] if name or label else ["architecture"])
    _require(files, options, name or OWN, given, asked, has_classes=bool(network.classes))
    config = network.config(options.preprocess_or(None, where))
    return _checkpoint(
        files, options, label or name, config, network.laid_out(config), network.assumed(config)
    )


def parse_architecture(text: str) -> tuple[str, dict[str, Any]]:
    """Return a timm name or `vit`, and the arguments that differ from it:
    `name[,argument=value]...`, as in JSON.

    Raises:
        CheckpointError: an unknown name, or arguments that cannot be read.
    """
    name, *pairs = re.split(r",(?![^\[]*\])", text)  # not within a list
    if "=" in name:
        raise CheckpointError(
            f"VIT_ARCHITECTURE {text!r:.200}: expected a name first, as in {OWN},{text[:200]}"
        )
    known = _arguments_of(name)
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: expected argument=value")
        if known and key not in known:
            near = nearest(key, known)
            meant = f": did you mean {near}?" if near else ""
            raise CheckpointError(f"VIT_ARCHITECTURE: {name} has no argument {key!r:.100}{meant}")
        try:
            given[key] = json.loads(value)
        except (ValueError, RecursionError):
            given[key] = value
        if key in _INFERRED and (key, given[key]) != ("num_classes", 0):
            raise CheckpointError(
                f"VIT_ARCHITECTURE {pair!r}: {key} is read from the file and need not be given"
            )
    return name, given


def _arguments_of(name: str) -> frozenset[str]:
    """Return the arguments that an architecture may be given; none where timm's own code says which
    they are.
    """
    if name != OWN and runs_in_library(name, "VIT_ARCHITECTURE"):
        return frozenset()
    is_eva = name != OWN and architectures()[name].get("family") == "eva"
    return (
        frozenset((EvaArguments if is_eva else TimmArguments).model_fields)
        | _OF_LAYOUT
        | _USUAL.keys()
    )


def _of_library(
    files: SingleFile,
    options: CheckpointOptions,
    name: str,
    given: dict[str, Any],
    tensors: Mapping[str, Tensor],
) -> Checkpoint:
    """Read the state dict of a network that timm's own code runs; its classes and channels are
    those of the file.
    """
    _require(files, options, name, given, [], has_classes=True)
    preprocess, published = options.preprocess_or(None, files.place), library.published(name)
    heads = published.get("classifier") or "head"
    head = f"{heads if isinstance(heads, str) else heads[0]}.weight"
    classes = shape_of(tensors, head, files.place, 1, 2, 4)[0]
    with validating(files.place):
        config = library.library_config(name, given, classes, len(preprocess.mean), preprocess.size)
    return _checkpoint(files, options, name, config, library.renamed_by_library(config, tensors))


def _checkpoint(
    files: SingleFile,
    options: CheckpointOptions,
    architecture: str,
    config: NetworkConfig,
    tensors: Mapping[str, Tensor],
    assumed: tuple[str, ...] = (),
) -> Checkpoint:
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=architecture,
        config=config,
        preprocess=options.preprocess_or(None, files.place),
        labels=options.labels_or(None, config.num_classes, files.place),
        tensors=native_tensors(tensors, config, files.place),
        notes=files.chosen.notes,
        assumed=(*assumed, *files.chosen.assumed),
    )


def _require(
    files: SingleFile,
    options: CheckpointOptions,
    name: str,
    given: dict[str, Any],
    asked: list[str],
    *,
    has_classes: bool,
) -> None:
    """Raise CheckpointError where something is missing, with the command that would serve the file."""
    needs_labels = has_classes and options.labels is None
    missing = (
        asked
        + (["preprocessing"] if options.preprocess is None else [])
        + (["labels"] if needs_labels else [])
    )
    if not missing:
        return
    arguments = given | {key: _USUAL.get(key, False) for key in asked if key != "architecture"}
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in arguments.items()
    }
    command = ["vitserve", "serve", "--checkpoint", files.source, "--architecture"]
    command += [",".join([name, *(f"{key}={value}" for key, value in values.items())])]
    command += ["--preprocess", options.preprocess or "deit-224"]
    command += ["--labels", options.labels or "numbers"] if needs_labels or options.labels else []
    command += ["--keys", options.keys] if options.keys else []
    command += ["--activation", options.activation] if options.activation else []
    hint = "what stands here is only usual; a name of timm says all of it"
    hint += f"; {_PRESETS}" if options.preprocess is None else ""
    hint += (
        "; num_classes=0 is a network without a head, which gives embeddings"
        if "num_classes" in asked
        else ""
    )
    raise CheckpointError(
        f"{files.place}: no file says its {', '.join(missing)}: with the values of its training code, this serves it: "
        f"{shlex.join(command)} ({hint}: docs/checkpoints.md#plain-state-dicts)"
    )


@dataclass(frozen=True)
class Network:
    """A Vision Transformer whose architecture is put together of tensors, of what is stated, and of
    habits.

    Attributes:
        where: what messages call the file.
        name: of timm's architecture, `vit`, or empty where none was stated.
        given: arguments that the operator stated.
        layout: of the file's tensors.
        tensors: by timm's names.
        stated: what was given, else what code of this layout does.
    """

    where: str
    name: str
    given: dict[str, Any]
    layout: Layout
    tensors: dict[str, Tensor]
    stated: dict[str, Any]

    @property
    def is_own(self) -> bool:
        """Whether its sizes are those of the tensors."""
        return self.name in ("", OWN)

    @property
    def classes(self) -> int:
        """The number of classes; 0 without a head."""
        return self._shape("head.weight", 2)[0] if "head.weight" in self.tensors else 0

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blocks.")})

    def torchvisions(self) -> str:
        """Return torchvision's name of the model, whose heads it tells; an empty text where it is
        none of its own.
        """
        width, _, patch = (
            self._shape("patch_embed.proj.weight", 2, 4)[:3]
            if self.layout.name == "torchvision"
            else (0,) * 3
        )
        sizes = width, patch, self.depth, self._shape("blocks.0.mlp.fc1.weight", 2)[0]
        label, heads = TORCHVISION.get(sizes, ("", None))
        if heads is not None:
            self.stated["num_heads"] = heads
        return label

    def asked(self) -> list[str]:
        """Return the arguments that no tensor tells and nobody stated.

        Raises:
            CheckpointError: an argument is stated that a tensor contradicts.
        """
        tensors, given, own = self.tensors, self.given, self.is_own
        if "num_classes" in given and self.classes:
            raise CheckpointError(
                f"{self.where}: its tensors tell num_classes={self.classes}, but VIT_ARCHITECTURE says num_classes=0"
            )
        parts = {
            part: next((name for name in names if name in tensors), None)
            for part, names in _PARTS.items()
        }
        for part, name in parts.items():
            if own and name is not None and given.get(part) is False:
                raise CheckpointError(
                    f"{self.where}: VIT_ARCHITECTURE has {part}=false, but {name!r} is there"
                )
        is_mean = own and self.stated.get("global_pool") in ("avg", "avgmax", "max")
        patch = self._shape("patch_embed.proj.weight", 2, 4)
        is_flat = len(patch) == 2 and math.isqrt(patch[1]) ** 2 != patch[1]
        is_eva = not own and architectures()[self.name].get("family") == "eva"
        needed = {
            "num_heads": own or "embed_dim" in given,
            "norm_order": own or (bool(given.keys() & _SIZES) and not is_eva),
            **dict.fromkeys(("act_layer", "norm_eps", "global_pool"), own),
            **{part: own and name is None for part, name in parts.items()},
            "pos_embed": own and "pos_embed" not in tensors,
            "fc_norm": is_mean and "norm.weight" in tensors,
            "pool_include_prefix": is_mean and "cls_token" in tensors,
            "qkv_order": True,
            # timm reads linear patches of models from before it had none as channels first.
            "patch_order": is_flat and (own or self.layout.name != "timm"),
            "num_classes": not self.classes,
        }
        return [
            argument
            for argument, is_needed in needed.items()
            if is_needed and argument not in self.stated
        ]

    def config(self, preprocess: PreprocessConfig) -> ViTConfig:
        """Return the architecture; its image's size is that of the positions and the preprocessing."""
        if self.is_own:
            told = self._told(preprocess)
            self.stated.update(told | self.stated | {"proj_bias": told["proj_bias"]})
        with validating(self.where):
            probe = self._at((1, 1)).vit_config()
            prefix = probe.prefix_tokens if probe.position_prefix else 0
            size = self._size(
                probe.patch_size, prefix, preprocess, probe.position_embedding == "learned"
            )
            return self._at(size).vit_config()

    def assumed(self, config: ViTConfig) -> tuple[str, ...]:
        """Return the values that neither a tensor nor the operator states, each with whose code has
        it so.
        """
        values = {key: getattr(config, field) for key, field in _UNSAID.items()}
        values["global_pool"] = next(
            (theirs for theirs, ours in POOL.items() if ours == config.pool), config.pool
        )
        whose = dict.fromkeys(values, f"as {self.layout.name if self.is_own else self.name} has it")
        if config.pool == "cls_mean":
            whose["global_pool"] = f"because the head reads 2 x {config.width} features"
        return tuple(
            f"{key}={value}, {whose[key]} (VIT_ARCHITECTURE)"
            for key, value in values.items()
            if key not in self.given
        )

    def laid_out(self, config: ViTConfig) -> dict[str, Tensor]:
        """Return the tensors as the model has them: patches, rows of projections, and what is
        stated to be absent.
        """
        tensors = _with_patches(self.tensors, config, self.stated.get("patch_order"))
        tensors = _in_order(tensors, config, str(self.stated["qkv_order"]))
        tensors = native_names(tensors, self._at((1, 1)), config, self.where)
        if self.is_own and config.position_embedding == "sincos2d":
            tensors["pos_embed"] = meta_model(config).fixed_position_embedding()
        if self.is_own and config.projection_bias and "blocks.0.attn.proj.bias" not in tensors:
            tensors |= {
                f"blocks.{i}.attn.proj.bias": torch.zeros(config.width) for i in range(config.depth)
            }
        if self.is_own and config.norm_after_pool and "fc_norm.weight" not in tensors:
            tensors = {
                re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()
            }
        return tensors

    def _shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        return shape_of(self.tensors, name, self.where, *dimensions)

    def _at(self, size: Size) -> TimmArguments | EvaArguments:
        """Return timm's arguments at an image size, which (1, 1) makes one patch; raises
        pydantic.ValidationError.
        """
        own = {} if self.is_own else architectures()[self.name]
        known = (
            EvaArguments if own.get("family") == "eva" else TimmArguments
        ).model_fields.keys() | self.given.keys()
        stated = {key: value for key, value in self.stated.items() if key in known - _OF_LAYOUT}
        stem = [
            name
            for name in self.tensors
            if re.fullmatch(r"patch_embed\.backbone\.(stem\.)?conv\.weight", name)
        ]
        shape = self._shape(stem[0] if stem else "patch_embed.proj.weight", 2, 4)
        channels = shape[1] if len(shape) == 4 else _flat_patch(shape[1], self.where)[0]
        head = {"num_classes": self.classes, "in_chans": channels}
        made = parse_arguments(own | stated | head | {"img_size": size})
        return (
            made
            if size != (1, 1)
            else made.model_copy(update={"img_size": (made.patch_edge, made.patch_edge)})
        )

    def _told(self, preprocess: PreprocessConfig) -> dict[str, Any]:
        """Return timm's arguments that the tensors of a network tell by their names and shapes."""
        tensors = self.tensors
        rows, width = self._shape("blocks.0.attn.qkv.weight", 2)
        hidden = self._shape("blocks.0.mlp.fc2.weight", 2)[1]
        patch = self._shape("patch_embed.proj.weight", 2, 4)
        edge = patch[2] if len(patch) == 4 else _flat_patch(patch[1], self.where)[1]
        tokens = {
            name: self._shape(name, 3)[1]
            for name in ("cls_token", "dist_token", "reg_token")
            if name in tensors
        }
        positions = self._shape("pos_embed", 3)[1] if "pos_embed" in tensors else 0
        over_patches = (
            math.prod(length // edge for length in preprocess.size),
            math.isqrt(positions) ** 2,
        )
        is_gated = self._shape("blocks.0.mlp.fc1.weight", 2)[0] == 2 * hidden
        return {
            "patch_size": edge,
            "embed_dim": width,
            "depth": self.depth,
            "mlp_ratio": (hidden + 0.5) / width,  # which is rounded down
            "mlp_layer": "SwiGLU" if is_gated else None,
            "attn_dim": None if rows == 3 * width else rows // 3,
            "no_embed_class": bool(tokens) and positions in over_patches,
            "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
            "scale_attn_norm": "blocks.0.attn.norm.weight" in tensors,
            "scale_mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
            "rel_pos": any(
                re.search(r"_position_bias_table$|rel_pos\.mlp\.", name) for name in tensors
            ),
            "init_values": 1.0
            if "blocks.0.ls1.gamma" in tensors or "blocks.0.gamma_1" in tensors
            else None,
            "pre_norm": "norm_pre.weight" in tensors,
            "patch_norms": "patch_embed.norm_in.weight" in tensors,
            "distilled": "dist_token" in tokens,
            "reg_tokens": tokens.get("reg_token", 0),
            **{part: any(name in tensors for name in names) for part, names in _PARTS.items()},
            # A layer of attention without a bias, as in SimpleViT, gets one of zeros beside the
            # MLP's.
            "proj_bias": "blocks.0.mlp.fc1.bias" in tensors,
            "fc_norm": "fc_norm.weight" in tensors,
        }

    def _size(
        self, patch: int, prefix: int, preprocess: PreprocessConfig, has_positions: bool
    ) -> Size:
        """Return (rows, columns) in pixels: the preprocessing's where they have as many patches,
        else a square.

        Args:
            patch: edge of one.
            prefix: how many prefix tokens have positions.
            preprocess: the operator's.
            has_positions: whether there are any.
        """
        rows, columns = (edge // patch for edge in preprocess.size)
        shape = self._shape("pos_embed", 3) if has_positions else (1, rows * columns + prefix)
        count = shape[1] - prefix
        if count == rows * columns:
            return preprocess.size
        edge = math.isqrt(max(count, 0))
        if edge < 1 or edge * edge != count:
            raise CheckpointError(
                f"{self.where}: pos_embed has shape {list(shape)}: with {prefix} prefix tokens "
                f"no square grid, and not the {rows}x{columns} of its preprocessing"
            )
        return edge * patch, edge * patch


def _flat_patch(inputs: int, where: str) -> tuple[int, int]:
    """Return channels and edge of patches that a linear layer reads."""
    for channels in (1, 3):
        edge = math.isqrt(inputs // channels)
        if channels * edge * edge == inputs and edge:
            return channels, edge
    raise CheckpointError(
        f"{where}: patches of {inputs} numbers are no square ones of 1 or 3 channels"
    )


def _with_patches(
    tensors: Mapping[str, Tensor], config: ViTConfig, order: str | None
) -> dict[str, Tensor]:
    """Return the tensors with the embedding of patches as the model counts a patch's numbers:
    channels first.
    """
    result, channels, edge = dict(tensors), config.in_channels, config.patch_size
    for name in (
        "patch_embed.proj.weight",
        "patch_embed.norm_in.weight",
        "patch_embed.norm_in.bias",
    ):
        flat = result.get(name)
        if (
            flat is None
            or flat.ndim == 4
            or config.stem is not None
            or flat.shape[-1] != channels * edge**2
        ):
            continue
        if order == "channels_last":
            flat = flat.reshape(-1, edge, edge, channels).permute(0, 3, 1, 2)
        flat = flat.reshape(-1, channels, edge, edge)
        is_linear = "norm_in" in name or config.patch_embedding == "linear"
        result[name] = flat.flatten(0 if "norm_in" in name else 1) if is_linear else flat
    return result


def _in_order(tensors: dict[str, Tensor], config: ViTConfig, order: str) -> dict[str, Tensor]:
    """Return the tensors with the rows of fused projections as the model counts them: `3hd`."""
    if order not in _ORDERS:
        raise CheckpointError(
            f"VIT_ARCHITECTURE: qkv_order {order!r:.100}: expected one of {', '.join(_ORDERS)}"
        )
    sizes = {"3": 3, "h": config.heads, "d": config.inner_width // config.heads}
    for name, tensor in tensors.items():
        if order != "3hd" and ".attn.qkv." in name and len(tensor) == math.prod(sizes.values()):
            rows = tensor.reshape(*(sizes[letter] for letter in order), *tensor.shape[1:])
            tensors[name] = rows.movedim(
                [order.index(letter) for letter in "3hd"], [0, 1, 2]
            ).flatten(0, 2)
    return tensors
