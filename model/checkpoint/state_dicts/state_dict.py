"""Plain state dicts: under timm's names, those of Facebook's DeiT, MAE and DINOv2, or any that can be recognised.

The operator names the architecture (`VIT_ARCHITECTURE`): a timm name, optionally followed by arguments that differ
(`vit_base_patch16_224,global_pool=avg`), with which the tensors are compared; or `vit`, whose sizes are the tensors'.
Shapes do not tell the number of heads, the place of the norms, the activation and the pooling, and an absent tensor
may be one that was lost. All that is neither told nor stated is asked for at once, with the command that states it.
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
from model.checkpoint.options import CheckpointOptions, indexed_labels
from model.checkpoint.refusals import validating
from model.checkpoint.state_dicts.home_made import Recognised, recognise
from model.checkpoint.state_dicts.key_map import mapped
from model.checkpoint.state_dicts.layout import (
    completed,
    edge_of_flat,
    in_order,
    names_a_fused_projection,
    with_patches,
    with_registers,
)
from model.checkpoint.state_dicts.question import question, timms_name
from model.checkpoint.state_dicts.torchvision import MODELS, published_preset
from model.checkpoint.tensors import TensorSource, renamed
from model.checkpoint.timm_architectures import (
    TimmArguments,
    architecture_arguments,
    architectures,
    native_names,
    parse_arguments,
    runs_in_library,
)
from model.checkpoint.timm_eva import EvaArguments
from model.config import ConvolutionalStem, PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network import library

FORMAT: Final = "state_dict"

OWN: Final = "vit"
"""The architecture whose sizes are those of the tensors."""
_INFERRED: Final = frozenset({"img_size", "num_classes", "in_chans", "head_hidden"})
_SIZES: Final = frozenset({"embed_dim", "depth", "num_heads", "mlp_ratio", "final_norm"})
_RENAMES: Final = (
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),  # DeiT III
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),  # DINOv2
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
)
"""From the original repositories' names to timm's, as its `checkpoint_filter_fn` does."""
_TIMMS: Final = re.compile(r"patch_embed\.(proj\.weight|backbone\..*)|blocks\.0\.attn\.qkv\..*|head\.weight")
_NEEDED: Final = tuple(
    re.escape(f"{name}.weight")
    for name in ("head", "patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2")
)
_DIMENSIONS: Final = {
    **dict.fromkeys(_NEEDED, (2,)),
    _NEEDED[1]: (2, 4),
    r"patch_embed\.backbone\.\d\.weight": (4,),
    r"pre_logits\.fc\.weight": (2,),
    r"cls_token|dist_token|reg_token|pos_embed": (3,),
    r"blocks\.0\.attn\.q_norm\.weight": (1,),
}
"""How many dimensions the tensors have from which sizes are read."""
_UNSAID: Final = ("num_heads", "norm_order", "act_layer", "norm_eps", "global_pool")
"""Arguments whose values no tensor tells."""
_PRESENT: Final = {
    "class_token": ("cls_token",),
    "patch_bias": ("patch_embed.proj.bias",),
    "qkv_bias": ("blocks.0.attn.qkv.bias", "blocks.0.attn.q_bias"),
    "proj_bias": ("blocks.0.attn.proj.bias",),
    "final_norm": ("norm.weight", "fc_norm.weight"),
}
"""Arguments that are false where a network has none of these tensors."""


def recognises(files: Files) -> bool:
    """Return whether it is a single file; readers that know it better are asked first."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() != ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a state dict."""
    assert isinstance(files, SingleFile)
    named = options.architecture if options.architecture in {name for name, _ in MODELS.values()} else None
    name, given = parse_architecture(options.architecture) if options.architecture and not named else ("", {})
    if name not in ("", OWN) and runs_in_library(name, "VIT_ARCHITECTURE"):
        return _of_library(files, options, name, given)
    return _of_vit(files, options, named, name, given)


