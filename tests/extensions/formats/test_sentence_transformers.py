import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from tests.extensions.hub.local_hub import MAIN, Hub, Load
from tests.model.checkpoint.folders import huggingface_folder, refusal


def sentence_folder(folder: Path, *further: str) -> Path:
    """Write a folder of sentence-transformers around a model of transformers."""
    folder.mkdir()
    huggingface_folder(folder / "0_CLIPModel")
    modules = [{"idx": index, "path": path} for index, path in enumerate(("0_CLIPModel", *further))]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_sentence_transformers_model_is_read(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "clip-ViT-B-32")
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.name == "clip-ViT-B-32"
    weights = load_file(folder / "0_CLIPModel" / "model.safetensors")
    assert torch.equal(checkpoint.tensors["head.weight"], weights["classifier.weight"])


def test_further_modules_are_refused(tmp_path: Path) -> None:
    folder = sentence_folder(tmp_path / "dense", "1_Dense")
    assert "1_Dense would change the embeddings of 0_CLIPModel" in refusal(folder)
    edit_modules = [{"path": "../elsewhere"}]
    (folder / "modules.json").write_text(json.dumps(edit_modules))
    assert "'../elsewhere' is not the name of a subfolder" in refusal(folder)


def test_a_subfolder_on_the_hub_is_read(hub: Hub, load: Load, tmp_path: Path) -> None:
    huggingface_folder(tmp_path / MAIN / "nested")
    (tmp_path / MAIN / "config.json").unlink()
    (tmp_path / MAIN / "modules.json").write_text('[{"path": "nested"}]')
    assert load("owner/name", hub)["label"] == "a"


def test_a_self_linked_subfolder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "back").symlink_to(".")
    (tmp_path / "modules.json").write_text('[{"path": "back"}]')
    assert "has no config.json" in refusal(tmp_path)
