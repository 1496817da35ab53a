"""Files of users are served exactly, or refused in one line with the remedy.

`pytest -s` prints the parity of each file and each refusal.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint.folders import FOLDERS
from tests.model.checkpoint.parity import assert_same_logits, preprocess_file, randomise
from tests.timm_reference import timm, transformers

State = dict[str, Tensor]
Network = Callable[[Tensor], Tensor]


class Brought(NamedTuple):
    """A file or folder that somebody brings, and the expected notes.

    Attributes:
        source: path of the file or folder.
        network: network that was saved.
        options: arguments of `load_checkpoint`.
    """

    source: Path
    network: Any
    options: dict[str, Any]


Maker = Callable[[Path], Brought]


def saved(
    pack: Callable[[nn.Module], Any] = nn.Module.state_dict,
    name: str = "weights.pth",
    architecture: str = PLAIN,
    **network: Any,
) -> Maker:
    """Return a function that saves `pack(network of 16 px)` with `torch.save`."""

    def make(folder: Path) -> Brought:
        model = made(**network)
        torch.save(pack(model), folder / name)
        size = network.get("size", 16)
        channels = network.get("channels", 3)
        preprocess = preprocess_file(folder, size, size, channels)
        options = {"architecture": architecture, "preprocess": preprocess, "labels": "numbers"}
        return Brought(folder / name, model, options)

    return make


def _lightning(model: nn.Module) -> dict[str, Any]:
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return {
        "state_dict": state | {"criterion.weight": torch.ones(5), "class_weights": torch.ones(5)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3, 3)}}}],
        "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
        "hyper_parameters": {"lr": np.float64(0.1)},
        "epoch": 3,
    }


def _training(model: nn.Module) -> dict[str, Any]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 9)
    return {
        "net": model.state_dict(),
        "optimizer": optimiser.state_dict(),
        "scheduler": schedule.state_dict(),
    }


def _pair(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Return a function that packs two copies, of which the first has the network's weights."""

    def pack(model: nn.Module) -> dict[str, Any]:
        copies: dict[str, Any] = {
            names[0]: model.state_dict(),
            names[1]: made(heads=1).state_dict(),
        }
        if not names[0].endswith("."):
            return copies
        return {
            prefix + name: tensor
            for prefix, state in copies.items()
            for name, tensor in state.items()
        }

    return pack


def _twin(model: nn.Module) -> dict[str, Any]:
    """Return the state of a LightningModule with an AveragedModel of its network.

    The averaged copy is served.
    """
    averaged = torch.optim.swa_utils.AveragedModel(model).state_dict()
    twin = {f"ema_model.{name}": tensor for name, tensor in averaged.items()}
    return {"state_dict": _lightning(made(heads=1))["state_dict"] | twin, "epoch": 3}


