"""Hostile checkpoints, each read in a process of its own and measured; damaged ones, which are refused or right."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import select
import shutil
import struct
import time
import traceback
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.fuzz.mutation import case, damaged
from tests.fuzz.tally import Tally
from tests.model.checkpoint.folders import adapter_folder, huggingface_folder, native_folder, timm_folder, tiny
from tests.model.checkpoint.test_jax_npz import jax_arrays

KIND: Final = "checkpoints"
MAX_SECONDS: Final = 10.0
"""Of processor time for one file."""
MAX_GROWTH: Final = 200 << 20
"""Bytes of memory for one file, beside sixteen times its size on the disk: JSON takes so many as Python's objects."""
_PATIENCE: Final = 60.0

Source = tuple[Path, dict[str, Any]]
"""What is read, and with which options."""
PLAIN: Final = {
    "architecture": "vit,num_heads=2,norm_order=pre,act_layer=gelu,norm_eps=1e-6,global_pool=token",
    "labels": "numbers",
    "preprocess": '{"size": [16, 16], "resize": "squash", "resize_size": [16, 16], "interpolation": "bilinear", '
    '"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}',
}
Maker = Callable[[Path], Path]
MAKERS: Final[dict[str, Callable[[Path], Source]]] = {}


def hostile(make: Maker) -> Maker:
    """Name a maker of a file or folder that is to be refused, within the bounds."""
    MAKERS[make.__name__.replace("_", " ")] = lambda folder: (make(folder), {})
    return make


def plain(make: Maker) -> Maker:
    """Name a maker of a state dict, which is read with the options of one."""
    MAKERS[make.__name__.replace("_", " ")] = lambda folder: (make(folder), PLAIN)
    return make


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def _storage(count: int, key: str, view: bytes) -> bytes:
    return (
        b"(" + _text("storage") + b"ctorch\nFloatStorage\n" + _text(key) + _text("cpu") + _number(count) + view + b"tQ"
    )


def _tensor(count: int, size: tuple[int, ...], stride: tuple[int, ...], view: bytes = b"") -> bytes:
    numbers = [b"(" + b"".join(map(_number, each)) + b"t" for each in (size, stride)]
    head = b"ctorch._utils\n_rebuild_tensor_v2\n(" + _storage(count, "0", view) + _number(0)
    return head + b"".join(numbers) + b"\x89ccollections\nOrderedDict\n)RtR"


def _call(name: str, *arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def _mapping(**items: bytes) -> bytes:
    return b"}(" + b"".join(_text(key) + value for key, value in items.items()) + b"u"


def _zipped(folder: Path, steps: bytes, **storages: bytes) -> Path:
    """A file as torch writes it, of a pickle made by hand."""
    with zipfile.ZipFile(folder / "weights.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + steps + b".")
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key.removeprefix('s')}", data)
        archive.writestr("archive/version", "3\n")
    return folder / "weights.pth"


def _legacy(folder: Path, steps: bytes, end: bytes) -> Path:
    """A file as torch wrote it before 2020, of a pickle made by hand."""
    parts: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]
    data = b"".join(pickle.dumps(part, 2) for part in parts) + b"\x80\x02" + steps + b"." + end
    (folder / "weights.pth").write_bytes(data)
    return folder / "weights.pth"


def _packed(folder: Path, name: str = "weights.pth") -> Path:
    torch.save({"head.weight": torch.zeros(150 << 20, dtype=torch.uint8)}, folder / "plain")
    with (
        zipfile.ZipFile(folder / "plain") as archive,
        zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed,
    ):
        for part in archive.namelist():
            packed.writestr(part, archive.read(part))
    (folder / "plain").unlink()
    return folder / name


@plain
def pth_packed(folder: Path) -> Path:
    return _packed(folder)


@plain
def pth_packed_behind_a_false_end(folder: Path) -> Path:
    file = _packed(folder)
    with file.open("ab") as end:
        end.write(b"PK\5\6" + bytes(17))
    return file


@plain
def pth_legacy_storage_larger_than_the_file(folder: Path) -> Path:
    steps = _mapping(**{"head.weight": _tensor(10**9, (10**5, 10**4), (10**4, 1), view=b"N")})
    return _legacy(folder, steps, pickle.dumps(["0"], 2) + struct.pack("<q", 10**9) + bytes(100))


