"""Accuracy of taught heads: `python -m benchmarks.teach`. Needs scikit-learn for comparison.

Two kinds of groups are taught. Each picture of ImageNet belongs to another class, so a head of
*dog*, *bird* and other groups has to generalise. Pictures outside all groups are strangers. For
CIFAR-10, the groups are its classes. The backbone is DeiT-tiny, trained on ImageNet. Features are
the input of the checkpoint's own head (`head`), or of taught heads (`transfer`). A figure is a mean
over draws of pictures. `--choice` measures groups that weights and rules may be chosen on: see
`benchmarks.teach_groups`.

`python -m benchmarks.teach --beside ROUNDS` measures a server while it is taught: the time until a
new picture counts, and the rate of other callers.
"""

import csv
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.checkpoints import REPOSITORY, shared_folder
from benchmarks.explanations import mosaic, quarter_share
from benchmarks.load import Loader
from benchmarks.record import Record, command_line
from benchmarks.servers import OURS, VITSERVE, running
from benchmarks.teach_groups import CHOICE, REPORTED
from model.checkpoint import load_checkpoint
from model.config import PreprocessConfig
from model.extensions.evaluation.cifar10 import TEST_FILES, TRAIN_FILES, read_files
from model.extensions.taught.known_examples import KnownExamples
from model.extensions.taught.linear_probe import interval
from model.extensions.taught.taught_heads import Features, TaughtHead
from model.images.preprocess import preprocess
from model.outputs import EmbeddingRequest, MapRequest, Pooling, RequestedOutputs
from model.runtime.predictor import Predictor
from service.extensions.teach.fit import taught_head
from vitserve.client import Client
from vitserve.head_documents import Accuracy, Knowledge

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

_TAUGHT: Final = (5, 8, 10, 20)
_TESTED: Final = 50
# Pictures of each class of CIFAR-10 that draws are made from.
_POOL: Final = 150
_WRONG: Final = 0.1
_KEPT: Final = 0.95
_POOLS: Final[tuple[Pooling, ...]] = ("head", "transfer")
# Number of a group's pictures, and of mosaics of a draw.
_MAPPED: Final = 8
_MOSAICS: Final = 3
# Number of a head's pictures, and seconds between new pictures.
_TEACHING: Final = {"steady": (20, 1.0), "restless": (1000, 0.2)}


class Pictures:
    """Labelled pictures, and their features by one model.

    Attributes:
        images: uint8 [N, H, W, 3] of the model's size.
        features: float32 [N, D] by pool.
    """

    def __init__(
        self, predictor: Predictor, preprocess_config: PreprocessConfig, files: Sequence[bytes]
    ) -> None:
        rows: dict[Pooling, list[Floats]] = {pool: [] for pool in _POOLS}
        requests = [RequestedOutputs(1, embedding=EmbeddingRequest(pool)) for pool in _POOLS]
        self.images = np.stack([preprocess(file, preprocess_config) for file in files])
        for image in tqdm(self.images, disable=None):
            answers = predictor.predict(np.stack([image] * len(requests)), requests)
            for pool, outputs in zip(_POOLS, answers, strict=True):
                assert outputs.embedding is not None
                rows[pool].append(outputs.embedding)
        self.features = {pool: np.stack(values) for pool, values in rows.items()}


