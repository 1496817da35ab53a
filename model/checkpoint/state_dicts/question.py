"""What is asked of whoever serves a state dict: all that neither its tensors nor a setting say, with a command."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from model.checkpoint.files import SingleFile
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.state_dicts.layout import edge_of_flat
from model.checkpoint.timm import preprocess_of
from model.checkpoint.timm_architectures import architectures
from model.errors import CheckpointError


def timms_name(tensors: Mapping[str, Tensor], asked: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return timm's name of an architecture that has these sizes and parts, and what is asked of it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    patch = shapes["patch_embed.proj.weight"]
    usual = {"num_heads", "norm_order", "act_layer", "norm_eps", "global_pool", "num_classes"}
    parts = {
        "ls1.gamma",
        "q_norm",
        "norm_pre",
        "pre_logits",
        "dist_token",
        "reg_token",
        "norm_in",
        "attn_pool",
        "backbone",
    }
    if (
        asked.keys() <= usual
        and len(patch) == 4
        and patch[1] <= 4
        and not any(part in name for name in shapes for part in parts)
    ):
        for size in ("tiny", "small", "base", "large"):
            own = architectures().get(f"vit_{size}_patch{patch[3]}_224", {})
            hidden = shapes["blocks.0.mlp.fc1.weight"][0]
            if (own.get("embed_dim"), own.get("depth"), 4 * patch[0]) == (patch[0], depth, hidden):
                return f"vit_{size}_patch{patch[3]}_224", {key: asked[key] for key in asked if key == "num_classes"}
    return None


def question(
    files: SingleFile,
    options: CheckpointOptions,
    name: str,
    given: dict[str, Any],
    asked: dict[str, Any],
    tensors: Mapping[str, Tensor],
    published: Mapping[str, Any] | None = None,
) -> CheckpointError:
    """Return the error that asks for all that is missing at once, with the command that would serve the file.

    Args:
        published: what timm says of the architecture's first weights, if its own code runs it.
    """
    arguments = ",".join([name, *(f"{key}={_written(value)}" for key, value in {**given, **asked}.items())])
    command = ["vitserve", "serve", "--checkpoint", files.source, "--architecture", arguments]
    missing = [*asked] or ([] if options.architecture else ["architecture"])
    if options.preprocess is None:
        missing.append("preprocessing")
    has_head = published is not None or "head.weight" in tensors
    needs_labels = has_head and options.labels is None and files.labels is None
    if needs_labels:
        missing.append("labels")
    command += ["--preprocess", options.preprocess or _preprocess(tensors, published)]
    command += ["--labels", options.labels or "numbers"] if needs_labels or options.labels else []
    for flag, value in (("--weights", options.weights), ("--keys", options.keys)):
        command += [flag, value] if value else []
    hints = []
    if "num_heads" in asked:
        wide = tensors["blocks.0.attn.qkv.weight"].shape[0] // 3
        hints.append(f"N is the number of heads, a divisor of {wide}")
    usual = [key for key in asked if key not in ("num_heads", "num_classes")]
    if usual:
        hints.append(f"what stands here for {', '.join(usual)} is only usual: see what its code has")
    if "norm_order" in asked:
        hints.append("norm_order is pre, post or res_post")
    if "num_classes" in asked:
        hints.append(
            "it has no classification head: num_classes=0 serves its embeddings alone; the file head.pth of its folder "
            "is read with it"
        )
    if "qkv_order" in asked:
        hints.append("qkv_order is how its code counts rows: 3 of queries, keys, values; h heads; d numbers of one")
    if "pos_embed" in asked:
        hints.append("rotary positions leave no tensor: a network that has them needs timm's name")
    if options.preprocess is None:
        hints.append(
            "MEAN and STD are those of its training, for pixels of 0...1"
            if published is None
            else "this preprocessing is that of timm's first weights of the name, and yours may have another"
        )
    hint = f" ({'; '.join(hints)})" if hints else ""
    return CheckpointError(
        f"{files.place}: no file says its {', '.join(missing)}: with the values of its training code, this serves it: "
        f"{shlex.join(command)}{hint}"
    )


def _preprocess(tensors: Mapping[str, Tensor], published: Mapping[str, Any] | None) -> str:
    if published is not None:
        return preprocess_of(published, "timm").model_dump_json(exclude_defaults=True)
    stem = tensors.get("patch_embed.backbone.0.weight")
    shape = tuple(tensors["patch_embed.proj.weight"].shape if stem is None else stem.shape)
    channels, edge = (shape[1], shape[2]) if len(shape) == 4 else edge_of_flat(shape[1], "patch_embed.proj.weight")
    tokens = tuple(tensors["pos_embed"].shape)[1] if "pos_embed" in tensors and stem is None else 0
    pixels = math.isqrt(tokens) * edge or "SIZE"
    mean, deviation = (", ".join([word] * channels) for word in ("MEAN", "STD"))
    return (
        f'{{"size": [{pixels}, {pixels}], "resize": "squash", "resize_size": [{pixels}, {pixels}], '
        f'"interpolation": "bilinear", "mean": [{mean}], "std": [{deviation}]}}'
    )


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
