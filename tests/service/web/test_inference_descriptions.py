"""The documents of the Open Inference Protocol, whole: clients read their fields by name."""

from __future__ import annotations

import pytest

from model.config import PreprocessConfig
from service.engine.messages import BatchReport
from service.observe.metrics import Metrics
from service.web.inference_protocol.descriptions import (
    model_configuration,
    model_metadata,
    model_statistics,
    server_metadata,
)
from tests.service.fakes import model_info

INFO = model_info(
    backend="torch 2.9 compiled",
    preprocess=PreprocessConfig(
        size=(8, 12),
        resize="squash",
        resize_size=(8, 12),
        interpolation="nearest",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    ),
)


def test_metadata() -> None:
    assert server_metadata("1.2", swaps=False) == {
        "name": "vitserve",
        "version": "1.2",
        "extensions": ["binary_tensor_data", "classification", "model_configuration", "statistics"],
    }
    assert server_metadata("1.2", swaps=True)["extensions"][-1] == "model_repository"
    assert model_metadata(INFO) == {
        "name": "fake",
        "versions": ["1"],
        "platform": "vitserve",
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1]},
            {"name": "pixels", "datatype": "UINT8", "shape": [-1, 8, 12, 3]},
        ],
        "outputs": [
            {"name": "label", "datatype": "BYTES", "shape": [-1, -1]},
            {"name": "index", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "score", "datatype": "FP32", "shape": [-1, -1]},
            {"name": "logits", "datatype": "FP32", "shape": [-1, 10]},
            {"name": "attention", "datatype": "FP32", "shape": [-1, 2, 2]},
            {"name": "evidence", "datatype": "FP32", "shape": [-1, 1]},
            {"name": "embedding", "datatype": "FP32", "shape": [-1, 8]},
        ],
    }


@pytest.mark.parametrize(("device", "kind"), [("cpu", "KIND_CPU"), ("cuda:0", "KIND_GPU")])
def test_configuration(device: str, kind: str) -> None:
    assert model_configuration(model_info(backend="torch 2.9 compiled", device=device)) == {
        "name": "fake",
        "platform": "vitserve",
        "backend": "torch",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [
            {"name": "image", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
            {"name": "pixels", "data_type": "TYPE_UINT8", "dims": [-1, 8, 8, 3], "optional": True},
        ],
        "output": [
            {"name": "label", "data_type": "TYPE_STRING", "dims": [-1, -1]},
            {"name": "index", "data_type": "TYPE_INT64", "dims": [-1, -1]},
            {"name": "score", "data_type": "TYPE_FP32", "dims": [-1, -1]},
            {"name": "logits", "data_type": "TYPE_FP32", "dims": [-1, 10]},
            {"name": "attention", "data_type": "TYPE_FP32", "dims": [-1, 2, 2]},
            {"name": "evidence", "data_type": "TYPE_FP32", "dims": [-1, 1]},
            {"name": "embedding", "data_type": "TYPE_FP32", "dims": [-1, 8]},
        ],
        "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": 0},
        "instance_group": [{"name": "fake", "kind": kind, "count": 1}],
        "parameters": {
            "architecture": {"string_value": "fake_vit"},
            "device": {"string_value": device},
            "dtype": {"string_value": "float32"},
        },
    }


def test_statistics_sum_what_the_metrics_have_counted() -> None:
    metrics = Metrics()
    nothing = {"count": 0, "ns": 0}
    none = {
        "name": "fake",
        "version": "1",
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": dict.fromkeys(("success", "queue", "compute_input", "compute_infer"), nothing),
    }
    assert model_statistics(INFO, metrics) == {"model_stats": [none]}

    metrics.images.inc(5)
    metrics.observe_batch(BatchReport("cpu", 3, 1, "idle", 0.5))
    metrics.observe_batch(BatchReport("cpu", 2, 0, "full", 0.5))
    metrics.request_duration.labels("/v2/models/{name}/infer").observe(0.25)
    metrics.request_duration.labels("/v2/models/{name}/versions/{version}/infer").observe(1.5)
    metrics.request_duration.labels("/v2/models/{name}").observe(100)
    for stage, seconds in {"read": 64, "decode": 0.5, "queue": 0.125, "inference": 2}.items():
        metrics.stages[stage].observe(seconds)
    metrics.stages["queue"].observe(0.5)
    assert model_statistics(INFO, metrics)["model_stats"] == [
        {
            "name": "fake",
            "version": "1",
            "inference_count": 5,
            "execution_count": 2,
            "inference_stats": {
                "success": {"count": 2, "ns": 1_750_000_000},
                "queue": {"count": 2, "ns": 625_000_000},
                "compute_input": {"count": 1, "ns": 500_000_000},
                "compute_infer": {"count": 1, "ns": 2_000_000_000},
            },
        }
    ]
