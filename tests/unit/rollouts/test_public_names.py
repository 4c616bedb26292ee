"""The public names of the room: `__all__` is exact, complete and light to import."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    "package",
    [
        "tinkerscript.rollouts",
        "tinkerscript.rollouts.alignment",
        "tinkerscript.inference_ctx",
    ],
)
def test_all_is_exact(package: str) -> None:
    module = import_module(package)
    exported: list[str] = module.__all__
    assert len(exported) == len(set(exported))
    for name in exported:
        assert not isinstance(getattr(module, name), ModuleType)
    public = {n for n, v in vars(module).items() if n[0] != "_" and not isinstance(v, ModuleType)}
    assert public - {"annotations", "TYPE_CHECKING"} <= set(exported)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name


def test_the_room_needs_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "import tinkerscript.inference_ctx, tinkerscript.rollouts.parquet, tinkerscript.rollouts.trainers\n"
        "print({'torch', 'tinker', 'transformers', 'pyarrow', 'datasets', 'pydantic'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
