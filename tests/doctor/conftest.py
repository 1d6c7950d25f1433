"""The tiny target whose heads are examined."""

from __future__ import annotations

import pytest

from eagle import Target
from tests.families import build


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a llama that does not repeat itself."""
    return Target(build("llama"))
