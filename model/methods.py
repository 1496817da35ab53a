"""The explanation methods that this installation offers, by name. Torch-free.

`relevance` and `cls` belong to the core; extensions add others (`model.extension`).
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from model.extension import CORE, ExplanationMethod, Extension, claim, extensions, resolve

_CORE: Final = (
    ExplanationMethod(
        name="relevance",
        summary="contribution to the class's margin over its rivals",
        class_specific=True,
    ),
    ExplanationMethod(name="cls", summary="attention of one layer"),
)


@cache
def methods() -> Mapping[str, ExplanationMethod]:
    """Return the methods by name, the default first.

    Raises:
        ExtensionError: two methods have the same name.
    """
    by_name = {method.name: method for method in _CORE}
    owners = dict.fromkeys(by_name, CORE)
    for extension in extensions():
        added = {method.name: method for method in extension.methods}
        claim(added, "the explanation method", extension, owners)
        by_name |= added
    return MappingProxyType(by_name)


def is_class_specific(name: str) -> bool:
    """Return whether there is a method of this name whose map is of a class."""
    return name in methods() and methods()[name].class_specific


def load_method(name: str) -> tuple[Extension, Any]:
    """Import the function of an extension's method, and return both.

    Raises:
        ExtensionError: the function cannot be imported.
    """
    for extension in extensions():
        for method in extension.methods:
            if method.name == name:
                return extension, resolve(method.function, extension)
    raise KeyError(name)
