"""Missing, damaged or hostile weights are refused in one line, and no code in them runs."""

import argparse
import json
import os
import pickle
import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.tensor_files import read_tensor_file
from model.errors import CheckpointError
from tests.model.checkpoint.folders import (
    CONFIG,
    FOLDERS,
    PREPROCESS,
    edit,
    native_folder,
    refusal,
    tiny,
)
from tests.model.checkpoint.fuzzing import FUZZ, TIMEOUT_SECONDS, right_or_refused

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)


BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_training_scripts_are_read(zipped: bool, tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "model": OrderedDict(
            view=BASE.transpose(0, 2),
            half=BASE.half(),
            brain=BASE.bfloat16(),
            empty=torch.zeros(0, 5),
        ),
        "args": argparse.Namespace(lr=0.1, out=Path("a")),
        "numbers": [
            np.float64(0.5),
            np.int64(3),
            np.float32(1),
            np.random.default_rng(0).random(3),
        ],
        "text": [
            "ä",
            b"bytes",
            None,
            True,
            2**70,
            (),
            {"a": {1, 2}},
            torch.Size([1]),
            torch.device("cpu"),
        ],
    }
    torch.save(held, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    read = read_tensor_file(tmp_path / "a.pth")
    assert all(torch.equal(read["model"][name], tensor) for name, tensor in held["model"].items())
    assert read["numbers"][:3] == [0.5, 3, 1]
    assert read["args"].lr == 0.1


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no weights (model.safetensors" in refusal(folder)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run!",))


def test_code_in_a_pickle_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(2), "evil": _Evil()}, file)
    with pytest.raises(
        CheckpointError,
        match=r"refused, it is not plain tensors: it holds the Python object [\w.]*print; no code",
    ):
        read_tensor_file(file)
    file.write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError):
        read_tensor_file(file)
    assert capsys.readouterr().out == ""


def unreadable(file: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_tensor_file(file)
    return str(refused.value)


def test_pickled_model_names_the_remedy(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "weights.pt")
    message = unreadable(tmp_path / "weights.pt")
    assert "it holds the Python object torch.nn.modules.linear.Linear" in message
    assert "torch.save(model.state_dict(), FILE), or convert" in message
    # torch's own message advises to disable its safety.
    assert not re.search("weights_only|safe_globals|trust", message)
    pickled = b"\x80\x02ctransformers.models.vit.modeling_vit\nViTForImageClassification\n)\x81."
    (tmp_path / "model.bin").write_bytes(pickled)
    message = unreadable(tmp_path / "model.bin")
    assert (
        "it holds the Python object transformers.models.vit.modeling_vit.ViTForImageClassification"
        in message
    )
    assert "model.save_pretrained(FOLDER)" in message


def test_loaded_weights_survive_their_file(
    tmp_path: Path,
) -> None:
    config = CONFIG.model_copy(update={"width": 128})
    checkpoint = Checkpoint(
        "a", "a", "vitserve", "a", config, PREPROCESS, ("a", "b", "c"), tiny(config)
    )
    native.write(tmp_path, checkpoint, dtype=torch.float32)
    model = load_checkpoint(str(tmp_path)).build()
    os.truncate(tmp_path / "model.safetensors", 9)  # SIGBUS if the file is mapped
    assert all(
        torch.equal(one, checkpoint.tensors[name]) for name, one in model.state_dict().items()
    )


def test_missing_shard_is_named_with_remedy(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-2-of-2.safetensors")}))
    assert (
        f"{index}: names model-2-of-2.safetensors, which is missing: copy or download the shard"
    ) in refusal(folder)


def test_wrong_index_of_shards_is_refused(
    tmp_path: Path,
) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")})
    )
    assert "'more' is in the index or in the shards, but not in both" in refusal(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../part.safetensors")}))
    assert "is not the name of a .safetensors file: the shards are in" in refusal(folder)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            0,
            1,
            -1,
            2,
            16,
            10**18,
            10**400,
            "\x1b",
            "gelu",
            "vit",
            [16, 16],
            [3, 16, 16],
            float("nan"),
        ]
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path of each value in a JSON value."""
    found = [at] if at else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


def changed(document: Any, data: st.DataObject, values: st.SearchStrategy[Any]) -> Any:
    """Return a JSON value with the value at one path removed or replaced."""
    *parents, last = data.draw(st.sampled_from(paths(document)))
    inside = document
    for key in parents:
        inside = inside[key]
    inside[last] = data.draw(values)
    if isinstance(inside, dict) and data.draw(st.booleans()):
        del inside[last]
    return document


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
def test_changed_config_is_refused_or_right(
    kind: str, file: str, data: st.DataObject, tmp_path: Path
) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    edit(folder / file, lambda config: changed(config, data, JSON))
    right_or_refused(folder)


@FUZZ
@given(data=st.data())
def test_changed_safetensors_header(data: st.DataObject, tmp_path: Path) -> None:
    weights = native_folder(tmp_path / "model") / "model.safetensors"
    whole = weights.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    types = st.sampled_from(["F16", "F64", "I8", "BOOL", "BF16", "F8_E4M3", "U64", [2**62, 2**62]])
    text = json.dumps(changed(json.loads(whole[8 : 8 + length]), data, JSON | types)).encode()
    size = struct.pack("<Q", data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1)))
    weights.write_bytes(size + text + whole[8 + length :])
    right_or_refused(weights.parent)
