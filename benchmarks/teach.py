"""What a taught head reaches: `python -m benchmarks.teach`. It needs scikit-learn, whose models it is compared with.

The groups are the classes of CIFAR-10: ten pictures or twenty of each teach a head, a hundred others test it. Features
are those of DeiT-tiny, which was trained on ImageNet and sees the 32 x 32 pixels enlarged to 224 x 224, and of the
bundled model, which was trained on other pictures of these very classes. A figure is a mean over draws of pictures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.checkpoints import shared_folder
from benchmarks.record import RESULTS, Record, table
from model.checkpoint import load_checkpoint
from model.data.cifar10 import TEST_FILES, read_files
from model.images.preprocess import preprocess
from model.outputs import Pooling, RequestedOutputs, parse_embedding
from model.runtime.predictor import Predictor
from model.taught_heads import TaughtHead
from service.teach.fit import taught_head
from vitserve.documents import Knowledge

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

_TAUGHT: Final = (10, 20)
_TESTED: Final = 100
_POOL: Final = 200
"""Pictures of each class that draws are made from."""
_WRONG: Final = 0.1
_KEPT: Final = 0.95
_ANIMALS: Final = (2, 3, 4, 5, 6, 7)
_VEHICLES: Final = (0, 1, 8, 9)


class Features:
    """Features of pictures by one model: of CIFAR-10's with their classes, and of photographs from ImageNet."""

    def __init__(self, source: str, pools: Sequence[Pooling] = ("head",)) -> None:
        checkpoint = load_checkpoint(source)
        self._predictor, self._preprocess = Predictor(checkpoint), checkpoint.preprocess
        self._predictor.warm_up()
        data = read_files(shared_folder() / "data" / "cifar-10-batches-bin", TEST_FILES)
        chosen = np.concatenate([np.flatnonzero(data.labels == each)[:_POOL] for each in range(10)])
        self.classes = data.labels[chosen]
        self.pictures = self._of(map(data.read, chosen.tolist()), pools, len(chosen))
        photographs = sorted((shared_folder() / "data" / "imagenet-samples").glob("*.JPEG"))
        self.photographs = self._of((file.read_bytes() for file in photographs), pools, len(photographs))

    def _of(self, files: Iterable[bytes], pools: Sequence[Pooling], count: int) -> Floats:
        requests = [
            RequestedOutputs(1, embedding=parse_embedding(self._predictor.config, pool, False)) for pool in pools
        ]
        rows: list[Floats] = []
        for file in tqdm(files, total=count, disable=None):
            image = preprocess(file, self._preprocess)[np.newaxis]
            parts = [self._predictor.predict(image, request)[0].embedding for request in requests]
            rows.append(np.concatenate([part for part in parts if part is not None]))
        return np.stack(rows)


def draw(classes: Numbers, groups: Sequence[int], taught: int, seed: int) -> tuple[Numbers, Numbers]:
    """Return the pictures of each group that teach, and those that test."""
    random = np.random.default_rng(seed)
    drawn = [random.permutation(np.flatnonzero(classes == group))[: taught + _TESTED] for group in groups]
    return np.concatenate([each[:taught] for each in drawn]), np.concatenate([each[taught:] for each in drawn])


def learn(features: Floats, classes: Numbers) -> tuple[TaughtHead, Knowledge]:
    """Return the head that these pictures teach, and what it knows of itself; labels are the numbers of classes."""
    head = taught_head(features, [str(each) for each in classes], range(len(classes)), "", "")
    return head, Knowledge.model_validate_json(head.statistics)


def answers(head: TaughtHead, features: Floats) -> Numbers:
    """Return the classes that a head gives."""
    names = np.array([int(label) for label in head.head.labels])
    found: Numbers = names[head.head.logits(features).argmax(axis=1)]
    return found


def accuracy(features: Features, taught: int, seeds: range) -> dict[str, float]:
    """Return the share of test pictures that are right by ours and by others, and how often our interval held it."""
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV  # noqa: PLC0415  only this needs it
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    rows: list[dict[str, float]] = []
    for seed in seeds:
        own, others = draw(features.classes, range(10), taught, seed)
        x, y = features.pictures, features.classes
        head, known = learn(x[own], y[own])
        right = float((answers(head, x[others]) == y[others]).mean())
        models: dict[str, Any] = {
            "logistic regression": LogisticRegression(max_iter=2000),
            "logistic regression, standardised": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
            "logistic regression, cross-validated": make_pipeline(
                StandardScaler(), LogisticRegressionCV(cv=5, max_iter=500)
            ),
            "nearest neighbour": KNeighborsClassifier(1),
            "five nearest neighbours": KNeighborsClassifier(5),
        }
        scores = {name: float(model.fit(x[own], y[own]).score(x[others], y[others])) for name, model in models.items()}
        assert known.accuracy is not None
        believed = {"held out": known.accuracy.value, "low": known.accuracy.low, "high": known.accuracy.high}
        held = {"in the interval": float(known.accuracy.low <= right <= known.accuracy.high)}
        rows.append({"vitserve": right, **scores, **believed, **held})
    return _means(rows)


