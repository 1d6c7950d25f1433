"""DFlash (Chen et al. 2026, arXiv 2602.06036): one forward pass over mask tokens predicts a block."""

from __future__ import annotations

from typing import Literal

from eagle.drafters.blocks.block_loss import ComparedBlocks, ComparedSettings


class DFlashSettings(ComparedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dflash"] = "dflash"


class DFlash(ComparedBlocks):
    """Blocks over a root and mask tokens, whose slots attend to one another; with `causal`, JetSpec's network."""

    borrows_logits = True
    Settings = DFlashSettings
    settings: DFlashSettings
