"""Samples as JSON and back, for datasets, journals and other machines.

Invariant: `sample_from_json(sample_to_json(sample))` is the sample: its id's type, its None values and its
sandbox too, which pydantic's own way there and back loses. What JSON cannot hold (an object in the metadata)
becomes its `repr`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inspect_ai.dataset import Sample
from inspect_ai.util import SandboxEnvironmentSpec
from pydantic_core import from_json, to_json

from inspect_tinker_bridge.errors import ConversionError


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """The sample as plain JSON values, without the fields that it leaves out."""
    held: dict[str, Any] = from_json(to_json(sample, fallback=repr))
    return {name: value for name, value in held.items() if value is not None}


def sample_from_json(held: Mapping[str, Any]) -> Sample:
    """The sample of `sample_to_json`. Raises pydantic's ValidationError, or TypeError without an input."""
    fields = dict(held)
    sandbox = fields.pop("sandbox", None)
    sample = Sample.model_validate(fields)
    if sandbox is not None:
        sample.sandbox = SandboxEnvironmentSpec.model_validate(sandbox)
    return sample


def sample_of_row(row: Mapping[str, Any] | str) -> Sample:
    """The sample of a row of `inspect_dataset_to_hf`, or of its `info`. Raises ConversionError."""
    info: Any = row if isinstance(row, str) else row.get("info", row)
    held = json.loads(info) if isinstance(info, str) else info
    if not isinstance(held, Mapping) or "sample" not in held:
        raise ConversionError("this is no row of inspect_dataset_to_hf: its info holds no sample")
    return sample_from_json(held["sample"])
