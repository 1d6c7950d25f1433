"""The keys of a config of unknown origin, each with the kind of its values, and rotary parameters in all spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# rope_theta of Llama when the first methods were written; some trainers keep it whatever the target has
USUAL_THETA = 10000.0
MAX_SIZE = 2**31  # above any size, count or token id in a config
# keys without any bearing on what a head computes, by where they come from
IGNORED = {
    "any config of transformers": "architectures model_type torch_dtype dtype transformers_version auto_map "
    "_name_or_path name_or_path bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id "
    "decoder_start_token_id use_cache initializer_range pretraining_tp attention_dropout hidden_dropout resid_pdrop "
    "embd_pdrop chunk_size_feed_forward is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size "
    "tie_encoder_decoder pruned_heads id2label label2id problem_type finetuning_task task_specific_params "
    "tokenizer_class prefix _attn_implementation attn_implementation _attn_implementation_autoset torchscript "
    "use_bfloat16 tf_legacy_loss max_window_layers",
    "what generation and outputs are asked for": "return_dict output_attentions output_hidden_states output_scores "
    "return_dict_in_generate max_length min_length do_sample early_stopping num_beams num_beam_groups "
    "num_return_sequences temperature top_k top_p typical_p repetition_penalty length_penalty diversity_penalty "
    "exponential_decay_length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "suppress_tokens begin_suppress_tokens forced_bos_token_id forced_eos_token_id remove_invalid_values",
    "speculators and trainers of heads": "has_no_defaults_at_init speculators_version speculators_model_type "
    "embed_requires_grad use_last_layernorm next_layer_regular num_target_layers parallel_draft_heads_num_layers "
    "eagle_decoder_type has_lm_head target_model_type ttt_length bias_heads modules_in_block_to_quantize",
    "this project's tuner": "budget",
}
NO_MATTER = set(" ".join(IGNORED.values()).split())
ROPE = {
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate", "partial_rotary_factor",
}  # fmt: skip
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number above 0.

    Values of a config are of unknown origin, and may be of any type.
    """
    # `type` and not isinstance, since true is an int too; the limit keeps absurd numbers out of computations
    return type(value) in (int, float) and 0 < value < 1e30 and math.isfinite(value)


def _is_count(value: Any, minimum: int = 0) -> bool:
    """Return whether a config's value is a whole number from `minimum` to MAX_SIZE, above any size or token id."""
    # `type` and not isinstance, since true is an int too
    return type(value) is int and minimum <= value < MAX_SIZE


def _is_rotary(value: Any) -> bool:
    """Return whether a value may be one of the rotary parameters: a word, a boolean, a number or a list of numbers.

    The config is of unknown origin, so that a value may be anything.
    """
    is_bounded = type(value) in (int, float) and abs(value) < 1e30
    return isinstance(value, str | bool) or is_bounded or _list_of(is_number)(value)


