"""The maps of files, in-process or through a server, for `vitserve attention`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import ImageError, InputError
from model.images.heatmap import Look, draw_heatmap
from model.images.preprocess import ModelInput
from model.images.sheet import in_a_row
from model.prediction import AttentionMap, RequestedOutputs, parse_maps
from service.cli.image_files import predict_files, read_photo
from service.cli.server_flags import ask_about
from service.engine.messages import ModelInfo
from vitserve.client import Client

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor
    from service.settings import Settings

_MOST: Final = 8
"""Images computed together at most: a bar that moves, and little memory."""


@dataclass(frozen=True, slots=True)
class MapChoice:
    """Which maps each file gets, and how they are drawn; what is not given is the default.

    Attributes:
        classes: labels or indices; empty: the best class of each picture.
        options: of `method`, `layer`, `head`, `fusion`, `discard`, those that are given.
        look: of `overlay`, `view`, `smooth`, `colorbar`, `alpha`, `colormap`, `size`, those that are given.
        side_by_side: whether the picture stands beside its maps.
        drawn: whether to draw.
        numbers: whether to return the values.
    """

    classes: Sequence[str]
    options: dict[str, Any]
    look: dict[str, Any]
    side_by_side: bool
    drawn: bool
    numbers: bool


@dataclass(frozen=True, slots=True)
class FileMaps:
    """The maps of one file.

    Attributes:
        label, score: of the best class.
        facts: what the maps are of.
        drawing: the maps beside each other, behind the picture where `side_by_side`.
        values: float32 [rows, columns], or [maps, rows, columns] for several classes.
    """

    label: str
    score: float
    facts: str
    drawing: Image.Image | None
    values: NDArray[np.float32] | None


def maps_of_server(files: Sequence[Path], choice: MapChoice, client: Client) -> Iterator[tuple[Path, FileMaps | str]]:
    """Yield each file with its maps from a server, or with why it has none.

    Raises:
        ClientError: the server does not answer at all.
    """
    client.labels()
    classes: dict[str, Any] = {"class_": choice.classes} if choice.classes else {}
    parameters = choice.options | classes
    named = choice.options | ({"class": " and ".join(choice.classes)} if choice.classes else {})
    facts = ", ".join(f"{name} {value}" for name, value in named.items())

    def ask(file: Path) -> FileMaps:
        best = client.classify(file, top_k=1).predictions[0]
        panels = []
        if choice.drawn and choice.side_by_side:
            # Without the colour bar, as no map is drawn.
            plain = {name: value for name, value in choice.look.items() if name in ("size", "view")}
            panels.append(client.heat_map(file, alpha=0, **plain))
        if choice.drawn:
            panels.append(client.heat_map(file, **parameters, **choice.look))
        values = client.attention_array(file, **parameters) if choice.numbers else None
        drawing = in_a_row(map(_opened, panels), len(panels)) if panels else None
        return FileMaps(best.label, best.score, facts, drawing, values)

    return ask_about(files, client, ask, concurrency=4)


def maps_in_process(
    files: Sequence[Path], choice: MapChoice, predictor: Predictor, info: ModelInfo, settings: Settings
) -> Iterator[tuple[Path, FileMaps | str]]:
    """Compute and yield each file's maps, or why it has none.

    Raises:
        InputError: the model has no such class, layer, head or method.
    """
    classes = ",".join(choice.classes) if choice.classes else None
    maps_of_picture = parse_maps(info.config, info.labels, classes=classes, **choice.options)
    if choice.look.get("view") == "photo" and not choice.look.get("overlay", True):
        raise InputError("view", "--view photo does not apply with --no-overlay")
    requests = [RequestedOutputs(1, request) for request in maps_of_picture]
    for file, answer in predict_files(files, requests, predictor, info, settings, most=_MOST):
        if isinstance(answer, str):
            yield file, answer
            continue
        picture, outputs = answer
        maps = [each.map for each in outputs if each.map is not None]
        values = np.stack([each.values for each in maps])
        try:
            drawing = _drawn(values, file, picture, choice, settings) if choice.drawn else None
        except (ImageError, OSError) as error:
            yield file, str(error)
            continue
        label, score = info.labels[int(outputs[0].indices[0])], float(outputs[0].scores[0])
        values = values if len(values) > 1 else values[0]
        yield file, FileMaps(label, score, _facts(maps, info.labels), drawing, values)


def _facts(maps: Sequence[AttentionMap], labels: Sequence[str]) -> str:
    request, classes = maps[0].request, (map_.request.class_index for map_ in maps)
    of_classes = " and ".join(labels[index] for index in classes if index is not None)
    what: str = request.method
    if request.method == "cls":
        what = f"layer {request.layer}, head {request.head}"
    elif request.method == "rollout":
        what = f"rollout, fusion {request.fusion}, discard {request.discard:g}"
    rows, columns = maps[0].values.shape
    patches = f"{rows}x{columns} patches, kept mass {maps[0].kept_mass:.2f}"
    return f"{what}{' of ' if of_classes else ''}{of_classes}, {patches}"


def _drawn(
    values: NDArray[np.float32], file: Path, seen: ModelInput, choice: MapChoice, settings: Settings
) -> Image.Image:
    look: Look = {name: value for name, value in choice.look.items() if name not in ("overlay", "view")}  # type: ignore[assignment]  # its names are those of Look
    picture, region = seen.pixels, None
    if choice.look.get("view") == "photo":
        picture, region = read_photo(file, seen.region, look.get("size"), settings)
    under = picture if choice.look.get("overlay", True) else None
    drawings = [draw_heatmap(map_, picture=under, region=region, **look) for map_ in values]
    if choice.side_by_side:
        drawings.insert(0, draw_heatmap(values[0], picture=picture, region=region, alpha=0, size=look.get("size")))
    return in_a_row(drawings, len(drawings))


def _opened(png: bytes) -> Image.Image:
    with Image.open(io.BytesIO(png)) as picture:
        return picture.convert("RGB")
