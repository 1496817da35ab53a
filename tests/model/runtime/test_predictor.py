"""From uint8 images to scores and maps, on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.calibration import Calibration, Fit, label_sets_of, scores_and_energies
from model.checkpoint import Checkpoint
from model.errors import CheckpointError, DeviceError
from model.explanation.explain import explain
from model.heads import Form, Head
from model.network.vit import ViTOutput
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.cpu import cpu_has_bfloat16
from model.runtime.device import choose_device, choose_dtype
from model.runtime.openvino.network import unsupported_reason
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.runtime.predictions import MODES, logits_of, predict
from tests.model.runtime.small_models import MEAN, STD, make_checkpoint, make_images
from tests.needs import needs_methods


def spoil_second_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a pixel of the second image in later batches to a value that is not finite."""
    normalise = Normalise.forward

    def spoilt(self: Normalise, images: torch.Tensor) -> torch.Tensor:
        pixels = normalise(self, images)
        pixels[1, 0, 0, 0] = float("nan")
        return pixels

    monkeypatch.setattr(Normalise, "forward", spoilt)


def expected_scores(checkpoint: Checkpoint, images: np.ndarray) -> torch.Tensor:
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    pixels = (pixels - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1)
    output: ViTOutput = checkpoint.build()(pixels)
    return output.logits / checkpoint.temperature


def test_scores_are_the_sorted_softmax() -> None:
    checkpoint = make_checkpoint(temperature=1.7)
    images = make_images(4)
    expected = expected_scores(checkpoint, images).softmax(dim=-1)

    found = predict(
        Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32", max_batch=8),
        images,
        top_k=5,
    )

    order = expected.argsort(dim=-1, descending=True)
    np.testing.assert_array_equal(found.indices, order.numpy())
    np.testing.assert_allclose(found.scores, expected.gather(1, order).numpy(), atol=1e-6)
    assert found.finite.all()
    assert found.maps == [None] * 4


def test_multi_label_scores_are_sigmoids() -> None:
    checkpoint = make_checkpoint(multi_label=True)
    images = make_images(2)
    found = predict(
        Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32", max_batch=8),
        images,
        top_k=2,
    )
    expected = expected_scores(checkpoint, images).sigmoid().topk(2)
    np.testing.assert_allclose(found.scores, expected.values.numpy(), atol=1e-6)


def test_each_image_gets_its_own_map() -> None:
    predictor = Predictor(
        make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=8
    )
    images = make_images(5)
    wanted = [
        MapRequest.attention_row(0, "max"),
        None,
        MapRequest.attention_row(1, 1),
        MapRequest.attention_row(1),
        MapRequest.attention_row(0, "max"),
    ]

    found = predict(predictor, images, top_k=1, maps=wanted)

    for image, request, got in zip(images, wanted, found.maps, strict=True):
        if request is None:
            assert got is None
            continue
        alone = predict(predictor, image[None], top_k=1, maps=[request]).maps[0]
        assert got.request == request
        assert got.values.shape == (2, 3)
        assert got.values.sum() == pytest.approx(1, abs=1e-5)
        np.testing.assert_allclose(got.values, alone.values, atol=1e-5)
        assert got.kept_mass == pytest.approx(alone.kept_mass, abs=1e-5)


BACKENDS = (
    "torch",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(
            unsupported_reason("float32") is not None, reason="OpenVINO is not installed"
        ),
    ),
)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_come_beside_their_scores(backend: str) -> None:
    predictor = Predictor(
        make_checkpoint(temperature=1.7),
        device="cpu",
        compile_mode=MODES[backend],
        dtype="float32",
        max_batch=8,
    )
    images = make_images(8)

    for maps in ((), [MapRequest.attention_row(1)] * 8, [MapRequest.attention_row(0)] * 8):
        found = predict(predictor, images, top_k=3, maps=maps, logits=True)
        scores = (torch.from_numpy(found.logits) / 1.7).softmax(dim=-1)
        np.testing.assert_allclose(found.scores, scores.topk(3).values.numpy(), atol=1e-6)
        np.testing.assert_allclose(found.logits, logits_of(predictor, images), atol=1e-4)
    assert predict(predictor, images, top_k=3).logits is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_get_label_sets_on_request(backend: str) -> None:
    images = make_images(8)
    plain = Predictor(
        make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=8
    )
    energies = scores_and_energies(logits_of(plain, images), 2.0)[1]
    middle = (np.sort(energies)[3:5].sum() / 2).repeat(99)
    calibration = Calibration.of(
        "made", 99, Fit(2.0, Form(power=1.5, crowding=0.2)), np.linspace(0, 0.25, 99), middle
    )
    checkpoint = make_checkpoint(temperature=2.0, calibration=calibration)
    predictor = Predictor(
        checkpoint, device="cpu", compile_mode=MODES[backend], dtype="float32", max_batch=8
    )
    predictor.set_coverage(0.8)
    requests = [RequestedOutputs(1, label_set=place != 3) for place in range(8)]
    found = [each.label_set for each in predictor.predict(images, requests)]
    assert found.pop(3) is None
    expected = label_sets_of(calibration, 0.8, "test")(
        np.delete(logits_of(predictor, images), 3, axis=0)
    )
    assert [each.tolist() for each in found if each is not None] == [
        each.tolist() for each in expected
    ]
    assert {len(each) > 0 for each in expected} == {False, True}
    with pytest.raises(CheckpointError, match="test: is not calibrated"):
        plain.set_coverage(0.8)
    assert plain.coverage is None


