"""The service that is checked."""

from __future__ import annotations

import pytest
from service_target import Target, target_here


@pytest.fixture(scope="session")
def target() -> Target:
    found = target_here()
    if found is None:
        pytest.skip("TINKER_API_KEY is not set: there is no service to ask")
    return found
