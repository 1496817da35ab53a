"""What a taught head reaches: `python -m benchmarks.teach`. It needs scikit-learn, whose models it is compared with.

The groups are the classes of CIFAR-10: ten pictures or twenty of each teach a head, a hundred others test it. Features
are those of DeiT-tiny, which was trained on ImageNet and sees the 32 x 32 pixels enlarged to 224 x 224, and of the
bundled model, which was trained on other pictures of these very classes. A figure is a mean over draws of pictures.

`python -m benchmarks.teach --beside ROUNDS` measures a server that is taught: how soon it knows, and whom it disturbs.
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from benchmarks.record import Record, command_line
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
# Pictures of each class that draws are made from.
_POOL: Final = 400
_WRONG: Final = 0.1
_KEPT: Final = 0.95
_GROUPS: Final = {"animals taught": (2, 3, 4, 5, 6, 7), "vehicles taught": (0, 1, 8, 9)}
# Pictures that a head has, and the seconds after which it gets another one.
_TEACHING: Final = {"steady": (20, 1.0), "restless": (1000, 0.2)}


class Features:
    """Features of pictures by one model: of CIFAR-10's with their classes, and of photographs from ImageNet."""

    def __init__(self, source: str) -> None:
        checkpoint, data = load_checkpoint(source), read_files(_folder("cifar-10-batches-bin"), TEST_FILES)
        self._predictor, self._preprocess = Predictor(checkpoint), checkpoint.preprocess
        self._predictor.warm_up()
        chosen = np.concatenate([np.flatnonzero(data.labels == each)[:_POOL] for each in range(10)])
        self.classes = data.labels[chosen]
        self.pictures = self._of([data.read(each) for each in chosen.tolist()])
        self.photographs = self._of([file.read_bytes() for file in sorted(_folder("imagenet-samples").glob("*.JPEG"))])

    def _of(self, files: Sequence[bytes]) -> Floats:
        asked = RequestedOutputs(1, embedding=EmbeddingRequest())
        images = (preprocess(file, self._preprocess)[np.newaxis] for file in tqdm(files, disable=None))
        return np.stack([self._predictor.predict(image, asked)[0].embedding for image in images])  # type: ignore[misc]

    def draw(self, groups: Sequence[int], taught: int, seed: int) -> tuple[Numbers, Numbers]:
        """Return the pictures of each group that teach, and those that test."""
        random = np.random.default_rng(seed)
        drawn = [random.permutation(np.flatnonzero(self.classes == group))[: taught + _TESTED] for group in groups]
        return np.concatenate([each[:taught] for each in drawn]), np.concatenate([each[taught:] for each in drawn])

    def accuracy(self, taught: int, seed: int) -> dict[str, float]:
        """Return the share of test pictures that are right by ours and by others, and whether our interval holds it."""
        from sklearn import linear_model, neighbors, pipeline, preprocessing  # noqa: PLC0415  only this needs it

        own, others = self.draw(range(10), taught, seed)
        x, y = self.pictures, self.classes
        head, known = learn(x[own], y[own])
        assert known.accuracy is not None
        right = float((answers(head, x[others]) == y[others]).mean())
        models: dict[str, Any] = {
            "logistic regression": linear_model.LogisticRegression(max_iter=2000),
            "logistic regression, cross-validated": pipeline.make_pipeline(
                preprocessing.StandardScaler(), linear_model.LogisticRegressionCV(cv=5, max_iter=500)
            ),
            "nearest neighbour": neighbors.KNeighborsClassifier(1),
            "five nearest neighbours": neighbors.KNeighborsClassifier(5),
        }
        scores = {name: float(model.fit(x[own], y[own]).score(x[others], y[others])) for name, model in models.items()}
        held = float(known.accuracy.low <= right <= known.accuracy.high)
        return {"vitserve": right, **scores, "held out": known.accuracy.value, "in the interval": held}

    def suspects(self, taught: int, seed: int) -> dict[str, float]:
        """Return what is found of wrong labels: among as many suspects as there are wrong ones, and among all."""
        own, _ = self.draw(range(10), taught, seed)
        random, labels = np.random.default_rng(seed), self.classes[own].copy()
        wrong = random.permutation(len(own))[: round(_WRONG * len(own))]
        labels[wrong] = (labels[wrong] + random.integers(1, 10, len(wrong))) % 10
        listed = [each.number for each in learn(self.pictures[own], labels)[1].suspects]
        found: dict[str, float] = {"wrong": len(wrong), "listed": len(listed)}
        for suffix, named in ((" at as many", listed[: len(wrong)]), ("", listed)):
            right = len({*named} & {*wrong.tolist()})
            found |= {f"recall{suffix}": right / len(wrong), f"precision{suffix}": right / max(1, len(named))}
        return found

    def strangers(self, groups: Sequence[int], taught: int, seed: int) -> dict[str, float]:
        """Return the shares called far: of right pictures and of strangers, by the head's limit and at 95 % kept."""
        own, others = self.draw(groups, taught, seed)
        x, y = self.pictures, self.classes
        head, _ = learn(x[own], y[own])
        known = head.head.known
        assert known is not None
        right = x[others][answers(head, x[others]) == y[others]]
        limit = float(np.quantile(known.distances(right), _KEPT))
        found = {"right ones kept": 1 - float(known.far(right).mean())}
        kinds = {"other classes": x[~np.isin(y, groups)], "ImageNet photographs": self.photographs}
        for kind, pictures in kinds.items():
            found[f"{kind} abstained"] = float(known.far(pictures).mean())
            found[f"{kind} abstained at 95 % kept"] = float((known.distances(pictures) > limit).mean())
        return found


