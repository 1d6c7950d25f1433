"""Hydra's network: heads that read the drafted tokens, behind a prefix layer or without one, as its authors name it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, base_config, check_family, tensors_of
from eagle.formats.networks.medusa_heads import check_shared
from eagle.formats.networks.network import FOLLOWS, ROTARY, Network, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout
from eagle.formats.reading.config_keys import USUAL_THETA, short
from eagle.formats.reading.head_folder import EMBEDDING, HeadFolder, compare_count, count_parts, read_sides
from eagle.formats.reading.target_files import TargetFiles

HYDRA = "hydra"
PREFIX = "prefix_embeding_layer."  # as they spell it
PLAIN = {
    "blocks.#.#.residual.*": "hydra_mlp.#.#.res_connection.*",
    "blocks.#.#.*": "hydra_mlp.#.#.linear.*",
    "heads.#.*": "hydra_lm_head.#.*",
    EMBEDDING: "input_embed_fn.weight",
}
PREFIXED = {
    **PLAIN,
    "heads.#.*": "hydra_lm_head.#.1.*",
    "layers.0.*": f"{PREFIX}layers.0.*",
    "norm.weight": f"{PREFIX}norm.weight",
}


class Hydra(Network):
    """Hydra heads of their authors, with a prefix layer or without."""

    name, method, methods = "Hydra heads", HYDRA, (HYDRA,)
    tensors, words = r"(hydra_mlp|hydra_lm_head|prefix_embeding_layer)\.", "hydra"
    keys = ("hydra_num_heads",)
    spellings = (("zankner/Hydra", PREFIXED), ("zankner/Hydra", PLAIN))
    has_block = False
    prefixes = ()
    spare: Mapping[str, str] = {
        ROTARY: FOLLOWS,
        r"prefix_embeding_layer\.embed_tokens\.weight": "their code never reads it",
    }
    rotates = False  # by its config: the prefix layer has one theta for every target

    def rename(self, head: HeadFolder, name: str, ours: str) -> str:
        """With a prefix layer each block stands behind a dropout, which has a number too."""
        if not self._has_prefix(head):
            return ours
        return re.sub(r"^(blocks\.\d+\.)(\d*[13579])\.", lambda found: f"{found[1]}{int(found[2]) // 2}.", ours)

    def _has_prefix(self, head: HeadFolder) -> bool:
        return any(name.startswith(f"{PREFIX}layers.") for name in head.tensors.stored)

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """Heads that read the tokens between state and guess, over the target's last state."""
        keys, prefix = head.keys, self._has_prefix(head)
        keys.taken |= {"base_model_name_or_path", "hidden_state_offset"}
        arch, offset = keys.read("hydra_head_arch"), keys.values.get("hidden_state_offset")
        if arch not in (None, "prefix-mlp" if prefix else "mlp"):
            head.problem(f"config.json: hydra_head_arch is {short(arch)}, and the tensors are not such", fatal=False)
        if offset not in (None, 0):
            what = f"config.json: hidden_state_offset is {short(offset)}: heads here read the last state"
            head.problem(what, fatal=False)
        if keys.read("grounded_heads") is False or "blocks.0.0.residual.weight" not in head.names:
            what = "heads that do not read the drafted tokens (grounded_heads is false); none here are such"
            head.problem(what, fatal=False)
        read_sides(head, target, "heads.0.weight", "heads.0.weight")
        if prefix and target is None:
            head.problem("the sizes of the prefix layer are the target's", "Name the target with --target", fatal=False)
        layers = count_parts(head, r"blocks\.\d+\.(\d+)")
        if layers > 2:
            head.notes.append(f"blocks 1 to {layers - 1} of a level are one there, and as many here that begin equal")
        levels = count_parts(head, r"blocks\.(\d+)")
        return {
            "levels": compare_count(head, keys.read("hydra_num_heads"), levels, "heads"),
            "layers": compare_count(head, keys.read("hydra_num_layers"), layers, "layers of each"),
            "prefix": prefix,
        }

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """The target's, but for the base of its rotary positions, which that code never looked at."""
        shape = super().read_shape(head, target)
        if head.settings["prefix"] and shape.rope_parameters["rope_theta"] != USUAL_THETA:
            note = f"rope_theta of the prefix layer: {USUAL_THETA:g} for every target there"
            head.notes += [note] if note not in head.notes else []
            shape.rope_parameters = {**shape.rope_parameters, "rope_theta": USUAL_THETA}
        return shape


@dataclass(frozen=True)
class PublishedHydra(NetworkLayout):
    """Hydra's network as its authors' code names it; in front of each part of heads with a prefix stands a dropout."""

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """The code takes the embedding from the target, and the sizes of the prefix layer too."""
        settings, tensors = drafter.settings, tensors_of(drafter)
        check_family(drafter, target_config, ("llama",), engine)
        check_shared(tensors, 1, engine)
        theta = drafter.shape.rope_parameters["rope_theta"]
        if settings.prefix and theta != USUAL_THETA:
            raise ValueError(
                f"{engine}: the prefix layer has rope_theta {theta:g}, and that code {USUAL_THETA:g} for any "
                "target: train with drafter.prefix=false"
            )
        if settings.prefix:
            tensors = {
                re.sub(r"^(blocks\.\d+\.)(\d+)", lambda found: f"{found[1]}{2 * int(found[2]) + 1}", name): tensor
                for name, tensor in tensors.items()
            }
        config = {
            **base_config(drafter),
            "hydra_num_heads": settings.levels,
            "hydra_num_layers": settings.layers,
            "hydra_head_arch": "prefix-mlp" if settings.prefix else "mlp",
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": getattr(target_config, "name_or_path", "") or None,
        }
        tensors = rename_tensors(tensors, PREFIXED if settings.prefix else PLAIN)
        return Layout(config, tensors, self.serve, "hydra_lm_head.pt", settings.levels)
