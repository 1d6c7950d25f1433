"""Behaviour is what is recorded; `python -m tests.golden.record --write` records it anew where a change is meant."""

from __future__ import annotations

import pytest

from tests.golden import record

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", ["decoding", "families", "files", "commands"])
def test_nothing_differs_from_the_record(group: str) -> None:
    """Each difference is named by its item."""
    assert record.compare(group) == {}
