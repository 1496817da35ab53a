"""OpenVINO gives torch's scores and rows for any batch, and refuses unsupported models."""

import importlib.util
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint, load_checkpoint
from model.config import ViTConfig
from model.network.vit import VisionTransformer
from model.outputs import MapRequest
from model.runtime.batch_request import BatchRequest
from model.runtime.openvino import network as openvino_network
from model.runtime.openvino.backend import OpenVino
from model.runtime.openvino.network import (
    LEAN_OPTIONS,
    CompiledGraph,
    OpenVinoNetwork,
    core,
    unsupported_reason,
)
from model.runtime.predictor import Predictor
from tests.model.runtime.predictions import MODES, logits_of, predict
from tests.support.openvino_graphs import FIXED_BYTES, use_a_graph_a_size

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("openvino") is None, reason="openvino is not installed"
    ),
    pytest.mark.timeout(120),  # models are compiled
]


def shallow() -> Checkpoint:
    """Return the first two layers of the bundled model, which compile faster."""
    bundled = load_checkpoint("bundled")
    beyond = tuple(f"blocks.{layer}." for layer in range(2, bundled.vit.depth))
    tensors = {
        name: tensor for name, tensor in bundled.tensors.items() if not name.startswith(beyond)
    }
    return replace(bundled, config=bundled.config.model_copy(update={"depth": 2}), tensors=tensors)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def both() -> tuple[Predictor, Predictor]:
    """Return a predictor of torch, and one of OpenVINO with a graph for each batch size."""
    checkpoint = shallow()
    with pytest.MonkeyPatch.context() as patch:
        use_a_graph_a_size(patch)
        made = [
            Predictor(
                checkpoint,
                device="cpu",
                dtype="float32",
                compile_mode=MODES[name],
                threads=2,
                streams=2,
                max_batch=8,
            )
            for name in ("torch", "openvino")
        ]
    made[1].warm_up()
    return made[0], made[1]


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_openvino_answers_like_torch(
    both: tuple[Predictor, Predictor], images: np.ndarray, count: int
) -> None:
    wanted = [
        MapRequest.attention_row(layer=shallow().vit.depth - 1, attention_head="mean")
    ] * count
    expected, found = (predict(one, images[:count], top_k=10, maps=wanted) for one in both)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    for ours, theirs in zip(found.maps, expected.maps, strict=True):
        np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


