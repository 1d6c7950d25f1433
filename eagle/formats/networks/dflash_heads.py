"""DFlash's network: blocks over injected states whose slots are filled at once; tensor names are ours everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, TargetConfig, llama_config
from eagle.formats.networks.network import FOLLOWS, ROTARY, Network, keep_names
from eagle.formats.reading import traps
from eagle.formats.reading.folder_paths import has
from eagle.formats.reading.head_folder import EMBEDDING, OUTPUT, SPECULATORS, HeadFolder, compare_count, count_parts
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike, strike

DFLASH = "dflash"
ZLAB, DEEPSPEC, SPECFORGE = "z-lab/dflash", "deepseek-ai/DeepSpec", "sgl-project/SpecForge"
NAMES = keep_names("layers.#.*", "fc.weight", "hidden_norm.weight", "norm.weight", EMBEDDING, OUTPUT)
UNLIKE = (  # keys of dflash_config that change what is computed
    *("use_swa", "attention_value_scale", "conv_kernel_size", "selector_rank", "output_multiplier"),
    *("final_logit_softcapping", "input_embedding_scale"),
)
MASK_ROW = "mask_embedding.pt"
OWN_PLACE = "slot j names the token at its own place (z-lab's DFlash)"
BEHIND = "slot k names the token behind its place (DeepSpec's DFlash and DSpark)"


class DFlash(Network):
    """DFlash heads of z-lab, SpecForge, DeepSpec and speculators."""

    name, method = "a DFlash head", DFLASH
    methods: tuple[str, ...] = (DFLASH,)
    tensors, words = r"hidden_norm\.weight$", "dflash"
    keys: tuple[str, ...] = ("dflash_config",)
    common: tuple[str, ...] = ("block_size",)
    spellings = ((ZLAB, NAMES),)
    spare: Mapping[str, str] = {ROTARY: FOLLOWS, r"verifier_(norm|lm_head)\.weight": "training alone reads it"}
    slot_name = "sample_from_anchor"  # the key of what slots name
    names_behind = False  # its default

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """Sizes are those of the tensors; what the slots name stands in the config alone."""
        keys, head.nested = head.keys, head.keys.section("dflash_config")
        head.layout = self._find_layout(head)
        head.target_layers = head.block.read("num_target_layers") or keys.read("num_target_layers")
        layers, refused = head.block.read("num_hidden_layers"), self._list_refused(head)
        blocks = compare_count(head, layers, count_parts(head, r"layers\.(\d+)\."), "layers")
        head.overrides = {"num_hidden_layers": max(blocks, 1), "qk_norm": True}
        head.refuse(refused, "block")
        if has(head.path, MASK_ROW):
            head.problem(
                f"{MASK_ROW} lies beside it, a row of the head's own for its mask token, which no head here has: they "
                "read the target's row",
                "Serve it with vLLM, which reads that file",
            )
        slots = head.nested.read("block_size") or keys.read("block_size")
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
            "causal": bool(_first(keys.read("is_causal"), head.nested.read("causal"))),
            "mask_token": self._read_mask(head),
        }
        corrected = self.read_correction(head)
        return settings if head.method == DFLASH else settings | corrected

    def read_correction(self, head: HeadFolder) -> Config:
        """The correction of a slot's logits, of which there is none."""
        return {}

    def _find_layout(self, head: HeadFolder) -> str:
        """The project that writes configs like this one."""
        config = head.config
        if "speculators_model_type" in config or "transformer_layer_config" in config:
            return SPECULATORS
        if "dflash_config" not in config and ("markov_rank" in config or "Qwen3DSparkModel" in head.architectures):
            return DEEPSPEC
        return SPECFORGE if head.nested.values.get("projector_type") else ZLAB

    def _list_refused(self, head: HeadFolder) -> dict[str, bool]:
        """The settings that no block of this project has, and whether the config has them; the rest does not matter."""
        keys, block, nested = head.keys, head.block, head.nested
        slides = "sliding_attention" in (block.read("layer_types") or []) or bool(block.read("use_sliding_window"))
        drafts, width = keys.read("draft_vocab_size"), keys.read("target_hidden_size")
        head.take("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", *UNLIKE)
        keys.taken |= {"quantization_config", "num_anchors", "sliding_window_non_causal", "speculators_config"}
        nested.taken |= {"projector_type", "attention_mode", "confidence_head_alpha"}
        return {
            "hidden_act": block.read("hidden_act") not in (None, "silu"),
            "layer_types": slides,
            "draft_vocab_size": drafts not in (None, head.shape["vocab_size"]),
            "target_hidden_size": width not in (None, head.shape["hidden_size"]),
            "quantization_config": bool(keys.values.get("quantization_config")),
            **{name: bool(nested.values.get(name)) for name in UNLIKE},
        }

    def _read_taps(self, head: HeadFolder, target: TargetFiles | None, blocks: int) -> tuple[int, ...]:
        """Inputs of layers, of ids that count outputs, or inputs in the layout of speculators."""
        layers = target.layers if target else head.keys.read("num_target_layers")
        inputs = head.keys.read("aux_hidden_state_layer_ids")
        outputs = _first(head.nested.read("target_layer_ids"), head.keys.read("target_layer_ids"))
        taps = None if inputs is None else tuple(inputs)
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
        keys, nested, shift = head.keys, head.nested, head.nested.read("shift_label")
        stated = _first(keys.read("sample_from_anchor"), nested.read("sample_from_anchor"))
        bonus = keys.read("dspark_bonus_anchor")
        if None not in (stated, bonus) and stated == bonus:
            head.problem(f"config.json: sample_from_anchor and dspark_bonus_anchor are both {stated}", "Correct one")
        if None not in (stated, shift) and stated != shift and self.slot_name == "shift_label":
            head.problem(f"config.json: sample_from_anchor is {stated} and shift_label {shift}", "Correct one of them")
        stated = _first(shift, stated) if self.slot_name == "shift_label" else stated
        # z-lab's DFlash and that of speculators fill places in; DSpark names what comes behind each
        usual = head.layout == DEEPSPEC or self.names_behind
        if stated is None:
            head.notes.append(f"no {self.slot_name}: {str(usual).lower()}, as {head.layout} takes it")
        return bool(_first(stated, usual))

    def _read_mask(self, head: HeadFolder) -> int:
        """The mask token, which only the config gives."""
        mask, size = (
            _first(head.nested.read("mask_token_id"), head.keys.read("mask_token_id")),
            head.shape["vocab_size"],
        )
        if mask is None:
            head.problem("config.json: no mask_token_id", "Take it from the config of the training run")
        elif mask >= size:
            head.problem(f"config.json: mask_token_id is {mask}, the vocabulary has {size} tokens", "Correct it")
        return mask or 0

    def list_facts(self, head: HeadFolder) -> Config:
        """The head's convention among the two named DFlash."""
        place = BEHIND if head.settings.get("sample_from_anchor") else OWN_PLACE
        return {**super().list_facts(head), "method": head.method, "slots": f"{head.settings.get('slots')}: {place}"}

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """The default that engines take where a config does not say which token a slot predicts."""
        if head.layout == SPECULATORS and head.method != DFLASH and "sample_from_anchor" not in head.config:
            yield strike(traps.ANCHOR_UNSAID, fatal=False)


