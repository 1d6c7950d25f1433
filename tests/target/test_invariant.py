"""Half precision whose bits do not depend on what is read together: the attention, whole models, and their answers.

Tests of bits hold on any machine: a reader that cannot keep them must say so, and then nothing is asked of it.
"""

# B sequences, N new tokens, S keys, H heads, K key/value heads, D head width

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.conformance.trial import make_head
from eagle.target.bits import invariant
from eagle.target.bits.invariant import FixedRowsLinear, in_fixed_rows, invariant_attention
from eagle.target.bits.variance import find_variance
from tests.batches import Request
from tests.families import FAMILIES, OTHER_MEANS, RandomTrees, build, random_tokens
from tests.target.test_half_precision import Forgiving

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# whose mixers read a prompt in other chunks when it is read on, or by levels
SAID = {"qwen3_next", "mamba", "jamba"}
COUNT = 14
PROMPTS = [random_tokens(count, seed=count) for count in (30, 5, 61)]
FAST = [
    "llama",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "falcon",
]  # grouped, windows and caps, sinks and experts, MLA, sdpa


def families(*names: str, seldom: bool = False) -> list[Any]:
    """These families, of which all but a few are slow; of what is done `seldom` two of three are long, too."""
    cases = []
    for i, name in enumerate(names):
        marks = [] if name in FAST else [pytest.mark.slow]
        if seldom and name not in FAST and i % 3:
            marks.append(pytest.mark.long)
        cases.append(pytest.param(name, marks=marks))
    return cases


def attend_naively(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, N, H, D], one query at a time in fp64; `mask` is additive [B, H, N, S]."""
    sequences, heads, count, width = query.shape
    groups = heads // key.shape[1]
    output = torch.zeros(sequences, count, heads, value.shape[-1], dtype=torch.float64)
    for b in range(sequences):
        for h in range(heads):
            for n in range(count):
                scores = key[b, h // groups].double() @ query[b, h, n].double() * width**-0.5
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores + mask[b, h, n].double()
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1].double()])
                weights = scores.softmax(-1)[: key.shape[2]]
                output[b, n, h] = weights @ value[b, h // groups].double()
    return output


def draw(
    count: int, length: int, heads: int = 6, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [2, H, N, 8], keys [2, K, S, 8] and values [2, K, S, 5] in bf16."""
    torch.manual_seed(count * 1000 + length)
    query = torch.randn(2, heads, count, 8).bfloat16()
    key, value = (
        torch.randn(2, kv_heads, length, 8).bfloat16(),
        torch.randn(2, kv_heads, length, 5).bfloat16(),
    )
    return query, key, value


def draw_mask(count: int, length: int, heads: int = 1) -> Tensor:
    """[2, heads, N, S], an additive mask in bf16 that hides a third of the keys, never all."""
    hidden = torch.rand(2, heads, count, length) < 1 / 3
    hidden[..., 0] = False
    return (
        torch.zeros(2, heads, count, length)
        .bfloat16()
        .masked_fill_(hidden, torch.finfo(torch.bfloat16).min)
    )


