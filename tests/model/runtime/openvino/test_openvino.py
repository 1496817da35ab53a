"""OpenVINO beside torch: the same scores and rows, whatever the batch; silent about itself; refused where it cannot."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import load_checkpoint
from model.config import ViTConfig
from model.errors import DeviceError
from model.network.vit import VisionTransformer, count_parameters
from model.outputs import MapRequest
from model.runtime.batches import HostOutputs
from model.runtime.openvino import network as openvino_network
from model.runtime.openvino.backend import unsupported_reason
from model.runtime.openvino.graph import _LEAN, Requests, core
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.predictor import Predictor
from model.runtime.torch_cpu import TorchCpu
from tests.model.runtime.predictions import MODES, predict

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed"),
    pytest.mark.timeout(120),  # models are compiled
]


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def both() -> tuple[Predictor, Predictor]:
    checkpoint = load_checkpoint("bundled")
    made = [
        Predictor(checkpoint, device="cpu", dtype="float32", compile_mode=MODES[name], threads=2, streams=2)
        for name in ("torch", "openvino")
    ]
    made[1].warm_up()
    return made[0], made[1]


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_scores_and_maps_are_torchs(both: tuple[Predictor, Predictor], images: np.ndarray, count: int) -> None:
    wanted = [MapRequest.row(layer=both[0].checkpoint.vit.depth - 1, head="mean")] * count
    expected, found = (predict(one, images[:count], top_k=10, maps=wanted) for one in both)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    for ours, theirs in zip(found.maps, expected.maps, strict=True):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


def test_warm_up_runs_torch_for_one_image_only(
    both: tuple[Predictor, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes rare maps alone, and an engine that starts again is waited for."""
    sizes: list[object] = []
    monkeypatch.setattr(TorchCpu, "exercise", lambda _, exercised: sizes.append(exercised))
    both[1].warm_up()
    assert sizes == [(1,)]


