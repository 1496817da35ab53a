"""Adds `vitserve train`."""

from service.extension import Command, Extension

EXTENSION = Extension(
    name="training",
    commands={
        "train": Command(
            "service.extensions.training.train",
            "train or fine-tune a model on a folder of pictures",
            example="vitserve train --data photos/ --from bundled --out runs/mine",
            synonyms=("finetune", "fine-tune", "fit"),
        ),
    },
)
