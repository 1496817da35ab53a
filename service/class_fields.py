"""The fields of an answer that name classes, for HTTP and for the command line."""

from collections.abc import Sequence
from typing import Any, Final

from model.outputs import Outputs
from vitserve.documents import significant

MAX_SET: Final = 100
"""Most labels of a label set that an answer lists.

A larger set says little, and a shortened set would not have the coverage.
"""


def class_fields(
    outputs: Outputs, labels: Sequence[str], min_score: float | None = None
) -> dict[str, Any]:
    """Return the fields of `ModelClassification` that name classes, as far as they apply.

    Args:
        outputs: the scores, best first, and the label set.
        labels: labels by class.
        min_score: the lowest score of a prediction, if there is a limit.
    """
    predicted = outputs.are_predicted(min_score)
    indices = outputs.indices[predicted].tolist()
    scores = outputs.scores[predicted].tolist()
    predictions = [
        {"label": labels[index], "index": index, "score": significant(score)}
        for index, score in zip(indices, scores, strict=True)
    ]
    fields: dict[str, Any] = {"predictions": predictions}
    if outputs.label_set is not None:
        fields["set_size"] = len(outputs.label_set)
        if len(outputs.label_set) <= MAX_SET:
            fields["set"] = [labels[index] for index in outputs.label_set]
    abstained_by = outputs.reason_to_abstain(min_score)
    fields["abstained"] = abstained_by is not None
    if abstained_by is not None:
        fields["abstained_by"] = abstained_by
    return fields
