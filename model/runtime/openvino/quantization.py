"""Makes a graph of a network that multiplies in int8, and finds out which products need more than that.

A product of an input with constant weights is computed in one of three ways, see `Way`. What an input loses by one
scale for all of it differs widely: in DeiT-tiny a fifth of the products make two thirds of the whole error, most of
them in the first block. So each product's error is measured alone, and as many as necessary get a better way, those
first whose error shrinks most for the time that it takes. `python -m benchmarks.int8` measures what comes of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError
from model.runtime.openvino.graph import Requests, openvino_package

if TYPE_CHECKING:
    import openvino

Floats = NDArray[np.float32]

_BATCH: Final = 8
_SOLE: Final = 24
"""Pictures on which the error of each product is measured: its outliers are in all of them."""

_CLIPPED: Final = 1e-3
"""Share of an input's tokens whose largest value may lie beyond its range: rare ones would make every step coarse."""

_DIVERGENCE: Final = 0.1
"""How much divergence an agreement of 1 - x allows, as a multiple of x.

Seen with DeiT-tiny: 0.0007 at 99.6 %, 0.0009 at 99.2 %, 0.0024 at 98.4 %, 0.004 at 97.8 %. The agreement itself is no
better a guide: on 300 pictures it is off by half a percent.
"""

_LARGEST_GROUP: Final = 256
_GROUP_STEP: Final = 16
"""Values of a token that share a scale where OpenVINO quantises an input as it computes: it takes multiples of 16, and
larger groups are faster and coarser."""


class Way(IntEnum):
    """How a product is computed, from the fastest to the most exact.

    Attributes:
        STATIC: one scale for its input, from the pictures.
        DYNAMIC: OpenVINO quantises the input as it computes, each token by itself.
        FLOATING: as without int8.
    """

    STATIC = 0
    DYNAMIC = 1
    FLOATING = 2


_TIME: Final = {Way.STATIC: 0.6, Way.DYNAMIC: 0.7, Way.FLOATING: 1.0}
"""Of a product, beside that in bfloat16: an AMD EPYC with avx512_vnni."""

Ways = Mapping[str, Way]


class Comparison(NamedTuple):
    """How the logits of two ways of computing the same pictures compare.

    Attributes:
        agreement: share of the pictures that have the same best class.
        kl: mean divergence of the softmax from that of the reference (Kullback and Leibler), in nats.
    """

    agreement: float
    kl: float


class Product(NamedTuple):
    """A product with constant weights, and what its input is like.

    Attributes:
        size: multiplications for an image.
        low, high: the input's range.
        grouped: whether OpenVINO can quantise the input as it computes.
    """

    size: int
    low: float
    high: float
    grouped: bool


class Quantised(NamedTuple):
    """How a product is computed, and the range of its input."""

    way: Way
    low: float
    high: float


class Step(NamedTuple):
    """A better way for a product, and what it brings for its time."""

    gain: float
    name: str
    way: Way


def compare(logits: Floats, reference: Floats) -> Comparison:
    """Compare logits with those of the reference, both [N, classes]."""
    agreement = float((logits.argmax(axis=1) == reference.argmax(axis=1)).mean())
    ours, theirs = _log_softmax(logits), _log_softmax(reference)
    return Comparison(agreement, float((np.exp(theirs) * (theirs - ours)).sum(axis=1).mean()))


def graph_logits(model: openvino.Model, dtype: str, images: NDArray[np.uint8], threads: int) -> Floats:
    """Return what a graph gives for images [N, H, W, C]: float32 [N, classes]."""
    requests = Requests(model, dtype, threads=threads, streams=1, size=_BATCH)
    parts = []
    for start in range(0, len(images), _BATCH):
        piece = images[start : start + _BATCH]
        padded = np.concatenate([piece, np.repeat(piece[-1:], _BATCH - len(piece), axis=0)])
        parts.append(requests.infer(padded)[0][: len(piece)])
    return np.concatenate(parts)


