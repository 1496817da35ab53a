"""Requests of the Open Inference Protocol in JSON, and their answers."""

import base64
import json
from typing import Any

import numpy as np

from tests.service.fakes import png
from tests.service.web.apps import App
from tests.service.web.http_communicator import HttpCommunicator

INFER = "/v2/models/fake/infer"


def encoded(*reds: int) -> dict[str, Any]:
    """A tensor `image` in JSON."""
    data = [base64.b64encode(png(red)).decode() for red in reds]
    return {"name": "image", "datatype": "BYTES", "shape": [len(reds)], "data": data}


async def infer(
    service: App, *inputs: dict[str, Any], path: str = INFER, **header: Any
) -> HttpCommunicator:
    return await post(service, json.dumps({"inputs": inputs, **header}).encode(), path=path)


async def post(service: App, body: bytes, *, path: str = INFER, **headers: str) -> HttpCommunicator:
    return await service.request("POST", path, headers=headers, body=body)


def outputs(document: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in document["outputs"]
    }
