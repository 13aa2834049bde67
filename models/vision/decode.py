"""Decodes the bytes of a picture to pixels, in a child process with limits (decode_worker.py).

- The bytes decide the format: PNG, JPEG, WebP, GIF or BMP. Other formats are refused by name.
- An animation becomes its first frame.
- The orientation in EXIF or XMP is applied. Damaged EXIF is ignored.
- Transparent pixels are drawn on white.
- 16 bits per channel are rounded to 8. CMYK becomes RGB without a colour profile.
"""

from __future__ import annotations

import json

import numpy as np

from vkbackend.errors import InvalidArgument
from vkbackend.models.processes.child import Child, Ended
from vkbackend.models.processes.frames import ANSWERED, ASKED, ENDED, HEAD
from vkbackend.models.processes.memory_limits import PICTURE_MEMORY
from vkbackend.models.processes.shared import Shared
from vkbackend.models.vision.limits import IMAGE_LIMITS, ImageLimits

WALL_S = 60.0  # Wall time per picture. It exceeds the limit of CPU time, because a machine may be busy.


class Decoder:
    """Decodes pictures, one at a time. Threads may share it. The process starts with the first picture."""

    def __init__(self, limits: ImageLimits = IMAGE_LIMITS) -> None:
        self.limits = limits
        self.shared = Shared(_Worker, "the decoder of pictures")

    def decode(self, data: bytes) -> np.ndarray:
        """Return pixels u8 [height, width, 3] in RGB.

        Raises InvalidArgument if `data` is not a picture, is damaged, or exceeds the limits.
        """
        limits = self.limits
        if len(data) > limits.n_bytes:
            raise InvalidArgument(f"the picture has {len(data)} bytes, at most {limits.n_bytes} are taken")
        return self.shared.use(lambda worker: worker.decode(data, limits), WALL_S)


class _Worker(Child):
    def __init__(self) -> None:
        super().__init__("vkbackend.models.vision.decode_worker", "decoding pictures", PICTURE_MEMORY)

    def decode(self, data: bytes, limits: ImageLimits) -> np.ndarray:
        asked = json.dumps({name: getattr(limits, name) for name in limits.__slots__}).encode()
        frame = HEAD.pack(len(asked) + len(data), len(asked), ASKED), asked, data
        try:
            kind, width, body = self.exchange(frame, WALL_S, ANSWERED, 3 * limits.n_pixels, limits.cpu_s)
            if kind == ANSWERED and (not width or not body or len(body) % (3 * width)):
                raise self.ended()
        except TimeoutError:
            raise InvalidArgument(f"the picture was not decoded in {WALL_S:.0f} s") from None
        except Ended as ended:
            if ended.over_cpu:
                raise InvalidArgument(f"decoding the picture took more than {limits.cpu_s:g} s") from None
            if ended.excess:
                raise InvalidArgument(
                    f"decoding the picture takes more than {PICTURE_MEMORY >> 20} MB of memory"
                ) from None
            raise InvalidArgument(f"the picture ended the process that decoded it ({ended})") from None
        if kind == ENDED:
            self.kill()
        if kind != ANSWERED:
            raise InvalidArgument(body.decode("utf-8", "surrogatepass"))
        return np.frombuffer(body, np.uint8).reshape(-1, width, 3)
