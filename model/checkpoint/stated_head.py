"""The head that a config describes: its activation and its labels.

The fields are the same in the folders of transformers and of timm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.label_forms import (
    NAME_THEM,
    UNNAMED,
    described,
    labels_in_holder,
    labels_in_value,
    require_agreement,
)
from model.checkpoint.local_files import advising
from model.checkpoint.options import CheckpointOptions
from model.errors import CheckpointError
from model.heads import SOFTMAX
from model.images.listing import listed
from model.label_texts import without_hidden

_MULTI_LABEL: Final = {
    None: False,
    "single_label_classification": False,
    "multi_label_classification": True,
}

_FROM_LABEL2ID: Final = "labels: those of label2id, because id2label has none (VIT_LABELS)"


@dataclass(frozen=True)
class HeadLabels:
    """Labels of a head, with notes and assumptions about them; see `Description`."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def has_names(self) -> bool:
        """Whether a label is a name, and not only a number such as `LABEL_0`."""
        return not all(map(UNNAMED.fullmatch, self.names))

    def without_hidden(self) -> "HeadLabels":
        """Return labels without hidden characters, unless two labels would become equal."""
        names = tuple(map(without_hidden, self.names))
        if names == self.names or "" in names or len(set(names)) < len(set(self.names)):
            return self
        count = sum(name not in self.names for name in names)
        note = f"labels: {count} had characters that do not print, now removed: {NAME_THEM}"
        return replace(self, names=names, notes=(*self.notes, note))


@dataclass(frozen=True)
class StatedHead:
    """The head that a `config.json` describes.

    Attributes:
        config: fields of the file.
        where: name of the file in messages.
        multi_label: whether each class has its own sigmoid.
    """

    config: Mapping[str, Any]
    where: str
    multi_label: bool

    def labels(self, classes: int, options: CheckpointOptions) -> HeadLabels | None:
        """Return the operator's labels, else the config's; None if neither states labels.

        Args:
            classes: number of classes of the head's tensors.
            options: options of the operator, whose labels replace the config's, right or wrong.

        Raises:
            CheckpointError: the config states other classes, or labels that contradict each other.
        """
        if options.labels is not None or not classes:
            return HeadLabels(options.labels_or(None, classes, self.where))
        count = self.config.get("num_labels")
        if count not in (None, classes):
            raise CheckpointError(
                f"{self.where}: num_labels is {count!r:.100}, but the head has {classes} classes: "
                f"correct it, or {NAME_THEM}"
            )
        labels = self._labels(classes)
        return labels and labels.without_hidden()

    def _labels(self, classes: int) -> HeadLabels | None:
        """Return the config's labels as they are, or None."""
        if self.config.get("label_names"):
            names = self._stated("label_names", classes)
            return self.noted(described(names, self.config.get("label_descriptions"), self.where))
        if self.config.get("id2label") is not None:
            return self._compared(self._stated("id2label", classes))
        if self.config.get("label2id"):
            return HeadLabels(self._stated("label2id", classes), assumed=(_FROM_LABEL2ID,))
        return None

    def _stated(self, key: str, classes: int) -> tuple[str, ...]:
        """Return the labels in a field; raise `CheckpointError` unless there is one per class."""
        with advising(f": correct it, or {NAME_THEM}"):
            names = labels_in_holder(self.config, key, self.where)
            if len(names) != classes:
                raise CheckpointError(
                    f"{self.where}: {key}: {len(names)} labels, but the head has {classes} classes"
                )
        return names

    def _compared(self, names: tuple[str, ...]) -> HeadLabels:
        """Return the labels of `id2label`; refuse a `label2id` that contradicts them.

        Names that transformers makes up are not compared.
        """
        label2id = self.config.get("label2id")
        is_named = isinstance(label2id, dict) and not all(map(UNNAMED.fullmatch, label2id))
        if is_named and all(map(UNNAMED.fullmatch, names)):
            return HeadLabels(self._stated("label2id", len(names)), assumed=(_FROM_LABEL2ID,))
        require_agreement(names, label2id, self.where)
        return self.noted(names)

    def noted(self, names: tuple[str, ...]) -> HeadLabels:
        """Return labels, with a note if they are numbers only."""
        labels = HeadLabels(names)
        if labels.has_names:
            return labels
        note = f"its classes have numbers only, {names[0]} to {names[-1]}: {NAME_THEM}"
        return replace(labels, notes=(note,))


