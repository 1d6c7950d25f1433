"""Train, measure and ship EAGLE-style draft heads."""

from eagle.checkpoint import load_drafter
from eagle.decode import Trace, generate, stream
from eagle.drafter import Budget
from eagle.target import Target
from eagle.tree import DraftTree
from eagle.verify import Sampling

__all__ = ["Budget", "DraftTree", "Sampling", "Target", "Trace", "generate", "load_drafter", "stream"]