def _meta(shape: tuple[int, ...]) -> bytes:
    numbers = b"(" + b"".join(map(_number, shape)) + b"t"
    return _call("torch._utils._rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", numbers, numbers, b"\x89")


@plain
def pth_meta_tensors(folder: Path) -> Path:
    return _zipped(folder, _mapping(**{name: _meta(tuple(t.shape)) for name, t in tiny().items()}))


@plain
def pth_sparse_tensors(folder: Path) -> Path:
    size = (10**5, 10**5)
    empty = torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), size, check_invariants=False)
    torch.save({**tiny(), "head.weight": empty}, folder / "weights.pth")
    return folder / "weights.pth"


@plain
def pth_quantised_tensors(folder: Path) -> Path:
    weight = torch.quantize_per_tensor(tiny()["head.weight"], 0.1, 0, torch.qint8)
    torch.save({**tiny(), "head.weight": weight}, folder / "weights.pth")
    return folder / "weights.pth"


@plain
def pth_complex_tensors(folder: Path) -> Path:
    torch.save({**tiny(), "head.weight": torch.zeros(3, 16, dtype=torch.complex64)}, folder / "weights.pth")
    return folder / "weights.pth"


@plain
def pth_bytearray_of_gigabytes(folder: Path) -> Path:
    return _zipped(folder, _mapping(a=_call("builtins.bytearray", _number(3 << 30))))


@plain
def pth_number_of_gigabytes(folder: Path) -> Path:
    dtype = _call("numpy.dtype", _text("V2000000000"))
    return _zipped(folder, _mapping(a=_call("numpy.core.multiarray.scalar", dtype)))


@plain
def pth_tensor_without_numbers(folder: Path) -> Path:
    return _zipped(folder, _mapping(a=_call("torch.FloatTensor", _number(10**9))))


@plain
def pth_text_doubled_thirty_times(folder: Path) -> Path:
    steps = _call("_codecs.encode", _text("a" * 16), _text("latin1"))
    for _ in range(28):
        steps = _call("_codecs.encode", steps, _text("hex"))
    return _zipped(folder, _mapping(a=steps))


@plain
def pth_overlapping_view(folder: Path) -> Path:
    view = _tensor(10**5, (10**4, 10**5), (0, 1))
    return _zipped(folder, _mapping(**{"head.weight": view}), s0=bytes(4 * 10**5))


@plain
def pth_view_beyond_its_storage(folder: Path) -> Path:
    return _zipped(folder, _mapping(**{"head.weight": _tensor(100, (10, 10), (100, 1))}), s0=bytes(400))


@plain
def pth_one_storage_in_all_tensors(folder: Path) -> Path:
    # A network of 32 blocks of 12 M numbers, whose tensors are all within 4 M.
    steps = {f"blocks.{i}.mlp.fc1.weight": _tensor(1 << 22, (4096, 1024), (1024, 1)) for i in range(1000)}
    return _zipped(folder, _mapping(**steps), s0=bytes(1 << 24))


@plain
def pth_key_of_nested_tuples(folder: Path) -> Path:
    steps = b")" + b"".join(b"q" + bytes((i,)) + b"h" + bytes((i,)) + b"\x86" for i in range(60))
    return _zipped(folder, b"}" + steps + b"Ns")


@plain
def pth_keys_of_one_hash(folder: Path) -> Path:
    keys = b"".join(b"\x8a\x0b" + (n * (2**61 - 1)).to_bytes(11, "little", signed=True) + b"N" for n in range(60_000))
    return _zipped(folder, b"}(" + keys + b"u")


@plain
def pth_numbers_of_one_hash(folder: Path) -> Path:
    steps = b"".join(b"p%d\n" % (n * (2**61 - 1)) for n in range(60_000))
    return _zipped(folder, b"N" + steps)


@plain
def pth_legacy_storage_named_by_nested_tuples(folder: Path) -> Path:
    name = b")" + b"".join(b"q" + bytes((i,)) + b"h" + bytes((i,)) + b"\x86" for i in range(60))
    return _legacy(folder, _mapping(), b"\x80\2](" + name + b"e.")


