"""P-EAGLE as other tools write it: EAGLE-3's tensors, further blocks, and a state for what is not known yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.head_parts import LAYER_IDS, read_sizes
from eagle.formats.networks.level_reader import FOLLOWS, ROTARY, LevelReader, compare_count, count_parts
from eagle.formats.networks.networks import EMBEDDING
from eagle.formats.networks.parallel_layouts import PEAGLE
from eagle.formats.reading.foreign_head import read_draft_tokens
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.keys import short
from eagle.formats.reading.target_files import EMBEDDINGS, TargetFiles

NAMES = {
    r"(?:model\.)?midlayer\.(?!.*inv_freq)(.*)": r"layers.0.\1",
    r"(?:model\.)?(layers\.\d+\.(?!.*inv_freq).*|fc\.weight|fc_norm\.\d+\.weight|norm\.weight|mask_hidden)": r"\1",
    r"(lm_head\.weight|d2t|t2d)": r"\1",
    r"(?:model\.)?embed_tokens\.weight": EMBEDDING,
}
SPARE = {ROTARY: FOLLOWS, r"verifier_(norm|lm_head)\.weight": "training alone reads it"}
USUAL_DEPTHS = 8


class ParallelReader(LevelReader):
    """P-EAGLE's heads, of speculators and of SpecForge."""

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """EAGLE-3's switches, and the mask token, for which there is no default."""
        keys, nested = head.keys, head.nested
        read_sizes(head)
        stated = keys.size("draft_vocab_size")
        vocab_size, entry = head.shape["vocab_size"], head.entry("lm_head.weight")
        head.draft_vocab_size = stated or (entry.shape[0] if entry and len(entry.shape) == 2 else vocab_size)
        if head.draft_vocab_size > vocab_size:
            head.problem(f"config.json: draft_vocab_size is {head.draft_vocab_size} of {vocab_size}", fatal=False)
            head.draft_vocab_size = vocab_size
        if head.draft_vocab_size == vocab_size:
            for name in {"d2t", "t2d"} & head.names.keys():
                head.notes.append(f"{head.names.pop(name)} is left out: the head says all tokens")
        else:
            self._check_vocabulary(head)
        self._refuse_others(head)
        blocks = compare_count(
            head, head.block.size("num_hidden_layers"), count_parts(head, r"layers\.(\d+)\."), "layers"
        )
        switches = {}
        keys.taken |= {"norm_output"}  # a state that is never read again
        for name in ("norm_before_residual", "fc_norm"):
            value = keys.flag(name)
            value = nested.flag(name) if value is None else value
            if value is None:
                head.notes.append(f"no {name}: false, as P-EAGLE's readers take it")
            switches[name] = bool(value)
        is_reduced = head.draft_vocab_size < vocab_size
        return {
            "taps": self._read_taps(head, target),
            "blocks": max(blocks, 1),
            "mask_token": self._read_mask(head),
            "draft_vocab": head.draft_vocab_size if is_reduced else None,
            "intermediate_size": head.shape["intermediate_size"],
            **switches,
        }

    def _check_vocabulary(self, head: HeadFolder) -> None:
        """The draft's tokens are offsets."""
        entry, size = head.entry("d2t"), head.draft_vocab_size
        if entry is None or entry.shape != (size,) or entry.dtype.is_floating_point:
            what = "is missing" if entry is None else f"is {list(entry.shape)} in {entry.dtype}"
            head.problem(f"d2t {what}, expected {size} whole numbers", "Engines take its numbers for tokens: export it")
            return
        tokens, why = read_draft_tokens(head.load("d2t").long(), head.shape["vocab_size"])
        if tokens is None:
            head.problem(why, "Engines would name other tokens than the head means")
        elif (mask := head.entry("t2d")) is not None and not (
            mask.shape == (head.shape["vocab_size"],) and torch.equal(head.load("t2d").bool(), self._mark(head, tokens))
        ):
            head.problem("t2d marks other tokens than d2t", "Make both again from the same vocabulary")

    def _mark(self, head: HeadFolder, tokens: Tensor) -> Tensor:
        """[V], which tokens can be drafted."""
        return torch.zeros(head.shape["vocab_size"], dtype=torch.bool).index_fill_(0, tokens, True)

    def _refuse_others(self, head: HeadFolder) -> None:
        """Record settings that no head of this project has."""
        keys, block = head.keys, head.block
        refused = {
            "hidden_act": block.text("hidden_act") not in (None, "silu"),
            "layer_types": "sliding_attention" in block.words("layer_types") or bool(block.flag("use_sliding_window")),
            "norm_before_fc": bool(keys.flag("norm_before_fc")),
            "target_hidden_size": keys.size("target_hidden_size") not in (None, head.shape["hidden_size"]),
            "quantization_config": bool(keys.values.get("quantization_config")),
        }
        for name in (name for name, is_refused in refused.items() if is_refused):
            value = next(part.values[name] for part in (keys, block) if name in part.values)
            head.problem(f"config.json: {name} is {short(value)}, which no head here can be", fatal=False)
        for part in (keys, block, head.nested):
            part.taken |= {
                "tie_word_embeddings",
                "attention_bias",
                "mlp_bias",
                "sliding_window",
                "use_aux_hidden_state",
            }
        keys.taken |= {"quantization_config", "speculators_config"}

    def _read_taps(self, head: HeadFolder, target: TargetFiles | None) -> tuple[int, ...]:
        """Inputs of layers; the usual ones where nothing names them."""
        taps, outputs = head.keys.whole(LAYER_IDS), head.nested.whole(LAYER_IDS)
        inner = None if outputs is None else tuple(layer + 1 for layer in outputs)
        if taps and inner and taps != inner:
            head.problem(
                f"the layer ids disagree: inputs {taps}, outputs {outputs}", "Outputs are one less than inputs"
            )
        if found := taps or inner:
            if target and not all(0 <= tap < target.layers for tap in found):
                head.problem(f"layer ids {found} for a target of {target.layers} layers", "Name the right target")
            return found
        if target is None:
            head.problem(
                "config.json: no layer ids", "Name the target with --target, and the usual ones are taken", False
            )
            return (1, 2, 3)
        usual = (2, target.layers // 2, target.layers - 3)
        head.notes.append(f"no layer ids: taps {usual}, as engines take them of a target with {target.layers} layers")
        return usual

    def _read_mask(self, head: HeadFolder) -> int:
        """The token that stands where none is known, by any of its names."""
        named = {name: head.keys.token(name) for name in ("mask_token_id", "pard_token", "ptd_token_id")}
        masks = {name: token for name, token in named.items() if token is not None}
        size = head.shape["vocab_size"]
        if not masks:
            head.problem("config.json: no mask_token_id, which P-EAGLE reads", "See the training run's command")
        elif len(set(masks.values())) > 1:
            head.problem(f"config.json: the mask tokens disagree: {masks}", "Keep the right one")
        elif max(masks.values()) >= size:
            head.problem(
                f"config.json: mask_token_id is {max(masks.values())}, the vocabulary has {size}", "Correct it"
            )
        return next(iter(masks.values()), 0)

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """Those of the config; queries and keys are normed where there are such norms."""
        further = {
            "num_hidden_layers": head.settings["blocks"],
            "draft_vocab_size": head.draft_vocab_size,
            "qk_norm": "layers.0.self_attn.q_norm.weight" in head.names,
        }
        return head_shape(SimpleNamespace(**head.shape), **further)

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """The mask of the draft's tokens, which follows from them."""
        return "no t2d: made from d2t" if name == "t2d" else ""

    def make_tensor(self, head: HeadFolder, name: str) -> Tensor:
        """Offsets as whole numbers; what stands for unknown states in three dimensions."""
        if name == "t2d":
            offsets = head.load("d2t").long()
            return self._mark(head, offsets + torch.arange(len(offsets)))
        return head.load(name).long() if name == "d2t" else head.load(name)


READER = ParallelReader(PEAGLE, {"P-EAGLE": NAMES}, SPARE, {EMBEDDING: EMBEDDINGS}, ("d2t", "t2d"))
