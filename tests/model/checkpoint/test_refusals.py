"""Everything that is not exactly a checkpoint is refused in one line that names the file and the thing."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network.vit import VisionTransformer

SIZE = 16
PREPROCESS = PreprocessConfig(
    size=(SIZE, SIZE),
    resize="squash",
    resize_size=(SIZE, SIZE),
    interpolation="bilinear",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
CONFIG = ViTConfig(image_size=(SIZE, SIZE), patch_size=8, width=16, depth=2, heads=2, mlp_width=32, num_classes=3)


def tiny(config: ViTConfig = CONFIG) -> dict[str, Tensor]:
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model.state_dict()


def native_folder(folder: Path) -> Path:
    checkpoint = Checkpoint("tiny", "here", "vitserve", "tiny", CONFIG, PREPROCESS, ("a", "b", "c"), tiny())
    native.write(folder, checkpoint, dtype=torch.float32)
    return folder


def timm_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "global_pool": "token",
        "label_names": ["a", "b", "c"],
        "model_args": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "img_size": 16},
        "pretrained_cfg": {
            "tag": "mine",
            "input_size": [3, 16, 16],
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny(), folder / "model.safetensors")
    return folder


def huggingface_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "image_size": 16,
        "patch_size": 8,
        "num_channels": 3,
        "qkv_bias": True,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_normalize": True,
        "size": {"height": 16, "width": 16},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = tiny()
    theirs = {
        "vit.embeddings.cls_token": ours["cls_token"],
        "vit.embeddings.position_embeddings": ours["pos_embed"],
        "vit.embeddings.patch_embeddings.projection.weight": ours["patch_embed.proj.weight"],
        "vit.embeddings.patch_embeddings.projection.bias": ours["patch_embed.proj.bias"],
        "vit.layernorm.weight": ours["norm.weight"],
        "vit.layernorm.bias": ours["norm.bias"],
        "classifier.weight": ours["head.weight"],
        "classifier.bias": ours["head.bias"],
    }
    for i in range(2):
        layer, block = f"vit.encoder.layer.{i}.", f"blocks.{i}."
        for kind in ("weight", "bias"):
            for part, tensor in zip(("query", "key", "value"), ours[f"{block}attn.qkv.{kind}"].chunk(3), strict=True):
                theirs[f"{layer}attention.attention.{part}.{kind}"] = tensor.contiguous()
            theirs[f"{layer}attention.output.dense.{kind}"] = ours[f"{block}attn.proj.{kind}"]
            theirs[f"{layer}layernorm_before.{kind}"] = ours[f"{block}norm1.{kind}"]
            theirs[f"{layer}layernorm_after.{kind}"] = ours[f"{block}norm2.{kind}"]
            theirs[f"{layer}intermediate.dense.{kind}"] = ours[f"{block}mlp.fc1.{kind}"]
            theirs[f"{layer}output.dense.{kind}"] = ours[f"{block}mlp.fc2.{kind}"]
    save_file(theirs, folder / "model.safetensors")
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "native": native_folder,
    "timm": timm_folder,
    "huggingface": huggingface_folder,
}


def refusal(source: Path, **options: Any) -> str:
    """The one line that this source is refused with."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(source), **options).build()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 700
    return message


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_folders_of_these_tests_are_good(kind: str, tmp_path: Path) -> None:
    assert load_checkpoint(str(FOLDERS[kind](tmp_path))).build()


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_missing_key_is_named(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    names = sorted(load_file(folder / "model.safetensors"))
    for name in (names[0], names[-1], names[len(names) // 2]):
        folder = FOLDERS[kind](tmp_path)
        edit_tensors(folder, lambda tensors, name=name: tensors.pop(name))
        message = refusal(folder)
        assert f"missing key '{name}'" in message
        assert str(folder) in message


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_unexpected_key_is_named(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update(surprise=torch.zeros(2)))
    assert "unexpected key 'surprise'" in refusal(folder)


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_wrong_shape_is_named(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    name = "classifier.bias" if kind == "huggingface" else "head.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert f"{name} has shape [4], expected [3]" in refusal(folder)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(kind: str, value: float, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    name = "classifier.bias" if kind == "huggingface" else "head.bias"
    edit_tensors(folder, lambda tensors: tensors[name].__setitem__(1, value))
    assert "head.bias holds values that are not finite" in refusal(folder)


@pytest.mark.parametrize("kind", FOLDERS)
def test_integers_are_no_weights(kind: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    name = "classifier.bias" if kind == "huggingface" else "head.bias"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3, dtype=torch.int64)}))
    assert "expected dense floating point" in refusal(folder)


def test_known_unused_tensors_of_a_family_are_left_out(tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({"vit.embeddings.mask_token": torch.zeros(1, 1, 16)}))
    assert load_checkpoint(str(folder)).build()


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 2000, -1])
def test_a_truncated_file_is_named(kind: str, cut: int, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert "model.safetensors: not a valid safetensors file" in refusal(folder)


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
        ("timm", "config.json", "pretrained_cfg.crop_mode"),
        ("timm", "config.json", "pretrained_cfg.interpolation"),
        ("timm", "config.json", "label_names"),
        ("timm", "config.json", "num_classes"),
        ("timm", "config.json", "global_pool"),
        ("huggingface", "preprocessor_config.json", "image_mean"),
        ("huggingface", "preprocessor_config.json", "image_std"),
        ("huggingface", "preprocessor_config.json", "size"),
        ("huggingface", "preprocessor_config.json", "resample"),
        ("huggingface", "config.json", "id2label"),
        ("huggingface", "config.json", "hidden_act"),
        ("huggingface", "config.json", "layer_norm_eps"),
        ("huggingface", "config.json", "num_attention_heads"),
        ("huggingface", "config.json", "image_size"),
    ],
)
def test_what_is_absent_is_named_and_never_assumed(kind: str, file: str, key: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    *parents, name = key.split(".")

    def remove(value: dict[str, Any]) -> None:
        for parent in parents:
            value = value[parent]
        del value[name]

    edit(folder / file, remove)
    message = refusal(folder)
    assert name in message
    assert file in message


@pytest.mark.parametrize(
    ("kind", "file", "key", "value", "message"),
    [
        ("timm", "config.json", "architecture", "resnet50", "'resnet50' is not one"),
        ("timm", "config.json", "architecture", "vit_base_patch16_rope_224", "is not one this version reads"),
        ("timm", "config.json", "num_classes", 0, "without a classification head"),
        ("timm", "config.json", "num_classes", 4, "labels for 4 classes|has shape"),
        ("timm", "config.json", "global_pool", "prr", "global_pool"),
        ("timm", "config.json", "model_args.act_layer", "mish", "act_layer"),
        ("timm", "config.json", "model_args.surprise", 1, "surprise"),
        ("timm", "config.json", "model_args.norm_layer", "rmsnorm", "norm_layer"),
        ("timm", "config.json", "pretrained_cfg.crop_pct", 1.5, "crop_pct"),
        ("timm", "config.json", "pretrained_cfg.crop_mode", "random", "crop_mode"),
        ("timm", "config.json", "pretrained_cfg.std", [0, 1, 1], "std"),
        ("timm", "config.json", "pretrained_cfg.mean", [0.5], "mean"),
        ("timm", "config.json", "pretrained_cfg.input_size", [3, 10**9, 10**9], "disagrees with img_size"),
        ("huggingface", "config.json", "architectures", ["ViTModel"], "'ViTModel' is not one of"),
        ("huggingface", "config.json", "architectures", ["BertModel"], "'BertModel' is not one of"),
        ("huggingface", "config.json", "model_type", "swin", "model_type"),
        ("huggingface", "config.json", "hidden_act", "mish", "activation 'mish'"),
        ("huggingface", "config.json", "problem_type", "regression", "not classification"),
        ("huggingface", "config.json", "hidden_size", 10**12, "hidden_size"),
        ("huggingface", "config.json", "hidden_size", "16", "hidden_size"),
        ("huggingface", "config.json", "num_hidden_layers", 200, "missing key"),
        ("huggingface", "config.json", "num_attention_heads", 3, "not a multiple of heads"),
        ("huggingface", "config.json", "image_size", 32, "has shape"),
        ("huggingface", "config.json", "id2label", {"0": "a"}, "expected one for each of 0...2"),
        ("huggingface", "config.json", "id2label", {"0": "a", "1": "b", "9": "c"}, "expected one for each of 0...2"),
        ("huggingface", "preprocessor_config.json", "image_processor_type", "DetrImageProcessor", "is not read"),
        ("huggingface", "preprocessor_config.json", "rescale_factor", 0.1, "rescale_factor"),
        ("huggingface", "preprocessor_config.json", "do_resize", False, "do_resize"),
        ("huggingface", "preprocessor_config.json", "resample", 9, "resample"),
        ("huggingface", "preprocessor_config.json", "use_square_size", True, "use_square_size is not read"),
        ("huggingface", "preprocessor_config.json", "size", {"shortest_edge": 16}, "no one input size"),
        ("huggingface", "preprocessor_config.json", "size", {"height": 8, "width": 8}, "preprocessing gives"),
        ("native", "config.json", "version", 2, "version"),
        ("native", "config.json", "surprise", 1, "surprise"),
        ("native", "config.json", "architecture.activation", "mish", "activation"),
        ("native", "config.json", "architecture.depth", 10**30, "depth"),
        ("native", "config.json", "architecture.width", 16384, "has shape"),
        ("native", "config.json", "labels", ["a"], "1 labels for 3 classes"),
        ("native", "config.json", "temperature", 0, "temperature"),
    ],
)
def test_what_is_wrong_is_named(kind: str, file: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    *parents, name = key.split(".")

    def put(config: dict[str, Any]) -> None:
        for parent in parents:
            config = config[parent]
        config[name] = value

    edit(folder / file, put)
    found = refusal(folder)
    assert re.search(message, found), found


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "NaN",
        '"a"',
        "{}",
        '{"a": 1',
        "[" * 100_000,
        "{" + '"a":' * 50_000,
        "1" * 5000,
        "\ufeff{}",
    ],
)
def test_a_config_that_is_no_json_object_is_refused(kind: str, text: str, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    (folder / "config.json").write_text(text, encoding="utf-8")
    assert "config.json" in refusal(folder)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: has no config.json"


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no weights (model.safetensors" in refusal(folder)


def test_nothing_at_all_is_refused(tmp_path: Path) -> None:
    assert "no such folder or file" in refusal(tmp_path / "nothing")


def test_an_architecture_for_a_folder_that_says_its_own_is_refused(tmp_path: Path) -> None:
    for kind, make in FOLDERS.items():
        assert "VIT_ARCHITECTURE" in refusal(make(tmp_path / kind), architecture="vit_tiny_patch16_224")


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run!",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(2), "evil": _Evil()}, file)
    assert "refused, it is not plain tensors" in refusal(file, architecture="vit_tiny_patch16_224")
    file.write_bytes(pickle.dumps(_Evil()))
    refusal(file, architecture="vit_tiny_patch16_224")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"PK\x03\x04" + b"\0" * 50, b"\x80\x02}q\0.", b"\x80\x05" + b"\xff" * 30]
)
def test_a_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(content)
    assert "weights.pth" in refusal(file, architecture="vit_tiny_patch16_224")


