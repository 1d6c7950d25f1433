"""Read DFlash, DSpark and Domino heads of other tools: the slots' convention and the logits' correction."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from eagle.drafters.parts.decoder_block import head_shape
from eagle.formats.networks.head_parts import read_sizes
from eagle.formats.networks.injected_layouts import CONFIDENCE, DFLASH, DSPARK
from eagle.formats.networks.level_reader import (
    FOLLOWS,
    OUTPUT,
    ROTARY,
    LevelReader,
    compare_count,
    compare_size,
    count_parts,
)
from eagle.formats.networks.networks import EMBEDDING
from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import SPECULATORS, HeadFolder
from eagle.formats.reading.keys import short
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Trap

ZLAB, DEEPSPEC, SPECFORGE = "z-lab/dflash", "deepseek-ai/DeepSpec", "sgl-project/SpecForge"
MARKOV, DOMINO = "markov_head.markov_w1.weight", "embed_proj.0.weight"
NAMES = {
    r"(?:model\.)?(layers\.\d+\.(?!.*inv_freq).*|fc\.weight|hidden_norm\.weight|norm\.weight)": r"\1",
    r"(?:model\.)?(?:logit_head\.)?((?:markov_head|confidence_head|prefix_gru|embed_proj)\..*)": r"\1",
    r"(?:model\.)?embed_tokens\.weight": EMBEDDING,
    r"lm_head\.weight": OUTPUT,
}
SPARE = {ROTARY: FOLLOWS, r"verifier_(norm|lm_head)\.weight": "training alone reads it"}
UNLIKE = (  # keys of dflash_config that change what is computed
    *("use_swa", "attention_value_scale", "conv_kernel_size", "selector_rank", "output_multiplier"),
    *("final_logit_softcapping", "input_embedding_scale"),
)
OWN_PLACE = "slot j names the token at its own place (z-lab's DFlash)"
BEHIND = "slot k names the token behind its place (DeepSpec's DFlash and DSpark)"


class InjectedReader(LevelReader):
    """Reads block drafters of z-lab, SpecForge, DeepSpec and speculators."""

    def method_of(self, head: HeadFolder) -> str:
        """DSpark where anything corrects the logits or tells a confidence."""
        return DSPARK if {MARKOV, DOMINO, CONFIDENCE} & head.names.keys() else DFLASH

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> dict[str, Any]:
        """Sizes are those of the tensors; what the slots name stands in the config alone."""
        keys, head.nested = head.keys, head.keys.section("dflash_config")
        head.layout = self._find_layout(head)
        read_sizes(head)
        blocks = compare_count(
            head, head.block.size("num_hidden_layers"), count_parts(head, r"layers\.(\d+)\."), "layers"
        )
        self._refuse_others(head)
        slots = head.nested.size("block_size") or keys.size("block_size")
        if slots is None:
            head.problem(
                "config.json: no block_size, the slots of a block", "Take it from the config of the training run"
            )
        settings = {
            "taps": self._read_taps(head, target, blocks),
            "blocks": max(blocks, 1),
            "slots": slots or 2,
            "sample_from_anchor": self._read_anchor(head),
            "intermediate_size": head.shape["intermediate_size"],
            "causal": bool(_first(keys.flag("is_causal"), head.nested.flag("causal"))),
            "mask_token": self._read_mask(head),
        }
        corrected = self._read_correction(head)
        return settings if self.method_of(head) == DFLASH else settings | corrected

    def _find_layout(self, head: HeadFolder) -> str:
        """The project that writes configs like this one."""
        config = head.config
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            return SPECULATORS
        if "dflash_config" not in config and ("markov_rank" in config or "Qwen3DSparkModel" in head.architectures):
            return DEEPSPEC
        return SPECFORGE if head.nested.values.get("projector_type") else ZLAB

    def _refuse_others(self, head: HeadFolder) -> None:
        """Record settings that no block of this project has."""
        keys, block, nested = head.keys, head.block, head.nested
        slides = "sliding_attention" in block.words("layer_types") or bool(block.flag("use_sliding_window"))
        drafts, width = keys.size("draft_vocab_size"), keys.size("target_hidden_size")
        refused = {
            "hidden_act": block.text("hidden_act") not in (None, "silu"),
            "layer_types": slides,
            "draft_vocab_size": drafts not in (None, head.shape["vocab_size"]),
            "target_hidden_size": width not in (None, head.shape["hidden_size"]),
            "quantization_config": bool(keys.values.get("quantization_config")),
            **{name: bool(nested.values.get(name)) for name in UNLIKE},
        }
        for name in (name for name, is_refused in refused.items() if is_refused):
            value = next((part.values[name] for part in (keys, block, nested) if name in part.values), None)
            head.problem(f"config.json: {name} is {short(value)}, which no block here can be", fatal=False)
        for part in (keys, block, nested):
            part.taken |= {"tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", *UNLIKE}
        keys.taken |= {"quantization_config", "num_anchors", "sliding_window_non_causal", "speculators_config"}
        nested.taken |= {"projector_type", "attention_mode", "confidence_head_alpha"}

    def _read_taps(self, head: HeadFolder, target: TargetFiles | None, blocks: int) -> tuple[int, ...]:
        """Inputs of layers, of ids that count outputs, or inputs in the layout of speculators."""
        layers = target.layers if target else head.keys.size("num_target_layers")
        taps = head.keys.whole("aux_hidden_state_layer_ids")
        outputs = _first(head.nested.whole("target_layer_ids", -1), head.keys.whole("target_layer_ids", -1))
        if taps is None and outputs is not None:
            taps = tuple(layer + 1 for layer in outputs)
        if taps is None and layers and head.layout in (ZLAB, SPECFORGE):
            taps = tuple(usual_taps(layers, blocks))
            head.notes.append(f"no target_layer_ids: taps {taps}, as that code takes them of {layers} layers")
        if taps is None:
            head.problem(
                "config.json: no ids of the layers that it reads", "Take them from the config of the training run"
            )
            return (1,)
        if layers and not all(0 <= tap < layers for tap in taps):
            head.problem(
                f"it reads the inputs of layers {taps} of {layers}: behind the last layer transformers gives the state "
                "behind the final norm and engines the one before it, and behind that there is none",
                "Train it with others",
            )
        return taps

    def _read_anchor(self, head: HeadFolder) -> bool:
        """Whether the first slot predicts a token; by default as in the layout's own code, with a note."""
        keys, nested, shift = head.keys, head.nested, head.nested.flag("shift_label")
        stated = _first(keys.flag("sample_from_anchor"), nested.flag("sample_from_anchor"))
        bonus = keys.flag("dspark_bonus_anchor")
        if None not in (stated, bonus) and stated == bonus:
            head.problem(f"config.json: sample_from_anchor and dspark_bonus_anchor are both {stated}", "Correct one")
        if head.kind == "a Domino head":
            if None not in (stated, shift) and stated != shift:
                head.problem(
                    f"config.json: sample_from_anchor is {stated} and shift_label {shift}", "Correct one of them"
                )
            stated = _first(shift, stated)
            name, usual = "shift_label", False
        else:
            name = "sample_from_anchor"
            # z-lab's DFlash and that of speculators fill places in; DSpark names what comes behind each
            usual = head.layout == DEEPSPEC or head.kind == "a DSpark head"
        if stated is None:
            head.notes.append(f"no {name}: {str(usual).lower()}, as {head.layout} takes it")
        return bool(_first(stated, usual))

    def _read_mask(self, head: HeadFolder) -> int:
        """The mask token, which only the config gives."""
        mask, size = (
            _first(head.nested.token("mask_token_id"), head.keys.token("mask_token_id")),
            head.shape["vocab_size"],
        )
        if mask is None:
            head.problem("config.json: no mask_token_id", "Take it from the config of the training run")
        elif mask >= size:
            head.problem(f"config.json: mask_token_id is {mask}, the vocabulary has {size} tokens", "Correct it")
        return mask or 0

    def _read_correction(self, head: HeadFolder) -> dict[str, Any]:
        """The correction of a slot's logits by its tensors; a note if the config disagrees."""
        places = (head.keys, head.nested)
        ranks = [rank for part in places if (rank := part.token("markov_rank")) is not None]
        kinds = [kind for part in places if (kind := part.text("markov_head_type")) is not None]
        flags = [flag for part in places if (flag := part.flag("enable_confidence_head")) is not None]
        for part in places:
            part.taken |= {"confidence_head_with_markov", "emb_dim", "gru_hidden_dim"}
        markov, rank, further = "none", 1, {}
        if DOMINO in head.names:
            markov, rank, further = "domino", _size(head, DOMINO, 0), self._read_gru(head)
        elif MARKOV in head.names:
            parts = {name.split(".")[1] for name in head.names if name.startswith("markov_head.")}
            markov = "gated" if "gate_proj" in parts else "rnn" if "joint_proj" in parts else "vanilla"
            rank = _size(head, MARKOV, 1)
            compare_size(head, "markov_rank", next(iter(ranks), None), rank)
        if markov != "domino" and kinds and markov not in ("none", kinds[0].lower()):
            head.problem(f"config.json: markov_head_type is {short(kinds[0])}, the tensors are {markov}", "Correct it")
        if markov == "none" and any(ranks):
            head.problem(f"config.json: markov_rank is {max(ranks)}, and {MARKOV} is missing", "Copy it again")
        confident = CONFIDENCE in head.names
        if flags and flags[0] and not confident:
            head.problem(f"config.json: enable_confidence_head is true, and {CONFIDENCE} is missing", "Copy it again")
        return {"markov": markov, "rank": rank, "confidence": confident, **further}

    def _read_gru(self, head: HeadFolder) -> dict[str, Any]:
        """Domino's cell, and how many levels it leaves as they are."""
        unbiased = head.nested.token("pure_draft_prefix_len")
        if unbiased is None:
            head.notes.append("no pure_draft_prefix_len: 0, as SpecForge takes it")
        return {"gru_size": _size(head, "prefix_gru.weight_hh_l0", 1), "unbiased": unbiased or 0}

    def target_layers(self, head: HeadFolder) -> int | None:
        """That which the head's own code would take its usual taps of."""
        return head.block.size("num_target_layers") or head.keys.size("num_target_layers")

    def read_shape(self, head: HeadFolder, target: TargetFiles | None) -> Any:
        """Those of the config, of so many blocks with norms of queries and keys."""
        return head_shape(SimpleNamespace(**head.shape), num_hidden_layers=head.settings["blocks"], qk_norm=True)

    def list_facts(self, head: HeadFolder) -> dict[str, Any]:
        """The head's convention among the two named DFlash."""
        place = BEHIND if head.settings.get("sample_from_anchor") else OWN_PLACE
        return {"method": self.method_of(head), "slots": f"{head.settings.get('slots')}: {place}"}

    def list_traps(self, head: HeadFolder) -> Iterator[tuple[Trap, dict[str, Any]]]:
        """What engines make of a config that does not say what its slots name."""
        if head.layout == SPECULATORS and self.method_of(head) == DSPARK and "sample_from_anchor" not in head.config:
            yield traps.ANCHOR_UNSAID, {}


def usual_taps(layers: int, blocks: int) -> list[int]:
    """The layers' inputs that z-lab's code takes where none are named: evenly, from the third to the last but one."""
    if blocks < 2:
        return [layers // 2 + 1]
    return [round(1 + place * (layers - 4) / (blocks - 1)) + 1 for place in range(blocks)]


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def _size(head: HeadFolder, name: str, side: int) -> int:
    """One side of a matrix."""
    entry = head.entry(name)
    return entry.shape[side] if entry and len(entry.shape) == 2 else 1


READER = InjectedReader(DFLASH, {ZLAB: NAMES}, SPARE)
INJECTED_READERS = dict.fromkeys(("a DFlash head", "a DSpark head", "a Domino head"), READER)
