"""Folders of transformers: `config.json`, weights and an image processor's JSON."""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface.families import CLIP, FAMILIES, IMAGE_TOWERS, SIGLIP
from model.checkpoint.huggingface.family import Family
from model.checkpoint.huggingface.preprocessor import (
    PREPROCESSOR_FILE,
    PROCESSOR_FILE,
    carried_preprocess,
)
from model.checkpoint.huggingface.texts import read_texts
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.own_heads import with_head
from model.checkpoint.stated_head import HeadLabels, StatedHead, stated_head
from model.checkpoint.tensors import renamed, stored_names
from model.errors import CheckpointError
from model.network import library

__all__ = ["FAMILIES", "FORMAT", "family_of", "read", "recognises"]

FORMAT: Final = "huggingface"

_BY_CLASS: Final = {family.class_name: family for family in FAMILIES}
# Families by their classes without a head.
_BACKBONES: Final = {family.class_name: family for family in IMAGE_TOWERS} | {
    f"{family.class_name.partition('For')[0]}Model": family
    for family in reversed(FAMILIES)
    if not family.vision_defaults
}
# For a model type that vitserve does not read: the class of transformers that loads its weights.
_RELATED: Final = {"vit_mae": "ViTModel"}


def recognises(files: Files) -> bool:
    """Return whether a folder's `config.json` is transformers'."""
    is_theirs = not files.config.keys().isdisjoint(("architectures", "model_type"))
    return is_theirs and "format" not in files.config


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a folder as `save_pretrained` writes it."""
    where = files.where(CONFIG_FILE)
    config = files.config
    family, is_backbone = family_of(config, where)
    stated = stated_head(config, where, options)
    # Weights are fetched only after all checks that do not need them.
    vit = family.vit_config(config, 1, where)
    carried = None if options.preprocess else carried_preprocess(files, family)
    missing = (
        f"neither {PREPROCESSOR_FILE} nor {PROCESSOR_FILE}: save the processor into this folder: "
        "processor.save_pretrained(FOLDER), or"
    )
    preprocess = options.preprocess_or(carried and carried.preprocess, files.title, missing)
    tensors = files.tensors()
    texts = None
    if family in (CLIP, SIGLIP):
        tensors, texts = read_texts(tensors, files, options, vit.projection_width or vit.width)
    tensors = files.without(tensors, family.unused)
    stored = stored_names(tensors, family.rules)
    tensors = renamed(tensors, family.rules, files.title)
    if is_backbone:
        classes = 0
        # A class without a head gives only the CLS token.
        pool = "cls" if vit.pool == "cls_mean" else vit.pool
        vit = vit.model_copy(update={"pool": pool})
    elif texts is not None:
        classes = len(texts.labels)
    else:
        tensors = with_head(tensors, files, stored, "classifier")
        classes = _classes(tensors, stored.get("head.weight", "classifier.weight"), files.title)
    vit = vit.model_copy(update={"num_classes": classes})
    labels = HeadLabels(texts.labels) if texts else _labels(stated, classes, options)
    size = options.image_size or preprocess.size
    network = family.native(tensors, vit, size, files.title)
    return Checkpoint(
        name=files.name,
        source=files.source,
        format=FORMAT,
        architecture=config["architectures"][0],
        config=network.config,
        preprocess=preprocess,
        labels=labels.names,
        tensors=native_tensors(network.tensors, network.config, files.title, stored),
        multi_label=texts.zero_shot.independent if texts else stated.multi_label,
        zero_shot=texts and texts.zero_shot,
        embed_texts=texts and texts.tower,
        antialias=family.antialias,
        resized_from=network.resized_from,
        stored=stored,
        notes=labels.notes + _code_notes(config),
        assumed=(carried.assumed if carried else ()) + labels.assumed,
    )


def _classes(tensors: Mapping[str, Tensor], stored_name: str, where: str) -> int:
    """Return the number of classes of the head; raise `CheckpointError` without any."""
    head = tensors.get("head.weight")
    if head is None or not head.ndim or not len(head):
        raise CheckpointError(
            f"{where}: missing key {stored_name!r}, the head, or it has no classes: save the model "
            'with its head, under PEFT with modules_to_save=["classifier"]'
        )
    return len(head)


def _code_notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if the config names code, which is never run."""
    if not config.get("auto_map"):
        return ()
    name = config["architectures"][0]
    return (f"auto_map: the folder's own code is not run; the model is read as {name}",)


def family_of(config: Mapping[str, Any], where: str) -> tuple[Family, bool]:
    """Return the family of a config's class, and whether the class lacks a head (`ViTModel`).

    Raises:
        CheckpointError: the class is not read, or the model type is another class's.
    """
    classes = config.get("architectures")
    if not isinstance(classes, list) or len(classes) != 1 or not isinstance(classes[0], str):
        raise CheckpointError(
            f"{where}: architectures {classes!r:.100}: expected a list of one class name, such as "
            '["ViTForImageClassification"], as save_pretrained writes it'
        )
    name = classes[0]
    family = (_BACKBONES | _BY_CLASS).get(name)
    if family is None:
        kinds = dict.fromkeys(known.partition("For")[0] for known in _BY_CLASS if "For" in known)
        raise CheckpointError(
            f"{where}: {name!r:.100} is not a Vision Transformer that is read; "
            f"this version reads the ForImageClassification of {', '.join(kinds)}; CLIPModel and "
            f"SiglipModel; and, for embeddings, {', '.join(reversed(_BACKBONES))}"
            f"{_advice(str(config.get('model_type')))}"
        )
    model_type = config.get("model_type")
    if model_type != family.model_type:
        raise CheckpointError(
            f"{where}: model_type {model_type!r:.100}: expected {family.model_type!r} for {name}: "
            "correct the wrong one"
        )
    return family, name not in _BY_CLASS


def _advice(model_type: str) -> str:
    """Return advice on how to convert an unsupported class into a supported one."""
    related = _RELATED.get(model_type)
    names = [name for name, family in _BACKBONES.items() if family.model_type == model_type]
    if related or names:
        backbone = related or names[0]
        return (
            f": for embeddings, save its backbone: {backbone}.from_pretrained(FOLDER)"
            ".save_pretrained(NEW_FOLDER)"
        )
    return f": give timm's checkpoint of the same network; {library.INSTALL} reads most of them"


def _labels(stated: StatedHead, classes: int, options: CheckpointOptions) -> HeadLabels:
    labels = stated.labels(classes, options)
    if labels is None and classes == 2:  # transformers does not write its default
        return stated.noted(("LABEL_0", "LABEL_1"))
    if labels is None:
        return HeadLabels(options.labels_or(None, classes, f"{stated.where}: id2label is missing"))
    return labels
