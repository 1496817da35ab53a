"""The operator's options for a checkpoint: input size, and the preprocessing and labels that some
files lack.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from model.checkpoint.labels import LABEL_PRESETS, read_labels
from model.checkpoint.local_files import read_json, resolved_source, validating
from model.config import PreprocessConfig
from model.errors import CheckpointError
from model.layer_config import Size

# Published evaluation preprocessing of released models, by name.  Sources:
# torchvision/models/vision_transformer.py, `ViT_*_Weights`; google-research/vision_transformer,
# vit_jax/input_pipeline.py; facebookresearch/deit, datasets.py, `build_transform`.
PREPROCESS_PRESETS: Final[dict[str, PreprocessConfig]] = TypeAdapter(
    dict[str, PreprocessConfig]
).validate_json(
    resources.files("model.checkpoint").joinpath("preprocess_presets.json").read_bytes()
)


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of the operator that complete or override a checkpoint.

    Attributes:
        image_size: (rows, columns) in pixels to run at instead of the checkpoint's own.
        preprocess: one of `PREPROCESS_PRESETS` or a JSON file, instead of the checkpoint's own;
            needed for formats that carry none.
        labels: names, a file or a preset, likewise; see `model.checkpoint.labels`.
        activation: `softmax` or `sigmoid`, which makes scores of logits, instead of the
        checkpoint's own.
        architecture: a timm name, for plain state dicts, e.g. `vit_base_patch16_224`, or `vit` for
            a network whose sizes are its tensors'.
        keys: TOML file that maps names of tensors and says which copy of a network is meant; see
        `key_map`.
    """

    image_size: Size | None = None
    preprocess: str | None = None
    labels: str | None = None
    activation: str | None = None
    architecture: str | None = None
    keys: str | None = None

    def preprocess_or(
        self,
        default: PreprocessConfig | None,
        where: str,
        missing: str = "carries no preprocessing:",
    ) -> PreprocessConfig:
        """Return the operator's preprocessing, else `default`.

        Args:
            default: what the checkpoint carries.
            where: what messages call the checkpoint.
            missing: what the message says before it advises VIT_PREPROCESS.

        Raises:
            CheckpointError: neither, or a choice that cannot be read.
        """
        if self.preprocess is not None:
            return read_preprocess(self.preprocess)
        if default is None:
            presets = ", ".join(PREPROCESS_PRESETS)
            raise CheckpointError(
                f"{where}: {missing} set VIT_PREPROCESS to a JSON file or to one of {presets}"
            )
        return default

    def labels_or(
        self, default: tuple[str, ...] | None, classes: int, where: str
    ) -> tuple[str, ...]:
        """Return the operator's labels, else `default`; none where there are no classes.

        Raises:
            CheckpointError: neither, or a choice that cannot be read or is of another length.
        """
        if not classes:
            return ()
        if self.labels is not None:
            return read_labels(self.labels, classes)
        if default is None:
            raise CheckpointError(
                f"{where}: no labels for its {classes} classes: set VIT_LABELS to a file, to names like cat,dog "
                f"or to one of {', '.join(LABEL_PRESETS)}"
            )
        return default


def read_preprocess(name: str) -> PreprocessConfig:
    """Return a preset by name, or what JSON or a file of it says with the fields of
    `model.config.PreprocessConfig`.

    Raises:
        CheckpointError: neither a preset nor a file, or fields that are missing, unknown or wrong.
    """
    if name in PREPROCESS_PRESETS:
        return PREPROCESS_PRESETS[name]
    if name.startswith("{"):
        with validating("VIT_PREPROCESS"):
            return PreprocessConfig.model_validate_json(name)
    path = Path(name).expanduser()
    if resolved_source(path, str(path)) is None:
        raise CheckpointError(
            f"VIT_PREPROCESS {name!r}: neither a file nor one of {', '.join(PREPROCESS_PRESETS)}"
        )
    with validating(str(path)):
        return PreprocessConfig.model_validate(read_json(path, str(path)))
