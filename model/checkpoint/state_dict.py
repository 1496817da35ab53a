"""Plain state dicts, in one of the layouts of `layouts` or with a map of names (`VIT_KEYS`).

The operator names the architecture (`VIT_ARCHITECTURE`): a timm name, optionally followed by arguments that differ
(`vit_base_patch16_224,global_pool=avg`), with which the tensors are compared; or `vit`, whose sizes are the tensors'.
Shapes do not tell the number of heads, the place of the norms, the activation and the pooling, and an absent tensor
may be one that was lost. All that is neither told nor stated is asked for at once, with the command that states it.
"""

from __future__ import annotations

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
from model.checkpoint.options import CheckpointOptions, indexed_labels
from model.checkpoint.refusals import validating
from model.checkpoint.tensors import shape_of
from model.checkpoint.timm import preprocess_of
from model.checkpoint.timm_architectures import (
    TimmArguments,
    architectures,
    native_names,
    parse_arguments,
    runs_in_library,
)
from model.checkpoint.timm_eva import EvaArguments
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network import library
from model.network.vit import meta_model

FORMAT: Final = "state_dict"

OWN: Final = "vit"
"""The architecture whose sizes are those of the tensors."""
_INFERRED: Final = frozenset({"img_size", "num_classes", "in_chans", "head_hidden"})
_SIZES: Final = frozenset({"embed_dim", "depth", "num_heads", "mlp_ratio", "final_norm"})
_OF_LAYOUT: Final = ("qkv_order", "patch_order")
"""Arguments of the tensors' layout, which are none of the network's."""
_ORDERS: Final = ("3hd", "3dh", "h3d", "hd3", "d3h", "dh3")
"""How the rows of a fused projection are counted: 3 of queries, keys and values, h heads, d numbers of a head."""
_UNSAID: Final = {"num_heads": "heads", "norm_order": "norm_order", "act_layer": "activation", "norm_eps": "norm_eps"}
"""Arguments whose values no tensor tells, and the fields of `ViTConfig` that they become."""
_PRESENT: Final = {
    "class_token": ("cls_token",),
    "patch_bias": ("patch_embed.proj.bias",),
    "qkv_bias": ("blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"),
    "proj_bias": ("blocks.0.attn.proj.bias",),
    "final_norm": ("norm.weight", "fc_norm.weight"),
}
"""Arguments that are false where a network has none of these tensors."""
_HINTS: Final = {
    "num_heads": "N is the number of heads",
    "norm_order": "norm_order is pre, post or res_post",
    "num_classes": "it has no classification head: num_classes=0 serves its embeddings alone; the file head.pth of its "
    "folder is read with it",
    "qkv_order": "qkv_order is how its code counts rows: 3 of queries, keys, values; h heads; d numbers of one",
    "pos_embed": "rotary positions leave no tensor: a network that has them needs timm's name",
}
TORCHVISION_FILE: Final = re.compile(r"(vit_[blh]_\d\d)(_lc_swag|_swag)?-[0-9a-f]{8}\.(?:pth|safetensors)")
TORCHVISION: Final = {
    (768, 16, 12, 3072): ("vit_b_16", 12),
    (768, 32, 12, 3072): ("vit_b_32", 12),
    (1024, 16, 24, 4096): ("vit_l_16", 16),
    (1024, 32, 24, 4096): ("vit_l_32", 16),
    (1280, 14, 32, 5120): ("vit_h_14", 16),
}
"""Name and heads of torchvision's models, by width, edge of a patch, depth and width of the MLP."""
TORCHVISION_PRESETS: Final = {
    ("vit_b_16", None): "torchvision-224",
    ("vit_b_32", None): "torchvision-224",
    ("vit_l_16", None): "torchvision-l16-224",
    ("vit_l_32", None): "torchvision-224",
    ("vit_b_16", "_swag"): "torchvision-swag-384",
    ("vit_l_16", "_swag"): "torchvision-swag-512",
    ("vit_h_14", "_swag"): "torchvision-swag-518",
    ("vit_b_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_l_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_h_14", "_lc_swag"): "torchvision-swag-linear-224",
}
"""Preset of each of torchvision's released files, by the start of its name."""


