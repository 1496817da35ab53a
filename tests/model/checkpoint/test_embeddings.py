"""Embeddings are those of timm and of transformers, from the same pass as the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint, load_checkpoint
from model.outputs import POOLINGS, Pooling, embedding_name, embedding_width
from tests.model.checkpoint import test_huggingface, test_timm
from tests.model.checkpoint.folders import edit, edit_tensors, timm_folder
from tests.model.checkpoint.parity import pictures, relative_error

EXACT = 1e-5


def embeddings_of(checkpoint: Checkpoint, pixels: Tensor) -> dict[Pooling, Tensor]:
    """Each embedding that the model has, of a pass that computes all tokens; those of a spared pass are the same."""
    network, config = checkpoint.build(), checkpoint.vit
    with torch.inference_mode():
        whole, spared = network(pixels, (), 0, True), network(pixels)
    for name, values in spared.embeddings.items():
        assert relative_error(values, whole.embeddings[name]) < EXACT
    assert relative_error(spared.logits, whole.logits) < EXACT
    found = {
        pool: whole.embeddings[embedding_name(config, pool)] for pool in POOLINGS if pool != "cls" or config.class_token
    }
    for pool, values in found.items():
        assert values.shape == (len(pixels), embedding_width(config, pool))
    return found


@pytest.mark.parametrize("case", test_timm.CASES)
def test_embeddings_are_those_of_timm(case: str, tmp_path: Path) -> None:
    model = test_timm.make(case, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    config, pixels = checkpoint.vit, pictures(checkpoint)
    found = embeddings_of(checkpoint, pixels)
    with torch.inference_mode():
        tokens = model.forward_features(pixels)
        expected = {"head": model.forward_head(tokens, pre_logits=True)}
        # Where timm's final norm stands behind its pooling, ours is behind each of these, too.
        norm = model.fc_norm if config.norm_after_pool else torch.nn.Identity()
        expected["mean"] = norm(tokens[:, config.prefix_tokens :].mean(dim=1))
        if config.class_token:
            expected["cls"] = norm(tokens[:, 0])
    assert found.keys() == expected.keys()
    for pool, values in found.items():
        assert relative_error(values, expected[pool]) < EXACT, pool


@pytest.mark.parametrize("case", test_huggingface.CASES)
def test_the_heads_embedding_is_what_the_classifier_of_transformers_reads(case: str, tmp_path: Path) -> None:
    model = test_huggingface.make(case, tmp_path)
    read: list[Tensor] = []

    def note(_: Any, inputs: tuple[Tensor, ...]) -> None:
        read.append(inputs[0])

    heads = [module for name, module in model.named_modules() if name.endswith("classifier")]
    for head in heads:
        head.register_forward_pre_hook(note)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        model(pixels)
    assert len(read) == (2 if case == "deit-teacher" else 1)
    # Of two heads it is the mean of what they read, as in timm.
    assert relative_error(embeddings_of(checkpoint, pixels)["head"], torch.stack(read).mean(dim=0)) < EXACT


def test_a_folder_of_timm_without_a_head(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    headed, pixels = load_checkpoint(str(folder)), torch.randn(2, 3, 16, 16)
    edit(folder / "config.json", lambda config: config.update(num_classes=0))
    edit_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("head.")])
    headless = load_checkpoint(str(folder))
    assert headless.labels == ()
    ours, expected = (checkpoint.build()(pixels).embeddings["head"] for checkpoint in (headless, headed))
    assert torch.equal(ours, expected)


def test_beit_without_a_head_gives_the_mean_that_its_library_gives(tmp_path: Path) -> None:
    model = test_huggingface.make("beit", tmp_path)
    model.beit.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = model.beit(pixels).pooler_output
    assert relative_error(embeddings_of(checkpoint, pixels)["head"], expected) < EXACT
