"""The summary of a checkpoint, which `vitserve inspect` shows."""

from pathlib import Path

from model.checkpoint import load_checkpoint
from model.extensions.evaluation.summary import summarise
from tests.model.checkpoint import whole_models
from tests.timm_reference import timm


def test_requests_may_bring_the_labels(tmp_path: Path) -> None:
    whole_models.clip(tmp_path)
    rows = summarise(load_checkpoint(str(tmp_path)))
    assert rows["labels"] == "none: set VIT_LABELS, or send labels= with a request"
    assert rows["scores"] == "of the labels of a request"


def test_library_network_names_its_library(tmp_path: Path) -> None:
    model = timm().create_model("test_resnet", num_classes=2)
    timm().models.save_for_hf(model, tmp_path, model_config={"label_names": ["a", "b"]})
    rows = summarise(load_checkpoint(str(tmp_path)))
    assert rows["runtime"].startswith("timm 1.")
    assert rows["attention maps"] == "none"
