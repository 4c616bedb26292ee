"""The note and tags that people give a run, stored in its folder.

A foreign folder may have anything here, so reads are bounded, and an invalid file is ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from tinkerscript.files import write_json

ANNOTATION_FILE = "annotation.json"

MAX_NOTE_CHARS, MAX_TAG_CHARS, MAX_TAGS = 4000, 40, 20
MAX_BYTES = 64 * 2**10


def _unique(tags: list[str]) -> list[str]:
    return list(dict.fromkeys(tags))


Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_NOTE_CHARS)]
Tag = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_TAG_CHARS, pattern="^[^,\n]*$"),
]


class Annotation(BaseModel):
    note: Note = Field(default="", description="Such as `learning rate too high`.")
    tags: Annotated[list[Tag], Field(max_length=MAX_TAGS), AfterValidator(_unique)] = Field(
        default=[], description="Such as `baseline`. Tags cannot contain commas."
    )


def read_annotation(folder: Path) -> Annotation:
    path = folder / ANNOTATION_FILE
    try:
        if path.is_file():  # Opening a pipe would block.
            with path.open("rb") as file:
                return Annotation.model_validate_json(file.read(MAX_BYTES + 1))
    except (OSError, ValueError):
        pass
    return Annotation()


def write_annotation(folder: Path, annotation: Annotation) -> None:
    write_json(folder / ANNOTATION_FILE, annotation.model_dump())
