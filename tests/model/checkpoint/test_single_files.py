"""Files without a config: torchvision's state dicts, JAX's .npz, and plain state dicts with an architecture named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint import PREPROCESS_PRESETS, load_checkpoint
from model.checkpoint import torchvision as reader
from model.checkpoint.state_dict import parse_architecture
from model.checkpoint.tensors import TensorSource
from model.errors import CheckpointError
from model.network.vit import VisionTransformer, count_parameters
from tests.model.checkpoint.parity import assert_same_logits, randomise
from tests.timm_reference import timm, torchvision


def preprocess_file(folder: Path, rows: int, columns: int, channels: int = 3) -> str:
    path = folder / "preprocess.json"
    fields = {
        "size": [rows, columns],
        "resize": "squash",
        "resize_size": [rows, columns],
        "interpolation": "bilinear",
        "mean": [0.5] * channels,
        "std": [0.5] * channels,
    }
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.fixture
def small_torchvision(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes torchvision's model in a size that our reader is told of, as the real sizes take seconds each."""
    monkeypatch.setitem(reader._MODELS, 48, reader._Model(2, 4, 96))
    monkeypatch.setitem(reader._NAMES, (48, 16), "vit_b_16")
    monkeypatch.setitem(reader._NAMES, (48, 32), "vit_b_32")

    def make(patch: int, size: int, classes: int) -> Any:
        model = torchvision().models.VisionTransformer(size, patch, 2, 4, 48, 96, num_classes=classes).eval()
        randomise(model)
        return model

    return make


@pytest.mark.parametrize(("patch", "size"), [(16, 32), (32, 96)])
def test_torchvision_logits(patch: int, size: int, small_torchvision: Callable[..., Any], tmp_path: Path) -> None:
    model = small_torchvision(patch, size, 7)
    file = tmp_path / "mine.safetensors"
    save_file(model.state_dict(), file)
    checkpoint = load_checkpoint(str(file), preprocess=preprocess_file(tmp_path, size, size), labels="numbers")
    assert_same_logits(checkpoint, model, f"torchvision layout, patch {patch}")


