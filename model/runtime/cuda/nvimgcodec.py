"""NVIDIA's nvImageCodec, which decodes JPEGs by nvJPEG: on the GPU's own decoders where it has some, or by its cores.

See https://docs.nvidia.com/cuda/nvimagecodec/py_api.html. On a CPU the same library decodes by libjpeg-turbo, which is
how this file is tested; its part for CUDA has not run yet.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from model.errors import DeviceError

logger = logging.getLogger(__name__)

_THREADS: Final = 4
"""Of the CPU, which nvJPEG needs for the Huffman codes of pictures that the GPU's own decoders do not take."""

_LEAST_VERSION: Final = 0, 9
"""Until 0.7 a tensor did not keep its memory alive, until 0.8 colours were enlarged in another way than libjpeg's."""

_LARGEST_MEAN_DIFFERENCE: Final = 2.0
"""Levels between a photograph as this decoder and as Pillow decode it. Rounding makes less than one; another order of
the channels, or colours that are not converted, makes tens."""


class NvImageCodec:
    """Decodes on one device, or on the CPU; a trial picture has been decoded well.

    Attributes:
        name: the library, with its version.
        difference: between its pixels and Pillow's of that picture, in levels on average.

    Raises:
        DeviceError: it is not installed, or does not decode here.
    """

    def __init__(self, device: torch.device) -> None:
        os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # it prints a line for each file that it cannot decode
        try:
            from nvidia import nvimgcodec  # noqa: PLC0415  it is an extra
        except ImportError as error:
            raise DeviceError(f"decode 'device': nvImageCodec is not usable: {error}") from error
        self.name = f"nvImageCodec {nvimgcodec.__version__}"
        if tuple(map(int, nvimgcodec.__version__.split(".")[:2])) < _LEAST_VERSION:
            raise DeviceError(f"decode 'device': {self.name} is too old: 0.9 is needed")
        self.device = device
        self._library = nvimgcodec
        self._lock = threading.Lock()
        try:
            self._parameters = nvimgcodec.DecodeParams(
                apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
            )
            self.difference = self._choose_backends()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            raise DeviceError(f"decode 'device': {self.name} does not decode on {device}: {error}") from error
        logger.info("%s decodes JPEGs on %s, %.2f levels from Pillow's on average", self.name, device, self.difference)

    def _choose_backends(self) -> float:
        """Take the fastest decoders that show nothing of other pictures; return `difference`.

        Raises:
            RuntimeError: there are none.
        """
        kinds = self._library.BackendKind
        # Never the CPU beside a GPU: what the GPU does not take is for the web workers.
        wanted, number = [kinds.CPU_ONLY], self._library.NVIMGCODEC_DEVICE_CPU_ONLY
        if self.device.type == "cuda":
            wanted, number = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU], self.device.index or 0
        for first in range(len(wanted)):
            self._decoder = self._library.Decoder(
                device_id=number,
                max_num_cpu_threads=_THREADS,
                backends=[self._library.Backend(kind) for kind in wanted[first:]],
                options=":fancy_upsampling=1",
            )
            difference = self._try()
            if not self._shows_what_was_before():
                return difference
            logger.warning("%s leaves parts of a damaged picture unwritten with %s", self.name, wanted[first].name)
        raise RuntimeError("parts of a damaged picture are left unwritten, so that they show an earlier one")

    def decode(self, files: Sequence[bytes]) -> list[Tensor | None]:
        """See `PictureDecoder.decode`."""
        cuda = self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda else 0
        streams = [self._library.CodeStream(data) for data in files]
        with self._lock:  # a decoder keeps the state of its calls
            found = self._decoder.decode(streams, params=self._parameters, cuda_stream=stream)
        return [None if image is None else self._tensor(image) for image in found]

    def _tensor(self, image: Any) -> Tensor:
        if self.device.type == "cuda":
            return from_dlpack(image)
        return torch.from_numpy(np.asarray(image))

    def _shows_what_was_before(self) -> bool:
        """Return whether a damaged picture looks different after a white one and after a black one.

        Decoders that look at the data on the device may take a picture for decoded before they find the damage.
        """
        data = _trial_picture()
        with Image.open(io.BytesIO(data)) as image:
            size = image.size
        damaged = data[: len(data) // 2].rstrip(b"\xff") + b"\xff\xd9"
        found = []
        for colour in ("white", "black"):
            file = io.BytesIO()
            Image.new("RGB", size, colour).save(file, "JPEG")
            self.decode([file.getvalue()])  # whose memory is free again
            [pixels] = self.decode([damaged])
            found.append(b"" if pixels is None else pixels.cpu().numpy().tobytes())
        return found[0] != found[1]

    def _try(self) -> float:
        """Return how far this decoder is from Pillow on a photograph, in levels on average.

        Raises:
            RuntimeError: further than rounding explains, or it does not decode at all.
        """
        data = _trial_picture()
        [found] = self.decode([data])
        if found is None:
            raise RuntimeError("it gives nothing for a baseline JPEG; is nvJPEG installed?")
        with Image.open(io.BytesIO(data)) as image:
            expected = np.asarray(image.convert("RGB"), np.int16)
        pixels = found.cpu().numpy()
        if pixels.dtype != np.uint8 or pixels.shape != expected.shape:
            raise RuntimeError(f"{pixels.dtype} {pixels.shape} for a photograph of {expected.shape}")
        difference = float(np.abs(pixels - expected).mean())
        if difference > _LARGEST_MEAN_DIFFERENCE:
            raise RuntimeError(f"a photograph is {difference:.1f} levels from Pillow's on average")
        return difference


def _trial_picture() -> bytes:
    return (resources.files("model.runtime") / "pictures" / "dog.jpg").read_bytes()
