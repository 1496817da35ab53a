"""Labels in the forms of a request, and scores of an embedding against features of labels."""

import unicodedata
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.calibration import scores_and_energies
from model.config import ViTConfig
from model.errors import InputError
from model.explanation.frozen_gradients import with_rivals
from model.features import Floats
from model.heads import Form, Head, ZeroShot
from model.label_texts import MAX_CHARACTERS, MAX_TEXTS, labels_of_request, parse_labels
from model.outputs import LITTLE_EVIDENCE, Outputs, RequestedOutputs
from model.runtime.cuda.backend import with_best

CONFIG = ViTConfig(
    image_size=(8, 8), patch_size=4, width=8, depth=1, heads=2, mlp_width=16, num_classes=2
)
PLAIN = ZeroShot(10.0, -2.0, False, ("a photo of {}.",))


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("cat", ("cat",)),
        (' cat, dog,"a red car, parked" ', ("cat", "dog", "a red car, parked")),
        ('"say ""hi""",x', ('say "hi"', "x")),
        ('["a, b", "c"]', ("a, b", "c")),
        ("кот, 猫, \U0001f468\u200d\U0001f469", ("кот", "猫", "\U0001f468\u200d\U0001f469")),
        ("x" * MAX_CHARACTERS, ("x" * MAX_CHARACTERS,)),
    ],
)
def test_labels_are_read_as_csv_or_json(text: str, labels: tuple[str, ...]) -> None:
    assert parse_labels(text) == labels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "labels: there are 0, expected 1 to 1000"),
        ("cat,,dog", "labels: '', number 2: expected 1 to 256 characters"),
        ("x" * (MAX_CHARACTERS + 1), "number 1: expected 1 to 256 characters"),
        ("a\nb", "expected names like cat,dog"),
        ("a,b\x07", "number 2"),
        ('["\\ud800"]', "number 1"),
        ('["a", 1]', "number 2"),
        ('["a"', "expected names like cat,dog"),
        ("[" * 100_000, "expected names like cat,dog"),
        ('"a', "expected names like cat,dog"),
        (",".join(map(str, range(MAX_TEXTS + 1))), "labels: there are 1001, expected 1 to 1000"),
        ("," * 3_000_000, "labels: too many names; at most 1000"),
        ("ab," * 2_000_000, "labels: 6000000 characters, more than 1000 names of 256 take"),
    ],
)
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_labels(text)


SEEN_FORMATS = [  # signs of their own, and controls of hieroglyphs
    *range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD,
    *range(0x13430, 0x13440),
]  # fmt: skip


def test_hidden_characters_are_refused_by_name() -> None:
    for code in range(0x110000):
        if unicodedata.category(chr(code)) == "Cf" and code not in SEEN_FORMATS:
            for before, after in (("cat", ""), ("c", "at"), ("\u06a9", "cat"), ("\u0e27", "")):
                label = f"{before}{chr(code)}{after}"
                with pytest.raises(
                    InputError, match=rf"number 1: .* that print: remove U\+{code:04X}"
                ):
                    parse_labels(f"{label},dog")


@pytest.mark.parametrize(
    "label",
    [
        "\u06a9\u062a\u0627\u0628\u200c\u0647\u0627",  # Persian
        "\u0915\u094d\u200d\u0937",  # Hindi
        "\u0d28\u0d4d\u200d",  # Malayalam, at the end of a word
        "\U0001f9d1\U0001f3fd\u200d\u2764\ufe0f\u200d\U0001f9d1",  # a couple in love
        "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # Scotland
        "\u0600\u0661",
        "\u0e41\u0e21\u0e27\u200b\u0e14\u0e33",  # Thai, between words
        "\u1786\u17d2\u1798\u17b6\u200b\u1781\u17d2\u1798\u17c5",  # Khmer
    ],
)
def test_characters_that_shape_others_are_kept(label: str) -> None:
    assert parse_labels(label) == (label,)


def test_templates_count_as_texts() -> None:
    many = ZeroShot(1.0, 0.0, False, tuple(f"{number} {{}}" for number in range(200)))
    assert len(labels_of_request("a,b,c,d,e", many, CONFIG)) == 5
    with pytest.raises(InputError, match="there are 6, expected 1 to 5"):
        labels_of_request("a,b,c,d,e,f", many, CONFIG)
    with pytest.raises(InputError, match="no text tower"):
        labels_of_request("a", None, CONFIG)
    assert labels_of_request("a", PLAIN, CONFIG) == ("a",)


