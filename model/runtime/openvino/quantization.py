"""Makes a graph of a network that multiplies in int8, with NNCF, and finds out which layers need more than that.

NNCF gives every product one scale for its weights' rows and one for its whole input, measured on pictures. A few inputs
have outliers that one scale cannot hold; in DeiT these are what the GELU gives the second layer of an MLP. Such inputs
are found by measurement and left in floating point. OpenVINO then quantises them as it computes, each token by itself,
and multiplies in int8 all the same. https://github.com/openvinotoolkit/nncf
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError
from model.runtime.openvino.graph import Requests, openvino_package

if TYPE_CHECKING:
    import openvino

logger = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_GROUP: Final = 192
"""Values of a token that share a scale where OpenVINO quantises an input as it computes; a token has one or a few."""

_BATCH: Final = 8
_SOLE: Final = 48
"""Pictures on which each input is measured by itself: its outliers are in all of them."""

_LARGE: Final = 4
"""All scales together may cost so many times what rounding the weights alone costs, in divergence. A kind of input that
costs more is looked at block by block."""


class Comparison(NamedTuple):
    """How the logits of two ways of computing the same pictures compare.

    Attributes:
        agreement: share of the pictures that have the same best class.
        kl: mean divergence of the softmax from that of the reference (Kullback and Leibler), in nats.
    """

    agreement: float
    kl: float


class Quantised(NamedTuple):
    """A graph that multiplies in int8.

    Attributes:
        model: it gives logits alone.
        floating: names of the inputs of products that it has no scale for.
    """

    model: openvino.Model
    floating: tuple[str, ...]


def unsupported_reason() -> str | None:
    """Return why no graph can be quantised here, or None."""
    try:
        _nncf()
    except ImportError:
        return "it needs the package nncf: pip install -e '.[int8]' in the clone"
    return None


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


def quantise(
    graph: openvino.Model,
    dtype: str,
    images: NDArray[np.uint8],
    *,
    threads: int,
    least: float,
    progress: Callable[[str], None] = lambda line: None,
) -> Quantised:
    """Return a graph in int8 that agrees with the float32 one on as many of the calibration pictures as is asked for.

    As few inputs as possible are left without a scale: those that cost most when they alone have one. Where more than
    half of them would be, none has a scale: that is no slower, and the weights may then be finer.

    Args:
        graph: the network in float32; its first output is the logits.
        dtype: of what stays in floating point, see `PRECISIONS`.
        images: to calibrate with, uint8 [N, H, W, C].
        threads: that compute.
        least: the share of these images whose best class must be float32's; 0 gives every input a scale.
        progress: gets a line for each step.

    Raises:
        DeviceError: NNCF does not quantise this graph.
    """
    only_logits = logits_alone(graph)
    whole = scaled(only_logits, images, progress)
    inputs = scaled_inputs(whole)
    if not least:
        return Quantised(without_scales(whole, ()), ())
    reference = graph_logits(only_logits, "float32", images, threads)

    def cost(kept: Iterable[str]) -> float:
        part = without_scales(whole, inputs.keys() - set(kept))
        return compare(graph_logits(part, dtype, images[:_SOLE], threads), reference[:_SOLE]).kl

    base = max(cost(()), 1e-6)
    order = by_cost(inputs, cost, base, progress)

    def suffices(count: int) -> bool:
        model = without_scales(whole, order[:count])
        found = compare(graph_logits(model, dtype, images, threads), reference)
        progress(f"{count} of {len(order)} inputs without a scale: agreement {found.agreement:.2%}, KL {found.kl:.5f}")
        # The best class of few pictures is close to another one's; the divergence tells of all of them.
        return found.agreement >= least and found.kl <= _LARGE * base

    most = len(order) // 2
    count = _fewest(most + 1, suffices)
    if count > most:
        progress("too many inputs need more than a scale: all are quantised as they are computed")
        return Quantised(without_all_scales(only_logits), tuple(inputs))
    return Quantised(without_scales(whole, order[:count]), tuple(order[:count]))


def by_cost(
    inputs: dict[str, str], cost: Callable[[Iterable[str]], float], base: float, progress: Callable[[str], None]
) -> list[str]:
    """Return the inputs by what each costs when it alone has a scale, most first.

    Args:
        inputs: the kind of each by its name: what it is called in every block.
        cost: of a graph in which these inputs have a scale.
        base: of one in which none has.
    """
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, kind in inputs.items():
        kinds[kind].append(name)
    costs: dict[str, float] = {}
    for kind, names in kinds.items():
        together = cost(names)
        progress(f"{kind}: KL {together:.5f} beside {base:.5f} of the weights alone")
        costs |= dict.fromkeys(names, (together - base) / len(names))
        if len(names) > 1 and together > _LARGE * base:
            costs |= {name: cost([name]) - base for name in names}
    return sorted(inputs, key=lambda name: -costs[name])


def _fewest(most: int, suffices: Callable[[int], bool]) -> int:
    """Return the smallest number that suffices, if all above one that does so do too; `most` where none does."""
    if suffices(0):
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def logits_alone(graph: openvino.Model) -> openvino.Model:
    """Return a graph that gives the first output alone."""
    from openvino import Model  # noqa: PLC0415  an optional package

    clone = graph.clone()
    return Model([clone.outputs[0].get_node()], clone.get_parameters(), "int8")


def scaled(graph: openvino.Model, images: NDArray[np.uint8], progress: Callable[[str], None]) -> openvino.Model:
    """Return the graph with a scale for the weights and the input of every product, as NNCF finds them.

    NNCF smooths inputs (Xiao et al. 2022). Without that, a graph of DeiT-tiny takes longer: docs/checkpoints.md has the
    figures.
    """
    nncf = _nncf()
    progress(f"calibrating on {len(images)} pictures")
    try:
        model: openvino.Model = nncf.quantize(
            graph,
            nncf.Dataset(list(images[:, np.newaxis])),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(images),
        )
    except (RuntimeError, nncf.errors.ValidationError) as error:
        raise DeviceError(f"NNCF does not quantise this model: {str(error).strip().splitlines()[-1]}") from error
    return model


def scaled_inputs(model: openvino.Model) -> dict[str, str]:
    """Return the kind of each input that has a scale, by the name of its operation, in the order of the graph.

    The names of blocks differ by their numbers.
    """
    names = (each.get_friendly_name() for each in model.get_ordered_ops() if each.get_type_name() == "FakeQuantize")
    return {name: re.sub(r"\d+", "N", name) for name in names}


def without_scales(model: openvino.Model, names: Iterable[str]) -> openvino.Model:
    """Return the graph with these inputs in floating point; the weights they are multiplied with stay int8."""
    names, changed = frozenset(names), model.clone()
    for each in changed.get_ordered_ops():
        if each.get_friendly_name() in names:
            each.output(0).replace(each.input_value(0))
    changed.set_rt_info(str(_GROUP), ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"])
    return changed


def without_all_scales(graph: openvino.Model) -> openvino.Model:
    """Return the graph with weights in int8, each row with a scale and a zero, and no scale for any input."""
    nncf = _nncf()
    compressed: openvino.Model = nncf.compress_weights(graph.clone(), mode=nncf.CompressWeightsMode.INT8_ASYM)
    return without_scales(compressed, ())


def _log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    values: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return values


def _nncf() -> Any:
    openvino_package()  # which silences its telemetry, and with it NNCF's
    import nncf  # noqa: PLC0415  an optional package

    nncf.set_log_level(logging.ERROR)
    return nncf
