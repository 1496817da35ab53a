"""Wrong or unreadable files are refused in one line that names the file and the fault."""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.timm_architectures import architectures
from model.network import library
from tests.model.checkpoint.folders import (
    CONFIG,
    FOLDERS,
    PREPROCESS,
    edit,
    edit_tensors,
    huggingface_folder,
    native_folder,
    put,
    refusal,
    timm_folder,
    tiny,
)


@pytest.mark.parametrize("kind", FOLDERS)
def test_wrong_tensors_are_named(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    good = load_file(folder / "model.safetensors")
    bias = "classifier.bias" if kind == "huggingface" else "head.bias"
    spoilt = {
        "unexpected key 'surprise'": good | {"surprise": torch.zeros(2)},
        f"{bias} has shape [4], expected [3]: correct the number of classes": good
        | {bias: torch.zeros(4)},
        f": {bias} holds values that are not finite": good
        | {bias: torch.tensor([0, float("nan"), 0])},
        f"{bias} is torch.int64, expected floating point, and dense": good
        | {bias: torch.zeros(3, dtype=torch.int64)},
    }
    for name in (min(good.keys() - {bias}), max(good)):
        spoilt[f": missing key '{name}'"] = {each: good[each] for each in good.keys() - {name}}
    for message, tensors in spoilt.items():
        save_file(tensors, folder / "model.safetensors")
        said = refusal(folder)
        assert said.startswith(str(folder)) and message in said


@pytest.mark.parametrize(
    ("kind", "file", "key"),
    [
        ("native", "config.json", "preprocess.mean"),
        ("native", "config.json", "preprocess.std"),
        ("native", "config.json", "preprocess.size"),
        ("native", "config.json", "preprocess.interpolation"),
        ("native", "config.json", "architecture.num_classes"),
        ("native", "config.json", "temperature"),
        ("native", "config.json", "labels"),
        ("timm", "config.json", "pretrained_cfg.mean"),
        ("timm", "config.json", "pretrained_cfg.std"),
        ("timm", "config.json", "pretrained_cfg.input_size"),
        ("timm", "config.json", "pretrained_cfg.crop_pct"),
        ("timm", "config.json", "pretrained_cfg.interpolation"),
        ("timm", "config.json", "label_names"),
        ("timm", "config.json", "num_classes"),
        ("timm", "config.json", "global_pool"),
        ("huggingface", "config.json", "architectures"),
        ("huggingface", "config.json", "id2label"),
        ("huggingface", "config.json", "hidden_act"),
        ("huggingface", "config.json", "layer_norm_eps"),
        ("huggingface", "config.json", "num_attention_heads"),
        ("huggingface", "config.json", "image_size"),
    ],
)
def test_missing_field_is_named(kind: str, file: str, key: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    put(folder / file, key)
    message = refusal(folder)
    assert key.rpartition(".")[2] in message
    assert file in message


def test_missing_crop_mode_is_the_centre(tmp_path: Path) -> None:
    folder = timm_folder(tmp_path)
    named = load_checkpoint(str(folder)).preprocess
    for values in ((None,), ()):
        put(folder / "config.json", "pretrained_cfg.crop_mode", *values)
        assert load_checkpoint(str(folder)).preprocess == named


@pytest.mark.parametrize(
    ("kind", "file", "key", "value", "message"),
    [
        (
            "timm",
            "config.json",
            "architecture",
            "resnet50",
            f"'resnet50' is none of the {len(architectures())} architectures of timm that this "
            "version reads",
        ),
        (
            "timm",
            "config.json",
            "architecture",
            "vit_base_patch16_18x2_224",
            "near it are vit_base_patch16_",
        ),
        ("timm", "config.json", "num_classes", 0, r"unexpected key 'head\.bias'"),
        ("timm", "config.json", "num_classes", 4, "labels for 4 classes|has shape"),
        ("timm", "config.json", "global_pool", "prr", "global_pool"),
        ("timm", "config.json", "num_classes", float("nan"), "num_classes"),
        ("timm", "config.json", "model_args.act_layer", "mish", "act_layer"),
        ("timm", "config.json", "model_args.surprise", 1, "surprise"),
        ("timm", "config.json", "model_args.norm_layer", "rmsnorm", "norm_layer"),
        ("timm", "config.json", "pretrained_cfg.crop_pct", 1.5, "crop_pct"),
        ("timm", "config.json", "pretrained_cfg.crop_mode", "random", "crop_mode"),
        ("timm", "config.json", "pretrained_cfg.std", [0, 1, 1], "std"),
        ("timm", "config.json", "pretrained_cfg.mean", [0.5, 0.5], "mean"),
        (
            "timm",
            "config.json",
            "pretrained_cfg.input_size",
            [3, 10**9, 10**9],
            "pretrained_cfg.size",
        ),
        (
            "huggingface",
            "config.json",
            "architectures",
            ["ViTModel"],
            r"unexpected key 'classifier\.bias'.*has a head, the architecture has none",
        ),
        (
            "huggingface",
            "config.json",
            "architectures",
            ["Dinov2Model"],
            "model_type 'vit': expected 'dinov2'",
        ),
        (
            *("huggingface", "config.json", "architectures", ["ViTHybridForImageClassification"]),
            "is not a Vision Transformer that is read; this version reads the "
            "ForImageClassification of ViT, ViTMSN, ",
        ),
        (
            *("huggingface", "config.json", "architectures", ["BertModel"]),
            "'BertModel' is not a Vision Transformer.*and, for embeddings, ViTModel, ViTMSNModel",
        ),
        ("huggingface", "config.json", "model_type", "swin", "model_type"),
        ("huggingface", "config.json", "hidden_act", "mish", "'mish' is not computed: give a"),
        ("huggingface", "config.json", "problem_type", "regression", "not classification"),
        ("huggingface", "config.json", "hidden_size", 10**12, "hidden_size"),
        ("huggingface", "config.json", "num_hidden_layers", 200, "missing key"),
        ("huggingface", "config.json", "num_attention_heads", 3, "not a multiple of heads"),
        ("huggingface", "config.json", "image_size", 32, "has shape"),
        (
            "huggingface",
            "config.json",
            "id2label",
            {"0": "a"},
            "1 labels, but the head has 3 classes",
        ),
        ("huggingface", "config.json", "id2label", {"1": "a"}, "correct it, or name the labels"),
        (
            "huggingface",
            "config.json",
            "id2label",
            {"0": "a", "1": "b", "9": "c"},
            "no label for index 2.*expected 0...2.*--labels FILE",
        ),
        (
            *("huggingface", "config.json", "id2label", {"0": 7, "1": 8, "2": 9}),
            "id2label: 7: a label must be text, in quotes",
        ),
        (
            *("huggingface", "config.json", "id2label", {"0": "a", "1": None, "2": "c"}),
            "id2label: '1': None: a label must be text",
        ),
        (
            "huggingface",
            "config.json",
            "id2label",
            {"9" * 9999: "a"},
            "neither from index to label nor from label to index",
        ),
        (
            "huggingface",
            "preprocessor_config.json",
            "image_processor_type",
            "DetrImageProcessor",
            "is not read",
        ),
        ("huggingface", "preprocessor_config.json", "rescale_factor", 0, "rescale_factor"),
        (
            "huggingface",
            "preprocessor_config.json",
            "do_resize",
            False,
            "do_resize.*VIT_PREPROCESS",
        ),
        (
            "huggingface",
            "preprocessor_config.json",
            "size",
            {"height": "16", "width": 16},
            "size .*expected a number, height and width",
        ),
        ("huggingface", "preprocessor_config.json", "resample", 9, "resample"),
        ("huggingface", "preprocessor_config.json", "use_square_size", True, "use_square_size"),
        (
            "huggingface",
            "preprocessor_config.json",
            "size",
            {"shortest_edge": 16},
            "no one input size",
        ),
        (
            "huggingface",
            "preprocessor_config.json",
            "size",
            {"height": 8, "width": 8},
            "gives 8x8 pixels, .*--image-size 8x8",
        ),
        (
            "timm",
            "config.json",
            "pretrained_cfg.model_args",
            {"global_pool": "avg"},
            "timm reads model_args beside pretrained_cfg: move it there, or remove it",
        ),
        ("native", "config.json", "version", 2, "version"),
        ("native", "config.json", "surprise", 1, "surprise"),
        ("native", "config.json", "architecture.activation", "mish", "activation"),
        ("native", "config.json", "architecture.depth", 10**30, "depth"),
        ("native", "config.json", "architecture.width", 16384, "has shape"),
        ("native", "config.json", "labels", ["a"], "1 labels for 3 classes"),
        ("native", "config.json", "temperature", 0, "temperature"),
    ],
)
def test_what_is_wrong_is_named(
    kind: str,
    file: str,
    key: str,
    value: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        library, "is_installed", lambda: False
    )  # timm's code runs other architectures
    folder = FOLDERS[kind](tmp_path)
    put(folder / file, key, value)
    found = refusal(folder)
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"mlp_width": 131072, "image_size": [512, 512]},
            "537,001,984 numbers in a layer: at most 134,217,728",
        ),
        (
            {"mlp_width": 16384, "mlp": "swiglu", "image_size": [512, 512]},
            "134,250,496 numbers in a layer",
        ),
        ({"image_size": [8192, 8192], "patch_size": 1024}, "201,326,592 numbers in a layer"),
        (
            {"stem": {"layers": []}, "image_size": [3072, 3072], "patch_size": 64},
            "150,994,944 numbers in a layer",
        ),
        (
            *({"relative_position_bias": True, "heads": 16, "image_size": [480, 480]},),
            "207,475,216 numbers in a layer",
        ),
    ],
)
def test_too_large_layers_are_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    edit(folder / "config.json", lambda config: config["architecture"].update(fields))
    assert message in refusal(folder)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_config_must_be_an_object(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    texts = [
        "",
        "[]",
        "null",
        '"a"',
        "{}",
        '{"a": 1',
        "[" * 100_000,
        "{" + '"a":' * 50_000,
        "1" * 5000,
        "\ufeff{}",
    ]
    for text in texts:
        (folder / "config.json").write_text(text, encoding="utf-8")
        assert "config.json" in refusal(folder)


def test_missing_processor_names_the_remedy(
    tmp_path: Path,
) -> None:
    folder = huggingface_folder(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    message = refusal(folder)
    assert "neither preprocessor_config.json nor processor_config.json" in message
    first, advice = message.split(
        "save the processor into this folder: processor.save_pretrained(FOLDER), or "
    )
    assert "VIT_PREPROCESS" not in first
    assert advice.startswith("set VIT_PREPROCESS to a JSON file or to one of ")


@pytest.mark.parametrize("size", [(20, 16), (1, 1), (65536, 65536), (16384, 16384)])
def test_an_impossible_size_is_refused(size: tuple[int, int], tmp_path: Path) -> None:
    assert "size" in refusal(native_folder(tmp_path), image_size=size)


@pytest.mark.parametrize(
    ("kind", "key"), [("native", "labels"), ("timm", "label_names"), ("huggingface", "id2label")]
)
def test_unusable_label_is_refused(kind: str, key: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    for label, said in (
        ("\ud800", "label 1, '\\ud800', has control"),
        ("x" * 1001, "label 1 has 1001 characters"),
    ):
        labels = ["a", label, "c"]
        put(
            folder / "config.json",
            key,
            dict(zip("012", labels, strict=True)) if kind == "huggingface" else labels,
        )
        message = refusal(folder)
        # pydantic itself refuses text that cannot be encoded.
        assert said in message or "labels.1: expected a valid string" in message
        message.encode()


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    expected = (
        "expected config.json, model.safetensors and preprocessor_config.json, as save_pretrained "
        "writes them"
    )
    assert refusal(tmp_path).startswith(f"{tmp_path}: has no config.json: {expected}")


def test_subfolders_with_models_are_named(tmp_path: Path) -> None:
    huggingface_folder(tmp_path / "checkpoint-500")
    (tmp_path / "logs").mkdir()
    assert f"there is a model in checkpoint-500: give {tmp_path}/checkpoint-500; else" in refusal(
        tmp_path
    )


def test_the_last_folder_of_a_trainer_is_given(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "checkpoint-1000", "checkpoint-200"):
        huggingface_folder(tmp_path / name)
    assert (
        f"in checkpoint-1000, checkpoint-200, checkpoint-100: give {tmp_path}/checkpoint-1000;"
    ) in refusal(tmp_path)


def test_a_classifier_that_is_absent_is_named(tmp_path: Path) -> None:
    def remove_head(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["classifier.weight"]
        del tensors["classifier.bias"]

    edit_tensors(huggingface_folder(tmp_path), remove_head)
    message = refusal(tmp_path)
    assert "missing key 'classifier.weight', the head" in message
    assert 'save the model with its head, under PEFT with modules_to_save=["classifier"]' in message


PARTS = [
    ("native", "config.json"),
    ("native", "model.safetensors"),
    ("huggingface", "preprocessor_config.json"),
]
NOBODY = 65534


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))


@pytest.mark.timeout(30)  # reading a pipe would block
@pytest.mark.parametrize(("kind", "name"), PARTS)
@pytest.mark.parametrize(
    ("put", "said"),
    [
        (os.mkfifo, "a device, pipe or socket, expected a regular file"),
        (unix_socket, "a device, pipe or socket, expected a regular file"),
        (Path.mkdir, "a folder, expected a regular file"),
        (
            lambda path: path.symlink_to("/dev/zero"),
            "a symbolic link out of its folder: put the file itself there",
        ),
        (
            lambda path: path.symlink_to("/etc/hostname"),
            "a symbolic link out of its folder: put the file itself there",
        ),
        # The same message, because links must not reveal which files exist outside.
        (
            lambda path: path.symlink_to("/no/such/file"),
            "a symbolic link out of its folder: put the file itself there",
        ),
        (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    ],
)
def test_an_irregular_file_is_refused(
    kind: str,
    name: str,
    put: Callable[[Path], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    monkeypatch.chdir(folder)  # the path of a socket must be short
    (folder / name).unlink()
    put(Path(name))
    assert refusal(folder) == f"{folder / name}: {said}"


def test_links_within_a_folder_are_followed(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    native_folder(mount / "..2026_11_22")
    (mount / "..data").symlink_to("..2026_11_22")
    for name in ("config.json", "model.safetensors"):
        (mount / name).symlink_to(f"..data/{name}")
    assert load_checkpoint(str(mount)).build()
    assert load_checkpoint(str(mount / "..data")).build()


def test_a_snapshot_reads_only_its_blobs(tmp_path: Path) -> None:
    cache = tmp_path / "models--owner--name"
    snapshot = native_folder(cache / "snapshots" / ("a" * 40))
    (cache / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).rename(cache / "blobs" / name[:5])
        (snapshot / name).symlink_to(f"../../blobs/{name[:5]}")
    assert load_checkpoint(str(snapshot)).build()
    (cache / "blobs" / "confi").rename(cache / "other")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../other")
    assert "a symbolic link out of its folder" in refusal(snapshot)
    moved = tmp_path / "name" / "snapshots" / "1"
    shutil.copytree(snapshot, moved, symlinks=True)
    shutil.copytree(cache / "blobs", tmp_path / "name" / "blobs")
    assert "a symbolic link out of its folder" in refusal(moved)


@contextmanager
def nobody() -> Iterator[None]:
    """Run as a user who owns none of the files."""
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_what_may_not_be_read_is_said() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's folder refuses other users
        Path(name).chmod(0o755)
        folder = native_folder(Path(name).resolve() / "model")
        for file in folder.iterdir():
            file.chmod(0o644)
        load_checkpoint(str(folder))  # because imports may need files that this user cannot read
        with nobody():
            assert load_checkpoint(str(folder)).build()
        for part in (folder / "config.json", folder / "model.safetensors", folder):
            mode = part.stat().st_mode
            part.chmod(0o600)
            with nobody():
                assert refusal(folder).endswith(": Permission denied")
            part.chmod(mode)


def test_content_identifies_a_model(
    tmp_path: Path,
) -> None:
    def content(change: dict[str, Any], folder: str) -> str:
        checkpoint = Checkpoint(
            "a", "a", "vitserve", "a", CONFIG, PREPROCESS, ("a", "b", "c"), tiny()
        )
        native.write(tmp_path / folder, replace(checkpoint, **change), dtype=torch.float32)
        (tmp_path / "served").unlink(missing_ok=True)
        (tmp_path / "served").symlink_to(tmp_path / folder)  # as in a swap of releases
        return load_checkpoint(str(tmp_path / "served")).content

    first = content({}, "first")
    assert re.fullmatch("[0-9a-f]{16}", first)
    assert content({}, "moved") == first
    changed = {name: tensor + (name == "head.bias") for name, tensor in tiny().items()}
    others = [
        content({"tensors": changed}, "weights"),
        content({"labels": ("a", "b", "d")}, "labels"),
    ]
    assert len({first, *others}) == 3