def _backbone_and_head(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {
        "backbone": {
            name: tensor for name, tensor in state.items() if not name.startswith("head.")
        },
        "fc": {name[5:]: tensor for name, tensor in state.items() if name.startswith("head.")},
    }


def _wrapped(model: nn.Module, pattern: str, replacement: str) -> dict[str, Any]:
    return {
        re.sub(pattern, replacement, name): tensor for name, tensor in model.state_dict().items()
    }


def _safetensors(folder: Path) -> Brought:
    made_ = saved()(folder)
    both = {f"model.{name}": tensor for name, tensor in made_.network.state_dict().items()}
    save_file(
        both | {f"ema.{name}": t + 0.01 for name, t in made(heads=1).state_dict().items()},
        folder / "b.safetensors",
    )
    (folder / "keys.toml").write_text('weights = "model"')
    return made_._replace(
        source=folder / "b.safetensors", options=made_.options | {"keys": str(folder / "keys.toml")}
    )


def _timm_wrapper(folder: Path) -> Brought:
    timm_ = timm()
    hub = transformers()
    pretrained = timm_.create_model("vit_tiny_patch16_224", depth=1).pretrained_cfg | {
        "input_size": (3, 48, 48)
    }
    config = hub.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 48, "depth": 1},
        pretrained_cfg=pretrained,
        id2label={0: "a", 1: "b", 2: "c"},
    )
    model = hub.TimmWrapperForImageClassification(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    return Brought(folder, lambda pixels: model(pixels).logits, {})


SERVED: Final[dict[str, tuple[Maker, str]]] = {
    "DistributedDataParallel": (saved(lambda model: nn.DataParallel(model).state_dict()), ""),
    "compile": (
        saved(lambda model: {f"_orig_mod.{n}": t for n, t in model.state_dict().items()}),
        "",
    ),
    "DDP of compile": (
        saved(lambda model: {f"module._orig_mod.{n}": t for n, t in model.state_dict().items()}),
        "",
    ),
    "compiled blocks": (
        saved(lambda m: _wrapped(m, r"^(blocks\.\d\.)", r"\1_orig_mod.")),
        "_orig_mod.",
    ),
    "checkpointed and sharded": (
        saved(
            lambda m: _wrapped(
                m, r"^(blocks\.\d\.)", r"\1_fsdp_wrapped_module._checkpoint_wrapped_module."
            )
        ),
        "_fsdp_wrapped_module., _checkpoint_wrapped_module.",
    ),
    "a backbone in parallel": (saved(lambda m: _wrapped(m, r"^(?!head)", "backbone.module.")), ""),
    "Lightning": (saved(_lightning, "epoch=3.ckpt"), "criterion.weight"),
    "an architecture with spaces": (saved(architecture=PLAIN.replace(",", ", ")), ""),
    "Namespace and NumPy": (
        saved(
            lambda m: {
                "net": m.state_dict(),
                "args": argparse.Namespace(lr=0.1),
                "acc": np.float32(1),
                "n": np.int64(3),
            }
        ),
        "args, acc, n",
    ),
    "SWA": (
        saved(lambda model: torch.optim.swa_utils.AveragedModel(model).state_dict()),
        "n_averaged",
    ),
    "optimiser and scheduler beside": (saved(_training), "optimizer, scheduler"),
    "a chain of prefixes": (
        saved(
            lambda m: {
                "state_dict": {f"student_net.model.vit.{n}": t for n, t in m.state_dict().items()}
            }
        ),
        "removed from names of tensors: state_dict.student_net.model.vit.",
    ),
    "a leftover of a library": (
        saved(lambda m: m.state_dict() | {"embeddings.position_ids": torch.arange(5)}),
        "left out, because not part of the network: embeddings.position_ids",
    ),
    ".pth.tar": (
        saved(
            lambda m: {"epoch": 9, "state_dict": m.state_dict(), "best_acc1": torch.tensor(81.0)},
            "best.pth.tar",
        ),
        "best_acc1",
    ),
    "one shard of one": (saved(name="model-00001-of-00001.bin"), ""),
    ".pkl": (saved(name="weights.pkl"), ""),
    "EMA pair by prefixes": (saved(_pair("ema_model.", "model.")), ""),
    "Lightning with an averaged twin": (saved(_twin, "epoch=3.ckpt"), "ema_model.n_averaged"),
    "EMA pair in safetensors": (_safetensors, ""),
    "student and teacher": (saved(_pair("teacher", "student")), ""),
    "backbone and head in one file": (saved(_backbone_and_head), ""),
    "backbone under a prefix": (
        saved(
            lambda m: {
                n if n.startswith("head.") else f"backbone.{n}": t
                for n, t in m.state_dict().items()
            }
        ),
        "",
    ),
    "linear patches under a prefix": (
        saved(
            lambda m: {
                n if n.startswith("head.") else f"backbone.{n}": t.flatten(1) if t.ndim == 4 else t
                for n, t in m.state_dict().items()
            },
            architecture=f"{PLAIN},patch_order=channels_first",
        ),
        "",
    ),
    "timm_wrapper": (_timm_wrapper, ""),
    "grey, 28 px in patches of 4": (saved(size=28, channels=1), ""),
    "post-norm": (saved(architecture=PLAIN.replace("pre", "post"), norm_first=False), ""),
}


@pytest.mark.parametrize("kind", SERVED)
def test_brought_file_is_served_exactly(kind: str, tmp_path: Path) -> None:
    make, note = SERVED[kind]
    source, network, options = make(tmp_path)
    checkpoint = load_checkpoint(str(source), **options)
    assert_same_logits(checkpoint, network, kind)
    assert note in " ".join(checkpoint.notes)


def _text(name: str, content: str = "") -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return make


def _held(pack: Callable[[nn.Module], Any], name: str = "weights.pth") -> Callable[[Path], Path]:
    return lambda folder: saved(pack, name)(folder).source


def _head(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("head.")}


def _lora() -> dict[str, Tensor]:
    pair = {"A": torch.zeros(2, 48), "B": torch.zeros(48, 2)}
    return {
        f"base_model.model.blocks.0.attn.proj.lora_{part}.weight": tensor
        for part, tensor in pair.items()
    }


def _quantised(prepare: Callable[[nn.Module], Any]) -> Callable[[Path], Path]:
    """Return a function that saves a network prepared or converted by torch's quantisation."""

    def pack(model: nn.Module) -> Any:
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
        return prepare(model).state_dict()

    return _held(pack)


def _with_parts(**parts: Tensor) -> Callable[[Path], Path]:
    """Return a function that saves a network with these parts in place of its layers' weights."""

    def pack(model: nn.Module) -> dict[str, Tensor]:
        weights = {f"{name}." for name, layer in model.named_modules() if type(layer) is nn.Linear}
        state = model.state_dict()
        kept = {name: value for name, value in state.items() if name[:-6] not in weights}
        return kept | {layer + part: value for layer in weights for part, value in parts.items()}

    return _held(pack)


def _script(folder: Path) -> Path:
    # Many layers, because TorchScript compresses its code and torch.save does not.
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(30)))
    torch.jit.trace(layers, torch.zeros(1, 2)).save(str(folder / "net.pt"))
    return folder / "net.pt"


