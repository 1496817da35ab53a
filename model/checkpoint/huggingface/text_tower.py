"""The text tower of a whole CLIP or SigLIP, and its tokenizer, which the library transformers reads.

Of the tokenizer's files only data are taken, so that nothing in a checkpoint names code to run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface import clip
from model.checkpoint.huggingface.family import Count, HiddenActivation
from model.checkpoint.refusals import validating
from model.checkpoint.tensors import TensorSource, take_all
from model.errors import CheckpointError, first_line
from model.network.text_tower import TextConfig, TextTower

PREFIXES: Final = ("text_model.", "text_projection.")
"""Of the text tower's tensors."""

_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
_TOKENIZER_FILES: Final = (*_VOCABULARIES, "merges.txt", "special_tokens_map.json", "added_tokens.json")
_INSTALL: Final = "pip install -e '.[text]' in the clone"
_BATCH: Final = 32
_SIGLIP_TOKENS: Final = 64
"""What transformers' pipeline pads a text of SigLIP to, as in training."""

_WRONG_END: Final = 2
"""`eos_token_id` of CLIP's first files, whose texts end with the highest number (transformers #24773)."""


_NO_ENDS: Final = {"bos_token_id": None, "eos_token_id": None}
"""Else the library warns of its own defaults, which no tokenizer reads."""


class _TextFields(BaseModel):
    """The fields of CLIPTextConfig and SiglipTextConfig that change a feature, with CLIP's defaults.

    Nested configs name only what differs from the defaults of their class.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: int = 49408
    hidden_size: Count = 512
    intermediate_size: Count = 2048
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 8
    max_position_embeddings: Count = 77
    hidden_act: HiddenActivation = "quick_gelu"
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    eos_token_id: Annotated[int, Field(ge=-1, lt=1 << 31)] = 49407


_SIGLIP_DEFAULTS: Final = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


class TextEmbedder:
    """Computes features of texts, as the library's `get_text_features` with the pipeline's arguments for the tokenizer.

    Args:
        config: `config.json` of the checkpoint.
        tensors: those of the text tower, under the hub's names.
        width: of an image's embedding, which features share.
        files: of the checkpoint, for its tokenizer.

    Raises:
        CheckpointError: transformers is not installed, or a tensor or the tokenizer is missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], width: int, files: Files) -> None:
        causal = config["model_type"] == "clip"
        nested = tower_config(config, "text")
        with validating(files.where(CONFIG_FILE), "text_config: "):
            fields = _TextFields.model_validate(nested if causal else _SIGLIP_DEFAULTS | nested)
            end = None if fields.eos_token_id == _WRONG_END else fields.eos_token_id
            self._config = TextConfig(
                vocabulary=fields.vocab_size,
                positions=fields.max_position_embeddings,
                width=fields.hidden_size,
                depth=fields.num_hidden_layers,
                heads=fields.num_attention_heads,
                mlp_width=fields.intermediate_size,
                activation=fields.hidden_act,
                norm_eps=fields.layer_norm_eps,
                feature_width=width,
                causal=causal,
                end=end if causal else None,
            )
            self._config.block_config()
        with torch.device("meta"):
            self._tower = TextTower(self._config)
        stored = TensorSource(tensors, files.place, lambda name: name.endswith(".position_ids"))
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tower.state_dict().items()}
        taken = take_all(stored, shapes, _names("text_projection" if causal else "text_model.head"))
        stored.finish()
        for name, tensor in taken.items():
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{files.place}: {name} of the text tower holds values that are not finite")
        self._tower.load_state_dict(taken, assign=True)
        self._tower.eval().requires_grad_(False)
        self._tokenizer = _tokenizer(files, str(config["model_type"]))
        tokens = 1 + max(self._tokenizer.get_vocab().values(), default=0)
        if tokens > fields.vocab_size:
            raise CheckpointError(
                f"{files.place}: the tokenizer has {tokens} tokens, the text tower {fields.vocab_size}"
            )
        try:
            self(["a"])
        # A tokenizer without a token for padding, for example, fails at its first text.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{files.place}: its tokenizer fails on a text: {first_line(error)}") from None

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts, float32 [N, D], not normalised; what is too long is cut."""
        length = self._config.positions if self._config.causal else min(_SIGLIP_TOKENS, self._config.positions)
        padding = True if self._config.causal else "max_length"
        parts = []
        for start in range(0, len(texts), _BATCH):
            batch = list(texts[start : start + _BATCH])
            inputs = self._tokenizer(batch, padding=padding, truncation=True, max_length=length, return_tensors="pt")
            seen = inputs.get("attention_mask")
            parts.append(self._tower(inputs["input_ids"], None if seen is None else seen.bool()))
        features: NDArray[np.float32] = torch.cat(parts).numpy()
        return features


def tower_config(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what `config.json` says of the `text` or `vision` tower, in old files twice.

    Raises:
        CheckpointError: it is no object.
    """
    parts = [config.get(name) or {} for name in (f"{kind}_config", f"{kind}_config_dict")]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{CONFIG_FILE}: {kind}_config: expected an object")
    return {**parts[0], **parts[1]}


