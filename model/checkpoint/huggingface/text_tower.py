"""The text tower of a whole CLIP or SigLIP, run by the libraries transformers and tokenizers on the CPU.

The library's own classes compute what the file's tensors say. Its configuration is made of checked numbers alone, and
of a tokenizer's files only data are taken, so that nothing in a checkpoint names code to run.
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
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import check_tensors
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface.family import ACTIVATIONS, Count
from model.checkpoint.refusals import first_line, validating
from model.checkpoint.tensors import as_float32
from model.errors import CheckpointError

_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
)
_INSTALL: Final = "pip install -e '.[zero-shot]' in the clone"
_BATCH: Final = 32
_SIGLIP_TOKENS: Final = 64
"""What transformers' pipeline pads a text of SigLIP to, as in training."""


def _known_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r:.100} is not one of {', '.join(ACTIVATIONS)}")
    return name


class _TextConfig(BaseModel):
    """The fields of CLIPTextConfig and SiglipTextConfig that change a feature."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    vocab_size: Annotated[int, Field(ge=1, le=2_000_000)]
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, Field(ge=1, le=256)]
    num_attention_heads: Annotated[int, Field(ge=1, le=256)]
    max_position_embeddings: Annotated[int, Field(ge=1, le=4096)]
    hidden_act: Annotated[str, AfterValidator(_known_activation)]
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    eos_token_id: Annotated[int, Field(ge=0)] = 49407
    projection_size: Count | None = None


_CLIP_TEXT: Final = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP_TEXT: Final = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Defaults of the library's classes: nested configs name only what differs."""

_NO_VISION: Final = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}


class TextTower:
    """Computes features of texts, as the library's pipeline does.

    Args:
        config: `config.json` of the checkpoint.
        tensors: those of the text tower, under the hub's names; they are not copied if they are float32.
        width: of an image's embedding, which features share.
        files: of the checkpoint, for its tokenizer.

    Raises:
        CheckpointError: transformers is not installed, or a tensor or the tokenizer is missing or wrong.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], width: int, files: Files) -> None:
        library = _transformers(files.place)
        where = files.where(CONFIG_FILE)
        self._is_siglip = config["model_type"] == "siglip"
        nested = {**(config.get("text_config") or {}), **(config.get("text_config_dict") or {})}
        with validating(where, "text_config: "):
            fields = _TextConfig.model_validate((_SIGLIP_TEXT if self._is_siglip else _CLIP_TEXT) | nested)
        self._positions = fields.max_position_embeddings
        text = fields.model_dump(exclude_none=True)
        try:
            if self._is_siglip:
                whole = library.SiglipConfig(text_config=text, vision_config=_NO_VISION)
            else:
                whole = library.CLIPConfig(text_config=text, vision_config=_NO_VISION, projection_dim=width)
            with torch.device("meta"):
                self._model = (library.SiglipModel if self._is_siglip else library.CLIPModel)(whole)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{where}: text_config: {first_line(error)}") from None
        del self._model.vision_model
        parts = {name: t for name, t in self._model.state_dict().items() if name.startswith(PREFIXES)}
        check_tensors(files.place, tensors, {name: tuple(part.shape) for name, part in parts.items()})
        own = {name: as_float32(tensor, name, files.place) for name, tensor in tensors.items()}
        self._model.load_state_dict(own, strict=False, assign=True)
        self._model.eval().requires_grad_(False)
        self._tokenizer = _tokenizer(library, files, str(config["model_type"]))
        features = self([""])
        if features.shape != (1, width) or not np.isfinite(features).all():
            raise CheckpointError(f"{files.place}: features of texts are {features.shape[1]} wide, of images {width}")

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the features of texts as `get_text_features` of the library: float32 [N, D], not normalised."""
        parts = []
        for start in range(0, len(texts), _BATCH):
            padding = "max_length" if self._is_siglip else True
            length = min(_SIGLIP_TOKENS, self._positions) if self._is_siglip else self._positions
            inputs = self._tokenizer(
                list(texts[start : start + _BATCH]),
                padding=padding,
                truncation=True,
                max_length=length,
                return_tensors="pt",
            )
            # Its own buffer of positions was made without memory.
            inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1]).unsqueeze(0)
            features = self._model.get_text_features(**inputs)
            parts.append(features if isinstance(features, Tensor) else features.pooler_output)
        values: NDArray[np.float32] = torch.cat(parts).numpy()
        return values


PREFIXES: Final = ("text_model.", "text_projection.")
"""Of the text tower's tensors."""


def _transformers(where: str) -> Any:
    try:
        import transformers  # noqa: PLC0415  an optional extra that takes seconds to import
    except ImportError:
        raise CheckpointError(f"{where}: a text tower needs transformers: {_INSTALL}") from None
    return transformers


def _tokenizer(library: Any, files: Files, model_type: str) -> Any:
    """Return the tokenizer of a checkpoint, which is made of a copy of its files that names no code."""
    found = {name: path for name in _TOKENIZER_FILES if (path := files.path(name)) is not None}
    if not {"tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model"} & found.keys():
        raise CheckpointError(
            f"{files.place}: no tokenizer (tokenizer.json) for the text tower: "
            "save it into this folder: processor.save_pretrained(FOLDER)"
        )
    config = files.json(_TOKENIZER_CONFIG) if files.path(_TOKENIZER_CONFIG) is not None else {}
    where = files.where(_TOKENIZER_CONFIG)
    data = {name: value for name, value in config.items() if name not in ("auto_map", "chat_template")}
    if data.get("tokenizer_class") == "SiglipTokenizer":
        _require_sentencepiece(where)
    with tempfile.TemporaryDirectory(prefix="vitserve-tokenizer-") as folder:
        for name, path in found.items():
            (Path(folder) / name).symlink_to(path)
        (Path(folder) / _TOKENIZER_CONFIG).write_text(json.dumps(data))
        (Path(folder) / CONFIG_FILE).write_text(json.dumps({"model_type": model_type}))
        try:
            return library.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # What the library raises on a broken file is of any type, plain exceptions of its Rust part among them.
        except Exception as error:  # noqa: BLE001
            raise CheckpointError(f"{where}: no tokenizer that transformers reads: {first_line(error)}") from None


def _require_sentencepiece(where: str) -> None:
    try:
        import sentencepiece  # noqa: F401, PLC0415  transformers' SiglipTokenizer runs it
    except ImportError:
        raise CheckpointError(f"{where}: SiglipTokenizer needs sentencepiece: {_INSTALL}") from None
