"""Reading the two files a checkpoint folder is made of, with every failure named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from model.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: no such file, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, as float32 on the CPU.

    Raises:
        CheckpointError: no such file, truncated, malformed, or a tensor that is not floating point.
    """
    try:
        tensors = load_file(path, device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from None
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name} is {tensor.dtype}, expected floating point")
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}


def first_problem(error: Any) -> str:
    """One line from a pydantic ValidationError: where and what."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
