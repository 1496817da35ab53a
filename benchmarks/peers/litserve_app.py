"""LitServe: `batch` decodes the pictures of a batch on threads, `predict` runs the model."""

from concurrent.futures import ThreadPoolExecutor

import litserve as ls
from fastapi import Request

from benchmarks.peers.common import Decoder, Options, Pixels, classifier_of


class Api(ls.LitAPI):
    """LitServe's hooks, in the order in which it calls them."""

    def setup(self, device: str) -> None:
        """Load the model in the worker process."""
        options = Options.from_environment()
        self.decode = Decoder(options.model)
        self.pool = ThreadPoolExecutor(options.decoders)
        self.classifier = classifier_of(options)

    def decode_request(self, request: Request) -> bytes:
        """The upload of a multipart form."""
        data: bytes = request["file"].file.read()
        return data

    def batch(self, inputs: list[bytes]) -> list[Pixels]:
        """Decode a batch side by side."""
        return self.decode.many(inputs, self.pool)

    def predict(self, batch: list[Pixels]) -> list[dict[str, float]]:
        """Classify a batch."""
        return self.classifier(batch)


if __name__ == "__main__":
    options = Options.from_environment()
    server = ls.LitServer(
        Api(max_batch_size=options.batch, batch_timeout=options.wait_ms / 1000),
        accelerator="cpu",
        workers_per_device=options.workers,
    )
    server.run(host="127.0.0.1", port=options.port, log_level="warning", generate_client_file=False, access_log=False)
