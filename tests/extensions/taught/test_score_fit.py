"""Scores fitted to labelled pictures: temperature and form."""

import numpy as np
import pytest

from model.calibration import Fit, scores_and_energies
from model.extensions.taught.score_fit import FORMS, MIN_PICTURES, choose_fit, fit_scores, losses
from model.heads import Form
from tests.model.calibrated import calibrated_logits


@pytest.mark.parametrize("truth", [0.4, 1.0, 3.0])
def test_temperature_makes_labels_likeliest(truth: float) -> None:
    logits, labels = calibrated_logits()
    logits = truth * logits
    fitted = fit_scores(logits, labels).temperature
    assert fitted == pytest.approx(truth, rel=0.06)

    def loss(temperature: float) -> float:
        return -float(
            np.log(
                scores_and_energies(logits, temperature)[0][np.arange(len(labels)), labels]
            ).mean()
        )

    assert all(loss(fitted) <= loss(fitted * factor) for factor in (0.1, 0.9, 0.99, 1.01, 1.1, 6.0))


def test_few_pictures_fit_no_temperature() -> None:
    """Without the guard, each case would get another temperature."""
    logits, labels = calibrated_logits(MIN_PICTURES)
    assert fit_scores(3 * logits, labels) != Fit(1.0)
    assert fit_scores(3 * logits[1:], labels[1:]) == Fit(1.0)
    assert fit_scores(3 * logits, logits.argmax(axis=1)) == Fit(1.0)


def test_scores_are_fitted_to_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.extensions.taught.score_fit._MOST_LOGITS", 0)
    labels = np.repeat([0, 1], 10 * MIN_PICTURES)
    logits = 5 * np.eye(2, dtype=np.float32)[labels]
    logits[-100:] = logits[-100:, ::-1]  # a third of the second class is wrong
    fit, _ = choose_fit(logits, labels, Fit(1.0))
    assert fit.temperature > 2


@pytest.mark.parametrize(
    ("made", "name"), [(Form(), 0), (Form(power=1.8), 1), (Form(power=2.0, crowding=1.0), 2)]
)
def test_the_best_held_out_form_is_chosen(made: Form, name: int) -> None:
    generator = np.random.default_rng(0)
    logits = 3 * generator.normal(size=(1600, 8)).astype(np.float32)
    scores, _ = scores_and_energies(logits, 2.0, made)
    labels = (scores.cumsum(axis=1) < generator.random((1600, 1))).sum(axis=1).clip(max=7)
    fit, chosen = choose_fit(logits[:800], labels[:800], Fit(1.0))
    assert chosen == FORMS[name]
    assert choose_fit(logits[:800], labels[:800], Fit(2.0, made)) == (Fit(2.0, made), ""), (
        "nothing fits better"
    )
    found, best = (
        losses(logits[800:], labels[800:], each).mean() for each in (fit, Fit(2.0, made))
    )
    assert found <= best + 0.003
    assert (np.diff(np.take_along_axis(scores, np.argsort(logits, axis=1), axis=1)) >= 0).all(), (
        "the order stays"
    )