def suspects(features: Features, taught: int, seeds: range) -> dict[str, float]:
    """Return what is found of wrong labels: among as many suspects as there are wrong ones, and among all suspects."""
    rows: list[dict[str, float]] = []
    for seed in seeds:
        own, _ = draw(features.classes, range(10), taught, seed)
        random, labels = np.random.default_rng(seed), features.classes[own].copy()
        wrong = random.permutation(len(own))[: round(_WRONG * len(own))]
        labels[wrong] = (labels[wrong] + random.integers(1, 10, len(wrong))) % 10
        listed = [each.number for each in learn(features.pictures[own], labels)[1].suspects]
        first = set(listed[: len(wrong)]) & set(wrong.tolist())
        found = set(listed) & set(wrong.tolist())
        rows.append(
            {
                "wrong": len(wrong),
                "recall at as many": len(first) / len(wrong),
                "precision at as many": len(first) / max(1, len(listed[: len(wrong)])),
                "listed": len(listed),
                "recall": len(found) / len(wrong),
                "precision": len(found) / max(1, len(listed)),
            }
        )
    return _means(rows)


def strangers(features: Features, groups: Sequence[int], taught: int, seeds: range) -> dict[str, float]:
    """Return the shares called far: of right pictures and of strangers by the head's own limit, and at 95 % kept."""
    rows: list[dict[str, float]] = []
    for seed in seeds:
        own, others = draw(features.classes, groups, taught, seed)
        x, y = features.pictures, features.classes
        head, _ = learn(x[own], y[own])
        known = head.head.known
        assert known is not None
        right = x[others][answers(head, x[others]) == y[others]]
        limit = float(np.quantile(known.distances(right), _KEPT))
        kinds = {"other classes": x[~np.isin(y, groups)], "ImageNet photographs": features.photographs}
        row = {"right ones kept": 1 - float(known.far(right).mean())}
        for kind, pictures in kinds.items():
            row[f"{kind} abstained"] = float(known.far(pictures).mean())
            row[f"{kind} abstained at 95 % kept"] = float((known.distances(pictures) > limit).mean())
        rows.append(row)
    return _means(rows)


def fit_seconds(features: Floats, classes: Numbers) -> dict[str, float]:
    """Return the seconds of a processor, and of the clock, that the fit to all these pictures takes; the best of 5."""
    timings: list[tuple[float, float]] = []
    for _ in range(5):
        before = time.process_time(), time.perf_counter()
        learn(features, classes)
        timings.append((time.process_time() - before[0], time.perf_counter() - before[1]))
    processor, clock = (min(each) for each in zip(*timings, strict=True))
    sizes = {"pictures": len(features), "features": features.shape[1]}
    return sizes | {"processor seconds": round(processor, 3), "seconds": round(clock, 3)}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]} | {"draws": len(rows)}


def main() -> None:
    """Measure, print tables, and save the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--record", type=Path, default=RESULTS / "teach.json")
    arguments = parser.parse_args()
    record = Record(
        arguments.record,
        dtype="auto (bfloat16 where native)",
        about={
            "groups": "classes of CIFAR-10, pictures of its test set",
            "tested": f"{_TESTED} pictures a group",
            "strangers": {"animals": "taught the six animals", "vehicles": "taught the four vehicles"},
        },
    )
    seeds = range(arguments.draws)
    for name, source in {
        "deit_tiny": str(shared_folder() / "weights" / "deit_tiny_imagenet"),
        "bundled": "bundled",
    }.items():
        features, section = Features(source), record.section(name)
        for taught in _TAUGHT:
            here = section.setdefault(str(taught), {})
            here["accuracy"] = accuracy(features, taught, seeds)
            here["suspects"] = suspects(features, taught, seeds)
            here["strangers"] = {
                group: strangers(features, groups, taught, seeds)
                for group, groups in {"animals": _ANIMALS, "vehicles": _VEHICLES}.items()
            }
            record.save()
            _print(name, taught, here)
    both = Features(str(shared_folder() / "weights" / "deit_tiny_imagenet"), ("head", "mean"))
    record.data["fit"] = fit_seconds(both.pictures, both.classes)
    print(record.data["fit"])
    record.save()


def _print(name: str, taught: int, found: dict[str, Any]) -> None:
    print(f"\n{name}, {taught} pictures a group")
    flat = {**found["accuracy"], **found["suspects"]}
    flat |= {f"{group}: {key}": value for group, each in found["strangers"].items() for key, value in each.items()}
    print(table(["", "mean"], flat.items()))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
