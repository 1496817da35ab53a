"""Checkpoints: a reader for each format, all of them strict, all with a `Checkpoint` as the result.

To add a format, write one module here with `FORMAT`, `recognises(files)` and `read(files, options)`
and add it to `_READERS`. To add a class of transformers, add one `Family` to `huggingface.families`.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from model.checkpoint import huggingface, jax_npz, native, state_dict, timm
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, Files, Folder, SingleFile
from model.checkpoint.hub import Repository, is_hub_id
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE
from model.checkpoint.key_map import KeyMap, read_key_map
from model.checkpoint.local_files import read_text_file, resolved_part, resolved_source
from model.checkpoint.lora import ADAPTER_CONFIG, adapt, adapter_base
from model.checkpoint.options import LABEL_PRESETS, PREPROCESS_PRESETS, CheckpointOptions
from model.errors import CheckpointError

__all__ = ["BUNDLED", "LABEL_PRESETS", "PREPROCESS_PRESETS", "Checkpoint", "load_checkpoint"]

# The checkpoint that travels with the code.
BUNDLED: Final = Path(__file__).resolve().parent.parent / "weights" / "cifar10"

_WEIGHTS: Final = re.compile(r".+\.(safetensors|pth|pt|bin|ckpt|pth\.tar)")
_TRAINING: Final = re.compile(r"optimizer|scheduler|scaler|rng_state|training_args|random_states|adapter_model")
_HEAD: Final = re.compile(r"(\w+[_-])?(head|classifier|fc|linear|linear_probe)\.")

_READERS: Final = (native, timm, huggingface, jax_npz, state_dict)


def load_checkpoint(
    source: str, *, base: str | None = None, bases_below: Path | None = None, **fields: Any
) -> Checkpoint:
    """Read a checkpoint, whatever its format.

    Its parts agree; its tensors' values are checked when it is built.

    Args:
        source: `bundled`, a folder, a file, or a hub id `owner/name[@revision]`; what exists here is
            never looked for on the hub.
        base: what a LoRA folder adapts, instead of what it names; as `source`.
        bases_below: folder below which what it names has to lie; None where it may lie anywhere.
        fields: of `CheckpointOptions`.

    Raises:
        CheckpointError: nothing there, no format recognised, or not exactly what the format demands.
    """
    options = CheckpointOptions(**fields)
    keys = read_key_map(options.keys)
    files = _open(source, keys)
    has_config = files.config is not None
    if files.path(ADAPTER_CONFIG) is not None:
        if has_config and base is None:
            raise CheckpointError(
                f"{files.place}: holds a model ({CONFIG_FILE}) and an adapter ({ADAPTER_CONFIG}), and no file says "
                f"whether they are merged: --base {adapter_base(files, None)} (VIT_BASE) reads the adapter; without "
                f"{ADAPTER_CONFIG} the model is read"
            )
        adapter, files = files, _base(files, base, bases_below, keys)
        adapt(files, adapter)
    reader = next((reader for reader in _READERS if reader.recognises(files)), None)
    if reader is None:
        if files.config is None:
            raise CheckpointError(f"{files.place}: has no {CONFIG_FILE}: {_instead(files)}")
        known = ", ".join(reader.FORMAT for reader in _READERS)
        raise CheckpointError(f"{files.where(CONFIG_FILE)}: not a format this version reads ({known})")
    checkpoint: Checkpoint = reader.read(files, options)
    notes = checkpoint.notes
    if files.overlay is not None:
        notes += (f"the LoRA adapter {files.overlay.place} is merged into {files.place}",)
    if isinstance(files, Repository) and files.from_cache:
        notes += (files.place,)
    checkpoint = replace(checkpoint, notes=notes, content=_content(files.digest, checkpoint))
    return checkpoint if options.image_size is None else checkpoint.resized(options.image_size)


def _content(tensors: str, checkpoint: Checkpoint) -> str:
    """Return `Checkpoint.content` by the hash of its tensors."""
    network, preprocess = checkpoint.config.model_dump_json(), checkpoint.preprocess.model_dump_json()
    parts = tensors, network, preprocess, checkpoint.labels, checkpoint.temperature, checkpoint.calibration
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _open(source: str, keys: KeyMap) -> Files:
    path = BUNDLED if source == "bundled" else Path(source).expanduser()
    folder_or_file = resolved_source(path, source)
    if folder_or_file is not None:
        if not folder_or_file.is_dir():
            return SingleFile(path, source, keys)
        path = _snapshot(path)
        return _plain_weights(path, source, keys) or Folder(path, source)
    similar = None if "@" in source else _similar(path)
    if is_hub_id(source) and not similar:
        return Repository(source)
    hint = f"; did you mean {similar}?" if similar else ", and not a hub id (owner/name)"
    if similar and is_hub_id(source):
        hint += f" (the hub's repository of this name is {source}@main)"
    raise CheckpointError(f"{source}: no such folder or file{hint}")


def _base(adapter: Files, base: str | None, below: Path | None, keys: KeyMap) -> Files:
    """Return the base of an adapter; what comes from the hub cannot name a folder or file of this machine."""
    named = adapter_base(adapter, base)
    if base is None and below is not None and not Path(named).resolve().is_relative_to(below):
        raise CheckpointError(
            f"{adapter.place}: its base {named!r:.200} does not lie below VIT_CHECKPOINT_FOLDER: set VIT_BASE"
        )
    of_hub = isinstance(adapter, Repository) or any(part.startswith("models--") for part in Path(adapter.place).parts)
    if base is not None or not of_hub:
        return _open(named, keys)
    if not is_hub_id(named):
        raise CheckpointError(
            f"{adapter.place}: comes from the hub and names {named!r:.200} as its base, which is no hub id: "
            "set VIT_BASE to the checkpoint that it adapts"
        )
    return Repository(named)


def _snapshot(folder: Path) -> Path:
    """Return the snapshot that `main` names of a folder `models--owner--name` of the hub's cache; else the folder."""
    main = folder / "refs" / "main"
    if not folder.name.startswith("models--") or resolved_part(folder, "refs/main", str(main)) is None:
        return folder
    commit = read_text_file(main, str(main)).decode("utf-8", "replace").strip()
    return folder / "snapshots" / commit if re.fullmatch("[0-9a-f]{40}", commit) else folder


