"""How the target samples: settings, and transformers' logit warpers in transformers' order."""

# N nodes, V vocabulary

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from eagle.device import must_wait, upload

PUBLISHED_TYPICAL = (0.09, 0.3)  # epsilon and delta of Medusa's released code

# Fields of a generation config that `default_sampling` follows; fields in none of these sets are refused by name.
WARPED = {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
# fields of which transformers makes processors, which `Sampling.from_processors` refuses
PROCESSED = {
    *(
        "no_repeat_ngram_size",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
    ),
    *(
        "sequence_bias",
        "guidance_scale",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "top_h",
        "watermarking_config",
    ),
    *("renormalize_logits", "remove_invalid_values"),
}
# fields without effect on token probabilities; where an answer ends is an argument of `generate`
WITHOUT_EFFECT = {
    *(
        "max_length",
        "max_new_tokens",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "decoder_start_token_id",
    ),
    *(
        "use_cache",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "compile_config",
        "disable_compile",
    ),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    *(
        "early_stopping",
        "length_penalty",
        "diversity_penalty",
        "num_beam_groups",
        "low_memory",
    ),  # of beams alone
    *(
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
    ),
    *(
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "continuous_batching_config",
    ),
    *("transformers_version", "_from_model_config", "_commit_hash"),
}
# values with which a field that is not served is off
OFF: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "min_new_tokens": 0,
}
OFF |= {
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "penalty_alpha": 0,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target samples. The settings have the names and the order of transformers.

    Drafts do not change the output's distribution, except with `typical` or with a `lenience` below 1, which are LOSSY.
    """

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # sample only from this many of the most probable tokens; 0: from all
    top_p: float = 1.0  # sample only from the most probable tokens with this total probability
    min_p: float = 0.0  # minimum probability of a token, relative to the most probable one
    repetition_penalty: float = 1.0  # penalty for tokens that are in the sequence; 1: none
    seed: int = 0  # seed of the random numbers
    request: int = 0  # number of the sequence: with one seed, each number has other random numbers
    # how sampled drafts are verified: token by token, or as whole paths ("block"), of which at least as many tokens are
    # accepted; None: as whole paths, except with a lenience
    rule: Literal["token", "block"] | None = None
    # LOSSY: with either of these the output does not follow the target's distribution
    lenience: float = 1.0  # LOSSY below 1
    # LOSSY: typical acceptance with (epsilon, delta)
    typical: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check the fields; ValueError names the field, what it holds and what is expected."""
        # numpy's whole numbers become ints, so that equal samplings are equal
        for name in ("top_k", "seed", "request"):
            object.__setattr__(self, name, whole(f"Sampling.{name}", getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "lenience"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ValueError(f"Sampling.{name} is {value!r}, expected a number")
        # comparisons are False for nan, too
        conditions = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "0 (off) to 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "above 0; 1 is off",
            ),
            ("rule", self.rule in ("token", "block", None), "'token', 'block' or None"),
            ("lenience", 0 < self.lenience <= 1, "above 0, at most 1 (lossless)"),
        )
        for name, holds, expected in conditions:
            if not holds:
                raise ValueError(f"Sampling.{name} is {getattr(self, name)!r}, expected {expected}")
        if self.lenience < 1 and self.rule == "block":
            raise ValueError(
                "lenience is defined for the token rule alone; use rule='token', or leave rule out"
            )
        if self.typical is not None:
            self._check_typical()

    def _check_typical(self) -> None:
        """Refuse invalid bounds, and typical acceptance with a greedy target or another acceptance rule.

        Typical acceptance takes epsilon and delta (Medusa).
        """
        bounds = self.typical if isinstance(self.typical, tuple) else ()
        are_valid = all(isinstance(bound, float | int) and 0 < bound <= 1 for bound in bounds)
        if len(bounds) != 2 or not are_valid:
            raise ValueError(
                f"Sampling.typical is {self.typical!r}, expected None (lossless), or epsilon and delta, each above 0, "
                f"at most 1: as {PUBLISHED_TYPICAL}"
            )
        if self.temperature == 0:
            raise ValueError(
                "typical acceptance needs a temperature above 0: at 0 a single token is possible"
            )
        if self.rule == "block" or self.lenience < 1:
            raise ValueError(
                "typical acceptance is a rule of its own: leave out Sampling.rule='block' and lenience"
            )

    @property
    def is_lossless(self) -> bool:
        """Whether drafting keeps the target's distribution: neither lenience nor typical acceptance changes it."""
        return self.lenience == 1 and self.typical is None

    @classmethod
    def from_processors(cls, processors: Iterable[Any], **fields: Any) -> Sampling:
        """Return the sampling that equals a list of transformers' logits processors.

        Args:
            processors: Each at most once, in transformers' order.
            fields: Other fields of the sampling, such as the seed. The temperature is 1 if no processor sets it.

        Raises:
            ValueError: For processors or options that `Sampling` does not support.
        """
        if isinstance(processors, (str, bytes)) or not isinstance(processors, Iterable):
            raise ValueError(
                f"processors is {processors!r}, expected a list of transformers' logits processors"
            )
        processors = list(processors)
        # class of the processor -> field of a sampling, and the processor's attribute that holds its value
        supported = {
            "RepetitionPenaltyLogitsProcessor": ("repetition_penalty", "penalty"),
            "TemperatureLogitsWarper": ("temperature", "temperature"),
            "TopKLogitsWarper": ("top_k", "top_k"),
            "TopPLogitsWarper": ("top_p", "top_p"),
            "MinPLogitsWarper": ("min_p", "min_p"),
        }
        # another order or another processor would give other logits, so nothing is guessed
        order = list(supported)
        names = [type(processor).__name__ for processor in processors]
        unknown = [name for name in names if name not in supported]
        if unknown:
            raise ValueError(
                f"logits processors {unknown} cannot be verified; supported are {order}: remove them"
            )
        if names != sorted(set(names), key=order.index):
            raise ValueError(
                f"logits processors come in the order {names}, expected each at most once, as in {order}"
            )
        for name, processor in zip(names, processors, strict=True):
            _refuse_options(name, processor)
            field, attribute = supported[name]
            fields[field] = getattr(processor, attribute)
        return cls(**{"temperature": 1.0, **fields})


def _refuse_options(name: str, processor: Any) -> None:
    """Refuse a supported logits processor that has an option, beside its main one, that `warp` does not follow.

    Drafted tokens could not be verified under such an option.

    Args:
        name: The processor's class.
        processor: The processor, whose attributes are its options.
    """
    # option -> the only value that is followed; a processor without this option passes
    defaults = {
        "min_tokens_to_keep": 1,
        "filter_value": -math.inf,
        "prompt_ignore_length": None,
    }
    if name == "TopKLogitsWarper":
        # the processor has raised its top_k to at least this number already
        del defaults["min_tokens_to_keep"]
    for option, default in defaults.items():
        value = getattr(processor, option, default)
        if value != default:
            raise ValueError(
                f"{name}.{option} is {value!r}, which cannot be verified: expected {default!r}"
            )


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits after temperature, top-k, top-p and min-p, whose softmax the target samples from; -inf if removed.

    Args:
        logits: [N, V], of V tokens after each of N nodes of a tree; a repetition penalty is applied already.
        sampling: With a temperature above 0.
    """
    # each filter takes its probabilities over the tokens that the one before it has left, as in transformers
    scores = logits / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        threshold = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < threshold, -math.inf)
    if sampling.top_p < 1:
        ascending, order = scores.sort()
        is_outside = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        is_outside[:, -1] = False  # the likeliest token stays
        scores = scores.masked_fill(is_outside.scatter(1, order, is_outside), -math.inf)
    if sampling.min_p > 0:
        probs = scores.softmax(-1)
        threshold = sampling.min_p * probs.amax(-1, keepdim=True)
        scores = scores.masked_fill(probs < threshold, -math.inf)
    return scores


def rank_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the tokens of the highest logits, highest first; of equal logits the lowest token id first.

    The order of equal logits is fixed, so that drafts are the same on all devices.

    Args:
        logits: [K, V], of V tokens at K places.
        count: How many tokens to return for each; at most V are.

    Returns:
        [K, count] token ids.
    """
    size = min(count, logits.shape[-1])
    # one more than needed: it tells whether equals of the last one are left out
    values, tokens = logits.topk(min(size + 1, logits.shape[-1]))
    tokens = tokens[:, :size]
    # `topk` takes any of equals, and bf16 logits are often equal: look again where the next logit equals the last
    if must_wait(logits.device):
        # in all rows, as the host would wait to see in which
        tokens = _take_lowest(logits, values[:, :size], tokens)
    else:
        rows = (values[:, -1] == values[:, size - 1]).nonzero()[:, 0]
        tokens[rows] = _take_lowest(logits[rows], values[rows, :size], tokens[rows])
    # in the order of logits, and equals in the order of ids
    tokens = tokens.sort(dim=-1).values
    order = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True).indices
    return tokens.gather(-1, order)