def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    for value in ([torch.zeros(2)], {"a": 1}, torch.zeros(2), {}):
        torch.save(value, file)
        assert "weights.pth" in refusal(file, architecture="vit_tiny_patch16_224")


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + b"\0" * 50])
def test_a_damaged_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.npz"
    file.write_bytes(content)
    assert "weights.npz" in refusal(file)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = load_file(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not the name of a safetensors file beside it" in refusal(folder)


def test_an_index_that_its_shards_contradict_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'more' is in the index or in the shards, but not in both" in refusal(folder)


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    header = json.dumps({"head.bias": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "not a valid safetensors file" in refusal(folder)


@pytest.mark.parametrize("size", [(20, 16), (1, 1), (65536, 65536), (16384, 16384)])
def test_an_input_size_that_cannot_be_is_refused(size: tuple[int, int], tmp_path: Path) -> None:
    assert "size" in refusal(native_folder(tmp_path), image_size=size)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2, 16, 10**18, "gelu", "vit", [16, 16], [3, 16, 16], float("nan")]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def right_or_refused(folder: Path) -> None:
    """Either a refusal in one line, or a model that computes what its config says."""
    try:
        checkpoint = load_checkpoint(str(folder))
        model = checkpoint.build()
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    config = checkpoint.config
    with torch.inference_mode():
        logits = model(torch.zeros(1, config.in_channels, *config.image_size)).logits
    assert logits.shape == (1, len(checkpoint.labels))


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("native", "config.json"),
        ("timm", "config.json"),
        ("huggingface", "config.json"),
        ("huggingface", "preprocessor_config.json"),
    ],
)
@FUZZ
@given(data=st.data())
def test_any_change_to_a_config_is_a_refusal_or_a_right_model(
    kind: str, file: str, data: st.DataObject, tmp_path: Path
) -> None:
    folder = FOLDERS[kind](tmp_path / "model") if not (tmp_path / "model").exists() else tmp_path / "model"
    original = tmp_path / "original.json"
    if not original.exists():
        original.write_text((folder / file).read_text())
    config = json.loads(original.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(paths(config)))
        inside = config
        for key in parents:
            inside = inside[key]
        if isinstance(inside, dict) and data.draw(st.booleans()):
            del inside[last]
            break
        inside[last] = data.draw(JSON)
        break
    (folder / file).write_text(json.dumps(config))
    right_or_refused(folder)


