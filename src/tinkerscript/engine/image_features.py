"""Images as token ids: every position of an image gets an id below zero that no other position has.

The prefix cache and the packing of training rows can then tell images apart.
"""

from __future__ import annotations

import hashlib
import io
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import tinker
import torch
import transformers
from PIL import Image, ImageOps
from torch import Tensor
from transformers import PreTrainedModel

from tinkerscript.errors import EngineError, EngineRequestError
from tinkerscript.model_folder import IMAGE_MODEL_TYPES

FEATURE_BYTES = 2**28
"""Features kept for later requests, besides images in use."""

_SPAN = 2**20
"""More than an image's tokens."""

_PROCESSORS = {"idefics3": "Idefics3ImageProcessorPil", "smolvlm": "SmolVLMImageProcessorPil"}

_NUMBERS = itertools.count()


Placed = tuple[int, bytes]
"""Index of an image's first placeholder in ids, and its file."""


class ImageFeatures:
    """One image's features. Hold them as long as its ids are in use."""

    def __init__(self, features: Tensor) -> None:
        self.features = features
        """(K, C)"""

        self._number = next(_NUMBERS)
        _IMAGES[self._number] = self

    @property
    def ids(self) -> list[int]:
        first = self._number * _SPAN
        return [~(first + place) for place in range(len(self.features))]


_IMAGES: WeakValueDictionary[int, ImageFeatures] = WeakValueDictionary()


class IdsWithImages(tinker.ModelInput):
    """Ids [T] with placeholders, and their images."""

    images: tuple[Placed, ...] = ()


def with_images(datum: tinker.Datum, images: tuple[Placed, ...]) -> tinker.Datum:
    if not images:
        return datum
    ids = IdsWithImages(chunks=datum.model_input.chunks, images=images)
    return tinker.Datum(model_input=ids, loss_fn_inputs=datum.loss_fn_inputs)


class ImageReader:
    """Belongs to the engine's thread."""

    def __init__(self, model: PreTrainedModel, folder: Path, *, devices: int = 1) -> None:
        self._model: Any = model
        self._devices = devices
        self._folder = folder
        self._placeholder: int | None = getattr(model.config, "image_token_id", None)
        self._known: OrderedDict[bytes, ImageFeatures] = OrderedDict()

    @cached_property
    def _processor(self) -> Any:
        # Pillow's, because torchvision resizes a little differently.
        name = self._model.config.model_type
        try:
            module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
        except ModuleNotFoundError as error:
            raise EngineError(
                f"images: transformers {transformers.__version__} has no image processor of {name} with "
                "Pillow; install 5.5 or later"
            ) from error
        kind: Any = getattr(module, _PROCESSORS[name])
        return kind.from_pretrained(self._folder, local_files_only=True)

    def read(self, ids: Sequence[int], images: Sequence[Placed]) -> tuple[list[int], list[ImageFeatures]]:
        """Replace the placeholders of `images` in `ids`. Hold the features while the new ids are in use.

        Raises EngineRequestError for images that the engine does not take, or misplaced placeholders.
        """
        if images and not takes_images(self._model):
            raise EngineRequestError(f"images: a {self._model.config.model_type} takes only text here")
        if images and self._devices > 1:
            raise EngineRequestError("images: they need an engine of one device; set engine.devices to 1")
        found, held = list(ids), list[ImageFeatures]()
        ends = [*(start for start, _ in images), len(found)][1:]
        for (start, file), end in zip(images, ends, strict=True):
            held.append(self._features_of(file))
            places = [at for at in range(start, end) if found[at] == self._placeholder]
            new = held[-1].ids
            if len(places) < len(new) or places[0] != start:
                raise EngineRequestError(
                    f"images: the image at token {start} needs {len(new)} placeholders "
                    f"({self._placeholder}) from there on; the prompt has {len(places)}"
                )
            for place, each in zip(places, new, strict=False):
                found[place] = each
        return found, held

    def _features_of(self, file: bytes) -> ImageFeatures:
        digest = hashlib.sha256(file).digest()
        found = self._known.get(digest) or ImageFeatures(self._computed(file))
        self._known[digest] = found
        self._known.move_to_end(digest)
        while sum(each.features.nbytes for each in self._known.values()) > FEATURE_BYTES:
            self._known.popitem(last=False)
        return found

    @torch.no_grad()
    def _computed(self, file: bytes) -> Tensor:
        with Image.open(io.BytesIO(file)) as image:
            # transformers loads files this way.
            upright = ImageOps.exif_transpose(image).convert("RGB")
        pixels = self._processor([[upright]], return_tensors="pt")
        inputs = {name: each.to(self._model.device) for name, each in pixels.items()}
        return self._model.get_image_features(**inputs).pooler_output.flatten(0, 1)


def takes_images(model: PreTrainedModel) -> bool:
    return model.config.model_type in IMAGE_MODEL_TYPES


def embed_images(model: PreTrainedModel) -> None:
    embeddings: Any = model.get_input_embeddings()
    embeddings.forward = partial(_embedded, embeddings.forward)


def _embedded(embed: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """ids (B, N) -> (B, N, C)"""
    of_images = ids < 0
    if not of_images.any():
        return embed(ids)
    embedded = embed(ids.clamp(min=0))
    places = ~ids[of_images]
    features = embedded.new_empty(len(places), embedded.shape[-1])
    numbers = places // _SPAN
    for number in numbers.unique().tolist():
        own = numbers == number
        features[own] = _IMAGES[number].features[places[own] % _SPAN].to(features.dtype)
    return embedded.masked_scatter(of_images[..., None], features)
