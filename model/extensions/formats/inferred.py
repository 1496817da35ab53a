"""The architecture of a plain state dict, from its tensors, from arguments, and from habits.

Shapes do not tell the number of attention heads, the positions of the norms, the activation and
the pooling. An absent tensor may also be a lost one.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from model.checkpoint.local_files import validating
from model.checkpoint.timm_architectures import architectures
from model.checkpoint.timm_arguments import POOL, EvaArguments, TimmArguments, parse_arguments
from model.checkpoint.timm_names import native_names
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.extensions.formats.layouts import Layout
from model.extensions.formats.row_order import (
    flat_patch,
    with_patches_in_order,
    with_projections_in_order,
)
from model.extensions.formats.shapes import shape_of
from model.extensions.formats.stated_architecture import OF_LAYOUT, OWN, is_eva
from model.layer_config import Size
from model.network.vit import meta_model

# Arguments that no tensor of any network tells, and the fields of `ViTConfig` that they become.
_UNTOLD: Final = {
    "num_heads": "heads",
    "norm_order": "norm_order",
    "act_layer": "activation",
    "norm_eps": "norm_eps",
}
# Parts whose tensors are absent if the argument is false, or if they were lost.
_PARTS: Final = {
    "class_token": ("cls_token",),
    "patch_bias": ("patch_embed.proj.bias",),
    "qkv_bias": ("blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"),
    "proj_bias": ("blocks.0.attn.proj.bias",),
    "final_norm": ("norm.weight", "fc_norm.weight"),
}
_SIZES: Final = frozenset({"embed_dim", "depth", "num_heads", "mlp_ratio", "final_norm"})

# torchvision's models: name and attention heads by width, edge of a patch, depth, width of the MLP.
TORCHVISION: Final = {
    (768, 16, 12, 3072): ("vit_b_16", 12),
    (768, 32, 12, 3072): ("vit_b_32", 12),
    (1024, 16, 24, 4096): ("vit_l_16", 16),
    (1024, 32, 24, 4096): ("vit_l_32", 16),
    (1280, 14, 32, 5120): ("vit_h_14", 16),
}


@dataclass
class InferredNetwork:
    """A Vision Transformer whose architecture is inferred.

    Attributes:
        where: name of the file in messages.
        name: name of timm's architecture, or `vit`, or empty if none was stated.
        arguments: arguments that the operator stated.
        layout: layout of the file's tensors.
        tensors: tensors under timm's names.
        stated: the given arguments, else the habits of the layout; inferred arguments are added.
    """

    where: str
    name: str
    arguments: dict[str, Any]
    layout: Layout
    tensors: dict[str, Tensor]
    stated: dict[str, Any]

    @property
    def has_own_sizes(self) -> bool:
        """Whether the tensors tell its sizes."""
        return self.name in ("", OWN)

    @property
    def classes(self) -> int:
        """The number of classes; 0 without a head."""
        return self._shape("head.weight", 2)[0] if "head.weight" in self.tensors else 0

    @property
    def depth(self) -> int:
        """The number of blocks."""
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blocks.")})

    def take_torchvision_model(self) -> str:
        """Return torchvision's name of the model, or an empty text; state its attention heads."""
        if self.layout.name != "torchvision":
            return ""
        width, _, patch, *_ = self._shape("patch_embed.proj.weight", 4)
        hidden = self._shape("blocks.0.mlp.fc1.weight", 2)[0]
        name, heads = TORCHVISION.get((width, patch, self.depth, hidden), ("", None))
        if heads is not None:
            self.stated["num_heads"] = heads
        return name

    def missing_arguments(self) -> list[str]:
        """Return the arguments that no tensor tells and nobody stated.

        Raises:
            CheckpointError: a tensor contradicts a stated argument.
        """
        tensors = self.tensors
        is_own = self.has_own_sizes
        stated_classes = self.arguments.get("num_classes", self.classes)
        if stated_classes != self.classes:
            told = f"has a head of {self.classes} classes" if self.classes else "has no head"
            raise CheckpointError(
                f"{self.where}: VIT_ARCHITECTURE says num_classes={stated_classes}, but the file "
                f"{told}: state num_classes={self.classes}, or give the file of the whole model"
            )
        if is_own:
            self._shape("blocks.0.attn.qkv.weight", 2)
        absent_parts = self._absent_parts()
        is_mean = is_own and self.stated.get("global_pool") in ("avg", "avgmax", "max")
        patch = self._shape("patch_embed.proj.weight", 2, 4)
        is_flat = len(patch) == 2 and math.isqrt(patch[1]) ** 2 != patch[1]
        is_of_eva = not is_own and is_eva(self.name)
        needed = {
            "num_heads": is_own or "embed_dim" in self.arguments,
            "norm_order": is_own or (bool(self.arguments.keys() & _SIZES) and not is_of_eva),
            "act_layer": is_own,
            "norm_eps": is_own,
            "global_pool": is_own,
            **{part: is_own and part in absent_parts for part in _PARTS},
            "pos_embed": is_own and "pos_embed" not in tensors,
            "fc_norm": is_mean and "norm.weight" in tensors,
            "pool_include_prefix": is_mean and "cls_token" in tensors,
            "qkv_order": True,
            # timm reads the linear patches of its early models as channels first.
            "patch_order": is_flat and (is_own or self.layout.name != "timm"),
            "num_classes": not self.classes,
        }
        return [
            argument
            for argument, is_needed in needed.items()
            if is_needed and argument not in self.stated
        ]

    def _absent_parts(self) -> list[str]:
        """Return the parts without tensors; refuse a tensor of a part that is stated absent."""
        absent = []
        for part, names in _PARTS.items():
            name = next((name for name in names if name in self.tensors), None)
            if name is None:
                absent.append(part)
            elif self.has_own_sizes and self.arguments.get(part) is False:
                raise CheckpointError(
                    f"{self.where}: VIT_ARCHITECTURE has {part}=false, but {name!r} is there"
                )
        return absent

    def config(self, preprocess: PreprocessConfig) -> ViTConfig:
        """Return the architecture, at the size that the positions or the preprocessing tell."""
        if self.has_own_sizes:
            inferred = self._inferred_arguments(preprocess)
            self.stated.update(inferred | self.stated | {"proj_bias": inferred["proj_bias"]})
        with validating(self.where):
            of_one_patch = self._one_patch().vit_config()
            size = self._image_size(of_one_patch, preprocess)
            return self._arguments(size).vit_config()

    def assumed(self, config: ViTConfig) -> tuple[str, ...]:
        """Return the values that neither a tensor nor the operator states, each with its source."""
        values = {key: getattr(config, field) for key, field in _UNTOLD.items()}
        pools = (name for name, pool in POOL.items() if pool == config.pool)
        values["global_pool"] = next(pools, config.pool)
        library = self.layout.name if self.has_own_sizes else self.name
        sources = dict.fromkeys(values, f"as {library} has it")
        if config.pool == "cls_mean":
            sources["global_pool"] = f"because the head reads 2 x {config.width} features"
        return tuple(
            f"{key}={value}, {sources[key]} (VIT_ARCHITECTURE)"
            for key, value in values.items()
            if key not in self.arguments
        )

    def native_tensors(self, config: ViTConfig) -> dict[str, Tensor]:
        """Return the tensors as the model has them, with zeros for biases that are absent."""
        tensors = with_patches_in_order(self.tensors, config, self.stated.get("patch_order"))
        tensors = with_projections_in_order(tensors, config, str(self.stated["qkv_order"]))
        tensors = native_names(tensors, self._one_patch(), config, self.where)
        if not self.has_own_sizes:
            return tensors
        if config.position_embedding == "sincos2d":
            tensors["pos_embed"] = meta_model(config).fixed_position_embedding()
        if config.projection_bias and "blocks.0.attn.proj.bias" not in tensors:
            for block in range(config.depth):
                tensors[f"blocks.{block}.attn.proj.bias"] = torch.zeros(config.width)
        if config.norm_after_pool and "fc_norm.weight" not in tensors:
            tensors = {
                re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()
            }
        return tensors

    def _shape(self, name: str, *dimensions: int) -> tuple[int, ...]:
        return shape_of(self.tensors, name, self.where, *dimensions)

    def _arguments(self, size: Size) -> TimmArguments | EvaArguments:
        """Return timm's arguments at an image size; raises pydantic.ValidationError."""
        of_name = {} if self.has_own_sizes else architectures()[self.name]
        is_of_eva = of_name.get("family") == "eva"
        fields = (EvaArguments if is_of_eva else TimmArguments).model_fields
        known = (fields.keys() | self.arguments.keys()) - OF_LAYOUT
        stated = {key: value for key, value in self.stated.items() if key in known}
        inferred = {
            "num_classes": self.classes,
            "in_chans": self._channels(),
            "img_size": size,
        }
        return parse_arguments(of_name | stated | inferred)

    def _one_patch(self) -> TimmArguments | EvaArguments:
        """Return timm's arguments for an image of one patch; raises pydantic.ValidationError."""
        arguments = self._arguments((1, 1))
        edge = arguments.patch_edge
        return arguments.model_copy(update={"img_size": (edge, edge)})

    def _channels(self) -> int:
        stem = re.compile(r"patch_embed\.backbone\.(stem\.)?conv\.weight")
        stems = [name for name in self.tensors if stem.fullmatch(name)]
        shape = self._shape(stems[0] if stems else "patch_embed.proj.weight", 2, 4)
        return shape[1] if len(shape) == 4 else flat_patch(shape[1], self.where)[0]

    def _inferred_arguments(self, preprocess: PreprocessConfig) -> dict[str, Any]:
        """Return the arguments of timm that the names and shapes of tensors tell."""
        tensors = self.tensors
        rows, width = self._shape("blocks.0.attn.qkv.weight", 2)
        hidden = self._shape("blocks.0.mlp.fc2.weight", 2)[1]
        is_gated = self._shape("blocks.0.mlp.fc1.weight", 2)[0] == 2 * hidden
        patch = self._shape("patch_embed.proj.weight", 2, 4)
        edge = patch[2] if len(patch) == 4 else flat_patch(patch[1], self.where)[1]
        tokens = {
            name: self._shape(name, 3)[1]
            for name in ("cls_token", "dist_token", "reg_token")
            if name in tensors
        }
        positions = self._shape("pos_embed", 3)[1] if "pos_embed" in tensors else 0
        patch_counts = (
            math.prod(length // edge for length in preprocess.size),
            math.isqrt(positions) ** 2,
        )
        has_layer_scale = "blocks.0.ls1.gamma" in tensors or "blocks.0.gamma_1" in tensors
        relative = re.compile(r"_position_bias_table$|rel_pos\.mlp\.")
        return {
            "patch_size": edge,
            "embed_dim": width,
            "depth": self.depth,
            "mlp_ratio": (hidden + 0.5) / width,  # because timm rounds down
            "mlp_layer": "SwiGLU" if is_gated else None,
            "attn_dim": None if rows == 3 * width else rows // 3,
            "no_embed_class": bool(tokens) and positions in patch_counts,
            "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
            "scale_attn_norm": "blocks.0.attn.norm.weight" in tensors,
            "scale_mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
            "rel_pos": any(relative.search(name) for name in tensors),
            "init_values": 1.0 if has_layer_scale else None,
            "pre_norm": "norm_pre.weight" in tensors,
            "patch_norms": "patch_embed.norm_in.weight" in tensors,
            "distilled": "dist_token" in tokens,
            "reg_tokens": tokens.get("reg_token", 0),
            **{part: any(name in tensors for name in names) for part, names in _PARTS.items()},
            # A projection without a bias, as in SimpleViT, gets zeros if the MLP has a bias.
            "proj_bias": "blocks.0.mlp.fc1.bias" in tensors,
            "fc_norm": "fc_norm.weight" in tensors,
        }

    def _image_size(self, of_one_patch: ViTConfig, preprocess: PreprocessConfig) -> Size:
        """Return (rows, columns) in pixels: the preprocessing's if its patches fit, else a square.

        Args:
            of_one_patch: the architecture for an image of one patch.
            preprocess: the operator's preprocessing.
        """
        patch = of_one_patch.patch_size
        prefix = of_one_patch.prefix_tokens if of_one_patch.position_prefix else 0
        rows, columns = (edge // patch for edge in preprocess.size)
        if of_one_patch.position_embedding != "learned":
            return preprocess.size
        shape = self._shape("pos_embed", 3)
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