@plain
def pth_size_of_millions_of_digits(folder: Path) -> Path:
    long = b"\x8b" + struct.pack("<i", 5_000_000) + b"\x7f" * 5_000_000
    head = b"ctorch._utils\n_rebuild_tensor\n(" + _storage(4, "0", b"") + long + b"q\1"
    return _zipped(folder, head + b"h\1\x85h\1\x85tR", s0=bytes(16))


@plain
def pth_lists_in_lists(folder: Path) -> Path:
    return _zipped(folder, b"]" * 100_000 + b"a" * 99_999)


@plain
def pth_mappings_in_mappings(folder: Path) -> Path:
    return _zipped(folder, (b"}" + _text("a")) * 100_000 + b"N" + b"s" * 100_000)


@plain
def pth_mapping_within_itself(folder: Path) -> Path:
    return _zipped(folder, b"}q\0" + b"".join(_text(f"k{i}") + b"h\0s" for i in range(500)))


@plain
def pth_shared_mappings(folder: Path) -> Path:
    """Five levels of 60 keys, all to one mapping a level: 60 to the fifth ways to the last."""
    steps = _mapping(**{"head.weight": _tensor(4, (2, 2), (2, 1))})
    for level in range(4):
        again = b"".join(_text(f"{i:02}") + b"h" + bytes((level,)) for i in range(60))
        steps = b"}(" + _text("zz") + steps + b"q" + bytes((level,)) + again + b"u"
    return _zipped(folder, steps, s0=bytes(16))


@plain
def pth_thousands_of_state_dicts(folder: Path) -> Path:
    inner = _mapping(**{"head.weight": _tensor(4, (2, 2), (2, 1))})
    return _zipped(folder, _mapping(**{f"net{i}": inner for i in range(3000)}), s0=bytes(16))


@plain
def pth_ten_million_steps(folder: Path) -> Path:
    return _zipped(folder, b"}" * 10_000_000 + b"N")


@plain
def pth_a_million_marks(folder: Path) -> Path:
    return _zipped(folder, b"(" * 1_000_000 + b"N")


@plain
def pth_a_million_objects(folder: Path) -> Path:
    return _zipped(folder, _call("builtins.set") + b"q\0" + b"cbuiltins\nset\n)R\x94" * 280_000)


@plain
def pth_pickle_of_its_memory(folder: Path) -> Path:
    return _zipped(folder, b"N" + b"".join(b"r" + struct.pack("<I", n) for n in range(1_000_000)))