@needs_methods
@pytest.mark.parametrize("backend", BACKENDS)
def test_explanations_stand_beside_rows(backend: str) -> None:
    checkpoint = make_checkpoint()
    predictor = Predictor(
        checkpoint, device="cpu", compile_mode=MODES[backend], dtype="float32", max_batch=8
    )
    images = make_images(6)
    wanted = [
        MapRequest("gae", 3),
        MapRequest.attention_row(1),
        None,
        MapRequest("gae"),
        MapRequest("relevance", 1),
        MapRequest("rollout"),
    ]

    found = predict(predictor, images, top_k=2, maps=wanted)

    pixels = Normalise(checkpoint.preprocess)(torch.from_numpy(images))
    best = int(found.indices[3, 0])
    for place, request in (
        (0, MapRequest("gae", 3)),
        (3, MapRequest("gae", best)),
        (4, MapRequest("relevance", 1)),
        (5, MapRequest("rollout")),
    ):
        maps, kept = explain(
            checkpoint.build(), pixels[[place]], torch.tensor([request.class_index or 0]), request
        )
        got = found.maps[place]
        assert got.request == request
        score = None
        evidence = None
        if request.class_index is not None:
            logits = logits_of(predictor, images[[place]])
            score, evidence = (
                part.item()
                for part in Head((), False).score_and_evidence(
                    logits, np.array([request.class_index])
                )
            )
            assert got.score == pytest.approx(score, abs=1e-4)
        assert got.evidence == (None if evidence is None else pytest.approx(evidence, abs=1e-4))
        np.testing.assert_allclose(got.values, maps[0].numpy(), atol=1e-4)
        assert got.values.sum() == pytest.approx(1, abs=1e-6)
        assert got.kept_mass == pytest.approx(kept.item(), abs=1e-6)
    assert found.maps[2] is None
    row = predict(predictor, images[[1]], top_k=1, maps=[MapRequest.attention_row(1)]).maps[0]
    np.testing.assert_allclose(found.maps[1].values, row.values, atol=1e-5)


def test_a_bad_score_spares_its_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    predictor = Predictor(
        make_checkpoint(), device="cpu", compile_mode="off", dtype="float32", max_batch=8
    )
    images = make_images(3)
    expected = predict(predictor, images, top_k=5)
    spoil_second_image(monkeypatch)
    found = predict(predictor, images, top_k=5)

    assert found.finite.tolist() == [True, False, True]
    np.testing.assert_allclose(found.scores[[0, 2]], expected.scores[[0, 2]], atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 16, 24, 3), (1, 24, 16, 3), (1, 16, 24, 1), (9, 16, 24, 3)])
def test_images_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", compile_mode="off", max_batch=8)
    with pytest.raises(ValueError, match="expected uint8"):
        predict(predictor, np.zeros(shape, np.uint8), top_k=1)


def test_bfloat16_answers_like_float32() -> None:
    checkpoint = make_checkpoint()
    images = make_images(8)
    exact = predict(
        Predictor(checkpoint, device="cpu", compile_mode="off", dtype="float32", max_batch=8),
        images,
        top_k=5,
    )
    rough = predict(
        Predictor(checkpoint, device="cpu", compile_mode="off", dtype="bfloat16", max_batch=8),
        images,
        top_k=5,
    )
    clear = exact.scores[:, 0] - exact.scores[:, 1] > 0.1
    assert clear.any()
    np.testing.assert_array_equal(rough.indices[clear, 0], exact.indices[clear, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_warm_up_refuses_non_finite_scores(backend: str, dtype: str) -> None:
    if backend == "openvino" and unsupported_reason(dtype):
        pytest.skip("OpenVINO does not compute so here")
    checkpoint = make_checkpoint()
    # Black normalises to 0; every other colour overflows in the embedding.
    preprocess = checkpoint.preprocess.model_copy(update={"mean": (0.0, 0.0, 0.0)})
    tensors = dict(checkpoint.tensors)
    name = "patch_embed.proj.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)
    spoilt = make_checkpoint(tensors=tensors, preprocess=preprocess)
    with pytest.raises(DeviceError, match="not finite") as raised:
        Predictor(
            spoilt, device="cpu", compile_mode=MODES[backend], dtype=dtype, max_batch=1
        ).warm_up()
    assert "\n" not in str(raised.value)


def test_a_missing_device_or_dtype_is_named() -> None:
    with pytest.raises(DeviceError, match="'tpu'"):
        choose_device("tpu")
    with pytest.raises(DeviceError, match="'int4'"):
        choose_dtype("int4", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no CUDA device"):
            choose_device("cuda")


@pytest.mark.parametrize(
    ("line", "native"),
    [
        ("flags : fpu sse avx512_bf16", True),
        ("Features : fp asimd asimddp bf16", True),
        ("flags : fpu avx2", False),
        ("model name : bf16 avx512_vnni", False),
    ],
)
def test_cpu_flags_tell_native_bfloat16(
    line: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\n")
    monkeypatch.setattr("model.runtime.cpu.CPUINFO", cpuinfo)
    assert cpu_has_bfloat16() is native
    cpuinfo.unlink()
    assert not cpu_has_bfloat16()


def test_auto_uses_only_native_bfloat16() -> None:
    expected = torch.bfloat16 if cpu_has_bfloat16() else torch.float32
    assert choose_dtype("auto", torch.device("cpu")) is expected
