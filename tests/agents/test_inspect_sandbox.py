"""Inspect's own checks of a sandbox provider, on `bubblewrap`."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 # pyright: ignore[reportWildcardImportFromLibrary]

from tinkerscript.isolation.inspect_sandbox import BubblewrapSandbox

NOT_HERE = {"test_exec_as_user": "there is one user, and no root"}
"""Checks that the sandbox does not pass, and why."""


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncGenerator[SandboxEnvironment]:
    reason = NOT_HERE.get(request.node.originalname)
    if reason:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    environments = await BubblewrapSandbox.sample_init("check", None, {})
    try:
        yield environments["default"]
    finally:
        await BubblewrapSandbox.sample_cleanup("check", None, environments, False)
