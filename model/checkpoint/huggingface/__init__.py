"""Hugging Face's layout: `config.json`, weights, `preprocessor_config.json`, as `save_pretrained` writes them.

Each family is one module here with what `family.Family` lists; to add one, write it and name it in
`FAMILIES`. Names of tensors are those of the hub's files, whatever a version of transformers calls
its modules in memory.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any, Final

from pydantic import ValidationError

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, Files, TensorSource
from model.checkpoint.huggingface import beit, clip, deit, dinov2, siglip, vit
from model.checkpoint.huggingface.family import Family
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE, read_preprocessor
from model.checkpoint.options import Options, indexed_labels
from model.errors import CheckpointError, first_problem

FORMAT: Final = "huggingface"

FAMILIES: Final[tuple[Family, ...]] = (
    vit.FAMILY,
    deit.FAMILY,
    deit.WITH_TEACHER,
    dinov2.FAMILY,
    dinov2.WITH_REGISTERS,
    beit.FAMILY,
    siglip.FAMILY,
    clip.FAMILY,
)

_BY_CLASS: Final = {family.class_name: family for family in FAMILIES}


def recognises(files: Files) -> bool:
    """Whether a folder's `config.json` is transformers'."""
    config = files.config
    return config is not None and ("architectures" in config or "model_type" in config) and "format" not in config


def read(files: Files, options: Options) -> Checkpoint:
    """Read a folder as `save_pretrained` writes it.

    Raises:
        CheckpointError: a class or option this reader does not know, a missing field or file.
    """
    where = files.where(CONFIG_FILE)
    config = files.config
    assert config is not None
    if options.architecture is not None:
        raise CheckpointError(f"{where}: says its own architecture; VIT_ARCHITECTURE is for plain state dicts")
    family = _family(config, where)
    multi_label = _multi_label(config, where)
    try:
        # Everything that needs no weights is checked before they are fetched.
        family.config(config, 1)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None
    carried = None if options.preprocess else read_preprocessor(files.json(PREPROCESSOR_FILE), family, files)
    preprocess = options.preprocess_or(carried, where)

    stored = TensorSource(family.hub_names(files.tensors()), files.place, family.unused)
    shape = stored.shape(family.classifier)
    if not shape or shape[0] < 1:
        raise CheckpointError(f"{files.place}: {family.classifier} has shape {list(shape)}: no classes")
    try:
        vit_config = family.config(config, shape[0])
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None
    labels = _labels(config, vit_config.num_classes, where, options)
    vit_config, tensors = family.convert(stored, vit_config, options.image_size or preprocess.size)
    stored.finish()
    return Checkpoint(
        name=_name(config, files),
        source=files.source,
        format=FORMAT,
        architecture=family.class_name,
        config=vit_config,
        preprocess=preprocess if options.image_size is None else family.preprocess_at(preprocess, vit_config),
        labels=labels,
        tensors=native_tensors(tensors, vit_config, files.place),
        multi_label=multi_label,
        revision=files.revision,
        antialias=family.antialias,
    )


def _family(config: dict[str, Any], where: str) -> Family:
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise CheckpointError(f"{where}: architectures {classes!r:.100}: expected a list of one class name")
    name = classes[0]
    if name not in _BY_CLASS:
        raise CheckpointError(f"{where}: architecture {name!r:.100} is not one of {', '.join(_BY_CLASS)}")
    family = _BY_CLASS[name]
    if config.get("model_type") != family.model_type:
        raise CheckpointError(f"{where}: model_type {config.get('model_type')!r:.100}: expected {family.model_type!r}")
    return family


def _multi_label(config: dict[str, Any], where: str) -> bool:
    problem = config.get("problem_type")
    if problem not in (None, "single_label_classification", "multi_label_classification"):
        raise CheckpointError(f"{where}: problem_type {problem!r:.100} is not classification")
    return problem == "multi_label_classification"


def _labels(config: dict[str, Any], classes: int, where: str, options: Options) -> tuple[str, ...]:
    if options.labels is not None:
        return options.labels_or(None, classes, where)
    mapping = config.get("id2label")
    if mapping is None:
        return options.labels_or(None, classes, f"{where}: id2label is missing")
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{where}: id2label: expected an object from index to label")
    return indexed_labels(mapping, classes, f"{where}: id2label")


def _name(config: dict[str, Any], files: Files) -> str:
    """The name it was trained under, else the folder's or repository's."""
    name = config.get("_name_or_path")
    if isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and not name.startswith((".", "/")):
        return name
    return files.source.split("@")[0] if files.revision else PurePosixPath(files.place).name or files.place
