"""Plain state dicts: the stated architecture, preprocessing and labels, and key maps."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import PREPROCESS_PRESETS, load_checkpoint
from model.checkpoint.checkpoint import backbone_and_head
from model.checkpoint.files import SingleFile
from model.checkpoint.timm_architectures import architectures
from model.errors import CheckpointError
from model.extensions.formats.inferred import TORCHVISION
from model.extensions.formats.key_map import mapped, read_key_map
from model.extensions.formats.layouts import in_layout
from model.network.vit import count_parameters
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint import folders, transformers_models
from tests.model.checkpoint.parity import (
    TOLERANCE,
    assert_same_logits,
    pictures,
    preprocess_file,
    randomise,
    relative_error,
)
from tests.model.runtime.predictions import MODES
from tests.timm_reference import declare_torchvision_operators, timm, torchvision


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain state dict of a whole ViT-Ti/16 at 48 px with three classes."""
    model = timm().create_model("vit_tiny_patch16_224", img_size=48, num_classes=3)
    file = tmp_path_factory.mktemp("tiny") / "weights.pth"
    torch.save(model.state_dict(), file)
    return file


Change = Callable[[dict[str, Tensor]], Any]

STATE: dict[str, tuple[str, dict[str, Any], Change]] = {
    "timm": ("vit_tiny_patch16_224,pre_norm=false", {}, lambda s: s),
    "data-parallel": (
        "vit_tiny_patch16_224",
        {},
        lambda s: {"state_dict": {f"module.{n}": t for n, t in s.items()}},
    ),
    "prefixes": (
        "vit_tiny_patch16_224",
        {},
        lambda s: {f"_orig_mod.module.backbone.{n}": t for n, t in s.items()},
    ),
    "distilled": ("deit_tiny_distilled_patch16_224", {}, lambda s: s),
    "deit3-gamma": (
        "deit3_small_patch16_224",
        {},
        lambda s: {
            n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): t
            for n, t in s.items()
        },
    ),
    "mae-finetuned": ("vit_tiny_patch16_224,global_pool=avg", {"global_pool": "avg"}, lambda s: s),
    "linear-patches": (
        "vit_tiny_patch16_224",
        {},
        lambda s: s | {"patch_embed.proj.weight": s["patch_embed.proj.weight"].flatten(1)},
    ),
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64}, lambda s: s),
    "eva02": ("eva02_base_patch14_448,use_rot_pos_emb=true", {"img_size": 42}, lambda s: s),
    "rope-mixed": ("vit_small_patch16_rope_mixed_224", {}, lambda s: s),
    "dinov3": ("vit_small_patch16_dinov3", {}, lambda s: s),
    "perception-encoder": ("vit_pe_core_tiny_patch16_384", {}, lambda s: s),
    # Like Microsoft's files, with indices that follow from the grid.
    "beit": (
        "beit_base_patch16_224",
        {},
        lambda s: {
            "model": s
            | {"blocks.0.attn.relative_position_index": torch.zeros(10, 10, dtype=torch.int64)}
        },
    ),
}


def assert_read_exactly(
    model: Any, state: Any, file: Path, architecture: str, size: tuple[int, int]
) -> None:
    """Save a state dict as `file`, read it, and compare it with a model."""
    if file.suffix == ".pth":
        torch.save(state, file)
    else:
        save_file({n: t.contiguous() for n, t in state.items()}, file)
    preprocess = preprocess_file(file.parent, *size)
    checkpoint = load_checkpoint(
        str(file), architecture=architecture, preprocess=preprocess, labels="numbers"
    )
    assert checkpoint.config.num_classes == model.num_classes
    assert_same_logits(checkpoint, model, f"state dict {architecture}")


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


@pytest.mark.parametrize("case", STATE)
def test_plain_state_dicts(case: str, tmp_path: Path) -> None:
    architecture, options, change = STATE[case]
    size = options.get("img_size", 48)
    model = (
        timm()
        .create_model(
            architecture.split(",")[0], **({"img_size": size, "num_classes": 6} | SMALL | options)
        )
        .eval()
    )
    randomise(model)
    state = change(dict(model.state_dict()))
    given = architecture + "".join(f",{key}={value}" for key, value in SMALL.items())
    given += (
        ",norm_order=pre"
        if architectures()[architecture.split(",")[0]].get("family") != "eva"
        else ""
    )
    suffix = ".safetensors" if case in ("timm", "prefixes") else ".pth"
    assert_read_exactly(model, state, tmp_path / f"weights{suffix}", given, (size, size))


