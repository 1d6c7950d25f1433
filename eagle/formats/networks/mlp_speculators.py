"""The MLP speculator's network: embedding, projection, norm and LM head a level, as fms-extras names them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, tensors_of
from eagle.formats.networks.network import Network, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading.head_folder import HeadFolder, compare_count, compare_size, read_sides
from eagle.formats.reading.target_files import TargetFiles

SPECULATOR = "mlp_speculator"
WRAPPER = "speculator."  # of the class for transformers
PARTS = ("emb", "proj", "ln", "head")
NAMES = {f"{part}.#.*": f"{WRAPPER}{part}.#.*" for part in PARTS}
TOP_TOKENS = (5, 4, 3, 2)  # of each level of their trees, and one of any later level
MOST = 64  # levels that any head has: a config may say anything


class Speculator(Network):
    """MLP speculators of fms-extras, plain or in its wrapper for transformers."""

    name, method, methods = "an MLP speculator", SPECULATOR, (SPECULATOR,)
    tensors, words = r"(speculator\.)?(emb|proj|ln|head)\.\d+\.(weight|bias)$", "mlp_?speculator"
    keys, common = ("top_k_tokens_per_head",), ("n_predict",)
    spellings = (("fms-extras", NAMES),)
    has_block = False
    prefixes = (WRAPPER,)
    spare: Mapping[str, str] = {}

    def _is_tied(self, head: HeadFolder) -> bool:
        """Whether levels share tensors: as the config says, else where a file holds fewer than it has levels."""
        stated = head.keys.read("tie_weights")
        counts = {len([name for name in head.tensors.stored if f"{part}." in name]) for part in ("emb", "proj", "head")}
        return bool(stated) if stated is not None else len(counts) > 1

    def rename(self, head: HeadFolder, name: str, ours: str) -> str:
        """Keep one of several tied tensors, under the first level that has it."""
        part, level, kind = ours.split(".", 2)
        first = min(int(level), 1 if part == "proj" else 0)
        return f"{part}.{first}.{kind}" if self._is_tied(head) else ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """Sizes are those of the tensors; whether the state is scaled stands in the config alone."""
        keys, tied = head.keys, self._is_tied(head)
        keys.taken |= {"top_k_tokens_per_head", "n_candidates", "num_lookahead_tokens", "emb_dim", "inner_dim"}
        read_sides(head, target, "proj.0.weight", "head.0.weight")
        entry, n_predict = head.entry("proj.0.weight"), keys.read("n_predict")
        inner, width = entry.shape if entry and len(entry.shape) == 2 else (1, None)
        compare_size(head, "emb_dim", keys.values.get("emb_dim"), width)
        stated = keys.values.get("inner_dim")
        compare_size(head, "inner_dim", width if stated == 0 else stated, inner)
        if n_predict is not None and n_predict > MOST:
            head.problem(f"config.json: n_predict is {n_predict}, expected at most {MOST}", "Correct it")
            n_predict = None
        numbered = (re.search(r"(?:emb|head|ln|proj)\.(\d+)\.", name) for name in head.tensors.stored)
        levels = len({level[1] for level in numbered if level})
        for name, default in {"scale_input": False, "tie_weights": tied}.items():
            if keys.read(name) is None:
                head.notes.append(f"no {name}: {str(default).lower()}")
        return {
            "levels": (n_predict or levels) if tied else compare_count(head, n_predict, levels, "levels"),
            "inner_dim": inner,
            "tie_weights": tied,
            "scale_input": bool(keys.read("scale_input")),
        }


@dataclass(frozen=True)
class PublishedSpeculator(NetworkLayout):
    """An MLP speculator as fms-extras names it; what levels share is written for each, as some readers ask for all."""

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """The layout of its wrapper for transformers."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        levels, each = range(settings.levels), dict[str, Tensor]()
        for part, kind in (name.split(".")[::2] for name in tensors if name.split(".")[1] == "0"):
            for level in levels:
                nearest = next(earlier for earlier in range(level, -1, -1) if f"{part}.{earlier}.{kind}" in tensors)
                each[f"{part}.{level}.{kind}"] = tensors[f"{part}.{nearest}.{kind}"].clone()
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "emb_dim": drafter.shape.hidden_size,
            "inner_dim": len(tensors["ln.0.weight"]),
            "vocab_size": drafter.shape.vocab_size,
            "n_predict": settings.levels,
            "top_k_tokens_per_head": [TOP_TOKENS[level] if level < len(TOP_TOKENS) else 1 for level in levels],
            "n_candidates": TOP_TOKENS[0],
            "tie_weights": bool(settings.tie_weights) and settings.levels > 1,  # of one level there is nothing to tie
            "scale_input": bool(settings.scale_input),
            "torch_dtype": str(tensors["ln.0.weight"].dtype).removeprefix("torch."),
        }
        return Layout(config, rename_tensors(each, NAMES), self.serve, deepest=settings.levels)