@pytest.mark.parametrize("scores_held", [2**22, 40], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    "option", ["mask", "by head", "as rows", "bool", "softcap", "sinks", "causal", "step", "none"]
)
def test_attention_is_softmax_of_scores(
    option: str, scores_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a loop over queries says, with whatever masks and options layers pass."""
    monkeypatch.setattr(invariant, "MAX_SCORES", scores_held)
    count, length = {"causal": (9, 9), "step": (1, 9)}.get(option, (4, 11))
    query, key, value = draw(count, length)
    mask = draw_mask(count, length, 6 if option == "by head" else 1)
    options: dict[str, Any] = {}
    given: Tensor | None = mask
    if option == "as rows":  # the three queries of a group, one after the other
        given = mask.repeat(1, 1, 3, 1)
    elif option == "bool":
        given = mask == 0
    elif option in ("causal", "step"):
        given = torch.zeros(1, 1, 1, 1).bfloat16()
        mask = torch.full((2, 1, count, length), float("-inf")).triu_(1 + length - count)
    elif option == "none":
        given, mask = None, torch.zeros_like(mask)
    elif option == "softcap":
        options = {"softcap": 1.5}
    elif option == "sinks":
        options = {"s_aux": torch.randn(6).bfloat16()}
    got, _ = invariant_attention(nn.Identity(), query, key, value, given, **options)
    sinks = options.get("s_aux")
    expected = attend_naively(
        query, key, value, mask.expand(2, 6, -1, -1), softcap=options.get("softcap"), sinks=sinks
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.to(torch.bfloat16))


def test_attention_that_chooses_keys_by_itself_is_refused() -> None:
    """What chooses keys by an index cannot be told by a mask."""
    query, key, value = draw(2, 4)
    with pytest.raises(ValueError, match="attention got indices"):
        invariant_attention(nn.Identity(), query, key, value, None, indices=torch.zeros(1))


def test_rows_are_read_in_fixed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row as two on a CPU; elsewhere always as many, with the last ones padded."""
    numbers: list[int] = []

    def read(rows: Tensor) -> Tensor:
        numbers.append(rows.shape[:-1].numel())
        return rows * 2

    x = torch.randn(1, 1, 4)
    assert torch.equal(in_fixed_rows(read, x), x * 2)
    x = torch.randn(3, 5, 4)
    assert torch.equal(in_fixed_rows(read, x), x * 2)
    assert numbers == [2, 15]
    # a tensor on the meta device takes the way of accelerators: shapes alone
    assert in_fixed_rows(read, torch.empty(3, 50, 4, device="meta")).shape == (3, 50, 4)
    assert numbers[2:] == [64, 64, 64]


@pytest.fixture(scope="module")
def targets() -> dict[Any, Target]:
    """Targets made so far, by family and dtype."""
    return {}


def target_of(targets: dict[Any, Target], name: str, dtype: str) -> Target:
    """A family's target in half precision."""
    if (name, dtype) not in targets:
        targets[name, dtype] = Target(build(name, HALF[dtype]))
    return targets[name, dtype]


@pytest.mark.quick("llama-fp16", "gemma2-bf16")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", families(*FAMILIES))
def test_bits_do_not_depend_on_what_is_read_together(
    name: str, dtype: str, targets: dict[Any, Target]
) -> None:
    """Steps, chunks of a prompt, a tree and a batch give the same bits after 40 and after 200 tokens, or it is said."""
    target = target_of(targets, name, dtype)
    said = target.variance()
    assert target.reader.mode.invariant
    if said is None:
        assert find_variance(target, 200) is None
        assert "the same bits in steps, chunks, trees and batches" in target.describe()
    else:
        assert said in target.describe()
        # torch has kernels of AVX2 for which this was tried; others may take orders of their own
        assert torch.backends.cpu.get_cpu_capability() != "AVX2", said


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe"])
def test_bits_do_not_depend_on_long_contexts(name: str) -> None:
    """After 3,000 tokens too."""
    model = build(name, torch.bfloat16)
    model.config.max_position_embeddings = 4096
    target = Target(model)
    if target.variance() is None:
        assert find_variance(target, 3000) is None


@pytest.mark.quick("llama")
@pytest.mark.parametrize("name", families(*FAMILIES, *OTHER_MEANS, seldom=True))
def test_drafted_output_is_plain_decodings(name: str, targets: dict[Any, Target]) -> None:
    """By right and wrong trees around an answer, random ones and n-grams, alone and in ragged batches."""
    target = target_of(targets, name, "bf16")
    if target.variance() is not None:
        assert name in SAID or torch.backends.cpu.get_cpu_capability() != "AVX2", target.variance()
        return
    for temperature in (0.0, 0.7):
        sampling = [Sampling(temperature, seed=3, request=row) for row in range(len(PROMPTS))]
        options: dict[str, Any] = {"max_new_tokens": COUNT, "stop": []}
        plain = [
            generate(target, load_drafter("none", target), prompt, sampling=rule, **options).tokens
            for prompt, rule in zip(PROMPTS, sampling, strict=True)
        ]
        requests = [
            Request(prompt, {}, COUNT, row, plain[row]) for row, prompt in enumerate(PROMPTS)
        ]
        drafters: list[Any] = [Forgiving(requests), RandomTrees([*range(90)])]
        drafters += [load_drafter("ngram", target)]
        for drafter in drafters:
            for batch_size in (1, 2):
                traces = generate(
                    target, drafter, PROMPTS, sampling=sampling, batch_size=batch_size, **options
                )
                assert [trace.tokens for trace in traces] == plain, (
                    drafter,
                    temperature,
                    batch_size,
                )


@pytest.mark.parametrize("chunk", [7, 64])
def test_chunks_of_a_prompt_and_kept_prefixes_change_nothing(
    chunk: int, targets: dict[Any, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is read in chunks, or from a prefix that was kept, gets the same answer."""
    target = target_of(targets, "llama", "bf16")
    if target.variance() is not None:
        return
    none, prompt = load_drafter("none", target), random_tokens(118, seed=4)
    target.forget()
    expected = generate(target, none, prompt, max_new_tokens=COUNT, stop=[]).tokens
    monkeypatch.setattr("eagle.target.state.PREFILL_CHUNK", chunk)
    target.forget()
    assert generate(target, none, prompt, max_new_tokens=COUNT, stop=[]).tokens == expected
    generate(target, none, prompt[:50], max_new_tokens=COUNT, stop=[])  # its text is kept
    assert generate(target, none, prompt, max_new_tokens=COUNT, stop=[]).tokens == expected


def stock_attention(target: Target) -> None:
    """The fault of a kernel that sums in the order of its blocks: sdpa put back."""
    target.reader.settings["_attn_implementation_internal"] = "eagle_grouped"


def one_row(target: Target) -> None:
    """The fault of a single row that takes a kernel of its own, which sums from the other end."""

    def forward(self: FixedRowsLinear, x: Tensor) -> Tensor:
        if x.numel() != x.shape[-1]:
            return F.linear(x, self.weight, self.bias)
        half = x.shape[-1] // 2
        first = F.linear(x[..., :half], self.weight[:, :half], self.bias)
        return first + F.linear(x[..., half:], self.weight[:, half:])

    for module in target.reader.model.modules():
        if type(module) is FixedRowsLinear:
            module.forward = forward.__get__(module)


def padded_keys(target: Target) -> None:
    """The fault of keys that are padded by the batch: their number chooses the order of the sums."""
    from transformers import AttentionInterface

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        parts = max(1, key.shape[2] // 16)
        scores = invariant_attention(module, query, key, value, mask, **options)[0]
        return (scores.float() * (1 + 2**-7 * (parts % 2))).to(scores.dtype), None

    AttentionInterface.register("padded_by_batch", attend)
    target.reader.settings["_attn_implementation_internal"] = "padded_by_batch"


@pytest.mark.parametrize("fault", [stock_attention, one_row, padded_keys])
def test_planted_faults_are_seen(fault: Any) -> None:
    """Each of the three measures is needed, and its absence is noticed."""
    target = Target(copy.deepcopy(build("llama", torch.bfloat16)))
    if target.variance() is not None:
        return
    fault(target)
    assert find_variance(target, 120) is not None


def test_it_can_be_left_out_and_fp32_has_no_need_of_it() -> None:
    """`invariant=False` reads by the fast kernels, and says so where bits then change; copies keep the choice."""
    target = Target(build("llama", torch.bfloat16), invariant=False)
    target.describe()
    assert not target.reader.mode.invariant
    assert not copy.deepcopy(target).invariant
    whole = Target(build("llama"))
    assert whole.variance() is None
    assert "bits" not in whole.describe()
    assert not whole.reader.mode.invariant


@pytest.mark.slow
def test_answers_do_not_depend_on_the_budget(targets: dict[Any, Target]) -> None:
    """Chains and trees of many sizes write the same."""
    target = target_of(targets, "qwen3", "bf16")
    if target.variance() is not None:
        return
    drafter, options = load_drafter("suffix", target), {"max_new_tokens": COUNT, "stop": []}
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature, seed=8)
        plain = generate(
            target, load_drafter("none", target), PROMPTS[0], sampling=sampling, **options
        )
        generate(target, drafter, PROMPTS[0], sampling=sampling, **options)  # which it remembers
        chains = [Budget(nodes=length, top_k=1) for length in (3, 7)]
        for budget in [*chains, Budget(nodes=8), Budget(nodes=25), Budget(nodes=60)]:
            trace = generate(
                target, drafter, PROMPTS[0], sampling=sampling, budget=budget, **options
            )
            assert trace.tokens == plain.tokens, (temperature, budget)


SELDOM = [
    pytest.param(kind, marks=pytest.mark.long)
    for kind in ("hass", "dspark", "hydra", "mtp", "peagle")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "dflash", "medusa", *SELDOM])
def test_heads_write_what_plain_decoding_writes(kind: str, targets: dict[Any, Target]) -> None:
    """By chains and trees, alone and in ragged batches that requests join and leave."""
    target = target_of(targets, "llama", "bf16")
    if target.variance() is not None:
        return
    head = make_head(kind, target).bind(target.head)
    lengths = [9, 24, 14, 30]  # of answers: requests leave one after the other
    prompts = [*PROMPTS, random_tokens(44, seed=5)]
    for temperature in (0.0, 1.0):
        sampling = [Sampling(temperature, seed=3, request=row) for row in range(len(prompts))]
        plain = [
            generate(
                target,
                load_drafter("none", target),
                prompt,
                sampling=rule,
                max_new_tokens=length,
                stop=[],
            ).tokens
            for prompt, rule, length in zip(prompts, sampling, lengths, strict=True)
        ]
        for budget in (
            Budget(nodes=3, top_k=1),
            Budget(nodes=7, top_k=1),
            Budget(nodes=8),
            Budget(nodes=25),
        ):
            options: dict[str, Any] = {
                "max_new_tokens": lengths,
                "stop": [],
                "budget": budget,
                "batch_size": 2,
            }
            traces = generate(target, head, prompts, sampling=sampling, **options)
            assert [trace.tokens for trace in traces] == plain, (temperature, budget)
