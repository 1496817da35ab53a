"""What of CUDA's operations can be tried without a GPU: which kernels attention may choose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model.runtime.cuda.ops import CudaOps


@pytest.fixture(autouse=True)
def torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def test_attention_is_never_cudnn() -> None:
    """Its switch is of the whole process: turned on for a capture, it was on for every batch beside it."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    CudaOps(torch.device("cuda", 0))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
