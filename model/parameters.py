"""Parameters of a request for a map or an embedding, checked against the model."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from model.config import NetworkConfig, ViTConfig
from model.errors import InputError
from model.methods import is_class_specific, methods
from model.outputs import (
    POOLINGS,
    AttentionHead,
    EmbeddingRequest,
    MapRequest,
    transfer_pool,
)

# Most classes of which one request may have maps.
MAX_CLASSES: Final = 8


def parse_maps(
    config: NetworkConfig,
    labels: Sequence[str],
    *,
    method: str | None = None,
    classes: str | None = None,
    layer: int | None = None,
    head: str | None = None,
) -> list[MapRequest]:
    """Return the request for a caller's map, or one request per class; None means not given.

    The default method is `cls` if a layer or head is given, else the model's default.

    Args:
        config, labels: of the model.
        method: name of a method.
        classes: see `parse_classes`.
        layer: see `parse_layer`.
        head: see `parse_attention_head`.

    Raises:
        InputError: the model does not have this class, layer, head or method, or a parameter does
            not apply to the method.
    """
    if not isinstance(config, ViTConfig):
        raise InputError(
            "attention", f"{config.kind} has no attention maps: they are for Vision Transformers"
        )
    row_parameters = [
        name for name, value in (("layer", layer), ("head", head)) if value is not None
    ]
    offered = methods_of(config)
    name = method
    if name is None:
        name = "cls" if row_parameters else offered[0]
    if is_class_specific(name) or classes is not None:
        require_classes(config)
    if name not in offered:
        raise InputError("method", f"method {name!r:.50}: expected one of {', '.join(offered)}")
    inapplicable: list[str] = []
    if classes is not None and not is_class_specific(name):
        inapplicable.append("class")
    if name != "cls":
        inapplicable += row_parameters
    if inapplicable:
        raise InputError(inapplicable[0], f"{inapplicable[0]} does not apply to method {name!r}")
    if name == "cls":
        number = parse_layer(layer, config.depth)
        return [MapRequest.attention_row(number, parse_attention_head(head, config.heads))]
    if classes is None:
        return [MapRequest(name)]
    return [MapRequest(name, index) for index in parse_classes(classes, labels)]


def require_classes(config: NetworkConfig) -> None:
    """Raise InputError for a model without a classification head; it names the alternatives."""
    if not config.num_classes:
        raise InputError(
            "model",
            "the model has no classification head: it gives embeddings (POST /embed, "
            f"vitserve embed) and attention maps ({', '.join(methods_of(config))}), and no labels",
        )


def methods_of(config: NetworkConfig) -> tuple[str, ...]:
    """Return the methods of an architecture, the default first; empty for a library's network.

    A model without classes has only methods without classes. Relevance needs pre-norm blocks; a
    model of other blocks has another class-specific method as its default, if there is one.
    """
    if not isinstance(config, ViTConfig):
        return ()
    class_specific = [name for name in methods() if is_class_specific(name)]
    others = [name for name in methods() if not is_class_specific(name)]
    if not config.num_classes:
        return tuple(others)
    if config.norm_order != "pre":
        class_specific.remove("relevance")
        return (*class_specific, *others)
    return tuple(methods())


def parse_layer(layer: int | None, depth: int) -> int:
    """Return a layer's number from 0; None is the last one, negatives count from the end.

    Raises:
        InputError: a model of `depth` layers does not have this layer.
    """
    if layer is None:
        return depth - 1
    if not -depth <= layer < depth:
        raise InputError("layer", f"layer {layer}: the model has layers {-depth} ... {depth - 1}")
    return layer % depth


def parse_attention_head(head: str | None, heads: int) -> AttentionHead:
    """Return the number of an attention head, or how all are combined; None is `mean`.

    Raises:
        InputError: a model of `heads` attention heads does not have this head.
    """
    if head is None or head == "mean":
        return "mean"
    if head == "max":
        return "max"
    if not head.isascii() or not head.isdecimal() or len(head) > 4 or int(head) >= heads:
        raise InputError("head", f"head {head[:20]!r}: expected mean, max, or 0 ... {heads - 1}")
    return int(head)


def parse_classes(text: str, labels: Sequence[str]) -> list[int]:
    """Return the indices of the classes in a comma-separated list.

    A whole label comes first, also one of digits. Another integer is an index. Everything else is
    one of a label's names, in any case: `tabby` of `tabby, tabby cat`.

    Raises:
        InputError: a name is unknown or ambiguous, an index is too high, or there are too many
            classes.
    """
    names = _class_names(tuple(labels))
    parts = [part.strip() for part in text.split(",")]
    indices: list[int] = []
    while parts:
        taken = names.parts_of_label(parts)
        name = ", ".join(parts[:taken])
        parts = parts[taken:]
        is_index = name.isascii() and name.isdecimal() and len(name) < 10
        if is_index and name not in names.by_label:
            matches = [int(name)] if int(name) < len(labels) else []
        else:
            matches = names.classes(name)
        if len(matches) != 1:
            problem = "is unknown"
            if matches:
                numbers = ", ".join(map(str, matches[:5]))
                problem = f"is ambiguous: {numbers} are called that"
            raise InputError(
                "class",
                f"class {name[:50]!r} {problem}; expected a label or an index below {len(labels)}",
            )
        indices.append(matches[0])
        if len(indices) > MAX_CLASSES:
            raise InputError("class", f"class: more than {MAX_CLASSES} classes")
    return indices


class _ClassNames(NamedTuple):
    """The classes of each label, and of each name in a label, in any case.

    Attributes:
        by_label: classes by their whole label.
        by_name: classes by each of the label's comma-separated names.
        most_parts: the most names in a label.
    """

    by_label: dict[str, list[int]]
    by_name: dict[str, list[int]]
    most_parts: int

    def classes(self, name: str) -> list[int]:
        """Return the classes with this label, or else with this name in their label."""
        key = name.casefold()
        return self.by_label.get(key) or self.by_name.get(key) or []

    def parts_of_label(self, parts: Sequence[str]) -> int:
        """Return how many of the first parts make a label, which may contain commas; at least 1."""
        for count in range(min(len(parts), self.most_parts), 1, -1):
            if ", ".join(parts[:count]).casefold() in self.by_label:
                return count
        return 1


@lru_cache(maxsize=4)
def _class_names(labels: tuple[str, ...]) -> _ClassNames:
    by_label: dict[str, list[int]] = {}
    by_name: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        names = dict.fromkeys(name.strip().casefold() for name in label.split(","))
        by_label.setdefault(", ".join(names), []).append(index)
        for name in names:
            by_name.setdefault(name, []).append(index)
    most_parts = 1 + max((label.count(",") for label in labels), default=0)
    return _ClassNames(by_label, by_name, most_parts)


def parse_embedding(
    config: NetworkConfig, pool: object = "head", normalize: object = False
) -> EmbeddingRequest:
    """Return the embedding that a caller asks for.

    Raises:
        InputError: the pool is unknown, or the model has no CLS token; or `normalize` is not a
            bool.
    """
    if pool not in POOLINGS:
        raise InputError("pool", f"pool {pool!r:.50}: expected one of {', '.join(POOLINGS)}")
    if pool == "transfer":
        pool = transfer_pool(config)
    if pool != "head" and not isinstance(config, ViTConfig):
        raise InputError(
            "pool", f"pool {pool!r}: {config.kind} offers only what its head reads; expected head"
        )
    if pool == "cls" and isinstance(config, ViTConfig) and not config.class_token:
        raise InputError("pool", "pool 'cls': the model has no CLS token; expected head or mean")
    if not isinstance(normalize, bool):
        raise InputError("normalize", f"normalize {normalize!r:.50}: expected true or false")
    return EmbeddingRequest(pool, normalize)
