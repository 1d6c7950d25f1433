"""Half precision whose bits do not depend on what is read together: the attention, whole models, and their answers.

Tests of bits hold on any machine: a reader that cannot keep them must say so, and then nothing is asked of it.
"""

# B sequences, N new tokens, S keys, H heads, K key/value heads, D head width

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from eagle import Sampling, Target, load_drafter
from eagle.target.bits import invariant
from eagle.target.bits.invariant import in_fixed_rows, invariant_attention, sums_rows_alike
from eagle.target.bits.variance import find_variance
from tests.batches import Request
from tests.families import FAMILIES, OTHER_MEANS, RandomTrees, build, random_tokens
from tests.target.bits.test_half_precision import Forgiving
from tests.target.decoded import decode, decode_batch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# their mixers compute a prompt in other chunks when it is continued, or level by level
ADMITS_VARIANCE = {"qwen3_next", "mamba", "jamba"}
COUNT = 14
PROMPTS = [random_tokens(count, seed=count) for count in (30, 5, 61)]


def attend_naively(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Return [B, N, H, D], one query at a time in fp64; `mask` is additive [B, H, N, S]."""
    sequences, heads, count, width = query.shape
    groups = heads // key.shape[1]
    softcap = options.get("softcap")
    output = torch.zeros(
        sequences,
        count,
        heads,
        value.shape[-1],
        dtype=torch.float64,
    )

    for b in range(sequences):
        for h in range(heads):
            keys = key[b, h // groups].double()
            for n in range(count):
                scores = keys @ query[b, h, n].double() * width**-0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + mask[b, h, n].double()
                # a sink is one more score, of a key without a value
                if "s_aux" in options:
                    sink = options["s_aux"][h : h + 1].double()
                    scores = torch.cat([scores, sink])
                probs = scores.softmax(-1)[: len(keys)]
                output[b, n, h] = probs @ value[b, h // groups].double()

    return output


def draw_qkv(count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [2, 6, N, 8], keys [2, 2, S, 8] and values [2, 2, S, 5] in bf16."""
    torch.manual_seed(count * 1000 + length)
    query = torch.randn(2, 6, count, 8).bfloat16()
    key = torch.randn(2, 2, length, 8).bfloat16()
    value = torch.randn(2, 2, length, 5).bfloat16()
    return query, key, value


def draw_mask(count: int, length: int, heads: int = 1) -> Tensor:
    """Return [2, heads, N, S], an additive mask in bf16 that hides a third of the keys, never all."""
    hidden = torch.rand(2, heads, count, length) < 1 / 3
    hidden[..., 0] = False
    mask = torch.zeros(2, heads, count, length).bfloat16()
    return mask.masked_fill_(hidden, torch.finfo(torch.bfloat16).min)


OPTIONS = ["mask", "by head", "as rows", "bool", "softcap", "sinks", "causal", "step", "none"]


@pytest.mark.parametrize("max_scores", [2**22, 40], ids=["at once", "in pieces"])
@pytest.mark.parametrize("option", OPTIONS)
def test_attention_is_softmax_of_scores(
    option: str,
    max_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is what a loop over queries computes, with whatever masks and options layers pass."""
    monkeypatch.setattr(invariant, "MAX_SCORES", max_scores)
    count, length = {"causal": (9, 9), "step": (1, 9)}.get(option, (4, 11))
    query, key, value = draw_qkv(count, length)
    mask = draw_mask(count, length, heads=6 if option == "by head" else 1)

    # `passed` is the mask as a layer gives it, `mask` what it means
    options: dict[str, Any] = {}
    passed: Tensor | None = mask
    if option == "as rows":  # the three queries of a group, one after the other
        passed = mask.repeat(1, 1, 3, 1)
    elif option == "bool":
        passed = mask == 0
    elif option in ("causal", "step"):
        passed = torch.zeros(1, 1, 1, 1).bfloat16()
        mask = torch.full((2, 1, count, length), float("-inf")).triu_(1 + length - count)
    elif option == "none":
        passed = None
        mask = torch.zeros_like(mask)
    elif option == "softcap":
        options = {"softcap": 1.5}
    elif option == "sinks":
        options = {"s_aux": torch.randn(6).bfloat16()}

    got, _ = invariant_attention(
        nn.Identity(),
        query,
        key,
        value,
        attention_mask=passed,
        **options,
    )
    expected = attend_naively(
        query,
        key,
        value,
        mask.expand(2, 6, -1, -1),
        options,
    )

    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.to(torch.bfloat16))


def test_attention_that_chooses_keys_by_itself_is_refused() -> None:
    """What chooses keys by an index cannot be told by a mask."""
    query, key, value = draw_qkv(2, 4)
    with pytest.raises(ValueError, match="attention got indices"):
        invariant_attention(
            nn.Identity(), query, key, value, attention_mask=None, indices=torch.zeros(1)
        )


def test_rows_are_read_in_fixed_numbers() -> None:
    """One row is computed as two on a CPU; elsewhere the number is always the same, with the last ones padded."""
    numbers: list[int] = []

    def double(rows: Tensor) -> Tensor:
        numbers.append(rows.shape[:-1].numel())
        return rows * 2

    for shape in ((1, 1, 4), (3, 5, 4)):
        x = torch.randn(shape)
        assert torch.equal(in_fixed_rows(double, x), x * 2)

    assert numbers == [2, 15]

    # a tensor on the meta device goes the way of accelerators: shapes alone
    assert in_fixed_rows(double, torch.empty(3, 50, 4, device="meta")).shape == (3, 50, 4)
    assert numbers[2:] == [64, 64, 64]


@cache
def target_of(name: str, dtype: str = "bf16") -> Target:
    """Return a family's target in half precision."""
    return Target(build(name, HALF[dtype]))


def promises_bits(name: str) -> bool:
    """Tell whether a family's target promises its bits here; where it must, it does."""
    said = target_of(name).variance()
    # torch has kernels of AVX2 for which this was tried; others may have orders of their own
    assert (
        said is None or name in ADMITS_VARIANCE or torch.backends.cpu.get_cpu_capability() != "AVX2"
    ), said

    return said is None


@pytest.mark.quick("llama-fp16", "gemma2-bf16")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_what_is_read_together(name: str, dtype: str) -> None:
    """Steps, chunks of a prompt, a tree and a batch give the same bits after 40 and after 200 tokens."""
    target = target_of(name, dtype)
    said = target.variance()
    assert target.reader.mode.invariant
    if said is None:
        assert find_variance(target, 200) is None
        assert "the same bits in steps, chunks, trees and batches" in target.describe()
    else:
        assert said in target.describe()
        # torch's own loops keep bits; oneDNN's kernels for this dtype may have orders of their own
        assert not sums_rows_alike(HALF[dtype]), said


@pytest.mark.quick("llama")
# grouped queries, windows with soft caps, sinks with experts, MLA, torch's own attention, and ALiBi
@pytest.mark.not_long(
    "llama",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "falcon",
    "qwen3_next",
    "bloom",
)
@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_MEANS])
def test_drafted_output_is_plain_decodings(name: str) -> None:
    """Right and wrong trees around an answer, random ones and n-grams, alone and in ragged batches."""
    if not promises_bits(name):
        return
    target = target_of(name)
    none = load_drafter("none", target)

    for temperature in (0.0, 0.7):
        sampling = [Sampling(temperature, seed=3, request=row) for row in range(len(PROMPTS))]
        plain = []
        requests = []
        for row, prompt in enumerate(PROMPTS):
            answer = decode(target, none, prompt, COUNT, sampling=sampling[row])
            plain.append(answer)
            requests.append(Request(prompt, {}, COUNT, row, answer))
        ngram = load_drafter("ngram", target)
        # no drafter is bound to what plain decoding wrote: each may part from it
        for drafter in (Forgiving(requests), RandomTrees([*range(90)]), ngram):
            for size in (1, 2):
                options: dict[str, Any] = {"sampling": sampling, "batch_size": size}
                assert decode_batch(target, drafter, PROMPTS, COUNT, **options) == plain


