"""Answers about image files, from a model loaded here or from a server, with one interface.

A file's answer is a value, or a text with the reason for its failure.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import ImageError, InputError
from model.images.preprocess import ModelInput
from model.label_texts import labels_of_request
from model.outputs import DEFAULT_TOP_K, AttentionMap, Outputs, Pooling, RequestedOutputs
from model.parameters import parse_embedding, parse_maps
from service.class_fields import class_fields
from service.cli.image_files import read_input
from service.cli.setting_flags import predictor_from
from service.settings import flag_of, settings_class
from vitserve.client import Client, ClientError, Unauthorized, Unreachable

SET_FIELDS: Final = ("set", "set_size", "abstained", "abstained_by")
"""The fields of a label set in an answer."""

_MAX_CONSECUTIVE_FAILURES: Final = 8
"""Consecutive unanswered files after which the command gives up on the server."""

_MAX_MAPS: Final = 8
"""Images whose maps are computed together: few, for a steady progress bar and little memory."""

_SERVER_FLAGS: Final = ("model", "api_key", "shrink")
_NOT_FINITE: Final = "the model gives no finite score for this picture"

_Answer = TypeVar("_Answer")

Embedding = NDArray[np.float32]
"""[D]"""


class SeenMaps(NamedTuple):
    """The maps of a picture, one per requested class, and the picture as the model saw it."""

    seen: ModelInput
    maps: list[AttentionMap]


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--url` and the flags that apply only with it."""
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
    arguments: argparse.Namespace, sent_settings: Collection[str] = ()
) -> "Iterator[Answers]":
    """Yield the source of answers that the flags name: the server at `--url`, or a local model.

    Args:
        arguments: parsed flags of the command.
        sent_settings: settings that the command sends to a server; others need a local model.

    Raises:
        InputError: the server cannot be asked; one line that says what to do.
        SettingsError, CheckpointError, DeviceError: one line that says why the model does not load.
    """
    url: str | None = arguments.url
    if url is None:
        _refuse_server_flags(arguments)
        yield LocalAnswers(arguments)
        return
    _refuse_local_settings(arguments, sent_settings)
    key = arguments.api_key or os.environ.get("VIT_API_KEY")
    try:
        with Client(url, api_key=(key or "").strip() or None, shrink=arguments.shrink) as client:
            yield ServerAnswers(client, arguments)
    except Unreachable as error:
        hint = "" if error.has_remedy else ": is the server running?"
        raise InputError("url", f"{error}{hint}") from None
    except ClientError as error:
        raise InputError("url", f"{url}: {error}{_remedy(error)}") from None


def _refuse_server_flags(arguments: argparse.Namespace) -> None:
    for name in _SERVER_FLAGS:
        if getattr(arguments, name):
            raise InputError(name, f"{flag_of(name)}: applies only to a server; add its --url")


def _refuse_local_settings(arguments: argparse.Namespace, sent_settings: Collection[str]) -> None:
    for name in settings_class().model_fields:
        if hasattr(arguments, name) and name not in sent_settings:
            raise InputError(
                name,
                f"{flag_of(name)}: applies only to a model loaded here; "
                "with --url, leave it out, or choose one of the server's models with --model",
            )


def _remedy(error: Exception) -> str:
    """Return the remedy for an error of a server; empty if its message has the remedy."""
    if isinstance(error, Unauthorized):
        return ": give one of the server's keys, without its name, with --api-key or VIT_API_KEY"
    return ""


def _top_k(top_k: int | None, classes: int) -> int:
    """Return the number of classes in an answer; raises `InputError` for more than there are."""
    if top_k is None:
        return min(DEFAULT_TOP_K, classes)
    if not 1 <= top_k <= classes:
        raise InputError("top_k", f"--top-k {top_k}: expected 1 to {classes}, the model's classes")
    return top_k


