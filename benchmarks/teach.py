"""What a taught head reaches: `python -m benchmarks.teach`. It needs scikit-learn, whose models it is compared with.

The groups are the classes of CIFAR-10: ten pictures or twenty of each teach a head, a hundred others test it. Features
are those of DeiT-tiny, which was trained on ImageNet and sees the 32 x 32 pixels enlarged to 224 x 224, and of the
bundled model, which was trained on other pictures of these very classes. A figure is a mean over draws of pictures.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from timeit import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.checkpoints import REPOSITORY, shared_folder
from benchmarks.load import Loader
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import OURS, VITSERVE, running
from model.checkpoint import load_checkpoint
from model.data.cifar10 import TEST_FILES, read_files
from model.images.preprocess import preprocess
from model.outputs import EmbeddingRequest, RequestedOutputs
from model.runtime.predictor import Predictor
from model.taught_heads import TaughtHead
from service.teach.fit import taught_head
from vitserve.client import Client
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

    def __init__(self, source: str) -> None:
        checkpoint = load_checkpoint(source)
        self._predictor, self._preprocess = Predictor(checkpoint), checkpoint.preprocess
        self._predictor.warm_up()
        data = read_files(shared_folder() / "data" / "cifar-10-batches-bin", TEST_FILES)
        chosen = np.concatenate([np.flatnonzero(data.labels == each)[:_POOL] for each in range(10)])
        self.classes = data.labels[chosen]
        self.pictures = self._of([data.read(each) for each in chosen.tolist()])
        photographs = sorted((shared_folder() / "data" / "imagenet-samples").glob("*.JPEG"))
        self.photographs = self._of([file.read_bytes() for file in photographs])

    def _of(self, files: Sequence[bytes]) -> Floats:
        asked = RequestedOutputs(1, embedding=EmbeddingRequest())
        images = (preprocess(file, self._preprocess)[np.newaxis] for file in tqdm(files, disable=None))
        return np.stack([self._predictor.predict(image, asked)[0].embedding for image in images])  # type: ignore[misc]


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


def accuracy(features: Features, taught: int, seed: int) -> dict[str, float]:
    """Return the share of test pictures that are right by ours and by others, and whether our interval holds it."""
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV  # noqa: PLC0415  only this needs it
    from sklearn.neighbors import KNeighborsClassifier  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    own, others = draw(features.classes, range(10), taught, seed)
    x, y = features.pictures, features.classes
    head, known = learn(x[own], y[own])
    assert known.accuracy is not None
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
    believed = {"held out": known.accuracy.value, "low": known.accuracy.low, "high": known.accuracy.high}
    held = {"in the interval": float(known.accuracy.low <= right <= known.accuracy.high)}
    return {"vitserve": right, **scores, **believed, **held}


def suspects(features: Features, taught: int, seed: int) -> dict[str, float]:
    """Return what is found of wrong labels: among as many suspects as there are wrong ones, and among all suspects."""
    own, _ = draw(features.classes, range(10), taught, seed)
    random, labels = np.random.default_rng(seed), features.classes[own].copy()
    wrong = random.permutation(len(own))[: round(_WRONG * len(own))]
    labels[wrong] = (labels[wrong] + random.integers(1, 10, len(wrong))) % 10
    listed = [each.number for each in learn(features.pictures[own], labels)[1].suspects]
    found: dict[str, float] = {"wrong": len(wrong), "listed": len(listed)}
    for suffix, named in ((" at as many", listed[: len(wrong)]), ("", listed)):
        right = len({*named} & {*wrong.tolist()})
        found |= {f"recall{suffix}": right / len(wrong), f"precision{suffix}": right / max(1, len(named))}
    return found


def strangers(features: Features, groups: Sequence[int], taught: int, seed: int) -> dict[str, float]:
    """Return the shares called far: of right pictures and of strangers by the head's own limit, and at 95 % kept."""
    own, others = draw(features.classes, groups, taught, seed)
    x, y = features.pictures, features.classes
    head, _ = learn(x[own], y[own])
    known = head.head.known
    assert known is not None
    right = x[others][answers(head, x[others]) == y[others]]
    limit = float(np.quantile(known.distances(right), _KEPT))
    found = {"right ones kept": 1 - float(known.far(right).mean())}
    kinds = {"other classes": x[~np.isin(y, groups)], "ImageNet photographs": features.photographs}
    for kind, pictures in kinds.items():
        found[f"{kind} abstained"] = float(known.far(pictures).mean())
        found[f"{kind} abstained at 95 % kept"] = float((known.distances(pictures) > limit).mean())
    return found


