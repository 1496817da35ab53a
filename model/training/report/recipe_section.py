"""A recipe in sentences, for a model card: what is switched off is not mentioned."""

from __future__ import annotations

from model.training.recipe import Recipe


def recipe_lines(recipe: Recipe) -> list[str]:
    """Return sentences on optimiser, augmentation, regularisation and start, each complete."""
    lines = [_optimiser(recipe), _augmentation(recipe)]
    regularisation = _regularisation(recipe)
    if regularisation:
        lines.append(regularisation)
    if recipe.checkpoint is None:
        start = recipe.initialisation
        lines.append(
            f"Position embeddings start {'at a sine-cosine code' if start.positions == 'sincos' else 'random'}; "
            f"patch embedding starts {'at whitening filters' if start.whiten_patches else 'random'}; both learned."
        )
    return lines


def _optimiser(recipe: Recipe) -> str:
    settings = recipe.optimiser
    text = f"AdamW at {settings.learning_rate:g}"
    if settings.name == "muon":
        text += f", Muon for the blocks' matrices at {settings.muon_learning_rate:g}"
    text += f"; weight decay {settings.weight_decay:g}"
    if settings.layer_decay < 1:
        text += f"; rates multiplied by {settings.layer_decay:g} a layer below the head"
    if settings.clip_norm:
        text += f"; gradients clipped to a norm of {settings.clip_norm:g}"
    return f"{text}; warm-up over {settings.warmup:.0%} of the schedule, then a cosine to zero."


def _augmentation(recipe: Recipe) -> str:
    settings, mixing = recipe.augmentation, recipe.mixing
    parts = []
    if settings.resized_crop:
        parts.append(f"random parts of at least {settings.resized_crop:.0%} of the area, resized")
    elif settings.crop_padding:
        parts.append(f"random shifts by up to {settings.crop_padding} pixels")
    if settings.flip:
        parts.append("mirroring")
    if settings.resample:
        since = f" from {settings.resample_since:.0%} of the schedule on" if settings.resample_since else ""
        parts.append(f"{settings.resample:.0%} of the images enlarged and shrunk again{since}")
    if settings.trivial_augment:
        parts.append(f"one random operation (TrivialAugment) on {settings.trivial_augment:.0%} of the images")
    if settings.rand_augment:
        parts.append(
            f"{settings.rand_augment} random operations of strength {settings.rand_augment_magnitude:g} (RandAugment)"
        )
    if settings.erasing:
        parts.append(f"random erasing in {settings.erasing:.0%} of the images")
    for name, alpha in (("Mixup", mixing.mixup), ("CutMix", mixing.cutmix)):
        if alpha and mixing.probability:
            parts.append(f"{name} (alpha {alpha:g}) in up to {mixing.probability:.0%} of the batches")
    return f"Augmentation: {'; '.join(parts) or 'none'}."


def _regularisation(recipe: Recipe) -> str:
    parts = []
    if recipe.label_smoothing:
        parts.append(f"label smoothing {recipe.label_smoothing:g}")
    if recipe.drop_path:
        parts.append(f"stochastic depth {recipe.drop_path:g}")
    if recipe.patch_dropout.rate and recipe.patch_dropout.until:
        share = f"{recipe.patch_dropout.rate:.0%} of the patches left out"
        parts.append(f"{share} over the first {recipe.patch_dropout.until:.0%} of the schedule (PatchDropout)")
    if recipe.ema_decay:
        parts.append(f"the weights' moving average (EMA, {recipe.ema_decay:g}) is what is kept")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""
