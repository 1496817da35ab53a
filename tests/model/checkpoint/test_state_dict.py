"""Plain state dicts: the architecture that is named for them, the preprocessing and labels that
they lack, and names of one's own by a file of `VIT_KEYS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from model.checkpoint import load_checkpoint
from model.checkpoint.key_map import mapped, read_key_map
from model.checkpoint.timm_architectures import architectures
from model.errors import CheckpointError
from tests.model.checkpoint.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import assert_same_logits, preprocess_file, randomise
from tests.timm_reference import timm


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
    "data-parallel": ("vit_tiny_patch16_224", {}, lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}}),
    "prefixes": (
        "vit_tiny_patch16_224",
        {},
        lambda s: {f"_orig_mod.module.backbone.{n}": t for n, t in s.items()},
    ),
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
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64}, lambda s: s),
    "eva02": ("eva02_base_patch14_448", {"img_size": 42}, lambda s: s),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {}, lambda s: s),
    "dinov3": ("vit_small_patch16_dinov3", {}, lambda s: s),
    "perception-encoder": ("vit_pe_core_tiny_patch16_384", {}, lambda s: s),
    # As Microsoft's files have it, with indices that follow from the grid.
    "beit": (
        "beit_base_patch16_224",
        {},
        lambda s: {"model": s | {"blocks.0.attn.relative_position_index": torch.zeros(10, 10, dtype=torch.int64)}},
    ),
}


def assert_read_exactly(model: Any, state: Any, file: Path, architecture: str, size: tuple[int, int]) -> None:
    """Save a state dict where `file` says, and compare what is read of it with a model."""
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    preprocess = preprocess_file(file.parent, *size)
    checkpoint = load_checkpoint(str(file), architecture=architecture, preprocess=preprocess, labels="numbers")
    assert checkpoint.config.num_classes == model.num_classes
    assert_same_logits(checkpoint, model, f"state dict {architecture}")


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


@pytest.mark.parametrize("case", STATE)
def test_plain_state_dicts(case: str, tmp_path: Path) -> None:
    architecture, options, change = STATE[case]
    size = options.get("img_size", 48)
    model = (
        timm()
        .create_model(architecture.split(",")[0], **({"img_size": size, "num_classes": 6} | SMALL | options))
        .eval()
    )
    randomise(model)
    state = change(dict(model.state_dict()))
    given = architecture + "".join(f",{key}={value}" for key, value in SMALL.items())
    given += ",norm_order=pre" if architectures()[architecture.split(",")[0]].get("family") != "eva" else ""
    suffix = ".safetensors" if case in ("timm", "prefixes") else ".pth"
    assert_read_exactly(model, state, tmp_path / f"weights{suffix}", given, (size, size))


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
    given = "vit_giant_patch14_reg4_dinov2,embed_dim=48,depth=2,num_heads=24,norm_order=pre"
    assert_read_exactly(model, original, tmp_path / "dinov2.pth", given, (42, 42))


def test_a_grid_that_is_not_square_is_known_from_the_preprocessing(tmp_path: Path) -> None:
    model = timm().create_model("vit_tiny_patch16_224", img_size=(32, 128), depth=2, num_classes=3).eval()
    randomise(model)
    given = "vit_tiny_patch16_224,depth=2,norm_order=pre"
    assert_read_exactly(model, model.state_dict(), tmp_path / "weights.pth", given, (32, 128))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (None, "--architecture vit,num_heads=N,.* a name of timm says all of it"),
        ("vit_nothing", f"'vit_nothing' is none of the {len(architectures())} architectures of timm"),
        ("vit_small_patch16_224", "has shape .*192.*, expected .*384"),
        ("vit_tiny_patch16_224,depth=11,norm_order=pre", "unexpected key 'blocks.11"),
        ("vit_tiny_patch16_224,patch_size=8", "no square grid|has shape"),
        ("vit_tiny_patch16_224,num_heads=5,norm_order=pre", "not a multiple of heads 5"),
        ("vit_tiny_patch16_224,no_embed_class=true", "no square grid"),
        ("vit_tiny_patch16_224,global_pool=avg", "missing key 'fc_norm.bias'"),
        ("vit_tiny_patch16_224,qk_norm=true", "missing key"),
        ("vit_tiny_patch16_224,nonsense=1", "nonsense"),
        ("vit_tiny_patch16_224,img_size=32", "'img_size=32': img_size is read from the file and need not be given"),
        ("vit_tiny_patch16_224,depth", "'depth': expected argument=value"),
    ],
)
def test_an_architecture_that_the_tensors_contradict_is_refused(
    architecture: str | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            str(tiny), architecture=architecture, preprocess=preprocess_file(tmp_path, 48, 48), labels="numbers"
        )


@pytest.mark.parametrize(
    ("content", "suffix"),
    [("a\nb\n\nc\n", ".txt"), ('["a", "b", "c"]', ".json"), ('{"0": "a", "2": "c", "1": "b"}', ".json")],
)
def test_labels_come_from_a_file_of_lines_or_json(content: str, suffix: str, tiny: Path, tmp_path: Path) -> None:
    labels = tmp_path / f"labels{suffix}"
    labels.write_text(content)
    preprocess = preprocess_file(tmp_path, 48, 48)
    checkpoint = load_checkpoint(
        str(tiny), architecture="vit_tiny_patch16_224", preprocess=preprocess, labels=str(labels)
    )
    assert checkpoint.labels == ("a", "b", "c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no file says its preprocessing, labels: "),
        (
            {"preprocess": "google-224", "labels": "numbers"},
            r"preprocessing gives \(224, 224\), the model takes \(48, 48\)",
        ),
        ({"preprocess": "nothing", "labels": "numbers"}, "neither a file nor one of"),
        ({"preprocess": "FILE"}, "no file says its labels: .* --labels numbers "),
        ({"preprocess": "FILE", "labels": "nothing"}, "neither a file nor one of"),
        ({"preprocess": "FILE", "labels": "imagenet-1k"}, "1000 labels for 3 classes"),
    ],
)
def test_what_a_format_lacks_is_asked_for(options: dict[str, Any], message: str, tiny: Path, tmp_path: Path) -> None:
    if options.get("preprocess") == "FILE":
        options = options | {"preprocess": preprocess_file(tmp_path, 48, 48)}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tiny), architecture="vit_tiny_patch16_224", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "num_heads=3"},
            "^VIT_ARCHITECTURE 'num_heads=3': expected a name first, as in vit,num_heads=3",
        ),
        (
            {"architecture": "vit_tiny_patch16_224,global_pol=avg"},
            "^VIT_ARCHITECTURE: vit_tiny_patch16_224 has no argument 'global_pol': did you mean global_pool",
        ),
        ({"architecture": "vit,norm_epz=1"}, "did you mean norm_eps"),
        ({"labels": "not/there.txt"}, "^VIT_LABELS 'not/there.txt': neither a file nor one of"),
        ({"preprocess": "not/there.json"}, "^VIT_PREPROCESS 'not/there.json': neither a file nor one of"),
    ],
)
def test_a_wrong_option_is_blamed_and_not_the_file_which_is_not_read(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.pth").write_bytes(b"no weights")
    good: dict[str, Any] = {"architecture": "vit_tiny_patch16_224", "preprocess": "deit-224", "labels": "numbers"}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tmp_path / "mine.pth"), **(good | options))


def test_the_command_that_is_advised_names_a_preset_and_holds_no_gap(tiny: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"--preprocess deit-224 --labels numbers .*google-224 .* -1 to 1"
    ) as told:
        load_checkpoint(str(tiny), architecture="vit_tiny_patch16_224")
    assert "MEAN" not in str(told.value)


MAP = """
[[tensor]]
from = ["layers.{}.q.weight", "layers.{}.k.weight", "layers.{}.v.weight"]
to = "blocks.{}.attn.qkv.weight"
[[tensor]]
from = ["layers.{}.q.bias", "layers.{}.k.bias", "layers.{}.v.bias"]
to = "blocks.{}.attn.qkv.bias"
[[tensor]]
from = "layers.{}.mix.weight"
to = "blocks.{}.attn.proj.weight"
transpose = true
[[tensor]]
from = "layers.{}.mix.bias"
to = "blocks.{}.attn.proj.bias"
[[tensor]]
from = "layers.{}.clock"
to = ""
"""


def with_names_of_its_own(state: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        mine = re.sub(r"blocks\.(\d)\.attn\.proj", r"layers.\1.mix", name)
        if ".qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            result |= {re.sub(r"blocks\.(\d)\.attn\.qkv", rf"layers.\1.{part}", name): rows for part, rows in parts}
        else:
            result[mine] = tensor.T if mine.endswith("mix.weight") else tensor
    return result | {f"layers.{i}.clock": torch.ones(3) for i in range(2)}


def test_a_map_makes_an_odd_file_exact(tmp_path: Path) -> None:
    model = made(hidden=48)
    keys = tmp_path / "map.toml"
    keys.write_text(MAP)
    state = with_names_of_its_own(dict(model.state_dict()))
    with pytest.raises(CheckpointError, match=r"such as 'cls_token'.*: a file of VIT_KEYS says which tensor"):
        load(state, tmp_path, PLAIN)
    assert_same_logits(load(state, tmp_path, PLAIN, keys=str(keys)), model, "a map of names")


def test_the_order_of_a_projection_that_is_fused_by_name_alone_is_asked_for(tmp_path: Path) -> None:
    model = made(heads=4, qkv_order="h3d")
    keys, given = tmp_path / "map.toml", PLAIN.replace("num_heads=3", "num_heads=4")
    entries = [
        f'[[tensor]]\nfrom = "blocks.{{}}.look.{k}"\nto = "blocks.{{}}.attn.qkv.{k}"' for k in ("weight", "bias")
    ]
    keys.write_text("\n".join(entries))
    state = {name.replace("attn.qkv", "look"): tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"no file says its qkv_order: .*qkv_order=3hd"):
        load(state, tmp_path, given, keys=str(keys))
    assert_same_logits(load(state, tmp_path, f"{given},qkv_order=h3d", keys=str(keys)), model, "h3d")
    with pytest.raises(CheckpointError, match="qkv_order 'hhd': expected one of"):
        load(state, tmp_path, f"{given},qkv_order=hhd", keys=str(keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not TOML"),
        ("[[tensor]]", "tensor.0.from"),
        ('[[tensor]]\nfrom = "b"\nto = "x"\nother = 1', "other"),
        ('[[tensor]]\nfrom = "nothing"\nto = "x"', "'nothing': no tensor of this name is left"),
        ('[[tensor]]\nfrom = ["a.0", "z"]\nto = "x"', "'z': no tensor of this name is left"),
        ('[[tensor]]\nfrom = "a.{}"\nto = "x"', "two tensors are called 'x'"),
        ('[[tensor]]\nfrom = "b"\nto = "a.0"', "two tensors are called 'a.0'"),
        ('[[tensor]]\nfrom = ["a.0", "b"]\nto = "x"', "cannot be joined"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(text)
    tensors: dict[str, Any] = {"a.0": torch.ones(2, 3), "a.1": torch.ones(2, 3), "b": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=message):
        mapped(tensors, read_key_map(str(tmp_path / "map.toml")))
