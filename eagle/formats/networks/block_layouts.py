"""How engines name block drafters: one class for DFlash, DSpark and Domino, and a function for each style of config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.drafters.parts.reduced_vocab import draft_vocab_size
from eagle.formats.layout import (
    Config,
    Layout,
    TargetConfig,
    embedding_of,
    llama_config,
    output_of,
    rotary_of,
    tensors_of,
)
from eagle.formats.networks.network_layout import NetworkLayout, mask_of, refuse_scale, reorder_taps
from eagle.formats.reading.head_folder import EMBEDDING, OUTPUT

# names of networks, and by which tensors they are known
DFLASH = "dflash"
DFLASH2 = "dflash2"
DSPARK = "dspark"
XPRESS = "xpress"
CONFIDENCE = "confidence_head.proj.weight"
MARKOV = "markov_head.markov_w1.weight"
DOMINO_INPUT = "embed_proj.0.weight"
GRU = "prefix_gru.weight_hh_l0"
REFINER = "refiner_head.token_embed.weight"
REFINER_MLP = "refiner_head.mlp_gate.weight"
# vLLM's names of XPress's refiner, whose tensors are otherwise named as by speculators
VLLM_REFINER = {
    REFINER: "xpress_head.w1.weight",
    "refiner_head.readout.weight": "xpress_head.w2.weight",
    "refiner_head.mix_l": "xpress_head.mix.L",
    REFINER_MLP: "xpress_head.mlp.gate_proj.weight",
    "refiner_head.mlp_up.weight": "xpress_head.mlp.up_proj.weight",
    "refiner_head.mlp_down.weight": "xpress_head.mlp.down_proj.weight",
    **{
        f"refiner_head.{name}.weight": f"xpress_head.{name}.weight"
        for name in ("down_h", "down_g", "in_proj")
    },
}
# DFlash2's settings, whose names are keys of every config
SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# how configs of transformers name the two kinds of layers
FULL = "full_attention"
SLIDING = "sliding_attention"
WINDOW_AT_ROOT = """

