"""Checkpoints: a reader for each format, all of them strict, all with a `Checkpoint` as the result.

To add a format, write one module here with `FORMAT`, `recognises(files)` and `read(files, options)`
and add it to `_READERS`. To add a class of transformers, add one `Family` to
`huggingface.families`.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from model.checkpoint import huggingface, jax_npz, native, open_clip, state_dict, timm
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Files,
    SingleFile,
)
from model.checkpoint.hub import Repository, is_hub_id
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE
from model.checkpoint.key_map import KeyMap, read_key_map
from model.checkpoint.labels import LABEL_PRESETS, read_labels
from model.checkpoint.local_files import reading, resolved_source
from model.checkpoint.lora import adapt, adapter_base
from model.checkpoint.modules import of_modules
from model.checkpoint.options import PREPROCESS_PRESETS, CheckpointOptions, read_preprocess
from model.checkpoint.stated_head import activated, labelled
from model.checkpoint.tensor_files import SUFFIXES
from model.checkpoint.unread_files import refuse_unread, unread_files
from model.errors import CheckpointError
from model.taught_heads import is_taught_head

__all__ = ["BUNDLED", "LABEL_PRESETS", "PREPROCESS_PRESETS", "Checkpoint", "load_checkpoint"]

# The checkpoint that travels with the code.
BUNDLED: Final = Path(__file__).resolve().parent.parent / "weights" / "cifar10"

_READERS: Final = (native, timm, huggingface, open_clip, jax_npz, state_dict)


def load_checkpoint(
    source: str,
    *,
    base: str | None = None,
    bases_below: Sequence[Path] | None = None,
    hub_bases: bool = False,
    **fields: Any,
) -> Checkpoint:
    """Read a checkpoint, whatever its format.

    Its parts agree; its tensors' values are checked when it is built.

    Args:
        source: `bundled`, a folder, a file, or a hub id `owner/name[@revision][:subfolder]`; what
            exists here is never looked for on the hub.
        base: what a LoRA folder adapts, instead of what it names; as `source`.
        bases_below: folders, below one of which the base that it names has to lie; None where it
        may lie anywhere.
        hub_bases: whether it may name a hub id instead.
        fields: of `CheckpointOptions`.

    Raises:
        CheckpointError: nothing there, no format recognised, or not exactly what the format
        demands.
    """
    options = CheckpointOptions(**fields)
    # A file that is not there is refused before the weights are read, which may take minutes.
    if options.preprocess is not None:
        read_preprocess(options.preprocess)
    if options.labels not in (None, "numbers"):
        read_labels(options.labels, None)
    keys = read_key_map(options.keys)
    files = _open(source, keys)
    has_config = files.path(CONFIG_FILE) is not None
    if files.path(ADAPTER_CONFIG) is not None:
        if has_config and base is None:
            raise CheckpointError(
                f"{files.place}: holds a model ({CONFIG_FILE}) and an adapter ({ADAPTER_CONFIG}), and no file says "
                f"whether they are merged: --base {adapter_base(files, None)} (VIT_BASE) reads the adapter; without "
                f"{ADAPTER_CONFIG} the model is read"
            )
        adapter, files = files, _base(files, base, bases_below, keys, hub_bases=hub_bases)
        adapt(files, adapter, options)
    reader = next((reader for reader in _READERS if reader.recognises(files)), None)
    if reader is None and not has_config:
        raise CheckpointError(
            f"{files.place}: has no {CONFIG_FILE}: {_inner_models(files)}expected {CONFIG_FILE}, {WEIGHTS_FILE} and "
            f"{PREPROCESSOR_FILE}, as save_pretrained writes them (a Trainer into checkpoint-N); a file of weights "
            "alone is given itself"
        )
    if reader is None:
        known = ", ".join(reader.FORMAT for reader in _READERS)
        raise CheckpointError(
            f"{files.where(CONFIG_FILE)}: not a format this version reads ({known})"
        )
    of_state_dicts = {"VIT_ARCHITECTURE": options.architecture, "VIT_KEYS": options.keys}
    given = next((name for name, value in of_state_dicts.items() if value is not None), None)
    if given is not None and reader is not state_dict:
        raise CheckpointError(
            f"{files.place}: says its own architecture and names; {given} is for plain state dicts"
        )
    refuse_unread(files, reads_calibration=reader is native)
    checkpoint: Checkpoint = activated(
        labelled(reader.read(files, options), options.labels), options.activation
    )
    notes = checkpoint.notes + files.notes + unread_files(files)
    if files.overlay is not None:
        notes += (f"the LoRA adapter {files.overlay.place} is merged into {files.place}",)
    if isinstance(files, Repository) and files.from_cache:
        notes += (files.place,)
    network, preprocess = (
        checkpoint.config.model_dump_json(),
        checkpoint.preprocess.model_dump_json(),
    )
    parts = (
        files.digest,
        network,
        preprocess,
        checkpoint.labels,
        checkpoint.temperature,
        checkpoint.form,
        checkpoint.calibration,
        checkpoint.multi_label,
    )
    content = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    checkpoint = replace(
        checkpoint, notes=notes, assumed=checkpoint.assumed + files.assumed, content=content
    )
    return (
        checkpoint.of_one_size()
        if options.image_size is None
        else checkpoint.resized(options.image_size)
    )


def _open(source: str, keys: KeyMap) -> Files:
    path = BUNDLED if source == "bundled" else Path(source).expanduser()
    resolved = resolved_source(path, source)
    if resolved is not None and is_taught_head(path):
        raise CheckpointError(
            f"{source}: a taught head: a folder of --models takes it beside a model with its backbone"
        )
    if resolved is not None:
        return (
            of_modules(Files(path, source)) if resolved.is_dir() else SingleFile(path, source, keys)
        )
    if is_hub_id(source):
        return of_modules(Repository(source))
    raise CheckpointError(f"{source}: no such folder or file, and not a hub id (owner/name)")


def _base(
    adapter: Files, base: str | None, below: Sequence[Path] | None, keys: KeyMap, *, hub_bases: bool
) -> Files:
    """Return the base of an adapter; what comes from the hub cannot name a folder or file of this
    machine.
    """
    named = adapter_base(adapter, base)
    from_hub = hub_bases and is_hub_id(named) and resolved_source(Path(named), named) is None
    if base is None and below is not None and not from_hub:
        path = Path(os.path.realpath(named))
        if not any(path.is_relative_to(os.path.realpath(folder)) for folder in below):
            raise CheckpointError(
                f"{adapter.place}: its base {named!r:.200} does not lie below VIT_CHECKPOINT_FOLDER"
                f"{' or VIT_MODELS' if hub_bases else ''}: set VIT_BASE"
            )
    of_hub = isinstance(adapter, Repository) or any(
        part.startswith("models--") for part in Path(adapter.place).parts
    )
    if (
        base is None
        and not is_hub_id(named)
        and resolved_source(Path(named).expanduser(), named) is None
    ):
        raise CheckpointError(
            f"{adapter.place}: an adapter, whose base {named!r:.200} is not on this machine: set VIT_BASE (--base) to "
            "the checkpoint that it adapts"
        )
    if base is not None or not of_hub:
        return _open(named, keys)
    if not is_hub_id(named):
        raise CheckpointError(
            f"{adapter.place}: comes from the hub and names {named!r:.200} as its base, which is no hub id: "
            "set VIT_BASE to the checkpoint that it adapts"
        )
    return Repository(named)


def _inner_models(files: Files) -> str:
    """Return the advice to give one of the subfolders that hold a model, or an empty text if none
    does.
    """
    inner = files.models_within()
    if not inner:
        return _lone_weights(files)
    joint = ":" if isinstance(files, Repository) else "/"
    names = ", ".join(inner[:5]) + (f" and {len(inner) - 5} more" if len(inner) > 5 else "")
    return f"there is a model in {names}: give {files.source}{joint}{inner[0]}; else "


def _lone_weights(files: Files) -> str:
    """Return the advice to give the files of weights of a folder, or an empty text if there are
    none.
    """
    if isinstance(files, Repository):
        return ""
    adapter = next((name for name in ADAPTER_WEIGHTS if files.is_on_disk(name)), None)
    if adapter is not None:
        return (
            f"{adapter} is an adapter without its {ADAPTER_CONFIG}: put that file beside it, and name the base with "
            "--base CHECKPOINT (VIT_BASE); else "
        )
    with reading(files.place):
        names = sorted(
            path.name for path in files.folder.iterdir() if path.suffix.lower() in SUFFIXES
        )
    return (
        f"it holds {', '.join(names[:5])}: give {files.source}/{names[0]}; else " if names else ""
    )
