"""A training recipe: every choice that a run depends on, frozen, read from TOML and written to it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from model.config import ConvolutionalStem, Frozen, Pool, Size, ViTConfig
from model.errors import TrainingError, first_problem

RECIPES: Final = Path(__file__).resolve().parent / "recipes"
"""The recipes that travel with the code."""

RecipePart = TypeVar("RecipePart", bound=Frozen)
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Architecture(Frozen):
    """The part of a `ViTConfig` that the data do not decide."""

    patch_size: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=4, multiple_of=4)]
    depth: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    mlp_width: Annotated[int, Field(ge=1)]
    pool: Pool = "cls"
    conv_stem: ConvolutionalStem | None = None
    """Convolutions before the patch embedding; its filters are then what `whiten_patches` starts."""

    def config(self, image_size: Size, num_classes: int) -> ViTConfig:
        """Return the whole architecture, or raise TrainingError where it does not fit these data."""
        try:
            return ViTConfig(
                **self.model_dump(), image_size=image_size, num_classes=num_classes, class_token=self.pool == "cls"
            )
        except ValidationError as error:
            raise TrainingError(f"architecture: {first_problem(error)}") from None


class Initialisation(Frozen):
    """Options for the initialisation of the weights."""

    positions: Literal["random", "sincos"] = "sincos"
    """`sincos`: the position embeddings start at a 2D sine-cosine code and are learned from there."""
    whiten_patches: bool = True
    """Half of the patch embedding starts as the whitening filters of the training patches."""


class Optimiser(Frozen):
    """`adamw` for all parameters, or `muon` for the blocks' matrices and AdamW for the rest."""

    name: Literal["adamw", "muon"] = "muon"
    learning_rate: Positive
    """The peak rate of AdamW."""
    muon_learning_rate: Positive = 2e-3
    """The peak rate of Muon, scaled to match AdamW's step sizes (Liu et al. 2025)."""
    betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: NotNegative = 0.05
    """The decay is decoupled; biases and LayerNorm weights are spared."""
    warmup: Share = 0.1
    """Share of all steps over which the rate rises linearly; then it falls to zero along a cosine."""
    restart: Share = 0.0
    """Share of the schedule after which a second cycle begins, whose rates are `restart_rate` of the first's (warm
    restarts, Loshchilov & Hutter 2016). 0: there is one cycle. Shares of the schedule are then shares of each cycle."""
    restart_rate: Positive = 0.3
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Both learning rates are multiplied by this once for each layer between a parameter and the head
    (Clark et al. 2020; for fine-tuning, 0.65...0.9). 1: all layers learn at the same rate."""
    clip_norm: NotNegative = 0.0
    """Gradients of all parameters together are scaled down to this 2-norm where they exceed it; 0: never."""


class Augmentation(Frozen):
    """Random changes to each image by itself, drawn anew in every epoch and made in the order of the fields."""

    crop_padding: Annotated[int, Field(ge=0)] = 4
    """Pixels of black around an image before a random part of the model's input size is cut out of it;
    not used with `resized_crop`."""
    resized_crop: Probability = 0.0
    """A random part of the image is resized to the input: at least this share of its area, sides 3:4 to
    4:3 (Szegedy et al. 2014, torchvision's `RandomResizedCrop`). 0: parts are cut out, not resized."""
    flip: bool = True
    """Half of the images are mirrored left to right."""
    resample: Probability = 0.0
    """Share of the images that are enlarged and shrunk again, which blurs them as pictures from users are."""
    resample_since: Probability = 0.0
    """Share of the schedule after which `resample` begins, from the next epoch on."""
    trivial_augment: Probability = 0.0
    """Share of the images that one random operation changes (TrivialAugment)."""
    rand_augment: Annotated[int, Field(ge=0, le=14)] = 0
    """Number of random operations that each image goes through, one after the other (RandAugment); 0: none."""
    rand_augment_magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    """Strength of these operations: 0 changes nothing, 10 is the strongest that TrivialAugment draws."""
    erasing: Probability = 0.0
    """Share of the images that lose a random rectangle of 2 % to 33 % of their area (random erasing)."""
    erasing_fill: Literal["pixel", "mean"] = "pixel"
    """Fill of that rectangle, after normalisation: normal noise in every pixel, or the mean of the training images."""

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        if self.trivial_augment and self.rand_augment:
            raise ValueError("trivial_augment and rand_augment exclude each other")
        return self


class Mixing(Frozen):
    """Mixing of a batch's images in pairs, and of their labels in the same proportion.

    Where both alphas are given, each batch takes one of the two with equal probability.
    """

    mixup: NotNegative = 0.0
    """Alpha of the Beta(alpha, alpha) that the share of the first image is drawn from, all pixels being
    blended (Zhang et al. 2017); 0: off."""
    cutmix: NotNegative = 0.0
    """Alpha for the share of the area that stays, a rectangle coming from the other image (Yun et al.
    2019); 0: off."""
    probability: Probability = 1.0
    """Share of the batches that are mixed."""
    until: Probability = 1.0
    """Share of the schedule after which nothing is mixed, from the next epoch on, so that the model ends on pictures
    as they are: mixed ones make it say less than it knows."""


class PatchDropout(Frozen):
    """Training on a part of the patches: cheaper steps, and a regulariser (Liu et al. 2022)."""

    rate: Share = 0.0
    """Share of the patches left out."""
    until: Probability = 1.0
    """Share of the schedule after which all patches are used, so that the model ends on whole images."""


class Teacher(Frozen):
    """A small convolutional network, trained first on the same pictures; see `model.training.teacher`."""

    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    batch_size: Annotated[int, Field(ge=2)] = 1000
    widths: tuple[Annotated[int, Field(ge=24)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (
        64,
        256,
        256,
    )
    """Channels of its three groups of convolutions."""
    learning_rate: Positive = 0.17
    """The peak rate of Muon for the convolutions: an update's share of the filters' norm; it falls linearly to zero."""
    crop_padding: Annotated[int, Field(ge=0)] = 4
    """As in `Augmentation`."""
    flip: bool = True
    """Half of the images are mirrored left to right in one epoch, the other half in the next."""
    resample: Probability = 0.0
    """As in `Augmentation`, over the whole schedule."""


class Distillation(Frozen):
    """How the model learns the teacher's answers on the very views that it is shown itself (Hinton et al. 2015)."""

    weight: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the loss that is the divergence from the teacher's scores; the rest is that of the labels."""
    temperature: Positive = 1.0
    """Both logits are divided by it before the softmax; the divergence is multiplied by its square."""
    inherit_stem: bool = False
    """The model's convolutional stem starts as the teacher's first layers, which have the same shapes."""
    frozen_stem: Probability = 0.0
    """Share of the schedule, or of its first cycle, over which the stem stays as it started: steps are cheaper."""


class Recipe(Frozen):
    """All choices that determine a run's result; written into its checkpoint.

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    epochs: Annotated[int, Field(ge=1, le=1_000_000)]
    minutes: Positive | None = None
    """Wall time after which the schedule ends even if epochs are left; the learning rate then falls with
    whichever is further on, so that a slow or busy machine gives a shorter but complete schedule."""
    batch_size: Annotated[int, Field(ge=1)]
    validation: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] = 5000
    """Size of the validation set, as a number or as a share of the training images: no gradient sees it; it is
    for choices and for the temperature. Not used where the data bring a validation split of their own."""
    evaluate_every: Annotated[int, Field(ge=1)] = 1
    """Number of epochs between evaluations on the validation set."""
    keep: Literal["best", "last"] = "best"
    """Which weights are served: the epoch's with the highest validation accuracy, or the last epoch's."""
    label_smoothing: Share = 0.1
    """Share of each target that is spread evenly over all classes (Szegedy et al. 2015)."""
    drop_path: Share = 0.0
    """Stochastic depth: probability of leaving out the last block's branches, rising linearly from 0 at the first."""
    ema_decay: Share = 0.0
    """An exponential moving average of the weights is evaluated and exported: after each step it keeps this
    share of itself, less in the first steps. 0: the weights themselves."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of activations and gradients; master weights and optimiser state are float32 whatever it is."""
    compile: bool = True
    """Compile the blocks where there is a C++ compiler."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of one operator on the CPU; 0: torch's own choice."""
    checkpoint: str | None = None
    """The checkpoint to fine-tune (whatever `load_checkpoint` reads), instead of an `architecture` from scratch."""
    checkpoint_architecture: str | None = None
    checkpoint_preprocess: str | None = None
    """Both are for checkpoints of formats that carry none; see `load_checkpoint`."""
    image_size: Size | None = None
    """(rows, columns) of the model's input in pixels; absent: the checkpoint's, or that of the data."""
    architecture: Architecture | None = None
    """The architecture to train from scratch; not used for fine-tuning."""
    initialisation: Initialisation = Initialisation()
    optimiser: Optimiser
    augmentation: Augmentation = Augmentation()
    mixing: Mixing = Mixing()
    patch_dropout: PatchDropout = PatchDropout()
    teacher: Teacher | None = None
    """Absent: the model learns from the labels alone."""
    distillation: Distillation | None = None

    @model_validator(mode="after")
    def _teacher_is_heard(self) -> Self:
        if (self.teacher is None) != (self.distillation is None):
            raise ValueError("teacher and distillation need each other")
        stem = self.distillation is not None and (self.distillation.inherit_stem or self.distillation.frozen_stem)
        if stem and (self.architecture is None or self.architecture.conv_stem is None):
            raise ValueError("distillation: inherit_stem and frozen_stem need an architecture.conv_stem")
        return self

    def override(self, values: Mapping[str, Any] | None = None, /, **fields: Any) -> Recipe:
        """Return the recipe with some fields replaced and all checked again.

        Args:
            values: by name; a field of a table is named with a dot, as in `optimiser.learning_rate`.
            fields: the same for names without a dot. A whole table is replaced by a mapping.

        Raises:
            TrainingError: a field is unknown, or its value is not allowed.
        """
        changed = self.model_dump()
        for name, value in {**(values or {}), **fields}.items():
            *tables, field = name.split(".")
            place: Any = changed
            for table in tables:
                if place.get(table) is None:
                    place[table] = {}
                place = place[table]
                if not isinstance(place, dict):
                    raise TrainingError(f"recipe: {name}: {table} is not a table")
            place[field] = value
        return _validated(changed, "recipe")


class TeacherRun(Frozen):
    """The part of a recipe that its teacher depends on."""

    seed: int
    validation: int | float
    precision: str
    teacher: Teacher | None

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return the part of this recipe."""
        return cls.model_validate(recipe.model_dump(include=set(cls.model_fields)))


def read_recipe(path: Path) -> Recipe:
    """Read a recipe.

    Raises:
        TrainingError: the file cannot be read, is no TOML, or holds what a recipe may not.
    """
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise TrainingError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path}: not TOML: {error}") from error
    return _validated(values, str(path))


def to_toml(recipe: Recipe) -> str:
    """Write the whole recipe, defaults included; `read_recipe` reads the same recipe back."""
    return "\n".join(_tables(recipe.model_dump(mode="json", exclude_none=True)))


def _tables(values: dict[str, Any], name: str = "") -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, dict)}
    lines = _lines({key: value for key, value in values.items() if key not in tables})
    yield f"[{name}]\n{lines}" if name else lines
    for key, table in tables.items():
        yield from _tables(table, f"{name}.{key}" if name else key)


def _lines(values: dict[str, Any]) -> str:
    # JSON's strings, numbers, booleans and lists of them are TOML's, too; DEL alone has to be escaped here as well.
    lines = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in values.items())
    return lines.replace("\x7f", "\\u007f")


def parse_recipe(text: str, source: str, kind: type[RecipePart]) -> RecipePart:
    """Read the JSON that `model_dump_json` wrote; fields that are younger than the record take their defaults.

    Raises:
        TrainingError: it is no recipe of this kind; the message names `source`.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise TrainingError(f"{source}: recipe: {first_problem(error)}") from None


def _validated(values: dict[str, Any], source: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise TrainingError(f"{source}: {first_problem(error)}") from None