@plain
def pth_of_a_million_parts(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "weights.pth", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02N.")
    data = bytearray((folder / "weights.pth").read_bytes())
    start = data.rindex(b"PK\1\2")
    end = data.rindex(b"PK\5\6")
    entry, last = bytes(data[start:end]), data[end:]
    entries = entry * 200_000
    last[12:16] = struct.pack("<I", len(entries))
    (folder / "weights.pth").write_bytes(bytes(data[:start]) + entries + bytes(last))
    return folder / "weights.pth"


def _tensors_named(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """A safetensors file, whatever its names."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * int(np.prod(shape, dtype=object))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with (folder / "weights.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return folder / "weights.safetensors"


@plain
def names_of_ten_thousand_dots(folder: Path) -> Path:
    return _tensors_named(folder, {"0." * 10_000 + str(i): (1,) for i in range(40)})


@plain
def names_within_names(folder: Path) -> Path:
    return _tensors_named(folder, {".".join(f"{i + k}" for k in range(31)) + ".weight": (1, 1) for i in range(9_000)})


@plain
def names_that_patterns_go_through_again_and_again(folder: Path) -> Path:
    word = "embeddings.patch_embeddings.projection."
    return _tensors_named(folder, {f"n{i}{word * 10}": (1, 1) for i in range(9_000)})


@plain
def names_of_a_thousand_networks(folder: Path) -> Path:
    shapes = {name: tuple(tensor.shape) for name, tensor in tiny().items() if name.startswith("blocks.0.")}
    many = {f"n{k}.{name.replace('norm', 'ln')}": shape for k in range(800) for name, shape in shapes.items()}
    return _tensors_named(folder, many | {"zz.weight": (1, 1)})


@plain
def names_of_a_deep_network_that_patterns_go_through(folder: Path) -> Path:
    word, shapes = "embeddings.patch_embeddings.projection." * 8, {}
    for name, tensor in tiny().items():
        start, _, rest = name.partition("blocks.0.")
        for number in range(256) if rest else [0]:
            shapes[f"layers.{number}.{word}{rest}" if rest else start] = tuple(tensor.shape)
    return _tensors_named(folder, {n: s for n, s in shapes.items() if "blocks.1" not in n})


_NAMES = "names of a deep network that patterns go through"
_TOKENLESS = {"architecture": f"{PLAIN['architecture']},class_token=false"}
MAKERS[_NAMES] = lambda f: (names_of_a_deep_network_that_patterns_go_through(f), PLAIN | _TOKENLESS)


@plain
def fifty_thousand_tensors(folder: Path) -> Path:
    return _tensors_named(folder, {f"t{i}.weight": (1, 1) for i in range(50_000)})


@plain
def a_billion_classes_of_nothing(folder: Path) -> Path:
    return _tensors_named(folder, {n: (10**9, 0) if n == "head.weight" else tuple(t.shape) for n, t in tiny().items()})


@hostile
def a_billion_classes_in_a_folder(folder: Path) -> Path:
    folder = huggingface_folder(folder)
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"id2label"', '"unused"'))
    header["classifier.weight"]["shape"] = [10**9, 0]
    header = {n: v for n, v in header.items() if not n.startswith("classifier")}
    shapes = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    _tensors_named(folder, shapes | {"classifier.weight": (10**9, 0)}).rename(folder / "model.safetensors")
    return folder


MAKERS["a billion classes in a folder"] = lambda f: (a_billion_classes_in_a_folder(f), {"labels": "numbers"})


def _spoilt(folder: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    native_folder(folder)
    (folder / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header) if length is None else length) + header + data
    )
    return folder


@hostile
def safetensors_with_a_header_of_100_megabytes(folder: Path) -> Path:
    return _spoilt(folder, b"{" + b" " * (100 << 20) + b"}")


@hostile
def safetensors_with_overlapping_offsets(folder: Path) -> Path:
    entries = {f"t{i}": {"dtype": "F32", "shape": [1 << 20], "data_offsets": [0, 1 << 22]} for i in range(5000)}
    return _spoilt(folder, json.dumps(entries).encode(), bytes(1 << 22))


@hostile
def safetensors_with_a_hole_of_two_terabytes(folder: Path) -> Path:
    folder = native_folder(folder)
    _tensors_named(folder, {"head.bias": (1 << 39,)}).rename(folder / "model.safetensors")
    return folder


@hostile
def safetensors_of_nested_lists(folder: Path) -> Path:
    return _spoilt(folder, b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}")


@hostile
def safetensors_of_thousands_of_long_dimensions(folder: Path) -> Path:
    shape = ",".join(["9" * 4000] * 2400)
    return _spoilt(folder, f'{{"a":{{"dtype":"F32","shape":[{shape}],"data_offsets":[0,0]}}}}'.encode())


def _archived(folder: Path, parts: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(folder / "model.mar", "w", how, compresslevel=1) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return folder / "model.mar"


_MANIFEST: Final = b'{"model": {"serializedFile": "weights.pth"}}'


@plain
def mar_of_zeros(folder: Path) -> Path:
    return _archived(folder, {"MAR-INF/MANIFEST.json": _MANIFEST, "weights.pth": bytes(300 << 20)})


@plain
def mar_with_a_manifest_of_zeros(folder: Path) -> Path:
    return _archived(folder, {"MAR-INF/MANIFEST.json": b" " * (300 << 20), "weights.pth": b""})


@plain
def mar_with_labels_of_blanks(folder: Path) -> Path:
    return _archived(
        folder, {"MAR-INF/MANIFEST.json": _MANIFEST, "index_to_name.json": b" " * (300 << 20), "weights.pth": b""}
    )


@plain
def mar_packed_by_lzma(folder: Path) -> Path:
    parts = {"MAR-INF/MANIFEST.json": _MANIFEST, "weights.pth": bytes(60 << 20)}
    file = _archived(folder, parts, zipfile.ZIP_LZMA)
    data = file.read_bytes()
    file.write_bytes(data.replace(b"\x5d\0\0\x80\0", b"\x5d\xff\xff\xff\xff"))
    return file


@plain
def mar_of_damaged_safetensors(folder: Path) -> Path:
    manifest = _MANIFEST.replace(b".pth", b".safetensors")
    return _archived(folder, {"MAR-INF/MANIFEST.json": manifest, "weights.safetensors": bytes(range(150, 250))})


@plain
def mar_of_nested_json(folder: Path) -> Path:
    return _archived(folder, {"MAR-INF/MANIFEST.json": b"[" * 100_000, "weights.pth": b""})


@hostile
def npz_of_zeros(folder: Path) -> Path:
    arrays: dict[str, Any] = {name: np.zeros(tuple(tensor.shape), np.float32) for name, tensor in tiny().items()}
    np.savez_compressed(folder / "m.npz", **arrays | {"embedding/kernel": np.zeros(50_000_000, np.float32)})
    return folder / "m.npz"


@hostile
def npz_whose_header_is_no_python(folder: Path) -> Path:
    header = "{'descr': '<f4', 'fortran_order\xbc".encode("latin1")
    array = b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header
    return _archived(folder, {"embedding/kernel.npy": array}).rename(folder / "m.npz")


def _edited(folder: Path, name: str, **fields: Any) -> Path:
    value = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(value | fields))
    return folder


def _replaced(folder: Path, name: str, old: str, new: str) -> Path:
    (folder / name).write_text((folder / name).read_text().replace(old, new, 1))
    return folder


@hostile
def config_of_nested_lists(folder: Path) -> Path:
    return _replaced(huggingface_folder(folder), "config.json", '["ViTForImageClassification"]', "[" * 900 + "]" * 900)


@hostile
def config_of_ten_million_characters(folder: Path) -> Path:
    empty = "[" + '{"":0},' * 1_400_000 + "0]"
    return _replaced(huggingface_folder(folder), "config.json", '["ViTForImageClassification"]', empty)


@hostile
def config_that_says_a_thing_twice(folder: Path) -> Path:
    return _replaced(huggingface_folder(folder), "config.json", "{", '{"num_attention_heads": 4,')


@hostile
def config_of_a_long_pool(folder: Path) -> Path:
    return _edited(timm_folder(folder), "config.json", global_pool="x" * 5_000_000, model_args={"global_pool": "y"})


@hostile
def config_of_a_long_architecture(folder: Path) -> Path:
    return _edited(timm_folder(folder), "config.json", architecture="vit_" * 2_000_000)


@hostile
def config_of_a_network_beyond_all_size(folder: Path) -> Path:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 256, "num_attention_heads": 256, "intermediate_size": 131072}
    return _edited(huggingface_folder(folder), "config.json", **sizes)


@hostile
def config_with_a_billion_layers(folder: Path) -> Path:
    return _edited(huggingface_folder(folder), "config.json", num_hidden_layers=10**9)


@hostile
def label_that_rings_and_clears_the_screen(folder: Path) -> Path:
    return _edited(huggingface_folder(folder), "config.json", id2label={"0": "a", "1": "\x1b[2J\a\n", "2": "c"})


@hostile
def label_that_turns_the_text_around(folder: Path) -> Path:
    return _edited(timm_folder(folder), "config.json", label_names=["a", "\u202eb", "c"])


@hostile
def label_of_a_megabyte(folder: Path) -> Path:
    return _edited(huggingface_folder(folder), "config.json", id2label={"0": "a", "1": "b" * 10**6, "2": "c"})


@hostile
def label_indices_with_a_hole(folder: Path) -> Path:
    return _edited(huggingface_folder(folder), "config.json", id2label={"0": "a", "1": "b", "999999999": "c"})


@hostile
def preprocessing_of_a_giant_picture(folder: Path) -> Path:
    size = {"height": 16384, "width": 16384}
    return _edited(huggingface_folder(folder), "preprocessor_config.json", size=size)


@hostile
def preprocessing_by_not_a_number(folder: Path) -> Path:
    return _edited(huggingface_folder(folder), "preprocessor_config.json", image_mean=[float("nan")] * 3)


@hostile
def preprocessing_of_an_endless_crop(folder: Path) -> Path:
    folder = timm_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, 10**30, 10**30]
    config["model_args"]["img_size"] = 10**30
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@hostile
def lora_of_endless_scale(folder: Path) -> Path:
    adapter = adapter_folder(folder / "adapter", str(huggingface_folder(folder / "base")))
    return _edited(adapter, "adapter_config.json", lora_alpha=10**400)


def _sharded(folder: Path, shards: dict[str, str]) -> Path:
    native_folder(folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return folder


@hostile
def index_of_a_hundred_thousand_tensors(folder: Path) -> Path:
    return _sharded(folder, {f"t{i}": "part.safetensors" for i in range(100_000)})


@hostile
def index_of_thousands_of_shards(folder: Path) -> Path:
    return _sharded(folder, {f"t{i}": f"s{i}.safetensors" for i in range(9_000)})


@hostile
def index_that_leads_out_of_the_folder(folder: Path) -> Path:
    return _sharded(folder, {"head.bias": "/etc/hostname.safetensors"})


@hostile
def index_of_links_to_one_shard(folder: Path) -> Path:
    _sharded(folder, {name: f"s{i % 900}.safetensors" for i, name in enumerate(tiny())} | {"z": "s900.safetensors"})
    for i in range(901):
        (folder / f"s{i}.safetensors").symlink_to("part.safetensors")
    return folder


@hostile
def folder_whose_weights_are_a_pipe(folder: Path) -> Path:
    native_folder(folder)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    return folder


@hostile
def folder_whose_weights_are_a_folder(folder: Path) -> Path:
    native_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return folder


@hostile
def folder_of_empty_files(folder: Path) -> Path:
    native_folder(folder)
    for file in folder.iterdir():
        file.write_bytes(b"")
    return folder


@hostile
def lora_of_two_long_vectors(folder: Path) -> Path:
    return adapter_folder(folder / "adapter", str(huggingface_folder(folder / "base")), rank=1, width=1 << 17)


@dataclass
class Cost:
    """What reading one checkpoint took: seconds of processor time, bytes of memory more than before, and its end."""

    seconds: float
    growth: int
    size: int
    end: str

    @property
    def fault(self) -> str:
        """What is wrong with it; nothing where it is empty."""
        bound = MAX_GROWTH + 16 * self.size
        faults = [f"{self.seconds:.1f} CPU-s"] if self.seconds > MAX_SECONDS else []
        faults += [f"{self.growth >> 20} MiB for {self.size >> 10} KiB"] if self.growth > bound else []
        faults += [] if self.end.startswith("refused") else [self.end]
        return ", ".join(faults)


def table(folder: Path) -> tuple[str, list[str]]:
    """Return a line for each hostile checkpoint, of what reading it took, and the faults."""
    lines, faults = ["  CPU-s    MiB   KiB on disk  checkpoint"], []
    for name, make in MAKERS.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        cost = measured(*make(place))
        lines.append(f"{cost.seconds:7.2f} {cost.growth / 2**20:6.0f} {cost.size >> 10:13,}  {name}")
        if cost.fault:
            faults.append(f"{KIND}: {name}: {cost.fault}")
        shutil.rmtree(place)
    return "\n".join(lines), faults


def outcome(source: Path, options: dict[str, Any]) -> str:
    """Load and build a checkpoint: `refused: …`, `loaded`, or a fault."""
    try:
        load_checkpoint(str(source), **options).build()
    except CheckpointError as error:
        text = str(error)
        if not text.isprintable() or len(text) > 2000:
            return f"a refusal of {len(text)} characters or of several lines: {text[:100]!r}"
        return f"refused: {text}"
    except Exception:  # noqa: BLE001 - whatever it is, it is a fault and told
        return traceback.format_exc()
    return "loaded"


def measured(source: Path, options: dict[str, Any]) -> Cost:
    """Read a checkpoint in a child process, which is ended where it takes longer than a minute."""
    files = [path for path in (source.rglob("*") if source.is_dir() else [source]) if path.is_file()]
    size = sum(512 * path.stat().st_blocks for path in files)
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _report(send, source, options)
    os.close(send)
    ready = select.select([receive], [], [], _PATIENCE)[0]
    data = b""
    while ready and (part := os.read(receive, 1 << 16)):
        data += part
    if not ready:
        os.kill(pid, 9)
    os.close(receive)
    os.waitpid(pid, 0)
    if not data:
        return Cost(_PATIENCE if not ready else 0, 0, size, "no end in a minute" if not ready else "killed")
    seconds, growth, end = json.loads(data)
    return Cost(seconds, growth, size, end)


def _report(send: int, source: Path, options: dict[str, Any]) -> None:
    """Read a checkpoint, write its cost, and end this process."""
    try:
        torch.set_num_threads(1)  # the threads of the parent did not come along
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        before, start = _status("VmRSS"), time.process_time()
        end = outcome(source, options)
        cost = [time.process_time() - start, _status("VmHWM") - before, end]
        os.write(send, json.dumps(cost).encode()[: 1 << 20])
    finally:
        os._exit(0)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) << 10 if found else 0


def _torch(folder: Path, *, zipped: bool) -> Source:
    torch.save({"state_dict": tiny(), "epoch": 3}, folder / "weights.pt", _use_new_zipfile_serialization=zipped)
    return folder / "weights.pt", PLAIN


def _mar(folder: Path) -> Source:
    data = io.BytesIO()
    torch.save(tiny(), data)
    labels = json.dumps({str(i): [f"n{i}", f"label {i}"] for i in range(3)}).encode()
    parts = {"MAR-INF/MANIFEST.json": _MANIFEST, "weights.pth": data.getvalue(), "index_to_name.json": labels}
    return _archived(folder, parts), PLAIN


def _safetensors(folder: Path) -> Source:
    save_file(tiny(), folder / "weights.safetensors")
    return folder / "weights.safetensors", PLAIN


def _npz(folder: Path) -> Source:
    blocks = [SimpleNamespace(attn=SimpleNamespace(num_heads=2))] * 2
    model = SimpleNamespace(state_dict=tiny, blocks=blocks, embed_dim=16, attn_pool=None)
    np.savez_compressed(folder / "model.npz", **jax_arrays(model))
    return folder / "model.npz", {key: PLAIN[key] for key in ("labels", "preprocess")}


def _lora(folder: Path) -> Source:
    return adapter_folder(folder / "adapter", str(huggingface_folder(folder / "base"))), {}


VALID: Final[dict[str, Callable[[Path], Source]]] = {
    "pt": lambda folder: _torch(folder, zipped=True),
    "legacy pt": lambda folder: _torch(folder, zipped=False),
    "safetensors": _safetensors,
    "mar": _mar,
    "npz": _npz,
    "lora": _lora,
    "timm": lambda folder: (timm_folder(folder), {}),
    "huggingface": lambda folder: (huggingface_folder(folder), {}),
}
"""Small checkpoints that load, to be damaged."""


def damage(folder: Path, seed: int, out: Path, *, seconds: float = float("inf"), cases: int | None = None) -> Tally:
    """Read damaged checkpoints for `seconds`, or so many `cases`; what is neither refused nor right is kept in `out`.

    A status is 200 for one that loads and 400 for one that is refused.
    """
    tally, end, made = Tally(KIND), time.monotonic() + seconds, {}
    for name, make in VALID.items():
        place = folder / name.replace(" ", "_")
        place.mkdir()
        source, options = make(place)
        made[name] = (source, options, {path: path.read_bytes() for path in place.rglob("*") if path.is_file()})
        assert outcome(source, options) == "loaded", outcome(source, options)
    while (cases is None or tally.sent < cases) and time.monotonic() < end:
        random = case(seed, KIND, tally.sent)
        name = random.choice(list(made))
        source, options, files = made[name]
        path = random.choice(list(files))
        data = damaged(files[path], list(files.values()), random)
        if path.suffix in (".mar", ".npz") and random.random() < 0.5:
            data = _damaged_within(path, files[path], random)
        path.write_bytes(data)
        before = time.process_time()
        result = outcome(source, options)
        used = time.process_time() - before
        if not tally.answered({"loaded": 200}.get(result, 400 if result.startswith("refused") else 500), name):
            tally.faults[-1] += f": {result}"
        elif used > MAX_SECONDS:
            tally.faults.append(f"{KIND} {tally.sent} ({name}): {used:.1f} CPU-s")
        if len(tally.faults) > len(list(out.glob(f"{KIND}-*"))):
            (out / f"{KIND}-{seed}-{tally.sent}-{path.name}").write_bytes(data)
        path.write_bytes(files[path])
        tally.seconds = max(tally.seconds, used)
        tally.sent += 1
    return tally


def _damaged_within(path: Path, data: bytes, random: Random) -> bytes:
    """Return an archive of which one part is damaged before it is packed, so that its checksum is right."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = random.choice(list(parts))
    _archived(path.parent, parts | {name: damaged(parts[name], list(parts.values()), random)}).rename(path)
    return path.read_bytes()
