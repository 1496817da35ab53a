"""Labels in YAML, whose values stay texts: `no` is a label, and not false.

A dictionary as Python prints it is YAML, too.
"""

from typing import Any, Final

from model.checkpoint.label_forms import LINE_SUFFIXES, is_document, labels_in_value
from model.checkpoint.local_files import reading, unique_keys
from model.errors import CheckpointError

_SUFFIXES: Final = (".yaml", ".yml")
# PyYAML reads about a megabyte a second.
_MAX_CHARACTERS: Final = 1 << 20


def read(text: str, where: str, suffix: str) -> tuple[str, ...] | None:
    """Return the labels of a YAML file or a Python literal; None for another file."""
    if suffix not in _SUFFIXES and not (suffix in LINE_SUFFIXES and is_document(text)):
        return None
    refusal = "not YAML" if suffix in _SUFFIXES else "neither JSON nor YAML"
    return labels_in_value(_parsed(text, where, refusal), where)


def _parsed(text: str, where: str, refusal: str) -> Any:
    try:
        import yaml  # noqa: PLC0415 - optional: the hub's client brings it
    except ImportError:
        raise CheckpointError(
            f"{where}: YAML needs PyYAML: pip install pyyaml, or write the labels as JSON"
        ) from None
    if len(text) > _MAX_CHARACTERS:
        raise CheckpointError(
            f"{where}: larger than {_MAX_CHARACTERS} characters of YAML; write it as JSON"
        )
    seen: set[int] = set()

    def value_of(node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return node.value
        line = node.start_mark.line + 1
        if id(node) in seen:  # a short alias can expand to a value of any size
            raise CheckpointError(f"{where}: line {line}: write the values out instead of an alias")
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [value_of(item) for item in node.value]
        pairs = [(str(value_of(key)), value_of(value)) for key, value in node.value]
        return unique_keys(pairs, f"{where}: line {line}")

    with reading(where, refusal, yaml.YAMLError, ValueError, RecursionError):
        node = yaml.compose(text, Loader=yaml.BaseLoader)
        return None if node is None else value_of(node)
