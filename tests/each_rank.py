"""A training run whose every process leaves the weights that it holds and the first features that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import recipes.train_eagle as script
from eagle.log import script as told


def main(argv: list[str]) -> None:
    """Run the script itself, watched where it calls the loop."""
    folder = Path(argv.pop(0))
    loop = script.train

    def watched(*args: Any, features: Any, **options: Any) -> Path:
        accelerator, _, head, _ = args
        rank = accelerator.process_index
        read = [example.features for example in features.read(range(4))]
        torch.save(read, folder / f"features-{rank}.pt")
        out = loop(*args, features=features, **options)
        # cloned, as a process may hold a part of a shared buffer
        tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
        torch.save(tensors, folder / f"head-{rank}.pt")
        return out

    script.train = watched
    script.main(argv)


if __name__ == "__main__":
    told(main)