def stated_head(config: Mapping[str, Any], where: str, options: CheckpointOptions) -> StatedHead:
    """Return the head that a config describes.

    Args:
        config: config of transformers or timm, or of transformers' wrapper around timm's models.
        where: name of the file in messages.
        options: options of the operator, whose activation replaces the config's `problem_type`.

    Raises:
        CheckpointError: the model is a regression.
    """
    problem = config.get("problem_type")
    if options.activation is not None:
        return StatedHead(config, where, options.activation == "sigmoid")
    if not isinstance(problem, str | None) or problem not in _MULTI_LABEL:
        raise CheckpointError(
            f"{where}: problem_type {problem!r:.100} is not classification; if the model is a "
            "classifier, set VIT_ACTIVATION to softmax or sigmoid"
        )
    return StatedHead(config, where, _MULTI_LABEL[problem])


def activated(checkpoint: Checkpoint, activation: str | None) -> Checkpoint:
    """Return the checkpoint with the operator's activation, if there is one.

    A head of one class gets a sigmoid, as in transformers: a softmax of one class is always 1.

    Args:
        checkpoint: the checkpoint.
        activation: `softmax` or `sigmoid`; None keeps the checkpoint's own.

    Raises:
        CheckpointError: the activation would not matter, or the scores were fitted with the other
            activation.
    """
    if activation is None:
        is_constant = checkpoint.config.num_classes == 1 and checkpoint.zero_shot is None
        if not is_constant or checkpoint.multi_label:
            return checkpoint
        assumed = (*checkpoint.assumed, "activation: sigmoid, because there is one class")
        return replace(checkpoint, multi_label=True, assumed=assumed)
    is_sigmoid = activation == "sigmoid"
    setting = f"{checkpoint.source}: VIT_ACTIVATION={activation}"
    if checkpoint.zero_shot is not None:
        raise CheckpointError(
            f"{setting}: a model with a text tower has its own activation; leave the setting out"
        )
    classes = checkpoint.config.num_classes
    if not classes:
        raise CheckpointError(
            f"{setting}: the model has no head, so it has no effect; leave the setting out"
        )
    if classes == 1 and not is_sigmoid:
        raise CheckpointError(
            f"{setting}: a softmax of one class is always 1; one class needs sigmoid"
        )
    is_fitted = (
        checkpoint.temperature != 1
        or checkpoint.form != SOFTMAX
        or checkpoint.calibration is not None
    )
    if is_fitted and checkpoint.head.independent != is_sigmoid:
        raise CheckpointError(
            f"{setting}: its scores were fitted with the other activation; leave the setting out"
        )
    return replace(checkpoint, multi_label=is_sigmoid)


def require_classes_of_adapter(
    checkpoint: Checkpoint, config: Mapping[str, Any], where: str, labels: str | None
) -> None:
    """Raise `CheckpointError` if an adapter's own config states other classes than the head has.

    Args:
        checkpoint: the base with the adapter merged into it.
        config: config of the adapter's folder; empty if there is none.
        where: name of its file in messages.
        labels: labels of the operator, which replace the config's.
    """
    if labels not in (None, "numbers"):
        return
    fields = ("id2label", "label2id", "label_names")
    names = labels_in_value(config, where) if any(map(config.get, fields)) else ()
    classes = checkpoint.config.num_classes
    count = len(names) or config.get("num_labels") or config.get("num_classes") or classes
    stated = f"{count} classes"
    has = f"{classes} classes"
    if count == classes:
        is_unnamed = labels is not None or all(map(UNNAMED.fullmatch, names))
        if is_unnamed or HeadLabels(names).without_hidden().names == checkpoint.labels:
            return
        stated = f"the labels {listed(names)}"
        has = f"the labels {listed(checkpoint.labels)}"
    raise CheckpointError(
        f"{where}: states {stated}, but the head has {has}: the adapter lacks the head that was "
        'trained: save it with the adapter, modules_to_save=["classifier"] ("head" in timm\'s '
        f"networks); if the base's head is right, {NAME_THEM}"
    )


def require_use_of_labels(checkpoint: Checkpoint, labels: str | None) -> None:
    """Raise `CheckpointError` if the operator names labels for a model without classes."""
    if labels in (None, "numbers") or checkpoint.config.num_classes:
        return
    raise CheckpointError(
        f"{checkpoint.source}: VIT_LABELS: the model has no head and no text tower that is read, "
        "so labels have no effect; leave the setting out"
    )
