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
        self.device = device
        self._library = nvimgcodec
        kinds = nvimgcodec.BackendKind
        # Never the CPU beside a GPU: what the GPU does not take is for the web workers.
        wanted = [kinds.CPU_ONLY]
        number = nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        if device.type == "cuda":
            wanted = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
            number = device.index or 0
        backends = [nvimgcodec.Backend(kind) for kind in wanted]
        self._lock = threading.Lock()
        try:
            self._decoder = nvimgcodec.Decoder(device_id=number, max_num_cpu_threads=_THREADS, backends=backends)
            self._parameters = nvimgcodec.DecodeParams(
                apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB
            )
            self.difference = self._try()
        except RuntimeError as error:
            raise DeviceError(f"decode 'device': {self.name} does not decode on {device}: {error}") from error
        logger.info("%s decodes JPEGs on %s, %.2f levels from Pillow's on average", self.name, device, self.difference)

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

    def _try(self) -> float:
        """Return how far this decoder is from Pillow on a photograph, in levels on average.

        Raises:
            RuntimeError: further than rounding explains, or it does not decode at all.
        """
        data = (resources.files("model.runtime") / "pictures" / "dog.jpg").read_bytes()
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