def test_first_threads_do_not_deadlock() -> None:
    code = """
import os, sys, threading, time
import numpy as np
from model.runtime.openvino.network import core, openvino_package
core()
package, barrier = openvino_package(), threading.Barrier(6)
def first():
    barrier.wait()
    package.Type.u8.to_dtype()
    package.Tensor(np.zeros(3, np.uint8)).data
threads = [threading.Thread(target=first) for _ in range(6)]
sys.setswitchinterval(1e-6)
for each in threads:
    each.start()
end = time.monotonic() + 20
for each in threads:
    each.join(max(0, end - time.monotonic()))
os._exit(any(each.is_alive() for each in threads))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def network(predictor: Predictor) -> OpenVinoNetwork:
    found = predictor._backend._network  # type: ignore[attr-defined]
    assert isinstance(found, OpenVinoNetwork)
    return found


def test_the_memory_option_is_known() -> None:
    from openvino import Model, opset13

    given = opset13.parameter([1], np.float32)
    core().compile_model(Model([opset13.relu(given)], [given]), "CPU", LEAN_OPTIONS)


def test_an_unknown_option_is_left_out(
    both: tuple[Predictor, Predictor], images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.runtime.openvino.network.LEAN_OPTIONS", {"NO_SUCH_OPTION": "YES"})
    made = Predictor(shallow(), device="cpu", dtype="float32", threads=1)
    np.testing.assert_allclose(logits_of(made, images), logits_of(both[0], images), atol=1e-4)


def test_another_layer_comes_from_torch(
    both: tuple[Predictor, Predictor], images: np.ndarray
) -> None:
    wanted = [MapRequest.attention_row(layer=0, attention_head=1), None]
    found = predict(both[1], images[:2], top_k=3, maps=wanted)
    for place, predictor in enumerate(both):
        alone = predict(
            predictor, images[place : place + 1], top_k=3, maps=wanted[place : place + 1]
        )
        np.testing.assert_array_equal(found.scores[place], alone.scores[0])
        for got, expected in zip(found.maps[place : place + 1], alone.maps, strict=True):
            if got is not None and expected is not None:
                np.testing.assert_array_equal(got.values, expected.values)
    assert [each is not None for each in found.maps] == [True, False]


def test_callers_at_once_get_their_own(
    both: tuple[Predictor, Predictor], images: np.ndarray
) -> None:
    batches = [images[i : i + 1 + i % 3] for i in range(5)] * 8
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: predict(both[1], batch, top_k=10), batches))
    for batch, one in zip(batches, found, strict=True):
        expected = predict(both[0], batch, top_k=10)
        np.testing.assert_allclose(one.scores, expected.scores, atol=1e-4)


KINDS: list[dict[str, Any]] = [
    {"pool": "mean", "class_token": False, "position_prefix": False, "norm_after_pool": True}
    | {"mlp_norm": True, "attention_norm": True},
    {"pool": "mean_max", "qk_norm": True, "norm_before_blocks": True, "qkv_bias": False},
    {"registers": 4, "position_prefix": False}
    | {"mlp": "swiglu", "activation": "silu", "layer_scale": True},
    {"relative_position_bias": True, "activation": "quick_gelu"},
    {
        "rotary": {"reference_grid": (3, 3), "offset": 1.0},
        "mlp": "swiglu",
        "mlp_norm": True,
        "attention_norm": True,
    },
    {"rotary": {"learned": True}, "pool": "attention", "pool_heads": 4, "pool_mlp_width": 24},
    {"relative_position_bias": True, "class_token": False, "position_prefix": False, "pool": "mean"}
    | {"norm_order": "res_post"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_models_answer_like_torch(kind: dict[str, Any], images: np.ndarray) -> None:
    bundled = load_checkpoint("bundled")
    # One block has all operators of a kind; `both` has all blocks of a model.
    config = ViTConfig.model_validate({**bundled.config.model_dump(), "depth": 1, **kind})
    torch.manual_seed(0)
    weights = VisionTransformer(config).state_dict()
    tensors = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    checkpoint = replace(bundled, config=config, tensors=tensors)
    expected, found = (
        Predictor(
            checkpoint,
            device="cpu",
            dtype="float32",
            compile_mode=MODES[name],
            threads=1,
            max_batch=8,
        )
        for name in ("torch", "openvino")
    )
    for count in (1, 2, 7):
        np.testing.assert_allclose(
            logits_of(found, images[:count]), logits_of(expected, images[:count]), atol=1e-4
        )
        wanted = [MapRequest.attention_row(layer=config.depth - 1)] * count
        maps = [
            predict(one, images[:count], top_k=1, maps=wanted).maps for one in (expected, found)
        ]
        for ours, theirs in zip(maps[1], maps[0], strict=True):
            np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


@pytest.mark.skipif(
    unsupported_reason("bfloat16") is not None, reason="this CPU has no bfloat16 that OpenVINO uses"
)
def test_bfloat16_differs_by_rounding_only(
    both: tuple[Predictor, Predictor], images: np.ndarray
) -> None:
    made = Predictor(shallow(), device="cpu", dtype="bfloat16")
    expected = logits_of(both[0], images)
    off = np.linalg.norm(logits_of(made, images) - expected) / np.linalg.norm(expected)
    assert 0 < off < 0.03


def test_nothing_is_reported_to_its_maker(tmp_path: Path) -> None:
    code = (
        "import sys; from model.runtime.openvino.network import unsupported_reason;"
        "unsupported_reason('float32');"
        "print([name for name, module in sys.modules.items()"
        " if name.startswith('openvino_telemetry') and module])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
    assert list(tmp_path.iterdir()) == []


def test_deprecation_of_tracing_is_silent() -> None:
    code = (
        "import warnings, model.runtime.openvino.tracing;"
        "warnings.warn_explicit('old', DeprecationWarning, '', 1, 'torch.jit._trace');"
        "warnings.warn_explicit('older', FutureWarning, '', 1, 'torch.jit._trace')"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_signals_arrive_after_a_freed_model() -> None:
    code = """
import gc, os, signal, threading
import numpy as np
from openvino import Model, opset13
from model.runtime.openvino.network import core