def test_pickled_parameters_are_plain_weights(tiny: Path, tmp_path: Path) -> None:
    trained = {name: nn.Parameter(tensor) for name, tensor in torch.load(tiny).items()}
    torch.save(trained, tmp_path / "trained.pth")
    options: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "preprocess": preprocess_file(tmp_path, 48, 48),
        "labels": "numbers",
    }
    name, head = backbone_and_head(load_checkpoint(str(tmp_path / "trained.pth"), **options))
    assert name == backbone_and_head(load_checkpoint(str(tiny), **options))[0]
    assert head is not None


def test_image_size_resizes_a_state_dict(tmp_path: Path) -> None:
    model = (
        timm().create_model("vit_small_patch14_dinov2", **SMALL, img_size=70, num_classes=4).eval()
    )
    randomise(model)
    torch.save(model.state_dict(), tmp_path / "dinov2.pth")
    given = "vit_small_patch14_dinov2,norm_order=pre" + "".join(
        f",{key}={value}" for key, value in SMALL.items()
    )
    options: dict[str, Any] = {
        "architecture": given,
        "preprocess": preprocess_file(tmp_path, 28, 28),
    }
    with pytest.raises(
        CheckpointError, match="gives 28x28 pixels, the model takes 70x70: --image-size 28x28"
    ):
        load_checkpoint(str(tmp_path / "dinov2.pth"), labels="numbers", **options)
    checkpoint = load_checkpoint(
        str(tmp_path / "dinov2.pth"), labels="numbers", image_size=(28, 28), **options
    )
    model.set_input_size((28, 28))
    assert_same_logits(checkpoint, model, "a state dict at 28")


def test_dinov2s_own_names_with_registers(tmp_path: Path) -> None:
    model = (
        timm()
        .create_model(
            "vit_giant_patch14_reg4_dinov2", embed_dim=48, depth=2, img_size=42, num_classes=4
        )
        .eval()
    )
    randomise(model)
    state = dict(model.state_dict())
    position = torch.randn(1, 1, 48)
    original = {
        n.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): t for n, t in state.items()
    }
    original["register_tokens"] = original.pop("reg_token")
    original["cls_token"] = original["cls_token"] - position
    original["pos_embed"] = torch.cat((position, original["pos_embed"]), dim=1)
    original["mask_token"] = torch.zeros(1, 48)
    for name, shape in (
        ("register_tokens", (4, 48)),
        ("pos_embed", (10, 48)),
        ("pos_embed", (1, 1, 48)),
    ):
        with pytest.raises(
            CheckpointError,
            match=rf"^a: .*{name} has shape {re.escape(str(list(shape)))}.*width\]$",
        ):
            in_layout(original | {name: torch.zeros(shape)}, SingleFile(Path("a"), "a"))
    given = "vit_giant_patch14_reg4_dinov2,embed_dim=48,depth=2,num_heads=24,norm_order=pre"
    assert_read_exactly(model, original, tmp_path / "dinov2.pth", given, (42, 42))


def test_preprocessing_tells_an_oblong_grid(tmp_path: Path) -> None:
    model = (
        timm()
        .create_model("vit_tiny_patch16_224", img_size=(32, 128), depth=2, num_classes=3)
        .eval()
    )
    randomise(model)
    given = "vit_tiny_patch16_224,depth=2,norm_order=pre"
    assert_read_exactly(model, model.state_dict(), tmp_path / "weights.pth", given, (32, 128))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (None, "--architecture vit,num_heads=N,.* a name of timm says all of them"),
        (
            "vit_nothing",
            f"'vit_nothing' is none of the {len(architectures())} architectures of timm",
        ),
        ("vit_small_patch16_224", "has shape .*192.*, expected .*384"),
        ("vit_tiny_patch16_224,depth=11,norm_order=pre", "unexpected key 'blocks.11"),
        ("vit_tiny_patch16_224,patch_size=8", "no square grid|has shape"),
        ("vit_tiny_patch16_224,num_heads=5,norm_order=pre", "not a multiple of heads 5"),
        ("vit_tiny_patch16_224,no_embed_class=true", "no square grid"),
        ("vit_tiny_patch16_224,global_pool=avg", "missing key 'fc_norm.bias'"),
        ("vit_tiny_patch16_224,qk_norm=true", "missing key"),
        ("vit_tiny_patch16_224,nonsense=1", "'nonsense': it has num_heads, norm_order, act_layer"),
        ("vit_tiny_patch16_224,pool=avg", "'pool': did you mean global_pool or pool_include"),
        ("vit_tiny_patch16_224,depth=12,depth=11", "depth is stated twice: 12 and 11: remove"),
        ("vit num_heads=3", "expected a name first, then a comma, as in vit,num_heads=3"),
        ("num_heads=3", "expected a name first, then a comma, as in vit,num_heads=3"),
        (
            "vit_tiny_patch16_224,pre_norm=true,norm_order=pre",
            r"missing key 'norm_pre.bias' .*: save all .*; else correct the architecture",
        ),
        (
            "vit_tiny_patch16_224,img_size=32",
            r"says img_size=32, but .* tell img_size=\[48, 48\]: correct the argument, or leave it",
        ),
        ("vit_tiny_patch16_224,num_classes=4", "says num_classes=4, but .* head of 3 classes"),
        ("vit_tiny_patch16_224,in_chans=1", "says in_chans=1, but .* tell in_chans=3"),
        ("vit_tiny_patch16_224,depth", "'depth': expected argument=value"),
    ],
)
def test_a_wrong_architecture_is_refused(
    architecture: str | None, message: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            str(tiny),
            architecture=architecture,
            preprocess=preprocess_file(tmp_path, 48, 48),
            labels="numbers",
        )


