"""Read Medusa, Hydra, MLP speculator and Falcon heads of other tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.head_parts import read_sizes
from eagle.formats.networks.injected_readers import INJECTED_READERS
from eagle.formats.networks.level_layouts import USUAL_THETA
from eagle.formats.networks.level_reader import (
    FOLLOWS,
    MOST,
    OUTPUT,
    ROTARY,
    LevelReader,
    compare_count,
    compare_size,
    count_parts,
    read_sides,
)
from eagle.formats.networks.mtp_reader import READER as MTP_READER
from eagle.formats.networks.networks import EMBEDDING
from eagle.formats.networks.parallel_reader import READER as PARALLEL_READER
from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.keys import short
from eagle.formats.reading.kinds import MTP
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Trap


class MedusaReader(LevelReader):
    """Medusa heads of their authors, of vLLM and of ModelOpt."""

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """Levels and blocks are those of the file: published configs say two heads where there are five."""
        keys = head.keys
        nested = keys.section("medusa")
        heads = [keys.size("medusa_num_heads"), keys.size("num_heads"), nested.size("num_medusa_heads")]
        layers = [keys.size("medusa_num_layers"), nested.size("num_medusa_layers")]
        keys.taken |= {"version", "base_model_name_or_path", "medusa_fc_bias", "max_paths", "topk", "max_seq_len"}
        shares = bool(keys.flag("original_lm_head")) or not any(name.startswith("heads.") for name in head.names)
        scale, fewer = keys.number("logit_scale"), keys.size("truncated_vocab_size")
        if scale not in (None, 1.0) and not shares:
            head.problem(f"config.json: logit_scale is {scale}, and LM heads here have none", fatal=False)
        if fewer not in (None, keys.size("vocab_size")) or "token_map" in head.tensors.stored:
            head.problem("it drafts some tokens of the vocabulary alone (token_map), which no Medusa head here can", "")
        if shares and "heads.0.weight" in head.names:
            head.names[OUTPUT] = head.names.pop("heads.0.weight")
        read_sides(head, target, "blocks.0.0.weight", OUTPUT if shares else "heads.0.weight")
        return {
            "levels": compare_count(
                head, next(filter(None, heads), None), count_parts(head, r"blocks\.(\d+)"), "heads"
            ),
            "layers": compare_count(
                head, next(filter(None, layers), None), count_parts(head, r"blocks\.\d+\.(\d+)"), "layers of each"
            ),
            "lm_head": "target" if shares else "own",
        }

    def list_traps(self, head: HeadFolder) -> Iterator[tuple[Trap, dict[str, Any]]]:
        """What vLLM makes of a config."""
        biases = [name for name in head.names if name.startswith("blocks.") and name.endswith(".bias")]
        if biases and head.config.get("medusa_fc_bias") is not True:
            yield traps.MEDUSA_BIAS, {}
        counts = {"medusa_num_heads", "medusa_num_layers", "num_heads"}
        if keys := [key for key in head.config if re.search("num.*(heads|layers)", key) and key not in counts]:
            yield traps.MEDUSA_COUNTS, {"keys": ", ".join(map(ascii, keys))[:200]}

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Biases, all of them: vLLM's heads have none unless their config says so."""
        some = any(ours.startswith("blocks.") and ours.endswith(".bias") for ours in head.names)
        return "" if some or not name.endswith(".bias") else "no biases: zeros, which change nothing"

    def make_tensor(self, head: HeadFolder, name: str) -> Tensor:
        """Make a tensor; a bias that no file holds is zero."""
        return head.load(name) if name in head.names else torch.zeros(head.shape["hidden_size"])