def test_chunks_of_a_prompt_and_kept_prefixes_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that is read in chunks, or from a prefix that was kept, gets the same answer."""
    if not promises_bits("llama"):
        return
    target = target_of("llama")
    none = load_drafter("none", target)
    prompt = random_tokens(118, seed=4)
    target.forget()
    expected = decode(target, none, prompt, COUNT)
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", 7)
    target.forget()

    assert decode(target, none, prompt, COUNT) == expected

    # the next call reads on where this one's prompt ends
    decode(target, none, prompt[:50], COUNT)

    assert decode(target, none, prompt, COUNT) == expected


def put_stock_attention(target: Target) -> None:
    """Put back the kernel that sums in the order of its blocks."""
    target.reader.settings["_attn_implementation_internal"] = "eagle_grouped"


def pad_keys_by_batch(target: Target) -> None:
    """Let the number of keys, which the batch pads, choose the order of the sums."""

    def attend(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        parts = max(1, key.shape[2] // 16)
        scores = invariant_attention(module, query, key, *rest, **options)[0]
        return (scores.float() * (1 + 2**-7 * (parts % 2))).to(scores.dtype), None

    AttentionInterface.register("padded_by_batch", attend)
    target.reader.settings["_attn_implementation_internal"] = "padded_by_batch"


# what changes within a sequence, and what changes with the batch
@pytest.mark.parametrize("fault", [put_stock_attention, pad_keys_by_batch])
def test_planted_faults_are_seen(fault: Any) -> None:
    """A measure that is missing is noticed."""
    target = Target(build("llama", torch.bfloat16))
    if target.variance() is not None:
        return
    fault(target)
    assert find_variance(target, 120) is not None


def test_it_can_be_left_out_and_fp32_has_no_need_of_it() -> None:
    """`invariant=False` reads by the fast kernels, and copies keep the choice."""
    fast = Target(build("llama", torch.bfloat16), invariant=False)
    fast.describe()

    assert not fast.reader.mode.invariant
    assert not copy.deepcopy(fast).invariant

    whole = Target(build("llama"))

    assert whole.variance() is None
    assert "bits" not in whole.describe()
    assert not whole.reader.mode.invariant


def test_what_the_trial_finds_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its words, unless the kernels tell it beforehand."""
    monkeypatch.setattr("eagle.target.target.find_variance", lambda target: "its steps differ")
    assert Target(build("llama", torch.bfloat16)).variance()
