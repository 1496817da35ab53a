"""What of CUDA's operations can be tried without a GPU: which kernels attention may choose, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model.runtime.cuda.ops import CudaOps, cudnn_attention_is_safe


@pytest.fixture(autouse=True)
def torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def cudnn_is_used() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


def test_attention_is_cudnn_only_for_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    torch.backends.cuda.enable_cudnn_sdp(True)
    ops = CudaOps(torch.device("cuda", 0))
    assert not cudnn_is_used()
    with pytest.raises(ValueError, match="a capture broke off"), ops.lasting_kernels():
        assert cudnn_is_used()
        raise ValueError("a capture broke off")
    assert not cudnn_is_used()


def test_an_old_torch_is_warned_about_and_never_uses_cudnn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with CudaOps(torch.device("cuda", 0)).lasting_kernels():
        assert not cudnn_is_used()
    assert "torch 2.9.1+cu128: GPUs are supported from 2.10 on" in caplog.text


@pytest.mark.parametrize(
    ("version", "safe"), [("2.6.0", False), ("2.9.1+cu128", False), ("2.10.0", True), ("2.13.0+cu130", True)]
)
def test_releases_that_read_beyond_their_memory_are_known(version: str, safe: bool) -> None:
    assert cudnn_attention_is_safe(version) is safe
