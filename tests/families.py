"""Tiny random models of the families that the decoder is held to, and drafters that know their answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from eagle.conformance.own_answers import own_answer as own_answer
from eagle.conformance.own_answers import own_logits as own_logits
from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree

VOCAB_SIZE = 96
NUM_LAYERS = 4
WINDOW = 8

# what all families have; no token ends a text
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
HEADS = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LATENT_ATTENTION = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA_RULE = {
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# the type of a model and what its config has beside COMMON; all of these read trees by a mask
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    # rotary tables of other kinds, tied matrices and biases
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),  # its attention has biases
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, **ALTERNATING}),
    "qwen3": ("qwen3", HEADS),
    # mixtures of experts route each token by itself
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, **HEADS}),
    "mistral": ("mistral", {"sliding_window": None}),
    # windows of 8 tokens, which prompts and trees outgrow
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "gemma2": ("gemma2", {**ALTERNATING, **HEADS, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**ALTERNATING, **HEADS, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("gpt_oss", {**ALTERNATING, **HEADS, **LOCAL_EXPERTS, "rope_parameters": YARN}),
    # latent attention
    "deepseek_v3": ("deepseek_v3", LATENT_ATTENTION),
    "phi3": ("phi3", {}),
    "phi3-sliding": ("phi3", {"sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {}),
    # learned positions, and projections of other names
    "gpt2": ("gpt2", {}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", {"alibi": False}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    # factors on embeddings, residuals and logits
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    ),
    "glm": ("glm", HEADS),
    "smollm3": ("smollm3", {}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-sliding": ("starcoder2", {"sliding_window": WINDOW}),
    "stablelm": ("stablelm", {}),
}

# families with recurrent state or with positions as biases, which a mask alone does not serve
OTHER_MEANS: dict[str, tuple[str, dict[str, Any]]] = {
    # recurrent state in all layers or in some
    "qwen3_next": ("qwen3_next", {**EXPERTS, **HEADS, **DELTA_RULE}),
    "mamba": ("mamba", {"state_size": 4}),
    "jamba": (
        "jamba",
        {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    # distances as biases of attention, which a mask must carry
    "bloom": ("bloom", {"n_head": 4}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": NUM_LAYERS, "expansion_ratio": 2}),
    "falcon-alibi": ("falcon", {"alibi": True}),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the family's model with random weights, so large that answers vary and biases matter."""
    model_type, overrides = (FAMILIES | OTHER_MEANS)[name]
    config = AutoConfig.for_model(model_type, **{**COMMON, **overrides})
    # some vectors start from random numbers, which `draw_weights` only adds to
    torch.manual_seed(0)
    return draw_weights(AutoModelForCausalLM.from_config(config)).to(dtype).eval()


def draw_weights(model: Any) -> Any:
    """Return the model with every weight random, the same each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # norms and biases stay near their start
            weight.copy_(noise * 0.3 if weight.dim() > 1 else weight + noise * 0.1)
        # else a tied head answers with the token just read
        model.get_input_embeddings().weight *= 0.3
    return model


def small_llama() -> LlamaForCausalLM:
    """Return a random Llama of 24 tokens, whose logits are far enough apart for answers that vary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return model


def random_tokens(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def own_choices(
    model: PreTrainedModel,
    prompt: list[int],
    answer: list[int],
    warp: Callable[[Tensor, Tensor], Tensor] | None = None,
    noise: Callable[[int], Tensor] | None = None,
) -> list[int]:
    """Return what the model would choose at each position of an answer, by one forward over the whole text.

    An answer that equals its choices is the model's `own_answer`, where positions do not depend on a text's length.

    Args:
        model: an untouched model.
        prompt: token ids.
        answer: token ids.
        warp: a processor of logits.
        noise: returns what is added to the logits of a position.
    """
    text = [*prompt, *answer]
    logits = own_logits(model, text)
    choices = []
    for end in range(len(prompt), len(text)):
        # logits at a position choose the next token
        scores = logits[end - 1 : end]
        if warp is not None:
            scores = warp(torch.tensor([text[:end]]), scores)
        if noise is not None:
            scores = scores + noise(end)
        choices.append(int(scores[0].argmax()))
    return choices


class RandomTrees(Drafter):
    """Random trees of at most 12 nodes over a few tokens, so that some are right by chance."""

    def __init__(self, tokens: list[int], seed: int = 0, taps: tuple[int, ...] = ()) -> None:
        self.tokens = tokens
        self.dice = random.Random(seed)
        self.taps = taps

    def begin(self, noise: Noise | None = None) -> Any:
        """Return itself, as it keeps nothing of a text."""
        return self

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """Return a tree grown by eleven random tokens under random nodes."""
        paths: list[list[int]] = [[]]
        for _ in range(11 if budget.depth else 0):
            parent = self.dice.choice([path for path in paths if len(path) < budget.depth])
            paths.append([*parent, self.dice.choice(self.tokens)])
        return DraftTree.from_paths(news.root, paths)


def plant_branches(right: list[int]) -> list[list[int]]:
    """Return a right path, with a wrong branch of two tokens before and after each of its nodes."""

    def branches(shift: int) -> list[list[int]]:
        wrong = [(token + shift) % VOCAB_SIZE for token in right]
        return [right[:k] + wrong[k : k + 2] for k in range(len(right))]

    return [*branches(1), right, *branches(2)]


class PlantedTrees(Drafter):
    """Knows the answer, and plants its next tokens among wrong branches."""

    def __init__(self, text: list[int], right: int = 3, taps: tuple[int, ...] = ()) -> None:
        self.text = text
        self.right = right
        self.taps = taps
        self.begin()

    def begin(self, noise: Noise | None = None) -> Any:
        """Go back to the start of the text."""
        self.read = 0
        return self

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """Return the right path among wrong branches."""
        # the root is the token after those that were read
        self.read += len(news.tokens)
        right = self.text[self.read + 1 :][: min(self.right, budget.depth)]
        return DraftTree.from_paths(news.root, plant_branches(right))