The head was trained with `drafter.window_end: root`: here its slot j sees j + 1 tokens less of the context."""
# (head, the target's config) -> config.json in one project's style
Style = Callable[[TrainableDrafter, Any], Config]


# -- configs ----------------------------------------------------------------------------------------------------------


def _count_levels(drafter: TrainableDrafter) -> int:
    """Return the number of tokens that one block predicts.

    The first slot of a block reads the root, the last committed token, and the others read masks. Without
    `sample_from_anchor` the first slot predicts nothing.
    """
    settings: Any = drafter.settings
    levels = int(settings.slots)
    if not settings.sample_from_anchor:
        levels -= 1
    return levels


def _outputs_of(drafter: TrainableDrafter) -> list[int]:
    """Return the target's layers whose outputs the head reads, in ascending order, as most configs count them.

    Taps count inputs of layers, and the input of a layer is the output of the layer before it.
    """
    return [tap - 1 for tap in sorted(drafter.taps)]


def _qwen3_config(drafter: TrainableDrafter, target_config: TargetConfig, **more: Any) -> Config:
    """Return the config keys of the head's transformer blocks, which all styles share and which are those of a Qwen3.

    Args:
        drafter: The head.
        target_config: The target's config.
        more: Further keys, of one style.
    """
    head: Any = drafter
    blocks = head.shape.num_hidden_layers  # transformer blocks
    window = head.settings.window  # a sliding window over the context; None for full attention
    # full attention is stated in three ways (the types, the window, max_window_layers), for old and new readers
    entries = {
        "model_type": "qwen3",
        "layer_types": [SLIDING if head.has_window(index) else FULL for index in range(blocks)],
        "use_sliding_window": window is not None,
        "sliding_window": window and window.recent,
        "max_window_layers": blocks,
        "num_target_layers": target_config.num_hidden_layers,
        "block_size": drafter.settings.slots,
    }
    # in a causal layer a slot sees only earlier slots of its block of tokens. Without this key readers take layers with
    # a window for causal ones, and no others; with it all layers for the same, so the first layer tells.
    if not _is_causal_by_window(head):
        entries["is_causal"] = head.is_causal(0)
    # the draft vocabulary that the head was trained with, if it has one
    if head.own_drafts is not None:
        entries["draft_vocab_size"] = draft_vocab_size(head.shape)
    return llama_config(drafter, target_config, **entries, **more)


def _is_causal_by_window(head: Any) -> bool:
    """Return whether just those transformer blocks are causal that have a window, as readers assume.

    In a causal block a slot sees only earlier slots of its block of tokens.
    """
    blocks = range(head.settings.blocks)
    return all(head.is_causal(index) == head.has_window(index) for index in blocks)


def _nested_config(
    drafter: TrainableDrafter, target_config: TargetConfig, architecture: str, **more: Any
) -> Config:
    """Return a config whose keys beyond a Qwen3's are nested in `dflash_config`, as z-lab and SpecForge have it.

    Args:
        drafter: The head.
        target_config: The target's config.
        architecture: The class that reads such heads, for the key `architectures`.
        more: Further nested keys.
    """
    nested = {"mask_token_id": mask_of(drafter), "target_layer_ids": _outputs_of(drafter), **more}
    return _qwen3_config(drafter, target_config, architectures=[architecture], dflash_config=nested)


def _markov_keys(drafter: TrainableDrafter) -> Config:
    """Return the keys for a head's Markov head, its confidence and its slots, which all readers of DSpark share.

    The Markov head corrects a slot's logits by the tokens drafted before it. The confidence predicts the probability
    that a slot's token is accepted.
    """
    tensors = drafter.state_dict()
    columns = 0  # what the confidence reads; 0 without one
    if CONFIDENCE in tensors:
        # [1, H] with H the width, or wider where it reads the Markov head's code of the token before too
        columns = tensors[CONFIDENCE].shape[1]
    kind = getattr(drafter.settings, "markov", "none")
    rank = 0
    if kind == "none":
        # readers know no other word: the rank of 0 says that there is no Markov head
        kind = "vanilla"
    else:
        rank = drafter.settings.rank
    return {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": columns > 0,
        "confidence_head_with_markov": columns > drafter.shape.hidden_size,
        "sample_from_anchor": bool(drafter.settings.sample_from_anchor),
    }


def zlab_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return z-lab's config of DFlash or DFlash2, for heads whose first slot reads the root and predicts nothing."""
    more = {"sample_from_anchor": False}
    architecture = "DFlashDraftModel"
    if drafter.settings.kind == DFLASH2:
        architecture = "DFlash2DraftModel"
        # it is read here, and by older code at the top
        more |= {"block_size": drafter.settings.slots, **_selector_keys(drafter)}
    # the key holds for all layers alike, so it is left out where only layers with a window are causal
    if drafter.network["causal"] != "window":
        more["causal"] = drafter.network["causal"]
    return _nested_config(drafter, target_config, architecture, **more)


def _selector_keys(drafter: TrainableDrafter) -> Config:
    """Return the keys for DFlash2's convolutions and its selector, which all readers share."""
    return {key: getattr(drafter.settings, key) for key in SELECTOR_KEYS}


def xpress_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return vLLM's config of XPress: z-lab's of DFlash, with the refiner's sizes and passes at its top."""
    settings = drafter.settings
    return {
        **zlab_config(drafter, target_config),
        "architectures": ["Qwen3XPressModel"],
        "xpress_block_size": settings.slots,
        "xpress_rank": settings.rank,
        "xpress_mlp_hidden": settings.mlp_ratio * settings.rank,
        "xpress_num_passes": settings.passes,
    }


