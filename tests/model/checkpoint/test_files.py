"""Names of files in a folder that other programs and systems left, copied or wrote."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from tests.model.checkpoint.folders import FOLDERS, huggingface_folder, refusal

SHARDS = tuple(f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def in_shards(folder: Path) -> dict[str, str]:
    """Write the weights of a folder into two shards; return the shard of each tensor."""
    weights = huggingface_folder(folder) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    weights.unlink()
    index = {name: SHARDS[number % 2] for number, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        part = {name: tensor for name, tensor in tensors.items() if index[name] == shard}
        save_file(part, folder / shard)
    return index


def test_copies_of_macos_are_no_shards(tmp_path: Path) -> None:
    in_shards(tmp_path)
    for shard in SHARDS:
        (tmp_path / f"._{shard}").write_bytes(b"\0\5\x16\7")
    assert load_checkpoint(str(tmp_path)).labels == ("a", "b", "c")


@pytest.mark.parametrize("start", [".\\", "C:\\models\\", "./"])
def test_paths_in_an_index_are_refused(start: str, tmp_path: Path) -> None:
    index = {name: start + shard for name, shard in in_shards(tmp_path).items()}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    assert "the shards are in the folder of the index, so write only their names" in refusal(
        tmp_path
    )


@pytest.mark.parametrize("name", ["Config.json", "config.JSON", "config (1).json"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_config_by_another_name_is_told(kind: str, name: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    (tmp_path / "config.json").rename(tmp_path / name)
    assert f"rename {name} to config.json; else" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "model (2).safetensors"])
def test_weights_by_another_name_are_told(name: str, tmp_path: Path) -> None:
    huggingface_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    assert f"rename {name} to model.safetensors; else" in refusal(tmp_path)


def test_hidden_folders_hold_no_model(tmp_path: Path) -> None:
    for name in ("checkpoint-5", ".ipynb_checkpoints", "__MACOSX"):
        huggingface_folder(tmp_path / name)
    assert "there is a model in checkpoint-5: give" in refusal(tmp_path)


@pytest.mark.parametrize(("size", "near"), [((20, 30), "16x32"), ((3, 3), "8x8")])
def test_a_size_that_fits_is_named(size: tuple[int, int], near: str, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    assert f"give --image-size {near} (VIT_IMAGE_SIZE)" in refusal(folder, image_size=size)
