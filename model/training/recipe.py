"""A training recipe: every choice that a run depends on, frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from model.config import Frozen, Size
from model.errors import TrainingError, first_problem

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]


class Recipe(Frozen):
    """All choices that determine a run's result; written into its checkpoint.

    The defaults are sensible for some dozen to some ten thousand pictures.

    Attributes:
        name: what the service calls the model.
        checkpoint: what is fine-tuned: `bundled`, a folder or a hub id.
        image_size: (rows, columns) of the model's input in pixels; absent: the checkpoint's.
        seed: decides the split and all random choices.
        validation: size of the validation set, as a number or as a share of the training images: no gradient sees it;
            it is for the temperature. Not used where the data bring a validation split of their own.
        precision: dtype of activations and gradients; weights and optimiser state are float32 whatever it is.
        threads: threads of one operator on the CPU; 0: torch's own choice.
        label_smoothing: share of each target that is spread evenly over all classes (Szegedy et al. 2015): it keeps
            scores modest where there are too few pictures to fit a temperature to.
        learning_rate: the peak rate of AdamW.
        weight_decay: the decay is decoupled; biases and LayerNorm weights are spared.
        warmup: share of all steps over which the rate rises linearly; then it falls to zero along a cosine.
        layer_decay: the rate is multiplied by this once for each layer between a parameter and the head (Clark et al.
            2020): the nearer a layer is to the pixels, the less it is changed.
        clip_norm: gradients of all parameters together are scaled down to this 2-norm where they exceed it.
        resized_crop: a random part of an image is resized to the input: at least this share of its area, sides 3:4 to
            4:3 (Szegedy et al. 2014, torchvision's `RandomResizedCrop`).
        flip: half of the images are mirrored left to right.

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
    checkpoint: str
    image_size: Size | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    batch_size: Annotated[int, Field(ge=1)] = 16
    validation: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 0.2
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    label_smoothing: Share = 0.1
    learning_rate: Positive = 5e-4
    weight_decay: NotNegative = 0.05
    warmup: Share = 0.1
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.75
    clip_norm: Positive = 1.0
    resized_crop: Annotated[float, Field(gt=0, le=1)] = 0.5
    flip: bool = True

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Self:
        """Return the recipe; raises TrainingError where a field is missing or unknown, or its value is not allowed."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise TrainingError(f"recipe: {first_problem(error)}") from None
