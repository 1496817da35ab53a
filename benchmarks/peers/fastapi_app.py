"""A hand-written FastAPI app: decoding on threads, a batcher on the event loop, the model on a
thread of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request

from benchmarks.peers.common import Classifier, Decoder, Options, Pixels, classifier_of

options = Options()
decode = Decoder(options.model)
decoders = ThreadPoolExecutor(options.decoders)
engine = ThreadPoolExecutor(1)
queue: asyncio.Queue[tuple[Pixels, asyncio.Future[dict[str, float]]]] = asyncio.Queue()


async def batches(classifier: Classifier) -> None:
    """Answer waiting pictures in batches."""
    loop = asyncio.get_running_loop()
    while True:
        taken = [await queue.get()]
        deadline = loop.time() + options.wait_ms / 1000
        while len(taken) < options.batch:
            try:
                async with asyncio.timeout_at(deadline):
                    taken.append(queue.get_nowait() if queue.qsize() else await queue.get())
            except TimeoutError:
                break
        answers = await loop.run_in_executor(engine, classifier, [pixels for pixels, _ in taken])
        for (_, future), answer in zip(taken, answers, strict=True):
            if not future.done():
                future.set_result(answer)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model on its thread, then start the batcher."""
    classifier = await asyncio.get_running_loop().run_in_executor(engine, classifier_of, options)
    task = asyncio.create_task(batches(classifier))
    yield
    task.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/classify")
async def classify(request: Request) -> dict[str, float]:
    """The best class of the JPEG in the body."""
    loop = asyncio.get_running_loop()
    pixels = await loop.run_in_executor(decoders, decode, await request.body())
    future: asyncio.Future[dict[str, float]] = loop.create_future()
    queue.put_nowait((pixels, future))
    return await future


if __name__ == "__main__":
    uvicorn.run(
        "benchmarks.peers.fastapi_app:app",
        host="127.0.0.1",
        port=options.port,
        workers=options.workers,
        timeout_worker_healthcheck=600,  # the benchmark holds servers that are not under load
        log_level="warning",
        access_log=False,
    )
