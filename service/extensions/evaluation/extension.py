"""Adds `vitserve evaluate`, `calibrate` and `inspect`."""

from service.extension import Command, Extension

EXTENSION = Extension(
    name="evaluation",
    commands={
        "evaluate": Command(
            "service.extensions.evaluation.evaluate",
            "measure a checkpoint's accuracy on labelled pictures",
            example="vitserve evaluate --data photos/",
            synonyms=("eval", "test", "benchmark", "score", "validate"),
        ),
        "calibrate": Command(
            "service.extensions.evaluation.calibrate",
            "fit scores and sets of labels to labelled pictures",
            example="vitserve calibrate runs/mine --data photos/",
        ),
        "inspect": Command(
            "service.extensions.evaluation.inspect",
            "print a description of a checkpoint",
            synonyms=("info", "show", "describe", "summary"),
        ),
    },
)