class LocalAnswers:
    """Answers of a model that is loaded into this process."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._predictor, self.info, self._settings = predictor_from(arguments)

    def classify(
        self, files: Sequence[Path], top_k: int | None
    ) -> Iterator[tuple[Path, dict[str, Any] | str]]:
        """Yield each file with its `predictions`, and its label set if the model has a coverage."""
        info = self.info
        labels_of_request(None, info.zero_shot, info.config)
        requested = RequestedOutputs(
            _top_k(top_k, info.config.num_classes), label_set=info.coverage is not None
        )

        def answer(_: ModelInput, outputs: list[Outputs]) -> dict[str, Any]:
            [output] = outputs
            return class_fields(output, info.labels)

        return self._answers(files, [requested], answer)

    def embed(
        self, files: Sequence[Path], pool: Pooling, normalize: bool
    ) -> Iterator[tuple[Path, Embedding | str]]:
        """Yield each file with its embedding."""

        def answer(_: ModelInput, outputs: list[Outputs]) -> Embedding:
            embedding = outputs[0].embedding
            assert embedding is not None, "it was requested"
            return embedding

        requested = RequestedOutputs(
            1, embedding=parse_embedding(self.info.config, pool, normalize)
        )
        return self._answers(files, [requested], answer)

    def maps(
        self, files: Sequence[Path], classes: Sequence[str], method: str | None
    ) -> Iterator[tuple[Path, SeenMaps | str]]:
        """Yield each file with its maps, by default of its best class."""
        map_requests = parse_maps(
            self.info.config, self.info.labels, classes=",".join(classes) or None, method=method
        )
        requests = [RequestedOutputs(1, map_request) for map_request in map_requests]

        def answer(seen: ModelInput, outputs: list[Outputs]) -> SeenMaps:
            return SeenMaps(seen, [output.map for output in outputs if output.map is not None])

        return self._answers(files, requests, answer, max_batch=_MAX_MAPS)

    def _answers(
        self,
        files: Sequence[Path],
        requests: Sequence[RequestedOutputs],
        answer: Callable[[ModelInput, list[Outputs]], _Answer],
        max_batch: int | None = None,
    ) -> Iterator[tuple[Path, _Answer | str]]:
        """Yield each file with its answer, which `answer` makes of the picture and its outputs.

        Files are decoded on all cores and computed in batches of at most `max_batch`. A picture has
        one output per request.
        """
        size = self._predictor.max_batch
        if max_batch is not None:
            size = min(size, max_batch)
        remaining = iter(files)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            while batch := list(islice(remaining, size)):
                pictures = list(pool.map(self._read, batch))
                readable = [picture for picture in pictures if not isinstance(picture, str)]
                outputs = self._compute(readable, requests)
                for file, picture in zip(batch, pictures, strict=True):
                    if isinstance(picture, str):
                        yield file, picture
                        continue
                    picture_outputs = next(outputs)
                    if all(output.finite for output in picture_outputs):
                        yield file, answer(picture, picture_outputs)
                    else:
                        yield file, _NOT_FINITE

    def _read(self, file: Path) -> ModelInput | str:
        return read_input(file, self.info.preprocess, self._settings)

    def _compute(
        self, pictures: Sequence[ModelInput], requests: Sequence[RequestedOutputs]
    ) -> Iterator[list[Outputs]]:
        """Yield the outputs of each picture, one for each request."""
        if not pictures:
            return
        pixels = np.stack([picture.pixels for picture in pictures])
        passes = [self._predictor.predict(pixels, request) for request in requests]
        yield from map(list, zip(*passes, strict=True))


class ServerAnswers:
    """Answers of a running server.

    Attributes:
        model: name of the server's model; None: its default.
    """

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self.client = client
        self.model: str | None = arguments.model
        self._labels: str | None = getattr(arguments, "labels", None)

    def classify(
        self, files: Sequence[Path], top_k: int | None
    ) -> Iterator[tuple[Path, dict[str, Any] | str]]:
        """Yield each file with its `predictions`, and its label set if the model has a coverage."""
        labels = self._read_labels()
        classes = len(labels) if labels else self.client.model(self.model).classes
        count = _top_k(top_k, classes)

        def ask(file: Path) -> dict[str, Any]:
            answer = self.client.classify(file, top_k=count, labels=labels, model=self.model)
            return answer.model_dump(include={"predictions", *SET_FIELDS}, exclude_none=True)

        return self.stream(files, ask)

    def _read_labels(self) -> Sequence[str] | None:
        if self._labels is None:
            return None
        from model.checkpoint.labels import read_labels  # noqa: PLC0415  its package imports torch

        return read_labels(self._labels, None)

    def embed(
        self, files: Sequence[Path], pool: Pooling, normalize: bool
    ) -> Iterator[tuple[Path, Embedding | str]]:
        """Yield each file with its embedding."""
        self.client.model(self.model)  # an unreachable service fails once, not for each file

        def ask(file: Path) -> Embedding:
            return self.client.embed(file, pool=pool, normalize=normalize, model=self.model)

        return self.stream(files, ask)

    def stream(
        self, files: Sequence[Path], ask: Callable[[Path], _Answer]
    ) -> Iterator[tuple[Path, _Answer | str]]:
        """Yield each file with its answer, or with the reason for its failure.

        Raises:
            ClientError: the server answered none of `_MAX_CONSECUTIVE_FAILURES` consecutive files.
        """
        failures = 0
        for number, (file, answer) in enumerate(self.client.stream(files, ask), start=1):
            failures = failures + 1 if isinstance(answer, Unreachable) else 0
            yield file, str(answer) if isinstance(answer, ClientError | OSError) else answer
            if failures == _MAX_CONSECUTIVE_FAILURES and number < len(files):
                left = len(files) - number
                raise ClientError(
                    f"the server stopped answering; {left} of {len(files)} files were not sent"
                )


Answers = LocalAnswers | ServerAnswers


def handle_answers(
    answers: Iterable[tuple[Path, _Answer | str]],
    count: int,
    handle: Callable[[Path, _Answer], object],
    name: str,
    *,
    failure: Callable[[Path, str], object] | None = None,
) -> int:
    """Call `handle` with each file and its answer; return 1 if any file fails.

    A bar on stderr shows the progress.

    Args:
        answers: files, each with its answer or the reason for its failure.
        count: number of files.
        handle: called with each answer; an `ImageError` that it raises becomes the file's reason.
        name: noun for an answer, as in "2 of 9 files have no embedding".
        failure: called with each failed file and the reason; None: print both on stderr.
    """
    failed = 0
    for file, answer in tqdm(answers, total=count, unit="image", disable=count < 2 or None):
        try:
            if isinstance(answer, str):
                raise ImageError(answer)
            handle(file, answer)
        except (ImageError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:
                raise  # an error of the output, not of this file
            failed += 1
            if failure is None:  # a line above the progress bar
                tqdm.write(f"vitserve: {file}: {error}", file=sys.stderr)
            else:
                failure(file, str(error))
    if failed:
        print(f"vitserve: {failed} of {count} files have no {name}", file=sys.stderr)
    return int(failed > 0)