def _names(head: str) -> dict[str, str | tuple[str | None, ...]]:
    """Return the hub's names of the text tower's parts, whose blocks are those of an image's tower."""

    def of_texts(name: str | None) -> str:
        return str(name).replace("vision_model.", "text_model.")

    blocks = {own: theirs for own, theirs in clip.FAMILY.names.items() if own.startswith("blocks")}
    return {
        **{own: of_texts(it) if isinstance(it, str) else tuple(map(of_texts, it)) for own, it in blocks.items()},
        "token_embed": "text_model.embeddings.token_embedding",
        "pos_embed": "text_model.embeddings.position_embedding",
        "norm": "text_model.final_layer_norm",
        "head": head,
    }


def _tokenizer(files: Files, model_type: str) -> Any:
    """Return the tokenizer of a checkpoint, which is made of a copy of its files that names no code."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  an optional extra that takes seconds to import
    except ImportError:
        raise CheckpointError(f"{files.place}: a text tower needs transformers: {_INSTALL}") from None
    paths = {name: path for name in _TOKENIZER_FILES if (path := files.path(name)) is not None}
    if not paths.keys() & set(_VOCABULARIES):
        raise CheckpointError(
            f"{files.place}: no tokenizer (tokenizer.json) for the text tower: "
            "save it into this folder: processor.save_pretrained(FOLDER)"
        )
    config = files.json(_TOKENIZER_CONFIG) if files.path(_TOKENIZER_CONFIG) is not None else {}
    where = files.where(_TOKENIZER_CONFIG)
    config = {name: value for name, value in config.items() if name not in ("auto_map", "chat_template")}
    if config.get("tokenizer_class") == "SiglipTokenizer":
        try:
            import sentencepiece  # noqa: F401, PLC0415  which this class runs
        except ImportError:
            raise CheckpointError(f"{where}: SiglipTokenizer needs sentencepiece: {_INSTALL}") from None
    with tempfile.TemporaryDirectory(prefix="vitserve-tokenizer-") as folder:
        for name, path in paths.items():
            (Path(folder) / name).symlink_to(path)
        (Path(folder) / _TOKENIZER_CONFIG).write_text(json.dumps(config))
        (Path(folder) / CONFIG_FILE).write_text(json.dumps({"model_type": model_type, "text_config": _NO_ENDS}))
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # What the library raises on a broken file is of any type, plain exceptions of its Rust part among them.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{where}: no tokenizer that transformers reads: {first_line(error)}") from None
    if model_type == "clip" and tokenizer.padding_side != "right":
        raise CheckpointError(f"{where}: padding_side {tokenizer.padding_side!r:.20}: expected 'right'")
    return tokenizer
