"""Layouts of state dicts that are read without a config: the names of a library, and its habits.

A name that the rules do not know keeps its form, and is refused later. A key map (`VIT_KEYS`) gives
new names to a network of somebody's own.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from model.checkpoint.files import CONFIG_FILE, OPEN_CLIP_CONFIG, Files
from model.checkpoint.huggingface.names import ENCODER
from model.checkpoint.own_heads import with_head
from model.checkpoint.tensors import (
    Rules,
    advice_on_effect,
    join_parts,
    renamed,
    stored_names,
    take_tensor,
)
from model.errors import CheckpointError


class Layout(NamedTuple):
    """The names of one library's Vision Transformers.

    Attributes:
        name: name of the library.
        marker: pattern of a name that only this layout has.
        rules: from the library's names to the model's.
        habits: arguments of `VIT_ARCHITECTURE` that this library's code has unless others are
            stated.
    """

    name: str
    marker: str
    rules: Rules
    habits: Mapping[str, Any]


# Habits of most libraries.
_HABITS: Final = {
    "norm_order": "pre",
    "act_layer": "gelu",
    "norm_eps": 1e-6,
    "global_pool": "token",
    "qkv_order": "3hd",
}

_VIT_PYTORCH: Final = Layout(
    "vit-pytorch",
    r"to_patch_embedding\.2\.weight",
    (
        (r"^pos_embedding$", "pos_embed"),
        (r"^transformer\.layers\.(\d+)\.0\.norm\.", r"blocks.\1.norm1."),
        (r"^transformer\.layers\.(\d+)\.0\.to_qkv\.", r"blocks.\1.attn.qkv."),
        (r"^transformer\.layers\.(\d+)\.0\.to_out\.(?:0\.)?", r"blocks.\1.attn.proj."),
        (r"^transformer\.layers\.(\d+)\.1\.norm\.", r"blocks.\1.norm2."),
        (r"^transformer\.layers\.(\d+)\.1\.net\.0\.", r"blocks.\1.norm2."),
        (r"^transformer\.layers\.(\d+)\.1\.net\.1\.", r"blocks.\1.mlp.fc1."),
        (r"^transformer\.layers\.(\d+)\.1\.net\.[34]\.", r"blocks.\1.mlp.fc2."),
        (r"^transformer\.norm\.", "norm."),
        (r"^(?:mlp|linear)_head\.0\.", "fc_norm."),
        (r"^(?:mlp|linear)_head\.(?:1\.)?", "head."),
        (r"^to_patch_embedding\.1\.", "patch_embed.norm_in."),
        (r"^to_patch_embedding\.2\.", "patch_embed.proj."),
        (r"^to_patch_embedding\.3\.", "patch_embed.norm_out."),
    ),
    {
        "act_layer": "gelu",
        "norm_eps": 1e-5,
        "norm_order": "pre",
        "patch_order": "channels_last",
        "pool_include_prefix": True,
        "fc_norm": False,
        "qkv_bias": False,
        "qkv_order": "3hd",
    },
)
_TRANSFORMERS: Final = Layout(
    "transformers",
    r"((vit|deit)\.)?(encoder\.layer|layers)\.0\.layernorm_before\.weight",
    ENCODER,
    _HABITS | {"norm_eps": 1e-12},
)
_LAYER: Final = r"^encoder\.layers\.encoder_layer_(\d+)"
_TORCHVISION: Final = Layout(
    "torchvision",
    r"encoder\.layers\.encoder_layer_0\.ln_1\.weight",
    (
        (r"^class_token$", "cls_token"),
        (r"^encoder\.pos_embedding$", "pos_embed"),
        (r"^conv_proj\.", "patch_embed.proj."),
        (rf"{_LAYER}\.ln_([12])\.", r"blocks.\1.norm\2."),
        (rf"{_LAYER}\.self_attention\.in_proj_", r"blocks.\1.attn.qkv."),
        (rf"{_LAYER}\.self_attention\.out_proj\.", r"blocks.\1.attn.proj."),
        (rf"{_LAYER}\.mlp\.(?:0|linear_1)\.", r"blocks.\1.mlp.fc1."),
        (rf"{_LAYER}\.mlp\.(?:3|linear_2)\.", r"blocks.\1.mlp.fc2."),
        (r"^encoder\.ln\.", "norm."),
    ),
    _HABITS,
)
_TORCH: Final = Layout(
    "torch.nn.TransformerEncoder",
    r"(.+\.)?layers\.0\.self_attn\.in_proj_weight",
    (
        (r"^(?:.+\.)?layers\.(\d+)\.self_attn\.in_proj_", r"blocks.\1.attn.qkv."),
        (r"^(?:.+\.)?layers\.(\d+)\.self_attn\.out_proj\.", r"blocks.\1.attn.proj."),
        (r"^(?:.+\.)?layers\.(\d+)\.linear([12])\.", r"blocks.\1.mlp.fc\2."),
        (r"^(?:.+\.)?layers\.(\d+)\.norm([12])\.", r"blocks.\1.norm\2."),
        (r"^\w*(?:encoder|transformer)\.norm\.", "norm."),
        (r"^(?:cls|class)_token$|^cls$", "cls_token"),
        (r"^pos(?:itional)?_embed(?:ding)?s?$", "pos_embed"),
        (r"^(?:patch_embed(?:ding)?|conv_proj)\.(?:proj\.)?", "patch_embed.proj."),
    ),
    {"norm_eps": 1e-5, "qkv_order": "3hd"},
)
_MMPRETRAIN: Final = Layout(
    "mmpretrain",
    r"layers\.0\.ffn\.layers\.0\.0\.weight",
    (
        (r"^layers\.(\d+)\.ln([12])\.", r"blocks.\1.norm\2."),
        (r"^layers\.(\d+)\.attn\.", r"blocks.\1.attn."),
        (r"^layers\.(\d+)\.ffn\.layers\.0\.0\.", r"blocks.\1.mlp.fc1."),
        (r"^layers\.(\d+)\.ffn\.layers\.1\.", r"blocks.\1.mlp.fc2."),
        (r"^ln1\.", "norm."),
        (r"^patch_embed\.projection\.", "patch_embed.proj."),
        (r"^head\.layers\.head\.", "head."),
    ),
    _HABITS,
)
_TIMM: Final = Layout(
    "timm", r"blocks\.\d+\.attn\.(qkv|q_proj|q)\.weight", (), {"qkv_order": "3hd"}
)
LAYOUTS: Final = (_VIT_PYTORCH, _TRANSFORMERS, _TORCHVISION, _TORCH, _MMPRETRAIN, _TIMM)

# Names of libraries whose folders are read, but not their files alone; and what to give.
_FOLDERS: Final = {
    r"visual\.(conv1\.weight|trunk\.patch_embed\.proj\.weight|class_embedding)": (
        "names of open_clip: give its folder, where it is called open_clip_pytorch_model.bin or "
        f"open_clip_model.safetensors, together with {OPEN_CLIP_CONFIG}: json.dump({{'model_cfg': "
        "open_clip.get_model_config(NAME), 'preprocess_cfg': model.visual.preprocess_cfg}, FILE)"
    ),
    r"(\w+\.)*encoder\.layers?\.0\.(norm1|layer_norm1)\.weight": (
        "names of transformers: give the folder that save_pretrained writes for the model, with "
        f"{CONFIG_FILE}, which says more than the names of this class"
    ),
}


def in_layout(tensors: Mapping[str, Tensor], files: Files) -> tuple[Layout, dict[str, Tensor]]:
    """Return the layout of a state dict, and its tensors under the model's names.

    Raises:
        CheckpointError: the layout is not known.
    """
    where = files.title
    layout = _layout_of(tensors, where)
    native = renamed(tensors, layout.rules, where)
    if "register_tokens" in native:
        native = _with_registers(native, where)
    if "storage_tokens" in native:
        native = _of_dinov3(native)
    habits = dict(layout.habits)
    if layout is _VIT_PYTORCH:
        habits |= _vit_pytorch_habits(native, tensors)
    join_parts(native)
    if "cls_token" in native and not native["cls_token"].numel():
        del native["cls_token"]
    for name in ("cls_token", "pos_embed"):
        if name in native and native[name].ndim == 2:
            native[name] = native[name].unsqueeze(0)
    _copy_shared_table(native)
    native = with_head(native, files, stored_names(tensors, layout.rules))
    if _reads_mean(native):
        habits["global_pool"] = "cls_mean"
    return layout._replace(habits=habits), native


def _layout_of(tensors: Mapping[str, Tensor], where: str) -> Layout:
    for layout in LAYOUTS:
        if any(re.fullmatch(layout.marker, name) for name in tensors):
            return layout
    for pattern, advice in _FOLDERS.items():
        if any(re.fullmatch(pattern, name) for name in tensors):
            raise CheckpointError(f"{where}: {advice}")
    _refuse_beside(tensors, where)
    examples: dict[str, str] = {}
    for name in tensors:
        examples.setdefault(name.partition(".")[0], name)
    shown = ", ".join(repr(name)[:80] for name in list(examples.values())[:4])
    known = ", ".join(layout.name for layout in LAYOUTS)
    raise CheckpointError(
        f"{where}: names of a layout that is not known (known are {known}), such as {shown}: a "
        "file of VIT_KEYS says which tensor of the model each is; for a network of timm, name it "
        "with VIT_ARCHITECTURE"
    )


def _refuse_beside(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse further tensors in the file of a network whose names begin with its own name."""
    for layout in LAYOUTS:
        pattern = re.compile(rf"(.*\.)?(\w+)\.({layout.marker})")
        matches = {match[2]: match for match in map(pattern.fullmatch, tensors) if match}
        if len(matches) != 1:
            continue  # several are the stages of another network, such as a Swin Transformer
        [match] = matches.values()
        others = [name for name in tensors if f".{match[2]}." not in f".{name}"]
        others.sort(key=advice_on_effect, reverse=True)
        if others:
            # Without its outer parts, a name such as `model` can be that of the whole file.
            network = f"{match[1] or ''}{match[2]}"
            other = others[0]
            raise CheckpointError(
                f"{where}: the network is called {network!r:.100}, and {other!r:.100} is not a "
                f"part of it: {_advice_beside(tensors, others)}"
                f'save the file without, or write weights = "{network:.100}" into the '
                "file of --keys FILE (VIT_KEYS)"
            )