def _list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check of a value: whether it is a list of no absurd length, whose items all pass `is_item`."""
    return lambda value: isinstance(value, list) and len(value) <= 1000 and all(map(is_item, value))


VALUE_KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: _is_count(value, 1),
    "a whole number, 0 or more": _is_count,
    "a number above 0": is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "a mapping": lambda value: isinstance(value, dict),
    "a list of texts": _list_of(lambda value: isinstance(value, str)),
    "a list of whole numbers, 0 or more": _list_of(_is_count),
    "a list of whole numbers, -1 or more": _list_of(lambda value: _is_count(value, -1)),
}
KEYS_READ = {  # the keys that are read, by the kind of their values
    "a whole number above 0": "hidden_size intermediate_size vocab_size draft_vocab_size truncated_vocab_size head_dim "
    "num_attention_heads num_key_value_heads num_hidden_layers num_target_layers max_position_embeddings block_size "
    "sliding_window swa_window_size target_hidden_size parallel_draft_step n_predict k_mask num_heads num_medusa_heads "
    "num_medusa_layers medusa_num_heads medusa_num_layers hydra_num_heads hydra_num_layers "
    "xpress_rank xpress_mlp_hidden xpress_block_size "
    "conv_kernel_size conv_group_size selector_rank selector_top_k lilicorr_candidate_topk lilicorr_hidden_size "
    "lilicorr_factor_dim lilicorr_num_layers lilicorr_num_heads",
    "a whole number, 0 or more": "mask_token_id pard_token ptd_token_id markov_rank pure_draft_prefix_len "
    "num_jacobi_passes xpress_num_passes",
    "a number above 0": "rope_theta partial_rotary_factor rms_norm_eps logit_scale lilicorr_mlp_ratio "
    "lilicorr_logit_scale lilicorr_vector_eps",
    "true or false": "bias attention_bias mlp_bias qkv_bias tie_word_embeddings tie_weights scale_input norm_before_fc "
    "norm_before_residual fc_norm norm_output use_mtp_layernorm use_input_layernorm_in_first_layer "
    "use_aux_hidden_state use_sliding_window sliding_window_non_causal use_swa is_causal causal sample_from_anchor "
    "dflash_query_causal dspark_bonus_anchor shift_label enable_confidence_head use_confidence_head grounded_heads "
    "original_lm_head is_neox_style rope_is_neox_style lilicorr_enabled",
    "a text": "hidden_act hydra_head_arch markov_head_type name_or_path base_model_name_or_path",
    "a mapping": "shape transformer_layer_config settings eagle_config dflash_config medusa speculators_config "
    "verifier rope_parameters rope_scaling",
    "a list of texts": "layer_types",
    "a list of whole numbers, 0 or more": "eagle_aux_hidden_state_layer_ids aux_hidden_state_layer_ids",
    "a list of whole numbers, -1 or more": "target_layer_ids",
}
KIND_OF = {name: kind for kind, names in KEYS_READ.items() for name in names.split()}


@dataclass
class Keys:
    """One section of a config, read key by key; a value of a wrong type is reported and then treated as absent."""

    values: dict[str, Any]
    prefix: str = ""  # of a nested section, for messages: "eagle_config."
    wrong: list[str] = field(default_factory=list)  # faults of values, of all sections together
    # keys that were read or do not matter; the others are listed as unknown
    handled: set[str] = field(default_factory=set)

    def read(self, name: str) -> Any:
        """Return the value of a key, which must be in KEYS_READ; None if it is absent or of a wrong type.

        The key is marked as handled, and a value of a wrong type is added to `wrong`.
        """
        self.handled.add(name)
        value = self.values.get(name)
        kind = KIND_OF[name]
        if value is None or VALUE_KINDS[kind](value):
            return value
        self.wrong.append(f"{self.prefix}{name} is {short(value)}, expected {kind}")
        return None

    def section(self, name: str) -> Keys:
        """Return a nested section of the config by its key, empty if it is absent; its faults join the same list."""
        return Keys(self.read(name) or {}, f"{self.prefix}{name}.", self.wrong)


def short(value: Any) -> str:
    """Return a value of unknown origin as text for a message, shortened so that it can be printed on a terminal."""
    # Python refuses to print integers of thousands of digits
    if isinstance(value, int) and abs(value) > 10**30:
        return "an absurd number"
    if isinstance(value, dict | list) and len(value) > 8:
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind} of {len(value)}"
    try:
        return f"{value!r:.60}"
    except RecursionError:
        return "a deeply nested value"


def read_rope(keys: Keys, notes: list[str]) -> dict[str, Any]:
    """Return the rotary parameters of a config, which newer and older configs state in different places.

    These are `rope_parameters`, `rope_scaling`, and `rope_theta` and `partial_rotary_factor` beside them. What they
    state twice must agree.

    Args:
        keys: The section of the config; contradictions and wrong values are added to `keys.wrong`.
        notes: Notes for the user, to which the defaults that were taken are added.

    Returns:
        "rope_type", "rope_theta" and the parameters of a scaling, by their names in newer configs of transformers.
    """
    theta = keys.read("rope_theta")
    newer = keys.section("rope_parameters")
    rope = _read_rope_section(keys.section("rope_scaling"))
    for name, value in _read_rope_section(newer).items():
        if rope.setdefault(name, value) != value:
            keys.wrong.append(
                f"rope_scaling and rope_parameters differ in {name}: {rope[name]!r}, {value!r}"
            )
        rope[name] = value
    if "rope_theta" in rope and not is_number(rope["rope_theta"]):
        keys.wrong.append(
            f"rope_theta is {short(rope.pop('rope_theta'))}, expected a number above 0"
        )
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        keys.wrong.append(
            f"rope_theta is {theta:g}, but {rope['rope_theta']!r} inside of the rotary parameters"
        )
    unknown = sorted(rope.keys() - ROPE)
    if unknown:
        notes.append(f"unknown rotary parameters, not used: {', '.join(map(repr, unknown)):.200}")
        rope = {name: value for name, value in rope.items() if name in ROPE}
    if "rope_theta" not in rope:
        notes.append("no rope_theta: 10000, as in a Llama config without one")
    if rope.setdefault("rope_type", "default") not in ROPE_TYPES:
        keys.wrong.append(
            f"rope_type is {short(rope.pop('rope_type'))}, expected one of {', '.join(ROPE_TYPES)}"
        )
    # heads here rotate whole vectors, so a share of 1 is the only right one
    partial = rope.pop("partial_rotary_factor", None) or keys.read("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        keys.wrong.append(
            f"partial_rotary_factor is {partial!r}, expected 1: heads turn whole vectors"
        )
    rope = {"rope_type": "default", "rope_theta": USUAL_THETA, **rope}
    return {**rope, "rope_theta": float(rope["rope_theta"])}


def _read_rope_section(section: Keys) -> dict[str, Any]:
    """Return the values of `rope_parameters` or `rope_scaling`; none if one is of a wrong type, which is reported.

    Rotary parameters are the base frequency and how it is scaled.
    """
    values = {name: value for name, value in section.values.items() if value is not None}
    # older configs say `type` for `rope_type`
    kind = values.pop("type", None)
    if kind is not None:
        values.setdefault("rope_type", kind)
    for name, value in values.items():
        if not _is_rotary(value):
            section.wrong.append(
                f"{section.prefix}{name} is {short(value)}, expected a number or a word"
            )
            return {}
    return values