def _weights_in_a_subfolder(folder: Path) -> Path:
    (folder / "data").mkdir()
    (folder / "data" / "model.pth").write_text("x")
    return folder


def _of_accelerate(folder: Path) -> Path:
    for name in ("optimizer.bin", "pytorch_model.bin", "random_states_0.pkl", "scheduler.bin"):
        torch.save({}, folder / name)
    return folder


def _pointer_in_a_folder(folder: Path) -> Path:
    (FOLDERS["huggingface"](folder) / "model.safetensors").write_text(POINTER)
    return folder


POINTER: Final = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 343223\n"
QUANTISED: Final = (
    "quantised weights are not read: save floating-point weights, .* that was quantised"
)
BUFFER: Final = {"prototypes": torch.ones(3, 4)}

REFUSED: Final[dict[str, tuple[Callable[[Path], Path], str]]] = {
    "LFS pointer": (
        _text("weights.pth", POINTER),
        "a pointer of Git LFS and not the file itself: run git lfs pull in its folder",
    ),
    "LFS pointer in a folder": (_pointer_in_a_folder, "a pointer of Git LFS"),
    "LFS pointer of safetensors": (_text("model.safetensors", POINTER), "a pointer of Git LFS"),
    "TorchScript": (_script, r"torch\.save\(torch\.jit\.load\('net\.pt'\)\.state_dict\(\), FILE\)"),
    ".pt2": (
        _text("net.pt2"),
        r"torch\.save\(torch\.export\.load\('net\.pt2'\)\.state_dict, FILE\)",
    ),
    "ONNX": (
        _text("net.onnx"),
        r"a graph made from a network, .* torch\.save\(model\.state_dict\(\), FILE\)",
    ),
    "TorchServe": (_text("net.mar"), "an archive: unpack it"),
    "a picture": (_text("dog.JPG"), "a picture, not weights: `vitserve classify` classifies it"),
    "a zip": (_text("model.zip"), "an archive: unpack it, and give the folder"),
    "Keras": (_text("net.keras"), "weights of TensorFlow, Keras or Flax: .*from_tf=True"),
    "Flax": (_text("flax_model.msgpack"), "from_flax=True"),
    "GGUF": (_text("net.gguf"), "give the model that it was converted from"),
    "a distributed checkpoint": (
        _text("__0_0.distcp"),
        "dcp_to_torch FOLDER FILE, and give that file",
    ),
    "a shard": (
        _held(nn.Module.state_dict, "model-00001-of-00002.bin"),
        "one shard of several: give the folder that holds all of them",
    ),
    "weights in a subfolder": (
        _weights_in_a_subfolder,
        r"it holds data/model\.pth: give .*/data/model\.pth",
    ),
    "a renamed GGUF": (_text("net.pth", "GGUF"), "give the model that it was converted from"),
    "TensorRT": (_text("net.plan"), "give the model that it was exported from"),
    "a web page": (_text("net.pth", "<!DOCTYPE html>"), "a web page, .* download the file again"),
    "an empty file": (_text("net.pth", ""), "an empty file: copy or download it again"),
    "no suffix": (_text("net"), "rename the file to say what it is"),
    "labels": (_text("labels.txt"), r"--labels 'labels\.txt' \(VIT_LABELS\)"),
    "OpenVINO IR": (_text("net.xml", "<net/>"), "a graph made from a network"),
    "a key map": (
        _text("keys.toml"),
        r"give a map of keys as --keys 'keys\.toml' \(VIT_KEYS\)",
    ),
    "a config": (_text("config.json"), "give the folder that holds it and the weights"),
    "a head alone": (
        _held(_head),
        r"a head alone, 'weight' \[\d+, \d+\], 'bias' .* of the whole model",
    ),
    "a head of two layers": (
        _held(
            lambda model: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).state_dict()
        ),
        r"a head alone, '0\.weight' \[4, 8\]",
    ),
    "a head in a folder": (
        lambda folder: _held(_head)(folder).parent,
        r"it holds weights\.pth: give .*/weights\.pth; else expected config\.json",
    ),
    "a folder of accelerate": (
        _of_accelerate,
        r"it holds pytorch_model\.bin: give .*/pytorch_model\.bin; else",
    ),
    "one part of DeepSpeed's": (
        _held(lambda m: {"module": {"w": torch.empty(0)}, "ds_version": "1"}),
        r"run python zero_to_fp32\.py \. OUT in its folder",
    ),
    "an adapter alone": (
        _held(lambda model: _lora(), "adapter_model.bin"),
        r"a LoRA adapter without its base, 2 of 2 .*--base CHECKPOINT \(VIT_BASE\)",
    ),
    "an adapter alone in a folder": (
        lambda folder: _held(lambda model: _lora(), "adapter_model.bin")(folder).parent,
        r"adapter_model\.bin is an adapter without its adapter_config\.json: add that file to the "
        "folder",
    ),
    "an adapter beside its network": (
        _held(lambda model: model.state_dict() | _lora()),
        r"a LoRA adapter not merged, 2 of .* after merge_and_unload",
    ),
    "a buffer beside its network": (
        _held(lambda model: {f"net.{name}": t for name, t in model.state_dict().items()} | BUFFER),
        r"'prototypes' is not a part of it: .* weights = \"net\" into the file of --keys",
    ),
    "several layers beside its network": (
        _held(
            lambda model: {
                "model": {f"0.model.{name}": t for name, t in model.state_dict().items()}
                | {f"1.{index}.weight": torch.ones(8, 8) for index in range(10)}
            }
        ),
        r"'1.0.weight' to '1.9.weight' are its head, .* weights = \"0.model\" into the file",
    ),
    "a projection head of DINO": (
        _held(lambda model: model.state_dict() | {"head.last_layer.weight_g": torch.ones(8, 1)}),
        "projection head of a training without labels, .* save the backbone of the copy",
    ),
    "an old weight norm": (
        _held(lambda model: model.state_dict() | {"fc.weight_g": torch.ones(8, 1)}),
        r"weights in two factors are not read: .*utils\.remove_weight_norm\(layer\)",
    ),
    "tensors without numbers": (
        _held(lambda model: {n: t.to("meta") for n, t in model.state_dict().items()}),
        "is on the meta device, without its numbers: load the weights where it was made",
    ),
    "dynamic quantisation": (
        _quantised(lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear})),
        r"holds 'blocks\S+': quantised weights are not read: save floating-point",
    ),
    "dynamic quantisation to float16": (
        _quantised(
            lambda model: torch.ao.quantization.quantize_dynamic(model, dtype=torch.float16)
        ),
        QUANTISED,
    ),
    "quantisation-aware training": (
        _quantised(lambda model: torch.ao.quantization.prepare_qat(model.train())),
        QUANTISED,
    ),
    "calibration of a quantisation": (
        _quantised(torch.ao.quantization.prepare),
        QUANTISED,
    ),
    "tensors of torch's quantised types": (
        _held(
            lambda model: {
                name: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)
                for name, tensor in model.state_dict().items()
            }
        ),
        QUANTISED,
    ),
    "integers with a scale": (
        _with_parts(weight=torch.ones(4, 4, dtype=torch.int8), scale=torch.ones(4)),
        QUANTISED,
    ),
    "HQQ": (_with_parts(W_q=torch.ones(4, 4, dtype=torch.uint8), meta=torch.ones(1)), QUANTISED),
    "AQLM": (_with_parts(codes=torch.ones(4, 4), codebooks=torch.ones(4, 4)), QUANTISED),
    "Brevitas": (
        _with_parts(**{"weight": torch.ones(4, 4), "weight_quant.tensor_quant.x": torch.ones(1)}),
        QUANTISED,
    ),
    "NNCF": (
        _with_parts(**{"weight": torch.ones(4, 4), "pre_ops.0.op.scale": torch.ones(1)}),
        QUANTISED,
    ),
    "ExecuTorch": (_text("net.pte"), "give the model that it was exported from"),
    "a pickled module": (_held(lambda model: model), r"torch\.save\(model\.state_dict\(\), "),
    "two copies, of which none is averaged": (
        _held(_pair("first", "second")),
        'VIT_KEYS: weights = "first"',
    ),
    "a backbone without a head": (
        _held(lambda model: _backbone_and_head(model)["backbone"]),
        "num_classes=0 is a network without a head, which gives embeddings",
    ),
    "the numbers of an IR": (
        _text("net.bin", "no pickle"),
        "damaged, or of a program other than torch",
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_brought_file_is_refused_with_remedy(kind: str, tmp_path: Path) -> None:
    make, line = REFUSED[kind]
    source = make(tmp_path)
    preprocess = preprocess_file(tmp_path, 16, 16)
    with pytest.raises(CheckpointError, match=line) as refusal:
        load_checkpoint(
            str(source), architecture=None if source.is_dir() else PLAIN, preprocess=preprocess
        )
    print(f"{kind}: {refusal.value}".replace(str(tmp_path), "…"))  # noqa: T201 - read with pytest -s
    assert "\n" not in str(refusal.value)
    assert str(source) in str(refusal.value)


def test_a_scale_of_scores_is_not_left_out(tmp_path: Path) -> None:
    scaled = saved(lambda model: model.state_dict() | {"temperature": torch.tensor(2.0)})
    source, _, options = scaled(tmp_path)
    with pytest.raises(CheckpointError, match=r"unexpected key 'temperature': .*--keys FILE"):
        load_checkpoint(str(source), **options)


def test_averaged_copy_is_served(tmp_path: Path) -> None:
    source, model, options = saved(_pair("model_ema", "model"))(tmp_path)
    checkpoint = load_checkpoint(str(source), **options)
    assert_same_logits(checkpoint, model, "averaged")
    assert checkpoint.assumed == (
        'weights: model_ema, and not model (weights = "model" in the file of VIT_KEYS)',
    )
    (tmp_path / "keys.toml").write_text('weights = "teacher"')
    with pytest.raises(
        CheckpointError, match="holds no copy of a network that is called 'teacher'"
    ):
        load_checkpoint(str(source), **options, keys=str(tmp_path / "keys.toml"))


HINTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "statistics": (
        lambda state: state | {"input_mean": torch.zeros(3), "input_std": torch.ones(3)},
        r"'input_mean' .*: pixel statistics .* write them as mean and std into the file of --prep",
    ),
    "a normalising layer": (
        lambda state: {"0.mean": torch.zeros(1, 3, 1, 1)} | {f"1.{k}": v for k, v in state.items()},
        r"'0.mean' is not a part of it: pixel statistics",
    ),
    "a temperature": (
        lambda state: state | {"temperature": torch.tensor(2.0)},
        "it changes the logits, and is not read: fit a temperature with vitserve calibrate",
    ),
    "a batch norm two steps before the layer": (
        lambda state: {
            **{name: tensor for name, tensor in state.items() if "head" not in name},
            "head.0.running_mean": torch.zeros(48),
            "head.0.running_var": torch.ones(48),
            "head.2.weight": state["head.weight"],
            "head.2.bias": state["head.bias"],
        },
        r"the head has a norm, 'head.0.running_mean' \[48\], before its linear layer",
    ),
    "the scale of a cosine classifier": (
        lambda state: state | {"scale": torch.tensor(30.0)},
        "unexpected key 'scale': it changes the logits, and is not read",
    ),
    "no first block": (
        lambda state: {name: tensor for name, tensor in state.items() if "blocks.0" not in name},
        r"missing key 'blocks.0.attn.qkv.weight': save all of model.state_dict",
    ),
    "a flat token": (
        lambda state: state | {"pos_embed": state["pos_embed"].reshape(1, 17, 6, 8)},
        "expected 3 dimensions that are not empty: reshape it where it was made",
    ),
    "a mask": (
        lambda state: state | {"head.weight_orig": state["head.weight"]},
        r"'head.weight_orig': weights with a mask .*prune.remove",
    ),
    "a head beside two backbones": (
        lambda state: {
            **{f"backbone.{k}": v for k, v in state.items() if "head" not in k},
            **{f"momentum_backbone.{k}": v for k, v in state.items() if "head" not in k},
            "classifier.weight": state["head.weight"],
            "classifier.bias": state["head.bias"],
        },
        r"holds the backbones .*, and beside them 'classifier.weight' \[5, 48\], likely a head",
    ),
}


