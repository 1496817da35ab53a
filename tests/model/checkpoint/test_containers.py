"""The files that training code leaves behind, and what is in them beside the weights."""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.folders import FOLDERS
from tests.model.checkpoint.parity import assert_same_logits, preprocess_file
from tests.model.checkpoint.test_wild import PLAIN, load, made

State = dict[str, Tensor]


def _backbone_and_head(state: State, head: str) -> State:
    return {(head + n[4:]) if n.startswith("head.") else f"backbone.{n}": t for n, t in state.items()}


CONTAINERS: dict[str, tuple[str, Callable[[State], Any]]] = {
    "lightning": (
        "epoch=3.ckpt",
        lambda s: {
            "state_dict": {f"model.{n}": t for n, t in s.items()} | {"criterion.weight": torch.ones(5)},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3, 3)}}}],
            "callbacks": {"ModelCheckpoint": {"best_model_score": torch.tensor(0.5)}},
            "hyper_parameters": {"lr": np.float64(0.1)},
            "epoch": 3,
        },
    ),
    "pth.tar": ("model_best.pth.tar", lambda s: {"epoch": 9, "state_dict": s, "best_acc1": torch.tensor(81.0)}),
    "pkl": ("weights.pkl", lambda s: s),
    "Namespace and NumPy": (
        "train.pth",
        lambda s: {"net": s, "args": argparse.Namespace(lr=0.1), "acc": np.float32(0.9), "n": np.int64(3)},
    ),
    "any key": ("a.pth", lambda s: {"my_weights": s, "optimizer": {"state": {}, "param_groups": []}}),
    "model_state": ("b.pth", lambda s: {"model_state": s}),
    "DDP of compile": ("c.pth", lambda s: {f"module._orig_mod.{n}": t for n, t in s.items()}),
    "SWA": ("swa.pth", lambda s: {"n_averaged": torch.tensor(5)} | {f"module.{n}": t for n, t in s.items()}),
    "a chain": ("d.pth", lambda s: {"state_dict": {f"student_net.model.vit.{n}": t for n, t in s.items()}}),
    "backbone and head": ("e.pth", lambda s: _backbone_and_head(s, "classifier")),
    "backbone and head in two": (
        "f.pth",
        lambda s: {
            "backbone": {n: t for n, t in s.items() if not n.startswith("head.")},
            "fc": {n[5:]: t for n, t in s.items() if n.startswith("head.")},
        },
    ),
    "metrics": (
        "g.ckpt",
        lambda s: {"state_dict": {f"net.{n}": t for n, t in s.items()} | {"loss_fn.w": torch.ones(2)}},
    ),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_a_container_is_read_and_what_is_left_aside_is_said(case: str, tmp_path: Path) -> None:
    model = made()
    name, pack = CONTAINERS[case]
    checkpoint = load(pack(dict(model.state_dict())), tmp_path, PLAIN, name)
    assert_same_logits(checkpoint, model, case)
    aside = {
        "lightning": "criterion.weight", "SWA": "n_averaged", "metrics": "loss_fn.w", "any key": "optimizer",
        "Namespace and NumPy": "args, acc, n",
    }  # fmt: skip
    assert (aside[case] in " ".join(checkpoint.notes)) if case in aside else True


def test_a_folder_of_a_backbone_and_its_head(tmp_path: Path) -> None:
    model = made()
    state = dict(model.state_dict())
    torch.save({n: t for n, t in state.items() if not n.startswith("head.")}, tmp_path / "backbone.pth")
    torch.save(nn.Linear(48, 5).state_dict() | {n[5:]: state[n] for n in state if "head." in n}, tmp_path / "head.pth")
    torch.save({"state": {}}, tmp_path / "optimizer.pt")
    options = {"architecture": PLAIN, "labels": "numbers", "preprocess": preprocess_file(tmp_path, 16, 16)}
    assert_same_logits(load_checkpoint(str(tmp_path), **options), model, "backbone + head")  # type: ignore[arg-type]


def test_a_head_beside_a_model_that_has_one_is_not_chosen_silently(tmp_path: Path) -> None:
    state = dict(made().state_dict())
    torch.save(state, tmp_path / "backbone.pth")
    torch.save(nn.Linear(48, 5).state_dict(), tmp_path / "head.pth")
    with pytest.raises(
        CheckpointError, match=r"has a head of its own, 'head\.weight', and head\.pth beside it holds an"
    ):
        load_checkpoint(str(tmp_path), architecture=PLAIN)