class Groups:
    """Groups of pictures that a head is taught.

    Args:
        pictures: pictures of the groups, and strangers.
        groups: int64 [N], the group of each picture, -1 of a stranger.
        predictor: computes the maps.
    """

    def __init__(self, pictures: Pictures, groups: Numbers, predictor: Predictor) -> None:
        self.features = pictures.features
        self.groups = groups
        self._images = pictures.images
        self._predictor = predictor
        self._names = {"head": "", "transfer": Features.of(predictor.config).suffix}

    def draw(self, taught: int, seed: int) -> tuple[Numbers, Numbers]:
        """Draw pictures to teach, at most `taught` for each group, and pictures to test.

        Each group has at least one picture to test.
        """
        random = np.random.default_rng(seed)
        own: list[Numbers] = []
        others: list[Numbers] = []
        for group in range(self.groups.max() + 1):
            drawn = random.permutation(np.flatnonzero(self.groups == group))
            count = min(taught, len(drawn) - 1)
            own.append(drawn[:count])
            others.append(drawn[count : count + _TESTED])
        return np.concatenate(own), np.concatenate(others)

    def learn(self, pool: Pooling, own: Numbers, labels: Numbers) -> tuple[TaughtHead, Knowledge]:
        """Fit a head to these pictures, and return it with its statistics."""
        return learn(self.features[pool][own], labels, self._names[pool])

    def accuracy(self, taught: int, seed: int) -> dict[str, float]:
        """Return the share of test pictures that are right: by ours with both pools, and by others
        with `transfer`.
        """
        from sklearn import linear_model, neighbors, pipeline, preprocessing  # noqa: PLC0415  only this needs it

        own, others = self.draw(taught, seed)
        y = self.groups
        found = dict[str, float]()
        for pool in _POOLS:
            head, known = self.learn(pool, own, y[own])
            right = float((answers(head, self.features[pool][others]) == y[others]).mean())
            assert known.accuracy is not None
            agrees = float(_agrees(known.accuracy, right, len(others)))
            found |= {f"vitserve, {pool}": right, f"agrees with the interval, {pool}": agrees}
        x = self.features["transfer"]
        rounded = x.astype(np.float16).astype(np.float32)
        head, _ = learn(rounded[own], y[own], self._names["transfer"])
        found["vitserve, examples of float16"] = float(
            (answers(head, x[others]) == y[others]).mean()
        )
        models: dict[str, Any] = {
            "logistic regression": pipeline.make_pipeline(
                preprocessing.StandardScaler(), linear_model.LogisticRegression(max_iter=500)
            ),
            "nearest neighbour": neighbors.KNeighborsClassifier(1),
            "five nearest neighbours": neighbors.KNeighborsClassifier(5),
        }
        return found | {
            name: float(model.fit(x[own], y[own]).score(x[others], y[others]))
            for name, model in models.items()
        }

    def suspects(self, taught: int, seed: int) -> dict[str, float]:
        """Return the share of wrong labels that are among the first suspects, for each pool.

        As many suspects count as there are wrong labels.
        """
        own, _ = self.draw(taught, seed)
        random = np.random.default_rng(seed)
        labels = self.groups[own].copy()
        wrong = random.permutation(len(own))[: max(1, round(_WRONG * len(own)))]
        count = int(self.groups.max()) + 1
        labels[wrong] = (labels[wrong] + random.integers(1, count, len(wrong))) % count
        found: dict[str, float] = {"wrong": len(wrong)}
        for pool in _POOLS:
            listed = [each.number for each in self.learn(pool, own, labels)[1].suspects]
            found[f"recall at as many, {pool}"] = len(
                {*listed[: len(wrong)]} & {*wrong.tolist()}
            ) / len(wrong)
        return found

    def strangers(self, taught: int, seed: int) -> dict[str, float]:
        """Return the shares called far: of right pictures and of strangers, by the head's limit and
        at 95 % kept.
        """
        own, others = self.draw(taught, seed)
        y = self.groups
        found = dict[str, float]()
        for pool in _POOLS:
            x = self.features[pool]
            head, _ = self.learn(pool, own, y[own])
            known = head.head.known
            assert isinstance(known, KnownExamples)
            right = x[others][answers(head, x[others]) == y[others]]
            strangers = x[y < 0]
            limit = float(np.quantile(known.distances(right), _KEPT))
            found |= {
                f"right ones kept, {pool}": 1 - float(known.are_far(right).mean()),
                f"strangers abstained, {pool}": float(known.are_far(strangers).mean()),
                f"strangers abstained at 95 % kept, {pool}": float(
                    (known.distances(strangers) > limit).mean()
                ),
            }
        return found

    def mosaics(self, taught: int, seed: int) -> dict[str, float]:
        """Return the share of a label's relevance in its own quarter of a mosaic, for each pool.

        A mosaic joins test pictures of four labels; see `benchmarks.explanations`.
        """
        own, others = self.draw(taught, seed)
        random = np.random.default_rng(seed)
        heads = {pool: self.learn(pool, own, self.groups[own])[0].head for pool in _POOLS}
        shares: dict[Pooling, list[float]] = {pool: [] for pool in _POOLS}
        for _ in range(_MOSAICS):
            labels = random.permutation(self.groups.max() + 1)[:4]
            pictures = [random.choice(others[self.groups[others] == label]) for label in labels]
            pixels = torch.from_numpy(self._images[pictures]).permute(0, 3, 1, 2).float()
            whole = mosaic(pixels).round().to(torch.uint8).permute(1, 2, 0).numpy()
            for pool, head in heads.items():
                self._predictor.heads["taught"] = head
                requests = [
                    RequestedOutputs(
                        1,
                        MapRequest("relevance", head.labels.index(str(label))),
                        embedding=EmbeddingRequest(pool),
                        head_name="taught",
                    )
                    for label in labels
                ]
                answers = self._predictor.predict(np.stack([whole] * len(labels)), requests)
                for quarter, outputs in enumerate(answers):
                    assert outputs.map is not None
                    relevance = torch.from_numpy(outputs.map.values)
                    shares[pool].append(quarter_share(relevance, quarter))
        return {f"right quarter, {pool}": float(np.mean(values)) for pool, values in shares.items()}