class HydraReader(LevelReader):
    """Hydra heads of their authors, with a prefix layer or without."""

    def rename(self, head: HeadFolder, name: str, ours: str) -> str:
        """With a prefix layer each block stands behind a dropout, which has a number too."""
        if not self._has_prefix(head):
            return ours
        return re.sub(r"^(blocks\.\d+\.)(\d*[13579])\.", lambda found: f"{found[1]}{int(found[2]) // 2}.", ours)

    def _has_prefix(self, head: HeadFolder) -> bool:
        return any(name.startswith("prefix_embeding_layer.layers.") for name in head.tensors.stored)

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """Heads that read the tokens between state and guess, over the target's last state."""
        keys, prefix = head.keys, self._has_prefix(head)
        keys.taken |= {"base_model_name_or_path"}
        arch, offset = keys.text("hydra_head_arch"), keys.values.get("hidden_state_offset")
        keys.taken |= {"hidden_state_offset"}
        if arch not in (None, "prefix-mlp" if prefix else "mlp"):
            head.problem(
                f"config.json: hydra_head_arch is {short(arch)}, and the tensors are not such", "", fatal=False
            )
        if offset not in (None, 0):
            head.problem(
                f"config.json: hidden_state_offset is {short(offset)}: heads here read the last state", "", False
            )
        if keys.flag("grounded_heads") is False or "blocks.0.0.residual.weight" not in head.names:
            head.problem(
                "heads that do not read the drafted tokens (grounded_heads is false); none here are such", "", False
            )
        read_sides(head, target, "heads.0.weight", "heads.0.weight")
        if prefix and target is None:
            head.problem("the sizes of the prefix layer are the target's", "Name the target with --target", fatal=False)
        layers = count_parts(head, r"blocks\.\d+\.(\d+)")
        if layers > 2:
            head.notes.append(f"blocks 1 to {layers - 1} of a level are one there, and as many here that begin equal")
        levels = count_parts(head, r"blocks\.(\d+)")
        return {
            "levels": compare_count(head, keys.size("hydra_num_heads"), levels, "heads"),
            "layers": compare_count(head, keys.size("hydra_num_layers"), layers, "layers of each"),
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


class SpeculatorReader(LevelReader):
    """MLP speculators of fms-extras, plain or in its wrapper for transformers."""

    def _is_tied(self, head: HeadFolder) -> bool:
        """Whether levels share tensors: as the config says, else where a file holds fewer than it has levels."""
        stated = head.keys.flag("tie_weights")
        counts = {len([name for name in head.tensors.stored if f"{part}." in name]) for part in ("emb", "proj", "head")}
        return bool(stated) if stated is not None else len(counts) > 1

    def rename(self, head: HeadFolder, name: str, ours: str) -> str:
        """Keep one of several tied tensors, under the first level that has it."""
        part, level, kind = ours.split(".")
        first = min(int(level), 1 if part == "proj" else 0)
        return f"{part}.{first}.{kind}" if self._is_tied(head) else ours

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """Sizes are those of the tensors; whether the state is scaled stands in the config alone."""
        keys, tied = head.keys, self._is_tied(head)
        keys.taken |= {"top_k_tokens_per_head", "n_candidates", "num_lookahead_tokens", "emb_dim", "inner_dim"}
        read_sides(head, target, "proj.0.weight", "head.0.weight")
        entry, n_predict = head.entry("proj.0.weight"), keys.size("n_predict")
        inner, width = entry.shape if entry and len(entry.shape) == 2 else (1, None)
        compare_size(head, "emb_dim", keys.values.get("emb_dim"), width)
        stated = keys.values.get("inner_dim")
        compare_size(head, "inner_dim", width if stated == 0 else stated, inner)
        if n_predict is not None and n_predict > MOST:
            head.problem(f"config.json: n_predict is {n_predict}, expected at most {MOST}", "Correct it")
            n_predict = None
        found = len(
            {name.split(".")[-2] for name in head.tensors.stored if re.search(r"(emb|head|ln|proj)\.\d+\.", name)}
        )
        for name, default in {"scale_input": False, "tie_weights": tied}.items():
            if keys.flag(name) is None:
                head.notes.append(f"no {name}: {str(default).lower()}")
        return {
            "levels": (n_predict or found) if tied else compare_count(head, n_predict, found, "levels"),
            "inner_dim": inner,
            "tie_weights": tied,
            "scale_input": bool(keys.flag("scale_input")),
        }


class FalconReader(LevelReader):
    """Falcon heads of their authors: EAGLE-1's tensors, and an LSTM that begins anew at every place."""

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """The block's sizes are those of the config, as EAGLE-1's are."""
        read_sizes(head)
        k = head.keys.size("k_mask")
        if k is None:
            head.problem("config.json: no k_mask, the tokens of a block", "Take it from the config of the training run")
        if (act := head.keys.text("hidden_act")) not in (None, "silu"):
            head.problem(f"config.json: hidden_act is {short(act)}, heads here have silu", fatal=False)
        # a second layer and biases would be tensors that nothing here has
        head.keys.taken |= {
            "bias",
            "num_hidden_layers",
            "attention_bias",
            "mlp_bias",
            "qkv_bias",
            "tie_word_embeddings",
        }
        head.notes.append(
            "the LSTM begins at zeros at every place, as it does there for one text: its forget gates change nothing, "
            "and their rows are left out"
        )
        return {"k": k or 1}

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """The config's sizes."""
        return head_shape(SimpleNamespace(**head.shape))

    def size_of(self, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
        """An LSTM has a fourth gate, the second of its rows."""
        return (size[0] // 3 * 4, *size[1:]) if name.startswith("gates.") else size

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """Biases of the gates."""
        return "no biases of the LSTM: zeros" if re.fullmatch(r"gates\.\d\.bias", name) else ""

    def make_tensor(self, head: HeadFolder, name: str) -> Tensor:
        """Input, cell and output gate; both biases of a gate are one."""
        if not name.startswith("gates."):
            return head.load(name)
        if name not in head.names:
            return torch.zeros(3 * head.shape["hidden_size"])
        read = head.load(name)
        if name.endswith(".bias") and (theirs := head.names[name].replace("_ih_", "_hh_")) in head.tensors.stored:
            read = read + head.tensors.load(theirs)
        entry, _, cell, output = read.chunk(4)
        return torch.cat([entry, cell, output])


READERS: dict[str, LevelReader] = {
    "Medusa heads": MedusaReader(
        "medusa",
        {
            "FasterDecoding/Medusa": {
                r"(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.\2.\3",
                r"(\d+)\.\d+\.weight": r"heads.\1.weight",
            },
            "vLLM": {
                r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)": r"blocks.\1.\2.\3",
                r"lm_heads\.(\d+)\.weight": r"heads.\1.weight",
                r"lm_head\.weight": OUTPUT,
            },
            "ModelOpt": {
                r"medusa_heads?\.(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.\2.\3",
                r"medusa_heads?\.(\d+)\.\d+\.weight": r"heads.\1.weight",
                r"medusa_heads\.(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.\2.\3",
                r"medusa_heads\.(\d+)\.lm_head\.weight": r"heads.\1.weight",
            },
        },
        {r"model\..*": "they are the target's own"},
    ),
    "Hydra heads": HydraReader(
        "hydra",
        {
            "zankner/Hydra": {
                r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)": r"blocks.\1.\2.\3",
                r"hydra_mlp\.(\d+)\.(\d+)\.res_connection\.(weight|bias)": r"blocks.\1.\2.residual.\3",
                r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)": r"heads.\1.\2",
                r"prefix_embeding_layer\.(layers\.0\.(?!.*inv_freq).*|norm\.weight)": r"\1",
                r"input_embed_fn\.weight": EMBEDDING,
            }
        },
        {ROTARY: FOLLOWS, r"prefix_embeding_layer\.embed_tokens\.weight": "their code never reads it"},
    ),
    "an MLP speculator": SpeculatorReader(
        "mlp_speculator",
        {"fms-extras": {r"(?:speculator\.)?(emb|proj|ln|head)\.(\d+)\.(weight|bias)": r"\1.\2.\3"}},
        {},
    ),
    "a FALCON head": FalconReader(
        "falcon",
        {
            "Bestpay-inc/Falcon": {
                r"lstm\.(weight|bias)_ih_l([01])": r"gates.\2.\1",
                r"(layers\.0\.(?!.*inv_freq).*)": r"\1",
                r"embed_tokens\.weight": EMBEDDING,
            }
        },
        {ROTARY: FOLLOWS, r"lstm\.(weight|bias)_hh_l[01]": "the LSTM has no state that it could read"},
    ),
    **INJECTED_READERS,
    "a P-EAGLE head": PARALLEL_READER,
    MTP.name: MTP_READER,
}
