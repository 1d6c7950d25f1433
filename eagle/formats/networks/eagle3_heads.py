"""EAGLE-3's network as engines and trainers name it: fused taps, a draft vocabulary, and switches."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Config, Layout, TargetConfig, embedding_of, llama_config, scale_of, tensors_of
from eagle.formats.networks.eagle1_heads import AUTOMODEL_CLASS, BLOCK, Eagle1, list_block_facts
from eagle.formats.networks.layers_and_tokens import (
    LAYER_IDS,
    check_draft_vocab,
    choose_taps,
    list_wrong_ids,
    mark_tokens,
)
from eagle.formats.networks.network import keep_names, rename_tensors
from eagle.formats.networks.network_layout import NetworkLayout, reorder_taps
from eagle.formats.reading import traps
from eagle.formats.reading.head_folder import EMBEDDING, LAYERS, MIDLAYER, MODELOPT, REFERENCE, SPECULATORS, HeadFolder
from eagle.formats.reading.target_files import EMBEDDINGS, TargetFiles
from eagle.formats.reading.traps import Strike, strike

FUSED = "fused"  # the name of the network
SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")
MIDLAYER_NAMES = {"layers.0.*": "midlayer.*"}  # most engines call the block so, and all of them know it by that name
NAMES = {**BLOCK, **keep_names("fc_norm.#.weight", "norm.weight", "d2t", "t2d")}
NEXT_STEP, LM_HEAD = "next-step", "lm-head"
MEANINGS = {  # of the one key `norm_output`
    NEXT_STEP: "the next step reads the normed state, as vLLM, SGLang, TensorRT-LLM and speculators mean it",
    LM_HEAD: "the LM head reads the normed state and the next step the un-normed one, as SpecForge means it",
}
ASK = f"Import it with --norm-output={LM_HEAD} if SpecForge trained it, else with --norm-output={NEXT_STEP}"


class Eagle3(Eagle1):
    """EAGLE-3's heads of any trainer."""

    name, method, methods = "EAGLE-3", "eagle3", ("eagle3",)
    layers = LAYERS
    spellings = ((MIDLAYER, MIDLAYER_NAMES), (LAYERS, NAMES))
    borrowed: Mapping[str, tuple[str, ...]] = {EMBEDDING: EMBEDDINGS}
    indices = ("d2t", "t2d")
    beside: Mapping[str, tuple[str, ...]] = {
        EMBEDDING: ("vocab_size", "hidden_size"),
        "d2t": ("draft_vocab_size",),
        "t2d": ("vocab_size",),
        "fc.bias": ("hidden_size",),
    }
    takes_taps = True
    remedies: Mapping[str, str] = {
        **Eagle1.remedies,
        "lm_head.weight": "Engines use the target's, random numbers or none: export it, a head trains its own",
        "d2t": "Engines take the draft's numbers for tokens: export it",
    }
    classes = frozenset(
        {
            *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator"),
            *("Eagle3DraftModel", AUTOMODEL_CLASS),
        }
    )

    def read_switches(self, head: HeadFolder) -> Config:
        """The draft vocabulary, the taps and the switches."""
        self.read_draft_vocab(head)
        fc, width = head.entry("fc.weight"), head.shape["hidden_size"]
        columns = fc.shape[1] if fc and len(fc.shape) == 2 else 3 * width
        head.tap_count, rest = divmod(columns, width)
        if rest or not 0 < head.tap_count < 100:
            head.problem(f"fc.weight reads {columns} numbers, expected a multiple of {width}, the width")
            head.tap_count = 3
        switches = {name: read_switch(head, name) for name in ("fc_norm", "norm_output", "norm_before_residual")}
        is_there = "fc_norm.0.weight" in head.names
        if is_there != switches["fc_norm"]:
            state = f"fc_norm.0.weight {'is' if is_there else 'is not'} there"
            head.problem(f"config.json: fc_norm is {switches['fc_norm']}, and {state}")
        if head.nested.read("use_aux_hidden_state") is False:
            head.problem("config.json: eagle_config.use_aux_hidden_state is false, but this is EAGLE-3's network")
        inputs, outputs = head.keys.read(LAYER_IDS), head.nested.read(LAYER_IDS)
        head.inputs = None if inputs is None else tuple(inputs)
        if outputs:  # ModelOpt writes [] for its default
            head.outputs, head.inputs_by_outputs = tuple(outputs), tuple(layer + 1 for layer in outputs)
        is_reduced = head.draft_vocab_size < head.shape["vocab_size"]
        return {
            **switches,
            "taps": tuple(range(head.tap_count)),  # until an import settles them
            "draft_vocab": head.draft_vocab_size if is_reduced else None,
        }

    def read_draft_vocab(self, head: HeadFolder) -> None:
        """The number of tokens that can be drafted."""
        output, vocab_size = head.entry("lm_head.weight"), head.shape["vocab_size"]
        size = head.keys.read("draft_vocab_size")
        if size is None:
            size = output.shape[0] if output and output.shape else vocab_size
            where = "the rows of lm_head.weight" if output else "the whole vocabulary"
            head.notes.append(f"no draft_vocab_size: {size}, {where}")
        if size > vocab_size:
            head.problem(f"draft_vocab_size is {size}, more than the vocabulary of {vocab_size}", fatal=False)
        head.draft_vocab_size = head.overrides["draft_vocab_size"] = size

    def settle(
        self, head: HeadFolder, target: TargetFiles | None, taps: tuple[int, ...] | None, norm_output: str | None
    ) -> list[str]:
        """The taps, by two statements of the config that must agree, as asked, or the usual ones; and `norm_output`."""
        if "norm_output" in head.settings:
            settle_norm_output(head, norm_output)
        head.settings["taps"], notes = choose_taps(head, target.layers if target else None, taps)
        if "fc.bias" in head.names and bool(head.load("fc.bias").any()):
            raise ValueError("fc.bias is not zero, and EAGLE-3 has no bias in fc: no engine would add it")
        if "fc.bias" in head.names:
            notes.append("fc.bias is all zeros and left out: it changes nothing")
        return [*notes, *check_draft_vocab(head)]

    def may_lack(self, head: HeadFolder, name: str) -> str:
        """The mask of the draft's tokens, which follows from them."""
        return "no t2d: made from d2t" if name == "t2d" else ""

    def make_tensor(self, head: HeadFolder, name: str, size: torch.Size) -> Tensor:
        """Offsets as whole numbers, and the mask that follows from them."""
        if name not in self.indices:
            return head.load(name)
        offsets = head.load("d2t").long()
        return offsets if name == "d2t" else mark_tokens(head, offsets + torch.arange(len(offsets)))

    def list_faults(self, head: HeadFolder, target: TargetFiles | None) -> Iterator[Strike]:
        """Names, layer ids, the draft vocabulary and switches that engines take otherwise."""
        yield from self.list_names(head)
        if head.has_block("layers.0."):
            yield strike(traps.MIDLAYER_ONLY)
        yield from list_wrong_ids(head, target)
        if head.inputs and head.outputs is None:
            yield strike(traps.OUTER_IDS_ALONE)
        elif head.outputs and not head.inputs:
            yield strike(traps.INNER_IDS_ALONE, inputs=list(head.inputs_by_outputs or ()))
        for switch, trap in traps.UNKNOWN_SWITCHES.items():
            if head.settings[switch]:
                knows, lacks = (partial(_is_known, switch=switch, is_known=known) for known in (True, False))
                yield strike(trap, reads=lacks, servers=knows)
        if is_ambiguous(head):
            reads = partial(_is_known, switch="norm_output", is_known=True)
            yield strike(traps.NORM_OUTPUT, reads=reads, question=describe_choice(head), ask=ASK)
        name = "layers.0.input_layernorm.weight"
        weight = head.load(name) if head.layout == MODELOPT and head.entry(name) else None
        if weight is not None and bool((weight != weight[:1]).any()):
            yield strike(traps.MODELOPT_NORM)
        if head.layout == SPECULATORS and "norm_before_residual" not in head.keys.values:
            yield strike(traps.RESIDUAL_UNSAID)
        if head.entry("fc.bias") is not None:
            yield strike(traps.FUSED_BIAS)
        yield from self.list_promises(head, is_tied_fatal=True)

    def describe(self, head: HeadFolder) -> str:
        """The method, by its switches."""
        return "EAGLE-3.1" if head.settings.get("fc_norm") or head.settings.get("norm_output") else "EAGLE-3"

    def list_facts(self, head: HeadFolder) -> Config:
        """Sizes, the layers that are read, and what is switched on."""
        reads = "layers that are not named"
        if inputs := head.inputs or head.inputs_by_outputs:
            outputs = tuple(layer - 1 for layer in inputs)
            reads = f"inputs of layers {inputs}, which are outputs of {outputs}"
        is_on = [
            name for name in ("fc_norm", "norm_output", "norm_before_residual", "window") if head.settings.get(name)
        ]
        return {**list_block_facts(head), "reads": reads, "switches": ", ".join(is_on) or "none"}