@pytest.mark.parametrize("case", HINTS)
def test_parts_that_change_scores_are_named(case: str, tmp_path: Path) -> None:
    change, message = HINTS[case]
    with pytest.raises(CheckpointError, match=message):
        load(change(made().state_dict()), tmp_path, PLAIN)


@pytest.mark.parametrize(
    "others",
    [
        {"ema": {"decay": 0.9, "shadow_params": [torch.zeros(2)]}},
        {"callbacks": {"EMA": {"ema_state_dict": {}}}},
        {"optimizer_states": [{"state": {}, "ema": [torch.zeros(2)]}]},
    ],
)
def test_averages_that_are_not_read_are_told(others: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = load({"model": made().state_dict()} | others, tmp_path, PLAIN)
    [assumed] = [text for text in checkpoint.assumed if text.startswith("weights")]
    assert "the raw ones, because" in assumed


def test_an_absent_average_is_not_told(tmp_path: Path) -> None:
    checkpoint = load({"model": made().state_dict(), "ema": None}, tmp_path, PLAIN)
    assert not any(text.startswith("weights") for text in checkpoint.assumed)


@pytest.mark.parametrize("affine", [False, True])
def test_a_batch_norm_of_the_head_is_folded(affine: bool, tmp_path: Path) -> None:
    model = made()
    norm = nn.BatchNorm1d(48, affine=affine, eps=1e-5 if affine else 1e-6)
    randomise(norm)
    norm.running_mean = torch.linspace(-1, 1, 48)
    norm.running_var = torch.linspace(0.1, 3, 48)
    model.head = nn.Sequential(norm, model.head).eval()
    checkpoint = load(model.state_dict(), tmp_path, PLAIN)
    assert_same_logits(checkpoint, model, f"batch norm, affine={affine}")
    assert any("folded into the layer" in text for text in checkpoint.assumed)


def test_maes_decoder_is_left_out(tmp_path: Path) -> None:
    state = {name: t for name, t in made().state_dict().items() if not name.startswith("head.")}
    decoder = {"decoder_embed.weight": torch.ones(32, 48), "decoder_pos_embed": torch.ones(1, 5, 3)}
    checkpoint = load({"model": state | decoder}, tmp_path, f"{PLAIN},num_classes=0", labels=None)
    assert checkpoint.tensors.keys() == state.keys()
    assert any("left out" in note and "decoder_embed.weight" in note for note in checkpoint.notes)


def test_stages_are_not_a_network_in_a_file(tmp_path: Path) -> None:
    state = {f"layers.{stage}.{n}": t for stage in (0, 1) for n, t in made().state_dict().items()}
    with pytest.raises(CheckpointError, match="name it with VIT_ARCHITECTURE"):
        load(state | {"norm.weight": torch.ones(48)}, tmp_path, PLAIN)


def test_arrays_with_timms_names_are_read(tmp_path: Path) -> None:
    brought = saved()(tmp_path)
    arrays = {name: tensor.numpy() for name, tensor in brought.network.state_dict().items()}
    np.savez(tmp_path / "weights.npz", **arrays)
    checkpoint = load_checkpoint(str(tmp_path / "weights.npz"), **brought.options)
    assert_same_logits(checkpoint, brought.network, "timm's names in .npz")
