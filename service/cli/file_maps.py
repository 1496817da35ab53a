"""The maps of files, in-process or through a server, for `vitserve attention`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import ImageError, InputError
from model.images.heatmap import render_heatmap
from model.images.sheet import in_a_row
from model.prediction import MapRequest, parse_head, parse_layer
from service.cli.image_files import read_pixels
from service.client import Client, ClientError
from service.engine.messages import ModelInfo

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor
    from service.settings import Settings

_CHUNK: Final = 8
"""Images computed together at most: a bar that moves, and little memory."""

_DEFAULT_METHOD: Final = "relevance"


@dataclass(frozen=True, slots=True)
class MapChoice:
    """Which maps are wanted of each file, and how they are drawn; None is the default.

    Attributes:
        classes: labels or indices; empty: the best class of each picture.
        look: arguments of the drawing that were given: `overlay`, `alpha`, `colormap`, `size`.
        side_by_side: whether the picture stands beside its maps.
        drawn: whether a drawing is wanted.
        numbers: whether the values are wanted.
    """

    method: str | None = None
    classes: Sequence[str] = ()
    layer: int | None = None
    head: str | None = None
    look: dict[str, Any] = field(default_factory=dict)
    side_by_side: bool = False
    drawn: bool = True
    numbers: bool = False

    def effective_method(self) -> str:
        """Return the method: a layer or a head without one means `cls`."""
        attended = self.layer is not None or self.head is not None
        return self.method or ("cls" if attended else _DEFAULT_METHOD)


@dataclass(frozen=True, slots=True)
class FileMaps:
    """The maps of one file, or the error that left it without any.

    Attributes:
        label, score: of the best class.
        facts: what the maps are of.
        drawing: the maps beside each other, behind the picture where that was wanted.
        values: float32 [rows, columns], or [maps, rows, columns] for several classes.
    """

    file: Path
    label: str = ""
    score: float = 0.0
    facts: str = ""
    drawing: Image.Image | None = None
    values: NDArray[np.float32] | None = None
    error: str | None = None


def maps_of_server(files: Sequence[Path], choice: MapChoice, client: Client) -> Iterator[FileMaps]:
    """Ask a server for each file's maps; an answer that concerns one file alone is that file's error.

    Raises:
        ClientError: the server does not answer at all.
    """
    client.labels()
    asked = {"method": choice.method, "layer": choice.layer, "head": choice.head, "class_": choice.classes or None}
    wanted: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    facts = ", ".join(
        f"{name.rstrip('_')} {' and '.join(value) if name == 'class_' else value}" for name, value in wanted.items()
    )

    def ask(file: Path) -> FileMaps:
        best = client.classify(file, top_k=1).predictions[0]
        panels = []
        if choice.drawn and choice.side_by_side:
            # Without the colour bar, which would be one of no map.
            plain = {name: value for name, value in choice.look.items() if name in ("size", "view")}
            panels.append(client.heat_map(file, alpha=0, **plain))
        if choice.drawn:
            panels.append(client.heat_map(file, **wanted, **choice.look))
        values = client.attention_array(file, **wanted) if choice.numbers else None
        drawing = in_a_row([_opened(panel) for panel in panels]) if panels else None
        return FileMaps(file, best.label, best.score, facts, drawing, values)

    for file, found in client.stream(files, ask, concurrency=4):
        yield FileMaps(file, error=str(found)) if isinstance(found, ClientError | OSError) else found


def maps_in_process(
    files: Sequence[Path], choice: MapChoice, predictor: Predictor, info: ModelInfo, settings: Settings
) -> Iterator[FileMaps]:
    """Compute each file's maps here; a file that cannot be read or decoded has an error.

    Raises:
        InputError: the model has no such class, layer, head or method.
    """
    compute = _MapComputer(choice, predictor, info)

    def decode(file: Path) -> NDArray[np.uint8] | str:
        try:
            return read_pixels(file, info.preprocess, settings)
        except (ImageError, OSError) as error:
            return str(error)

    remaining = iter(files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(islice(remaining, min(_CHUNK, predictor.max_batch))):
            decoded = list(pool.map(decode, chunk))
            good = [pixels for pixels in decoded if not isinstance(pixels, str)]
            found = iter(compute.maps(np.stack(good)) if good else ())
            for file, pixels in zip(chunk, decoded, strict=True):
                if isinstance(pixels, str):
                    yield FileMaps(file, error=pixels)
                    continue
                label, score, facts, values = next(found)
                drawing = _drawn(values, pixels, choice) if choice.drawn else None
                yield FileMaps(file, label, score, facts, drawing, values if len(values) > 1 else values[0])


class _MapComputer:
    """Computes the best class, the facts and the maps of batches, all by one method."""

    def __init__(self, choice: MapChoice, predictor: Predictor, info: ModelInfo) -> None:
        self._predictor, self._info = predictor, info
        self._method = choice.effective_method()
        self._classes = [class_index(text, info.labels) for text in choice.classes]
        if self._method != "cls":
            for name, given in (("layer", choice.layer), ("head", choice.head)):
                if given is not None:
                    raise InputError(name, f"--{name} does not apply to method {self._method}")
            self._prepare()
        elif self._classes:
            raise InputError("class", "--class does not apply to method cls")
        depth, heads = info.config.depth, info.config.heads
        self._request = MapRequest(parse_layer(choice.layer, depth), parse_head(choice.head, heads))

    def _prepare(self) -> None:
        """Build the module that methods other than `cls` run on, in float32 on the predictor's device."""
        from model.explanation.methods import METHODS  # noqa: PLC0415  torch takes seconds to import
        from model.runtime.torch_backend import Normalise  # noqa: PLC0415

        if self._method not in METHODS:
            raise InputError("method", f"--method {self._method}: expected one of cls, {', '.join(METHODS)}")
        self._specific = METHODS[self._method].class_specific
        if self._classes and not self._specific:
            raise InputError("class", f"--class does not apply to method {self._method}")
        self._model = self._predictor.checkpoint.build().to(self._predictor.device)
        self._normalise = Normalise(self._info.preprocess).to(self._predictor.device)

    def maps(self, pixels: NDArray[np.uint8]) -> Iterator[tuple[str, float, str, NDArray[np.float32]]]:
        """Give each image's best class, its score, the facts of its maps, and these, float32 [maps, rows, columns]."""
        requests = [self._request] * len(pixels) if self._method == "cls" else []
        found = self._predictor.predict(pixels, top_k=1, maps=requests)
        tops = found.indices[:, 0].tolist()
        best = [(self._info.labels[top], float(score)) for top, score in zip(tops, found.scores[:, 0], strict=True)]
        if self._method == "cls":
            for named, map_ in zip(best, found.maps, strict=True):
                assert map_ is not None, "a map was asked for"
                facts = f"layer {map_.layer}, head {map_.head}, {_patches(map_.values, map_.kept_mass)}"
                yield *named, facts, map_.values[np.newaxis]
            return
        wanted = [self._classes or [top] for top in tops]
        values, kept = self._explain(pixels, wanted)
        for named, classes, maps, mass in zip(best, wanted, values, kept, strict=True):
            of = f" of {', '.join(self._info.labels[index] for index in classes)}" if self._specific else ""
            yield *named, f"{self._method}{of}, {_patches(maps[0], float(mass[0]))}", maps

    def _explain(
        self, pixels: NDArray[np.uint8], classes: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the maps of each image's classes, float32 [B, classes, rows, columns], and their kept mass."""
        import torch  # noqa: PLC0415

        from model.explanation.methods import explain_with_mass  # noqa: PLC0415

        each = len(classes[0])
        inputs = self._normalise(torch.from_numpy(pixels).to(self._predictor.device)).repeat_interleave(each, dim=0)
        flat = torch.tensor(classes, device=inputs.device).flatten()
        values, kept = explain_with_mass(self._model, inputs, flat, self._method)
        maps: NDArray[np.float32] = values.reshape(len(pixels), each, *values.shape[1:]).cpu().numpy()
        return maps, kept.reshape(len(pixels), each).cpu().numpy()


def class_index(text: str, labels: Sequence[str]) -> int:
    """Return the index of a class: an integer is one, anything else a label or the first of its synonyms.

    Raises:
        InputError: there is no such class, or several.
    """
    if text.isascii() and text.isdecimal():
        if int(text) >= len(labels):
            raise InputError("class", f"class {text}: the model has classes 0 ... {len(labels) - 1}")
        return int(text)
    name = text.casefold().strip()
    exact = [index for index, label in enumerate(labels) if label.casefold() == name]
    found = exact or [
        index for index, label in enumerate(labels) if name in [part.strip() for part in label.casefold().split(",")]
    ]
    if not found:
        raise InputError("class", f"class {text!r}: the model has no such label")
    if len(found) > 1:
        raise InputError(
            "class", f"class {text!r}: classes {', '.join(map(str, found))} have this label; give a number"
        )
    return found[0]


def _drawn(values: NDArray[np.float32], pixels: NDArray[np.uint8], choice: MapChoice) -> Image.Image:
    look = {name: value for name, value in choice.look.items() if name != "overlay"}
    picture = pixels if choice.look.get("overlay", True) else None
    drawings = [render_heatmap(map_, picture=picture, **look) for map_ in values]
    if choice.side_by_side:
        drawings.insert(0, render_heatmap(values[0], picture=pixels, alpha=0, size=look.get("size")))
    return in_a_row([_opened(drawing) for drawing in drawings])


def _patches(values: NDArray[np.float32], kept_mass: float) -> str:
    rows, columns = values.shape
    return f"{rows}x{columns} patches, kept mass {kept_mass:.2f}"


def _opened(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png)) as picture:
        return picture.convert("RGB")
