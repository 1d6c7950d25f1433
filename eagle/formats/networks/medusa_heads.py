"""Medusa's network: residual blocks and an LM head a level, as its authors, vLLM and ModelOpt name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, base_config, check_family, output_of, tensors_of
from eagle.formats.networks.network import Network, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import OUTPUT, HeadFolder, compare_count, count_parts, read_sides
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike

MEDUSA = "medusa"
AUTHORS = {"blocks.#.#.*": "#.#.linear.*", "heads.#.weight": "#.{layers}.weight"}  # blocks and LM head in one row
VLLM_NAMES = {"blocks.#.#.*": "blocks.#.layers.#.*", "heads.#.weight": "lm_heads.#.weight", OUTPUT: OUTPUT}
MODELOPT = (
    {"blocks.#.#.*": "medusa_head.#.#.linear.*", "heads.#.weight": "medusa_head.#.{layers}.weight"},
    {"blocks.#.#.*": "medusa_heads.#.#.linear.*", "heads.#.weight": "medusa_heads.#.{layers}.weight"},
    {"blocks.#.#.*": "medusa_heads.#.medusa_layers.#.linear.*", "heads.#.weight": "medusa_heads.#.lm_head.weight"},
)


class Medusa(Network):
    """Medusa heads of their authors, of vLLM and of ModelOpt."""

    name, method, methods = "Medusa heads", MEDUSA, (MEDUSA,)
    tensors = r"(medusa_heads?|lm_heads|blocks\.\d+\.layers)\.|\d+\.\d+\.(linear\.)?(weight|bias)$"
    words, keys = "medusa", ("medusa_num_heads", "medusa_num_layers")
    spellings = (("FasterDecoding/Medusa", AUTHORS), ("vLLM", VLLM_NAMES), *(("ModelOpt", names) for names in MODELOPT))
    has_block = False
    prefixes = ()
    spare: Mapping[str, str] = {r"model\..*": "they are the target's own"}

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """Levels and blocks are those of the file: published configs say two heads where there are five."""
        keys = head.keys
        nested = keys.section("medusa")
        heads = [keys.read("medusa_num_heads"), keys.read("num_heads"), nested.read("num_medusa_heads")]
        layers = [keys.read("medusa_num_layers"), nested.read("num_medusa_layers")]
        keys.taken |= {"version", "base_model_name_or_path", "medusa_fc_bias", "max_paths", "topk", "max_seq_len"}
        shares = bool(keys.read("original_lm_head")) or not any(name.startswith("heads.") for name in head.names)
        scale, fewer = keys.read("logit_scale"), keys.read("truncated_vocab_size")
        if scale not in (None, 1.0) and not shares:
            head.problem(f"config.json: logit_scale is {scale}, and LM heads here have none", fatal=False)
        if fewer not in (None, keys.read("vocab_size")) or "token_map" in head.tensors.stored:
            head.problem("it drafts some tokens of the vocabulary alone (token_map), which no Medusa head here can", "")
        if shares and "heads.0.weight" in head.names:
            head.names[OUTPUT] = head.names.pop("heads.0.weight")
        read_sides(head, target, "blocks.0.0.weight", OUTPUT if shares else "heads.0.weight")
        levels, blocks = count_parts(head, r"blocks\.(\d+)"), count_parts(head, r"blocks\.\d+\.(\d+)")
        return {
            "levels": compare_count(head, next(filter(None, heads), None), levels, "heads"),
            "layers": compare_count(head, next(filter(None, layers), None), blocks, "layers of each"),
            "lm_head": "target" if shares else "own",
        }

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """Biases that vLLM would not load, and counts that it would read instead of its own."""
        is_served = head.layout == "vLLM"
        biases = [name for name in head.names if name.startswith("blocks.") and name.endswith(".bias")]
        if biases and head.config.get("medusa_fc_bias") is not True:
            yield strike(traps.MEDUSA_BIAS, fatal=is_served)
        counts = {"medusa_num_heads", "medusa_num_layers", "num_heads"}
        if keys := [key for key in head.config if re.search("num.*(heads|layers)", key) and key not in counts]:
            yield strike(traps.MEDUSA_COUNTS, fatal=is_served, keys=", ".join(map(ascii, keys))[:200])

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Biases, all of them: vLLM's heads have none unless their config says so."""
        some = any(ours.startswith("blocks.") and ours.endswith(".bias") for ours in head.names)
        return "" if some or not name.endswith(".bias") else "no biases: zeros, which change nothing"


@dataclass(frozen=True)
class ServedMedusa(NetworkLayout):
    """Medusa's network for vLLM, which drafts the likeliest token of each head, whatever scales or caps the logits."""

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """No key beside the two has "num" with "heads" or "layers" in it, which would be taken for one of them."""
        settings, shares = drafter.settings, drafter.settings.lm_head == "target"
        tensors = rename_tensors(tensors_of(drafter), VLLM_NAMES)
        if shares:
            tensors["lm_heads.0.weight"] = output_of(drafter, engine, "train with drafter.lm_head=own")
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            **base_config(drafter),
            "medusa_num_heads": settings.levels,
            "medusa_num_layers": settings.layers,
            "medusa_fc_bias": True,
            "original_lm_head": shares,
        }
        return Layout(config, tensors, self.serve, deepest=settings.levels)


@dataclass(frozen=True)
class PublishedMedusa(NetworkLayout):
    """Medusa's network as its authors' code names it, with LM heads of its own or with the target's (version 2)."""

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """The blocks and the LM head of a level are numbered in one row."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        check_family(drafter, target_config, ("llama", "mistral"), engine)
        check_shared(tensors, 0, engine)
        config = {
            "model_type": "medusa",  # without one the loader takes the family from words in the folder's path
            **base_config(drafter),
            "medusa_num_heads": settings.levels,
            "medusa_num_layers": settings.layers,
            "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
            **({"version": "2"} if settings.lm_head == "target" else {}),
        }
        tensors = rename_tensors(tensors, AUTHORS, layers=settings.layers)
        return Layout(config, tensors, self.serve, "medusa_lm_head.pt", settings.levels)


def check_shared(tensors: Mapping[str, Tensor], first: int, engine: str) -> None:
    """Refuse different residual blocks if the published code runs one block repeatedly."""
    for name, tensor in tensors.items():
        block = re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(weight|bias)", name)
        if not block or int(block[2]) <= first:
            continue
        if not torch.equal(tensor, tensors[f"blocks.{block[1]}.{first}.{block[3]}"]):
            raise ValueError(
                f"{engine}: {name} differs from block {first} of its level, and that code runs one block again and "
                f"again: train with drafter.layers={first + 1}, or export to an engine that has several"
            )
