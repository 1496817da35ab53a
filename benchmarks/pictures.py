"""The pictures that are sent: JPEGs of about 500 x 375 and 124 kB, the same for every server."""

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from benchmarks.checkpoints import CACHE, REPOSITORY, shared_folder

_COUNT = 16
_SIZE = (500, 375)
_BYTES = 124_000


def ensure() -> tuple[list[Path], str]:
    """Files of the picture set, made if absent, and where they come from.

    Photographs from the shared folder where they are at hand (of 500 x 375, re-encoded to about 124
    kB so that everyone's load is alike), else this repository's examples.
    """
    folder = CACHE / "pictures"
    source = folder / "SOURCE"
    if not source.exists():
        folder.mkdir(parents=True, exist_ok=True)
        photographs = _photographs(shared_folder() / "data" / "imagenet-samples")
        found = photographs or _examples()
        for index, picture in enumerate(found):
            (folder / f"{index:02}.jpg").write_bytes(jpeg_of_size(picture, _BYTES))
        kind = "ImageNet photographs" if photographs else "pictures: the examples, turned"
        source.write_text(f"{len(found)} {kind}")
    return sorted(folder.glob("*.jpg")), source.read_text()


def jpeg_of_size(picture: Image.Image, wanted: int) -> bytes:
    """A baseline 4:2:0 JPEG at the quality that comes closest to `wanted` bytes."""
    found = []
    for quality in range(98, 40, -2):
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
        found.append(buffer.getvalue())
    return min(found, key=lambda data: abs(len(data) - wanted))


def _photographs(folder: Path) -> Sequence[Image.Image]:
    found = [Image.open(path) for path in sorted(folder.glob("*.JPEG"))]
    return [each for each in found if sorted(each.size) == sorted(_SIZE) and each.mode == "RGB"][
        :_COUNT
    ]


def _examples() -> list[Image.Image]:
    """The examples of this repository, each turned four ways."""
    files = sorted((REPOSITORY / "examples").glob("*.jpg"))
    turned = (
        Image.open(file).convert("RGB").rotate(90 * turn, expand=True)
        for turn in range(4)
        for file in files
    )
    return [ImageOps.fit(picture, _SIZE) for picture in turned]
