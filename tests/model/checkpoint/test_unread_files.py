"""Files and fields that are not read are refused with the remedy, or named in a note."""

import json
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint
from model.checkpoint.checkpoint import backbone_and_head
from model.checkpoint.huggingface.families import FAMILIES, IMAGE_TOWERS
from model.checkpoint.known_fields import unknown_fields
from model.errors import CheckpointError
from tests.model.checkpoint.folders import (
    FOLDERS,
    adapter_folder,
    edit_tensors,
    huggingface_folder,
    native_folder,
    put,
    refusal,
    timm_folder,
)
from tests.timm_reference import timm, transformers

QUANTISED: Final = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    put(huggingface_folder(tmp_path) / "config.json", "quantization_config", QUANTISED)
    message = refusal(tmp_path)
    assert "quantization_config 'bitsandbytes': quantised weights are not read" in message
    assert "model.dequantize().save_pretrained(FOLDER)" in message


def test_packed_weights_of_torch_are_refused(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    packed = {"head._packed_params._packed_params": (torch.ones(3, 16), None)}
    torch.save(load_file(folder / "model.safetensors") | packed, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "_packed_params': quantised weights are not read" in refusal(folder)


@pytest.mark.parametrize("format_", FOLDERS)
def test_adapter_without_config_is_refused(format_: str, tmp_path: Path) -> None:
    folder = FOLDERS[format_](tmp_path / "model")
    adapter = adapter_folder(tmp_path / "adapter", str(folder))
    shutil.copy(adapter / "adapter_model.safetensors", folder)
    assert "an adapter without adapter_config.json is not merged" in refusal(folder)


@pytest.mark.parametrize("format_", FOLDERS)
def test_a_map_of_names_is_refused(format_: str, tmp_path: Path) -> None:
    assert "VIT_KEYS is for plain state dicts" in refusal(
        FOLDERS[format_](tmp_path), keys=str(tmp_path / "keys.toml")
    )


@pytest.mark.parametrize("format_", ["timm", "huggingface"])
def test_foreign_calibrations_are_refused(format_: str, tmp_path: Path) -> None:
    folder = FOLDERS[format_](tmp_path)
    (folder / "calibration.json").write_text("{}")
    assert f"run vitserve convert {folder} -o FOLDER and calibrate that" in refusal(folder)


@pytest.mark.parametrize(
    ("format_", "name"),
    [
        ("timm", "mask_token"),
        ("timm", "bn.num_batches_tracked"),
        ("huggingface", "vit.embeddings.mask_token"),
        ("huggingface", "vit.embeddings.position_ids"),
    ],
)
def test_a_leftover_among_weights_is_noted(format_: str, name: str, tmp_path: Path) -> None:
    weights = FOLDERS[format_](tmp_path) / "model.safetensors"
    is_token = name.endswith("mask_token")
    leftover = torch.ones(1, 1, 16) if is_token else torch.arange(4)
    save_file(load_file(weights) | {name: leftover}, weights)
    note = f"left out, because not part of the network: {name}"
    assert load_checkpoint(str(tmp_path)).notes == (note,)


def test_a_second_file_of_weights_is_named(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    expected = load_checkpoint(str(folder))
    assert expected.notes == ()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    checkpoint = load_checkpoint(str(folder))
    (note,) = checkpoint.notes
    assert note.startswith(
        "not read: pytorch_model.bin; read instead: config.json, model.safetensors, "
    )
    assert checkpoint.content == expected.content


@pytest.mark.parametrize("make", [native_folder, timm_folder])
def test_a_foreign_processor_is_named(make: object, tmp_path: Path) -> None:
    assert callable(make)
    folder = make(tmp_path / "model")
    shutil.copy(huggingface_folder(tmp_path / "other") / "preprocessor_config.json", folder)
    assert load_checkpoint(str(folder)).notes[0].startswith("not read: preprocessor_config.json; ")


def test_processors_that_disagree_are_said(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    assert load_checkpoint(str(folder)).assumed == ()
    put(folder / "preprocessor_config.json", "image_mean", [0.4, 0.4, 0.4])
    checkpoint = load_checkpoint(str(folder))
    assert checkpoint.preprocess.mean == (0.5, 0.5, 0.5)
    assert (
        "preprocessing: that of processor_config.json, as transformers takes it"
        in checkpoint.assumed[0]
    )


def test_a_wrapper_processor_is_refused(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path / "model")
    put(folder / "config.json", "model_type", "timm_wrapper")
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"timm_model.{name}": tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    assert load_checkpoint(str(folder)).labels == ("a", "b", "c")
    shutil.copy(huggingface_folder(tmp_path / "other") / "preprocessor_config.json", folder)
    assert (
        "'ViTImageProcessor' contradicts the pretrained_cfg of config.json: set VIT_PREPROCESS"
        in refusal(folder)
    )


def test_code_of_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "config.json", "auto_map", {"AutoModel": "modeling.Net"})
    (note,) = load_checkpoint(str(folder)).notes
    assert (
        note == "auto_map: the folder's own code is not run; the model is read as "
        "ViTForImageClassification"
    )


def test_rates_of_dropout_do_not_matter(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    expected = load_checkpoint(str(folder))
    for name in ("drop_rate", "drop_path_rate", "attn_drop_rate"):
        put(folder / "config.json", f"model_args.{name}", 0.1)
    assert load_checkpoint(str(folder)).content == expected.content


@pytest.mark.parametrize(
    ("format_", "key", "value", "name"),
    [
        ("huggingface", "hiden_act", "relu", "hiden_act (hidden_act?)"),
        ("huggingface", "use_mean_pooling", True, "use_mean_pooling"),
        ("huggingface", "temperature", 5.0, "temperature"),
        ("timm", "pretrained_cfg.bgr", True, "pretrained_cfg.bgr"),
        ("timm", "colour", "blue", "colour"),
    ],
)
def test_unknown_fields_of_a_config_are_noted(
    format_: str, key: str, value: object, name: str, tmp_path: Path
) -> None:
    folder = FOLDERS[format_](tmp_path)
    assert load_checkpoint(str(folder)).notes == ()
    put(folder / "config.json", key, value)
    note = f"config.json: not read, because its class has no such field: {name}"
    assert load_checkpoint(str(folder)).notes == (note,)


def test_steps_of_other_processors_are_refused(tmp_path: Path) -> None:
    file = huggingface_folder(tmp_path) / "preprocessor_config.json"
    for step in ("do_flip_channel_order", "do_grayscale", "rescale_offset", "do_magic"):
        put(file, step, True)
        said = refusal(tmp_path)
        assert f"{step} is not a step of ViTImageProcessor: leave the field out" in said
        put(file, step, False)
    put(file, "magic", 1)
    [assumed] = load_checkpoint(str(tmp_path)).assumed
    assert assumed == "preprocessing: without magic, which ViTImageProcessor does not have"


def test_a_field_that_stands_twice_is_refused(tmp_path: Path) -> None:
    config = huggingface_folder(tmp_path) / "config.json"
    config.write_text(config.read_text().replace("{", '{"hidden_act": "relu", ', 1))
    assert "'hidden_act' is there twice: 'relu' and 'gelu': remove the wrong one" in refusal(
        tmp_path
    )


def test_fields_of_transformers_are_known() -> None:
    library = transformers()
    for family in (*FAMILIES, *IMAGE_TOWERS):
        fields = getattr(library, family.class_name).config_class().to_dict()
        assert unknown_fields(fields, "common", family.model_type) == [], family.class_name
        processor = getattr(library, f"{family.image_processor}Pil")().to_dict()
        assert unknown_fields(processor, "processor") == []


def test_fields_of_timm_are_known() -> None:
    fields = timm().get_pretrained_cfg("vit_tiny_patch16_224").to_dict()
    assert unknown_fields(fields, "pretrained_cfg") == []


def test_a_head_that_diverged_costs_its_model(tmp_path: Path) -> None:
    huggingface_folder(tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors["classifier.bias"].fill_(float("nan")))
    with pytest.raises(CheckpointError, match=r"classifier.bias holds values that are not finite"):
        backbone_and_head(load_checkpoint(str(tmp_path)))
