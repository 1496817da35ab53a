"""Pictures of numbers, as PNG files; drawn with matplotlib (the optional extra `figures`), never with torch."""

from model.insight.figures.analysis import attention_distance, patch_filters, position_similarity
from model.insight.figures.canvas import available, require
from model.insight.figures.explanations import Method, faithfulness
from model.insight.figures.training import Bin, Epoch, confusion_matrix, learning_curve, reliability_diagram

__all__ = [
    "Bin",
    "Epoch",
    "Method",
    "attention_distance",
    "available",
    "confusion_matrix",
    "faithfulness",
    "learning_curve",
    "patch_filters",
    "position_similarity",
    "reliability_diagram",
    "require",
]
