"""The refusal of files that no reader recognises, with advice on the likely intent."""

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from model.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Files,
    SingleFile,
)
from model.checkpoint.foreign_files import foreign_advice
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE
from model.checkpoint.tensor_files import SUFFIXES
from model.errors import CheckpointError

# Names of files that accelerate, DeepSpeed and Trainers write with the weights.
_OF_TRAINING: Final = re.compile(r"optim|sched|scaler|random_states|rng_state|training_args")


def unrecognised(
    files: Files, formats: Sequence[str], extensions: Sequence[str]
) -> CheckpointError:
    """Return the error for files that neither the core nor an extension recognises.

    Args:
        files: files of the source.
        formats: names of the core's formats.
        extensions: names of the installed extensions with readers.
    """
    readable = f"folders of {', '.join(formats)}; extensions: {', '.join(extensions) or 'none'}"
    if isinstance(files, SingleFile):
        return CheckpointError(
            f"{files.title}: no reader for a single file is installed ({readable})"
        )
    if files.path(ADAPTER_CONFIG) is not None:
        return CheckpointError(
            f"{files.where(ADAPTER_CONFIG)}: no reader for adapters is installed ({readable})"
        )
    if files.path(CONFIG_FILE) is not None:
        return CheckpointError(
            f"{files.where(CONFIG_FILE)}: not a format that is read ({readable})"
        )
    return CheckpointError(
        f"{files.title}: has no {CONFIG_FILE}: {files.misnamed(CONFIG_FILE)}{_inner_models(files)}"
        f"expected {CONFIG_FILE}, {WEIGHTS_FILE} and {PREPROCESSOR_FILE}, as save_pretrained "
        "writes them (a Trainer into checkpoint-N); to read a file of weights alone, name that file"
    )


def _inner_models(files: Files) -> str:
    """Return the advice to name a subfolder that holds a model, else a file of weights."""
    names = sorted(files.models_within(), key=_steps, reverse=True)
    if not names:
        return _lone_weights(files)
    separator = ":" if files.is_remote else "/"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"there is a model in {', '.join(names[:5])}{more}: "
        f"give {files.source}{separator}{names[0]}; else "
    )


def _steps(name: str) -> int:
    """Return the steps of training of a Trainer's folder `checkpoint-N`; 0 for another folder."""
    match = re.search(r"checkpoint-(\d+)$", name)
    return int(match[1]) if match else 0


def _lone_weights(files: Files) -> str:
    """Return the advice to name a file of weights in a folder; empty if it holds none."""
    adapter = next((name for name in ADAPTER_WEIGHTS if files.is_on_disk(name)), None)
    if adapter is not None:
        return (
            f"{adapter} is an adapter without its {ADAPTER_CONFIG}: add that file to the folder, "
            "and name the base with --base CHECKPOINT (VIT_BASE); else "
        )
    every = sorted(files.names(), key=lambda name: name.count("/"))
    names = [
        name
        for name in every
        if PurePath(name).suffix.lower() in SUFFIXES and not _OF_TRAINING.search(name)
    ]
    if names and not files.is_remote:
        return f"it holds {', '.join(names[:5])}: give {files.source}/{names[0]}; else "
    foreign = next(filter(foreign_advice, every), None)
    return f"{foreign} is {foreign_advice(foreign)}; else " if foreign else ""
