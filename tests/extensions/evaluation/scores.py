"""All scores of pictures, for comparisons."""

import numpy as np
from numpy.typing import NDArray

from model.extensions.datasets.pictures import PictureFiles
from model.extensions.evaluation.evaluate import scores_and_members
from model.runtime.predictor import Predictor


def predict_scores(
    predictor: Predictor, pictures: PictureFiles | NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return all scores of files or images, float32 [N, K] in class order.

    Images are uint8 [N, C, H, W].
    """
    classes = predictor.checkpoint.config.num_classes
    return scores_and_members(predictor, pictures, classes)[0]
