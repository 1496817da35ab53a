"""KServe's SDK: a model whose threads each decode a picture and compute it. The SDK itself does not batch."""

from __future__ import annotations

import asyncio
import base64
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

from benchmarks.peers.common import Decoder, Options, classifier_of

options = Options.from_environment()


class Vit(Model):
    """The model."""

    def __init__(self) -> None:
        super().__init__("vit")
        self.decode = Decoder(options.model)
        self.threads = ThreadPoolExecutor(options.decoders)
        self.classifier = self.threads.submit(classifier_of, options).result()
        self.ready = True

    async def predict(self, payload: InferRequest, *_: Any, **__: Any) -> InferResponse:
        """The best class of a picture."""
        text = payload.inputs[0].data[0]
        answer = await asyncio.get_running_loop().run_in_executor(self.threads, self.classify, text)
        outputs = [
            InferOutput("index", [1, 1], "INT32", [int(answer["index"])]),
            InferOutput("score", [1, 1], "FP32", [answer["score"]]),
        ]
        # Its own REST endpoint takes no answer without an identifier.
        return InferResponse(payload.id or "", self.name, outputs)

    def classify(self, text: str) -> dict[str, float]:
        """What is done off the event loop."""
        return self.classifier([self.decode(base64.b64decode(text))])[0]


if __name__ == "__main__":
    logging.disable(logging.INFO)  # a line for each request
    server = ModelServer(http_port=options.port, enable_grpc=False, workers=1, enable_latency_logging=False)
    server.start([Vit()])
