from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, cast, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ValidationError,
)

from tinkerscript.config.run_section import RunConfig
from tinkerscript.config.section import Section
from tinkerscript.errors import ConfigError
from tinkerscript.files import LATEST_RUN, load_yaml


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Load a YAML file, apply `key.sub=value` overrides, and validate it.

    Raises ConfigError, which names the file, the key and what is allowed.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror or error}") from error
    return parse_config(text, source=str(path), overrides=overrides, folder=path.parent)


def parse_config(
    text: str, *, source: str, overrides: list[str] | None = None, folder: Path | None = None
) -> RunConfig:
    """Validate YAML text. Raises ConfigError, also for tags that would run code.

    Relative paths start from `folder` (default: the working directory), in overrides from the working
    directory.
    """
    data = load_yaml(text, source=source)
    if not isinstance(data, dict):
        raise ConfigError(f"{source} must hold a mapping of config keys, not {type(data).__name__}")
    data = _with_absolute_paths(data, folder or Path.cwd())
    for override in overrides or []:
        _apply_override(data, override)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from error


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    *parents, last = key.split(".")
    section = data
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is not a section")
    value = load_yaml(value, source=f"override {override!r}")
    section[last] = _with_absolute_paths(value, Path.cwd(), key)


# Keys that may be paths. Most also take a registered task's, module's or model's name.
_PATHS = {
    "task.name",
    "task.sandbox_config",
    "tasks.name",
    "tasks.sandbox_config",
    "workers.script",
    "sft.data",
    "engine.model",
    "engine.checkpoint",
    "inference.launch.python",
    "metrics.extra",
    "roles.*.model",
    "training.judge.function",
    "training.loss_fn",
}

# Each is a path only if that file exists. Otherwise it is a model's id or the provider's own notation.
_PATHS_IF_THERE = {
    "task.sandbox_config",
    "tasks.sandbox_config",
    "engine.model",
    "engine.checkpoint",
    "roles.*.model",
}


def _with_absolute_paths(value: Any, folder: Path, key: str = "") -> Any:
    key = re.sub(r"^roles\.[^.]+", "roles.*", key)
    if key == "roles.*" and isinstance(value, dict) and value.get("base_url"):
        return value  # `model` is a name at that server here, not a path.
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        prefix = f"{key}." if key else ""
        return {name: _with_absolute_paths(each, folder, f"{prefix}{name}") for name, each in items}
    if isinstance(value, list):
        return [_with_absolute_paths(each, folder, key) for each in cast("list[Any]", value)]
    if key not in _PATHS or not isinstance(value, str) or value in ("", "tiny"):
        return value
    if python := re.fullmatch(r"(.+\.py)([@:].+)?", value):
        return f"{_seen_from(folder, python[1])}{python[2] or ''}"
    path = _seen_from(folder, value)
    is_path = key in ("sft.data", "inference.launch.python") or (key in _PATHS_IF_THERE and path.exists())
    return str(path) if is_path else value


def _seen_from(folder: Path, path: str) -> Path:
    seen = (folder / Path(path).expanduser()).absolute()
    for link in (seen, *seen.parents):
        if link.name == LATEST_RUN and link.is_symlink():  # It will name the run that reads this.
            return link.resolve() / seen.relative_to(link)
    return seen


def _explain(error: ValidationError, source: str) -> str:
    lines = [
        _explain_one(item["loc"], item["type"], item["msg"], item.get("input")) for item in error.errors()
    ]
    return f"{source}: " + "; ".join(lines)


def _explain_one(loc: tuple[int | str, ...], kind: str, message: str, value: object) -> str:
    key = ".".join(str(part) for part in loc)
    if not loc:
        return message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        section = ".".join(str(part) for part in loc[:-1])
        where = f"the section {section!r}" if section else "the top level"
        known = _known_keys(loc[:-1])
        if alike := difflib.get_close_matches(str(loc[-1]), known, n=3):
            return f"unknown key {key!r}; did you mean {' or '.join(alike)}?"
        if elsewhere := _sections_with(str(loc[-1])):
            return f"unknown key {key!r}; did you mean {' or '.join(elsewhere)}?"
        return f"unknown key {key!r}; {where} knows {', '.join(known)}"
    if kind == "missing":
        return f"the key {key!r} is required"
    message = message.removeprefix("Value error, ")
    return f"{key}: {message[:1].lower()}{message[1:]}, got {value!r}"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = RunConfig
    for part in loc:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        annotation = get_args(annotation)[0] if get_origin(annotation) is list else annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)


def _sections_with(key: str) -> list[str]:
    sections = ((name, field.annotation) for name, field in RunConfig.model_fields.items())
    return [
        f"{name}.{key}"
        for name, model in sections
        if isinstance(model, type) and issubclass(model, Section) and key in model.model_fields
    ]


def dump_config(config: RunConfig) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def import_name(text: str, *, what: str) -> object:
    """Import an object of the user's code, given as `module:name` or `path/to/file.py:name`.

    `what` is its config key, which a ConfigError names.
    """
    source, separator, name = text.rpartition(":")
    if not (separator and source and name):
        raise ConfigError(f"{what}: {text!r} is not of the form module:name or file.py:name")
    try:
        return getattr(_module_from(source), name)
    except Exception as error:
        remedy = "check the path" if source.endswith(".py") else f"is {source} installed or on PYTHONPATH?"
        if not isinstance(error, ImportError | AttributeError | OSError):
            remedy = f"importing it raised {type(error).__name__}"
        raise ConfigError(f"{what}: cannot import {text!r}: {error}; {remedy}") from error


def _module_from(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).expanduser()
    spec = importlib.util.spec_from_file_location(f"_user_code_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up their module here.
    spec.loader.exec_module(module)
    return module
