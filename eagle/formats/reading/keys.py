"""Typed access to a foreign config's keys, which records the keys that were not used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MOST = 2**31  # of any size
# of a Llama config or a speculators one, and without any bearing on what a head computes
NO_MATTER = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "auto_map", "_name_or_path",
    "name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id",
    "use_cache", "initializer_range", "pretraining_tp", "attention_dropout", "hidden_dropout", "resid_pdrop",
    "embd_pdrop", "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward",
    "is_encoder_decoder", "id2label", "label2id", "problem_type", "_attn_implementation", "attn_implementation",
    "_attn_implementation_autoset", "has_no_defaults_at_init", "speculators_version", "speculators_model_type",
    "embed_requires_grad", "max_window_layers", "use_last_layernorm", "next_layer_regular", "num_target_layers",
    "parallel_draft_heads_num_layers", "eagle_decoder_type", "has_lm_head", "target_model_type", "ttt_length",
    "torchscript", "tokenizer_class", "task_specific_params", "prefix", "finetuning_task",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "pruned_heads",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "output_scores",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty", "use_bfloat16",
    "tf_legacy_loss", "bias_heads", "modules_in_block_to_quantize",
}  # fmt: skip
ROPE = {
    "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim",
    "truncate", "partial_rotary_factor",
}  # fmt: skip
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass
class Keys:
    """The values of a mapping; a value of a wrong type is reported and treated as absent, like null."""

    values: dict[str, Any]
    where: str = ""  # the section, in front of each name
    wrong: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def size(self, name: str) -> int | None:
        """A whole number above 0."""
        return self._take(name, "a whole number above 0", lambda value: type(value) is int and 0 < value < MOST)

    def token(self, name: str) -> int | None:
        """A whole number, 0 or more."""
        return self._take(name, "a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < MOST)

    def number(self, name: str) -> float | None:
        """A finite number above 0."""
        return self._take(name, "a number above 0", is_number)

    def flag(self, name: str) -> bool | None:
        """True or false."""
        return self._take(name, "true or false", lambda value: isinstance(value, bool))

    def text(self, name: str) -> str | None:
        """A string."""
        return self._take(name, "a text", lambda value: isinstance(value, str))

    def whole(self, name: str, least: int = 0) -> tuple[int, ...] | None:
        """A list of whole numbers, each at least `least`."""
        numbers = self._take(
            name,
            f"a list of whole numbers, {least} or more",
            lambda value: _is_list(value, lambda number: type(number) is int and least <= number < MOST),
        )
        return None if numbers is None else tuple(numbers)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty if absent."""
        texts = self._take(name, "a list of texts", lambda value: _is_list(value, lambda word: isinstance(word, str)))
        return tuple(texts or ())

    def section(self, name: str) -> Keys:
        """A nested mapping, which reports to the same list."""
        values = self._take(name, "a mapping", lambda value: isinstance(value, dict))
        return Keys(values or {}, f"{self.where}{name}.", self.wrong)

    def left(self) -> list[str]:
        """The keys with a value that were not used and are not known to be irrelevant."""
        held = {name for name, value in self.values.items() if value is not None}
        left = sorted(held - self.taken - NO_MATTER)
        return [f"{self.where}{name if name.isprintable() else ascii(name)}"[:100] for name in left]

    def _take(self, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
        self.taken.add(name)
        value = self.values.get(name)
        if value is None or fits(value):
            return value
        self.wrong.append(f"{self.where}{name} is {short(value)}, expected {expected}")
        return None


def short(value: Any) -> str:
    """A value, shortened, as an error shows it."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "an absurd number"
    if isinstance(value, dict | list) and len(value) > 8:
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    try:
        return f"{value!r:.60}"
    except RecursionError:
        return "a deeply nested value"


def is_number(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return type(value) in (int, float) and 0 < value < 1e30 and math.isfinite(value)


def _is_list(value: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and len(value) <= 1000 and all(map(fits, value))


def _is_rotary_value(value: Any) -> bool:
    number = type(value) in (int, float) and abs(value) < 1e30
    return number or isinstance(value, str | bool) or _is_list(value, is_number)


def read_rope(keys: Keys, notes: list[str]) -> dict[str, Any]:
    """The rotary parameters in any of a config's three spellings; a note if two disagree."""
    theta = keys.number("rope_theta")
    newer, older = keys.section("rope_parameters"), keys.section("rope_scaling")
    rope: dict[str, Any] = {}
    for section in (older, newer):
        values = {name: value for name, value in section.values.items() if value is not None}
        kind = values.pop("type", None)
        if kind is not None:
            values.setdefault("rope_type", kind)
        if bad := [name for name, value in values.items() if not _is_rotary_value(value)]:
            keys.wrong.append(f"{section.where}{bad[0]} is {short(values[bad[0]])}, expected a number or a word")
            continue
        for name in (name for name in rope.keys() & values.keys() if rope[name] != values[name]):
            keys.wrong.append(f"rope_scaling and rope_parameters differ in {name}: {rope[name]!r}, {values[name]!r}")
        rope |= values
    if "rope_theta" in rope and not is_number(rope["rope_theta"]):
        keys.wrong.append(f"rope_theta is {short(rope.pop('rope_theta'))}, expected a number above 0")
    if theta is not None and rope.setdefault("rope_theta", theta) != theta:
        keys.wrong.append(f"rope_theta is {theta:g}, but {rope['rope_theta']!r} inside of the rotary parameters")
    if unknown := sorted(rope.keys() - ROPE):
        notes.append(f"unknown rotary parameters, not used: {', '.join(map(repr, unknown)):.200}")
        rope = {name: value for name, value in rope.items() if name in ROPE}
    if "rope_theta" not in rope:
        notes.append("no rope_theta: 10000, as in a Llama config without one")
    if rope.setdefault("rope_type", "default") not in ROPE_TYPES:
        keys.wrong.append(f"rope_type is {short(rope.pop('rope_type'))}, expected one of {', '.join(ROPE_TYPES)}")
    partial = rope.pop("partial_rotary_factor", None) or keys.number("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        keys.wrong.append(f"partial_rotary_factor is {partial!r}, expected 1: heads turn whole vectors")
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    return {**rope, "rope_theta": float(rope["rope_theta"])}
