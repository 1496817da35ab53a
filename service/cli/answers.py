"""Answers about image files, by a model of this process or by a server: one interface for the
subcommands.

A file's answer is a value, or a text that says why there is none.
"""

import argparse
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import httpx
import numpy as np
from numpy.typing import NDArray

from model.errors import InputError
from model.heads import first_equal, labels_of_request
from model.images.preprocess import ModelInput
from model.outputs import (
    AttentionMap,
    Outputs,
    Pooling,
    RequestedOutputs,
    parse_embedding,
    parse_maps,
)
from model.taught_heads import Features
from service.cli.image_files import read_input, writing
from service.cli.setting_flags import predictor_from
from service.extensions.teach.fit import taught_head
from service.extensions.teach.heads import features_of
from service.settings import Settings
from vitserve.client import (
    Client,
    ClientError,
    ProblemError,
    Unauthorized,
    Unreachable,
)
from vitserve.documents import HeadDescription, Knowledge, ranked, set_fields

# The fields of a set of labels.
SET: Final = ("set", "set_size", "abstained", "abstained_by")

# Consecutive files without an answer after which the server is taken for gone.
_LOST_IN_A_ROW: Final = 8

# Images whose maps are computed together at most: a bar that moves, and little memory.
_MOST_MAPS: Final = 8

# Between two looks whether a server has fitted a head.
_LOOK_SECONDS: Final = 0.25
_FIT_SECONDS: Final = 120.0
# No other picture would be taken either: forbidden, nothing is taught, the name is taken, or the
# head is full.
_OF_THE_HEAD: Final = (403, 404, 409)

_Answer = TypeVar("_Answer")
# Float32 [D].
Embedding = NDArray[np.float32]


class SeenMaps(NamedTuple):
    """The maps of a picture, one for each class that was asked for, and the picture as the model
    saw it.
    """

    seen: ModelInput
    maps: list[AttentionMap]


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, which a command without it does without, `--model` and `--api-key`."""
    parser.add_argument("--url", help="ask this server instead of loading the model here")
    parser.add_argument(
        "--model", help="which of the server's models answers. Default: the server's default"
    )
    parser.add_argument("--api-key", help="key of the server, without its name [VIT_API_KEY]")
    parser.add_argument(
        "--shrink", action="store_true", help="with --url: send large pictures smaller"
    )


@contextmanager
def answers_from(
    arguments: argparse.Namespace, of_server: Collection[str] = ()
) -> "Iterator[Answers]":
    """Give what the flags name: the server at `--url`, or a model that is loaded here.

    Both classify and embed files, and yield each with its answer or a text that says why there is
    none. `teach` yields each file with its number among the examples of a head, and `taught` what
    the head then knows of itself.

    Args:
        of_server: settings among the flags that this command sends to a server; others need a model
        that is loaded.

    Raises:
        InputError: the server cannot be asked; one line that says what to do.
        SettingsError, CheckpointError, DeviceError: one line that says why the model cannot be
        loaded.
    """
    url: str | None = arguments.url
    if url is None:
        for name in ("model", "api_key", "shrink"):
            if getattr(arguments, name):
                raise InputError(name, f"{_flag(name)}: is for a server: give its --url")
        yield LocalAnswers(arguments)
        return
    _require_address(url)
    for name in Settings.model_fields:
        if hasattr(arguments, name) and name not in of_server:
            raise InputError(
                name,
                f"{_flag(name)}: is for a model that is loaded here: leave it out with --url, "
                "or name one of the server's models with --model",
            )
    key = os.environ.get("VIT_API_KEY") if arguments.api_key is None else arguments.api_key
    try:
        with Client(url, api_key=(key or "").strip() or None, shrink=arguments.shrink) as client:
            yield _ServerAnswers(client, arguments)
    except Unreachable as error:
        hint = "" if error.has_proxy else ": is the server running?"
        raise InputError("url", f"{error}{hint}") from None
    except (httpx.InvalidURL, ClientError) as error:
        raise InputError("url", f"{url}: {error}{_remedy(error)}") from None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _require_address(url: str) -> None:
    """Raise `InputError` if a URL has no scheme, or one that no service speaks."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise InputError("url", f"{url}: expected an address such as http://{url}")
    if scheme.lower() not in ("http", "https"):
        raise InputError("url", f"{url}: expected an address such as http://{rest}")