def learn(features: Floats, classes: Numbers) -> tuple[TaughtHead, Knowledge]:
    """Return the head that these pictures teach, and what it knows of itself; labels are the numbers of classes."""
    head = taught_head(features, [str(each) for each in classes], range(len(classes)), "", "")
    return head, Knowledge.model_validate_json(head.statistics)


def answers(head: TaughtHead, features: Floats) -> Numbers:
    """Return the classes that a head gives."""
    found: Numbers = np.array([*map(int, head.head.labels)])[head.head.logits(features).argmax(axis=1)]
    return found


class Teacher:
    """A caller who teaches a server pictures of CIFAR-10, each of them once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._data, self._unseen = read_files(_folder("cifar-10-batches-bin"), TEST_FILES), itertools.count()

    def add(self, head: str, pictures: int = 1, pause: float = 0.0, stop: Event | None = None) -> None:
        """Send a head so many pictures, or those until `stop`, each after a pause."""
        for number in itertools.islice(self._unseen, pictures):
            if stop is not None and stop.wait(pause):
                return
            self._client.teach(head, str(self._data.labels[number]), self._data.read(number))

    def known(self, head: str) -> None:
        """Wait until a head is fitted to all its pictures."""
        while not self._client.head(head).up_to_date:
            time.sleep(0.02)

    def seconds_until_known(self, head: str) -> float:
        """Return the time from the sending of the last of twenty pictures until the head that knows it answers."""
        self.add(head, 19)
        begun = time.perf_counter()
        self.add(head)
        self.known(head)
        self._client.classify(self._data.read(0), model=head)
        return time.perf_counter() - begun


def beside(model: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the rates of a lone caller beside teaching, as shares of those just before and after, and `known` heads.

    `steady`: a head of 20 pictures gets one each second. `restless`: one of 1,000 gets five a second.
    """
    photograph, caller = REPOSITORY / "examples" / "dog.jpg", Loader([REPOSITORY / "examples" / "dog.jpg"], OURS)
    with (
        TemporaryDirectory() as folder,
        running(VITSERVE, model, {"VIT_TEACH": folder}, picture=photograph.read_bytes()) as server,
        Client(server.url) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        teacher = Teacher(client)

        def rate(head: str, pause: float = 0.0) -> float:
            stop = Event()
            teaching = pool.submit(teacher.add, head, 100_000 if pause else 0, pause, stop)
            measured = caller.run(server.url, connections=1, seconds=seconds).rate
            stop.set()
            teaching.result()  # raises what it raised
            teacher.known(head)
            return measured

        found: dict[str, Any] = {"known": [round(teacher.seconds_until_known(f"head-{n}"), 2) for n in range(rounds)]}
        for head, (pictures, pause) in _TEACHING.items():
            teacher.add(head, pictures)
            rates = [rate(head, pause if number % 2 else 0.0) for number in range(2 * rounds + 1)]
            pairs = zip(rates[:-1:2], rates[1::2], rates[2::2], strict=True)
            shares = [2 * taught / (before + after) for before, taught, after in pairs]
            found[head] = {"share": round(float(np.median(shares)), 3), "each": [round(each, 3) for each in shares]}
        return found


def _folder(name: str) -> Path:
    return shared_folder() / "data" / name


def main() -> None:
    """Measure, print, and save the record. A round is one draw of pictures."""
    parser = command_line("teach", __doc__, rounds=100, seconds=4)
    parser.add_argument("--beside", type=int, metavar="ROUNDS", help="measure a server that is taught alone")
    arguments = parser.parse_args()
    about = {"groups": "classes of CIFAR-10, pictures of its test set", "tested": f"{_TESTED} pictures a group"}
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about=about)
    deit = shared_folder() / "weights" / "deit_tiny_imagenet"
    models = {} if arguments.beside else {"deit_tiny": Features(str(deit)), "bundled": Features("bundled")}
    for (name, features), taught in itertools.product(models.items(), _TAUGHT):
        kinds = {"accuracy": features.accuracy, "suspects": features.suspects}
        kinds |= {kind: partial(features.strangers, groups) for kind, groups in _GROUPS.items()}
        for kind, measure in kinds.items():
            rows = [measure(taught, seed) for seed in range(arguments.rounds)]
            means = {each: round(float(np.mean([row[each] for row in rows])), 4) for each in rows[0]}
            record.note(means | {"draws": len(rows)}, name, str(taught), kind)
    if models:
        both = np.concatenate([features.pictures[::2] for features in models.values()], axis=1)
        fit = partial(learn, both, models["bundled"].classes[::2])
        timers = {"processor seconds": time.process_time, "seconds": time.perf_counter}
        times = {name: round(min(repeat(fit, timer=timer, number=1)), 3) for name, timer in timers.items()}
        record.note({"pictures": len(both), "features": both.shape[1], **times}, "fit")
    else:
        record.note(beside(deit, arguments.beside, arguments.seconds), "beside")


if __name__ == "__main__":
    main()
