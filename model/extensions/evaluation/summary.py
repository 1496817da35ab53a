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
    """Return the lines of the summary by their headings, in order."""
    config = checkpoint.config
    preprocess = checkpoint.preprocess
    parameters = count_parameters(meta_network(config))
    source = checkpoint.source
    if checkpoint.revision:
        source += f" (commit {checkpoint.revision})"
    channels = "channel" if config.in_channels == 1 else "channels"
    rows = {
        "name": checkpoint.name,
        "source": source,
        "content": checkpoint.content,
        "format": checkpoint.format,
        "family": checkpoint.architecture,
        "input": f"{_by(config.image_size)} px, {config.in_channels} {channels}",
        **(_transformer(config) if isinstance(config, ViTConfig) else _library(config)),
        "preprocessing": (
            f"{preprocess.resize} to {_by(preprocess.resize_size)}, "
            f"{preprocess.interpolation}, centre crop {_by(preprocess.size)}"
        ),
        "mean, std": f"{_list(preprocess.mean)}, {_list(preprocess.std)}",
        "labels": _labels(checkpoint),
        "scores": _scores(checkpoint),
        "parameters": f"{parameters:,}",
        "memory": (
            f"{_mebibytes(4 * parameters)} in float32, "
            f"{_mebibytes(2 * parameters)} in bfloat16 or float16"
        ),
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


def _labels(checkpoint: Checkpoint) -> str:
    """Describe the labels, of which the first three are quoted."""
    if checkpoint.labels:
        first = json.dumps(checkpoint.labels[:3], ensure_ascii=False)[1:-1]
        more = ", …" if len(checkpoint.labels) > 3 else ""
        return f"{len(checkpoint.labels):,}: {first}{more}"
    if checkpoint.zero_shot:
        return "none: set VIT_LABELS, or send labels= with a request"
    return "none"


def _scores(checkpoint: Checkpoint) -> str:
    """Describe how logits become scores."""
    config = checkpoint.config
    if not config.num_classes and checkpoint.zero_shot:
        return "of the labels of a request"
    if not config.num_classes:
        return "none: no classification head; /embed serves it"
    is_sigmoid = checkpoint.multi_label or config.num_classes == 1
    text = "sigmoid" if is_sigmoid else "softmax"
    if isinstance(config, ViTConfig) and config.normalized_head:
        text += " of scaled cosines"
    text += f", temperature {checkpoint.temperature:g}"
    form = checkpoint.form
    if form != SOFTMAX:
        text += f", power {form.power:g}, crowding {form.crowding:g}"
    return text


def _transformer(config: ViTConfig) -> dict[str, str]:
    """Describe the tokens, and the fields of the architecture that differ from the ViT paper."""
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
            "pool_query": (
                "the pooling query's row (last layer); "
                "the mean over all patches' rows (earlier layers)"
            ),
        }[config.attention_source],
    }


def _library(config: NetworkConfig) -> dict[str, str]:
    assert isinstance(config, LibraryConfig)
    arguments = ", ".join(f"{name}={json.dumps(value)}" for name, value in config.arguments.items())
    runtime = f"{config.library} {version(config.library)}"
    if arguments:
        runtime += f", with {arguments}"
    return {
        "runtime": runtime,
        "head": f"reads {config.width} numbers",
        "attention maps": "none",
    }


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
