"""sentence-transformers' folder, whose `modules.json` names the subfolder of the model."""

from typing import Final

from model.checkpoint.files import MODEL_FILES, Files
from model.checkpoint.local_files import read_json
from model.checkpoint.options import CheckpointOptions
from model.errors import CheckpointError

_MODULES_FILE: Final = "modules.json"


def read(files: Files, options: CheckpointOptions) -> Files | None:
    """Return the subfolder of the model; None if this is not a folder of sentence-transformers."""
    inner = model_folder(files)
    return None if inner is files else inner


def model_folder(files: Files) -> Files:
    """Return the subfolder that `modules.json` names, or `files` if they hold a model themselves.

    Raises:
        CheckpointError: further modules change the embedding, or the file cannot be read.
    """
    if files.parent is not None:
        return files  # a link within the folder could lead back to it
    holds_model = any(files.path(name) is not None for name in MODEL_FILES)
    if holds_model or files.path(_MODULES_FILE) is None:
        return files
    where = files.where(_MODULES_FILE)
    modules = read_json(files.required(_MODULES_FILE), where)
    is_list = isinstance(modules, list) and modules
    if not is_list or not all(isinstance(module, dict) for module in modules):
        raise CheckpointError(f"{where}: expected a list of modules")
    first, *others = (str(module.get("path", "")) for module in modules)
    inner = files.subfolder(first)
    if others:
        remedy = inner.source if inner.source != files.source else inner.title
        raise CheckpointError(
            f"{where}: {', '.join(others):.200} would change the embeddings of {first}, and is not "
            f"computed: give {remedy} to serve the model without"
        )
    return inner