def _take_lowest(logits: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """Return the C best tokens at K places, [K, C]; of the tokens whose logit equals the last of them, the lowest ids.

    torch's `topk` returns any of several equal values; this replaces them by those with the lowest ids.

    Args:
        logits: [K, V], of V tokens.
        values: [K, C], the C highest logits, highest first, as torch's `topk` returns them.
        tokens: [K, C], the tokens of these logits, with any of the equal ones.
    """
    vocab_size = logits.shape[-1]
    last = values[:, -1:]
    # nan equals nothing, itself included
    is_equal = (logits == last) | last.isnan()
    ids = torch.arange(vocab_size, device=logits.device)
    lowest = torch.where(is_equal, ids, vocab_size).topk(values.shape[-1], largest=False).values
    # the tokens above the last one come first, then as many equals as there is space for
    num_above = (values > last).sum(-1, keepdim=True)
    ranks = torch.arange(values.shape[-1], device=logits.device)
    equals = lowest.gather(-1, (ranks - num_above).clamp(min=0))
    return torch.where(ranks < num_above, tokens, equals)


def in_fp32(logits: Tensor) -> Tensor:
    """Return logits in fp32, in which probabilities are computed; fp64 stays, as bf16 is too coarse."""
    return logits if logits.dtype == torch.float64 else logits.float()


def penalise(logits: Tensor, context: Sequence[int], penalty: float) -> Tensor:
    """Return the logits of one next token, with transformers' repetition penalty on all tokens that occur before it.

    Args:
        logits: [V], of the V tokens of the vocabulary.
        context: All tokens of the sequence before the one that is chosen.
        penalty: The factor, above 0; 1 changes nothing.
    """
    repeated = upload(torch.tensor(sorted(set(context))), logits.device)
    return logits.index_copy(0, repeated, _lower(logits[repeated], penalty))


def penalise_nodes(
    logits: Tensor, context: Sequence[int], tokens: Tensor, tree_mask: Tensor, penalty: float
) -> Tensor:
    """Return logits [N, V] with a repetition penalty on the tokens of `context` and of each node's path.

    This is `penalise` for all nodes at once, without a transfer to the host.

    Args:
        logits: [N, V], of the V tokens of the vocabulary, after each of the N nodes of a tree.
        context: All tokens of the sequence before the root.
        tokens: [N], of the nodes, on the device of the logits.
        tree_mask: [N, N] bool, row i marks node i and its ancestors.
        penalty: transformers' repetition penalty.
    """
    # [N, N]: row i holds the tokens on node i's path; nodes off the path are replaced by the root, which is on every
    # path. The clamp is for nodes that were left out of the tree, whose token is no index.
    path_tokens = torch.where(tree_mask, tokens, tokens[:1]).clamp(0, logits.shape[-1] - 1)
    is_repeated = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    is_repeated.scatter_(1, path_tokens, 1)
    if context:
        is_repeated[:, upload(torch.tensor(sorted(set(context))), logits.device)] = True
    return torch.where(is_repeated, _lower(logits, penalty), logits)


def _lower(logits: Tensor, penalty: float) -> Tensor:
    """Return logits after the repetition penalty (CTRL, Keskar et al. 2019); above 1 it makes tokens less likely."""
    # dividing a negative logit would raise it, so it is multiplied
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def to_int(value: Any) -> int | None:
    """Return the value as an int (numpy's included); None if it is not a whole number."""
    # True and False would pass as 1 and 0
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


def whole(name: str, value: Any) -> int:
    """Return an option's value as an int (numpy's included); ValueError with its `name` if it is no whole number."""
    number = to_int(value)
    if number is None:
        raise ValueError(f"{name} is {value!r}, expected a whole number")
    return number


def number(name: str, value: Any) -> float:
    """Return an option's value as a float; ValueError with its `name` if it is no finite number, or a bool."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.60}, expected a finite number")
    return float(value)


def refuse_fields(config: Any) -> None:
    """Refuse a generation config with fields that `model.generate` follows and verification of drafts cannot.

    Args:
        config: The model's generation config of transformers.
    """
    # the fields come from a default config, so that those that a newer transformers adds are refused until they are
    # sorted into one of the sets above
    fields = vars(type(config)()).keys() - WARPED - PROCESSED - WITHOUT_EFFECT
    # caches of these kinds do not change the logits
    exact_caches = (
        "static",
        "dynamic",
        "hybrid",
        "offloaded",
        "offloaded_static",
        "sliding_window",
    )
    for name in sorted(fields):
        value = getattr(config, name)
        # the field is off
        if value is None or value is False or value == OFF.get(name):
            continue
        if name == "cache_implementation" and value in exact_caches:
            continue
        instead = ", or pass a Sampling of your own"
        if name == "stop_strings":
            instead = ": pass them to generate as stop=[...]"
        raise ValueError(
            f"the model's generation_config.{name} is {value!r}, which drafted tokens cannot be verified under, so "
            f"the answer would not be model.generate's: set it to None{instead}"
        )
