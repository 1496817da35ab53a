"""Tiny random CLIP and SigLIP models with both towers and a tokenizer, saved by their library."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.model.checkpoint.parity import randomise
from tests.timm_reference import transformers

SIZE = 16
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_VISION = _TOWER | {"image_size": SIZE, "patch_size": 8}
_CORPUS = (
    "This is a photo of a cat.",
    "a red car, a dog's tail",
    "CAFÉ au lait 12 34",
    "a bad photo of the thing!?",
) * 3


def write_processor(folder: Path, kind: str = "CLIP") -> None:
    """Write an image processor that squashes."""
    processor = {
        "image_processor_type": f"{kind}ImageProcessor",
        "do_center_crop": False,
        "size": {"height": SIZE, "width": SIZE},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _merges(word: str) -> list[tuple[str, str]]:
    """Return the merges that build a word, letter by letter."""
    return [
        (word[:end], word[end] + ("</w>" if end == len(word) - 1 else ""))
        for end in range(1, len(word))
    ]


def clip(folder: Path, *, legacy_eos: bool = False, projection: int = 24) -> Any:
    """Save a CLIP with a byte-level BPE.

    With `legacy_eos`, its config has the wrong token, like OpenAI's first files.
    """
    library = transformers()
    # Fixed merges, from the left of each word, because a trained vocabulary differs between runs.
    words = sorted({word for text in _CORPUS for word in re.findall("[a-z]+", text.lower())})
    merges = list(dict.fromkeys(pair for word in words for pair in _merges(word)))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        *("".join(pair) for pair in merges),
    ]
    # Last, as in CLIP: the highest number ends a text.
    names = dict.fromkeys([*pieces, "<|startoftext|>", "<|endoftext|>"])
    vocabulary = {piece: number for number, piece in enumerate(names)}
    tokenizer = library.CLIPTokenizer(vocab=vocabulary, merges=merges)
    eos = 2 if legacy_eos else vocabulary["<|endoftext|>"]
    text = _TOWER | {
        "vocab_size": len(vocabulary),
        "eos_token_id": eos,
        "max_position_embeddings": 77,
    }
    config = library.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=projection)
    return _saved(library.CLIPModel, config, tokenizer, folder)


def siglip(folder: Path, *, attention_mask: bool = False) -> Any:
    """Save a SigLIP with a fast unigram tokenizer that lowers letters, like SigLIP 2's."""
    library = transformers()
    names = ["input_ids", "attention_mask"] if attention_mask else ["input_ids"]
    # Fixed pieces, because a trained vocabulary differs between runs.
    text = " ".join(_CORPUS).lower()
    words = sorted({f"▁{word}" for word in text.split()})
    letters = sorted({"▁", *text} - {" "})
    specials = [(token, 0.0) for token in ("<pad>", "<eos>", "<bos>", "<unk>")]
    pieces = [*specials, *((word, -3.0) for word in words), *((letter, -6.0) for letter in letters)]
    learned = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=False))
    learned.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(" ", "▁")]
    )
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.add_special_tokens([token for token, _ in specials])
    learned.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer = library.PreTrainedTokenizerFast(
        tokenizer_object=learned,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=names,
    )
    return _saved_siglip(library, tokenizer, folder)


def first_siglip(folder: Path) -> Any:
    """Save a SigLIP with a sentencepiece tokenizer, which drops capitals and punctuation."""
    sentencepiece = pytest.importorskip("sentencepiece")
    library = transformers()
    learned = folder / "learned"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_CORPUS),
        model_prefix=str(learned),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = library.SiglipTokenizer(f"{learned}.model")
    for path in folder.glob("learned*"):
        path.rename(folder / "spiece.model") if path.suffix == ".model" else path.unlink()
    tokenizer.vocab_file = str(folder / "spiece.model")
    return _saved_siglip(library, tokenizer, folder)


def _saved_siglip(library: Any, tokenizer: Any, folder: Path) -> Any:
    text = _TOWER | {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
    config = library.SiglipConfig(text_config=text, vision_config=_VISION)
    return _saved(library.SiglipModel, config, tokenizer, folder)


def _saved(kind: Any, config: Any, tokenizer: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = kind(config).eval()
    randomise(model)
    with torch.no_grad():
        model.logit_scale.fill_(2.0)
        if hasattr(model, "logit_bias"):
            model.logit_bias.fill_(-3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder, "Siglip" if hasattr(model, "logit_bias") else "CLIP")
    return model
