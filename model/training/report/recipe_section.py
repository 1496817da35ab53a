"""The section of a model card that describes the recipe in sentences, without what is switched off."""

from __future__ import annotations

from model.training.recipe import Recipe


def recipe_lines(recipe: Recipe) -> list[str]:
    """Return sentences on optimiser, augmentation, regularisation and start, each complete."""
    lines = [_optimiser(recipe), f"Augmentation: {_augmentation(recipe) or 'none'}."]
    if regularisation := _regularisation(recipe):
        lines.append(f"{regularisation[:1].upper()}{regularisation[1:]}.")
    if recipe.checkpoint is None:
        start = recipe.initialisation
        lines.append(
            f"Position embeddings start {'at a sine-cosine code' if start.positions == 'sincos' else 'random'}; "
            f"patch embedding starts {'at whitening filters' if start.whiten_patches else 'random'}; both learned."
        )
    return lines


def _listed(*parts: tuple[object, str]) -> str:
    """Join the texts whose condition holds."""
    return "; ".join(text for condition, text in parts if condition)


def _optimiser(recipe: Recipe) -> str:
    settings = recipe.optimiser
    muon = f", Muon for the blocks' matrices at {settings.muon_learning_rate:g}" if settings.name == "muon" else ""
    text = _listed(
        (True, f"AdamW at {settings.learning_rate:g}{muon}"),
        (True, f"weight decay {settings.weight_decay:g}"),
        (settings.layer_decay < 1, f"rates multiplied by {settings.layer_decay:g} a layer below the head"),
        (settings.clip_norm, f"gradients clipped to a norm of {settings.clip_norm:g}"),
        (True, f"warm-up over {settings.warmup:.0%} of the schedule, then a cosine to zero"),
    )
    return f"{text}."


def _augmentation(recipe: Recipe) -> str:
    settings, mixing = recipe.augmentation, recipe.mixing
    since = f" from {settings.resample_since:.0%} of the schedule on" if settings.resample_since else ""
    shifted = settings.crop_padding and not settings.resized_crop
    batches = f"in up to {mixing.probability:.0%} of the batches"
    return _listed(
        (settings.resized_crop, f"random parts of at least {settings.resized_crop:.0%} of the area, resized"),
        (shifted, f"random shifts by up to {settings.crop_padding} pixels"),
        (settings.flip, "mirroring"),
        (settings.resample, f"{settings.resample:.0%} of the images enlarged and shrunk again{since}"),
        (
            settings.trivial_augment,
            f"one random operation (TrivialAugment) on {settings.trivial_augment:.0%} of the images",
        ),
        (
            settings.rand_augment,
            f"{settings.rand_augment} random operations of strength {settings.rand_augment_magnitude:g} (RandAugment)",
        ),
        (settings.erasing, f"random erasing in {settings.erasing:.0%} of the images"),
        (mixing.mixup and mixing.probability, f"Mixup (alpha {mixing.mixup:g}) {batches}"),
        (mixing.cutmix and mixing.probability, f"CutMix (alpha {mixing.cutmix:g}) {batches}"),
    )


def _regularisation(recipe: Recipe) -> str:
    dropout = recipe.patch_dropout
    left_out = f"{dropout.rate:.0%} of the patches left out over the first {dropout.until:.0%} of the schedule"
    return _listed(
        (recipe.label_smoothing, f"label smoothing {recipe.label_smoothing:g}"),
        (recipe.drop_path, f"stochastic depth {recipe.drop_path:g}"),
        (dropout.rate and dropout.until, f"{left_out} (PatchDropout)"),
        (recipe.ema_decay, f"the weights' moving average (EMA, {recipe.ema_decay:g}) is what is kept"),
    )
