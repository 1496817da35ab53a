"""Triton through pytriton: a dynamic batcher before a Python function that decodes on threads and
runs the model.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.peers.common import FileClassifier, Options

options = Options()


def main() -> None:
    """Load the model, bind it, serve."""
    classifier = FileClassifier()

    @batch
    def infer(image: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """image: bytes [B, 1] -> index int32 [B, 1]."""
        answers = classifier([row[0] for row in image])
        return {"index": np.array([[answer["index"]] for answer in answers], np.int32)}

    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=options.port,
        allow_grpc=False,
        allow_metrics=False,
        http_thread_count=4,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="vit",
            infer_func=infer,
            inputs=[Tensor(name="image", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="index", dtype=np.int32, shape=(1,))],
            config=ModelConfig(
                max_batch_size=options.batch,
                batcher=DynamicBatcher(max_queue_delay_microseconds=int(1000 * options.wait_ms)),
            ),
            strict=False,
        )
        triton.serve()


if __name__ == "__main__":
    main()