class Quantiser:
    """Makes graphs in int8 of one network.

    Args:
        graph: the network in float32; its first output is the logits.
        dtype: of what stays in floating point, see `PRECISIONS`.
        images: to calibrate with, uint8 [N, H, W, C].
        threads: that compute.
        progress: gets a line for each step.

    Raises:
        DeviceError: the network has no product with constant weights.
    """

    def __init__(
        self,
        graph: openvino.Model,
        dtype: str,
        images: NDArray[np.uint8],
        *,
        threads: int,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._graph = graph
        self._dtype, self._images, self._threads, self._progress = dtype, images, threads, progress
        progress(f"calibrating on {len(images)} views of the pictures")
        self.products = measured_products(graph, images, threads)
        if not self.products:
            raise DeviceError("dtype 'int8': the network has no product with constant weights")
        self._reference = graph_logits(_logits_alone(graph), "float32", images, threads)
        self._steps: list[Step] | None = None

    def quantise(self, least: float) -> dict[str, Quantised]:
        """Return how each product is computed: as fast as an agreement allows.

        Args:
            least: the agreement that its divergence from float32 has to be small enough for; 0 makes every product
                static.

        Raises:
            DeviceError: that needs all products in floating point.
        """
        most = _DIVERGENCE * (1 - least)
        steps: list[Step] = []
        if not self._suffices(steps, most):
            steps = self._steps = self._steps or self._ordered_steps()
            steps = steps[: fewest(len(steps), lambda count: self._suffices(steps[:count], most))]
        ways = self._after(steps)
        if set(ways.values()) == {Way.FLOATING}:
            raise DeviceError(f"dtype 'int8': no product of this network may be in int8 for {least:.2%}")
        return self._quantised(ways)

    def _ordered_steps(self) -> list[Step]:
        """Return steps from all products static to all in floating point, those that bring most for their time first.

        A product's own steps follow each other.
        """
        base = self._divergence(dict.fromkeys(self.products, Way.FLOATING))

        def error(name: str, way: Way) -> float:
            kl = self._divergence({**dict.fromkeys(self.products, Way.FLOATING), name: way})
            return max(kl - base, 0.0)

        steps = []
        for number, (name, product) in enumerate(self.products.items()):
            if not number % 10:
                self._progress(f"product {number + 1} of {len(self.products)}")
            errors = {Way.STATIC: error(name, Way.STATIC), Way.FLOATING: 0.0}
            if product.grouped:
                errors[Way.DYNAMIC] = error(name, Way.DYNAMIC)
            steps += steps_of(name, product.size, errors)
        return sorted(steps, key=lambda step: -step.gain)

    def _suffices(self, steps: list[Step], most: float) -> bool:
        ways = self._after(steps)
        found = compare(graph_logits(self._with(ways), self._dtype, self._images, self._threads), self._reference)
        counts = ", ".join(f"{list(ways.values()).count(way)} {way.name.lower()}" for way in Way)
        self._progress(f"{counts}: agreement {found.agreement:.2%}, KL {found.kl:.5f} (at most {most:.5f})")
        return found.kl <= most

    def _after(self, steps: list[Step]) -> dict[str, Way]:
        return dict.fromkeys(self.products, Way.STATIC) | {step.name: step.way for step in steps}

    def _divergence(self, ways: Ways) -> float:
        logits = graph_logits(self._with(ways), self._dtype, self._images[:_SOLE], self._threads)
        return compare(logits, self._reference[:_SOLE]).kl

    def _with(self, ways: Ways) -> openvino.Model:
        return int8_graph(self._graph, self._quantised(ways))

    def _quantised(self, ways: Ways) -> dict[str, Quantised]:
        return {name: Quantised(ways[name], each.low, each.high) for name, each in self.products.items()}


def steps_of(name: str, size: int, errors: Mapping[Way, float]) -> list[Step]:
    """Return the steps of one product, from static to floating point: none is after one that brings less.

    Args:
        size: its multiplications.
        errors: of each way that is possible.
    """

    def step(before: Way, after: Way) -> Step:
        return Step((errors[before] - errors[after]) / (size * (_TIME[after] - _TIME[before])), name, after)

    steps = [step(*pair) for pair in pairwise(sorted(errors))]
    if len(steps) > 1 and steps[0].gain < steps[1].gain:
        return [step(Way.STATIC, Way.FLOATING)]
    return steps


def fewest(most: int, suffices: Callable[[int], bool]) -> int:
    """Return the smallest number from 1 on that suffices, if all above one that does so do too; else `most`."""
    low, high = min(1, most), most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def measured_products(graph: openvino.Model, images: NDArray[np.uint8], threads: int) -> dict[str, Product]:
    """Return the products of a graph with constant weights by their names, in the order of the graph."""
    found = {each.get_friendly_name(): each for each in graph.get_ordered_ops() if _has_weights(each)}
    if not found:
        return {}
    from openvino import Model  # noqa: PLC0415  an optional package

    watched = Model([each.input_value(0) for each in found.values()], graph.get_parameters(), "inputs")
    requests = Requests(watched, "float32", threads=threads, streams=1, size=1)
    ends: list[list[tuple[Floats, Floats]]] = [[] for _ in found]
    for image in images:
        for values, pairs in zip(requests.infer(image[np.newaxis]), ends, strict=True):
            rows = values.reshape(-1, values.shape[-1])
            pairs.append((rows.min(axis=1), rows.max(axis=1)))
    products = {}
    depths = [int(each.input_value(1).shape[1]) for each in found.values()]
    group = _group(depths)
    for (name, each), pairs, depth in zip(found.items(), ends, depths, strict=True):
        lows, highs = (np.concatenate(side) for side in zip(*pairs, strict=True))
        products[name] = Product(
            size=math.prod(each.input_value(1).shape) * len(pairs[0][0]),
            low=min(float(np.quantile(lows, _CLIPPED)), 0.0),
            high=max(float(np.quantile(highs, 1 - _CLIPPED)), 0.0),
            grouped=bool(group) and depth % group == 0,
        )
    return products


def int8_graph(graph: openvino.Model, products: Mapping[str, Quantised]) -> openvino.Model:
    """Return a graph that gives the first output of another, which is the logits, with its products in int8.

    Raises:
        DeviceError: the products are not those of the graph.
    """
    changed = _logits_alone(graph)
    found = {each.get_friendly_name(): each for each in changed.get_ordered_ops() if _has_weights(each)}
    if found.keys() != products.keys():
        odd = min(found.keys() ^ products.keys())
        raise DeviceError(f"dtype 'int8': it is for another graph, as of another OpenVINO: convert again ({odd:.90})")
    group = _group([int(each.input_value(1).shape[1]) for each in found.values()])
    for name, (way, low, high) in products.items():
        product = found[name]
        if way is Way.FLOATING:
            continue
        weights = product.input_value(1).get_node().get_data()
        if way is Way.STATIC:
            product.input(0).replace_source_output(_scaled(product.input_value(0), low, high))
        product.input(1).replace_source_output(_rounded(weights, asymmetric=way is Way.DYNAMIC))
    changed.set_rt_info(str(group), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    return changed


def _has_weights(node: openvino.Node) -> bool:
    """Return whether a node multiplies with a constant matrix, float32 [outputs, inputs], as a linear layer does."""
    if node.get_type_name() != "MatMul":
        return False
    weights, options = node.input_value(1), node.get_attributes()
    return (
        weights.get_node().get_type_name() == "Constant"
        and weights.get_element_type().get_type_name() == "f32"
        and len(weights.shape) == 2
        and (options["transpose_a"], options["transpose_b"]) == (False, True)
    )


def _group(depths: list[int]) -> int:
    """Return how many values share a scale: the largest number that divides all depths, where that is large enough."""
    common = math.gcd(*depths)
    divisors = [n for n in range(_GROUP_STEP, _LARGEST_GROUP + 1, _GROUP_STEP) if common % n == 0]
    return max(divisors, default=0)


def _scaled(value: openvino.Output, low: float, high: float) -> openvino.Output:
    """Return an input rounded to the 256 steps of its range, of which one is 0."""
    ops = _operations()
    step = max(high - low, 1e-6) / 255
    below = round(-low / step)
    shape = (1,) * value.get_partial_shape().rank.get_length()
    ends = [ops.constant(np.full(shape, steps * step, np.float32)) for steps in (-below, 255 - below)]
    scaled: openvino.Output = ops.fake_quantize(value, *ends, *ends, 256).output(0)
    return scaled


def _rounded(weights: Floats, *, asymmetric: bool) -> openvino.Output:
    """Return weights of 8 bits, each row with a scale of its own, and with a zero where that is asked for.

    OpenVINO multiplies faster without zeros where the input has one scale.
    """
    ops = _operations()
    if asymmetric:
        low, high = np.minimum(weights.min(axis=1), 0)[:, None], np.maximum(weights.max(axis=1), 0)[:, None]
        scales = np.maximum(high - low, 1e-12) / 255
        zeros = np.round(-low / scales)
        steps = np.clip(np.round(weights / scales) + zeros, 0, 255).astype(np.uint8)
        values = ops.subtract(_floats(ops, steps), _floats(ops, zeros.astype(np.uint8)))
    else:
        scales = np.maximum(np.abs(weights).max(axis=1, keepdims=True), 1e-12) / 127
        values = _floats(ops, np.round(weights / scales).astype(np.int8))
    rounded: openvino.Output = ops.multiply(values, ops.constant(scales.astype(np.float32))).output(0)
    return rounded


def _floats(ops: Any, steps: NDArray[np.uint8] | NDArray[np.int8]) -> Any:
    return ops.convert(ops.constant(steps), np.float32)


def _logits_alone(graph: openvino.Model) -> openvino.Model:
    from openvino import Model  # noqa: PLC0415  an optional package

    clone = graph.clone()
    return Model([clone.outputs[0].get_node()], clone.get_parameters(), "int8")


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    values: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return values


def _operations() -> Any:
    openvino_package()
    from openvino import opset13  # noqa: PLC0415  an optional package

    return opset13