def groups_of(model: Path, *, choice: bool) -> dict[str, Groups]:
    """Return the groups of ImageNet's pictures and of CIFAR-10's, by name.

    Args:
        model: a checkpoint.
        choice: whether they are groups that weights and rules may be chosen on.
    """
    checkpoint = load_checkpoint(str(model))
    predictor = Predictor(checkpoint)
    predictor.warm_up()
    folder = _folder("teach")
    with (folder / "LABELS.csv").open() as file:
        rows = list(csv.DictReader(file))
    if choice:
        reported = frozenset[int | str]().union(
            *(classes for groups in REPORTED.values() for classes in groups.values())
        )
        rows = [row for row in rows if not {int(row["index"]), row["label"]} & reported]
    photographs = Pictures(
        predictor, checkpoint.preprocess, [(folder / row["file"]).read_bytes() for row in rows]
    )
    groups_by_name: dict[str, Groups] = {}
    for name, groups in (CHOICE if choice else REPORTED).items():
        members = np.full(len(rows), -1)
        for number, classes in enumerate(groups.values()):
            for picture, row in enumerate(rows):
                if classes & {int(row["index"]), row["label"]}:
                    members[picture] = number
        groups_by_name[name] = Groups(photographs, members, predictor)
    data = read_files(_folder("cifar-10-batches-bin"), TRAIN_FILES[:1] if choice else TEST_FILES)
    drawn = np.concatenate([np.flatnonzero(data.labels == label)[:_POOL] for label in range(10)])
    small = Pictures(
        predictor, checkpoint.preprocess, [data.read(number) for number in drawn.tolist()]
    )
    groups_by_name["CIFAR-10"] = Groups(small, data.labels[drawn], predictor)
    return groups_by_name


def learn(features: Floats, classes: Numbers, name: str = "") -> tuple[TaughtHead, Knowledge]:
    """Fit a head to features, and return it with its statistics; labels are class numbers."""
    head = taught_head(features, [str(each) for each in classes], range(len(classes)), name, "")
    return head, Knowledge.model_validate_json(head.statistics)


def answers(head: TaughtHead, features: Floats) -> Numbers:
    """Return the classes that a head gives."""
    found: Numbers = np.array([*map(int, head.head.labels)])[
        head.head.logits(features).argmax(axis=1)
    ]
    return found


def _agrees(accuracy: Accuracy, share: float, count: int) -> bool:
    """Return whether a share of few test pictures agrees with an interval (Newcombe 1998).

    The interval is of the accuracy on all pictures, which a share of 12 pictures misses by chance.
    """
    low, high = interval(share * count, count)
    if share > accuracy.value:
        return share - accuracy.value <= math.hypot(accuracy.high - accuracy.value, share - low)
    return accuracy.value - share <= math.hypot(accuracy.value - accuracy.low, high - share)