def recognises(files: Files) -> bool:
    """Return whether it is a single file; readers that know it better are asked first."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() != ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a state dict."""
    assert isinstance(files, SingleFile)
    torchvisions = {name for name, _ in TORCHVISION.values()}
    named = options.architecture if options.architecture in torchvisions else None
    name, given = parse_architecture(options.architecture) if options.architecture and not named else ("", {})
    if name not in ("", OWN) and runs_in_library(name, "VIT_ARCHITECTURE"):
        return _of_library(files, options, name, given)
    tensors = mapped(files.tensors(), files.keys)
    layout, tensors = in_layout(tensors, files.place)
    return _Network(files, options, name, given, layout, tensors).checkpoint(named)


def parse_architecture(text: str) -> tuple[str, dict[str, Any]]:
    """Return a timm name or `vit`, and the arguments that differ from it: `name[,argument=value]...`, as in JSON.

    Raises:
        CheckpointError: an unknown name, or arguments that cannot be read.
    """
    name, *pairs = re.split(r",(?![^\[]*\])", text)  # not within a list
    if name != OWN:
        runs_in_library(name, "VIT_ARCHITECTURE")
    given: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: expected argument=value")
        try:
            given[key] = json.loads(value)
        except (ValueError, RecursionError):
            given[key] = value
        if key in _INFERRED and (key, given[key]) != ("num_classes", 0):
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: {key} is read from the file and need not be given")
    return name, given


def _of_library(files: SingleFile, options: CheckpointOptions, name: str, given: dict[str, Any]) -> Checkpoint:
    """Read the state dict of a network that timm's own code runs; its classes and channels are those of the file."""
    where, published = files.place, library.published(name)
    tensors = mapped(files.tensors(), files.keys)
    if options.preprocess is None or (options.labels is None and files.labels is None):
        carried = preprocess_of(published, "timm").model_dump_json(exclude_defaults=True)
        note = "this preprocessing is that of timm's first weights of the name, and yours may have another"
        raise _question(files, options, _written(name, given), [], carried, [note])
    preprocess = options.preprocess_or(None, where)
    heads = published.get("classifier") or "head"
    head = f"{heads if isinstance(heads, str) else heads[0]}.weight"
    classes = shape_of(tensors, head, where, 1, 2, 4)[0]
    fixed = bool(published.get("fixed_input_size"))
    with validating(where):
        config = library.library_config(name, given, classes, len(preprocess.mean), preprocess.size, fixed_size=fixed)
    labels = None if files.labels is None else indexed_labels(files.labels, classes, where)
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=config,
        preprocess=preprocess,
        labels=options.labels_or(labels, classes, where),
        tensors=native_tensors(library.renamed_by_library(config, tensors), config, where),
        notes=files.notes,
        assumed=files.assumed,
    )


