"""A training run whose every process leaves the weights that it holds and the first features that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import recipes.train_eagle as script
from eagle.log import script as told


def main(argv: list[str]) -> None:
    """The script itself, looked at where it calls the loop."""
    folder, loop = Path(argv.pop(0)), script.train

    def watched(
        accelerator: Any, recipe: Any, head: Any, frozen: Any, features: Any, **options: Any
    ) -> Path:
        rank = accelerator.process_index
        seen = features.read(range(4))
        torch.save([example.features for example in seen], folder / f"features-{rank}.pt")
        out = loop(accelerator, recipe, head, frozen, features, **options)
        torch.save(
            {name: tensor.clone() for name, tensor in head.state_dict().items()},
            folder / f"head-{rank}.pt",
        )
        return out

    script.train = watched
    script.main(argv)


if __name__ == "__main__":
    told(main)
