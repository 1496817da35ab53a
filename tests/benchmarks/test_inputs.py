"""Checkpoints and pictures of the benchmarks are loadable, and the same for everyone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from benchmarks import checkpoints, pictures
from benchmarks.peers.common import Decoder
from model.checkpoint import load_checkpoint
from model.images.preprocess import preprocess


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_SHARED", str(tmp_path / "nothing"))
    monkeypatch.setattr(checkpoints, "CACHE", tmp_path)
    monkeypatch.setattr(pictures, "CACHE", tmp_path)
    monkeypatch.setattr(pictures, "COUNT", 2)
    return tmp_path


@pytest.mark.parametrize("name", list(checkpoints.SHAPES))
def test_our_reader_takes_the_checkpoint_and_its_preprocessing_is_the_peers(cache, name):
    folder, origin = checkpoints.ensure(name)
    [first, second], _ = pictures.ensure()

    checkpoint = load_checkpoint(str(folder))

    shape = checkpoints.SHAPES[name]
    assert origin == "random, seed 0"
    assert (checkpoint.vit.depth, checkpoint.config.width, checkpoint.config.num_classes) == (
        shape.depth,
        shape.width,
        shape.classes,
    )
    for file in (first, second):
        ours = preprocess(file.read_bytes(), checkpoint.preprocess, scaled_decode=False)
        theirs = Decoder(folder)(file.read_bytes())
        assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_synthetic_pictures_are_of_the_size_that_is_promised_and_always_the_same(cache):
    files, origin = pictures.ensure()
    data = [file.read_bytes() for file in files]

    for file in files:
        file.unlink()
    (cache / "pictures" / "SOURCE").unlink()
    again = [file.read_bytes() for file in pictures.ensure()[0]]

    assert "synthetic" in origin
    assert data == again
    assert data[0] != data[1]
    for one in data:
        with Image.open(io.BytesIO(one)) as picture:
            assert picture.size == (500, 375)
        assert 90_000 <= len(one) <= 160_000
