"""Ray Serve: one replica; decoding on threads, `serve.batch` around the model, which runs on a
thread too.
"""

import asyncio
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import ray
from ray import serve
from starlette.requests import Request

from benchmarks.peers.common import Decoder, Options, Pixels, classifier_of

options = Options()


@serve.deployment(
    num_replicas=options.workers, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1}
)
class Deployment:
    """The replica."""

    def __init__(self) -> None:
        self.decode = Decoder(options.model)
        self.decoders = ThreadPoolExecutor(options.decoders)
        self.engine = ThreadPoolExecutor(1)
        self.classifier = self.engine.submit(classifier_of, options).result()

    @serve.batch(max_batch_size=options.batch, batch_wait_timeout_s=options.wait_ms / 1000)
    async def classify(self, pictures: list[Pixels]) -> list[dict[str, float]]:
        """A batch, off the replica's event loop."""
        return await asyncio.get_running_loop().run_in_executor(
            self.engine, self.classifier, pictures
        )

    async def __call__(self, request: Request) -> dict[str, float]:
        """The JPEG in the body."""
        body = await request.body()
        pixels = await asyncio.get_running_loop().run_in_executor(self.decoders, self.decode, body)
        return await self.classify(pixels)


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="warning")
    serve.start(
        http_options={"host": "127.0.0.1", "port": options.port},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    serve.run(cast(Any, Deployment).bind(), route_prefix="/")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()
