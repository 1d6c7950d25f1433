"""The target drafts for itself behind a sparse cache (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Drafter, Reads
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.self_speculation.sparse_cache import OBSERVED, SnapState, SparseState
from eagle.target.cache import with_room

Select = Literal["recent", "snap"]


class SparseKv(Drafter):
    """All layers of the target behind `budget` columns of its keys and values.

    "recent" holds the first `sinks` tokens and the latest (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453); "snap"
    what the prompt's last tokens attend to, and all that follows the prompt (SnapKV, Li et al. 2024, arXiv 2404.14469).
    """

    reads = Reads(view=True, texts=True)

    def __init__(self, budget: int = 512, sinks: int = 4, select: Select = "recent") -> None:
        if select not in get_args(Select):
            raise ValueError(f"select is {select!r}, expected one of {', '.join(get_args(Select))}")
        if not 0 <= sinks < budget:
            raise ValueError(f"budget and sinks are {budget} and {sinks}, expected 0 <= sinks < budget")
        if select == "snap" and budget <= OBSERVED:
            raise ValueError(f"budget is {budget}, expected more than {OBSERVED}, the last tokens, which are all held")
        self.columns, self.sinks, self.select = budget, sinks, select
        self.views: tuple[Any, ...] = ()  # in a tuple, as heads keep what they borrow

    def bind_target(self, view: Any) -> None:
        """Take the target's layers for timing; "snap" refuses models whose attention cannot be observed."""
        if self.select == "snap":
            if not view.shows_attention:
                raise ValueError("the target's attention shows no queries to choose by: load it with 'sdpa'")
            if view.has_windows:
                raise ValueError("some layers have sliding windows, whose columns each head would choose: use 'recent'")
        self.views = (view,)

    def open_with(self, texts: Any) -> SparseState:
        """The state for several texts, with a separate cache."""
        if self.select == "snap":
            return SnapState(texts, self.columns)
        return SparseState(texts, self.columns, self.sinks)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Only the root: accepted columns are copied from the target's cache."""
        return 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """The target's columns that are held, the root's and a draft's; "snap" holds all that follow the prompt."""
        drafted = 1 + sum(self.forwards(self.budget or Budget()))
        held = tokens if self.select == "snap" else min(tokens, self.columns + drafted)
        return with_room(held) * column.cached

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor] | None:
        """A function to time: the target's forward of `rows` rows after the kept columns; None before it is bound."""
        if not self.views:
            return None
        (view,) = self.views
        cache, held = view.new_cache(), min(context, self.columns)
        tokens, positions = torch.ones(1, held + rows, dtype=torch.long), torch.arange(held + rows)[None]
        view.next_logits(tokens[:, :held], positions[:, :held], None, cache, scored=1)
        cache.length = held

        def run() -> Tensor:
            return view.next_logits(tokens[:, held:], positions[:, held:], None, cache, scored=scored)

        return run