def fit_seconds(features: Floats, classes: Numbers) -> dict[str, float]:
    """Return the seconds of a processor, and of the clock, that the fit to all these pictures takes; the best of 5."""
    timers = {"processor seconds": time.process_time, "seconds": time.perf_counter}
    sizes = {"pictures": len(features), "features": features.shape[1]}
    fit = partial(learn, features, classes)
    return sizes | {name: round(min(repeat(fit, timer=timer, number=1)), 3) for name, timer in timers.items()}


def beside(model: Path, rounds: int, seconds: float = 4.0) -> dict[str, Any]:
    """Return the rates of a lone caller beside teaching, as shares of its rates just before and after.

    `steady`: a head of 20 pictures gets one each second. `restless`: one of 1,000 gets five a second.
    """
    data = read_files(shared_folder() / "data" / "cifar-10-batches-bin", TEST_FILES)
    photograph, unseen = REPOSITORY / "examples" / "dog.jpg", itertools.count()
    found: dict[str, Any] = {"rounds": rounds}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        config = {"VIT_TEACH": folder}
        server = stack.enter_context(running(VITSERVE, model, config, picture=photograph.read_bytes()))
        client, caller = stack.enter_context(Client(server.url)), Loader([photograph], OURS)

        def add(head: str) -> None:
            number = next(unseen)
            client.teach(head, str(data.labels[number]), data.read(number))

        def teach(head: str, pause: float, stop: Event) -> None:
            while not stop.wait(pause):
                add(head)

        def rate(head: str, pause: float | None = None) -> float:
            stop = Event()
            with ThreadPoolExecutor(1) as pool:
                teaching = pool.submit(teach, head, pause, stop) if pause else None
                measured = caller.closed(server.url, connections=1, seconds=seconds).rate
                stop.set()
            if teaching is not None:
                teaching.result()  # raises what it raised
            while not client.head(head).up_to_date:
                time.sleep(0.1)
            return measured

        for head, pause, pictures in (("steady", 1.0, 20), ("restless", 0.2, 1000)):
            for _ in range(pictures):
                add(head)
            rates = [rate(head)]
            for _ in range(rounds):
                rates += [rate(head, pause), rate(head)]
            pairs = zip(rates[:-1:2], rates[1::2], rates[2::2], strict=True)
            shares = [2 * beside / (before + after) for before, beside, after in pairs]
            found[head] = {"share": round(float(np.median(shares)), 3), "each": [round(each, 3) for each in shares]}
    return found


def _means(measure: Callable[[int], dict[str, float]], draws: int) -> dict[str, float]:
    rows = [measure(seed) for seed in range(draws)]
    return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in rows[0]} | {"draws": draws}


def main() -> None:
    """Measure, print tables, and save the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.teach", description=__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--beside", type=int, metavar="ROUNDS", help="measure a caller beside teaching alone")
    parser.add_argument(
        "--record", type=Path, help="default: teach.json of the results, with --beside teach-beside.json"
    )
    arguments = parser.parse_args()
    about = {"groups": "classes of CIFAR-10, pictures of its test set", "tested": f"{_TESTED} pictures a group"}
    file = arguments.record or RESULTS / ("teach-beside.json" if arguments.beside else "teach.json")
    record = Record(file, dtype="auto (bfloat16 where native)", about=about)
    deit = shared_folder() / "weights" / "deit_tiny_imagenet"
    if arguments.beside:
        record.data["beside"] = beside(deit, arguments.beside)
        record.save()
        print(record.data["beside"])
        return
    sources = {"deit_tiny": str(deit), "bundled": "bundled"}
    models = {name: Features(source) for name, source in sources.items()}
    for (name, features), taught in itertools.product(models.items(), _TAUGHT):
        found = {
            "accuracy": _means(partial(accuracy, features, taught), arguments.draws),
            "suspects": _means(partial(suspects, features, taught), arguments.draws),
            "animals taught": _means(partial(strangers, features, _ANIMALS, taught), arguments.draws),
            "vehicles taught": _means(partial(strangers, features, _VEHICLES, taught), arguments.draws),
        }
        record.section(name)[str(taught)] = found
        record.save()
        for kind, means in found.items():
            print(table([f"{name}, {taught} pictures a group: {kind}", "mean"], means.items()) + "\n", flush=True)
    both = np.concatenate([features.pictures for features in models.values()], axis=1)
    record.data["fit"] = fit_seconds(both, models["bundled"].classes)
    record.save()
    print(record.data["fit"])


if __name__ == "__main__":
    main()
