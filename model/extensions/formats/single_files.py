"""The content of one file of weights: a state dict, whatever training wrote, or `.npz`."""

from typing import Any, Final

import numpy as np
import torch

from model.checkpoint.files import SHARD, SingleFile
from model.checkpoint.foreign_files import foreign_advice
from model.checkpoint.local_files import open_file, reading
from model.checkpoint.tensor_files import DAMAGED, MALFORMED, SUFFIXES, read_tensor_file
from model.errors import CheckpointError
from model.images.listing import PICTURE_SUFFIXES

_SETTINGS: Final = dict.fromkeys(
    (".json", ".yaml", ".yml", ".txt", ".csv", ".tsv"),
    "a file of settings or labels, not of weights: give the folder that holds it and the "
    "weights; give labels as --labels {} (VIT_LABELS) with --checkpoint",
) | {
    ".toml": "a file of settings, not of weights: give a map of keys as --keys {} (VIT_KEYS) with "
    "--checkpoint FILE; settings of a model belong into the folder of --models"
}


def content_of(files: SingleFile) -> Any:
    """Return the content of a file as it was stored, on the CPU.

    Returns:
        Tensors by name, or the object that was given to `torch.save`.

    Raises:
        CheckpointError: as `read_tensor_file`, or the name is of a shard or of another kind.
    """
    name = files.file.name
    suffix = files.file.suffix.lower()
    advice = foreign_advice(name) or _SETTINGS.get(suffix, "").format(repr(name))
    shard = SHARD.fullmatch(name)
    if shard is not None and int(shard[2]) != 1:
        advice = "one shard of several: give the folder that holds all of them"
    elif suffix in PICTURE_SUFFIXES:
        advice = "a picture, not weights: `vitserve classify` classifies it"
    elif not advice and suffix not in SUFFIXES:
        advice = (
            f"a name that ends in one of {', '.join(SUFFIXES)} is expected: rename the file to say "
            "what it is, or save it as one of these"
        )
    if advice:
        raise CheckpointError(f"{files.title}: {advice}")
    return _read_npz(files) if suffix == ".npz" else read_tensor_file(files.file)


def _read_npz(files: SingleFile) -> dict[str, torch.Tensor]:
    with (
        open_file(files.file, files.title) as file,
        reading(files.title, f"not a valid .npz file{DAMAGED}", *MALFORMED),
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
        }