def _of_vit(
    files: SingleFile, options: CheckpointOptions, named: str | None, name: str, given: dict[str, Any]
) -> Checkpoint:
    """Read the state dict of a Vision Transformer; `named` is torchvision's name, and `name` timm's or our own."""
    where, stored = files.place, files.tensors()
    tensors = renamed(mapped(stored, options.keys), _RENAMES)
    fused_by_map = names_a_fused_projection(stored, tensors)
    if "register_tokens" in tensors:
        tensors = with_registers(tensors, where)
    tensors = _of_eva(name, given, tensors, where)
    has_pooler = any("pooler.dense." in key for key in tensors)
    if has_pooler and not given.get("pooler"):
        tensors = {key: tensor for key, tensor in tensors.items() if "pooler.dense." not in key}
    (tensors, told, habits, library), notes = _recognised(tensors, given.get("num_classes") == 0, where)
    if fused_by_map:
        habits.pop("qkv_order", None)
    if has_pooler:
        habits["head_act"] = "tanh"
    _check_dimensions(tensors, where)
    has_head = "head.weight" in tensors
    told |= {"num_classes": len(tensors["head.weight"])} if has_head else {}
    label, assumed = "", tuple[str, ...]()
    if library == "torchvision" and has_head and not name:
        label, options, assumed = _released(files, options, tensors, habits)
        name = OWN if label else ""
    elif library == "timm" and name not in ("", OWN):
        habits["patch_order"] = "channels_first"  # as timm reads linear patches of models from before it had none
    if named not in (None, label):
        raise CheckpointError(f"{where}: is {f'a {label}' if label else 'none of torchvision'}, not a {named}")
    _check_agreement(told, given, name, where)
    stated = habits | told | given
    preprocess = options.preprocess_or(None, where) if options.preprocess else None
    asked, config = (
        _own(tensors, habits | told, given, preprocess, where)
        if name in ("", OWN)
        else _timms(name, stated, given, tensors, preprocess, where)
    )
    if has_pooler and "pooler" not in given:
        asked["pooler"] = False
    if not has_head and "num_classes" not in given:
        asked["num_classes"] = 0
    if not name:
        name, asked = (timms_name(tensors, asked) if library == "timm" else None) or (OWN, asked)
        raise question(files, options, name, given, asked, tensors)
    if asked or preprocess is None or (has_head and options.labels is None and files.labels is None):
        raise question(files, options, name, given, asked, tensors)
    assert config is not None
    labels = None if files.labels is None or not has_head else indexed_labels(files.labels, config.num_classes, where)
    shaped = in_order(with_patches(tensors, config, stated.get("patch_order")), config, stated["qkv_order"])
    if name == OWN:
        shaped = completed(shaped, config)
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=label or name,
        config=config,
        preprocess=preprocess,
        labels=options.labels_or(labels, config.num_classes, where),
        tensors=native_tensors(native_names(shaped, config), config, where),
        notes=(*files.notes, *notes),
        assumed=(*_assumed(config, told | given, habits, library, name), *assumed),
    )


def _of_library(files: SingleFile, options: CheckpointOptions, name: str, given: dict[str, Any]) -> Checkpoint:
    """Read the state dict of a network that timm's own code runs; its classes and channels are those of the file."""
    where, tensors, published = files.place, mapped(files.tensors(), options.keys), library.published(name)
    if options.preprocess is None or (options.labels is None and files.labels is None):
        raise question(files, options, name, given, {}, tensors, published)
    preprocess = options.preprocess_or(None, where)
    heads = published.get("classifier") or "head"
    head = f"{heads if isinstance(heads, str) else heads[0]}.weight"
    classes = (*TensorSource(tensors, where).shape(head), 0)[0]
    channels, fixed = len(preprocess.mean), bool(published.get("fixed_input_size"))
    with validating(where):
        config = library.library_config(name, given, classes, channels, preprocess.size, fixed_size=fixed)
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
    )


