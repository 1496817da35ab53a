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
from model.images.heatmap import Look, draw_heatmap
from model.images.preprocess import ModelInput
from model.images.sheet import in_a_row
from model.prediction import AttentionMap, MapRequest, RequestedOutputs, parse_maps
from service.cli.image_files import read_input, read_photo
from service.cli.server_flags import while_reachable
from service.engine.messages import ModelInfo
from vitserve.client import Client, ClientError

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor
    from service.settings import Settings

_CHUNK: Final = 8
"""Images computed together at most: a bar that moves, and little memory."""


@dataclass(frozen=True, slots=True)
class MapChoice:
    """Which maps each file gets, and how they are drawn; None is the default.

    Attributes:
        classes: labels or indices; empty: the best class of each picture.
        look: arguments of the drawing that were given: `overlay`, `view`, `smooth`, `colorbar`,
            `alpha`, `colormap`, `size`.
        side_by_side: whether the picture stands beside its maps.
        drawn: whether to draw.
        numbers: whether to return the values.
    """

    method: str | None = None
    classes: Sequence[str] = ()
    layer: int | None = None
    head: str | None = None
    fusion: str | None = None
    discard: float | None = None
    look: dict[str, Any] = field(default_factory=dict)
    side_by_side: bool = False
    drawn: bool = True
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class FileMaps:
    """The maps of one file, or the error that left it without any.

    Attributes:
        label, score: of the best class.
        facts: what the maps are of.
        drawing: the maps beside each other, behind the picture where `side_by_side`.
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
    """Request each file's maps from a server; an error of a single file is in its result.

    Raises:
        ClientError: the server does not answer at all.
    """
    client.labels()
    given = {name: getattr(choice, name) for name in ("method", "layer", "head", "fusion", "discard")}
    given["class_"] = choice.classes or None
    parameters: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    facts = ", ".join(
        f"{name.rstrip('_')} {' and '.join(value) if name == 'class_' else value}" for name, value in parameters.items()
    )

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
        return FileMaps(file, best.label, best.score, facts, drawing, values)

    for file, answer in while_reachable(client.stream(files, ask, concurrency=4), len(files)):
        yield FileMaps(file, error=str(answer)) if isinstance(answer, ClientError | OSError) else answer


def maps_in_process(
    files: Sequence[Path], choice: MapChoice, predictor: Predictor, info: ModelInfo, settings: Settings
) -> Iterator[FileMaps]:
    """Compute each file's maps here; a file that cannot be read or decoded has an error.

    Raises:
        InputError: the model has no such class, layer, head or method.
    """
    requests = map_requests(choice, info)
    if choice.look.get("view") == "photo" and not choice.look.get("overlay", True):
        raise InputError("view", "--view photo does not apply with --no-overlay")

    def decode(file: Path) -> ModelInput | str:
        try:
            return read_input(file, info.preprocess, settings)
        except (ImageError, OSError) as error:
            return str(error)

    remaining = iter(files)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while chunk := list(islice(remaining, min(_CHUNK, predictor.max_batch))):
            decoded = list(pool.map(decode, chunk))
            good = [seen.pixels for seen in decoded if not isinstance(seen, str)]
            # A prediction for each map of a picture.
            results = [predictor.predict(np.stack(good), RequestedOutputs(1, request)) for request in requests if good]
            places = iter(range(len(good)))
            for file, seen in zip(chunk, decoded, strict=True):
                if isinstance(seen, str):
                    yield FileMaps(file, error=seen)
                    continue
                place = next(places)
                maps = [map_ for result in results if (map_ := result[place].map) is not None]
                values = np.stack([map_.values for map_ in maps])
                try:
                    drawing = _drawn(values, file, seen, choice, settings) if choice.drawn else None
                except (ImageError, OSError) as error:
                    yield FileMaps(file, error=str(error))
                    continue
                yield FileMaps(
                    file,
                    info.labels[int(results[0][place].indices[0])],
                    float(results[0][place].scores[0]),
                    _facts(maps, info.labels),
                    drawing,
                    values if len(values) > 1 else values[0],
                )


def map_requests(choice: MapChoice, info: ModelInfo) -> list[MapRequest]:
    """Return the maps to compute of each picture.

    Raises:
        InputError: the model has no such class, layer, head or method, or one does not apply to the other.
    """
    return parse_maps(
        info.config,
        info.labels,
        method=choice.method,
        classes=",".join(choice.classes) if choice.classes else None,
        layer=choice.layer,
        head=choice.head,
        fusion=choice.fusion,
        discard=choice.discard,
    )


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
