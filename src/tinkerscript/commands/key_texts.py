"""Type, default and meaning of each key, for `tinkerscript config` and docs/config.md."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tinkerscript.config import RunConfig


def key_texts(
    beginning: str, model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield the title and meaning of keys that start with `beginning`."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if section := section_of(field.annotation):
            yield from key_texts(beginning, section, f"{key}.")
        elif key.startswith(beginning):
            yield (
                f"{key}: {default_text(field)}   ({type_text(field.annotation)})".replace("`", ""),
                field.description or "",
            )


def section_of(annotation: object) -> type[BaseModel] | None:
    if get_origin(annotation) in (list, dict):
        annotation = get_args(annotation)[-1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def type_text(annotation: object) -> str:
    if get_args(annotation) and all(isinstance(value, str) for value in get_args(annotation)):
        return " or ".join(f"`{value}`" if value else "empty" for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return type_text(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(type_text(each) for each in get_args(annotation))
    if section_of(annotation):
        return "list of sections"
    if get_origin(annotation) is list:
        return f"list of {type_text(get_args(annotation)[0])}"
    if get_origin(annotation) is tuple:
        return "[" + ", ".join(type_text(each) for each in get_args(annotation)) + "]"
    if get_origin(annotation) is dict:
        return "mapping"
    names: dict[object, str] = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return (names | {type(None): "null"})[annotation]


def default_text(field: object) -> str:
    default = getattr(field, "default", PydanticUndefined)
    if default is PydanticUndefined:
        factory = getattr(field, "default_factory", None)
        return (f"`{factory()}`" if factory() else "empty") if factory else "required"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{'null' if default is None else default}`" if default != "" else "empty"