@pytest.mark.parametrize(
    ("pack", "fitting", "others"),
    [
        (lambda s: s, ["raw"], ["ema", "student", "teacher", "state_dict"]),
        (lambda s: {"state_dict": s}, ["raw"], ["ema", "teacher"]),
        (lambda s: {"model_ema": s}, ["ema", "model_ema"], ["raw", "model"]),
        (lambda s: {"state_dict": {f"teacher.backbone.{n}": t for n, t in s.items()}}, ["teacher"], ["student", "ema"]),
        (lambda s: {f"ema_model.{n}": t for n, t in s.items()} | {"loss.w": torch.ones(2)}, ["ema"], ["raw"]),
    ],
)
def test_the_only_copy_is_read_only_as_what_it_is(
    pack: Callable[[State], Any], fitting: list[str], others: list[str], tmp_path: Path
) -> None:
    model = made()
    held = pack(dict(model.state_dict()))
    for weights in fitting:
        assert_same_logits(load(held, tmp_path, PLAIN, weights=weights), model, weights)
    for weights in others:
        with pytest.raises(
            CheckpointError, match=f"holds one copy of a network.*, and none that is called '{weights}'"
        ):
            load(held, tmp_path, PLAIN, weights=weights)


@pytest.mark.parametrize(("option", "message"), [("weights", "one copy of a network is read"), ("keys", "VIT_KEYS is")])
def test_options_of_state_dicts_are_refused_beside_a_config(option: str, message: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {option: "ema"}
    for kind, folder in FOLDERS.items():
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(str(folder(tmp_path / kind)), **options)


def test_an_archive_of_torchserve_is_read_without_its_code(tmp_path: Path) -> None:
    model = made()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    names = {str(i): [f"n{i}", f"label {i}"] for i in range(5)}
    with zipfile.ZipFile(tmp_path / "model.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "weights.pth", "weights.pth")
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": {"serializedFile": "weights.pth"}}))
        archive.writestr("index_to_name.json", json.dumps(names))
        archive.writestr("handler.py", "raise SystemExit('run!')")
    preprocess = preprocess_file(tmp_path, 16, 16)
    checkpoint = load_checkpoint(str(tmp_path / "model.mar"), architecture=PLAIN, preprocess=preprocess)
    assert checkpoint.labels == tuple(f"label {i}" for i in range(5))
    assert_same_logits(checkpoint, model, ".mar")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 343223\n"


@pytest.mark.parametrize(
    ("name", "content", "advice"),
    [
        ("weights.pth", POINTER, "a pointer of Git LFS and not the file itself: run git lfs pull beside it"),
        ("model.safetensors", POINTER, "a pointer of Git LFS"),
        ("net.onnx", "", "a graph made from a network, .* torch.save\\(model.state_dict\\(\\), FILE\\)"),
        ("net.xml", "", "a graph made from a network"),
        ("net.pt2", "", "torch.save\\(torch.export.load\\('net.pt2'\\).state_dict, FILE\\)"),
    ],
)
def test_a_file_of_another_kind_says_how_to_get_at_the_weights(
    name: str, content: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=advice) as refusal:
        load_checkpoint(str(tmp_path / name), architecture=PLAIN)
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_says_how_to_get_at_the_weights(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "net.pt"))
    with pytest.raises(CheckpointError, match=r"torch\.save\(torch\.jit\.load\('net\.pt'\)\.state_dict\(\), FILE\)"):
        load_checkpoint(str(tmp_path / "net.pt"))


def test_a_pointer_in_a_folder_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTForImageClassification"]}))
    (tmp_path / "model.safetensors").write_text(POINTER)
    from model.checkpoint.files import Folder

    with pytest.raises(CheckpointError, match="a pointer of Git LFS"):
        Folder(tmp_path, str(tmp_path)).tensors()


def test_an_averaged_copy_in_safetensors_is_chosen(tmp_path: Path) -> None:
    raw, averaged = made(), made(heads=3)
    both = {f"model.{n}": t for n, t in raw.state_dict().items()}
    both |= {f"ema.{n}": t + 0.01 for n, t in averaged.state_dict().items()}
    save_file(both, tmp_path / "both.safetensors")
    options = {"architecture": PLAIN, "labels": "numbers", "preprocess": preprocess_file(tmp_path, 16, 16)}
    checkpoint = load_checkpoint(str(tmp_path / "both.safetensors"), weights="raw", **options)  # type: ignore[arg-type]
    assert_same_logits(checkpoint, raw, "raw of two in safetensors")