def _advice_beside(tensors: Mapping[str, Tensor], others: Sequence[str]) -> str:
    """Return what tensors beside a network are, if they are statistics or a head of its own."""
    effect = advice_on_effect(others[0])
    if effect:
        return f"{effect}: "
    layers = [name for name in others if tensors[name].ndim == 2]
    if len(layers) < 2:
        return ""
    return (
        f"if {layers[0]!r:.100} to {layers[-1]!r:.100} are its head, the head has several layers, "
        "and a linear layer alone is read: fit a head on the backbone alone, with num_classes=0, "
        "by vitserve train --probe --from FOLDER; for the backbone alone, "
    )


def _reads_mean(native: Mapping[str, Tensor]) -> bool:
    """Return whether the head reads CLS and the mean of the patches, as DINOv2's classifiers."""
    head = native.get("head.weight")
    norm = native.get("blocks.0.norm1.weight")
    if head is None or norm is None or head.ndim != 2 or norm.ndim != 1:
        return False
    return head.shape[1] == 2 * len(norm)


def _vit_pytorch_habits(
    native: Mapping[str, Tensor], names: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the habits of the models of vit-pytorch that have these tensors."""
    token = native.get("cls_token")
    is_absent = token is None or not token.numel()
    habits: dict[str, Any] = {}
    # Its models of before 2025 have a token [1, 1, D] whichever way they pool.
    if token is None or token.ndim == 2:
        habits["global_pool"] = "avg" if is_absent else "token"
    # In SimpleViT the projection is a single layer, without a bias.
    if any(name.endswith(".to_out.weight") for name in names):
        habits["proj_bias"] = False
    if is_absent:
        habits["class_token"] = False
    if is_absent and "pos_embed" not in native:
        habits["pos_embed"] = "sincos2d"
    if "fc_norm.weight" in native:
        habits["fc_norm"] = True
    return habits


def _copy_shared_table(tensors: dict[str, Tensor]) -> None:
    """Give each block the table that all share, in place, if no block has its own (BEiT)."""
    table = "relative_position_bias_table"
    shared = f"rel_pos_bias.{table}"
    if shared not in tensors or any(name.endswith(f".attn.{table}") for name in tensors):
        return
    blocks = {name.split(".")[1] for name in tensors if re.match(r"blocks\.\d+\.", name)}
    tensors |= dict.fromkeys((f"blocks.{block}.attn.{table}" for block in blocks), tensors[shared])
    del tensors[shared]


def _of_dinov3(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of DINOv3's own files under timm's names, without a bias of keys.

    A bias of zeros is left out, because half of timm's architectures lack it.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".attn.qkv.bias"):
            queries, keys, values = tensor.chunk(3)
            bias = torch.cat((queries, torch.zeros_like(keys), values))
            if bias.any():
                result[name] = bias
        elif not name.endswith((".periods", ".bias_mask")):
            result["reg_token" if name == "storage_tokens" else name] = tensor
    return result


def _with_registers(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors of a DINOv2 model with registers as timm has them.

    DINOv2 gives a position to the CLS token but not to registers. timm's model gives neither one,
    so the position of the CLS token is added to the token.
    """
    registers = tuple(tensors["register_tokens"].shape)
    positions = tuple(tensors["pos_embed"].shape) if "pos_embed" in tensors else ()
    if len(registers) != 3 or len(positions) != 3 or positions[1] < 2:
        raise CheckpointError(
            f"{where}: register_tokens has shape {list(registers)}, pos_embed has shape "
            f"{list(positions)}: expected [1, tokens, width]"
        )
    width = positions[2]
    table = take_tensor(tensors, "pos_embed", (1, positions[1], width), where)
    tensors["reg_token"] = take_tensor(tensors, "register_tokens", (1, registers[1], width), where)
    tensors["cls_token"] = take_tensor(tensors, "cls_token", (1, 1, width), where) + table[:, :1]
    return tensors | {"pos_embed": table[:, 1:]}