def test_threads_that_come_to_openvino_first_at_the_same_time_do_not_wait_for_each_other() -> None:
    code = """
import os, sys, threading, time
import numpy as np
from model.runtime.openvino.graph import core, openvino_package
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


@pytest.mark.parametrize(("wrong", "refused"), [((), False), ((3,), False), ((3, 4), True)])
def test_every_graph_is_run_on_every_stream_and_made_again_where_its_outputs_are_not_torchs(
    wrong: tuple[int, ...], refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each stream keeps kernels for the sizes that it meets: a size met late would be memory taken late."""
    run: list[tuple[int, int]] = []
    run_all = Requests.run_all

    def spoilt(self: Requests, images: np.ndarray) -> list[list[np.ndarray]]:
        run.append((self.streams, len(images)))
        outputs = run_all(self, images)
        if len(run) in wrong:
            outputs[-1][0] += 1  # of the last stream alone
        return outputs

    monkeypatch.setattr(Requests, "run_all", spoilt)
    monkeypatch.setattr(
        "model.runtime.openvino.graph.ThreadPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1)
    )  # in turn
    make = functools.partial(Predictor, load_checkpoint("bundled"), device="cpu", dtype="float32", threads=2, streams=2)
    if refused:
        assert "OpenVINO's logits are " in make().backend_reason
    else:
        make().warm_up()
    sizes = [(2, size) for size in (1, 2, 4, 8)]
    again = [sizes[2]] * len(wrong[:1])
    assert run == [*sizes[:3], *again, *sizes[3:], (1, 1)]
    lines = [record.getMessage() for record in caplog.records if "is compiled again" in record.getMessage()]
    assert [line.split(":")[0] for line in lines] == ["the graph for 4 images is compiled again"] * len(again)


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile one graph for any batch size, which takes less time than one for each of some."""
    monkeypatch.setattr(openvino_network, "_FIXED_BYTES", 1)


def network(predictor: Predictor) -> OpenVinoNetwork:
    found = predictor._backend._network  # type: ignore[attr-defined]
    assert isinstance(found, OpenVinoNetwork)
    return found


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_a_small_network_has_graphs_for_a_few_sizes(both: tuple[Predictor, Predictor], alone: bool, count: int) -> None:
    images = np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    found = network(both[1])(images, alone=alone).tensors()["logits"]
    np.testing.assert_allclose(found, both[0].logits(images), atol=1e-4)
    assert (network(both[1])._graphs.sizes, network(both[1])._lone.sizes) == ((1, 2, 4, 8), (1,))


def test_a_larger_batch_is_cut_to_these_sizes(
    both: tuple[Predictor, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.default_rng(3).integers(0, 256, (21, 32, 32, 3), dtype=np.uint8)
    seen: list[int] = []
    infer = Requests.infer

    def spy(self: Requests, piece: np.ndarray) -> list[np.ndarray]:
        seen.append(len(piece))
        return infer(self, piece)

    monkeypatch.setattr(Requests, "infer", spy)
    np.testing.assert_allclose(
        predict(both[1], images, top_k=10).scores, predict(both[0], images, top_k=10).scores, atol=1e-4
    )
    np.testing.assert_allclose(both[1].logits(images), both[0].logits(images), atol=1e-3)
    assert seen == [], "its pieces are computed at once"
    with both[1]._backend._threads:  # type: ignore[attr-defined]  # another batch computes
        found = predict(both[1], images, top_k=10)
    assert seen == [8, 8, 4, 1]
    np.testing.assert_allclose(found.scores, predict(both[0], images, top_k=10).scores, atol=1e-4)


def test_with_one_stream_a_batch_that_is_alone_takes_these_graphs_too(
    both: tuple[Predictor, Predictor], images: np.ndarray
) -> None:
    made = Predictor(load_checkpoint("bundled"), device="cpu", dtype="float32", threads=2, streams=1)
    assert network(made)._graphs.sizes == (1, 2, 4, 8)
    assert network(made)._graphs is network(made)._lone
    made.warm_up()
    np.testing.assert_allclose(made.logits(images), both[0].logits(images), atol=1e-4)


@pytest.mark.usefixtures("one_graph")
def test_a_large_network_has_one_graph_for_any_size(
    both: tuple[Predictor, Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.runtime.predictor._FILL_SECONDS", float("inf"))
    made = Predictor(load_checkpoint("bundled"), device="cpu", dtype="float32", threads=2, streams=2)
    assert (network(made)._graphs.sizes, network(made)._lone.sizes) == ((None,), (1,))
    tried: list[int] = []
    monkeypatch.setattr(Requests, "run_all", lambda _, images: tried.append(len(images)))
    made.warm_up()
    assert tried == [32, 24, 16, *range(8, 0, -1)]
    images = np.random.default_rng(4).integers(0, 256, (19, 32, 32, 3), dtype=np.uint8)
    for alone in (True, False):
        found = network(made)(images, alone=alone).tensors()["logits"]
        np.testing.assert_allclose(found, both[0].logits(images), atol=1e-4)


def test_how_much_room_graphs_for_each_size_take_grows_with_weights_and_streams() -> None:
    """ViT-Ti has them in both dtypes; ViT-S has none."""
    for width, itemsize, streams, small in (
        (192, 2, 2, True),
        (192, 4, 2, True),
        (192, 4, 8, False),
        (384, 2, 2, False),
    ):
        config = load_checkpoint("bundled").config.model_dump()
        shape = {"width": width, "mlp_width": 4 * width, "depth": 12, "heads": width // 64, "num_classes": 1000}
        with torch.device("meta"):
            model = VisionTransformer(ViTConfig.model_validate({**config, **shape}))
        assert openvino_network._is_small(count_parameters(model) * itemsize, streams) is small


def test_the_installed_version_knows_the_option_that_saves_memory() -> None:
    from openvino import Model, opset13

    given = opset13.parameter([1], np.float32)
    core().compile_model(Model([opset13.relu(given)], [given]), "CPU", _LEAN)


@pytest.mark.usefixtures("one_graph")
def test_a_version_that_knows_an_option_no_more_compiles_without_it(
    both: tuple[Predictor, Predictor], images: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("model.runtime.openvino.graph._LEAN", {"NO_SUCH_OPTION": "YES"})
    made = Predictor(load_checkpoint("bundled"), device="cpu", dtype="float32", threads=1)
    np.testing.assert_allclose(made.logits(images), both[0].logits(images), atol=1e-4)


def test_other_layers_are_torchs_own(both: tuple[Predictor, Predictor], images: np.ndarray) -> None:
    wanted = [MapRequest.row(layer=0, head=1), None]
    expected, found = (predict(one, images[:2], top_k=3, maps=wanted) for one in both)
    np.testing.assert_array_equal(found.indices, expected.indices)
    assert found.maps[0] is not None
    assert expected.maps[0] is not None
    np.testing.assert_array_equal(found.maps[0].values, expected.maps[0].values)
    assert found.maps[1] is None


def test_callers_at_once_get_their_own(both: tuple[Predictor, Predictor], images: np.ndarray) -> None:
    batches = [images[i : i + 1 + i % 3] for i in range(5)] * 8
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: predict(both[1], batch, top_k=10), batches))
    for batch, one in zip(batches, found, strict=True):
        expected = predict(both[0], batch, top_k=10)
        np.testing.assert_allclose(one.scores, expected.scores, atol=1e-4)


KINDS: list[dict[str, Any]] = [
    {"pool": "mean", "class_token": False, "position_prefix": False},
    {"pool": "attention", "class_token": False, "position_prefix": False},
    {"pool": "mean_max"},
    {"pool": "cls_mean"},
    {"registers": 4, "position_prefix": False},
    {"distillation_token": True, "distillation_head": True},
    {"mlp": "swiglu", "activation": "silu", "layer_scale": True},
    {"qk_norm": True, "norm_before_blocks": True, "qkv_bias": False},
    {"relative_position_bias": True, "activation": "quick_gelu"},
    {"rotary": {"reference_grid": (3, 3), "offset": 1.0}, "mlp": "swiglu", "mlp_norm": True, "attention_norm": True},
    {"rotary": {"learned": True}, "pool": "attention", "pool_heads": 4, "pool_mlp_width": 24},
    {"relative_position_bias": True, "class_token": False, "position_prefix": False, "pool": "mean"}
    | {"norm_order": "res_post"},
    {"mlp_norm": True, "attention_norm": True, "pool": "mean", "norm_after_pool": True},
    {"depth": 1},
]


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_kinds_of_models_are_torchs_too(kind: dict[str, Any], images: np.ndarray) -> None:
    bundled = load_checkpoint("bundled")
    config = ViTConfig.model_validate({**bundled.config.model_dump(), "depth": 2, **kind})
    torch.manual_seed(0)
    weights = VisionTransformer(config).state_dict()
    tensors = {name: value + 0.05 * torch.randn_like(value) for name, value in weights.items()}
    checkpoint = replace(bundled, config=config, tensors=tensors)
    expected, found = (
        Predictor(checkpoint, device="cpu", dtype="float32", compile_mode=MODES[name], threads=2)
        for name in ("torch", "openvino")
    )
    for count in (1, 2, 7):
        np.testing.assert_allclose(found.logits(images[:count]), expected.logits(images[:count]), atol=1e-4)
        wanted = [MapRequest.row(layer=config.depth - 1)] * count
        maps = [predict(one, images[:count], top_k=1, maps=wanted).maps for one in (expected, found)]
        for ours, theirs in zip(maps[1], maps[0], strict=True):
            assert ours is not None
            assert theirs is not None
            np.testing.assert_allclose(ours.values, theirs.values, atol=1e-5)


def test_it_says_what_runs(both: tuple[Predictor, Predictor]) -> None:
    assert both[0].backend.startswith("torch ")
    assert both[1].backend.startswith("openvino ")
    assert both[1].compiled == "off"


def test_auto_leaves_compiling_and_other_dtypes_to_torch() -> None:
    checkpoint = load_checkpoint("bundled")
    for options in ({"compile_mode": "on"}, {"dtype": "float16"}):
        made = Predictor(checkpoint, device="cpu", **options)  # type: ignore[arg-type]
        assert made.backend.startswith("torch ")


@pytest.mark.usefixtures("one_graph")
@pytest.mark.skipif(
    unsupported_reason("cpu", "bfloat16") is not None, reason="this CPU has no bfloat16 that OpenVINO uses"
)
def test_bfloat16_is_float32s_but_for_its_rounding(both: tuple[Predictor, Predictor], images: np.ndarray) -> None:
    made = Predictor(load_checkpoint("bundled"), device="cpu", dtype="bfloat16")
    expected = both[0].logits(images)
    off = np.linalg.norm(made.logits(images) - expected) / np.linalg.norm(expected)
    assert 0 < off < 0.03


@pytest.mark.usefixtures("one_graph")
def test_a_graph_that_gives_other_logits_than_torch_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = OpenVinoNetwork._named

    def wrong(self: OpenVinoNetwork, outputs: list[np.ndarray]) -> HostOutputs:
        output = named(self, outputs)
        return output._replace(logits=np.flip(output.tensors()["logits"], -1))

    monkeypatch.setattr(OpenVinoNetwork, "_named", wrong)
    checkpoint = load_checkpoint("bundled")
    assert Predictor(checkpoint, device="cpu").backend.startswith("torch ")
    assert "of their norm away from torch's" in caplog.text
    with pytest.raises(DeviceError, match="of their norm away"):
        Predictor(checkpoint, device="cpu")


@pytest.mark.usefixtures("one_graph")
def test_a_graph_that_fails_at_its_first_run_leaves_torch_serving(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Requests, images: np.ndarray) -> list[list[np.ndarray]]:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Requests, "run_all", fail)
    checkpoint = load_checkpoint("bundled")
    assert Predictor(checkpoint, device="cpu").backend.startswith("torch ")
    assert "OpenVINO does not run this model: shapes do not match" in caplog.text
    with pytest.raises(DeviceError, match="shapes do not match"):
        Predictor(checkpoint, device="cpu")


def test_what_it_cannot_do_is_told() -> None:
    with pytest.raises(DeviceError, match="backend openvino: it has no float16 here"):
        Predictor(load_checkpoint("bundled"), device="cpu", dtype="float16")
    assert "runs on the CPU" in str(unsupported_reason("cuda:0", "float32"))
    assert unsupported_reason("cpu", "float32") is None


def test_nothing_is_reported_to_its_maker(tmp_path: Path) -> None:
    code = (
        "import sys; from model.runtime.openvino.backend import unsupported_reason;"
        "unsupported_reason('cpu', 'float32');"
        "print([name for name, module in sys.modules.items() if name.startswith('openvino_telemetry') and module])"
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


def test_signals_are_heard_on_the_first_thread_after_a_model_was_freed_on_another() -> None:
    code = """
import gc, os, signal, threading
import numpy as np
from openvino import Model, opset13
from model.runtime.openvino.graph import core

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
