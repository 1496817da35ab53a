"""What a config says of a head: its activation and its labels, read alike for transformers' and
timm's folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.labels import UNNAMED, indexed_labels
from model.checkpoint.options import CheckpointOptions
from model.errors import CheckpointError
from model.heads import SOFTMAX

_MULTI_LABEL: Final = {
    None: False,
    "single_label_classification": False,
    "multi_label_classification": True,
}
_NAME_THEM: Final = "name the labels with --labels FILE (VIT_LABELS)"


@dataclass(frozen=True)
class Labels:
    """Labels of a head, and what was done to get them; see `Description`."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def has_names(self) -> bool:
        """Whether they are more than the numbers that transformers gives classes without names."""
        return not all(map(UNNAMED.fullmatch, self.names))


@dataclass(frozen=True)
class StatedHead:
    """The head that a `config.json` describes.

    Attributes:
        config: fields of the file.
        where: what messages call the file.
        multi_label: whether each class has a sigmoid of its own.
    """

    config: Mapping[str, Any]
    where: str
    multi_label: bool

    def labels(self, classes: int, options: CheckpointOptions) -> Labels | None:
        """Return the labels of the operator, else those of the config; None if neither has any.

        Args:
            classes: number of classes of the head's tensors.
            options: of the operator, whose labels replace the config's, right or wrong.

        Raises:
            CheckpointError: the config states other classes, or labels that contradict each other.
        """
        if options.labels is not None or not classes:
            return Labels(options.labels_or(None, classes, self.where))
        count = self.config.get("num_labels")
        if count not in (None, classes):
            raise CheckpointError(
                f"{self.where}: num_labels is {count!r:.100}, but the head has {classes} classes"
            )
        if self.config.get("label_names"):
            return self._noted(self._label_names(classes))
        if self.config.get("id2label") is None:
            return None
        names = indexed_labels(self._object("id2label"), classes, f"{self.where}: id2label")
        return self._compared(names)

    def _object(self, key: str) -> dict[str, Any]:
        value = self.config[key]
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key}: expected an object from index to label")
        return value

    def _label_names(self, classes: int) -> tuple[str, ...]:
        """Return timm's `label_names`, as `label_descriptions` describe them."""
        names: Any = self.config["label_names"]
        if isinstance(names, dict):
            names = indexed_labels(names, classes, f"{self.where}: label_names")
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{self.where}: label_names: expected a list of texts")
        described: Any = self.config.get("label_descriptions") or {}
        if not isinstance(described, dict) or not all(
            isinstance(text, str) for text in described.values()
        ):
            raise CheckpointError(
                f"{self.where}: label_descriptions: expected an object from name to text"
            )
        return tuple(str(described.get(name, name)) for name in names)

    def _compared(self, names: tuple[str, ...]) -> Labels:
        """Return the labels of `id2label`, which `label2id` has to agree with; defaults of either
        are not compared.
        """
        indices = self.config.get("label2id")
        if not isinstance(indices, dict) or all(map(UNNAMED.fullmatch, indices)):
            return self._noted(names)
        named = {str(index): label for label, index in indices.items()}
        if all(map(UNNAMED.fullmatch, names)) and named.keys() == {
            str(index) for index in range(len(names))
        }:
            inverse = tuple(named[str(index)] for index in range(len(names)))
            return Labels(
                inverse,
                assumed=("labels: those of label2id, because id2label has none (VIT_LABELS)",),
            )
        stated = {str(index): label for index, label in enumerate(names)}
        odd = next(
            (label for label, index in indices.items() if stated.get(str(index)) != label), None
        )
        if odd is not None:
            found = stated.get(str(indices[odd]), "no class")
            raise CheckpointError(
                f"{self.where}: label2id has {odd!r:.100} at {indices[odd]!r:.100}, where id2label has {found!r:.100}: "
                f"correct the wrong one, or {_NAME_THEM}"
            )
        missing = next((label for label in names if label not in indices), None)
        if missing is not None:
            raise CheckpointError(
                f"{self.where}: label2id lacks {missing!r:.100} of id2label: correct the wrong one, or {_NAME_THEM}"
            )
        return self._noted(names)

    def _noted(self, names: tuple[str, ...]) -> Labels:
        if Labels(names).has_names:
            return Labels(names)
        return Labels(
            names,
            notes=(f"its classes have numbers only, {names[0]} to {names[-1]}: {_NAME_THEM}",),
        )


def stated_head(config: Mapping[str, Any], where: str, options: CheckpointOptions) -> StatedHead:
    """Return the head that a config describes.

    Args:
        config: of transformers or timm, or of transformers' wrapper around timm's models.
        where: what messages call the file.
        options: of the operator, whose activation replaces the config's `problem_type`.

    Raises:
        CheckpointError: the model is a regression.
    """
    problem = config.get("problem_type")
    if options.activation is not None:
        return StatedHead(config, where, options.activation == "sigmoid")
    if not isinstance(problem, str | None) or problem not in _MULTI_LABEL:
        raise CheckpointError(
            f"{where}: problem_type {problem!r:.100} is not classification; if the model is a classifier, set "
            "VIT_ACTIVATION to softmax or sigmoid"
        )
    return StatedHead(config, where, _MULTI_LABEL[problem])


def activated(checkpoint: Checkpoint, activation: str | None) -> Checkpoint:
    """Return a checkpoint whose scores are those of the operator's activation, `softmax` or
    `sigmoid`; None: its own.

    Raises:
        CheckpointError: the activation would have no effect, or the scores were fitted to another.
    """
    if activation is None:
        return checkpoint
    independent = activation == "sigmoid"
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
    if classes == 1 and not independent:
        raise CheckpointError(
            f"{setting}: a softmax of one class is always 1; one class needs sigmoid"
        )
    is_fitted = (
        checkpoint.temperature != 1
        or checkpoint.form != SOFTMAX
        or checkpoint.calibration is not None
    )
    if is_fitted and checkpoint.head.independent != independent:
        raise CheckpointError(
            f"{setting}: its scores were fitted with the other activation; leave the setting out"
        )
    return replace(checkpoint, multi_label=independent)


def labelled(checkpoint: Checkpoint, labels: str | None) -> Checkpoint:
    """Return the checkpoint; raises `CheckpointError` if the operator names labels and there are no
    classes.
    """
    if labels in (None, "numbers") or checkpoint.config.num_classes:
        return checkpoint
    raise CheckpointError(
        f"{checkpoint.source}: VIT_LABELS: the model has no head and no text tower that is read, so labels have no "
        "effect; leave the setting out"
    )