class Teacher:
    """A caller who teaches a server pictures of CIFAR-10, each of them once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._data = read_files(_folder("cifar-10-batches-bin"), TEST_FILES)
        self._unseen = itertools.count()

    def add(
        self, head: str, pictures: int = 1, pause: float = 0.0, stop: Event | None = None
    ) -> None:
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
        """Return the time from the sending of the last of twenty pictures until the head that knows
        it answers.
        """
        self.add(head, 19)
        begun = time.perf_counter()
        self.add(head)
        self.known(head)
        self._client.classify(self._data.read(0), model=head)
        return time.perf_counter() - begun


def beside(model: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the rates of a lone caller during teaching, relative to the rates before and after.

    `steady`: a head of 20 pictures gets a picture each second. `restless`: a head of 1,000 pictures
    gets five each second. `answers`: rate of answers by a taught head, relative to the
    checkpoint's own, by the number of connections.
    """
    photograph = REPOSITORY / "examples" / "dog.jpg"
    caller = Loader([REPOSITORY / "examples" / "dog.jpg"], OURS)
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
            teaching.result()  # raises the error of the thread
            teacher.known(head)
            return measured

        found: dict[str, Any] = {
            "known": [round(teacher.seconds_until_known(f"head-{n}"), 2) for n in range(rounds)]
        }
        for head, (pictures, pause) in _TEACHING.items():
            teacher.add(head, pictures)
            rates = [rate(head, pause if number % 2 else 0.0) for number in range(2 * rounds + 1)]
            pairs = zip(rates[:-1:2], rates[1::2], rates[2::2], strict=True)
            shares = [2 * taught / (before + after) for before, taught, after in pairs]
            found[head] = {
                "share": round(float(np.median(shares)), 3),
                "each": [round(each, 3) for each in shares],
            }
        found["answers"] = {
            connections: _share_of_taught(server.url, connections, rounds, seconds)
            for connections in (32, 1)
        }
        return found


def _share_of_taught(url: str, connections: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the rate of answers by the head `steady`, relative to the model's own head."""
    photographs = [REPOSITORY / "examples" / "dog.jpg"]
    own = Loader(photographs, OURS)
    taught = Loader(photographs, replace(OURS, path=f"{OURS.path}?model=steady"))
    rates = []
    for _ in range(2 * rounds):
        pair = [
            caller.run(url, connections=connections, seconds=seconds).rate
            for caller in (own, taught)
        ]
        rates.append(pair)
    shares = [taught_rate / own_rate for own_rate, taught_rate in rates]
    return {
        "own": round(float(np.median([own_rate for own_rate, _ in rates])), 1),
        "share": round(float(np.median(shares)), 3),
        "each": [round(share, 3) for share in shares],
    }


def _folder(name: str) -> Path:
    return shared_folder() / "data" / name


def main() -> None:
    """Measure, print, and save the record. A round is one draw of pictures."""
    parser = command_line("teach", __doc__, rounds=15, seconds=4)
    parser.add_argument(
        "--beside", type=int, metavar="ROUNDS", help="measure a server that is taught alone"
    )
    parser.add_argument(
        "--choice", action="store_true", help="measure groups that choices are made on"
    )
    arguments = parser.parse_args()
    about = {"tested": f"at most {_TESTED} pictures a group", "model": "DeiT-tiny/16, ImageNet-1k"}
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about=about)
    deit = shared_folder() / "weights" / "deit_tiny_imagenet"
    if arguments.beside:
        record.note(beside(deit, arguments.beside, arguments.seconds), "beside")
        return
    for name, groups in groups_of(deit, choice=arguments.choice).items():
        numbers = (_MAPPED,) if name.startswith("things, ") else _TAUGHT
        for taught in numbers:
            measures = {"accuracy": groups.accuracy, "suspects": groups.suspects}
            if (groups.groups < 0).any():
                measures["strangers"] = groups.strangers
                if taught == _MAPPED and not arguments.choice:
                    measures["mosaics"] = groups.mosaics
            for kind, measure in measures.items():
                rows = [measure(taught, seed) for seed in range(arguments.rounds)]
                means = {
                    figure: round(float(np.mean([row[figure] for row in rows])), 4)
                    for figure in rows[0]
                }
                record.note(means | {"draws": len(rows)}, name, str(taught), kind)


if __name__ == "__main__":
    main()