def deepspec_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return DeepSpec's flat config; without a Markov head it is what DeepSpec calls DFlash."""
    entries = {
        "mask_token_id": mask_of(drafter),
        "target_layer_ids": _outputs_of(drafter),
        "num_anchors": drafter.settings.anchors,
        **_markov_keys(drafter),
    }
    # vLLM reads this key instead, which says the opposite
    entries["dspark_bonus_anchor"] = not entries["sample_from_anchor"]
    return _qwen3_config(drafter, target_config, architectures=["Qwen3DSparkModel"], **entries)


def specforge_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return SpecForge's config of DSpark, whose keys are nested like those of z-lab's DFlash."""
    shape = drafter.shape
    markov = _markov_keys(drafter)
    return _nested_config(
        drafter,
        target_config,
        "DSparkDraftModel",
        projector_type="dspark",
        attention_mode="mha" if shape.num_key_value_heads == shape.num_attention_heads else "gqa",
        confidence_head_alpha=float(markov["enable_confidence_head"]),
        **markov,
    )


def domino_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return SpecForge's config of Domino, which SGLang reads too.

    Domino corrects a slot's logits by the tokens drafted before it, which a GRU encodes.
    """
    tensors = drafter.state_dict()
    return _nested_config(
        drafter,
        target_config,
        "DominoDraftModel",
        projector_type="domino",
        emb_dim=tensors[DOMINO_INPUT].shape[0],
        gru_hidden_dim=tensors[GRU].shape[1],
        # the first levels, whose logits stay uncorrected
        pure_draft_prefix_len=drafter.settings.unbiased,
        shift_label=bool(drafter.settings.sample_from_anchor),
    )


def speculators_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """Return the config of `speculators`, which counts layer inputs and nests the sizes of the transformer blocks."""
    algorithm = "dflash"
    architecture = "DFlashSpeculator"
    more: Config = {}
    if drafter.settings.kind == DSPARK:
        algorithm = "dspark"
        architecture = "DSparkSpeculator"
        more = _markov_keys(drafter)
    if drafter.settings.kind == XPRESS:
        algorithm = "xpress"
        architecture = "XPressSpeculator"
        more = {
            "xpress_rank": drafter.settings.rank,
            "xpress_mlp_ratio": drafter.settings.mlp_ratio,
            "num_jacobi_passes": drafter.settings.passes,
        }
    if drafter.settings.kind == DFLASH2:
        algorithm = "dflash2"
        architecture = "DFlash2DraftModel"
        more = _selector_keys(drafter)
    block = _qwen3_config(drafter, target_config, rope_parameters=rotary_of(drafter.shape))
    # block_size and draft_vocab_size stand at the top of this config, and num_target_layers nowhere
    for key in ("block_size", "num_target_layers", "draft_vocab_size"):
        block.pop(key, None)
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": draft_vocab_size(drafter.shape),
        "block_size": drafter.settings.slots,
        "mask_token_id": mask_of(drafter),
        "aux_hidden_state_layer_ids": sorted(drafter.taps),
        "sliding_window_non_causal": not drafter.settings.causal,
        "sample_from_anchor": bool(drafter.settings.sample_from_anchor),
        **more,
        "tie_word_embeddings": False,
        "torch_dtype": block["torch_dtype"],
        "transformer_layer_config": block,
        "speculators_config": propose_config(algorithm, _count_levels(drafter), target_config),
    }


def propose_config(algorithm: str, tokens: int, target_config: TargetConfig) -> Config:
    """Return the section `speculators_config`: the target's name, and defaults for drafting that servers may override.

    Args:
        algorithm: The method, as `speculators` calls it.
        tokens: The number of draft tokens of a chain.
        target_config: The target's config.
    """
    # lossless verification: one candidate at each position, and no tolerance
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {
        "name_or_path": target_config.name_or_path or None,
        "architectures": target_config.architectures or ["LlamaForCausalLM"],
    }
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": verifier,
    }


