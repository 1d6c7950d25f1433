"""Methods of the registry by what they are, for tests that take each of a kind."""

from __future__ import annotations

from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.drafters.levels.level_heads import LevelHeads

TRAINED = [name for name, method in DRAFTERS.items() if issubclass(method, TrainableDrafter)]
LEVEL_HEADS = [name for name, method in DRAFTERS.items() if issubclass(method, LevelHeads)]
# those whose settings tests do not choose one by one
BY_DEFAULT = [name for name in TRAINED if name not in ("eagle1", "hass", "eagle3", "draft_model")]