@pytest.mark.parametrize("told", ["num_classes=3", "img_size=48", "img_size=[48,48]", "in_chans=3"])
def test_arguments_may_say_what_a_file_tells(told: str, tiny: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(
        str(tiny),
        architecture=f"vit_tiny_patch16_224,{told}",
        preprocess=preprocess_file(tmp_path, 48, 48),
        labels="numbers",
    )
    assert checkpoint.config.num_classes == 3


@pytest.mark.parametrize(
    ("content", "suffix"),
    [
        ("a\nb\nc\n\n", ".txt"),
        ('["a", "b", "c"]', ".json"),
        ('{"0": "a", "2": "c", "1": "b"}', ".json"),
    ],
)
def test_label_file_of_lines_or_json(content: str, suffix: str, tiny: Path, tmp_path: Path) -> None:
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
            "the preprocessing gives 224x224 pixels, the model takes 48x48: --image-size 224x224",
        ),
        ({"preprocess": "nothing", "labels": "numbers"}, "neither a file nor one of"),
        ({"preprocess": "FILE"}, "no file says its labels: .* --labels numbers "),
        ({"preprocess": "FILE", "labels": "nothing"}, "neither a file, nor names"),
        ({"preprocess": "FILE", "labels": "imagenet-1k"}, "1000 labels for 3 classes"),
    ],
)
def test_what_a_format_lacks_is_asked_for(
    options: dict[str, Any], message: str, tiny: Path, tmp_path: Path
) -> None:
    if options.get("preprocess") == "FILE":
        options = options | {"preprocess": preprocess_file(tmp_path, 48, 48)}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tiny), architecture="vit_tiny_patch16_224", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"architecture": "num_heads=3"},
            "^VIT_ARCHITECTURE 'num_heads=3': expected a name first, then a comma, as in vit",
        ),
        (
            {"architecture": "vit_tiny_patch16_224,global_pol=avg"},
            "^VIT_ARCHITECTURE: vit_tiny_patch16_224 has no argument 'global_pol': did you mean "
            "global_pool",
        ),
        ({"architecture": "vit,norm_epz=1"}, "did you mean norm_eps"),
        ({"architecture": "eva02_base_patch14_448,pre_norm=true"}, "has no argument 'pre_norm'"),
        ({"labels": "not/there.txt"}, "^VIT_LABELS 'not/there.txt': neither a file, nor names"),
        (
            {"preprocess": "not/there.json"},
            "^VIT_PREPROCESS 'not/there.json': neither a file nor one of",
        ),
    ],
)
def test_wrong_options_are_refused_first(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.pth").write_bytes(b"no weights")
    good: dict[str, Any] = {
        "architecture": "vit_tiny_patch16_224",
        "preprocess": "deit-224",
        "labels": "numbers",
    }
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(tmp_path / "mine.pth"), **(good | options))


def test_advised_command_is_complete(tiny: Path) -> None:
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
            result |= {
                re.sub(r"blocks\.(\d)\.attn\.qkv", rf"layers.\1.{part}", name): rows
                for part, rows in parts
            }
        else:
            result[mine] = tensor.T if mine.endswith("mix.weight") else tensor
    return result | {f"layers.{i}.clock": torch.ones(3) for i in range(2)}


