"""BentoML: one service with an adaptive-batching endpoint that decodes on threads and runs the
model.
"""

from pathlib import Path

import bentoml

from benchmarks.peers.common import FileClassifier, Options

options = Options()


@bentoml.service(
    workers=options.workers,
    traffic={"timeout": 60, "max_concurrency": 512},
    http={"host": "127.0.0.1", "port": options.port},
    logging={"access": {"enabled": False}},
    metrics={"enabled": False},
)
class Service:
    """The worker."""

    def __init__(self) -> None:
        self.classifier = FileClassifier()

    @bentoml.api(batchable=True, max_batch_size=options.batch, max_latency_ms=60_000)
    def classify(self, file: list[Path]) -> list[dict[str, float]]:
        """Files of a multipart form; BentoML batches them over requests."""
        return self.classifier([path.read_bytes() for path in file])
