"""Preprocessing of test models."""

from __future__ import annotations

from model.config import PreprocessConfig, Size


def bicubic_config(rows: int, columns: int, resize_size: Size | None = None) -> PreprocessConfig:
    return PreprocessConfig(
        size=(rows, columns),
        resize="shortest_edge",
        resize_size=resize_size or (rows, columns),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
