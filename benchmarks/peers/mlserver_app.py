"""MLServer: a custom runtime that decodes on threads and runs the model; adaptive batching, if batches are above 1."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import Base64Codec, NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.common import Decoder, Options, classifier_of

options = Options.from_environment()


class Vit(MLModel):
    """The runtime; its pictures are base64, as its REST protocol has JSON alone."""

    async def load(self) -> bool:
        """Load the model on the thread that will run it."""
        alone = options.batch == 1
        self.decode = Decoder(options.model)
        self.decoders = ThreadPoolExecutor(options.decoders)
        self.engine = self.decoders if alone else ThreadPoolExecutor(1)
        self.classifier = await asyncio.get_running_loop().run_in_executor(self.engine, classifier_of, options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """The best classes of the pictures of a batch."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self.engine, self.classify, payload)
        index = np.array([[answer["index"]] for answer in answers], np.int32)
        score = np.array([[answer["score"]] for answer in answers], np.float32)
        outputs = [NumpyCodec.encode_output("index", index), NumpyCodec.encode_output("score", score)]
        return InferenceResponse(model_name=self.name, outputs=outputs)

    def classify(self, payload: InferenceRequest) -> list[dict[str, float]]:
        """What is done off the event loop."""
        files = Base64Codec.decode_input(payload.inputs[0])
        if len(files) == 1:
            return self.classifier([self.decode(files[0])])
        return self.classifier(self.decode.many(files, self.decoders))


async def main() -> None:
    """Serve one model in this process, or in several workers behind it."""
    settings = Settings(
        host="127.0.0.1",
        http_port=options.port,
        grpc_port=0,
        metrics_endpoint=None,
        parallel_workers=0 if options.workers == 1 else options.workers,
        debug=False,
    )
    batching = {} if options.batch == 1 else {"max_batch_size": options.batch, "max_batch_time": options.wait_ms / 1000}
    await MLServer(settings).start([ModelSettings(name="vit", implementation=Vit, **batching)])


if __name__ == "__main__":
    asyncio.run(main())
