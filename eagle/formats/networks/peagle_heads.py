"""P-EAGLE's network: EAGLE-3's, further blocks, and what stands where a token and its states are not known yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig
from eagle.formats.networks.dflash_heads import mask_of
from eagle.formats.networks.eagle3_heads import MIDLAYER_NAMES, NAMES, Eagle3, FusedLayout
from eagle.formats.networks.layers_and_tokens import list_wrong_ids
from eagle.formats.networks.network import FOLLOWS, ROTARY, Network, keep_names
from eagle.formats.networks.network_layout import MASK_HIDDEN
from eagle.formats.reading.head_folder import HeadFolder, compare_count, count_parts
from eagle.formats.reading.target_files import TargetFiles
from eagle.formats.reading.traps import Strike

PEAGLE = "peagle"
FURTHER = keep_names("layers.#.*", MASK_HIDDEN)


class PEagle(Eagle3):
    """P-EAGLE's heads, of speculators and of SpecForge."""

    name, method, methods = "a P-EAGLE head", PEAGLE, (PEAGLE,)
    tensors, words = r"mask_hidden$", "peagle"
    spellings = (("P-EAGLE", MIDLAYER_NAMES), ("P-EAGLE", {**NAMES, **FURTHER}))
    spare: Mapping[str, str] = {ROTARY: FOLLOWS, r"verifier_(norm|lm_head)\.weight": "training alone reads it"}
    own_copies: tuple[str, ...] = ()

    def read_settings(self, head: HeadFolder, target: TargetFiles | None) -> Config:
        """EAGLE-3's settings without a window, and the mask token, for which there is no default."""
        self._refuse_others(head)
        self.read_block(head, self._find_layout(head))
        settings = {"intermediate_size": head.shape["intermediate_size"], **self.read_switches(head)}
        stored_blocks = count_parts(head, r"layers\.(\d+)\.")
        blocks = compare_count(head, head.block.read("num_hidden_layers"), stored_blocks, "layers")
        settings.pop("norm_output")  # a state that is never read again
        head.overrides["num_hidden_layers"] = max(blocks, 1)
        head.overrides["qk_norm"] = "layers.0.self_attn.q_norm.weight" in head.names
        taps = head.inputs or head.inputs_by_outputs
        return {**settings, "taps": taps or settings["taps"], "blocks": max(blocks, 1), "mask_token": _read_mask(head)}

    def _refuse_others(self, head: HeadFolder) -> None:
        """Record the settings that no head of this project has."""
        keys, block = head.keys, head.block
        refused = {
            "hidden_act": block.read("hidden_act") not in (None, "silu"),
            "layer_types": "sliding_attention" in (block.read("layer_types") or [])
            or bool(block.read("use_sliding_window")),
            "norm_before_fc": bool(keys.read("norm_before_fc")),
            "target_hidden_size": keys.read("target_hidden_size") not in (None, head.shape["hidden_size"]),
            "quantization_config": bool(keys.values.get("quantization_config")),
        }
        head.refuse(refused)
        head.take("tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window")
        keys.taken |= {"speculators_config"}

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """Layer ids that contradict each other, the tensors or the target."""
        yield from list_wrong_ids(head, target)

    describe = Network.describe
    list_facts = Network.list_facts


def _read_mask(head: HeadFolder) -> int:
    """The token that stands where none is known, by any of its names."""
    named = {name: head.keys.read(name) for name in ("mask_token_id", "pard_token", "ptd_token_id")}
    masks = {name: token for name, token in named.items() if token is not None}
    size = head.shape["vocab_size"]
    if not masks:
        head.problem("config.json: no mask_token_id, which P-EAGLE reads", "See the training run's command")
    elif len(set(masks.values())) > 1:
        head.problem(f"config.json: the mask tokens disagree: {masks}", "Keep the right one")
    elif max(masks.values()) >= size:
        head.problem(f"config.json: mask_token_id is {max(masks.values())}, the vocabulary has {size}", "Correct it")
    return next(iter(masks.values()), 0)


@dataclass(frozen=True)
class ParallelLayout(FusedLayout):
    """One engine's names for P-EAGLE's network, whose blocks are all numbered."""

    blocks: int = 4  # as published

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """EAGLE-3's layout and the mask token, for which readers have no default."""
        layout = super().write(drafter, target_config, engine)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}
        config = {**layout.config, "mask_token_id": mask_of(drafter)}
        if getattr(drafter.shape, "qk_norm", False):
            config |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
        return replace(layout, config=config, tensors=tensors, deepest=drafter.settings.depths, at_once=True)