def test_a_map_makes_an_odd_file_exact(tmp_path: Path) -> None:
    model = made(hidden=48)
    keys = tmp_path / "map.toml"
    keys.write_text(MAP)
    state = with_names_of_its_own(dict(model.state_dict()))
    with pytest.raises(
        CheckpointError, match=r"such as 'cls_token'.*: a file of VIT_KEYS says which tensor"
    ):
        load(state, tmp_path, PLAIN)
    assert_same_logits(load(state, tmp_path, PLAIN, keys=str(keys)), model, "a map of names")


def test_a_renamed_projection_needs_an_order(tmp_path: Path) -> None:
    model = made(heads=4, qkv_order="h3d")
    keys = tmp_path / "map.toml"
    given = PLAIN.replace("num_heads=3", "num_heads=4")
    entries = [
        f'[[tensor]]\nfrom = "blocks.{{}}.look.{k}"\nto = "blocks.{{}}.attn.qkv.{k}"'
        for k in ("weight", "bias")
    ]
    keys.write_text("\n".join(entries))
    state = {
        name.replace("attn.qkv", "look"): tensor for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError, match=r"no file says its qkv_order: .*qkv_order=3hd"):
        load(state, tmp_path, given, keys=str(keys))
    assert_same_logits(
        load(state, tmp_path, f"{given},qkv_order=h3d", keys=str(keys)), model, "h3d"
    )
    with pytest.raises(CheckpointError, match="qkv_order 'hhd': expected one of"):
        load(state, tmp_path, f"{given},qkv_order=hhd", keys=str(keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not TOML"),
        ("[[tensor]]", "tensor.0.from"),
        ('[[tensor]]\nfrom = "b"\nto = "x"\nother = 1', "other"),
        (
            '[[tensor]]\nfrom = "a.*"\nto = "x"',
            r"'a\.\*': no tensor of this name is left: did you mean 'a.[01]'",
        ),
        (
            '[[tensor]]\nfrom = "nothing"\nto = "x"',
            r"'nothing': no tensor of this name is left: \{\} stands for the number of a block",
        ),
        ('[[tensor]]\nfrom = ["a.0", "z"]\nto = "x"', "'z': no tensor of this name is left"),
        ('[[tensor]]\nfrom = "a.{}"\nto = "x"', "two tensors are called 'x'"),
        ('[[tensor]]\nfrom = "b"\nto = "a.0"', "two tensors are called 'a.0'"),
        ('[[tensor]]\nfrom = ["a.0", "b"]\nto = "x"', "cannot be joined"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(text)
    tensors: dict[str, Any] = {
        "a.0": torch.ones(2, 3),
        "a.1": torch.ones(2, 3),
        "b": torch.zeros(3),
    }
    with pytest.raises(CheckpointError, match=message):
        mapped(tensors, read_key_map(str(tmp_path / "map.toml")))


def vit_pytorch() -> Any:
    declare_torchvision_operators()
    pytest.importorskip("einops", reason="einops is not installed")
    return pytest.importorskip("vit_pytorch", reason="vit-pytorch is not installed")


LITTLE = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 48, "depth": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("kind", "options", "architecture"),
    [
        ("ViT", {"heads": 4, "dim_head": 16}, "vit,num_heads=4"),  # inner width 64
        ("ViT", {"heads": 3, "dim_head": 16, "pool": "mean"}, "vit,num_heads=3"),
        ("ViT", {"heads": 2, "dim_head": 24, "mlp_dim": 48}, "vit,num_heads=2"),  # square layers
        (
            "SimpleViT",
            {"heads": 3, "dim_head": 16},
            "vit,num_heads=3",
        ),  # positions without a tensor
    ],
)
def test_vit_pytorch(kind: str, options: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    model = getattr(vit_pytorch(), kind)(**(LITTLE | options)).eval()
    randomise(model)
    with pytest.raises(
        CheckpointError, match=r"its num_heads: .* --architecture vit,num_heads=N --"
    ):
        load(model.state_dict(), tmp_path)
    checkpoint = load(model.state_dict(), tmp_path, architecture)
    assert_same_logits(checkpoint, model, f"vit-pytorch {kind} {options}")
    assert "act_layer=gelu, as vit-pytorch has it (VIT_ARCHITECTURE)" in checkpoint.assumed


class EncoderViT(nn.Module):
    """A ViT around torch's encoder, which users often write."""

    def __init__(self, *, norm_first: bool, activation: str = "gelu", hidden: int = 64) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, 48, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 48))
        self.pos_embedding = nn.Parameter(torch.zeros(1, 17, 48))
        layer = nn.TransformerEncoderLayer(
            48, 3, hidden, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(48), enable_nested_tensor=False
        )
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(48, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embedding
        y: Tensor = self.classifier(self.encoder(x)[:, 0])
        return y


@pytest.mark.parametrize(
    ("order", "activation", "hidden"), [("pre", "relu", 64), ("post", "gelu", 48)]
)
def test_torchs_own_encoder(order: str, activation: str, hidden: int, tmp_path: Path) -> None:
    model = EncoderViT(norm_first=order == "pre", activation=activation, hidden=hidden).eval()
    randomise(model)
    with pytest.raises(
        CheckpointError, match=r"norm_order=pre,act_layer=gelu,global_pool=token.*only usual"
    ):
        load(model.state_dict(), tmp_path)
    given = f"vit,num_heads=3,norm_order={order},act_layer={activation},global_pool=token"
    assert_same_logits(
        load(model.state_dict(), tmp_path, given), model, f"TransformerEncoder {order}"
    )


@pytest.mark.parametrize("original", [True, False])
def test_transformers_weights_without_config(original: bool, tmp_path: Path) -> None:
    model = transformers_models.make("vit", tmp_path, save_original_format=original)
    source = tmp_path / "model.safetensors"
    source.rename(tmp_path / "alone.safetensors")
    preprocess = preprocess_file(tmp_path, model.config.image_size, model.config.image_size)
    given = f"vit,num_heads={model.config.num_attention_heads}"
    checkpoint = load_checkpoint(
        str(tmp_path / "alone.safetensors"),
        architecture=given,
        preprocess=preprocess,
        labels="numbers",
    )
    assert_same_logits(
        checkpoint, lambda pixels: model(pixels).logits, "transformers without a config"
    )


_MMPRETRAIN = (
    (r"^blocks\.(\d+)\.norm([12])", r"backbone.layers.\1.ln\2"),
    (r"^blocks\.(\d+)\.mlp\.fc1", r"backbone.layers.\1.ffn.layers.0.0"),
    (r"^blocks\.(\d+)\.mlp\.fc2", r"backbone.layers.\1.ffn.layers.1"),
    (r"^blocks\.", "backbone.layers."),
    (r"^norm\.", "backbone.ln1."),
    (r"^patch_embed\.proj", "backbone.patch_embed.projection"),
    (r"^(cls_token|pos_embed)$", r"backbone.\1"),
    (r"^head\.", "head.layers.head."),
)


def test_mmpretrain(tmp_path: Path) -> None:
    model = made()
    state = {}
    for name, tensor in model.state_dict().items():
        rules = (rule for rule in _MMPRETRAIN if re.search(rule[0], name))
        state[re.sub(*next(rules), name)] = tensor
    content = {"meta": {"mmpretrain_version": "1.2.0"}, "state_dict": state}
    checkpoint = load(content, tmp_path, "vit,num_heads=3")
    assert_same_logits(checkpoint, model, "mmpretrain")


@pytest.mark.parametrize("case", ["dinov2", "clip"])
def test_transformers_folder_is_asked_for(case: str, tmp_path: Path) -> None:
    model = transformers_models.make(case, tmp_path)
    with pytest.raises(CheckpointError, match="names of transformers: give the folder that save_"):
        load(model.state_dict(), tmp_path, "vit,num_heads=4")


@pytest.mark.parametrize(
    "names", [["conv1.weight", "bn1.weight"], ["patch_embed.proj.weight", "h.0.kqv.weight"]]
)
def test_unknown_layout_names_the_remedy(names: list[str], tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"a layout that is not known .*, such as '.*VIT_KEYS says which"
    ) as said:
        load({name: torch.zeros(4, 4) for name in names}, tmp_path, "vit_tiny_patch16_224")
    assert "\n" not in str(said.value)


def test_post_norm_is_not_taken_for_pre_norm(
    tmp_path: Path,
) -> None:
    """Check that the names and shapes are the same."""
    model = made(norm_first=False)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,num_heads=3,patch_size=4"
    with pytest.raises(CheckpointError, match="norm_order=pre"):
        load(model.state_dict(), tmp_path, given)
    assert_same_logits(
        load(model.state_dict(), tmp_path, f"{given},norm_order=post"), model, "post-norm"
    )


def test_assumptions_name_their_option(
    tmp_path: Path,
) -> None:
    model = made(width=192, hidden=768, depth=12)
    given = "vit_tiny_patch16_224,patch_size=4,act_layer=gelu"
    assert load(model.state_dict(), tmp_path, given).assumed == tuple(
        f"{value}, as vit_tiny_patch16_224 has it (VIT_ARCHITECTURE)"
        for value in ("num_heads=3", "norm_order=pre", "norm_eps=1e-06", "global_pool=token")
    )


@pytest.mark.parametrize(
    "given",
    [PLAIN, "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,norm_order=pre"],
)
def test_missing_head_must_be_stated(given: str, tmp_path: Path) -> None:
    model = made(hidden=192)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")
    }
    with pytest.raises(
        CheckpointError,
        match=r"no file says its num_classes: .*,num_classes=0 --preprocess \S+ \(.*without a head",
    ):
        load(state, tmp_path, given, labels=None)
    with pytest.raises(
        CheckpointError, match="says num_classes=5, but the file has no head: state num_classes=0"
    ):
        load(state, tmp_path, f"{given},num_classes=5")
    checkpoint = load(state, tmp_path, f"{given},num_classes=0", labels=None)
    assert checkpoint.labels == ()
    pixels = pictures(checkpoint)
    model.head = nn.Identity()
    with torch.inference_mode():
        assert (
            relative_error(checkpoint.build()(pixels).embeddings["head"], model(pixels)) < TOLERANCE
        )
    with pytest.raises(
        CheckpointError, match="says num_classes=0, but the file has a head of 5 classes: state"
    ):
        load(made().state_dict(), tmp_path, f"{given},num_classes=0")


def test_absent_parts_must_be_stated(tmp_path: Path) -> None:
    state = dict(made().state_dict())
    without = {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}
    with pytest.raises(CheckpointError, match="final_norm=false"):
        load(without, tmp_path, PLAIN)
    with pytest.raises(CheckpointError, match=r"final_norm=false, but 'norm\.weight' is there"):
        load(state, tmp_path, f"{PLAIN},final_norm=false")
    with pytest.raises(CheckpointError, match="no file says its fc_norm"):
        load(state, tmp_path, PLAIN.replace("token", "avg"))


@pytest.mark.parametrize("options", [{"no_embed_class": True}, {"init_values": 0.1}])
def test_tensors_tell_their_networks_sizes(options: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_classes": 5}
    model = timm().create_model("vit_tiny_patch16_224", **sizes, **options).eval()
    randomise(model)
    assert_same_logits(
        load(model.state_dict(), tmp_path, PLAIN), model, f"told by tensors: {options}"
    )


@pytest.mark.parametrize(("patch", "size"), [(16, 32), (32, 96)])
def test_torchvision_logits(
    patch: int, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = torchvision().models.VisionTransformer(size, patch, 2, 4, 48, 96, num_classes=7).eval()
    randomise(model)
    state = model.state_dict()
    # The names of the MLP's layers in releases before 2022.
    old = {
        n.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t
        for n, t in state.items()
    }
    save_file(state, tmp_path / "mine.safetensors")
    torch.save(old, tmp_path / "old.pth")
    options: dict[str, Any] = {
        "preprocess": preprocess_file(tmp_path, size, size),
        "labels": "numbers",
    }
    with pytest.raises(
        CheckpointError, match=r"no file says its num_heads: .* --architecture vit,num_heads=N"
    ):
        load_checkpoint(str(tmp_path / "mine.safetensors"), **options)
    checkpoint = load_checkpoint(
        str(tmp_path / "mine.safetensors"), architecture="vit,num_heads=4", **options
    )
    assert_same_logits(checkpoint, model, f"torchvision's class in another size, patch {patch}")
    monkeypatch.setitem(
        TORCHVISION, (48, patch, 2, 96), ("vit_b_16", 4)
    )  # the real sizes take seconds each
    for name in ("mine.safetensors", "old.pth"):
        checkpoint = load_checkpoint(str(tmp_path / name), **options)
        assert checkpoint.architecture == "vit_b_16"
        assert_same_logits(checkpoint, model, f"torchvision {name}, patch {patch}")


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_torchvisions_models_are_recognised(name: str) -> None:
    with torch.device("meta"):
        theirs = getattr(torchvision().models, name)()
    _, tensors = in_layout(theirs.state_dict(), SingleFile(Path(name), name))
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    sizes = (width, patch, len(theirs.encoder.layers), len(tensors["blocks.0.mlp.fc1.weight"]))
    assert TORCHVISION[sizes] == (name, theirs.encoder.layers[0].num_heads)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(theirs)


def test_presets_match_torchvision() -> None:
    presets = {
        (preset.size[0], preset.resize_size[0], preset.interpolation, preset.mean, preset.std): name
        for name, preset in PREPROCESS_PRESETS.items()
        if name.startswith("torchvision")
    }
    for enum in (
        "ViT_B_16_Weights",
        "ViT_B_32_Weights",
        "ViT_L_16_Weights",
        "ViT_L_32_Weights",
        "ViT_H_14_Weights",
    ):
        for weights in getattr(torchvision().models, enum):
            published = weights.transforms()
            sizes = published.crop_size[0], published.resize_size[0], published.interpolation.value
            assert (*sizes, tuple(published.mean), tuple(published.std)) in presets, weights


HEADS = (
    "heads",
    "heads.1",
    "heads.head",
    "head.1",
    "classifier",
    "classifier.1",
    "fc",
    "linear_head",
    "mlp_head.1",
)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_read_under_another_name(name: str, tmp_path: Path) -> None:
    model = made()
    state = {n.replace("head.", f"{name}."): t for n, t in model.state_dict().items()}
    assert_same_logits(load(state, tmp_path, PLAIN), model, f"head {name}")


def test_torchvision_models_take_a_new_head(tmp_path: Path) -> None:
    model = torchvision().models.VisionTransformer(32, 16, 2, 4, 48, 96).eval()
    for number, heads in enumerate(
        (nn.Linear(48, 3), nn.Sequential(nn.Dropout(), nn.Linear(48, 3)).eval())
    ):
        model.heads = heads
        randomise(model)
        preprocess = preprocess_file(tmp_path, 32, 32)
        checkpoint = load(model.state_dict(), tmp_path, "vit,num_heads=4", preprocess=preprocess)
        assert_same_logits(checkpoint, model, f"torchvision with heads {number}")


def test_a_likely_head_gets_its_key_map(tmp_path: Path) -> None:
    model = made()
    state = {n.replace("head.", "species.top."): t for n, t in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"'species.top.weight' \[5, 48\] is likely the head"
    ) as refusal:
        load(state, tmp_path)
    (tmp_path / "keys.toml").write_text(str(refusal.value).partition("(VIT_KEYS): ")[2])
    checkpoint = load(state, tmp_path, PLAIN, keys=str(tmp_path / "keys.toml"))
    assert_same_logits(checkpoint, model, "a head by its key map")


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_head_of_layers_can_be_left_out(library: str, tmp_path: Path) -> None:
    state = made().state_dict()
    given = PLAIN
    if library == "transformers":
        model = transformers_models.make("vit", tmp_path)
        state = model.state_dict()
        given = f"vit,num_heads={model.config.num_attention_heads}"
    width = len(state["norm.bias" if library == "timm" else "vit.layernorm.bias"])
    body = {name: tensor for name, tensor in state.items() if not re.match("head|class", name)}
    layers = {"classifier.0.weight": torch.zeros(9, width), "classifier.2.bias": torch.zeros(5)}
    layers["classifier.2.weight"] = torch.zeros(5, 9)
    with pytest.raises(CheckpointError, match=r"several layers, 'classifier.0.weight'") as refusal:
        load(body | layers, tmp_path, given)
    advice = str(refusal.value).partition("keys.toml: ")[2]
    assert re.search(r"convert FILE .*,num_classes=0 .*-o FOLDER, .* --probe --from FOLDER", advice)
    (tmp_path / "keys.toml").write_text(advice.partition(";")[0])
    keys = str(tmp_path / "keys.toml")
    size = model.config.image_size if library == "transformers" else 16
    preprocess = preprocess_file(tmp_path, size, size)
    backbone = load(
        body | layers,
        tmp_path,
        f"{given},num_classes=0",
        keys=keys,
        labels=None,
        preprocess=preprocess,
    )
    assert backbone.config.num_classes == 0


def test_unsupported_head_is_refused(tmp_path: Path) -> None:
    body = {
        name: tensor for name, tensor in made().state_dict().items() if not name.startswith("head.")
    }
    with pytest.raises(
        CheckpointError, match=r"'linear_head.weight' \[5, 240\] reads 5 x 48 features"
    ):
        load(body | {"linear_head.weight": torch.zeros(5, 240)}, tmp_path, PLAIN)


def test_norm_before_a_head_is_told(tmp_path: Path) -> None:
    state = made().state_dict()
    head = {
        "head.0.weight": torch.ones(48),
        "head.0.bias": torch.zeros(48),
        "head.1.weight": state.pop("head.weight"),
        "head.1.bias": state.pop("head.bias"),
    }
    with pytest.raises(
        CheckpointError,
        match=r"a norm, 'head.0.weight' \[48\], before its linear layer 'head.1.weight' \[5, 48\], "
        "and .* train --probe --from FOLDER",
    ):
        load(state | head, tmp_path)


def test_norm_in_a_head_may_be_the_final(tmp_path: Path) -> None:
    model = made()
    model.norm.eps = 1e-5  # torch's default, where the other norms have timm's
    state = {
        re.sub(r"^head\.", "classifier.1.", re.sub(r"^norm\.", "classifier.0.", name)): tensor
        for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError, match="this is the final norm") as refusal:
        load(state, tmp_path)
    (tmp_path / "keys.toml").write_text(str(refusal.value).partition("(VIT_KEYS): ")[2])
    checkpoint = load(state, tmp_path, PLAIN, keys=str(tmp_path / "keys.toml"))
    assert_same_logits(checkpoint, model, "a final norm in the head")


class LinearClassifier(nn.Module):
    """DINOv2's linear head of one layer (dinov2/hub/classifiers.py, `_LinearClassifierWrapper`)."""

    def __init__(self, registers: int) -> None:
        super().__init__()
        name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
        self.backbone = timm().create_model(
            name, embed_dim=48, depth=2, num_heads=3, img_size=42, num_classes=0
        )
        self.prefix = 1 + registers
        self.linear_head = nn.Linear(96, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.backbone.forward_features(pixels)
        logits: Tensor = self.linear_head(
            torch.cat((tokens[:, 0], tokens[:, self.prefix :].mean(dim=1)), dim=1)
        )
        return logits


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("pool", ["", ",global_pool=cls_mean"])
def test_dinov2s_linear_head_is_read(registers: int, pool: str, tmp_path: Path) -> None:
    model = LinearClassifier(registers).eval()
    randomise(model)
    name = "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2"
    given = f"{name},embed_dim=48,depth=2,num_heads=3,norm_order=pre{pool}"
    checkpoint = load(
        model.state_dict(), tmp_path, given, preprocess=preprocess_file(tmp_path, 42, 42)
    )
    assert checkpoint.vit.pool == "cls_mean"
    said = "global_pool=cls_mean, because the head reads 2 x 48 features (VIT_ARCHITECTURE)"
    assert (said in checkpoint.assumed) == (not pool)
    assert_same_logits(checkpoint, model, f"DINOv2's linear head, {registers} registers")
    if pool:
        return
    pytest.importorskip("openvino")
    predictor = Predictor(
        checkpoint, device="cpu", dtype="float32", compile_mode=MODES["openvino"], max_batch=2
    )
    images = np.random.default_rng(0).integers(0, 256, (2, 42, 42, 3), np.uint8)
    with torch.inference_mode():
        expected = model(Normalise(checkpoint.preprocess)(torch.from_numpy(images)))
    found = [
        outputs.logits for outputs in predictor.predict(images, RequestedOutputs(2, logits=True))
    ]
    assert relative_error(torch.from_numpy(np.array(found)), expected) < TOLERANCE


def test_a_network_of_timms_own_code_is_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    model = timm().create_model("convnext_atto", num_classes=5, **sizes).eval()
    randomise(model)
    file = tmp_path / "weights.pth"
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": state}, file)
    with pytest.raises(
        CheckpointError,
        match=r"no file says its preprocessing, labels: .*convnext_atto.*--labels n",
    ):
        load_checkpoint(str(file), architecture="convnext_atto")
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 32, 64), "labels": "numbers"}
    architecture = "convnext_atto,depths=[1,1,1,1],dims=[8,8,16,16]"
    checkpoint = load_checkpoint(str(file), architecture=architecture, **options)
    shown = pictures(checkpoint)
    with torch.inference_mode():
        logits = checkpoint.network()(shown).logits
        assert relative_error(logits, model(shown)) < TOLERANCE
    with pytest.raises(CheckpointError, match=r"weights.pth: missing key .* \(and \d+ more\)"):
        load_checkpoint(str(file), architecture="convnext_atto", **options)


def test_activation_is_a_setting(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(folders.tiny(), file)
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 16, 16), "labels": "numbers"}
    sizes = "patch_size=8,embed_dim=16,depth=2,num_heads=2,mlp_ratio=2,norm_order=pre"
    options["architecture"] = f"vit_tiny_patch16_224,{sizes}"
    assert not load_checkpoint(str(file), **options).head.independent
    assert load_checkpoint(str(file), **options, activation="sigmoid").head.independent
