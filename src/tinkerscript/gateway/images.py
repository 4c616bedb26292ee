"""Images in chats: how requests send them, and how prompts write them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, MessageImage, images_of
from tinkerscript.limits import IMAGE_BYTES, IMAGE_PIXELS
from tinkerscript.model_folder import base_of_adapter, read_json, reads_images
from tinkerscript.rollouts.call import PlacedImage
from tinkerscript.tokenizer import LightTokenizer

FORMATS = ("PNG", "JPEG", "WEBP")

_DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.IGNORECASE)

_PLACEHOLDER = "<image>"

_MAX_SIDE = 4096  # transformers resizes larger images.


def file_of(url: str, where: str) -> bytes:
    found = _DATA_URL.match(url)
    if found is None and not url.startswith("data:"):
        scheme = url.partition(":")[0][:20]
        raise _refused(
            f"the URL's scheme is {scheme!r}, and this server fetches nothing; send the file itself as "
            "data:image/png;base64,...",
            where,
        )
    if found is None:
        raise _refused("the data URL does not begin with data:image/TYPE;base64,", where)
    IMAGE_BYTES.check((len(url) - found.end()) * 3 // 4 - url[-2:].count("="), where)
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"the data URL is not base64: {error}", where) from error


def read_image(url: str, at: int, where: str) -> tuple[MessageImage, bytes]:
    """Decode a data URL of a PNG, JPEG or WebP file within the limits, so that later steps can decode it too.

    Raises GatewayError 400.
    """
    data = file_of(url, where)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            IMAGE_PIXELS.check(width * height, where)
            if getattr(image, "is_animated", False):
                raise _refused("it is an animation; send one frame", where)
            width, height = ImageOps.exif_transpose(image).convert("RGB").size
    except GatewayError:
        raise
    except UnidentifiedImageError as error:
        raise _refused(f"it is not one of {', '.join(FORMATS)}", where) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _refused(f"{error}; {IMAGE_PIXELS.name} allows {IMAGE_PIXELS.limit}", where) from error
    except Exception as error:  # Pillow's decoders raise errors of all kinds.
        raise _refused(f"it cannot be decoded: {error}", where) from error
    digest = hashlib.sha256(data).hexdigest()
    return {"at": at, "sha256": digest, "width": width, "height": height}, data


def _refused(problem: str, where: str) -> GatewayError:
    return GatewayError(400, "invalid_image", f"{where}: the image cannot be used: {problem}", param=where)


class ImageFormat:
    """Idefics3 and SmolVLM write images as tiles of equal numbers of placeholders.

    Source: `transformers.models.idefics3` (5.5); a test compares the two.
    """

    def __init__(self, processor: Mapping[str, Any], settings: Mapping[str, Any], placeholder: int) -> None:
        self._placeholder = placeholder
        self._tile_tokens = int(processor.get("image_seq_len", 169))
        self._size: Mapping[str, int] = settings.get("size") or {"longest_edge": 4 * 364}
        self._tile: int = (settings.get("max_image_size") or {"longest_edge": 364})["longest_edge"]
        self._resizes: bool = settings.get("do_resize", True)
        self._splits: bool = settings.get("do_image_splitting", True)

    @classmethod
    def of(cls, folder: Path, tokenizer: LightTokenizer) -> ImageFormat | None:
        """Return None if the model takes no images."""
        if not reads_images(folder):
            return None
        base = base_of_adapter(folder) or folder
        processor = read_json(base / "processor_config.json")
        settings = processor.get("image_processor") or read_json(base / "preprocessor_config.json")
        if not settings:
            return None
        placeholder = tokenizer.added_tokens.get(_PLACEHOLDER)
        if placeholder is None or not tokenizer.escaper.marks(_PLACEHOLDER):
            raise ConfigError(f"{folder}: {_PLACEHOLDER} is no special token of tokenizer.json")
        return cls(processor, settings, placeholder)

    def expanded(self, text: str, images: Sequence[MessageImage]) -> str:
        parts = text.split(_PLACEHOLDER)
        if len(parts) != len(images) + 1:
            message = (
                f"the model's chat template writes {len(parts) - 1} of the messages' {len(images)} images"
            )
            raise GatewayError(400, "invalid_messages", message, param="messages")
        whole = [parts[0]]
        for image, after in zip(images, parts[1:], strict=True):
            whole += self._text(*self._grid(image["width"], image["height"])), after
        return "".join(whole)

    def placed(
        self, ids: Sequence[int], images: Iterable[MessageImage], files: Mapping[str, bytes]
    ) -> list[PlacedImage]:
        places = [at for at, token in enumerate(ids) if token == self._placeholder]
        found: list[PlacedImage] = []
        done = 0
        for image in images:
            rows, columns = self._grid(image["width"], image["height"])
            found.append(PlacedImage(places[done], files[image["sha256"]]))
            done += (rows * columns + 1) * self._tile_tokens
        assert done == len(places)
        return found

    def _text(self, rows: int, columns: int) -> str:
        tokens = _PLACEHOLDER * self._tile_tokens
        tiles = "".join(
            "".join(
                f"<fake_token_around_image><row_{row}_col_{column}>{tokens}"
                for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        )
        whole = f"<fake_token_around_image><global-img>{tokens}<fake_token_around_image>"
        return f"{tiles}\n{whole}" if rows else whole

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        if not self._splits:
            return 0, 0
        if self._resizes:
            width, height = self._resized(width, height)
        tile, aspect = self._tile, width / height
        if width >= height:
            columns = math.ceil(width / tile)
            rows = math.ceil(int(columns * tile / aspect) / tile)
        else:
            rows = math.ceil(height / tile)
            columns = math.ceil(int(rows * tile * aspect) / tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        longest = self._size.get("longest_edge")
        if not longest:
            return self._size["width"], self._size["height"]
        aspect = width / height
        if width >= height:
            width, height = longest, _even(int(longest / aspect))
        else:
            width, height = _even(int(longest * aspect)), longest
        if max(width, height) > _MAX_SIDE:
            aspect = width / height
            if width >= height:
                width, height = _MAX_SIDE, max(1, int(_MAX_SIDE / aspect))
            else:
                width, height = max(1, int(_MAX_SIDE * aspect)), _MAX_SIDE
        return width, height


def _even(side: int) -> int:
    return max(1, side + side % 2)


def files_in(messages: Iterable[ChatMessage], images: Iterable[PlacedImage]) -> dict[str, bytes]:
    found = (image["sha256"] for message in messages for image in images_of(message))
    return {digest: image.data for digest, image in zip(found, images, strict=True)}
