"""`vitserve calibrate CHECKPOINT`: fit scores and sets of labels to labelled pictures."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from model.calibration import Fit
from model.errors import InputError
from model.extensions.datasets.split_names import TEST, VALIDATION
from model.extensions.datasets.split_record import SplitRecord, copy_record, digests_of
from model.extensions.evaluation.calibration import (
    Calibrated,
    calibrate,
    pictures_to_fit,
    require_pictures,
)
from model.extensions.evaluation.datasets import EvaluationSet, open_evaluation_set
from model.parameters import require_classes
from service.cli.image_files import (
    add_output_flag,
    print_notes,
    require_class_folders,
    require_empty,
    writing,
)
from service.cli.setting_flags import (
    CHECKPOINT_FLAGS,
    add_checkpoint,
    add_setting_flags,
    require_checkpoint,
    serve_command,
    settings_from,
)
from service.engine.checkpoint_files import checkpoint_from
from service.engine.loading import load_predictor
from service.settings import Settings, flag_of

_COVERAGE: Final = 0.95
# Most pictures that a calibration uses.
_MOST_PICTURES: Final = 12_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve calibrate`."""
    parser.description = (
        "Fit a checkpoint's scores and sets of labels to labelled pictures (docs/training.md). "
        "The service then takes any VIT_COVERAGE for which there are enough pictures."
    )
    add_checkpoint(parser)
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="typical labelled pictures, one folder for each class, or CIFAR-10's files; "
        "pictures that `train` used for training are left out",
    )
    add_output_flag(
        parser,
        "DIR",
        "write the checkpoint as vitserve's own folder here; without this flag, CHECKPOINT is such "
        "a folder, and gets one more file",
        required=False,
    )
    add_setting_flags(parser, (*CHECKPOINT_FLAGS, "device", "dtype", "coverage"))


def run(arguments: argparse.Namespace) -> int:
    """Calibrate a checkpoint, and print the quality of its sets of labels."""
    require_checkpoint(arguments, "calibrate")
    settings = settings_from(arguments)
    coverage = settings.coverage or _COVERAGE
    if arguments.output is None:
        _require_own_folder(settings)
    else:
        require_empty(arguments.output)
    from model.checkpoint import native  # noqa: PLC0415  torch takes seconds to import
    from model.extensions.evaluation.evaluate import predict_logits  # noqa: PLC0415

    pictures = _not_trained_on(arguments.data, settings.checkpoint)
    print_notes(pictures.notes)
    require_pictures(len(pictures.files), coverage, pictures.source)
    predictor, info = load_predictor(settings.model_copy(update={"coverage": None}))
    checkpoint = predictor.checkpoint
    require_classes(checkpoint.config)
    if checkpoint.multi_label or checkpoint.config.num_classes == 1:
        raise InputError(
            "checkpoint",
            f"{checkpoint.name}: its scores are independent: no set holds one right label",
        )
    truth = pictures.truth(info.labels, info.name)
    predictor.warm_up()

    drawn = np.random.default_rng(0).permutation(len(truth))[:_MOST_PICTURES]
    logits = predict_logits(predictor, pictures.files.take(drawn))
    if not np.isfinite(logits).all():
        raise InputError(
            "data", f"{info.name}: gives scores that are not finite for these pictures"
        )
    coverages = (coverage, *(other for other in (0.8, 0.9, 0.95, 0.99) if other != coverage))
    before = Fit(checkpoint.temperature, checkpoint.form)
    result = calibrate(logits, truth[drawn], before, arguments.data.name, coverages)
    calibration = result.calibration
    folder = arguments.output or Path(settings.checkpoint).expanduser()
    with writing(folder):
        if arguments.output is None:
            native.write_calibration(folder, calibration)
        else:
            # Read again, because a predictor of a kept graph does not hold the tensors.
            whole = checkpoint_from(settings)
            calibrated = replace(
                whole,
                temperature=calibration.temperature,
                form=calibration.form,
                calibration=calibration,
            )
            native.write(folder, calibrated)
            copy_record(settings.checkpoint, folder)
    _print(info.name, result, len(drawn) - result.fitted, pictures_to_fit(coverage))
    print(f"{folder}: calibrated; {serve_command(folder)} --coverage {coverage:g}")
    return 0