def read_switch(head: HeadFolder, name: str) -> bool:
    """A switch at the top of a config or in eagle_config; off if it is in neither."""
    outer, inner = head.keys.read(name), head.nested.read(name)
    if None not in (outer, inner) and outer != inner:
        head.problem(f"config.json: {name} is {outer} and eagle_config.{name} is {inner}", "Correct one of them")
    if outer is None and inner is None:
        head.notes.append(f"no {name}: false")
    return bool(outer if outer is not None else inner)


# -- norm_output, one key with two meanings: what the next step reads, or what the LM head reads ---------------------


def is_ambiguous(head: HeadFolder) -> bool:
    """Whether the config holds `norm_output` and nothing tells whose: SpecForge never writes norm_before_residual."""
    keys = head.keys.values.keys() | head.nested.values.keys()
    return head.layout in (MIDLAYER, REFERENCE) and "norm_output" in keys and "norm_before_residual" not in keys


def describe_choice(head: HeadFolder) -> str:
    """The question to the user that the config leaves open."""
    value = str(head.settings["norm_output"]).lower()
    return f"norm_output is {value}, which has two meanings: either {', or '.join(MEANINGS.values())}"


def settle_norm_output(head: HeadFolder, meaning: str | None) -> None:
    """Set the head's switch by the meaning of `norm_output`; ValueError if it is open or has no counterpart."""
    if meaning is None and is_ambiguous(head):
        raise ValueError(f"{head.path}: {describe_choice(head)}. {ASK}")
    if meaning not in (None, *MEANINGS):
        raise ValueError(f"norm_output is {meaning!r}, expected {' or '.join(map(repr, MEANINGS))}: what the key means")
    if meaning != LM_HEAD:
        return
    if head.settings["norm_output"]:
        head.notes.append(f"norm_output is true and means, as asked: {MEANINGS[LM_HEAD]}")
        head.settings["norm_output"] = False
    elif is_ambiguous(head):
        raise ValueError(
            f"{head.path}: norm_output is false, by which SpecForge means that the LM head reads the un-normed "
            "state: no head here does"
        )


