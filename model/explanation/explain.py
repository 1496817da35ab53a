"""Maps over the patch grid by the explanation methods that need a pass of their own."""

from typing import Final, Protocol

import torch
from torch import Tensor

from model.errors import ExtensionError
from model.explanation.class_relevance import class_relevance, kept_for_class
from model.explanation.folded_weights import FoldedWeights, fold
from model.explanation.maps import sharpened_maps, token_maps
from model.extension import naming
from model.methods import load_method
from model.network.vit import VisionTransformer
from model.outputs import MapRequest, Pooling

# Limit in bytes of one block's attention weights in one pass. A pass has a few tensors of that
# size.
WEIGHTS_BYTES: Final = 64 << 20


class TokenFunction(Protocol):
    """The function of an explanation method."""

    def __call__(
        self, model: VisionTransformer, pixels: Tensor, targets: Tensor, features: Pooling
    ) -> Tensor:
        """Return how much each token mattered: floats [B, N], >= 0, of any scale.

        Args:
            model: must be unchanged afterwards.
            pixels: [B, C, H, W], normalised, in the model's dtype.
            targets, features: see `explain`; a method without classes ignores both.
        """


def explain(
    model: VisionTransformer,
    pixels: Tensor,
    targets: Tensor,
    request: MapRequest,
    folded: FoldedWeights | None = None,
    features: Pooling = "head",
) -> tuple[Tensor, Tensor]:
    """Return a map for each image, and the share of its values that fell on patches.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        targets: the classes, int64 [B], or rows of another head for them, float32 [B, D]. They
            replace the class of the request.
        request: of any method except `cls`.
        folded: `fold` of the model; None folds the weights for this call.
        features: embedding that the other head reads, if the targets are rows.

    Returns:
        float32 [B, rows, columns] on the CPU, >= 0: each map sums to 1, and is uniform if the
        method finds nothing. And float32 [B], the share that fell on patches instead of prefix
        tokens.
    """
    config = model.config
    images = max(1, WEIGHTS_BYTES // (4 * config.heads * config.tokens**2))
    parts = zip(torch.split(pixels, images), torch.split(targets, images), strict=True)
    with torch.no_grad():
        if request.method == "relevance":
            weights = folded or fold(model)
            of_parts = [_relevance(model, part, weights, target) for part, target in parts]
        else:
            of_parts = [
                _tokens_of_extension(request.method, model, part, target, features)
                for part, target in parts
            ]
    tokens = torch.cat(of_parts).float().cpu().numpy()
    if request.method == "relevance":  # may be negative
        maps, mass = sharpened_maps(tokens, config)
    else:
        maps, mass = token_maps(tokens, config)
    return torch.from_numpy(maps), torch.from_numpy(mass)


def _tokens_of_extension(
    method: str, model: VisionTransformer, pixels: Tensor, targets: Tensor, features: Pooling
) -> Tensor:
    """Return the result of an extension's method.

    Raises:
        RuntimeError: the method failed, which fails the image instead of the engine.
    """
    try:
        extension, loaded = load_method(method)
        function: TokenFunction = loaded
        with naming(extension, f"methods, {method}", (RuntimeError, MemoryError)):
            tokens = function(model, pixels, targets, features)
            expected = (len(pixels), model.config.tokens)
            if tuple(tokens.shape) != expected:
                raise ValueError(f"shape {tuple(tokens.shape)}: expected {expected}")
    except ExtensionError as error:
        raise RuntimeError(str(error)) from error
    return tokens


def _relevance(
    model: VisionTransformer, pixels: Tensor, weights: FoldedWeights, targets: Tensor
) -> Tensor:
    output = model(pixels, keep=kept_for_class(model.config))
    return class_relevance(model, output, weights, targets)
