"""LitServe: `predict` decodes the files of a batch on threads and runs the model."""

import litserve as ls
from fastapi import Request

from benchmarks.peers.common import FileClassifier, Options


class Api(ls.LitAPI):
    """LitServe's hooks, in the order in which it calls them."""

    def setup(self, device: str) -> None:
        """Load the model in the worker process."""
        self.classifier = FileClassifier()

    def decode_request(self, request: Request) -> bytes:
        """The upload of a multipart form."""
        return request["file"].file.read()

    def predict(self, batch: list[bytes]) -> list[dict[str, float]]:
        """Classify a batch."""
        return self.classifier(batch)


if __name__ == "__main__":
    options = Options()
    server = ls.LitServer(
        Api(max_batch_size=options.batch, batch_timeout=options.wait_ms / 1000),
        accelerator="cpu",
        workers_per_device=options.workers,
    )
    server.run(
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        generate_client_file=False,
        access_log=False,
    )
