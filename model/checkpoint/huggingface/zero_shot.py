"""CLIPModel and SiglipModel whole, SigLIP 2 of one resolution among them: labels are texts, and make the head.

The image's tower pools the CLS token and projects it (CLIP), or pools by attention (SigLIP). Features of the labels,
times the scale, are the head's rows, so that the model is served as any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from model.checkpoint.files import Files
from model.checkpoint.huggingface import clip, siglip
from model.checkpoint.huggingface.text_tower import PREFIXES, TextEmbedder, tower_config
from model.checkpoint.local_files import read_text_file
from model.checkpoint.options import CheckpointOptions, read_labels
from model.checkpoint.tensors import as_float32
from model.config import ViTConfig
from model.errors import CheckpointError, InputError
from model.heads import DEFAULT_TEMPLATE, MAX_TEMPLATES, ZeroShot, checked_texts, is_list, parse_labels

_MAX_LABELS: Final = 100_000
_POOL: Final = "vision_model.head"
_SCALES: Final = ("logit_scale", "logit_bias")


class Whole(clip.VisionTower):
    """A class with both towers; its configuration of the image's tower is nested, in old files twice."""

    def vit_config(self, json: Mapping[str, Any], classes: int) -> ViTConfig:
        """Return the architecture of the image's tower with a head; see `Family.vit_config`."""
        config = super().vit_config({"vision_config": tower_config(json, "vision")}, classes)
        if "projection" not in self.names:
            return config
        width = json.get("projection_dim", 512)
        return ViTConfig.model_validate(config.model_dump() | {"projection_width": width})

    def hub_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the pooling's one projection split into the query's, and the keys' and values'."""
        named = dict(tensors)
        for kind in ("weight", "bias"):
            joined = named.get(f"{_POOL}.attention.in_proj_{kind}")
            if joined is not None and joined.ndim and joined.shape[0] % 3 == 0:
                q, k, v = named.pop(f"{_POOL}.attention.in_proj_{kind}").chunk(3)
                named |= {f"{_POOL}.attention.q.{kind}": q, f"{_POOL}.attention.kv.{kind}": torch.cat((k, v))}
        return named


CLIP: Final = Whole(
    class_name="CLIPModel",
    model_type="clip",
    image_processor=clip.FAMILY.image_processor,
    names={**clip.FAMILY.names, "projection": "visual_projection"},
    unused=r"vision_model\.embeddings\.position_ids",
    architecture={"patch_bias": False, "norm_before_blocks": True, "normalized_head": True},
    vision_defaults=clip.FAMILY.vision_defaults,
)

SIGLIP: Final = Whole(
    class_name="SiglipModel",
    model_type="siglip",
    image_processor=siglip.FAMILY.image_processor,
    names={
        **siglip.FAMILY.names,
        "attn_pool.latent": f"{_POOL}.probe",
        "attn_pool.q": f"{_POOL}.attention.q",
        "attn_pool.kv": f"{_POOL}.attention.kv",
        "attn_pool.proj": f"{_POOL}.attention.out_proj",
        "attn_pool.norm": f"{_POOL}.layernorm",
        "attn_pool.mlp.fc1": f"{_POOL}.mlp.fc1",
        "attn_pool.mlp.fc2": f"{_POOL}.mlp.fc2",
    },
    unused=r"vision_model\.embeddings\.position_ids",
    architecture={"class_token": False, "pool": "attention", "normalized_head": True},
    vision_defaults=siglip.FAMILY.vision_defaults,
)


class Texts(NamedTuple):
    """What a whole checkpoint has beside the image's tower.

    Attributes:
        tensors: of the image's tower, with a head that is the labels' features if there are any.
    """

    tensors: dict[str, Tensor]
    labels: tuple[str, ...]
    zero_shot: ZeroShot
    tower: TextEmbedder


def read_texts(family: Whole, files: Files, options: CheckpointOptions) -> Texts:
    """Read the text tower of a whole checkpoint, and make a head of the operator's labels.

    Raises:
        CheckpointError: as `TextEmbedder`, or the labels, templates or scales are not what they should be.
    """
    assert files.config is not None
    templates = _templates(options.templates)
    labels = _labels(options.labels)
    tensors = dict(files.tensors())
    of_texts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(PREFIXES)}
    of_texts.pop("text_model.embeddings.position_ids", None)
    width = family.vit_config(files.config, 1).projection_width or family.vit_config(files.config, 1).width
    tower = TextEmbedder(files.config, of_texts, width, files)
    independent = family is SIGLIP
    scales = [_scalar(tensors, name, files.place) for name in _SCALES[: 1 + independent]]
    zero_shot = ZeroShot(math.exp(scales[0]), scales[1] if independent else 0.0, independent, templates)
    if labels:
        features = torch.from_numpy(zero_shot.label_features(tower(zero_shot.prompts(labels))))
        tensors["classifier.weight"] = features * zero_shot.scale
        tensors["classifier.bias"] = torch.full((len(labels),), zero_shot.bias)
    return Texts(tensors, labels, zero_shot, tower)


def _scalar(tensors: dict[str, Tensor], name: str, where: str) -> float:
    if name not in tensors:
        raise CheckpointError(f"{where}: missing key {name!r}")
    tensor = as_float32(tensors.pop(name), name, where)
    if tensor.numel() != 1 or not abs(float(tensor)) < 50:
        raise CheckpointError(f"{where}: {name}: expected one number below 50")
    return float(tensor)


def _labels(labels: str | None) -> tuple[str, ...]:
    """Return what VIT_LABELS says; without it, or with numbers, which say nothing, a request brings its labels."""
    if labels in (None, "numbers"):
        return ()
    if not is_list(labels):
        return read_labels(labels, None)
    try:
        return parse_labels(labels, "VIT_LABELS", most=_MAX_LABELS)
    except InputError as error:
        raise CheckpointError(str(error)) from None


def _templates(templates: str | None) -> tuple[str, ...]:
    """Return what VIT_TEMPLATES says: one template, or those of a file, one a line."""
    if templates is None:
        return (DEFAULT_TEMPLATE,)
    lines = [templates]
    if "{}" not in templates:
        path = Path(templates).expanduser()
        try:
            lines = [line for line in read_text_file(path, str(path)).decode().splitlines() if line.strip()]
        except (CheckpointError, UnicodeDecodeError):
            raise CheckpointError(
                f"VIT_TEMPLATES {templates!r:.100}: neither a template with {{}} nor a file"
            ) from None
    try:
        lines = list(checked_texts(lines, "VIT_TEMPLATES", MAX_TEMPLATES))
    except InputError as error:
        raise CheckpointError(str(error)) from None
    for line in lines:
        if line.count("{}") != 1:
            raise CheckpointError(f"VIT_TEMPLATES: {line!r:.100}: expected {{}} once, where the label stands")
    return tuple(lines)