@pytest.mark.slow
def test_torchvision_logits_at_full_size(tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = torchvision().models.vit_b_32(image_size=64, num_classes=7)
    model = empty.to_empty(device="cpu").eval()
    randomise(model)
    file = tmp_path / "mine.pth"
    torch.save(model.state_dict(), file)
    checkpoint = load_checkpoint(str(file), preprocess=preprocess_file(tmp_path, 64, 64), labels="numbers")
    assert checkpoint.architecture == "vit_b_32"
    assert_same_logits(checkpoint, model, "torchvision vit_b_32")


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvisions_models_are_told_apart_and_have_its_parameters(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision().models, name)()
    config = reader._config(TensorSource(theirs.state_dict(), name), name)
    with torch.device("meta"):
        ours = VisionTransformer(config)
    assert reader._NAMES[config.width, config.patch_size] == name
    assert count_parameters(ours) == count_parameters(theirs)
    assert config.heads == theirs.encoder.layers[0].num_heads


def test_torchvisions_older_names_of_the_mlp_are_read(small_torchvision: Callable[..., Any], tmp_path: Path) -> None:
    model = small_torchvision(16, 32, 3)
    old = {
        n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t
        for n, t in model.state_dict().items()
    }
    file = tmp_path / "old.pth"
    torch.save(old, file)
    checkpoint = load_checkpoint(str(file), preprocess=preprocess_file(tmp_path, 32, 32), labels="numbers")
    assert_same_logits(checkpoint, model, "torchvision, older names")


def test_a_released_torchvision_file_gets_its_published_preset_and_says_so(
    small_torchvision: Callable[..., Any], tmp_path: Path
) -> None:
    weights = torchvision().models.ViT_B_16_Weights.IMAGENET1K_V1
    file = tmp_path / weights.url.rsplit("/", 1)[1]
    torch.save(small_torchvision(16, 224, 1000).state_dict(), file)
    checkpoint = load_checkpoint(str(file))
    assert checkpoint.preprocess == PREPROCESS_PRESETS["torchvision-224"]
    assert checkpoint.labels[207] == "golden retriever"
    assert len(checkpoint.notes) == 2


def test_torchvisions_published_transforms_are_those_of_the_presets() -> None:
    models = torchvision().models
    for enum in ("ViT_B_16_Weights", "ViT_B_32_Weights", "ViT_L_16_Weights", "ViT_L_32_Weights", "ViT_H_14_Weights"):
        for weights in getattr(models, enum):
            match = reader._RELEASED.fullmatch(weights.url.rsplit("/", 1)[1])
            assert match is not None
            preset = PREPROCESS_PRESETS[reader._PRESETS[match[1], match[2]]]
            published = weights.transforms()
            assert preset.size[0] == published.crop_size[0], weights
            assert preset.resize_size[0] == published.resize_size[0], weights
            assert preset.interpolation == published.interpolation.value, weights
            assert preset.mean == tuple(published.mean)
            assert preset.std == tuple(published.std)


def jax_arrays(model: Any, *, big_vision: bool = False) -> dict[str, np.ndarray]:
    """The published layout of a ViT's arrays, from a timm model: the inverse of what vit_jax's users convert."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads, width = model.blocks[0].attn.num_heads, model.embed_dim
    mha, mlp, norm2 = ("0", "0", "1") if big_vision else ("1", "3", "2")
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
        ("pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"): state["pos_embed"],
    }
    if "cls_token" in state:
        arrays["cls"] = state["cls_token"]
    for index in range(len(model.blocks)):
        block, ours = f"Transformer/encoderblock_{index}/", f"blocks.{index}."
        for norm, name in (("LayerNorm_0", "norm1"), (f"LayerNorm_{norm2}", "norm2")):
            arrays[f"{block}{norm}/scale"] = state[f"{ours}{name}.weight"]
            arrays[f"{block}{norm}/bias"] = state[f"{ours}{name}.bias"]
        attention = f"{block}MultiHeadDotProductAttention_{mha}/"
        weights = np.split(state[f"{ours}attn.qkv.weight"], 3)
        biases = np.split(state[f"{ours}attn.qkv.bias"], 3)
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{attention}{part}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{attention}{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}out/kernel"] = state[f"{ours}attn.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}out/bias"] = state[f"{ours}attn.proj.bias"]
        for i in (0, 1):
            arrays[f"{block}MlpBlock_{mlp}/Dense_{i}/kernel"] = state[f"{ours}mlp.fc{i + 1}.weight"].T
            arrays[f"{block}MlpBlock_{mlp}/Dense_{i}/bias"] = state[f"{ours}mlp.fc{i + 1}.bias"]
    if model.attn_pool is not None:
        head, pool = "MAPHead_0/", "attn_pool."
        attention = f"{head}MultiHeadDotProductAttention_0/"
        arrays[f"{head}probe"] = state[f"{pool}latent"]
        rows = [
            ("query", state[f"{pool}q.weight"], state[f"{pool}q.bias"]),
            *zip(
                ("key", "value"),
                np.split(state[f"{pool}kv.weight"], 2),
                np.split(state[f"{pool}kv.bias"], 2),
                strict=True,
            ),
        ]
        for part, weight, bias in rows:
            arrays[f"{attention}{part}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{attention}{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{attention}out/kernel"] = state[f"{pool}proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{attention}out/bias"] = state[f"{pool}proj.bias"]
        arrays[f"{head}LayerNorm_0/scale"] = state[f"{pool}norm.weight"]
        arrays[f"{head}LayerNorm_0/bias"] = state[f"{pool}norm.bias"]
        for i in (0, 1):
            arrays[f"{head}MlpBlock_0/Dense_{i}/kernel"] = state[f"{pool}mlp.fc{i + 1}.weight"].T
            arrays[f"{head}MlpBlock_0/Dense_{i}/bias"] = state[f"{pool}mlp.fc{i + 1}.bias"]
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def stacked(arrays: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """As big_vision's scan stores blocks: one array with a leading dimension of all blocks."""
    first = "Transformer/encoderblock_0/"
    rest = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    for name in [n for n in arrays if n.startswith(first)]:
        parts = [arrays[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(depth)]
        rest[name.replace("encoderblock_0", "encoderblock")] = np.stack(parts)
    return rest


JAX: dict[str, tuple[dict[str, Any], bool, str, bool]] = {
    "augreg": ({}, False, "", False),
    "augreg-opt": ({}, False, "opt/target/", False),
    "big-vision-gap": ({"class_token": False, "global_pool": "avg", "fc_norm": False}, True, "params/", False),
    "big-vision-cls": ({"no_embed_class": True}, True, "params/", False),
    "big-vision-map": ({"class_token": False, "global_pool": "map"}, True, "params/img/", False),
    "big-vision-scan": ({"class_token": False, "global_pool": "map"}, True, "params/img/", True),
}


@pytest.mark.parametrize("case", JAX)
def test_jax_logits_are_those_of_the_timm_model_that_timm_loads_from_the_same_file(case: str, tmp_path: Path) -> None:
    options, big_vision, prefix, scan = JAX[case]

    def model() -> Any:
        made = timm().create_model(
            "vit_tiny_patch16_224",
            img_size=48,
            depth=3,
            embed_dim=48,
            num_classes=6,
            act_layer="gelu_tanh",
            **options,
        )
        return made.eval()

    source = model()
    randomise(source)
    arrays = jax_arrays(source, big_vision=big_vision)
    if scan:
        arrays = stacked(arrays, 3)
    file = tmp_path / "model.npz"
    np.savez(file, **{prefix + name: array for name, array in arrays.items()})
    loaded = model()
    loaded.load_pretrained(str(file))
    checkpoint = load_checkpoint(str(file), preprocess=preprocess_file(tmp_path, 48, 48), labels="numbers")
    assert_same_logits(checkpoint, loaded, f"jax {case}")


def test_a_released_jax_file_gets_its_published_preset_and_says_so(tmp_path: Path) -> None:
    model = timm().create_model("vit_tiny_patch16_224", depth=1)
    file = (
        tmp_path
        / "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz"
    )
    np.savez(file, **jax_arrays(model))
    checkpoint = load_checkpoint(str(file))
    assert checkpoint.preprocess == PREPROCESS_PRESETS["google-224"]
    assert checkpoint.labels[0] == "tench, Tinca tinca"
    assert len(checkpoint.notes) == 2


def test_an_npz_that_holds_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    np.savez(file, **{"embedding/kernel": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(CheckpointError, match="objects"):
        load_checkpoint(str(file))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain state dict of a whole ViT-Ti/16 at 48 px with three classes."""
    model = timm().create_model("vit_tiny_patch16_224", img_size=48, num_classes=3)
    file = tmp_path_factory.mktemp("tiny") / "weights.pth"
    torch.save(model.state_dict(), file)
    return file


Change = Callable[[dict[str, Tensor]], Any]

STATE: dict[str, tuple[str, dict[str, Any], Change]] = {
    "timm": ("vit_tiny_patch16_224", {}, lambda s: s),
    "wrapped": ("vit_tiny_patch16_224", {}, lambda s: {"model": s, "epoch": 3}),
    "data-parallel": ("vit_tiny_patch16_224", {}, lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}}),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, lambda s: s),
    "deit3-gamma": (
        "deit3_small_patch16_224",
        {},
        lambda s: {n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t for n, t in s.items()},
    ),
    "mae-finetuned": ("vit_tiny_patch16_224,global_pool=avg", {"global_pool": "avg"}, lambda s: s),
    "linear-patches": (
        "vit_tiny_patch16_224",
        {},
        lambda s: s | {"patch_embed.proj.weight": s["patch_embed.proj.weight"].flatten(1)},
    ),
    "half": ("vit_tiny_patch16_224", {}, lambda s: s),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64}, lambda s: s),
}


@pytest.mark.parametrize(
    ("case", "suffix"), [*((case, ".pth") for case in STATE), ("timm", ".safetensors"), ("half", ".safetensors")]
)
def test_plain_state_dicts(case: str, suffix: str, tmp_path: Path) -> None:
    architecture, options, change = STATE[case]
    size = options.get("img_size", 48)
    name = architecture.split(",")[0]
    small = {"depth": 2, "embed_dim": 48, "num_heads": 3}
    architecture += "".join(f",{key}={value}" for key, value in small.items())
    model = timm().create_model(name, **({"img_size": size, "num_classes": 6} | small | options)).eval()
    randomise(model)
    state = change(dict(model.state_dict()))
    if case == "half":
        state = {n: t.half() for n, t in state.items()}
        model.load_state_dict({n: t.float() for n, t in state.items()})
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save(state, file)
    else:
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    checkpoint = load_checkpoint(
        str(file), architecture=architecture, preprocess=preprocess_file(tmp_path, size, size), labels="numbers"
    )
    assert checkpoint.config.num_classes == 6
    assert_same_logits(checkpoint, model, f"state dict {case}")


def test_dinov2s_own_names_with_registers(tmp_path: Path) -> None:
    model = (
        timm().create_model("vit_giant_patch14_reg4_dinov2", embed_dim=48, depth=2, img_size=42, num_classes=4).eval()
    )
    randomise(model)
    state = dict(model.state_dict())
    position = torch.randn(1, 1, 48)
    original = {n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): t for n, t in state.items()}
    original["register_tokens"] = original.pop("reg_token")
    original["cls_token"] = original["cls_token"] - position
    original["pos_embed"] = torch.cat((position, original["pos_embed"]), dim=1)
    original["mask_token"] = torch.zeros(1, 48)
    file = tmp_path / "dinov2.pth"
    torch.save(original, file)
    checkpoint = load_checkpoint(
        str(file),
        architecture="vit_giant_patch14_reg4_dinov2,embed_dim=48,depth=2",
        preprocess=preprocess_file(tmp_path, 42, 42),
        labels="numbers",
    )
    assert_same_logits(checkpoint, model, "state dict dinov2 registers swiglu")


def test_a_grid_that_is_not_square_is_known_from_the_preprocessing(tmp_path: Path) -> None:
    model = timm().create_model("vit_tiny_patch16_224", img_size=(32, 128), depth=2, num_classes=3).eval()
    randomise(model)
    file = tmp_path / "weights.pth"
    torch.save(model.state_dict(), file)
    checkpoint = load_checkpoint(
        str(file),
        architecture="vit_tiny_patch16_224,depth=2",
        preprocess=preprocess_file(tmp_path, 32, 128),
        labels="numbers",
    )
    assert checkpoint.config.grid == (2, 8)
    assert_same_logits(checkpoint, model, "state dict not square")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (None, "VIT_ARCHITECTURE"),
        ("vit_nothing", "not one this version reads"),
        ("vit_small_patch16_224", "is 192 wide, vit_small_patch16_224 is 384"),
        ("vit_tiny_patch16_224,depth=11", "has 12 blocks, vit_tiny_patch16_224 has 11"),
        ("vit_tiny_patch16_224,patch_size=8", "has patches of 8x8"),
        ("vit_tiny_patch16_224,num_heads=5", "not a multiple of heads 5"),
        ("vit_tiny_patch16_224,no_embed_class=true", "no square grid"),
        ("vit_tiny_patch16_224,global_pool=avg", "missing key 'fc_norm.bias'"),
        ("vit_tiny_patch16_224,qk_norm=true", "missing key"),
        ("vit_tiny_patch16_224,nonsense=1", "nonsense"),
        ("vit_tiny_patch16_224,img_size=32", "inferred"),
    ],
)
def test_an_architecture_that_the_tensors_contradict_is_refused(
    architecture: str | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    file = tiny
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            str(file), architecture=architecture, preprocess=preprocess_file(tmp_path, 48, 48), labels="numbers"
        )


def test_architecture_arguments_are_read_as_json_where_they_are_json() -> None:
    name, given = parse_architecture("vit_tiny_patch16_224,global_pool=avg,depth=3,qkv_bias=false")
    assert name == "vit_tiny_patch16_224"
    assert given == {"global_pool": "avg", "depth": 3, "qkv_bias": False}


@pytest.mark.parametrize(
    ("content", "suffix"),
    [("a\nb\n\nc\n", ".txt"), ('["a", "b", "c"]', ".json"), ('{"0": "a", "2": "c", "1": "b"}', ".json")],
)
def test_labels_come_from_a_file_of_lines_or_json(content: str, suffix: str, tiny: Path, tmp_path: Path) -> None:
    file, labels = tiny, tmp_path / f"labels{suffix}"
    labels.write_text(content)
    preprocess = preprocess_file(tmp_path, 48, 48)
    checkpoint = load_checkpoint(
        str(file), architecture="vit_tiny_patch16_224", preprocess=preprocess, labels=str(labels)
    )
    assert checkpoint.labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "VIT_PREPROCESS"),
        ({"preprocess": "google-224"}, r"preprocessing gives \(224, 224\), the model takes \(48, 48\)|no labels"),
        ({"preprocess": "nothing"}, "neither a file nor one of"),
        ({"preprocess": "FILE"}, "VIT_LABELS"),
        ({"preprocess": "FILE", "labels": "nothing"}, "neither a file nor one of"),
        ({"preprocess": "FILE", "labels": "imagenet-1k"}, "1000 labels for 3 classes"),
    ],
)
def test_what_a_format_lacks_is_asked_for(options: dict[str, str], message: str, tiny: Path, tmp_path: Path) -> None:
    file = tiny
    if options.get("preprocess") == "FILE":
        options = options | {"preprocess": preprocess_file(tmp_path, 48, 48)}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(file), architecture="vit_tiny_patch16_224", **options)
