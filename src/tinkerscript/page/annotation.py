"""`Annotation`: what people write about a run, in its folder: a note, and tags to find it by.

Invariant: the folder may be from elsewhere, so what is read is bounded, and anything else in the file's place
counts as nothing written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, StringConstraints

from tinkerscript.files import write_json

ANNOTATION_FILE = "annotation.json"
"""In the run's folder."""

MAX_NOTE_CHARS, MAX_TAG_CHARS, MAX_TAGS = 4000, 40, 20
MAX_BYTES = 64 * 2**10
"""Of the file: more than the longest annotation takes as JSON."""


def _unique(tags: list[str]) -> list[str]:
    return list(dict.fromkeys(tags))


Note = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_NOTE_CHARS)]
Tag = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_TAG_CHARS, pattern="^[^,\n]*$"),
]


class Annotation(BaseModel):
    """What people wrote about a run."""

    note: Note = Field(default="", description="Such as `learning rate too high`.")
    tags: Annotated[list[Tag], Field(max_length=MAX_TAGS), AfterValidator(_unique)] = Field(
        default=[], description="Such as `baseline`; a tag has no comma."
    )


def read_annotation(folder: Path) -> Annotation:
    path = folder / ANNOTATION_FILE
    try:
        if path.is_file():  # A pipe in its place would wait for a writer.
            with path.open("rb") as file:
                return Annotation.model_validate_json(file.read(MAX_BYTES + 1))
    except (OSError, ValueError):
        pass
    return Annotation()


def write_annotation(folder: Path, annotation: Annotation) -> None:
    """Raises OSError."""
    write_json(folder / ANNOTATION_FILE, annotation.model_dump())