def usual_taps(layers: int, blocks: int) -> list[int]:
    """The layers' inputs that z-lab's code takes where none are named: evenly, from the third to the last but one."""
    if blocks < 2:
        return [layers // 2 + 1]
    return [round(1 + place * (layers - 4) / (blocks - 1)) + 1 for place in range(blocks)]


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


# -- writing ----------------------------------------------------------------------------------------------------------


def mask_of(drafter: TrainableDrafter) -> int:
    """The mask token; written into every config, because readers assume different ones."""
    token: int | None = drafter.settings.mask_token
    return drafter.shape.vocab_size - 1 if token is None else token


def outputs_of(drafter: TrainableDrafter) -> list[int]:
    """The layers whose outputs it reads, in ascending order."""
    return [tap - 1 for tap in sorted(drafter.taps)]


def levels_of(drafter: TrainableDrafter) -> int:
    """The number of tokens that a block predicts: one less if its first slot only reads the root."""
    settings: Any = drafter.settings
    return int(settings.slots) - (not settings.sample_from_anchor)


def qwen3_config(drafter: TrainableDrafter, target_config: TargetConfig, **more: Any) -> Config:
    """The config of the blocks, which are Qwen3's, for any reader."""
    blocks = drafter.shape.num_hidden_layers
    entries = {
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * blocks,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": blocks,
        "num_target_layers": target_config.num_hidden_layers,
        "block_size": drafter.settings.slots,
    }
    return llama_config(drafter, target_config, **entries, **more)


def nest_config(architecture: str, drafter: TrainableDrafter, target_config: TargetConfig, **more: Any) -> Config:
    """Everything under `dflash_config`, as z-lab and SpecForge have it."""
    entries = {"mask_token_id": mask_of(drafter), "target_layer_ids": outputs_of(drafter)}
    return qwen3_config(drafter, target_config, architectures=[architecture], dflash_config={**entries, **more})


def zlab_config(drafter: TrainableDrafter, target_config: TargetConfig) -> Config:
    """z-lab's config: the first slot reads the root and predicts nothing."""
    settings = drafter.settings
    more = {"causal": bool(settings.causal), "sample_from_anchor": False}
    return nest_config("DFlashDraftModel", drafter, target_config, **more)
