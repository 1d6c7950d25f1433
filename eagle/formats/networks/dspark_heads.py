"""DSpark's network and Domino's: DFlash's with a correction of each slot's logits; and block drafters for engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, TargetConfig, embedding_of, output_of, rotary_of, scale_of, tensors_of
from eagle.formats.networks.dflash_heads import (
    NAMES,
    ZLAB,
    Config,
    DFlash,
    levels_of,
    mask_of,
    nest_config,
    outputs_of,
    qwen3_config,
    zlab_config,
)
from eagle.formats.networks.network import keep_names
from eagle.formats.networks.network_layout import NetworkLayout, reorder_taps
from eagle.formats.reading.config_keys import short
from eagle.formats.reading.head_folder import EMBEDDING, OUTPUT, HeadFolder, compare_size

DSPARK, CONFIDENCE = "dspark", "confidence_head.proj.weight"
MARKOV, DOMINO = "markov_head.markov_w1.weight", "embed_proj.0.weight"
CORRECTION = keep_names("markov_head.*", "confidence_head.*", "prefix_gru.*", "embed_proj.*")
Style = Callable[[TrainableDrafter, Any], Config]  # the config of a head with these settings


class DSpark(DFlash):
    """DSpark heads of DeepSpec, SpecForge and speculators."""

    name = "a DSpark head"
    methods: tuple[str, ...] = (DSPARK,)
    tensors, words, keys, common = r"(markov_head|confidence_head)\.", "dspark", (), ()
    spellings = ((ZLAB, {**NAMES, **CORRECTION}),)
    prefixes = ("model.", "logit_head.")
    names_behind = True

    def read_correction(self, head: HeadFolder) -> Config:
        """The correction of a slot's logits by its tensors; a note if the config disagrees."""
        places = (head.keys, head.nested)
        ranks = [rank for part in places if (rank := part.read("markov_rank")) is not None]
        kinds = [kind for part in places if (kind := part.read("markov_head_type")) is not None]
        flags = [flag for part in places if (flag := part.read("enable_confidence_head")) is not None]
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
        if {MARKOV, DOMINO, CONFIDENCE} & head.names.keys():
            head.method = DSPARK
        return {"markov": markov, "rank": rank, "confidence": confident, **further}

    def _read_gru(self, head: HeadFolder) -> Config:
        """Domino's cell, and how many levels it leaves as they are."""
        unbiased = head.nested.read("pure_draft_prefix_len")
        if unbiased is None:
            head.notes.append("no pure_draft_prefix_len: 0, as SpecForge takes it")
        return {"gru_size": _size(head, "prefix_gru.weight_hh_l0", 1), "unbiased": unbiased or 0}


class Domino(DSpark):
    """Domino heads of SpecForge."""

    name = "a Domino head"
    methods = ()
    tensors, words = r"(prefix_gru|embed_proj)\.", "domino"
    slot_name, names_behind = "shift_label", False


def _size(head: HeadFolder, name: str, side: int) -> int:
    """One side of a matrix."""
    entry = head.entry(name)
    return entry.shape[side] if entry and len(entry.shape) == 2 else 1


# -- writing ----------------------------------------------------------------------------------------------------------


def read_markov(drafter: TrainableDrafter) -> Config:
    """The keys for a head's Markov correction and confidence, common to all readers of DSpark."""
    columns = drafter.state_dict()[CONFIDENCE].shape[1] if CONFIDENCE in drafter.state_dict() else 0
    kind = getattr(drafter.settings, "markov", "none")
    return {
        "markov_rank": 0 if kind == "none" else drafter.settings.rank,
        "markov_head_type": "vanilla" if kind == "none" else kind,
        "enable_confidence_head": columns > 0,
        "confidence_head_with_markov": columns > drafter.shape.hidden_size,
        "sample_from_anchor": bool(drafter.settings.sample_from_anchor),
    }


def deepspec_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """DeepSpec's flat config; without a Markov head it is what DeepSpec calls DFlash."""
    entries = {"mask_token_id": mask_of(drafter), "target_layer_ids": outputs_of(drafter)}
    entries |= {"num_anchors": drafter.settings.anchors, **read_markov(drafter)}
    entries["dspark_bonus_anchor"] = not entries["sample_from_anchor"]  # by which vLLM knows it
    if drafter.settings.causal:
        entries["is_causal"] = True
    return qwen3_config(drafter, target_config, architectures=["Qwen3DSparkModel"], **entries)


def specforge_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """SpecForge's config of DSpark."""
    shape, entries = drafter.shape, read_markov(drafter)
    more = {
        "projector_type": "dspark",
        "attention_mode": "mha" if shape.num_key_value_heads == shape.num_attention_heads else "gqa",
        "confidence_head_alpha": float(entries["enable_confidence_head"]),
    }
    return nest_config("DSparkDraftModel", drafter, target_config, **more, **entries)


def domino_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """SpecForge's config of Domino, which SGLang reads."""
    tensors = drafter.state_dict()
    more = {
        "projector_type": "domino",
        "emb_dim": tensors["embed_proj.0.weight"].shape[0],
        "gru_hidden_dim": tensors["prefix_gru.weight_hh_l0"].shape[1],
        "pure_draft_prefix_len": drafter.settings.unbiased,
        "shift_label": bool(drafter.settings.sample_from_anchor),
    }
    return nest_config("DominoDraftModel", drafter, target_config, **more)


