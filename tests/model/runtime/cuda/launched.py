"""Predictors whose batches a stand-in device launches, and the comparison of their answers."""

import numpy as np
import pytest

from model.runtime.predictor import Predictor
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import Predictions
from tests.model.runtime.small_models import make_checkpoint


def same(found: Predictions, expected: Predictions, *, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(found.scores, expected.scores, atol=atol)
    np.testing.assert_array_equal(found.indices, expected.indices)
    np.testing.assert_array_equal(found.finite, expected.finite)
    for got, wanted in zip(found.maps, expected.maps, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert got.request == wanted.request
            np.testing.assert_allclose(got.values, wanted.values, atol=atol)
            assert got.kept_mass == pytest.approx(wanted.kept_mass, abs=atol)


def launched(ops: StandInOps, *, max_batch: int = 4) -> Predictor:
    return plain(max_batch=max_batch, streams=2, ops=ops)


def plain(**options: object) -> Predictor:
    options = ({} if "ops" in options else {"compile_mode": "off"}) | options
    return Predictor(make_checkpoint(), device="cpu", dtype="float32", **options)  # type: ignore[arg-type]
