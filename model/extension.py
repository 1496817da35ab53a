"""The seam of `model`: the parts that installed extensions add to it.

A package adds an extension with an entry point of the group `vitserve.extensions` that names an
object of `Extension` or of a subclass, such as `service.extension.Extension`:

    [project.entry-points."vitserve.extensions"]
    formats = "model.extensions.formats:EXTENSION"

Importing the module of that object must be cheap. An extension therefore gives its parts as dotted
names, `module:name`, which `resolve` imports when they are needed.
"""

import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from model.errors import ExtensionError, VitError, first_line

GROUP: Final = "vitserve.extensions"

CORE: Final = "vitserve"
"""Owner of the core's names; see `claim`."""


_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class ExplanationMethod:
    """A way to explain an answer by a map.

    Attributes:
        name: name in requests.
        summary: what a map shows, in a few words for captions.
        class_specific: whether a map is of one class.
        function: dotted name of a `model.explanation.explain.TokenFunction`; empty only for the
            core's methods.
    """

    name: str
    summary: str
    class_specific: bool = False
    function: str = ""


@dataclass(frozen=True, kw_only=True)
class Extension:
    """Parts that one package adds; all fields except the name are optional.

    Attributes:
        name: unique name of the extension.
        sources: dotted names of functions that open a remote checkpoint; see
            `model.checkpoint.sources.open_remote`.
        readers: dotted names of checkpoint readers; see `model.checkpoint.Reader`.
        label_readers: dotted names of readers of label files; see
            `model.checkpoint.label_forms.LabelReader`.
        methods: explanation methods.
    """

    name: str
    sources: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    label_readers: tuple[str, ...] = ()
    methods: tuple[ExplanationMethod, ...] = ()


@cache
def extensions() -> tuple[Extension, ...]:
    """Return the installed extensions, sorted by name; found once per process.

    Raises:
        ExtensionError: an entry point cannot be loaded, names no `Extension`, or two extensions
            have one name.
    """
    extensions_by_name: dict[str, Extension] = {}
    for entry_point in _entry_points():
        package = entry_point.dist.name if entry_point.dist else entry_point.value
        owner = f"the extension {entry_point.name!r} of {package}"
        if entry_point.pattern.match(entry_point.value) is None:
            raise ExtensionError(f"{owner}: {entry_point.value!r} is not of the form module:name")
        extension = _load(entry_point, owner)
        if not isinstance(extension, Extension):
            raise ExtensionError(f"{owner}: {entry_point.value} is not an Extension")
        if not _NAME.fullmatch(str(extension.name)):
            raise ExtensionError(
                f"{owner}: its name is {extension.name!r}: use letters, digits, - and _"
            )
        if isinstance(extension.readers, str):
            raise ExtensionError(
                f"{owner}: `readers` is a text: write a tuple, ({extension.readers!r},)"
            )
        if extension.name in extensions_by_name:
            raise ExtensionError(
                f"{owner}: another installed extension has the name {extension.name!r}: "
                "uninstall one of them"
            )
        extensions_by_name[extension.name] = extension
    return tuple(extensions_by_name[name] for name in sorted(extensions_by_name))


def claim(names: Iterable[str], kind: str, extension: Extension, owners: dict[str, str]) -> None:
    """Note in `owners` that names of one kind belong to an extension.

    Args:
        names: names that the extension adds.
        kind: kind of the names, such as "the route".
        extension: extension that adds them.
        owners: owner of each name so far.

    Raises:
        ExtensionError: a name has an owner.
    """
    for name in names:
        if name in owners:
            raise ExtensionError(
                f"the extension {extension.name!r}: {kind} {name} also belongs to {owners[name]}: "
                "rename it, or uninstall the extension"
            )
        owners[name] = f"the extension {extension.name!r}"


def resolve(dotted_name: str, extension: Extension) -> Any:
    """Import the object that an extension gives as `module:name`.

    Raises:
        ExtensionError: the object does not exist, or its module cannot be imported.
    """
    entry_point = EntryPoint(extension.name, dotted_name, GROUP)
    return _load(entry_point, f"the extension {extension.name!r}")


@contextmanager
def naming(
    extension: Extension, field_name: str, expected: tuple[type[Exception], ...] = (VitError,)
) -> Iterator[None]:
    """Name the extension and the failed line in an unexpected error of one of its functions.

    Raises:
        ExtensionError: the function raised an error of another type than `expected`.
    """
    try:
        yield
    except expected:
        raise
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        raise ExtensionError(
            f"the extension {extension.name!r}: `{field_name}` failed: {type(error).__name__}: "
            f"{first_line(error)} ({innermost.filename}:{innermost.lineno}): "
            "mend the extension, or uninstall it"
        ) from error


def _entry_points() -> Iterable[EntryPoint]:
    try:
        return entry_points(group=GROUP)
    except Exception as error:
        raise ExtensionError(
            f"an installed package has an unreadable entry_points.txt: {first_line(error)}"
        ) from error


def _load(entry_point: EntryPoint, owner: str) -> Any:
    try:
        return entry_point.load()
    except (Exception, SystemExit) as error:
        raise ExtensionError(
            f"{owner}: {entry_point.value} cannot be loaded: {type(error).__name__}: "
            f"{first_line(error)}: mend the extension, or uninstall it"
        ) from error