def _released(
    files: SingleFile, options: CheckpointOptions, tensors: Mapping[str, Tensor], habits: dict[str, Any]
) -> tuple[str, CheckpointOptions, tuple[str, ...]]:
    """Return torchvision's name of a model, the options with what is published of it, and what was assumed so.

    Its number of heads is added to the habits.
    """
    width, _, patch = tuple(tensors["patch_embed.proj.weight"].shape)[:3]
    depth = sum(name.endswith(".mlp.fc1.weight") for name in tensors)
    sizes = (width, patch, depth, len(tensors["blocks.0.mlp.fc1.weight"]))
    label, heads = MODELS.get(sizes, ("", None))
    habits |= {} if heads is None else {"num_heads": heads}
    preset = published_preset(files.file.name, label)
    options, assumed = options.with_published(files.file.name, preset, tensors["head.weight"].shape[0])
    return label, options, assumed


def _recognised(tensors: dict[str, Tensor], headless: bool, where: str) -> tuple[Recognised, tuple[str, ...]]:
    """Return tensors under the model's names, which are timm's, and notes of what was inferred for that.

    Args:
        headless: whether the network is stated to have no head.
    """
    timms = {match[0].partition(".")[0] for name in tensors if (match := _TIMMS.fullmatch(name))}
    if len(timms) == 3 - headless:
        return Recognised(tensors, {}, {"qkv_order": "3hd"}, "timm"), ()
    before = {id(tensor): name for name, tensor in tensors.items()}
    names = recognise(tensors, where)
    pairs = [f"{old} is {name}" for name, t in names.tensors.items() if (old := before.get(id(t), name)) != name]
    if names.tensors.keys() == tensors.keys():
        return names._replace(library="timm"), ()
    whose = f", as {names.library} has them" if names.library else ""
    shown = f": {', '.join(pairs[:3])}, …" if pairs else ""  # what was joined or split has no one name
    return names, (f"names inferred{whose}{shown}",)


