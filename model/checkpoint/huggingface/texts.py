"""Whole checkpoints of CLIPModel and SiglipModel, whose labels are texts that make the head.

SigLIP 2 of one resolution is among them. The image tower pools the CLS token and projects it
(CLIP), or pools by attention (SigLIP). Features of the labels, times the scale, are the rows of the
head, so that the model is served like any other. The tokenizer is the library's. It gets only data
from the checkpoint's files, so that nothing in them names code to run.
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface.families import CLIP
from model.checkpoint.huggingface.fields import activation, tower_config
from model.checkpoint.labels import read_labels
from model.checkpoint.local_files import validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.tensors import checked, join_parts, renamed, require_finite, take_tensor
from model.errors import CheckpointError, first_line
from model.heads import DEFAULT_TEMPLATE, ZeroShot
from model.network.text_tower import TextConfig, TextTower

_PREFIXES: Final = ("text_model.", "text_projection.")
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
_TOKENIZER_FILES: Final = (
    *_VOCABULARIES,
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_INSTALL: Final = "pip install 'vitserve[text]'"
_BATCH: Final = 32

_CLIP_DEFAULTS: Final = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 49407,
}
# Defaults of SiglipTextConfig; those above are CLIPTextConfig's. Nested configs state only fields
# that differ from them.
_SIGLIP_DEFAULTS: Final = _CLIP_DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_NAMES: Final = {
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "end": "eos_token_id",
}


class Texts(NamedTuple):
    """The parts of a whole checkpoint except for the image tower.

    Attributes:
        labels: labels that the head was made of; empty if requests bring labels.
        zero_shot: comparison of labels and images.
        tower: function from texts to features.
    """

    labels: tuple[str, ...]
    zero_shot: ZeroShot
    tower: "TextEmbedder"


def read_texts(
    stored: Mapping[str, Tensor], files: Files, options: CheckpointOptions, width: int
) -> tuple[dict[str, Tensor], Texts]:
    """Read the text tower of a whole checkpoint, and make a head of the operator's labels.

    Args:
        stored: all tensors.
        files: files of the checkpoint, which include its tokenizer.
        options: options of the operator.
        width: width of an image's embedding, which features of texts share.

    Returns:
        The tensors of the image tower, with a head if there are labels; and the other parts.

    Raises:
        CheckpointError: as `TextEmbedder`, or the labels or scales are wrong.
    """
    labels = _labels(options.labels)
    tensors = {name: tensor for name, tensor in stored.items() if not name.startswith(_PREFIXES)}
    of_texts = {name: tensor for name, tensor in stored.items() if name.startswith(_PREFIXES)}
    tower = TextEmbedder(files, of_texts, width)
    independent = not tower.config.causal
    scale = math.exp(_scalar(tensors, "logit_scale", files.title))
    bias = _scalar(tensors, "logit_bias", files.title) if independent else 0.0
    zero_shot = ZeroShot(scale, bias, independent, (DEFAULT_TEMPLATE,))
    if labels:
        head = zero_shot.head(labels, tower(zero_shot.prompts(labels)))
        assert head.weight is not None, "it is made of features"
        tensors["classifier.weight"] = torch.from_numpy(head.weight)
        tensors["classifier.bias"] = torch.full((len(labels),), zero_shot.bias)
    return tensors, Texts(labels, zero_shot, tower)


class TextEmbedder:
    """Features of texts, equal to the library's `get_text_features`.

    The tokenizer gets the arguments of the library's pipeline.

    Args:
        files: files of the checkpoint, which include its config and tokenizer.
        tensors: tensors of the text tower, under the hub's names.
        width: width of an image's embedding, which features share.

    Attributes:
        config: architecture of the tower.

    Raises:
        CheckpointError: transformers is not installed, or a tensor or the tokenizer is missing or
            wrong.
    """

    def __init__(self, files: Files, tensors: Mapping[str, Tensor], width: int) -> None:
        config = files.config
        where = files.title
        self.config = _tower_config(config, width, files.where(CONFIG_FILE))
        with torch.device("meta"):
            self._tower = TextTower(self.config)
        named = {
            name: tensor for name, tensor in tensors.items() if not name.endswith(".position_ids")
        }
        native = renamed(named, CLIP.rules, where)
        join_parts(native)
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tower.state_dict().items()}
        native = checked(native, shapes, f"{where}: text tower")
        require_finite(native, f"{where}: text tower")
        self._tower.load_state_dict(native, assign=True)
        self._tower.eval().requires_grad_(False)
        self._tokenizer = _tokenizer(files, str(config["model_type"]))
        tokens = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        if tokens > self.config.vocabulary:
            raise CheckpointError(
                f"{where}: the tokenizer has {tokens} tokens, the text tower "
                f"{self.config.vocabulary}"
            )
        try:
            self(["a"])
        # A tokenizer without a token for padding, for example, fails at its first text.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(
                f"{where}: its tokenizer fails on a text: {first_line(error)}"
            ) from None

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D], not normalised; truncate long texts."""
        length = self.config.positions
        padding: bool | str = True
        if not self.config.causal:
            # transformers' pipeline pads a text of SigLIP to this length, as in training.
            length = min(64, length)
            padding = "max_length"
        parts = []
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            inputs = self._tokenizer(
                batch, padding=padding, truncation=True, max_length=length, return_tensors="pt"
            )
            mask = inputs.get("attention_mask")
            parts.append(self._tower(inputs["input_ids"], None if mask is None else mask.bool()))
        features: NDArray[np.float32] = torch.cat(parts).numpy()
        return features


