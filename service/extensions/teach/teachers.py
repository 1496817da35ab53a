"""Who teaches a head for `vitserve teach`: a model loaded here, or a running server."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from model.errors import InputError
from model.extensions.taught.known_examples import first_equal_indices
from model.extensions.taught.taught_heads import Features
from service.cli.answers import Embedding, LocalAnswers, ServerAnswers
from service.cli.image_files import writing
from service.extensions.teach.fit import taught_head
from service.extensions.teach.heads import features_of
from vitserve.client import Conflict, Forbidden, InvalidParameter, NotFound
from vitserve.head_documents import HeadDescription, Knowledge

_POLL_SECONDS: Final = 0.25
"""Interval at which a server is asked whether it has fitted a head."""
_FIT_SECONDS: Final = 120.0

_ALL_PICTURES_REFUSED: Final = (Forbidden, NotFound, Conflict, InvalidParameter)
"""Errors that do not depend on the picture.

Teaching is forbidden or off, the name is taken, the head is full, or it spells the label otherwise.
"""


class LocalTeacher:
    """Fits a head here, to the features of a loaded model, and writes it to `output`."""

    def __init__(self, answers: LocalAnswers, output: Path) -> None:
        self._output = output
        self._answers = answers
        self._features = Features.of(answers.info.config)
        self._examples: dict[Path, Embedding] = {}

    def teach(self, head: str, labels: Mapping[Path, str]) -> Iterator[tuple[Path, int | str]]:
        """Yield each file with its number among the examples, or why it is not one."""
        for file, row in self._answers.embed(list(labels), self._features.pool, normalize=False):
            if isinstance(row, str):
                yield file, row
                continue
            self._examples[file] = row
            yield file, len(self._examples) - 1

    def finish(self, head: str, labels: Mapping[Path, str]) -> Knowledge:
        """Fit and write the head, and return its statistics.

        Raises:
            InputError: no picture could be read, or the file cannot be written.
        """
        if not self._examples:
            raise InputError("path", "no picture can be read")
        rows = np.stack(list(self._examples.values()))
        row_labels = np.array([labels[file] for file in self._examples])
        numbers: list[int] = []
        for label in dict.fromkeys(row_labels.tolist()):
            candidates = np.flatnonzero(row_labels == label)
            numbers += candidates[np.unique(first_equal_indices(rows[candidates]))].tolist()
        info = self._answers.info
        backbone = features_of(info, self._features)
        distinct_labels = row_labels[numbers].tolist()
        taught = taught_head(rows[numbers], distinct_labels, numbers, backbone, info.name)
        with writing(self._output):
            # A server reads the folder at any moment.
            part = self._output.with_name(f".{self._output.name}")
            part.write_bytes(taught.to_bytes())
            part.replace(self._output)
        return Knowledge.model_validate_json(taught.statistics)


class ServerTeacher:
    """Sends examples to a server, which fits the head."""

    def __init__(self, answers: ServerAnswers) -> None:
        self._answers = answers

    def teach(self, head: str, labels: Mapping[Path, str]) -> Iterator[tuple[Path, int | str]]:
        """Yield each file with its number among the examples, or why it is not one."""
        client = self._answers.client
        backbone = self._answers.model
        client.model(backbone)  # an unreachable service fails once, not for each file

        def add(file: Path) -> int:
            try:
                return client.teach(head, labels[file], file, backbone=backbone).numbers[0]
            except _ALL_PICTURES_REFUSED as error:
                raise InputError("name", str(error)) from None

        return self._answers.stream(list(labels), add)

    def finish(self, head: str, labels: Mapping[Path, str]) -> HeadDescription:
        """Wait until the server has fitted the head, and return its description."""
        deadline = time.monotonic() + _FIT_SECONDS
        while True:
            description = self._answers.client.head(head)
            if description.up_to_date or time.monotonic() >= deadline:
                return description
            time.sleep(_POLL_SECONDS)