def _of_eva(name: str, given: dict[str, Any], tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors, those of timm's `Eva` class as its other classes have them."""
    if architectures().get(name, {}).get("family") != "eva":
        return tensors
    with validating(where):
        return EvaArguments.model_validate(architectures()[name] | given | {"img_size": 1, "num_classes": 1}).renamed(
            tensors
        )


def _check_dimensions(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors from which sizes are read, if they are absent, empty or of too many or too few dimensions."""
    for pattern, dimensions in _DIMENSIONS.items():
        found = [name for name in tensors if re.fullmatch(pattern, name)]
        if not found and pattern in _NEEDED[1:]:
            raise CheckpointError(f"{where}: missing key {pattern.replace(chr(92), '')!r}")
        for name in found:
            shape = tuple(tensors[name].shape)
            if len(shape) not in dimensions or 0 in shape:
                wanted = " or ".join(map(str, dimensions))
                raise CheckpointError(
                    f"{where}: {name} has shape {list(shape)}, expected {wanted} dimensions that are not empty"
                )


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
        if key in _INFERRED and pair != "num_classes=0":
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


def _check_agreement(told: Mapping[str, Any], given: Mapping[str, Any], name: str, where: str) -> None:
    """Refuse an architecture that says another thing than the tensors tell."""
    own = {} if name in ("", OWN) or "embed_dim" in given else architecture_arguments(name)
    for key, value in told.items():
        said = given.get(key, own.get(key, value))
        if said != value:
            raise CheckpointError(f"{where}: its tensors tell {key}={value}, but VIT_ARCHITECTURE says {key}={said}")


def _timms(
    name: str,
    stated: dict[str, Any],
    given: dict[str, Any],
    tensors: Mapping[str, Tensor],
    preprocess: PreprocessConfig | None,
    where: str,
) -> tuple[dict[str, Any], ViTConfig | None]:
    """Return what is to be asked of a network under timm's name, and its configuration once nothing is."""
    own = architecture_arguments(name)
    stored = TensorSource(tensors, where)
    known = EvaArguments.model_fields if own.get("family") == "eva" else TimmArguments.model_fields
    arguments = own | {key: stated[key] for key in stated if key in given or key in known} | _head(stored)
    with validating(where):
        # An image of one patch always fits, and tells everything that does not depend on the size.
        fields = parse_arguments(arguments | {"img_size": 1})
        probe = fields.model_copy(update={"img_size": (fields.patch_edge, fields.patch_edge)}).vit_config()
    depth = len({n.split(".")[1] for n in tensors if n.startswith("blocks.")})
    width = stored.shape("blocks.0.attn.qkv.weight")[1]
    if depth != probe.depth:
        raise CheckpointError(f"{where}: has {depth} blocks, {name} has {probe.depth}")
    if width != probe.width:
        raise CheckpointError(f"{where}: is {width} wide, {name} is {probe.width}")
    channels = _channels(stored, probe, name)
    asked: dict[str, Any] = {}
    if given.get("embed_dim", own["embed_dim"]) != own["embed_dim"] and "num_heads" not in stated:
        asked["num_heads"] = "N"
    if given.keys() & _SIZES and "norm_order" not in stated and isinstance(fields, TimmArguments):
        asked["norm_order"] = "pre"
    if "qkv_order" not in stated:
        asked["qkv_order"] = "3hd"
    if len(tensors["patch_embed.proj.weight"].shape) == 2 and channels > 1 and "patch_order" not in stated:
        asked["patch_order"] = "channels_last"
    if arguments.get("head_hidden") and "head_act" not in stated:
        asked["head_act"] = "tanh"
    if asked or preprocess is None:
        return asked, None
    rows, columns = _grid(
        stored, probe.patch_size, preprocess, probe.prefix_tokens if probe.position_prefix else 0, probe
    )
    with validating(where):
        size = _image_size((rows, columns), probe.patch_size, preprocess)
        return {}, parse_arguments(arguments | {"img_size": size, "in_chans": channels}).vit_config()


def _own(
    tensors: Mapping[str, Tensor],
    told: dict[str, Any],
    given: dict[str, Any],
    preprocess: PreprocessConfig | None,
    where: str,
) -> tuple[dict[str, Any], ViTConfig | None]:
    """Return what is to be asked of a network of its own sizes, and its configuration once nothing is."""
    stored = TensorSource(tensors, where)
    present = {key: any(name in tensors for name in names) for key, names in _PRESENT.items()}
    for key, value in given.items():
        if value is False and present.get(key):
            raise CheckpointError(f"{where}: VIT_ARCHITECTURE has {key}=false, but {_PRESENT[key][0]!r} is there")
    stated = {key: value for key, value in told.items() if not present.get(key)} | given
    wide, deep = stored.shape("blocks.0.attn.qkv.weight"), stored.shape("blocks.0.mlp.fc2.weight")
    patch = stored.shape("patch_embed.proj.weight")
    width, gates = wide[1], stored.shape("blocks.0.mlp.fc1.weight")[0] // max(deep[1], 1)
    channels, edge = (patch[1], patch[2]) if len(patch) == 4 else edge_of_flat(patch[1], where)
    stem = _stem(tensors, stated.get("conv_stem"), where)
    if stem is not None:
        channels, edge = stored.shape("patch_embed.backbone.0.weight")[1], edge * stem.stride
    if "blocks.0.attn.q_norm.weight" in tensors and stored.shape("blocks.0.attn.q_norm.weight")[0]:
        stated.setdefault("num_heads", wide[0] // 3 // stored.shape("blocks.0.attn.q_norm.weight")[0])
    prefix = ("cls_token", "dist_token", "reg_token")
    tokens = sum(stored.shape(name)[1] for name in prefix if name in tensors)

    usual = _usual(tensors, stated, present, gates, bool(tokens))
    if stem is not None and not stated.get("conv_stem"):
        usual["conv_stem"] = "-relu-".join([*["2"] * len(stem.widths), "1"])
    if len(patch) == 2 and channels > 1:
        usual["patch_order"] = "channels_last"
    asked = {key: value for key, value in usual.items() if key not in stated}
    if asked or preprocess is None:
        return asked, None

    if "pos_embed" in tensors:
        stated["pos_embed"] = "learn"
    grid = tuple(length // edge for length in preprocess.size)
    positions = stored.shape("pos_embed")[1] if "pos_embed" in tensors else 0
    over_prefix = (positions != math.prod(grid) and math.isqrt(positions) ** 2 != positions) or not tokens
    rows, columns = _grid(stored, edge, preprocess, tokens if over_prefix else 0)
    sizes = {"embed_dim": width, "depth": len({n.split(".")[1] for n in tensors if n.startswith("blocks.")})}
    sizes |= {"patch_size": edge, "in_chans": channels, "reg_tokens": 0, "no_embed_class": not over_prefix}
    fields = {
        "conv_stem": stem,
        "mlp": "swiglu" if gates == 2 else "plain",
        "mlp_width": deep[1],
        "attention_width": None if wide[0] == 3 * width else wide[0] // 3,
        "qk_norm": "blocks.0.attn.q_norm.weight" in tensors,
        "attention_norm": "blocks.0.attn.norm.weight" in tensors,
        "mlp_norm": "blocks.0.mlp.norm.weight" in tensors,
        "relative_position_bias": any(re.search(r"\.relative_position_bias_table$|rel_pos\.mlp\.", n) for n in tensors),
        "projection_bias": "blocks.0.mlp.fc1.bias" in tensors,
        "layer_scale": "blocks.0.ls1.gamma" in tensors or "blocks.0.gamma_1" in tensors,
        "norm_before_blocks": "norm_pre.weight" in tensors,
        "patch_norms": "patch_embed.norm_in.weight" in tensors,
        "patch_embedding": "linear" if "patch_embed.norm_in.weight" in tensors else "convolution",
        "distillation_token": "dist_token" in tensors,
        "distillation_head": "head_dist.weight" in tensors,
        "registers": stored.shape("reg_token")[1] if "reg_token" in tensors else 0,
    }
    with validating(where):
        size = _image_size((rows, columns), edge, preprocess)
        # The number of heads has to divide the width of the attention, which may be another than that of the tokens.
        plain = TimmArguments.model_validate(stated | sizes | _head(stored) | {"img_size": size, "num_heads": 1})
        heads = TimmArguments.model_validate({"img_size": 1, "num_classes": 1, "num_heads": stated["num_heads"]})
        config = plain.vit_config().model_dump() | fields | {"heads": heads.num_heads}
        return {}, ViTConfig.model_validate(config)


def _usual(
    tensors: Mapping[str, Tensor], stated: Mapping[str, Any], present: Mapping[str, bool], gates: int, has_prefix: bool
) -> dict[str, Any]:
    """Return the arguments that have to be stated of a network, with what most networks of this kind have."""
    pool = stated.get("global_pool", "token" if present["class_token"] else "avg")
    usual = {"num_heads": "N", "norm_order": "pre", "act_layer": "silu" if gates == 2 else "gelu", "norm_eps": 1e-6}
    usual |= {"qkv_order": "3hd", "global_pool": pool} | dict.fromkeys(
        [key for key, is_present in present.items() if not is_present], False
    )
    if "pos_embed" not in tensors:
        usual["pos_embed"] = "none"
    if pool in ("avg", "avgmax", "max"):
        usual |= {} if not present["final_norm"] or "fc_norm.weight" in tensors else {"fc_norm": False}
        usual |= {"pool_include_prefix": False} if has_prefix else {}
    if "pre_logits.fc.weight" in tensors:
        usual["head_act"] = "tanh"
    return usual


def _stem(tensors: Mapping[str, Tensor], stated: Any, where: str) -> ConvolutionalStem | None:
    """Return the convolutions before the patches' own, whose strides and activations are as stated, else as usual."""
    shapes = [
        tuple(t.shape) for n, t in sorted(tensors.items()) if re.fullmatch(r"patch_embed\.backbone\.\d\.weight", n)
    ]
    if not shapes:
        return None
    words = str(stated).split("-") if stated else ["2", *["relu", "2"] * (len(shapes) - 1), "relu", "1"]
    strides, activations = words[::2], set(words[1::2])
    last = tuple(tensors["patch_embed.proj.weight"].shape)[2:]
    if len(words) != 2 * len(shapes) + 1 or len(activations) != 1 or not all(word.isdecimal() for word in strides):
        raise CheckpointError(
            f"{where}: conv_stem {stated!r:.100}: expected {len(shapes) + 1} strides, one activation between each two"
        )
    if stated and last != (int(strides[-1]), int(strides[-1])):
        raise CheckpointError(f"{where}: the last convolution of the stem is {list(last)}, not as large as its stride")
    edges = [shape[-1] for shape in shapes]
    if any(edge % 2 == 0 or edge < int(stride) for edge, stride in zip(edges, strides, strict=False)):
        raise CheckpointError(
            f"{where}: the padding of the stem is not known: kernels of {edges} have strides of {strides[:-1]}; only "
            "odd kernels that are no smaller than their strides are read, with half a kernel of padding"
        )
    with validating(where, "conv_stem "):
        return ConvolutionalStem(
            widths=tuple(shape[0] for shape in shapes),
            kernels=tuple(shape[-1] for shape in shapes),
            strides=tuple(int(stride) for stride in strides[:-1]),
            activation=activations.pop(),
        )


def _head(stored: TensorSource) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_classes": stored.shape("head.weight")[0] if "head.weight" in stored else 0}
    if "pre_logits.fc.weight" in stored:
        fields["head_hidden"] = stored.shape("pre_logits.fc.weight")[0]
    return fields


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


def _grid(
    stored: TensorSource, patch: int, preprocess: PreprocessConfig, prefix: int, probe: ViTConfig | None = None
) -> tuple[int, int]:
    """Return the position embedding's grid: the preprocessing's where it has as many patches, else a square."""
    rows, columns = (edge // patch for edge in preprocess.size)
    if "pos_embed" not in stored and (probe is None or probe.position_embedding == "none"):
        return rows, columns
    shape = stored.shape("pos_embed")
    count = shape[1] - prefix if len(shape) == 3 else 0
    if count == rows * columns:
        return rows, columns
    edge = math.isqrt(max(count, 0))
    if edge < 1 or edge * edge != count:
        raise CheckpointError(
            f"{stored.where}: pos_embed has shape {list(shape)}: with {prefix} prefix tokens "
            f"no square grid, and not the {rows}x{columns} of its preprocessing"
        )
    return edge, edge


def _image_size(grid: tuple[int, int], patch: int, preprocess: PreprocessConfig) -> tuple[int, int]:
    rows, columns = preprocess.size
    return preprocess.size if (rows // patch, columns // patch) == grid else (grid[0] * patch, grid[1] * patch)


def _assumed(
    config: ViTConfig, stated: Mapping[str, Any], habits: Mapping[str, Any], library: str, name: str
) -> tuple[str, ...]:
    """Return what no tensor says and was not stated either, with whose code has it so."""
    names = f"as {library} has it" if library else "as its names tell"
    pools = {"cls": "token", "mean": "avg", "mean_max": "avgmax", "attention": "map"}
    values = (config.heads, config.norm_order, config.activation, config.norm_eps, pools.get(config.pool, config.pool))
    return tuple(
        f"{key}={value}, {names if key in habits else f'as {name} has it'} (VIT_ARCHITECTURE)"
        for key, value in zip(_UNSAID, values, strict=True)
        if key not in stated
    )