def _plain_weights(folder: Path, source: str, keys: KeyMap) -> SingleFile | None:
    """Return a folder's state dict, if that is all it holds; a backbone may have its head in a second file."""
    names = sorted(path.name for path in folder.iterdir())
    files = [name for name in names if _WEIGHTS.fullmatch(name) and not _TRAINING.match(name)]
    heads = [name for name in files if _HEAD.match(name)]
    others = [name for name in files if name not in heads]
    if ADAPTER_CONFIG in names or len(others) != 1 or len(heads) > 1 or (CONFIG_FILE in names and not heads):
        return None
    for name in files:
        resolved_part(folder, name, str(folder / name))
    return SingleFile(folder / others[0], source, keys, folder / heads[0] if heads else None)


def _instead(files: Files) -> str:
    """Return advice for a place without a config: a folder within it, or the files that it should hold."""
    if isinstance(files, Folder):
        candidates = [config.parent for config in files.folder.glob(f"*/{CONFIG_FILE}")]
        if candidates:
            candidates.sort(key=lambda folder: (len(folder.name), folder.name), reverse=True)  # checkpoint-1000 first
            more = f" (and {len(candidates) - 3} more)" if len(candidates) > 3 else ""
            return f"did you mean {' or '.join(str(folder) for folder in candidates[:3])}{more}?"
    return f"expected {CONFIG_FILE}, {WEIGHTS_FILE} and {PREPROCESSOR_FILE}, as save_pretrained writes them"


def _similar(path: Path) -> Path | None:
    """Return the neighbour of a path that does not exist with almost the same name, or None."""
    try:
        names = [neighbour.name for neighbour in path.parent.iterdir()]
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return path.with_name(close[0]) if close else None