def test_omitted_labels_mean_own_classes() -> None:
    headless = CONFIG.model_copy(update={"num_classes": 0})
    assert labels_of_request(None, PLAIN, CONFIG) == labels_of_request(None, None, CONFIG) == ()
    with pytest.raises(InputError, match="send labels=cat,dog, or start it with VIT_LABELS"):
        labels_of_request(None, PLAIN, headless)
    with pytest.raises(InputError, match="no classification head"):
        labels_of_request(None, None, headless)
    assert labels_of_request("a", PLAIN, headless) == ("a",)


def test_a_label_stands_in_each_template() -> None:
    two = ZeroShot(1.0, 0.0, False, ("a {}", "{} b"))
    assert two.prompts(["{}", "x"]) == ["a {}", "{} b", "a x", "x b"]


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("count", [1, 7])
def test_scores_are_those_of_torch(independent: bool, count: int) -> None:
    rng = np.random.default_rng(0)
    texts = rng.normal(size=(count, 12)).astype("f4")
    embedding = rng.normal(size=12).astype("f4")
    zero_shot = ZeroShot(10.0, -2.0, independent, ("{}",))
    outputs = Outputs(np.ones(1, np.float32), np.zeros(1, np.int64), embedding=embedding)
    requested = RequestedOutputs(min(3, count), logits=True, labels=("x",) * count)
    found = zero_shot.head(requested.labels, texts).answer(requested, outputs)
    logits = (
        10
        * torch.nn.functional.cosine_similarity(
            torch.from_numpy(texts), torch.from_numpy(embedding)
        )
        - 2
    )
    scores = logits.sigmoid() if independent else logits.softmax(dim=0)
    best = scores.topk(min(3, count))
    assert found.logits is not None
    np.testing.assert_allclose(found.logits, logits, atol=1e-5)
    np.testing.assert_allclose(found.scores, best.values, atol=1e-6)
    assert found.indices.tolist() == best.indices.tolist()
    assert str(found.scores.dtype) == "float32"
    assert str(found.indices.dtype) == "int64"
    assert found.embedding is None


def test_scores_stay_finite_for_any_logit() -> None:
    zero_shot = ZeroShot(1e4, 0.0, True, ("{}",))
    embedding = np.array([1, 0], np.float32)
    outputs = Outputs(np.ones(1, np.float32), np.zeros(1, np.int64), embedding=embedding)
    head = zero_shot.head(("a", "b"), np.array([[1, 0], [-1, 0]], np.float32))
    found = head.answer(RequestedOutputs(2, labels=("a", "b")), outputs)
    assert found.scores.tolist() == [1, 0]


SATURATED = [18.0, 25.0, 3.0, 19.0, 1.0]
"""Return logits of which three have a sigmoid of 1 in float32."""


def test_saturated_sigmoids_keep_their_order() -> None:
    head = Head(tuple("abcde"), independent=True)
    logits = np.array([SATURATED, SATURATED[::-1]], np.float32)
    best = head.best_classes(logits, 3)
    assert best.indices.tolist() == [[1, 3, 0], [3, 1, 4]]
    found = with_best({"logits": torch.from_numpy(logits)}, head, 3)
    assert found["indices"].tolist() == best.indices.tolist()
    np.testing.assert_allclose(found["scores"], best.scores, atol=1e-6)
    assert found["finite"].tolist() == best.finite.tolist() == [True, True]


def test_first_of_equal_logits_are_best() -> None:
    logits = torch.randint(0, 3, (50, 200), generator=torch.Generator().manual_seed(0)).float()
    head = Head(tuple(map(str, range(200))), independent=False)
    found = with_best({"logits": logits}, head, 5)
    np.testing.assert_array_equal(found["indices"], head.best_classes(logits.numpy(), 5).indices)


def test_equal_logits_rank_alike_everywhere() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, 200::200] = 8
    head = Head(tuple(map(str, range(1000))), independent=False)
    for count in (1, 2, 3, 4):
        best = head.best_classes(logits.float().numpy(), count)
        assert best.indices.tolist() == [[200, 400, 600, 800][:count]] * 64
    found = with_best({"logits": logits}, Head(("",) * 1000, independent=False), 4)
    assert found["indices"].tolist() == best.indices.tolist()
    assert with_rivals(logits, None, 11)[:, 0].tolist() == [200] * 64


