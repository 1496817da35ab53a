"""A training recipe: every choice of a run, read from TOML or JSON and recorded as JSON."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator

from model.config import ViTConfig
from model.errors import TrainingError, by_likeness, first_problem
from model.layer_config import ConvolutionalStem, Frozen, Size

# Folder of the bundled recipes.
RECIPES: Final = Path(__file__).resolve().parent / "recipes"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Architecture(Frozen):
    """The part of a `ViTConfig` that the data do not decide.

    Attributes:
        conv_stem: convolutions before the patch embedding. With a teacher, they start as its first
            layers.
    """

    patch_size: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=4, multiple_of=4)]
    depth: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    mlp_width: Annotated[int, Field(ge=1)]
    conv_stem: ConvolutionalStem | None = None

    def config(self, image_size: Size, num_classes: int) -> ViTConfig:
        """Return the whole architecture.

        Raises:
            TrainingError: the architecture does not fit the data.
        """
        try:
            return ViTConfig(**self.model_dump(), image_size=image_size, num_classes=num_classes)
        except ValidationError as error:
            raise TrainingError(f"architecture: {first_problem(error)}") from None


class Optimiser(Frozen):
    """`adamw` for all parameters, or `muon` for matrices of blocks and stem, AdamW for the rest.

    Attributes:
        learning_rate: peak rate of AdamW.
        muon_learning_rate: peak rate of Muon, scaled to AdamW's step sizes (Liu et al. 2025).
        weight_decay: decoupled decay of all weights except biases and LayerNorm weights.
        warmup: share of all steps during which the rate rises linearly. Then it falls to zero along
            a cosine.
        restart: share of the schedule after which a second cycle begins (warm restarts, Loshchilov
            & Hutter 2016). Other shares of the schedule are then shares of each cycle. 0: one
            cycle.
        restart_rate: rates of the second cycle, relative to the first.
        layer_decay: factor of both rates for each layer between a parameter and the head (Clark et
            al. 2020; for fine-tuning, 0.65...0.9). 1: all layers learn at the same rate.
        clip_norm: largest 2-norm of all gradients together; larger gradients are scaled down. 0: no
            limit.
    """

    name: Literal["adamw", "muon"] = "muon"
    learning_rate: Positive
    muon_learning_rate: Positive = 2e-3
    betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: NotNegative = 0.05
    warmup: Share = 0.1
    restart: Share = 0.0
    restart_rate: Positive = 0.3
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    clip_norm: NotNegative = 0.0


class Augmentation(Frozen):
    """Random changes of each image, drawn again in each epoch, in the order of the fields.

    Attributes:
        crop_padding: width in pixels of a black border, before a random part of the model's input
            size is cut out. No effect with `resized_crop`.
        resized_crop: smallest share of the image's area in a random part that is resized to the
            input, with sides 3:4 to 4:3 (Szegedy et al. 2014, torchvision's `RandomResizedCrop`).
            0: parts are cut out, not resized.
        flip: whether half of the images are mirrored left to right.
        resample: share of the images that are enlarged and shrunk again, which blurs them like
            pictures from users.
        trivial_augment: share of the images that get a random operation (TrivialAugment).
    """

    crop_padding: Annotated[int, Field(ge=0)] = 4
    resized_crop: Probability = 0.0
    flip: bool = True
    resample: Probability = 0.0
    trivial_augment: Probability = 0.0


class Mixing(Frozen):
    """Mixing of a batch's images in pairs, and of their labels in the same proportion.

    If both alphas are set, each batch uses one of the two with equal probability.

    Attributes:
        mixup: alpha of the distribution Beta(alpha, alpha) of the first image's share, if all
            pixels are blended (Zhang et al. 2017). 0: off.
        cutmix: alpha for the first image's share of the area, if a rectangle comes from the other
            image (Yun et al. 2019). 0: off.
        probability: share of the batches that are mixed.
        until: share of the schedule after which no epoch mixes. Scores would be too low if the
            model ended on mixed pictures.
    """

    mixup: NotNegative = 0.0
    cutmix: NotNegative = 0.0
    probability: Probability = 1.0
    until: Probability = 1.0


class PatchDropout(Frozen):
    """Training on a part of the patches: cheaper steps, and a regulariser (Liu et al. 2022).

    Attributes:
        rate: share of the patches that are left out.
        until: share of the schedule after which no patch is left out.
    """

    rate: Share = 0.0
    until: Probability = 1.0


class Teacher(Frozen):
    """A small convolutional network that is trained first, and whose answers the model learns.

    Teacher and model see the same augmented images (Hinton et al. 2015). See
    `model.extensions.training.teacher`.

    Attributes:
        epochs, batch_size: size of the teacher's own training.
        widths: numbers of channels of its three groups of convolutions.
        learning_rate: peak rate of Muon, in shares of the filters' norm. It falls linearly to
            zero.
        resample: see `Augmentation`.
        weight: weight of the divergence from the teacher's scores in the model's loss. The loss of
            the labels has the rest.
        temperature: divisor of both logits before the softmax; its square multiplies the
            divergence.
        frozen_stem: share of the schedule, or of its first cycle, during which the model's stem
            does not learn.
    """

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    batch_size: Annotated[int, Field(ge=2)] = 1000
    widths: tuple[
        Annotated[int, Field(ge=24)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]
    ] = (
        64,
        256,
        256,
    )
    learning_rate: Positive = 0.17
    resample: Probability = 0.0
    weight: Annotated[float, Field(gt=0, le=1)] = 0.9
    temperature: Positive = 1.0
    frozen_stem: Probability = 0.0


class Recipe(Frozen):
    """All choices that determine a run's result, written into its checkpoint.

    Attributes:
        validation: size of the validation set, a number or a share of the training images. The set
            decides the best epoch and the temperature; no gradient uses it. No effect if the data
            have a validation split.
        label_smoothing: share of each target that is spread evenly over all classes (Szegedy et al.
            2015).
        precision: dtype of activations and gradients. Weights and optimiser state are float32.
        threads: threads of one operator on the CPU; 0: torch's choice.
        checkpoint: the checkpoint to fine-tune, a folder or a hub id.
        image_size: (rows, columns) of the model's input in pixels. Without it, the size of the
            checkpoint or of the data.
        architecture: the architecture to train from scratch. No effect with a checkpoint.
        teacher: the teacher. Without one, the model learns from the labels alone.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    batch_size: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 5000
    label_smoothing: Share = 0.1
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    checkpoint: str | None = None
    image_size: Size | None = None
    architecture: Architecture | None = None
    optimiser: Optimiser
    augmentation: Augmentation = Augmentation()
    mixing: Mixing = Mixing()
    patch_dropout: PatchDropout = PatchDropout()
    teacher: Teacher | None = None

    @model_validator(mode="after")
    def _teacher_has_a_stem(self) -> Self:
        if self.teacher is not None and (
            self.architecture is None or self.architecture.conv_stem is None
        ):
            raise ValueError(
                "a teacher needs an architecture.conv_stem, which starts as its first layers"
            )
        return self

    def override(self, values: Mapping[str, Any] | None = None, /, **fields: Any) -> "Recipe":
        """Return the recipe with other values of some fields.

        Args:
            values: values by name, with dots for fields of tables: `optimiser.learning_rate`.
            fields: the same for names without dots. A mapping replaces a whole table.

        Raises:
            TrainingError: a field is unknown, or its value is not allowed.
        """
        changed = self.model_dump(exclude_none=True)
        for name, value in {**(values or {}), **fields}.items():
            *tables, field = name.split(".")
            target: Any = changed
            for table in tables:
                target = target.setdefault(table, {})
                if not isinstance(target, dict):
                    raise TrainingError(f"recipe: {name}: {table} is not a table")
            target[field] = value
        return _validated(changed, "recipe")


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from TOML, or from the JSON of a run's record.

    Raises:
        TrainingError: the file cannot be read, or is not a valid recipe.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a byte order mark
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise TrainingError(f"{path}: not a recipe: {error}") from error
    return _validated(values, str(path))


def _validated(values: dict[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        problem = first_problem(error)
        if first["loc"][:1] == ("validation",):
            problem = (
                "validation: expected a number of images, 1 or more, or a share of them, above 0 "
                "and below 1"
            )
        elif first["type"] == "extra_forbidden":
            name = problem.partition(":")[0]
            table = name.rpartition(".")[0]
            names = by_likeness(name, _field_names(Recipe))
            of_table = [field for field in names if field.rpartition(".")[0] == table]
            if table and of_table:
                problem += f"; available: {', '.join(of_table)}"
            else:
                problem += f"; near it are {', '.join(names[:5])}"
        raise TrainingError(f"{source}: {problem}") from None


def _field_names(kind: type[BaseModel]) -> Iterator[str]:
    """Yield the names of fields, with dots for fields of tables."""
    for name, field in kind.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        tables = [table for table in kinds if isinstance(table, type)]
        tables = [table for table in tables if issubclass(table, BaseModel)]
        if not tables:
            yield name
        for table in tables:
            for field_name in _field_names(table):
                yield f"{name}.{field_name}"