# which style of config a head has, by its settings `markov` and `sample_from_anchor`; others cannot be exported
MARKOV_KINDS = ("vanilla", "gated", "rnn")  # of DSpark
ZLAB_STYLES: dict[tuple[str, bool], Style] = {("none", False): zlab_config}
DEEPSPEC_STYLES = {(kind, True): deepspec_config for kind in ("none", *MARKOV_KINDS)}
VANILLA_STYLES = {("vanilla", anchor): deepspec_config for anchor in (False, True)}
DOMINO_STYLES = {("domino", anchor): domino_config for anchor in (False, True)}
XPRESS_STYLES: dict[tuple[str, bool], Style] = {("none", False): xpress_config}
SPECFORGE_STYLES = {
    (kind, True): specforge_config for kind in ("none", *MARKOV_KINDS)
} | DOMINO_STYLES
SPECULATORS_STYLES = dict.fromkeys(
    product(("none", *MARKOV_KINDS), (False, True)), speculators_config
)


# -- the layout -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InjectedLayout(NetworkLayout):
    """How one engine or project wants block drafters."""

    max_blocks: int = 64  # all readers take any number
    # by the settings `markov` and `sample_from_anchor`
    styles: Mapping[tuple[str, bool], Style] = field(default_factory=dict)
    reads_causal: bool = False  # whether a key makes all layers causal, or none
    # whether layers that slide may see their whole block; else a layer is causal if it slides
    frees_windows: bool = False
    trains_at_root: bool = False  # whether windows end at the root, as `window_end` has it
    reads_draft_vocab: bool = False  # whether it reads d2t and an LM head of the draft vocabulary
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # our names of tensors -> the reader's, if they differ
    needs_confidence: bool = False  # whether it refuses a DSpark head without a confidence
    # whether the files hold copies of the target's embedding and LM head
    brings_copies: bool = False

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Return a block head's config, tensors and guide, with the layers that it reads in ascending order.

        ValueError for settings that the reader would misread. `engine` is the reader's name, for messages.
        """
        # first the settings by which a reader would take the head for another kind
        style = self._choose_style(drafter.settings, engine)
        self._check(drafter, engine)
        self._check_confidence(drafter, engine, is_domino=style is domino_config)
        _check_taps(drafter, target_config, engine)
        # readers sort the layers' ids, so the columns of `fc` must follow them in that order. `order` has the index,
        # among the taps, of the lowest layer, the next and so on.
        order = sorted(range(len(drafter.taps)), key=drafter.taps.__getitem__)
        tensors = reorder_taps(tensors_of(drafter), order)
        if self.brings_copies:
            tensors |= {
                EMBEDDING: embedding_of(drafter, engine),
                OUTPUT: output_of(drafter, engine),
            }
        # with a draft vocabulary readers take the LM head from the file: the target's rows of the draft tokens
        if "d2t" in tensors:
            tensors[OUTPUT] = output_of(drafter, engine)
        tensors = {self.renamed.get(name, name): tensor for name, tensor in tensors.items()}
        # all slots were trained on the window that ends at the root, and not each at its own place
        at_root = drafter.settings.window and drafter.settings.window_end == "root"
        return Layout(
            style(drafter, target_config),
            tensors,
            self.serve + (WINDOW_AT_ROOT if at_root and not self.trains_at_root else ""),
            max_depth=_count_levels(drafter),
            one_forward=True,
            # without causal attention each slot reads all masks of its block, so that their number matters, as it does
            # for XPress's mean of their states
            fixed_length=drafter.settings.kind == XPRESS or not drafter.settings.causal,
        )

    def with_window(self, config: Config, window_keys: Config) -> Config:
        """Return the config as it is: `_qwen3_config` has named the window of each layer already."""
        return config

    def _choose_style(self, settings: Any, engine: str) -> Style:
        """Return the style of config for these settings: a function that makes config.json.

        ValueError if readers would take the head for another kind.
        """
        kind = getattr(settings, "markov", "none")
        # whether a slot predicts the token after its position, or else the one at it
        anchor = bool(settings.sample_from_anchor)
        if (kind, anchor) in self.styles:
            return self.styles[kind, anchor]
        # the other value of `sample_from_anchor` would not help either, so the Markov head is the reason
        if (kind, not anchor) not in self.styles:
            readable = ", ".join(sorted({kind for kind, _ in self.styles}))
            raise ValueError(
                f"{engine}: drafter.markov is {kind}, and this layout knows {readable}: export to another "
                "(docs/serving.md), or train with one of these"
            )
        # the two methods called DFlash differ in this alone: which token a slot predicts
        if anchor:
            ours, theirs, fitting = "behind its place", "at its own", "deepspec"
        else:
            ours, theirs, fitting = "at its own place", "behind it", "zlab"
        # DeepSpec has no XPress
        readers = "speculators" if settings.kind == XPRESS else f"{fitting} or speculators"
        raise ValueError(
            f"{engine}: drafter.sample_from_anchor is {str(anchor).lower()}: a slot names the token {ours}, and there "
            f"it names the one {theirs}: every token would stand one place off and none be kept. Export to {readers}, "
            f"or train with drafter.sample_from_anchor={str(not anchor).lower()}"
        )

    def _check(self, drafter: TrainableDrafter, engine: str) -> None:
        """Raise ValueError for what the reader does not have.

        That is a block without query and key norms, a draft vocabulary, or the head's rule which slots see one another.
        """
        if not getattr(drafter.shape, "qk_norm", False):
            raise ValueError(
                f"{engine}: drafter.qk_norm is false, and the blocks of this layout norm queries and keys: no exporter "
                "has a layout for it; train with drafter.qk_norm=true"
            )
        if drafter.own_drafts is not None and not self.reads_draft_vocab:
            readers = "speculators" if drafter.settings.kind == XPRESS else "vllm or speculators"
            raise ValueError(
                f"{engine}: drafter.draft_vocab is {drafter.settings.draft_vocab}, and the draft's tokens would be "
                f"read as the first of the vocabulary there: export to {readers}"
            )
        # whether the reader can be told which layers are causal: in those a slot sees only earlier slots of its block
        is_read = self.reads_causal or (self.frees_windows and not drafter.settings.causal)
        if not is_read and not _is_causal_by_window(drafter):
            raise ValueError(
                f"{engine}: drafter.causal is {str(drafter.settings.causal).lower()}, and there a slot sees only "
                "earlier slots in layers with a window, and its whole block in others: acceptance would be lost in "
                "silence. Export to zlab, vllm, sglang or llamacpp, or train with drafter.causal=false, or =window "
                "with a window"
            )

    def _check_confidence(self, drafter: TrainableDrafter, engine: str, is_domino: bool) -> None:
        """Raise ValueError if the head predicts how likely its tokens are accepted and the reader cannot, or needs it.

        Args:
            drafter: The head.
            engine: The reader's name, for messages.
            is_domino: Whether its style of config is that of Domino, where no head has a confidence.
        """
        is_there = CONFIDENCE in drafter.state_dict()
        if is_domino and is_there:
            raise ValueError(
                f"{engine}: the head predicts a confidence, which no Domino head does there: train with "
                "drafter.confidence=false"
            )
        if self.needs_confidence and not is_domino and not is_there:
            raise ValueError(
                f"{engine}: the head predicts no confidence, and this engine loads none without it: train with "
                "drafter.confidence=true"
            )


def _check_taps(drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
    """Raise ValueError for taps, or a factor on the target's embedding, that no reader of such heads knows.

    Taps are the target's layers whose inputs the head reads. Readers count outputs, so the input of layer 0, which is
    the embedding, is no output of a layer.
    """
    layers = target_config.num_hidden_layers
    if not all(0 < tap < layers for tap in drafter.taps):
        raise ValueError(
            f"{engine}: drafter.taps is {drafter.taps}, expected the inputs of some layers of 1 to {layers - 1}: "
            "train with such"
        )
    refuse_scale(drafter, engine)