@pytest.mark.parametrize(
    ("independent", "form"),
    [(False, Form()), (False, Form(power=1.8, crowding=0.3)), (True, Form())],
)
def test_host_scores_equal_device_scores(independent: bool, form: Form) -> None:
    logits = np.random.default_rng(0).normal(0, 5, (6, 40)).astype(np.float32)
    logits[4, 3] = np.nan
    head = Head(tuple(map(str, range(40))), independent, temperature=1.7, form=form)
    best = head.best_classes(logits, 5)
    found = with_best({"logits": torch.from_numpy(logits)}, head, 5)
    assert found["finite"].tolist() == best.finite.tolist() == [True] * 4 + [False, True]
    sound = best.finite
    assert found["indices"].numpy()[sound].tolist() == best.indices[sound].tolist()
    np.testing.assert_allclose(found["scores"].numpy()[sound], best.scores[sound], atol=1e-6)
    if not independent:
        of_sets, _ = scores_and_energies(logits, 1.7, form)
        np.testing.assert_allclose(head.scores(logits)[sound], of_sets[sound], atol=1e-6)


def test_only_a_full_score_is_whole_evidence() -> None:
    logits = np.array([[4.0, 4.0, -8.0], [1.0, 3.0, 2.0]], np.float32)
    score, evidence = Head(tuple("abc"), independent=False).score_and_evidence(
        logits, np.array([1, 0])
    )
    np.testing.assert_allclose(score, [0.5, 0.0900], atol=1e-4)
    np.testing.assert_allclose(evidence, [0.5, 0.0900], atol=1e-4)
    sure = np.array([[40.0, 0.0, 0.0]], np.float32)
    assert (
        Head(tuple("abc"), independent=False).score_and_evidence(sure, np.array([0]))[1].item() == 1
    )
    score, evidence = Head(tuple("abc"), independent=True).score_and_evidence(
        logits, np.array([1, 0])
    )
    assert score.tolist() == evidence.tolist()


@dataclass
class SameDirection:
    """Examples from which every picture of another direction is far."""

    examples: Floats

    def are_far(self, features: Floats) -> NDArray[np.bool_]:
        far: NDArray[np.bool_] = (features @ self.examples.T).max(axis=1) < 0.5
        return far


def test_abstention_leaves_little_evidence() -> None:
    logits = np.array([[40.0, 0.0], [0.0, 40.0]], np.float32)
    of_sets = Head(
        ("a", "b"), False, label_sets=lambda rows: [np.flatnonzero(row[:1] > 1) for row in rows]
    )
    assert of_sets.abstains(logits).tolist() == [False, True]
    of_thresholds = Head(("a", "b"), False, thresholds=np.array([0.9, 2.0], np.float32))
    assert of_thresholds.abstains(logits).tolist() == [False, True]
    features = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    taught = Head(("a", "b"), False, known=SameDirection(features[:1]))
    assert taught.abstains(logits, features).tolist() == [False, True]
    _, evidence = taught.score_and_evidence(
        logits, np.array([0, 1]), taught.abstains(logits, features)
    )
    assert evidence[0] == 1
    assert evidence[1] < LITTLE_EVIDENCE


@pytest.mark.parametrize("top_k", [1, 2])
def test_thresholds_abstain_whatever_top_k_is(top_k: int) -> None:
    head = Head(("a", "b"), False, thresholds=np.array([0.9, 0.3], np.float32))
    logits = np.array([[0.2, 0.0], [3.0, 0.0], [1.5, 0.0]], np.float32)
    answers = head.outputs([RequestedOutputs(top_k)] * 3, logits)
    assert [answer.abstains for answer in answers] == head.abstains(logits).tolist()
    assert [answer.abstains for answer in answers] == [False, False, True]
    assert [answer.reason_to_abstain(0.5) for answer in answers] == ["min_score", None, "min_score"]


def test_evidence_follows_the_logits_spread() -> None:
    logits = np.tile(np.array([-1.0, 1.0], np.float32), 500)
    logits[:4] = 8.0, 2.9, 1.7, -9.0  # their mean is 0, their deviation about 1
    logits = logits[np.newaxis] + 100
    head = Head(tuple(map(str, range(1000))), independent=False)
    found = [head.score_and_evidence(logits, np.array([each]))[1].item() for each in range(4)]
    spread = logits.std()
    above = logits[0, :4] - logits.mean()
    np.testing.assert_allclose(found, [1, *(above[1:3] / spread - 1.5) / 2.5, 0], atol=1e-4)
    assert 0 < found[2] < 0.2 < found[1] < 1
    assert head.score_and_evidence(np.zeros((1, 1000), np.float32), np.array([0]))[1].tolist() == [
        0
    ], "no class has evidence"
