"""What is learned is what is recorded; apart from the other groups, because it takes as long as all of those."""

from __future__ import annotations

import pytest

from tests.golden import record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", ["training", "runs"])
def test_nothing_learned_differs_from_the_record(group: str) -> None:
    """Each difference is named by its item."""
    assert record.compare(group) == {}
