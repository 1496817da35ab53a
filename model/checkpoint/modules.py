"""sentence-transformers' folder: `modules.json` says in which subfolder the model is, and what
comes after it.
"""

from typing import Final

from model.checkpoint.files import MODEL_FILES, Files
from model.checkpoint.local_files import read_json
from model.errors import CheckpointError

_MODULES_FILE: Final = "modules.json"


def of_modules(files: Files) -> Files:
    """Return the folder of the model that `modules.json` names; the folder itself if that holds a
    model.

    Raises:
        CheckpointError: further modules change what the model gives, or the file cannot be read.
    """
    if (
        any(files.path(name) is not None for name in MODEL_FILES)
        or files.path(_MODULES_FILE) is None
    ):
        return files
    where = files.where(_MODULES_FILE)
    modules = read_json(files.required(_MODULES_FILE), where)
    if (
        not isinstance(modules, list)
        or not all(isinstance(module, dict) for module in modules)
        or not modules
    ):
        raise CheckpointError(f"{where}: expected a list of modules")
    first, *others = (str(module.get("path", "")) for module in modules)
    inner = files.subfolder(first)
    if others:
        raise CheckpointError(
            f"{where}: {', '.join(others):.200} would change the embeddings of {first}, and is not computed: give "
            f"{inner.source if inner.source != files.source else inner.place} itself to serve it without"
        )
    return inner
