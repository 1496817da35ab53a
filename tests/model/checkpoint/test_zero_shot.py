"""Whole CLIP and SigLIP checkpoints against transformers and its pipeline: features of texts and images, and scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint
from model.runtime.predictor import Predictor
from tests.model.checkpoint import whole_models
from tests.model.checkpoint.parity import pictures
from tests.timm_reference import transformers

LABELS = ("cat", "Café DOG's tail!", "a red car, parked", "x" * 200)
CSV = 'cat, "Café DOG\'s tail!", "a red car, parked", ' + "x" * 200
MODELS: dict[str, Callable[[Path], Any]] = {
    "clip": whole_models.clip,
    "clip, the end of a text by its number": partial(whole_models.clip, legacy_eos=True),
    "siglip": whole_models.siglip,
    "siglip, padding masked": partial(whole_models.siglip, attention_mask=True),
}


def pipeline_scores(model: Any, folder: Path, pixels: Tensor, labels: tuple[str, ...], **options: Any) -> Tensor:
    """What transformers' pipeline answers for normalised pixels [1, C, H, W], in the labels' order."""
    library = transformers()
    tokenizer = library.AutoTokenizer.from_pretrained(folder)
    pipeline = library.ZeroShotImageClassificationPipeline(
        model=model,
        tokenizer=tokenizer,
        image_processor=lambda images, return_tensors: library.BatchFeature({"pixel_values": pixels}),
        device="cpu",
    )
    from PIL import Image

    answer = pipeline(Image.new("RGB", (8, 8)), candidate_labels=list(labels), **options)
    scores = {each["label"]: each["score"] for each in answer}
    return torch.tensor([scores[label] for label in labels])


def own_scores(checkpoint: Checkpoint, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = checkpoint.build()(pixels).logits[0]
    return torch.as_tensor(logits.sigmoid() if checkpoint.multi_label else logits.softmax(dim=0))


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_pipeline(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path)
    for templates, options in ((None, {}), ("a drawing of {}", {"hypothesis_template": "a drawing of {}"})):
        # The pipeline cuts texts of SigLIP that are too long, and fails on those of CLIP.
        labels = LABELS if name.startswith("siglip") else LABELS[:3]
        checkpoint = load_checkpoint(
            str(tmp_path), labels=CSV.rsplit(",", len(LABELS) - len(labels))[0], templates=templates
        )
        assert checkpoint.labels == labels
        pixels = pictures(checkpoint, 1)
        expected = pipeline_scores(model, tmp_path, pixels, labels, **options)
        assert expected.std() > 1e-3, "the reference says nothing"
        torch.testing.assert_close(own_scores(checkpoint, pixels), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_features_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), labels=CSV)
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path)
    length = 64 if checkpoint.multi_label else 77
    padding = "max_length" if checkpoint.multi_label else True
    inputs = tokenizer(list(LABELS), padding=padding, truncation=True, max_length=length, return_tensors="pt")
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        of_texts = model.get_text_features(**inputs).pooler_output
        of_images = model.get_image_features(pixels).pooler_output
        own = checkpoint.build()(pixels).embeddings["head"]
    assert checkpoint.embed_texts is not None
    torch.testing.assert_close(torch.from_numpy(checkpoint.embed_texts(LABELS)), of_texts, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own, of_images, atol=1e-5, rtol=1e-5)
    # Each text alone, as it is cached.
    alone = np.concatenate([checkpoint.embed_texts([text]) for text in LABELS])
    np.testing.assert_allclose(alone, of_texts.numpy(), atol=1e-5)


def test_several_templates_are_averaged(tmp_path: Path) -> None:
    model = whole_models.clip(tmp_path)
    file = tmp_path / "templates.txt"
    file.write_text("a photo of {}.\n\n{} at night\n")
    checkpoint = load_checkpoint(str(tmp_path), labels="cat,dog", templates=str(file))
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path)
    rows = []
    with torch.inference_mode():
        for label in ("cat", "dog"):
            texts = [f"a photo of {label}.", f"{label} at night"]
            features = model.get_text_features(**tokenizer(texts, padding=True, return_tensors="pt")).pooler_output
            mean = (features / features.norm(dim=1, keepdim=True)).mean(dim=0)
            rows.append(mean / mean.norm() * model.logit_scale.exp())
    torch.testing.assert_close(checkpoint.tensors["head.weight"], torch.stack(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_predictor_serves_it_as_any_classifier(name: str, backend: Any, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), labels=CSV)
    predictor = Predictor(checkpoint, device="cpu", dtype="float32", backend=backend)
    predictor.warm_up()