@dataclass
class _Network:
    """A Vision Transformer whose architecture is put together of tensors, of what is stated, and of habits.

    Attributes:
        files, options: of the operator.
        name: of timm's architecture, `vit`, or empty where none was stated.
        given: arguments that were stated.
        layout: of the file's tensors.
        tensors: by timm's names.
    """

    files: SingleFile
    options: CheckpointOptions
    name: str
    given: dict[str, Any]
    layout: Layout
    tensors: dict[str, Tensor]

    def checkpoint(self, named: str | None) -> Checkpoint:
        """Return the checkpoint; `named` is the torchvision name that was stated."""
        where, assumed = self.files.place, self.files.assumed
        habits = dict(self.layout.habits)
        if any(len(entry.source) == 1 and ".qkv." in entry.to for entry in self.files.keys.tensor):
            habits.pop("qkv_order", None)  # the map names it, and says nothing of its rows
        label = ""
        if self.layout.name == "torchvision" and not self.name:
            label, published = self._of_torchvision(habits)
            self.name, assumed = OWN if label else "", (*assumed, *published)
        if named not in (None, label):
            raise CheckpointError(f"{where}: is {f'a {label}' if label else 'none of torchvision'}, not a {named}")
        if self.layout.name == "timm" and self.name not in ("", OWN):
            habits["patch_order"] = "channels_first"  # as timm reads linear patches of models from before it had none
        stated = habits | self.given
        preprocess = self.options.preprocess_or(None, where) if self.options.preprocess else None
        if "num_classes" in self.given and "head.weight" in self.tensors:
            classes = len(self.tensors["head.weight"])
            raise CheckpointError(
                f"{where}: its tensors tell num_classes={classes}, but VIT_ARCHITECTURE says num_classes=0"
            )
        asked, arguments = self._own(stated) if self.name in ("", OWN) else self._timms(stated)
        if "head.weight" not in self.tensors and "num_classes" not in self.given:
            asked["num_classes"] = 0
        has_labels = self.options.labels or self.files.labels is not None or "head.weight" not in self.tensors
        if asked or not self.name or preprocess is None or not has_labels:
            raise self._question(asked)
        config = self._config(arguments, stated, preprocess)
        classes = config.num_classes
        labels = None if self.files.labels is None else indexed_labels(self.files.labels, classes, where)
        return Checkpoint(
            name=self.files.file.stem,
            source=self.files.source,
            format=FORMAT,
            architecture=label or self.name,
            config=config,
            preprocess=preprocess,
            labels=self.options.labels_or(labels, classes, where),
            tensors=native_tensors(self._laid_out(arguments, config, stated), config, where),
            notes=self.files.notes,
            assumed=(*self._assumed(config), *assumed),
        )

    def _of_torchvision(self, habits: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
        """Return torchvision's name of the model and what was assumed for a released file; heads go to the habits."""
        width, _, patch = shape_of(self.tensors, "patch_embed.proj.weight", self.files.place, 4)[:3]
        hidden = shape_of(self.tensors, "blocks.0.mlp.fc1.weight", self.files.place, 2)[0]
        label, heads = TORCHVISION.get((width, patch, self._depth, hidden), ("", None))
        if heads is not None:
            habits["num_heads"] = heads
        match = TORCHVISION_FILE.fullmatch(self.files.file.name)
        preset = TORCHVISION_PRESETS.get((label, match[2])) if match is not None and match[1] == label else None
        classes = self.tensors["head.weight"].shape[0] if "head.weight" in self.tensors else 0
        self.options, assumed = self.options.with_published(self.files.file.name, preset, classes)
        return label, assumed

    @property
    def _depth(self) -> int:
        return len({name.split(".")[1] for name in self.tensors if name.startswith("blocks.")})

    def _timms(self, stated: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is to be asked of a network under timm's name, and its arguments."""
        own = architectures()[self.name]
        known = (EvaArguments if own.get("family") == "eva" else TimmArguments).model_fields
        arguments = own | {key: value for key, value in stated.items() if key in self.given or key in known}
        asked: dict[str, Any] = {}
        if self.given.get("embed_dim", own["embed_dim"]) != own["embed_dim"] and "num_heads" not in stated:
            asked["num_heads"] = "N"
        if self.given.keys() & _SIZES and "norm_order" not in stated and own.get("family") != "eva":
            asked["norm_order"] = "pre"
        if "qkv_order" not in stated:
            asked["qkv_order"] = "3hd"
        patch = self.tensors.get("patch_embed.proj.weight")
        if patch is not None and patch.ndim == 2 and "patch_order" not in stated:
            asked["patch_order"] = "channels_last"
        arguments = {key: value for key, value in arguments.items() if key not in _OF_LAYOUT}
        with validating(self.files.place):
            # An image of one patch always fits, and tells everything that does not depend on the size.
            made = parse_arguments(arguments | {"img_size": 1, "num_classes": 0})
            probe = made.model_copy(update={"img_size": (made.patch_edge, made.patch_edge)}).vit_config()
        return asked, arguments | {"in_chans": self._channels(probe)}

    def _own(self, stated: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is to be asked of a network of its own sizes, and its arguments in the words of timm."""
        tensors, where = self.tensors, self.files.place
        present = {key: any(name in tensors for name in names) for key, names in _PRESENT.items()}
        for key, value in self.given.items():
            if value is False and present.get(key):
                raise CheckpointError(f"{where}: VIT_ARCHITECTURE has {key}=false, but {_PRESENT[key][0]!r} is there")
        width = shape_of(tensors, "blocks.0.attn.qkv.weight", where, 2)[1]
        hidden = shape_of(tensors, "blocks.0.mlp.fc2.weight", where, 2)[1]
        gates = shape_of(tensors, "blocks.0.mlp.fc1.weight", where, 2)[0] // hidden
        patch = shape_of(tensors, "patch_embed.proj.weight", where, 2, 4)
        channels, edge = (patch[1], patch[2]) if len(patch) == 4 else _edge_of_flat(patch[1], where)
        pool = stated.get("global_pool", "token" if present["class_token"] else "avg")
        usual: dict[str, Any] = {"num_heads": "N", "norm_order": "pre", "act_layer": "silu" if gates == 2 else "gelu"}
        usual |= {"norm_eps": 1e-6, "qkv_order": "3hd", "global_pool": pool}
        usual |= {key: False for key, is_present in present.items() if not is_present}
        if "pos_embed" not in tensors:
            usual["pos_embed"] = "none"
        if pool in ("avg", "avgmax", "max"):
            usual |= {"fc_norm": False} if "norm.weight" in tensors else {}
            usual |= {"pool_include_prefix": False} if present["class_token"] else {}
        if len(patch) == 2 and channels > 1:
            usual["patch_order"] = "channels_last"
        if "pre_logits.fc.weight" in tensors:
            usual["head_act"] = "tanh"
        arguments = {key: value for key, value in stated.items() if not present.get(key) and key not in _OF_LAYOUT}
        arguments |= {"embed_dim": width, "patch_size": edge, "in_chans": channels, "depth": self._depth}
        arguments |= {"fc_norm": True} if "fc_norm.weight" in tensors else {}
        return {key: value for key, value in usual.items() if key not in stated}, arguments

    def _config(self, arguments: dict[str, Any], stated: dict[str, Any], preprocess: PreprocessConfig) -> ViTConfig:
        """Return the architecture, its image's size by the positions and the preprocessing."""
        where, tensors = self.files.place, self.tensors
        head = shape_of(tensors, "head.weight", where, 2)[0] if "head.weight" in tensors else 0
        arguments = arguments | {"num_classes": head}
        if "pre_logits.fc.weight" in tensors:
            arguments["head_hidden"] = shape_of(tensors, "pre_logits.fc.weight", where, 2)[0]
        with validating(where):
            if self.name != OWN:
                made = parse_arguments(arguments | {"img_size": 1})
                probe = made.model_copy(update={"img_size": (made.patch_edge, made.patch_edge)}).vit_config()
                prefix = probe.prefix_tokens if probe.position_prefix else 0
                size = self._image_size(made.patch_edge, prefix, preprocess, probe.position_embedding == "none")
                return parse_arguments(arguments | {"img_size": size}).vit_config()
            # The number of heads has to divide the width of the attention, which may be another than the tokens'.
            heads = TimmArguments(img_size=(1, 1), num_classes=1, num_heads=stated["num_heads"]).num_heads
            fields = self._own_fields(preprocess.size, arguments["patch_size"]) | {"heads": heads}
            prefix = fields.pop("prefix")
            size = self._image_size(arguments["patch_size"], prefix, preprocess, "pos_embed" not in tensors)
            positions = {"pos_embed": "learn"} if "pos_embed" in tensors else {}
            plain = TimmArguments.model_validate(arguments | positions | {"img_size": size, "num_heads": 1})
            return ViTConfig.model_validate(plain.vit_config().model_dump() | fields)

    def _own_fields(self, size: tuple[int, int], edge: int) -> dict[str, Any]:
        """Return the fields that the tensors tell, and how many prefix tokens have positions (`prefix`)."""
        tensors, where = self.tensors, self.files.place
        rows, width = shape_of(tensors, "blocks.0.attn.qkv.weight", where, 2)
        hidden = shape_of(tensors, "blocks.0.mlp.fc2.weight", where, 2)[1]
        tokens = {name: shape_of(tensors, name, where, 3)[1] for name in _TOKENS if name in tensors}
        positions = shape_of(tensors, "pos_embed", where, 3)[1] if "pos_embed" in tensors else 0
        alone = positions == math.prod(length // edge for length in size) or math.isqrt(positions) ** 2 == positions
        over_prefix = not alone or not tokens
        return {
            "prefix": sum(tokens.values()) if over_prefix else 0,
            "position_prefix": over_prefix,
            "mlp": "swiglu" if len(tensors["blocks.0.mlp.fc1.weight"]) == 2 * hidden else "plain",
            "mlp_width": hidden,
            "attention_width": None if rows == 3 * width else rows // 3,
            "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
            "attention_norm": "blocks.0.attn.norm.weight" in tensors,
            "mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
            "relative_position_bias": any(
                re.search(r"relative_position_bias_table$|rel_pos\.mlp\.", n) for n in tensors
            ),
            "projection_bias": "blocks.0.mlp.fc1.bias" in tensors,
            "layer_scale": "blocks.0.ls1.gamma" in tensors or "blocks.0.gamma_1" in tensors,
            "norm_before_blocks": "norm_pre.weight" in tensors,
            "patch_norms": "patch_embed.norm_in.weight" in tensors,
            "patch_embedding": "linear" if "patch_embed.norm_in.weight" in tensors else "convolution",
            "distillation_token": "dist_token" in tokens,
            "distillation_head": "head_dist.weight" in tensors,
            "registers": tokens.get("reg_token", 0),
        }

    def _channels(self, probe: ViTConfig) -> int:
        """Return the channels of pictures, once patches, depth and width are those of timm's architecture."""
        where, patch = self.files.place, probe.patch_size
        stem = probe.stem is not None
        name = "patch_embed.proj.weight"
        if stem:
            name = next(
                (n for n in self.tensors if re.fullmatch(r"patch_embed\.backbone\.(stem\.)?conv\.weight", n)), name
            )
        shape = shape_of(self.tensors, name, where, 2, 4)
        if len(shape) == 2 and shape[1] % patch**2 == 0:
            shape = shape[0], shape[1] // patch**2, patch, patch
        if len(shape) != 4 or (shape[2:] != (patch, patch) and not stem):
            raise CheckpointError(
                f"{where}: {name} has shape {list(shape)}, {self.name} has patches of {patch}x{patch}"
            )
        if self._depth != probe.depth:
            raise CheckpointError(f"{where}: has {self._depth} blocks, {self.name} has {probe.depth}")
        width = shape_of(self.tensors, "patch_embed.proj.weight", where, 2, 4)[0]
        if width != probe.width:
            raise CheckpointError(f"{where}: is {width} wide, {self.name} is {probe.width}")
        return shape[1]

    def _image_size(self, patch: int, prefix: int, preprocess: PreprocessConfig, free: bool) -> tuple[int, int]:
        """Return (rows, columns) in pixels: the preprocessing's where they have as many patches, else a square.

        Args:
            patch: edge of one.
            prefix: how many prefix tokens have positions.
            preprocess: the operator's.
            free: whether there are no positions.
        """
        rows, columns = (edge // patch for edge in preprocess.size)
        if free:
            return preprocess.size
        shape = shape_of(self.tensors, "pos_embed", self.files.place, 3)
        count = shape[1] - prefix
        if count == rows * columns:
            return preprocess.size
        edge = math.isqrt(max(count, 0))
        if edge < 1 or edge * edge != count:
            raise CheckpointError(
                f"{self.files.place}: pos_embed has shape {list(shape)}: with {prefix} prefix tokens "
                f"no square grid, and not the {rows}x{columns} of its preprocessing"
            )
        return edge * patch, edge * patch

    def _laid_out(self, arguments: dict[str, Any], config: ViTConfig, stated: dict[str, Any]) -> dict[str, Tensor]:
        """Return the tensors as the model has them: patches, rows of projections, and what is stated to be absent."""
        timms: TimmArguments | EvaArguments = TimmArguments(img_size=(1, 1), num_classes=0)
        if self.name != OWN:
            timms = parse_arguments(arguments | {"img_size": 1, "num_classes": 0})
        tensors = _with_patches(self.tensors, config, stated.get("patch_order"))
        tensors = _in_order(tensors, config, str(stated["qkv_order"]))
        tensors = native_names(tensors, timms, config, self.files.place)
        if self.name != OWN:
            return tensors
        if config.position_embedding == "sincos2d":
            tensors["pos_embed"] = meta_model(config).fixed_position_embedding()
        if config.projection_bias and not any(name.endswith(".attn.proj.bias") for name in tensors):
            tensors |= {f"blocks.{i}.attn.proj.bias": torch.zeros(config.width) for i in range(config.depth)}
        if config.norm_after_pool and "fc_norm.weight" not in tensors:
            tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()}
        return tensors

    def _assumed(self, config: ViTConfig) -> tuple[str, ...]:
        """Return what no tensor says and was not stated either, with whose code has it so."""
        pools = {"cls": "token", "mean": "avg", "mean_max": "avgmax", "attention": "map"}
        values = {key: getattr(config, field) for key, field in _UNSAID.items()}
        values["global_pool"] = pools.get(config.pool, config.pool)
        whose = self.layout.name if self.name == OWN else self.name
        return tuple(
            f"{key}={value}, as {whose} has it (VIT_ARCHITECTURE)"
            for key, value in values.items()
            if key not in self.given
        )

    def _question(self, asked: dict[str, Any]) -> CheckpointError:
        """Return the error that asks for all that is missing at once."""
        name = self.name
        if not name:
            name, asked = self._timms_name(asked) or (OWN, asked)
        hints = [text for key, text in _HINTS.items() if key in asked]
        usual = [key for key in asked if key not in ("num_heads", "num_classes")]
        if usual:
            hints.append(f"what stands here for {', '.join(usual)} is only usual: see what its code has")
        preprocess = '{"size": [ROWS, COLUMNS], "resize": "squash", "resize_size": [ROWS, COLUMNS], '
        preprocess += '"interpolation": "bilinear", "mean": [MEAN], "std": [STD]}'
        if self.options.preprocess is None:
            hints.append("MEAN and STD are those of its training for each channel, for pixels of 0...1")
        missing = [*asked] or ([] if self.options.architecture else ["architecture"])
        return _question(
            self.files, self.options, _written(name, self.given | asked), missing, preprocess, hints,
            labels="head.weight" in self.tensors,
        )  # fmt: skip

    def _timms_name(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        """Return timm's name of an architecture that has these tensors, and what is asked of it."""
        patch, hidden = (self.tensors[name].shape for name in ("patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"))
        parts = re.compile("ls1|q_norm|norm_pre|pre_logits|dist_token|reg_token|norm_in|attn_pool|backbone|rel_pos")
        if self.layout.name != "timm" or len(patch) != 4 or any(parts.search(name) for name in self.tensors):
            return None
        for size in ("tiny", "small", "base", "large"):
            name = f"vit_{size}_patch{patch[3]}_224"
            own = architectures().get(name, {})
            if (own.get("embed_dim"), own.get("depth"), 4 * patch[0]) == (patch[0], self._depth, hidden[0]):
                return name, {key: value for key, value in asked.items() if key == "num_classes"}
        return None


_TOKENS: Final = ("cls_token", "dist_token", "reg_token")


def _question(
    files: SingleFile,
    options: CheckpointOptions,
    architecture: str,
    missing: list[str],
    preprocess: str,
    hints: list[str],
    *,
    labels: bool = True,
) -> CheckpointError:
    """Return the error that asks for what is missing, with the command that would serve the file.

    Args:
        architecture: complete, as VIT_ARCHITECTURE takes it.
        preprocess: what is shown in the place of a missing preprocessing.
        labels: whether the network has classes.
    """
    asks_labels = labels and options.labels is None and files.labels is None
    missing = missing + (["preprocessing"] if options.preprocess is None else []) + (["labels"] if asks_labels else [])
    command = ["vitserve", "serve", "--checkpoint", files.source, "--architecture", architecture]
    command += ["--preprocess", options.preprocess or preprocess]
    command += ["--labels", options.labels or "numbers"] if asks_labels or options.labels else []
    command += ["--keys", options.keys] if options.keys else []
    hint = f" ({'; '.join(hints)})" if hints else ""
    return CheckpointError(
        f"{files.place}: no file says its {', '.join(missing)}: with the values of its training code, this serves it: "
        f"{shlex.join(command)}{hint}"
    )


def _written(name: str, arguments: Mapping[str, Any]) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return ",".join([name, *(f"{key}={value}" for key, value in values.items())])


def _edge_of_flat(inputs: int, where: str) -> tuple[int, int]:
    """Return channels and edge of patches that a linear layer reads."""
    for channels in (1, 3):
        edge = math.isqrt(inputs // channels)
        if channels * edge * edge == inputs and edge:
            return channels, edge
    raise CheckpointError(f"{where}: patches of {inputs} numbers are no square ones of 1 or 3 channels")


def _with_patches(tensors: Mapping[str, Tensor], config: ViTConfig, order: str | None) -> dict[str, Tensor]:
    """Return the tensors with the embedding of patches as the model counts a patch's numbers: channels first."""
    result = dict(tensors)
    channels, edge = config.in_channels, config.patch_size
    for name in ("patch_embed.proj.weight", "patch_embed.norm_in.weight", "patch_embed.norm_in.bias"):
        flat = result.get(name)
        if flat is None or flat.ndim == 4 or config.stem is not None or flat.shape[-1] != channels * edge**2:
            continue
        if order == "channels_last":
            flat = flat.reshape(-1, edge, edge, channels).permute(0, 3, 1, 2)
        flat = flat.reshape(-1, channels, edge, edge)
        if "norm_in" in name:
            result[name] = flat.flatten()
        else:
            result[name] = flat.flatten(1) if config.patch_embedding == "linear" else flat
    return result


def _in_order(tensors: dict[str, Tensor], config: ViTConfig, order: str) -> dict[str, Tensor]:
    """Return the tensors with the rows of fused projections as the model counts them: `3hd`."""
    if order not in _ORDERS:
        raise CheckpointError(f"VIT_ARCHITECTURE: qkv_order {order!r:.100}: expected one of {', '.join(_ORDERS)}")
    sizes = {"3": 3, "h": config.heads, "d": config.inner_width // config.heads}
    for name, tensor in tensors.items():
        if order != "3hd" and ".attn.qkv." in name and len(tensor) == math.prod(sizes.values()):
            rows = tensor.reshape(*(sizes[letter] for letter in order), *tensor.shape[1:])
            tensors[name] = rows.movedim([order.index(letter) for letter in "3hd"], [0, 1, 2]).flatten(0, 2)
    return tensors
