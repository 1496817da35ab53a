"""mosec: a stage of processes that decode, then a stage whose process runs batches."""

from __future__ import annotations

import sys
from typing import Any

from mosec import Server, Worker

from benchmarks.peers.common import Decoder, Options, Pixels, classifier_of


class Decode(Worker):
    """Ingress: bytes to pixels."""

    def __init__(self) -> None:
        self.decode = Decoder(Options.from_environment().model)

    def deserialize(self, data: bytes) -> bytes:
        """The body as it is."""
        return data

    def forward(self, data: bytes) -> Pixels:
        """One picture."""
        return self.decode(data)


class Classify(Worker):
    """Egress: a batch of pixels to answers, which mosec encodes as JSON."""

    def __init__(self) -> None:
        self.classifier = classifier_of(Options.from_environment())

    def forward(self, data: list[Pixels]) -> list[dict[str, Any]]:
        """One batch."""
        return self.classifier(data)


class Whole(Worker):
    """One stage that does both in each of its processes: nothing goes from process to process but files."""

    def __init__(self) -> None:
        options = Options.from_environment()
        self.decode = Decoder(options.model)
        self.classifier = classifier_of(options)

    def deserialize(self, data: bytes) -> bytes:
        """The body as it is."""
        return data

    def forward(self, data: list[bytes]) -> list[dict[str, Any]]:
        """One batch."""
        return self.classifier([self.decode(file) for file in data])


if __name__ == "__main__":
    options = Options.from_environment()
    # mosec reads its own settings from the command line.
    sys.argv[1:] = [
        "--address",
        "127.0.0.1",
        "--port",
        str(options.port),
        "--timeout",
        "30000",
        "--log-level",
        "warning",
    ]
    server = Server()
    wait = max(1, int(options.wait_ms))
    if options.decoders:
        server.append_worker(Decode, num=options.decoders)
        server.append_worker(Classify, num=options.workers, max_batch_size=options.batch, max_wait_time=wait)
    else:
        server.append_worker(Whole, num=options.workers, max_batch_size=options.batch, max_wait_time=wait)
    server.run()
