"""Files of other programs, by their names or first bytes, and what to give instead."""

from pathlib import PurePath
from typing import Final

_PROGRAM: Final = (
    "a {} program, which is code: where it may run, save its weights alone with "
    "torch.save({}, FILE)"
)
TORCHSCRIPT: Final = _PROGRAM.format("TorchScript", "torch.jit.load({}).state_dict()")
_GRAPH: Final = (
    "a graph made from a network, whose weights are no longer those of its layers: give the model "
    "that it was exported from, saved where it was trained with torch.save(model.state_dict(), "
    "FILE)"
)
_DISTRIBUTED: Final = (
    "a part of a distributed checkpoint: make one file of all parts, with python -m "
    "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE, and give that file"
)
_CONVERSION: Final = "a conversion for another program: give the model that it was converted from"
_ARCHIVE: Final = "an archive: unpack it, and give the folder or the file of weights in it"
_OTHER_LIBRARY: Final = (
    "weights of TensorFlow, Keras or Flax: give the torch weights of the same model, or convert "
    "them where both libraries are installed: transformers 4 does with from_pretrained(FOLDER, "
    "from_tf=True or from_flax=True).save_pretrained(NEW_FOLDER)"
)
_WEB_PAGE: Final = "a web page, not the file itself: download the file again, logged in if needed"
_WEIGHTS_BY_ADVICE: Final = {
    _GRAPH: ".onnx .ort .xml .engine .plan .trt .tflite .mlmodel .mlpackage .pte .mnn .rknn .hef",
    TORCHSCRIPT: ".ptl .jit .torchscript",
    _PROGRAM.format("torch.export", "torch.export.load({}).state_dict"): ".pt2",
    _ARCHIVE: ".zip .gz .tgz .xz .bz2 .7z .rar .mar",
    _OTHER_LIBRARY: ".h5 .hdf5 .keras .pb .msgpack",
    _CONVERSION: ".gguf .ot",
    _DISTRIBUTED: ".distcp",
}
# Weights in forms that are not read, by suffix, and the way from them to a state dict.
_FOREIGN_WEIGHTS: Final = {
    suffix: advice for advice, suffixes in _WEIGHTS_BY_ADVICE.items() for suffix in suffixes.split()
}
# Beginnings of files that have the name of another kind.
_FOREIGN_STARTS: Final = {
    b"<!DOCTYPE": _WEB_PAGE,
    b"<!doctype": _WEB_PAGE,
    b"<html": _WEB_PAGE,
    b"\x89HDF": _OTHER_LIBRARY,
    b"GGUF": _CONVERSION,
}


def foreign_advice(name: str) -> str:
    """Return the way from weights of another kind to a state dict; empty for a file of tensors."""
    path = PurePath(name)
    return _FOREIGN_WEIGHTS.get(path.suffix.lower(), "").format(repr(path.name))


def advice_at_start(start: bytes) -> str:
    """Return what to give instead of a file that begins so; empty for an unknown beginning."""
    advice = (text for bytes_, text in _FOREIGN_STARTS.items() if start.startswith(bytes_))
    return next(advice, "")