def speculators_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """The config of `speculators`, which counts layer inputs and nests the blocks' sizes."""
    settings, corrected = drafter.settings, drafter.settings.kind == DSPARK
    block = qwen3_config(drafter, target_config, rope_parameters=rotary_of(drafter.shape))
    block = {key: value for key, value in block.items() if key not in ("block_size", "num_target_layers")}
    algorithm = "dspark" if corrected else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if corrected else "DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": drafter.shape.vocab_size,
        "block_size": settings.slots,
        "mask_token_id": mask_of(drafter),
        "aux_hidden_state_layer_ids": sorted(drafter.taps),
        "sliding_window_non_causal": True,
        "sample_from_anchor": bool(settings.sample_from_anchor),
        **(read_markov(drafter) if corrected else {}),
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": block,
        "speculators_config": propose_config(algorithm, levels_of(drafter), target_config),
    }


def propose_config(algorithm: str, tokens: int, target_config: TargetConfig) -> Config:
    """The drafting defaults in a config of `speculators`; a server may override them."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {
            "name_or_path": target_config.name_or_path or None,
            "architectures": target_config.architectures or ["LlamaForCausalLM"],
        },
    }


@dataclass(frozen=True)
class InjectedLayout(NetworkLayout):
    """One reader's layout of block drafters."""

    blocks: int = 64  # all of that code has any number
    styles: Mapping[tuple[str, bool], Style] = field(default_factory=dict)  # by drafter.markov and sample_from_anchor
    causal: bool = False  # whether it reads that slots see no later ones
    confidence: bool = False  # whether it needs one
    copies: bool = False  # whether embedding and LM head are part of it

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Write the layout with ascending layer ids; ValueError for settings that the reader would misread."""
        style = self._choose_style(drafter.settings, engine)
        self._check(drafter, target_config, engine, style)
        order = sorted(range(len(drafter.taps)), key=drafter.taps.__getitem__)
        tensors = reorder_taps(tensors_of(drafter), order)
        if self.copies:
            tensors |= {EMBEDDING: embedding_of(drafter, engine), OUTPUT: output_of(drafter, engine)}
        return Layout(
            style(drafter, target_config),
            tensors,
            self.serve,
            deepest=levels_of(drafter),
            at_once=True,
            whole=not drafter.settings.causal,  # each slot reads the masks of all
        )

    def _choose_style(self, settings: Any, engine: str) -> Style:
        """The config style for these settings; ValueError if readers would take the head for something else."""
        kind, anchor = getattr(settings, "markov", "none"), bool(settings.sample_from_anchor)
        if (kind, anchor) in self.styles:
            return self.styles[kind, anchor]
        if (kind, not anchor) in self.styles:
            ours, theirs = ("behind its place", "at its own") if anchor else ("at its own place", "behind it")
            raise ValueError(
                f"{engine}: drafter.sample_from_anchor is {str(anchor).lower()}: a slot names the token {ours}, and "
                f"there it names the one {theirs}: every token would stand one place off and none be kept. Export "
                f"to {'deepspec or speculators' if anchor else 'zlab or speculators'}, or train with "
                f"drafter.sample_from_anchor={str(not anchor).lower()}"
            )
        known = ", ".join(sorted({kind for kind, _ in self.styles}))
        raise ValueError(
            f"{engine}: drafter.markov is {kind}, and this layout knows {known}: export to another (docs/serving.md), "
            "or train with one of these"
        )

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str, style: Style) -> None:
        """Raise ValueError with the reason why the head cannot be served."""
        layers, settings = target_config.num_hidden_layers, drafter.settings
        if not getattr(drafter.shape, "qk_norm", False):
            raise ValueError(
                f"{engine}: drafter.qk_norm is false, and the blocks of this layout norm queries and keys: no exporter "
                "has a layout for it; train with drafter.qk_norm=true"
            )
        if settings.causal and not self.causal:
            raise ValueError(
                f"{engine}: drafter.causal is true, and a slot sees its whole block there: acceptance would be lost in "
                "silence. Export to zlab, vllm or llamacpp, or train with drafter.causal=false"
            )
        is_domino, has_confidence = style is domino_config, CONFIDENCE in drafter.state_dict()
        if is_domino and has_confidence:
            raise ValueError(
                f"{engine}: the head tells a confidence, and no Domino head does there: train with "
                "drafter.confidence=false"
            )
        if self.confidence and not is_domino and not has_confidence:
            raise ValueError(
                f"{engine}: the head tells no confidence, without which it is not loaded there: train with "
                "drafter.confidence=true"
            )
        if not all(0 < tap < layers for tap in drafter.taps):
            raise ValueError(
                f"{engine}: drafter.taps is {drafter.taps}, expected the inputs of some layers of 1 to {layers - 1}: "
                "train with such"
            )
        if scale_of(drafter) != 1.0:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which is left out when it "
                "drafts: no exporter has a layout for it"
            )


CORRECTIONS = ("vanilla", "gated", "rnn")  # of DSpark
ZLAB_STYLES = {("none", False): zlab_config}
DEEPSPEC_STYLES = {(kind, True): deepspec_config for kind in ("none", *CORRECTIONS)}
VANILLA_STYLES = {("vanilla", anchor): deepspec_config for anchor in (False, True)}
DOMINO_STYLES = {("domino", anchor): domino_config for anchor in (False, True)}
SPECFORGE_STYLES = {(kind, True): specforge_config for kind in ("none", *CORRECTIONS)} | DOMINO_STYLES
SPECULATORS_STYLES = {(kind, anchor): speculators_config for kind in ("none", *CORRECTIONS) for anchor in (False, True)}
