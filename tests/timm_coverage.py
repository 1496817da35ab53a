"""How many of timm's Vision Transformers are read, and whether a sample of them is exact.

`python -m tests.timm_coverage --sample 60 --seed 0` prints what is read of timm's isotropic
architectures and of their released classifiers, counts the others by family, and runs a sample of the released ones.
These are made by timm with their own width and input size but two blocks, random everywhere, and saved by timm.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import tempfile
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from model.checkpoint import load_checkpoint
from model.checkpoint.timm_architectures import architectures
from model.images.preprocess import preprocess
from tests.model.checkpoint.parity import pictures, randomise, relative_error
from tests.timm_reference import timm

MODULES = (
    *("beit", "cait", "deit", "eva", "naflexvit", "vision_transformer", "vision_transformer_hybrid"),
    *("vision_transformer_relpos", "vision_transformer_sam", "xcit"),
)
"""timm's files of networks whose tokens are as many and as wide from the first block to the last."""

TOLERANCE = 1e-5

FEWEST_CLASSES = 1000
"""What is released with fewer is no classifier but an image tower of CLIP, whose head is the projection."""


class Sampled(NamedTuple):
    """How one architecture compares: the logits' relative error, and the pixels' largest difference in levels."""

    logits: float
    levels: float


def isotropic() -> dict[str, str]:
    """Return the file of each of timm's isotropic architectures, by its name."""
    library = timm()
    return {name: module for module in MODULES for name in library.list_models(module=module)}


def released() -> list[str]:
    """Return the released classifiers of these architectures, `architecture.tag`."""
    library, names = timm(), isotropic()
    configs = {name: library.get_pretrained_cfg(name) for name in library.list_pretrained()}
    return sorted(
        name
        for name, config in configs.items()
        if name.split(".")[0] in names and config.has_weights and config.num_classes >= FEWEST_CLASSES
    )


def read(names: list[str]) -> list[str]:
    """Return those of the architectures, or of the released classifiers, that are read."""
    return [name for name in names if name.split(".")[0] in architectures()]


def sample(count: int, seed: int, widest: int = 10_000) -> list[str]:
    """Return released classifiers that are read, drawn from a seed, of networks that are at most so wide."""
    table = architectures()
    names = [name for name in read(released()) if table[name.split(".")[0]].get("embed_dim", 768) <= widest]
    return random.Random(seed).sample(names, min(count, len(names)))


def compare(name: str) -> Sampled:
    """Return how a released classifier, made with two blocks and random weights, compares with timm.

    Args:
        name: `architecture.tag`.
    """
    library = timm()
    torch.manual_seed(0)
    model: Any = library.create_model(name, depth=2, pretrained=False).eval()
    randomise(model)
    labels = {"label_names": [str(index) for index in range(model.num_classes)]}
    with tempfile.TemporaryDirectory() as folder:
        library.models.save_for_hf(model, folder, model_config=labels, safe_serialization=True)
        checkpoint = load_checkpoint(folder)
        built = checkpoint.build()
    pixels = pictures(checkpoint, 2)
    with torch.inference_mode():
        error = relative_error(built(pixels).logits, model(pixels))
    data = library.data.resolve_data_config({}, model=model)
    assert (checkpoint.preprocess.mean, checkpoint.preprocess.std) == (tuple(data["mean"]), tuple(data["std"]))
    expected = np.asarray(library.data.create_transform(**data, normalize=False)(_picture()), dtype=np.float64)
    stored = io.BytesIO()
    _picture().save(stored, "PNG")
    got = preprocess(stored.getvalue(), checkpoint.preprocess, scaled_decode=False).transpose(2, 0, 1)
    return Sampled(error, float(np.abs(got - expected).max()))


def _picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (90, 75, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((500, 601), Image.Resampling.BICUBIC)


def main(arguments: list[str] | None = None) -> int:
    """Print the coverage and the sample; return 1 if one of it is not exact."""
    parser = argparse.ArgumentParser(prog="python -m tests.timm_coverage", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="how many released classifiers to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--widest", type=int, default=10_000, help="of the sampled networks")
    options = parser.parse_args(arguments)
    modules, classifiers = isotropic(), released()
    for what, names in (("architectures", list(modules)), ("released classifiers", classifiers)):
        print(f"{len(read(names))} of {len(names)} {what} are read")
        others = Counter(modules[name.split(".")[0]] for name in names if name not in read(names))
        for module, count in others.most_common():
            print(f"  {count:3} are not, of {module}")
    bad = 0
    chosen = sample(options.sample, options.seed, options.widest)
    for name in chosen:
        found = compare(name)
        exact = found.logits < TOLERANCE and found.levels <= 1
        bad += not exact
        print(f"{name:60} {found.logits:.1e} {found.levels:.2f} levels{'' if exact else ' WRONG'}", flush=True)
    if chosen:
        print(f"{len(chosen) - bad} of {len(chosen)} are exact")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
