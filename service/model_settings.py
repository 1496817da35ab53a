"""The settings of one checkpoint."""

import json
import re
import shlex
from collections.abc import Collection
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.setting_values import ImageSize, ListOrTable, Name, Thresholds

PATHS = ("checkpoint", "preprocess", "labels", "keys", "base")
"""Settings of one checkpoint that may name a file."""

OPTIONS = ("image_size", "preprocess", "labels", "activation", "architecture", "keys", "base")
"""Settings of one checkpoint that are fields of `CheckpointOptions`."""


_SETTING: Final = re.compile(
    r"--([a-z]+(?:-[a-z]+)*)(?: ([^ ()]+))? \(VIT_[A-Z_]+\)|VIT_([A-Z_]+)(?: \(--[a-z-]+\))?"
)
"""A setting in a message: `--keys FILE (VIT_KEYS)`, `VIT_KEYS (--keys)` or `VIT_KEYS`."""


_COMMAND: Final = re.compile(
    r"""vitserve serve((?: --[a-z-]+ (?:[^\s'"]|'[^']*'|"[^"]*")+)+)""",
)
"""A command in a message that serves a checkpoint with its settings."""


class ModelSettings(BaseModel):
    """Settings of one checkpoint; a `NAME.toml` in the folder of models may have any of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: Name = Field(
        "bundled",
        description="`bundled`, a folder, a file, or a hub id `owner/name[@revision][:subfolder]`",
    )
    preprocess: ListOrTable = Field(
        None,
        description="JSON, a file of it, or a preset's name, for formats without preprocessing. "
        "Default: the checkpoint's",
    )
    labels: ListOrTable = Field(
        None,
        description='comma-separated names (`cat,dog,"a red car"`) or a JSON array; a file with '
        "one name per line, JSON, CSV or a data set's YAML; `imagenet-1k` or "
        "`numbers`. Default: the checkpoint's",
    )
    activation: Literal["softmax", "sigmoid"] | None = Field(
        None,
        description="function from logits to scores: `sigmoid` for a model that gives several "
        "labels per picture, if its files do not say so. Default: the checkpoint's",
    )
    architecture: Name | None = Field(
        None,
        description="for plain state dicts: timm's name of the architecture, or `vit` for sizes "
        "read from the tensors, with arguments after commas. Default: the "
        "checkpoint's",
    )
    base: Name | None = Field(
        None,
        description="checkpoint that a LoRA folder adapts. Default: the one that the folder names",
    )
    keys: Name | None = Field(
        None,
        description="TOML file that maps the names of a state dict, and selects one of several "
        "networks in it",
    )
    image_size: ImageSize = Field(
        None,
        description="`384` or `384x256` (rows x columns); position embeddings are resized. "
        "Default: the checkpoint's",
    )
    coverage: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="`0.95`: answers contain a set of labels that includes the right one for 95 "
        "% of pictures like those given to `vitserve calibrate`, or `abstained`",
    )
    thresholds: Thresholds = Field(
        None,
        description='`{"cat": 0.4}`: lowest score of a prediction, by label; see docs/models.md',
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="`auto`: the fastest dtype native to the device; float32 if the model "
        "overflows in float16. `bfloat16` is refused if the device only emulates it",
    )


def as_keys(message: str, place: str, unchanged: Collection[str] = ()) -> str:
    """Return a message in which settings of one checkpoint are keys of a file or a document.

    Args:
        message: names settings as flags and environment variables, or in a command that serves
            the checkpoint with them.
        place: name of the file or document; in the result it follows the first key.
        unchanged: names of settings that stay flags and environment variables.
    """
    is_first = True

    def lines(match: re.Match[str]) -> str:
        nonlocal is_first
        is_first = False
        words = shlex.split(match[1])
        values = dict(zip(words[::2], words[1::2], strict=True))
        pairs = {flag[2:].replace("-", "_"): value for flag, value in values.items()}
        stated = pairs.keys() - {"checkpoint"} - set(unchanged)
        texts = [f"{name} = {json.dumps(pairs[name])}" for name in pairs if name in stated]
        return f"{', '.join(texts)} in {place}"

    def key(match: re.Match[str]) -> str:
        nonlocal is_first
        name = (match[1] or match[3]).lower().replace("-", "_")
        if name in unchanged or name not in ModelSettings.model_fields:
            return match[0]
        where = f" in {place}" if is_first else ""
        is_first = False
        return f'{name} = "{match[2]}"{where}' if match[2] else f"{name}{where}"

    return _SETTING.sub(key, _COMMAND.sub(lines, message))