@FUZZ
@given(data=st.data())
def test_any_change_to_a_safetensors_header_is_a_refusal_or_a_right_model(data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        native_folder(folder)
        (tmp_path / "original").write_bytes((folder / "model.safetensors").read_bytes())
    original = (tmp_path / "original").read_bytes()
    length = struct.unpack("<Q", original[:8])[0]
    if data.draw(st.booleans()):
        header = json.loads(original[8 : 8 + length])
        *parents, last = data.draw(st.sampled_from(paths(header)))
        inside = header
        for key in parents:
            inside = inside[key]
        inside[last] = data.draw(
            JSON | st.sampled_from(["F16", "F64", "I8", "BOOL", "BF16", "F8_E4M3", "U64", [2**62, 2**62]])
        )
        text = json.dumps(header).encode()
        changed = struct.pack("<Q", data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))) + text
        changed += original[8 + length :]
    else:
        at = data.draw(st.integers(0, 8 + length - 1))
        changed = original[:at] + bytes([data.draw(st.integers(0, 255))]) + original[at + 1 :]
    (folder / "model.safetensors").write_bytes(changed)
    right_or_refused(folder)


@FUZZ
@given(data=st.data())
def test_any_damage_to_a_pickle_is_a_refusal(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(3, 16), "head.bias": torch.zeros(3)}, file)
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with pytest.raises(CheckpointError):
        load_checkpoint(str(file), architecture="vit_tiny_patch16_224", preprocess="deit-224", labels="numbers")