given = opset13.parameter([1], np.float32)
compiled = [core().compile_model(Model([opset13.relu(given)], [given]), "CPU")]
freeing = threading.Thread(target=lambda: (compiled.clear(), gc.collect()))
freeing.start()
freeing.join()
signal.signal(signal.SIGUSR1, lambda *_: print("heard"))
os.kill(os.getpid(), signal.SIGUSR1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "heard\n"), done.stderr


@pytest.mark.parametrize(
    ("fixed_bytes", "streams"),
    [(FIXED_BYTES, 2), (1, 1)],
    ids=["a graph a size", "one for any size"],
)
def test_any_batch_size_has_torchs_logits(
    both: tuple[Predictor, Predictor],
    fixed_bytes: int,
    streams: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openvino_network, "FIXED_BYTES", fixed_bytes)
    made = Predictor(shallow(), device="cpu", dtype="float32", threads=2, streams=streams)
    images = np.random.default_rng(3).integers(0, 256, (21, 32, 32, 3), dtype=np.uint8)
    for count in (1, 3, 8, 21):
        for alone in (True, False):
            found = network(made)(images[:count], alone=alone)["logits"]
            np.testing.assert_allclose(found, logits_of(both[0], images[:count]), atol=1e-4)


@pytest.mark.parametrize("fault", ["other logits", "fails"])
def test_a_wrong_graph_leaves_torch_serving(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    infer = CompiledGraph.infer_on_all

    def wrong(self: CompiledGraph, images: np.ndarray) -> list[list[np.ndarray]]:
        if fault == "fails":
            raise RuntimeError("shapes do not match")
        outputs = infer(self, images)
        outputs[-1][0][0] += 100  # one image, on the last stream only
        return outputs

    monkeypatch.setattr(CompiledGraph, "infer_on_all", wrong)
    made = Predictor(shallow(), device="cpu", dtype="float32", threads=2)
    assert made.backend.startswith("torch ")
    said = {
        "fails": "OpenVINO does not run this model: shapes do not match",
        "other logits": "away from torch's",
    }
    assert said[fault] in made.backend_reason
    assert said[fault] in caplog.text


def fail(reason: str) -> list[list[np.ndarray]]:
    raise RuntimeError(reason)


def test_a_wrong_size_is_computed_by_torch(
    both: tuple[Predictor, Predictor], images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_a_graph_a_size(monkeypatch)
    made = Predictor(shallow(), device="cpu", dtype="float32", threads=1)
    monkeypatch.setattr(CompiledGraph, "infer_on_all", lambda *_: fail("shapes do not match"))
    np.testing.assert_allclose(
        logits_of(made, images[:4]), logits_of(both[0], images[:4]), atol=1e-4
    )


def test_an_unloaded_network_stops_compiling() -> None:
    begun = threading.Event()
    freed = threading.Event()
    compiled = list[int]()

    class Network:
        version = ""
        request = BatchRequest()

        def complete(self, *sizes: int) -> None:
            compiled.extend(sizes)
            begun.set()
            assert freed.wait(60)

    backend = OpenVino(Network(), *[None] * 3)  # type: ignore[arg-type]
    backend.compile()
    assert begun.wait(60)
    [compiles] = [each for each in threading.enumerate() if each.name == "openvino-compile"]
    del backend
    freed.set()
    compiles.join(60)
    assert compiled == [1]


def test_first_answers_wait_for_one_graph() -> None:
    freed = threading.Event()

    class Network:
        version = ""
        request = BatchRequest.of_graph("transfer", shallow().config)

        def complete(self, *_: int) -> None:
            assert freed.wait(60)

    network: Any = Network()
    unused: Any = None
    backend = OpenVino(network, unused, unused, lambda _: network)
    try:
        backend.compile()
        backend.prepare("transfer")
        assert backend.covers(Network.request)
    finally:
        freed.set()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compile_mode": "on"}, "torch is chosen"),
        ({"compile_mode": "off"}, "torch is chosen"),
        ({"dtype": "float16"}, "OpenVINO is not possible: it has no float16 here"),
    ],
)
def test_what_is_chosen_otherwise_is_torchs(options: dict[str, Any], reason: str) -> None:
    made = Predictor(shallow(), device="cpu", **options)
    assert (made.backend.split()[0], made.backend_reason) == ("torch", reason)