def _not_trained_on(data: Path, checkpoint: str) -> EvaluationSet:
    """Open labelled pictures, without the pictures that the checkpoint was trained on.

    Raises:
        DatasetError: the data cannot be read.
        InputError: the data are not a folder; or the checkpoint was trained on some pictures, and
            its training held out none.
    """
    require_class_folders(data)
    record = SplitRecord.read(checkpoint)
    splits = (VALIDATION, TEST) if record is None or record.holds_out else (TEST, VALIDATION)
    pictures = open_evaluation_set(data, splits, "calibrate")
    if record is None:
        return pictures
    digests = digests_of(pictures.files)
    trained = record.trained_on(digests)
    count = int(trained.sum())
    if not count:
        return pictures
    if not record.held_out(digests).any():
        remedy = "give other pictures"
        if record.holds_out:
            remedy += ", or all that `train` was given: those that it held out are then used"
        raise InputError(
            "data",
            f"{data}: {count} of {len(trained)} pictures were trained on by {checkpoint}: {remedy}",
        )
    left = np.flatnonzero(~trained)
    note = (
        f"{data}: {len(left)} pictures that {checkpoint} was not trained on are used, "
        f"{count} others are not"
    )
    return replace(pictures, files=pictures.files.take(left), notes=(*pictures.notes, note))


def _print(name: str, result: Calibrated, held_out: int, enough: int) -> None:
    """Print the quality of the scores on held-out pictures, and of the sets of each coverage.

    Args:
        enough: fewest pictures that fit scores.
    """
    if result.form:
        how = f"by {result.form}, fitted to {result.fitted}"
    elif result.fitted:
        how = "as they were: nothing fits better"
    elif held_out < enough:
        how = f"as they were: too few to fit them ({enough} are enough)"
    else:
        how = "as they were: the fifth that fits them is all answered right"
    loss, error = result.before
    calibrated_loss, calibrated_error = result.after
    print(f"{name}: {held_out + result.fitted} pictures; scores {how}")
    print(
        f"  on the other {held_out}: log loss {loss:.4f} -> {calibrated_loss:.4f}, "
        f"calibration error {error:.2%} -> {calibrated_error:.2%}"
    )
    if result.sets:
        print(
            f"sets of labels, measured on halves of {held_out} pictures while the other halves "
            "calibrate:"
        )
        print("  coverage  holds the right label  labels in a set  abstained")
    for coverage, sets in result.sets.items():
        print(f"  {coverage:8g}  {sets.covered:21.2%}  {sets.labels:15.2f}  {sets.abstained:9.2%}")


def _require_own_folder(settings: Settings) -> None:
    """Raise `InputError` if the checkpoint's folder cannot take a calibration."""
    from model.checkpoint.files import Files  # noqa: PLC0415  torch takes seconds to import
    from model.checkpoint.native import recognises  # noqa: PLC0415

    changed = [name for name in ("image_size", "preprocess") if getattr(settings, name) is not None]
    folder = Path(settings.checkpoint).expanduser()
    of_hub = any(
        part.startswith("models--") for part in folder.absolute().parts
    )  # the cache, which is not ours
    if changed:
        why = f"{flag_of(changed[0])} makes another model of it"
    elif settings.checkpoint != "bundled" and not folder.exists():
        if "/" not in settings.checkpoint:
            raise InputError("checkpoint", f"{settings.checkpoint}: no such folder")
        why = "no such folder on this machine"
    elif settings.checkpoint == "bundled" or of_hub or not recognises(Files(folder, str(folder))):
        why = "not a folder of yours"
    else:
        return
    raise InputError(
        "out", f"{settings.checkpoint}: {why}: give --out DIR, which gets a calibrated copy"
    )
