"""Whole CLIP and SigLIP checkpoints against transformers and its pipeline: features of texts and images, and scores."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint
from model.errors import CheckpointError
from model.explanation.methods import explain
from model.heads import compared, of_image
from model.insight.summary import summarise
from model.outputs import EmbeddingRequest, MapRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.checkpoint import whole_models
from tests.model.checkpoint.folders import edit, edit_tensors
from tests.model.checkpoint.parity import pictures
from tests.model.runtime.predictions import MODES
from tests.timm_reference import transformers

LABELS = ("cat", "Café DOG's tail!", "a red car, parked", "x" * 200)
CSV = 'cat, "Café DOG\'s tail!", "a red car, parked", ' + "x" * 200
MODELS: dict[str, Callable[[Path], Any]] = {
    "clip": whole_models.clip,
    "clip, the end of a text by its number": partial(whole_models.clip, legacy_eos=True),
    "siglip": whole_models.siglip,
    "siglip, sentencepiece": whole_models.first_siglip,
    "siglip, padding masked": partial(whole_models.siglip, attention_mask=True),
}


def pipeline_scores(model: Any, folder: Path, pixels: Tensor, labels: tuple[str, ...]) -> Tensor:
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

    answer = pipeline(Image.new("RGB", (8, 8)), candidate_labels=list(labels))
    scores = {each["label"]: each["score"] for each in answer}
    return torch.tensor([scores[label] for label in labels])


def own_scores(checkpoint: Checkpoint, pixels: Tensor) -> Tensor:
    with torch.inference_mode():
        logits = checkpoint.build()(pixels).logits[0]
    return torch.as_tensor(logits.sigmoid() if checkpoint.multi_label else logits.softmax(dim=0))


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_pipeline_and_features_those_of_the_library(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path)
    # The pipeline cuts texts of SigLIP that are too long, and fails on those of CLIP.
    labels = LABELS if name.startswith("siglip") else LABELS[:3]
    checkpoint = load_checkpoint(str(tmp_path), labels=CSV.rsplit(",", len(LABELS) - len(labels))[0])
    assert checkpoint.labels == labels
    pixels = pictures(checkpoint, 1)
    expected = pipeline_scores(model, tmp_path, pixels, labels)
    assert expected.std() > 1e-3, "the reference says nothing"
    torch.testing.assert_close(own_scores(checkpoint, pixels), expected, atol=1e-5, rtol=0)
    length, padding = (64, "max_length") if checkpoint.multi_label else (77, True)
    tokenizer = transformers().AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(list(LABELS), padding=padding, truncation=True, max_length=length, return_tensors="pt")
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


@pytest.mark.parametrize(("name", "backend"), [("clip", "openvino"), ("siglip", "torch")])
def test_labels_of_a_request_have_the_scores_and_maps_of_labels_of_the_start(
    name: str, backend: Any, tmp_path: Path
) -> None:
    MODELS[name](tmp_path)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "compile_mode": MODES[backend], "threads": 1}
    checkpoint = load_checkpoint(str(tmp_path), labels=CSV)
    bare, full = (Predictor(each, **options) for each in (load_checkpoint(str(tmp_path)), checkpoint))
    assert (bare.checkpoint.labels, bare.checkpoint.config.num_classes) == ((), 0)
    zero_shot = checkpoint.zero_shot
    assert zero_shot is not None
    images = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)
    head = zero_shot.head(LABELS, bare.embed_texts(zero_shot.prompts(LABELS)))
    embedded = bare.predict(images, RequestedOutputs(1, embedding=EmbeddingRequest()))
    for image, outputs, expected in zip(images, embedded, full.predict(images, RequestedOutputs(4)), strict=True):
        found = compared(outputs, head, RequestedOutputs(4, labels=LABELS))
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
        assert found.indices.tolist() == expected.indices.tolist()
        pixels = Normalise(checkpoint.preprocess)(torch.from_numpy(image[None]))
        np.testing.assert_allclose(expected.scores, own_scores(checkpoint, pixels).numpy()[expected.indices], atol=1e-5)
        wanted = of_image(RequestedOutputs(1, MapRequest("relevance"), labels=LABELS), head)
        [of_label] = bare.predict(image[None], wanted)
        with torch.no_grad():
            classes = torch.tensor([int(expected.indices[0])])
            maps, _ = explain(checkpoint.build(), pixels, classes, MapRequest("relevance"))
        assert of_label.map is not None
        np.testing.assert_allclose(of_label.map.values, maps[0], atol=1e-5)


def test_a_summary_says_that_requests_bring_the_labels(whole: Path) -> None:
    rows = summarise(load_checkpoint(str(whole)))
    assert rows["labels"] == "none: set VIT_LABELS, or send labels= with a request"
    assert rows["scores"] == "of the labels of a request"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    whole_models.clip(folder)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def change_json(file: Path, **fields: object) -> None:
    edit(file, lambda value: value.update(fields))


def text_config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: change_json(folder / "config.json", text_config_dict=fields)


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer .*processor.save_pretrained"),
    "a broken tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "no tokenizer that transformers",
    ),
    "a tokenizer of more tokens": (
        lambda folder: change_json(folder / "tokenizer_config.json", extra_special_tokens=["<one>", "<more>"]),
        "the tokenizer has .* tokens, the text tower",
    ),
    "a token of a high number": (
        lambda folder: change_json(
            folder / "tokenizer.json",
            added_tokens=[
                {"id": 999, "content": "cat", "special": False, "normalized": False}
                | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            ],
        ),
        "the tokenizer has .* tokens, the text tower|fails on a text",
    ),
    "no token for padding": (
        lambda folder: change_json(folder / "tokenizer_config.json", pad_token=None),
        "its tokenizer fails on a text: .*padding token",
    ),
    "a tower described by a text": (
        lambda folder: change_json(folder / "config.json", text_config="large"),
        "config.json: text_config: expected an object",
    ),
    "an image's tower described by a list": (
        lambda folder: change_json(folder / "config.json", vision_config_dict=[1]),
        "config.json: vision_config: expected an object",
    ),
    "an end of a very high number": (text_config(eos_token_id=10**30), "fails on a text"),
    "padding on the left": (
        lambda folder: change_json(folder / "tokenizer_config.json", padding_side="left"),
        "padding_side 'left': expected 'right'",
    ),
    "a layer less": (text_config(num_hidden_layers=1), "text tower: unexpected key 'blocks.1"),
    "heads that do not divide": (text_config(num_attention_heads=5), "text_config: .*multiple of heads"),
    "very many layers": (text_config(num_hidden_layers=10**9), "text_config: num_hidden_layers"),
    "another activation": (text_config(hidden_act="mish"), "text_config: hidden_act: activation 'mish'"),
    "other positions": (text_config(max_position_embeddings=78), "text tower: pos_embed.weight has shape"),
    "no scale": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("logit_scale")),
        "missing key 'logit_scale'",
    ),
    "an endless scale": (
        lambda folder: edit_tensors(folder, lambda tensors: tensors["logit_scale"].fill_(torch.inf)),
        "logit_scale: expected one number",
    ),
    "no text tower": (
        lambda folder: edit_tensors(
            folder, lambda t: [t.pop(name) for name in list(t) if name.startswith("text_model.encoder")]
        ),
        "text tower: missing key 'blocks.0",
    ),
    "a text tower that is not finite": (
        lambda folder: edit_tensors(folder, lambda t: t["text_projection.weight"].fill_(torch.nan)),
        "of the text tower holds values that are not finite",
    ),
    "another width": (
        lambda folder: change_json(folder / "config.json", projection_dim=23),
        "has shape",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_whole_checkpoint_that_lacks_something_is_refused_in_one_line(case: str, copy: Path) -> None:
    spoil, message = REFUSALS[case]
    spoil(copy)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_checkpoint(str(copy), labels="cat,dog")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "nowhere.txt"}, "VIT_LABELS 'nowhere.txt': neither a file nor"),
        ({"labels": "cat,,dog"}, "VIT_LABELS: '', number 2"),
    ],
)
def test_labels_are_checked(options: dict[str, str], message: str, whole: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load_checkpoint(str(whole), **options)  # type: ignore[arg-type]


def test_code_that_a_tokenizer_names_is_never_run(copy: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Evil: pass\n")
    change_json(
        copy / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, tokenizer_class="Evil"
    )
    with contextlib.suppress(CheckpointError):
        load_checkpoint(str(copy), labels="cat,dog")
    assert not ran.exists()


def test_without_the_extra_the_message_says_how_to_install_it(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=re.escape("needs transformers: pip install 'vitserve[text]'")):
        load_checkpoint(str(whole), labels="cat,dog")
