"""Folders as people have them: each is served right, or refused with the remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.folders import (
    FOLDERS,
    edit_tensors,
    huggingface_folder,
    put,
    refusal,
    timm_folder,
    tiny,
)

Change = Callable[[Path], Any]
LAYER = "vit.encoder.layer.1.output.dense"


def _config(key: str, *values: Any) -> Change:
    return lambda folder: put(folder / "config.json", key, *values)


def _processor(**fields: Any) -> Change:
    def change(folder: Path) -> None:
        for key, value in fields.items():
            put(folder / "preprocessor_config.json", key, value)

    return change


def _tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    return lambda folder: edit_tensors(
        folder, lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})
    )


def _without(name: str) -> Change:
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def _replaced(name: str, content: bytes = b"x") -> Change:
    """Return a change that leaves another file in the place of the weights."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(content)

    return change


def _shards(*, extra: int = 0, lost: int = 0, kind: str = "safetensors") -> Change:
    """Return a change that cuts the weights into shards without an index."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        for number, (name, tensor) in enumerate(tensors.items(), 1):
            path = folder / f"model-{number:05}-of-{len(tensors) + extra:05}.{kind}"
            if number == lost:
                continue
            if kind == "bin":
                torch.save({name: tensor}, path)
            else:
                save_file({name: tensor}, path)

    return change


def _shards_of_two_sets(folder: Path) -> None:
    _shards()(folder)
    (folder / "z-00001-of-00009.safetensors").touch()


def _a_tensor_in_two_shards(folder: Path) -> None:
    _shards()(folder)
    first, second, *_ = sorted(folder.glob("model-*"))
    save_file(load_file(first) | load_file(second), second)


def _swin(folder: Path) -> None:
    put(folder / "config.json", "architectures", ["SwinForImageClassification"])
    put(folder / "config.json", "model_type", "swin")


def _training_file(folder: Path) -> None:
    state = {"state_dict": load_file(folder / "model.safetensors")}
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


def _flat(folder: Path) -> None:
    """Write the config as timm did before it nested `pretrained_cfg`."""
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("pretrained_cfg")
    del config["global_pool"]
    (folder / "config.json").write_text(json.dumps(config))


def _pickled(folder: Path) -> None:
    """Give a pickled state dict the name of the other kind."""
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "weights.pth")
    (folder / "weights.pth").replace(folder / "model.safetensors")


def _called_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


SERVED: dict[str, tuple[str, Change]] = {
    "a pickle called safetensors": ("huggingface", _pickled),
    "safetensors called a pickle": ("huggingface", _called_a_pickle),
    "an argument of timm's scripting": ("timm", _config("model_args.scriptable", True)),
    "id2label as a list": ("huggingface", _config("id2label", ["a", "b", "c"])),
    "id2label turned": ("huggingface", _config("id2label", {"a": 0, "b": 1, "c": 2})),
    "id2label with zeros": ("huggingface", _config("id2label", {"00": "a", "01": "b", "02": "c"})),
    "label2id as texts": ("huggingface", _config("label2id", {"a": "0", "b": "1", "c": "2"})),
    "flat": ("timm", _flat),
    "a tag": ("timm", _config("architecture", "vit_tiny_patch16_224.augreg_in21k")),
    "a hub's name": ("timm", _config("architecture", "hf-hub:timm/vit_tiny_patch16_224")),
    "shards without an index": ("timm", _shards()),
    "pickled shards without an index": ("huggingface", _shards(kind="bin")),
    "label_names as an object": ("timm", _config("label_names", {"0": "a", "1": "b", "2": "c"})),
}


@pytest.mark.parametrize("case", SERVED)
def test_folder_of_the_field_is_served(case: str, tmp_path: Path) -> None:
    kind, change = SERVED[case]
    folder = FOLDERS[kind](tmp_path)
    change(folder)
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("a", "b", "c")
    for name, tensor in tiny().items():
        torch.testing.assert_close(checkpoint.tensors[name], tensor)


@pytest.mark.parametrize("kind", ["huggingface", "timm"])
def test_a_head_without_a_bias_is_served(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    _without("classifier.bias" if kind == "huggingface" else "head.bias")(folder)
    checkpoint = load_checkpoint(str(folder))
    assert not checkpoint.tensors["head.bias"].any()
    assert checkpoint.assumed == ("head: a layer without a bias, because the file has none",)
    checkpoint.build()


def test_label2id_alone_gives_the_labels(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "config.json", "id2label")
    put(folder / "config.json", "label2id", {"b": 1, "a": 0, "c": 2})
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.labels == ("a", "b", "c")
    assert "label2id" in checkpoint.assumed[0]


REFUSED: dict[str, tuple[str, Change, str]] = {
    "a lost tensor": (
        "huggingface",
        _without(f"{LAYER}.weight"),
        f"missing key '{LAYER}.weight': save all of model",
    ),
    "a layer without a bias": (
        "huggingface",
        _without(f"{LAYER}.bias"),
        f"missing key '{LAYER}.bias': if the layer has no bias, save zeros",
    ),
    "another depth": (
        "huggingface",
        _config("num_hidden_layers", 3),
        r"'vit\.encoder\.layer\.2\..*: the file has 2 blocks, the architecture 3: correct "
        r"num_hidden_layers in config\.json, or",
    ),
    "another depth in timm's folder": (
        "timm",
        _config("model_args.depth", 3),
        r"has 2 blocks, the architecture 3: correct depth=2 \(.*model_args of config\.json",
    ),
    "another width of a layer": (
        "huggingface",
        _tensor(f"{LAYER}.weight", 16, 30),
        rf"{LAYER}.weight has shape \[16, 30\], expected \[16, 32\]: .*correct its sizes",
    ),
    "another grid": (
        "huggingface",
        _tensor("vit.embeddings.position_embeddings", 1, 10, 16),
        "correct the image size .*--image-size",
    ),
    "a tensor of training": (
        "huggingface",
        _tensor("extra", 3),
        "unexpected key 'extra': .*--keys",
    ),
    "quantised weights": (
        "huggingface",
        _tensor(f"{LAYER}.weight_scale", 1),
        "weight_scale'.*quantised weights are not read: save floating-point weights",
    ),
    **{
        name: ("huggingface", _tensor(f"{LAYER}.{name}", 1), "quantised weights are not read")
        for name in ("weight._data", "weight_scales", "input_scale", "weight:_qdata")
    },
    "no statistics": (
        "huggingface",
        _processor(image_mean=None),
        "image_mean or image_std is null: state both; VIT_PREPROCESS",
    ),
    "an argument of another network": (
        "timm",
        _config("model_args.attn_layer", "diff"),
        "attn_layer: unknown name; arguments of model_args that change no answer can be left out",
    ),
    "an absent size": (
        "huggingface",
        _config("intermediate_size"),
        "intermediate_size is missing: add it to the file",
    ),
    "an absent pooling": (
        "timm",
        _config("global_pool"),
        r"global_pool is missing: add what the head reads: token \(the CLS token",
    ),
    "a weight norm": (
        "timm",
        _tensor("head.parametrizations.weight.original0", 3, 1),
        "weights in two factors are not read: .*remove_parametrizations",
    ),
    "integers": (
        "huggingface",
        _tensor(f"{LAYER}.weight", 16, 32, dtype=torch.int8),
        "save floating-point weights",
    ),
    "a second head": ("timm", _tensor("head_dist.weight", 3, 16), "state the right class"),
    "registers": ("timm", _tensor("reg_token", 1, 4, 16), "number of register tokens: reg_tokens"),
    "another pooling": ("timm", _config("global_pool", "avg"), "correct global_pool"),
    "more classes": ("timm", _config("num_classes", 4), "correct the number of classes"),
    "no classes": ("timm", _config("num_classes", 0), "has a head, the architecture has none"),
    "fewer labels": (
        "timm",
        _config("label_names", ["a", "b"]),
        "label_names: 2 labels, but the head has 3 classes: .*--labels FILE",
    ),
    "labels from one": (
        "huggingface",
        _config("id2label", {"1": "a", "2": "b", "3": "c"}),
        "no label for index 0.*count from 0: .*--labels FILE",
    ),
    "numbers as labels": (
        "huggingface",
        _config("id2label", {"0": 1, "1": 2, "2": 0}),
        "id2label: 1: a label must be text, in quotes: .*--labels FILE",
    ),
    "more num_labels": ("huggingface", _config("num_labels", 5), "num_labels is 5.*--labels FILE"),
    "no class": ("huggingface", _config("architectures", None), "as save_pretrained writes it"),
    "another network": ("huggingface", _swin, "give timm's checkpoint of the same network; pip"),
    "pretraining": (
        "huggingface",
        _config("architectures", ["ViTForMaskedImageModeling"]),
        r"save its backbone: ViTModel\.from_pretrained",
    ),
    "a wide crop": ("timm", _config("pretrained_cfg.crop_pct", 1.1), r"--preprocess.*such as \{"),
    "a border": ("timm", _config("pretrained_cfg.crop_mode", "border"), r"such as \{.*0\.9"),
    "a random filter": (
        "timm",
        _config("pretrained_cfg.interpolation", "random"),
        "VIT_PREPROCESS sets the preprocessing",
    ),
    "a mean of text": (
        "timm",
        _config("pretrained_cfg.mean", "0.5"),
        "VIT_PREPROCESS sets the preprocessing",
    ),
    "no pretrained_cfg": ("timm", _config("pretrained_cfg"), r"save_for_hf\(model, FOLDER\)"),
    "a longest edge": (
        "huggingface",
        _processor(size={"longest_edge": 16}),
        "expected a number, height and width, or shortest_edge; VIT_PREPROCESS",
    ),
    "a large crop": (
        "huggingface",
        _processor(do_center_crop=True, crop_size=20),
        "crop_size .* is larger than size .*; VIT_PREPROCESS",
    ),
    "more shards": (
        "timm",
        _shards(extra=1),
        r"without model-(\d+)-of-\1.*copy or download all",
    ),
    "a lost shard": ("timm", _shards(lost=2), "without model-00002-of-"),
    "shards of two sets": (
        "timm",
        _shards_of_two_sets,
        "shards of two sets: remove the wrong ones",
    ),
    "a tensor in two shards": (
        "timm",
        _a_tensor_in_two_shards,
        r"model-00002-of-\d+\.safetensors: 'blocks\S+' is also in another shard: copy",
    ),
    "a file of training": ("timm", _training_file, "give the file itself instead of its folder"),
    "a renamed file": ("timm", _replaced("model.fp16.safetensors"), "rename the weights to model"),
    "arrays of NumPy": ("timm", _replaced("weights.npz"), "give that file instead of its folder"),
    "Keras": ("huggingface", _replaced("tf_model.h5"), r"tf_model\.h5 is weights of TensorFlow"),
    "Flax": ("huggingface", _replaced("flax_model.msgpack"), "from_flax"),
    "ONNX": ("huggingface", _replaced("model.onnx"), "give the model that it was exported from"),
    "llama.cpp": ("huggingface", _replaced("model.gguf"), "give the model that it was converted"),
    "nothing": ("huggingface", _replaced("README.md"), "copy or download them into the folder"),
    "an empty file": ("huggingface", _replaced("model.safetensors", b""), "download it again"),
    "a web page": (
        "huggingface",
        _replaced("model.safetensors", b"<!DOCTYPE html><html>"),
        "a web page, not the file itself",
    ),
    "a pointer": (
        "huggingface",
        lambda folder: (folder / "config.json").write_text("version https://git-lfs.github.com/"),
        r"config\.json: a pointer of Git LFS.*git lfs pull",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_folder_is_refused_with_the_remedy(case: str, tmp_path: Path) -> None:
    kind, change, message = REFUSED[case]
    folder = FOLDERS[kind](tmp_path)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(folder)).build()


@pytest.mark.parametrize("fields", [{"image_mean": [0.5]}, {"input_size": [3, 16, 16]}])
def test_foreign_fields_show_an_example(fields: dict[str, Any], tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    file = tmp_path / "preprocess.json"
    file.write_text(json.dumps(fields))
    for option in (json.dumps(fields), str(file)):
        with pytest.raises(CheckpointError, match="not those of another library: ") as refused:
            load_checkpoint(str(folder), preprocess=option)
        example = str(refused.value).rpartition("library: ")[2]
        assert load_checkpoint(str(folder), preprocess=example, image_size=(16, 16))


def test_named_preprocessing_serves_a_border(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    put(folder / "config.json", "pretrained_cfg.crop_mode", "border")
    named = "{" + refusal(folder).partition("such as {")[2]
    assert load_checkpoint(str(folder), preprocess=named).preprocess.crop_pct == 0.9


SOURCES = {
    "https://huggingface.co/google/vit-base-patch16-224": "google/vit-base-patch16-224?",
    "https://huggingface.co/timm/vit_tiny/tree/v1": "did you mean timm/vit_tiny@v1?",
    "hf-hub:timm/vit_tiny.x": "did you mean timm/vit_tiny.x?",
    "file:///data/model": "did you mean /data/model?",
    "s3://bucket/model": "download it",
}


@pytest.mark.parametrize("source", SOURCES)
def test_address_is_refused_with_its_source(source: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_checkpoint(source)
    assert SOURCES[source] in str(refused.value)