def _tower_config(config: Mapping[str, Any], width: int, where: str) -> TextConfig:
    """Return the configuration of the text tower whose features have this width."""
    causal = config.get("model_type") == "clip"
    stated = (_CLIP_DEFAULTS if causal else _SIGLIP_DEFAULTS) | tower_config(config, "text", where)
    fields = {ours: stated[theirs] for ours, theirs in _NAMES.items()}
    fields["activation"] = activation(fields["activation"], f"{where}: text_config")
    # CLIP's first files state 2, but their texts end with the highest number (transformers #24773).
    if not causal or fields["end"] == 2:
        fields["end"] = None
    with validating(where, "text_config: ", _NAMES):
        tower = TextConfig.model_validate(fields | {"feature_width": width, "causal": causal})
        tower.block_config()
    return tower


def _scalar(tensors: dict[str, Tensor], name: str, where: str) -> float:
    value = take_tensor(tensors, name, tuple(tensors[name].shape) if name in tensors else (), where)
    if value.numel() != 1 or not abs(float(value)) < 50:
        raise CheckpointError(f"{where}: {name}: expected one number below 50")
    return float(value)


def _labels(labels: str | None) -> tuple[str, ...]:
    """Return the labels of VIT_LABELS; empty without names, so that requests bring labels."""
    if labels is None or labels == "numbers":
        return ()
    return read_labels(labels, None)


def _tokenizer(files: Files, model_type: str) -> Any:
    """Return the tokenizer of a checkpoint, made of a copy of its files that does not name code."""
    try:
        # An optional extra that takes seconds to import.
        from transformers import AutoTokenizer  # noqa: PLC0415
    except ImportError:
        raise CheckpointError(
            f"{files.title}: a text tower needs transformers: {_INSTALL}"
        ) from None
    paths = {name: path for name in _TOKENIZER_FILES if (path := files.path(name)) is not None}
    if not paths.keys() & set(_VOCABULARIES):
        raise CheckpointError(
            f"{files.title}: no tokenizer (tokenizer.json) for the text tower: "
            "save it into this folder: processor.save_pretrained(FOLDER)"
        )
    config = files.json(_TOKENIZER_CONFIG) if files.path(_TOKENIZER_CONFIG) is not None else {}
    where = files.where(_TOKENIZER_CONFIG)
    config = {
        name: value for name, value in config.items() if name not in ("auto_map", "chat_template")
    }
    with tempfile.TemporaryDirectory(prefix="vitserve-tokenizer-") as folder:
        for name, path in paths.items():
            (Path(folder) / name).symlink_to(path)
        (Path(folder) / _TOKENIZER_CONFIG).write_text(json.dumps(config))
        # Without a config, the library warns about defaults that tokenizers do not use.
        (Path(folder) / CONFIG_FILE).write_text(
            json.dumps(
                {
                    "model_type": model_type,
                    "text_config": {"bos_token_id": None, "eos_token_id": None},
                }
            )
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # The library may raise any exception for a broken file, such as one of its Rust part.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(
                f"{where}: no tokenizer that transformers reads: {first_line(error)}"
            ) from None
    if model_type == "clip" and tokenizer.padding_side != "right":
        raise CheckpointError(
            f"{where}: padding_side {tokenizer.padding_side!r:.20}: expected 'right'"
        )
    return tokenizer
