"""The documents that describe the server and its model: metadata, configuration, statistics."""

from collections.abc import Mapping
from typing import Any, Final

from service.engine.messages import ModelInfo
from service.extensions.inference_protocol import (
    EXTENSIONS,
    GRPC_SERVICE,
    REPOSITORY_EXTENSION,
    VERSION,
)
from service.extensions.inference_protocol.outputs import inputs_of, outputs_of
from service.observe.metrics import Metrics
from vitserve.documents import ListedModel

_PLATFORM: Final = "vitserve"
_NANOSECONDS: Final = 1_000_000_000
_CONFIGURED: Final = {"BYTES": "TYPE_STRING"} | {
    name: f"TYPE_{name}" for name in ("BOOL", "UINT8", "INT64", "FP32")
}
_REQUESTS: Final = (
    "/v2/models/{name}/infer",
    "/v2/models/{name}/versions/{version}/infer",
    f"/{GRPC_SERVICE}/ModelInfer",
)


def server_metadata(version: str, *, swaps: bool) -> dict[str, Any]:
    """Return the metadata of a server.

    Args:
        version: version of the server.
        swaps: whether it can swap its checkpoint.
    """
    extensions = [*EXTENSIONS, REPOSITORY_EXTENSION] if swaps else list(EXTENSIONS)
    return {"name": "vitserve", "version": version, "extensions": extensions}


def repository_entry(status: ListedModel) -> dict[str, str]:
    """Return a model's entry in the repository's index.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md
    """
    state = {"ready": "READY", "loading": "LOADING"}.get(status.state, "UNAVAILABLE")
    reason = "unloaded" if status.state == "unloaded" else status.reason
    return {"name": status.name, "version": VERSION, "state": state, "reason": reason}


def model_metadata(info: ModelInfo) -> dict[str, Any]:
    """Return the metadata of a model; -1 is a size that requests choose."""
    return {"name": info.name, "versions": [VERSION], "platform": _PLATFORM, **_tensors(info)}


def _tensors(info: ModelInfo) -> dict[str, list[dict[str, Any]]]:
    outputs = {
        name: (output.datatype, [-1, *output.shape(info)])
        for name, output in outputs_of(info).items()
    }
    return {
        kind: [
            {"name": name, "datatype": datatype, "shape": shape}
            for name, (datatype, shape) in tensors.items()
        ]
        for kind, tensors in {"inputs": inputs_of(info), "outputs": outputs}.items()
    }


def model_configuration(info: ModelInfo) -> dict[str, Any]:
    """Return a model's configuration, with the applicable fields of Triton's `ModelConfig`.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_configuration.md
    """
    tensors = _tensors(info)
    return {
        "name": info.name,
        "platform": _PLATFORM,
        "backend": info.backend.split()[0],
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [_configured(tensor) | {"optional": True} for tensor in tensors["inputs"]],
        "output": [_configured(tensor) for tensor in tensors["outputs"]],
        "dynamic_batching": {
            "preferred_batch_size": [info.max_batch],
            "max_queue_delay_microseconds": 0,
        },
        "instance_group": [
            {
                "name": info.name,
                "kind": "KIND_CPU" if info.device == "cpu" else "KIND_GPU",
                "count": 1,
            }
        ],
        "parameters": {
            "architecture": {"string_value": info.architecture},
            "device": {"string_value": info.device},
            "dtype": {"string_value": info.dtype},
        },
    }


def _configured(tensor: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": tensor["name"],
        "data_type": _CONFIGURED[tensor["datatype"]],
        "dims": tensor["shape"],
    }


def model_statistics(info: ModelInfo, metrics: Metrics) -> dict[str, Any]:
    """Return the statistics since the start, for requests over all protocols.

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md
    """
    totals = _totals(metrics)
    executions = int(totals.get(("vit_batches_total", ""), 0))
    stages = {"queue": "queue", "compute_input": "decode", "compute_infer": "inference"}
    statistics = {
        "success": _duration(totals, "vit_request_duration_seconds", "ok"),
        **{
            name: _duration(totals, "vit_stage_duration_seconds", stage)
            for name, stage in stages.items()
        },
    }
    return {
        "model_stats": [
            {
                "name": info.name,
                "version": VERSION,
                "inference_count": int(totals.get(("vit_images_total", ""), 0)),
                "execution_count": executions,
                "inference_stats": statistics,
            }
        ]
    }


def _duration(totals: Mapping[tuple[str, str], float], metric: str, key: str) -> dict[str, int]:
    return {
        "count": int(totals.get((f"{metric}_count", key), 0)),
        "ns": round(_NANOSECONDS * totals.get((f"{metric}_sum", key), 0)),
    }


def _totals(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Return the sum of each metric by stage; the sum over requests for inference is `ok`."""
    totals: dict[tuple[str, str], float] = {}
    for family in metrics.collect():
        for sample in family.samples:
            endpoint = sample.labels.get("endpoint")
            if endpoint is not None and endpoint not in _REQUESTS:
                continue
            key = sample.name, "ok" if endpoint else sample.labels.get("stage", "")
            totals[key] = totals.get(key, 0) + sample.value
    return totals