def _remedy(error: Exception) -> str:
    """Return what to do about an error of a server; nothing if its message says so."""
    if isinstance(error, Unauthorized):
        return ": give one of the server's keys with --api-key or VIT_API_KEY"
    return ""


class LocalAnswers:
    """Answers of a model that is loaded into this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._predictor, self._info, self._settings = predictor_from(arguments)
        self.labels = self._info.labels
        self._examples: dict[Path, Embedding] = {}

    def classify(
        self, files: Sequence[Path], top_k: int
    ) -> Iterator[tuple[Path, dict[str, Any] | str]]:
        """Yield each file with its `predictions`, and the fields of its set of labels if the model
        has a coverage.
        """
        info = self._info
        labels_of_request(None, info.zero_shot, info.config)
        requested = RequestedOutputs(
            min(top_k, info.config.num_classes), label_set=info.coverage is not None
        )

        def answer(_: ModelInput, outputs: list[Outputs]) -> dict[str, Any]:
            [each] = outputs
            kept = each.predicted()
            predictions = ranked(
                info.labels, each.indices[kept].tolist(), each.scores[kept].tolist()
            )
            label_set = None if each.label_set is None else each.label_set.tolist()
            answered = {
                "predictions": predictions,
                "abstained": each.abstains,
                **set_fields(info.labels, label_set),
            }
            if each.abstains:
                answered["abstained_by"] = each.abstained_by()
            return answered

        return self._answers(files, [requested], answer)

    def embed(
        self, files: Sequence[Path], pool: Pooling, normalize: bool
    ) -> Iterator[tuple[Path, Embedding | str]]:
        """Yield each file with its embedding."""

        def answer(_: ModelInput, outputs: list[Outputs]) -> Embedding:
            assert outputs[0].embedding is not None, "it was requested"
            return outputs[0].embedding

        requested = RequestedOutputs(
            1, embedding=parse_embedding(self._info.config, pool, normalize)
        )
        return self._answers(files, [requested], answer)

    def maps(
        self, files: Sequence[Path], classes: Sequence[str], method: str | None
    ) -> Iterator[tuple[Path, SeenMaps | str]]:
        """Yield each file with its maps, by default of its best class."""
        wanted = parse_maps(
            self._info.config, self.labels, classes=",".join(classes) or None, method=method
        )

        def answer(seen: ModelInput, outputs: list[Outputs]) -> SeenMaps:
            return SeenMaps(seen, [each.map for each in outputs if each.map is not None])

        return self._answers(
            files, [RequestedOutputs(1, each) for each in wanted], answer, most=_MOST_MAPS
        )

    def teach(self, head: str, labels: Mapping[Path, str]) -> Iterator[tuple[Path, int | str]]:
        """Yield each file with its number once it is an example of its label."""
        for file, row in self.embed(list(labels), Features.of(self._info.config).pool, False):
            if not isinstance(row, str):
                self._examples[file] = row
            yield file, row if isinstance(row, str) else len(self._examples) - 1

    def taught(self, head: str, labels: Mapping[Path, str], output: Path) -> Knowledge:
        """Write the head that the examples teach, and return what it knows of itself."""
        if not self._examples:
            raise InputError("path", "no picture can be read")
        numbered: dict[str, list[int]] = {}
        for number, file in enumerate(self._examples):
            numbered.setdefault(labels[file], []).append(number)
        rows, kept, own = np.stack(list(self._examples.values())), list[int](), list[str]()
        for label, numbers in numbered.items():
            once = np.unique(first_equal(rows[numbers]))
            kept += [numbers[place] for place in once]
            own += [label] * len(once)
        named = features_of(self._info, Features.of(self._info.config))
        found = taught_head(rows[kept], own, kept, named, self._info.name)
        with writing(output):  # a server reads the folder at any moment
            part = output.with_name(f".{output.name}")
            part.write_bytes(found.to_bytes())
            part.replace(output)
        return Knowledge.model_validate_json(found.statistics)

    def _answers(
        self,
        files: Sequence[Path],
        requests: Sequence[RequestedOutputs],
        answer: Callable[[ModelInput, list[Outputs]], _Answer],
        most: int | None = None,
    ) -> Iterator[tuple[Path, _Answer | str]]:
        """Yield each file with what `answer` makes of its picture and its outputs, one for each
        request.

        Files are decoded on all cores, and computed in the largest batches, of `most` at most.
        """
        remaining, size = (
            iter(files),
            min(most or self._predictor.max_batch, self._predictor.max_batch),
        )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while batch := list(islice(remaining, size)):
                pictures = list(
                    pool.map(
                        lambda file: read_input(file, self._info.preprocess, self._settings), batch
                    )
                )
                pixels = [picture.pixels for picture in pictures if not isinstance(picture, str)]
                passes = [
                    self._predictor.predict(np.stack(pixels), request)
                    for request in requests
                    if pixels
                ]
                outputs = map(list, zip(*passes, strict=True))
                for file, picture in zip(batch, pictures, strict=True):
                    if isinstance(picture, str):
                        yield file, picture
                        continue
                    own = next(outputs)
                    finite = all(each.finite for each in own)
                    yield (
                        file,
                        answer(picture, own)
                        if finite
                        else "the model gives no finite score for this picture",
                    )


class _ServerAnswers:
    """Answers of a running server."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client, self._arguments, self._model = client, arguments, arguments.model

    def classify(
        self, files: Sequence[Path], top_k: int
    ) -> Iterator[tuple[Path, dict[str, Any] | str]]:
        labels = self._labels()
        top_k = min(top_k, len(labels) if labels else self._client.model(self._model).classes)

        def ask(file: Path) -> dict[str, Any]:
            answer = self._client.classify(file, top_k=top_k, labels=labels, model=self._model)
            return answer.model_dump(include={"predictions", *SET}, exclude_none=True)

        return self._stream(files, ask)

    def _labels(self) -> Sequence[str] | None:
        text = getattr(self._arguments, "labels", None)
        if text is None:
            return None
        from model.checkpoint.labels import read_labels  # noqa: PLC0415  its package imports torch

        return read_labels(text, None)

    def embed(
        self, files: Sequence[Path], pool: Pooling, normalize: bool
    ) -> Iterator[tuple[Path, Embedding | str]]:
        self._client.model(self._model)  # one error for all files where there is no service
        own = {"pool": pool, "normalize": normalize, "model": self._model}
        return self._stream(files, lambda file: self._client.embed(file, **own))

    def teach(self, head: str, labels: Mapping[Path, str]) -> Iterator[tuple[Path, int | str]]:
        self._client.model(self._model)

        def ask(file: Path) -> int:
            try:
                return self._client.teach(head, labels[file], file, backbone=self._model).numbers[0]
            except ProblemError as error:
                if error.status in _OF_THE_HEAD:
                    raise InputError("name", str(error)) from None
                raise

        return self._stream(list(labels), ask)

    def taught(self, head: str, labels: Mapping[Path, str], output: Path) -> HeadDescription:
        ends = time.monotonic() + _FIT_SECONDS
        while not (found := self._client.head(head)).up_to_date and time.monotonic() < ends:
            time.sleep(_LOOK_SECONDS)
        return found

    def _stream(
        self, files: Sequence[Path], ask: Callable[[Path], _Answer], concurrency: int = 8
    ) -> Iterator[tuple[Path, _Answer | str]]:
        """Yield each file with its answer, or with why it has none, as long as the server answers.

        Raises:
            ClientError: `_LOST_IN_A_ROW` consecutive files got no answer; the others would only
            wait.
        """
        lost = 0
        for number, (file, answer) in enumerate(
            self._client.stream(files, ask, concurrency=concurrency), start=1
        ):
            lost = lost + 1 if isinstance(answer, Unreachable) else 0
            yield file, str(answer) if isinstance(answer, ClientError | OSError) else answer
            if lost == _LOST_IN_A_ROW and number < len(files):
                left = len(files) - number
                raise ClientError(
                    f"no answer any more, {left} of {len(files)} files were not asked about"
                )


Answers = LocalAnswers | _ServerAnswers
