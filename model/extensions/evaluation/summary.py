"""The summary of a checkpoint for people: family, sizes, tokens, pooling, preprocessing, memory."""

import json
import math
from importlib.metadata import version

from model.checkpoint.checkpoint import Checkpoint
from model.config import LibraryConfig, NetworkConfig, ViTConfig
from model.heads import SOFTMAX
from model.network.library import meta_network
from model.network.vit import count_parameters


def summarise(checkpoint: Checkpoint) -> dict[str, str]:
    """Return headings and what was understood of a checkpoint, in the order to print them."""
    config, preprocess = checkpoint.config, checkpoint.preprocess
    parameters = count_parameters(meta_network(config))
    rows = {
        "name": checkpoint.name,
        "source": checkpoint.source
        + (f" (commit {checkpoint.revision})" if checkpoint.revision else ""),
        "content": checkpoint.content,
        "format": checkpoint.format,
        "family": checkpoint.architecture,
        "input": f"{_by(config.image_size)} px, {config.in_channels} channel{'s' if config.in_channels > 1 else ''}",
        **(_transformer(config) if isinstance(config, ViTConfig) else _library(config)),
        "preprocessing": f"{preprocess.resize} to {_by(preprocess.resize_size)}, {preprocess.interpolation}, "
        f"centre crop {_by(preprocess.size)}",
        "mean, std": f"{_list(preprocess.mean)}, {_list(preprocess.std)}",
        # Quoted, as the names of ImageNet's classes have commas themselves.
        "labels": f"{len(checkpoint.labels):,}: {json.dumps(checkpoint.labels[:3], ensure_ascii=False)[1:-1]}"
        + (", …" if len(checkpoint.labels) > 3 else "")
        if checkpoint.labels
        else "none"
        + (": set VIT_LABELS, or send labels= with a request" if checkpoint.zero_shot else ""),
        "scores": f"{'sigmoid' if checkpoint.multi_label or config.num_classes == 1 else 'softmax'}"
        f"{' of scaled cosines' if isinstance(config, ViTConfig) and config.normalized_head else ''}, "
        f"temperature {checkpoint.temperature:g}"
        + (
            f", power {checkpoint.form.power:g}, crowding {checkpoint.form.crowding:g}"
            if checkpoint.form != SOFTMAX
            else ""
        )
        if config.num_classes
        else "of the labels of a request"
        if checkpoint.zero_shot
        else "none: no classification head; /embed serves it",
        "parameters": f"{parameters:,}",
        "memory": f"{_mebibytes(4 * parameters)} in float32, {_mebibytes(2 * parameters)} in bfloat16 or float16",
    }
    if checkpoint.zero_shot is not None:
        rows["text tower"] = (
            f"labels stand in {json.dumps(checkpoint.zero_shot.templates[0], ensure_ascii=False)}"
        )
    if checkpoint.calibration is not None:
        rows["calibrated"] = (
            f"on {len(checkpoint.calibration.scores):,} pictures of {checkpoint.calibration.data}"
        )
    if checkpoint.assumed:
        rows["assumed"] = "; ".join(checkpoint.assumed)
    if checkpoint.notes:
        rows["notes"] = "; ".join(checkpoint.notes)
    return rows


def _transformer(config: ViTConfig) -> dict[str, str]:
    """Return what the tokens are, and each field of the architecture that is not as in the ViT
    paper.
    """
    settings = config.model_dump(
        exclude_defaults=True, exclude={"image_size", "in_channels", "num_classes"}
    )
    prefix = (
        ("CLS", config.class_token),
        ("distillation", config.distillation_token),
        ("registers", config.registers),
    )
    names = [name for name, present in prefix if present]
    return {
        "tokens": f"{config.tokens}: {' + '.join([*names, f'{math.prod(config.grid)} patches'])}",
        "architecture": ", ".join(
            f"{name}={json.dumps(value)}" for name, value in settings.items()
        ),
        "pooling": config.pool,
        "attention maps": {
            "cls": "the CLS token's row",
            "patch_mean": "the mean over all patches' rows",
            "pool_query": "the pooling query's row (last layer); the mean over all patches' rows (earlier layers)",
        }[config.attention_source],
    }


def _library(config: NetworkConfig) -> dict[str, str]:
    assert isinstance(config, LibraryConfig)
    arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in config.arguments.items())
    return {
        "runtime": f"{config.library} {version(config.library)}"
        + (f", with {arguments}" if arguments else ""),
        "head": f"reads {config.width} numbers",
        "attention maps": "none",
    }


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