# -- writing ----------------------------------------------------------------------------------------------------------


def _is_known(layout: NetworkLayout, switch: str, is_known: bool) -> bool:
    return type(layout) is FusedLayout and (switch in layout.switches) == is_known


@dataclass(frozen=True)
class FusedLayout(NetworkLayout):
    """One engine's names for EAGLE-3's network; in the serve text LAYERS stands for the outputs that are fused."""

    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle3",)
    switches: tuple[str, ...] = ()  # that it knows
    nested_switches: tuple[str, ...] = ()  # that it looks for in eagle_config
    taps: int | None = 3  # how many layers it fuses; None for any number
    reads_embedding: bool = False  # one that the head brings
    needs_offsets: bool = False  # where all tokens can be drafted too

    def write(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> Layout:
        """Layer ids ascend, and stand twice in the config, each time as those who look there count them."""
        self._check(drafter, target_config, engine)
        order = sorted(range(len(drafter.taps)), key=drafter.taps.__getitem__)
        inputs = [drafter.taps[tap] for tap in order]
        outputs = [layer - 1 for layer in inputs]
        switches = {switch: bool(getattr(drafter.settings, switch, False)) for switch in SWITCHES}
        nested = {switch: switches[switch] for switch in self.nested_switches}
        draft_vocab_size: int = drafter.lm_head.out_features  # type: ignore[union-attr, assignment]
        config = llama_config(
            drafter,
            target_config,
            architectures=list(self.architectures),
            draft_vocab_size=draft_vocab_size,
            **switches,
            eagle_aux_hidden_state_layer_ids=inputs,
            eagle_config={"use_aux_hidden_state": True, LAYER_IDS: outputs, **nested},
        )
        tensors = reorder_taps(tensors_of(drafter), order)
        if scale_of(drafter) != 1.0:
            tensors[EMBEDDING] = embedding_of(drafter, engine)
        if self.needs_offsets and draft_vocab_size == target_config.vocab_size:
            tensors["d2t"] = torch.zeros(draft_vocab_size, dtype=torch.long)
            tensors["t2d"] = torch.ones(draft_vocab_size, dtype=torch.bool)
        serve = self.serve.replace("[LAYERS]", str(outputs)).replace("LAYERS", " ".join(map(str, outputs)))
        return Layout(config, rename_tensors(tensors, MIDLAYER_NAMES), serve)

    def _check(self, drafter: TrainableDrafter, target_config: TargetConfig, engine: str) -> None:
        """Raise ValueError with the reason why the head cannot be served."""
        for switch in SWITCHES:
            if getattr(drafter.settings, switch, False) and switch not in self.switches:
                raise ValueError(
                    f"{engine}: drafter.{switch} is unknown there, and acceptance would be lost in silence: train with "
                    f"drafter.{switch}=false, or export to an engine that knows it (docs/serving.md)"
                )
        layers, taps = target_config.num_hidden_layers, drafter.taps
        if len(taps) != (self.taps or len(taps)) or not all(0 < tap < layers for tap in taps):
            raise ValueError(
                f"{engine}: drafter.taps is {taps}, expected the inputs of {self.taps or 'some'} layers of 1 to "
                f"{layers - 1}: train with such"
            )
        if scale_of(drafter) != 1.0 and not self.reads_embedding:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which this engine leaves "
                "out when it drafts: use vllm, llamacpp or speculators, where the head brings its own embedding"
            )
