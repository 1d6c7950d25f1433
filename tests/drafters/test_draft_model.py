"""A small model as a drafter: it drafts its own continuation, and learns by stock forwards' loss."""

# S supervised tokens, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, chain_paths
from eagle.device import in_dtype
from eagle.doctor import examine
from eagle.drafters.draft_model import DraftModel, DraftModelSettings, check_vocabulary
from eagle.formats.checkpoint import save_head
from tests.every_type import VOCAB, build
from tests.families import own_logits
from tests.own_answers import answer_naively, cached_steps, whole_texts

PROMPT = [5, 9, 2, 7, 7, 1]
CHAIN = chain_paths(4)
MODES: dict[str, tuple[Sampling, Any]] = {
    "greedy": (Sampling(), "noise"),
    "shared noise": (Sampling(1.0, seed=2), "noise"),
    "sampled": (Sampling(1.0, seed=2), "sampled"),
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 20,
}


def model_of(
    layers: int,
    seed: int,
    vocab_size: int = 48,
    **settings: Any,
) -> Any:
    """Return a small random model, surer of its tokens than random ones are."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model.eval()


def similar_to(model: Any, noise: float) -> Any:
    """Return a copy with noise in its weights, which often says what the model says."""
    model = copy.deepcopy(model)
    torch.manual_seed(7)
    for weight in model.parameters():
        weight.data += noise * weight.data.std() * torch.randn_like(weight)
    return model


def drafter_of(model: Any, target: Target) -> DraftModel:
    """Return the model as a drafter of the target."""
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


def plain_answer(target: Target, **options: Any) -> list[int]:
    """Return the target's answer without a drafter."""
    trace = generate(
        target,
        load_drafter("none", target),
        PROMPT,
        stop=[],
        **options,
    )
    return trace.tokens


@pytest.fixture(scope="module")
def target() -> Target:
    """Return a target of 48 tokens."""
    return Target(model_of(3, 0))


@pytest.fixture(scope="module")
def small() -> Any:
    """Return a model that often says what the target says."""
    return similar_to(model_of(3, 0), 0.15)


# -- drafts -------------------------------------------------------------------------------------


class Watched(Drafter):
    """A drafter each of whose trees is checked, with the sequence before its root."""

    def __init__(
        self,
        drafter: Drafter,
        check: Callable[[list[int], Committed, DraftTree], None],
    ) -> None:
        self.drafter = drafter
        self.check = check

    def begin(self, noise: Noise | None = None) -> Any:
        """Begin a sequence of the drafter's."""
        self.text = self.drafter.begin(noise)
        self.tokens: list[int] = []
        return self

    def propose(
        self,
        update: Committed,
        budget: Budget,
    ) -> DraftTree:
        """Return the drafter's tree, once it is checked."""
        tree = self.text.propose(update, budget)
        self.tokens.extend(update.tokens.tolist())
        self.check(self.tokens, update, tree)
        return tree


@pytest.mark.parametrize("mode", MODES)
def test_the_target_drafts_for_itself(mode: str, target: Target) -> None:
    """All drafts of a copy of the target are accepted."""
    sampling, draw = MODES[mode]
    trace = generate(
        target,
        drafter_of(model_of(3, 0), target),
        PROMPT,
        sampling=sampling,
        budget=Budget.fixed(CHAIN, draw),
        max_new_tokens=41,
        stop=[],
    )
    # the prompt gives the first token, each cycle four drafts and one more
    assert [cycle.committed for cycle in trace.cycles] == [5] * 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "jamba", "rwkv"])
def test_chains_are_the_models_own_continuation(name: str) -> None:
    """Whatever was accepted of the draft before, by attention and by recurrent states."""
    target = Target(model_of(3, 0, VOCAB))
    model = similar_to(target.model, 0.15) if name == "llama" else build(name)
    drafter = drafter_of(model, target)
    # some models' steps differ from a forward over the whole sequence: then those are the truth
    reader = drafter.as_target[0].reader
    reader.check()
    steps = cached_steps if reader.follows_steps else whole_texts
    accepted = set()
    drafted = 0

    def check(
        tokens: list[int],
        update: Committed,
        tree: DraftTree,
    ) -> None:
        nonlocal drafted
        accepted.add(len(update.tokens) - 1)
        drafted += len(tree) - 1
        so_far = [*tokens, update.root]
        expected = answer_naively(
            steps(model),
            so_far,
            len(tree) - 1,
            Sampling(),
        )
        assert tree.tokens[1:].tolist() == expected

    watched = Watched(drafter, check)
    budget = Budget.fixed(chain_paths(3))
    trace = generate(
        target,
        watched,
        PROMPT,
        budget=budget,
        max_new_tokens=16,
        stop=[],
    )
    assert trace.tokens == plain_answer(target, max_new_tokens=16)
    assert drafted > 12
    # a similar model has some drafts accepted, and some refused
    assert name != "llama" or {0, 3} <= accepted


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [Budget(12, 4, 3), Budget.fixed(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))]
)
def test_trees_hold_what_the_model_says_on_each_path(budget: Budget) -> None:
    """Every node is among its parent's likeliest tokens, by an uncached forward over its path."""
    # of six tokens the same one often stands in several branches
    model = similar_to(model_of(3, 0, 6), 0.3)
    target = Target(model_of(3, 0, 6))

    def check(
        tokens: list[int],
        update: Committed,
        tree: DraftTree,
    ) -> None:
        for node, children in enumerate(tree.children()):
            path = tree.tokens[tree.path(node)].tolist()
            drafted = tree.tokens[children].tolist()
            order = own_logits(model, [*tokens, *path])[-1].argsort(descending=True)
            best = order[: len(drafted)].tolist()
            # children of a dynamic tree come in the order of their paths
            if budget.paths is None:
                drafted.sort()
                best.sort()
            assert drafted == best

    watched = Watched(drafter_of(model, target), check)
    for prompt in ([1, 2, 3], [5], [4, 4, 0, 2]):
        generate(
            target,
            watched,
            prompt,
            budget=budget,
            max_new_tokens=30,
            stop=[],
        )


@pytest.mark.parametrize(("mode", "vocab_size"), [("sampled", 40), ("shared noise", 56)])
def test_vocabularies_may_differ_in_unused_rows(
    mode: str,
    vocab_size: int,
    target: Target,
) -> None:
    """A model with fewer or more rows than the target drafts only tokens that both have."""
    sampling, draw = MODES[mode]
    trace = generate(
        target,
        drafter_of(model_of(2, 4, vocab_size), target),
        PROMPT,
        sampling=sampling,
        budget=Budget.fixed(((0,), (1,), (0, 0)), draw),
        max_new_tokens=24,
        stop=[],
    )
    assert all(int(cycle.tree.tokens.max()) < 48 for cycle in trace.cycles)
    # sampled drafts keep the target's law, not its tokens
    if draw == "noise":
        assert trace.tokens == plain_answer(target, sampling=sampling, max_new_tokens=24)


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        (16, {"max_position_embeddings": 16}),
        (20, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20}),
    ],
    ids=["positions", "longrope"],
)
def test_nothing_is_drafted_across_the_models_limit(
    limit: int,
    settings: dict[str, Any],
    target: Target,
) -> None:
    """Where its positions end or its frequencies change, the target goes on alone."""
    drafter = drafter_of(model_of(3, 0, **settings), target)
    budget = Budget.fixed(CHAIN)
    trace = generate(
        target,
        drafter,
        PROMPT,
        budget=budget,
        max_new_tokens=30,
        stop=[],
    )
    ends = [cycle.context + cycle.nodes for cycle in trace.cycles if cycle.nodes]
    assert ends
    assert max(ends) <= limit
    assert trace.tokens == plain_answer(target, max_new_tokens=30)
    # a prompt beyond the border is read with the other frequencies from its start
    if "rope_parameters" in settings:
        beyond = generate(
            target,
            drafter,
            PROMPT * 4,
            budget=budget,
            max_new_tokens=30,
            stop=[],
        )
        assert all(cycle.nodes for cycle in beyond.cycles[:5])


# -- which models are drafters ------------------------------------------------------------------


def tokenizer_of(words: dict[str, int]) -> Any:
    """Return a tokenizer of whole words."""
    model = models.WordLevel(words, unk_token="a")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


def test_another_vocabulary_is_refused() -> None:
    """By its words, or by its size where a tokenizer is missing."""
    tokenizer = tokenizer_of(
        {
            "a": 0,
            "b": 1,
            "c": 2,
        }
    )
    other = tokenizer_of(
        {
            "a": 0,
            "b": 2,
            "d": 1,
        }
    )
    with pytest.raises(ValueError, match=r"3 tokens differ \('b' is 1 here and 2 there"):
        check_vocabulary(tokenizer, other, 3, 3)
    check_vocabulary(tokenizer, tokenizer, 3, 8)
    with pytest.raises(ValueError, match="has 3 tokens, the target 8"):
        check_vocabulary(None, tokenizer, 3, 8)


@pytest.mark.slow
def test_a_folder_of_a_language_model_is_a_drafter(
    target: Target,
    small: Any,
    tmp_path: Path,
) -> None:
    """Alone and after another drafter; training goes on from it too."""
    small.save_pretrained(tmp_path)
    expected = plain_answer(target, max_new_tokens=20)
    names: list[Any] = [tmp_path, ["suffix", tmp_path]]
    for name in names:
        drafter = load_drafter(name, target)
        assert (
            generate(
                target,
                drafter,
                PROMPT,
                max_new_tokens=20,
                stop=[],
            ).tokens
            == expected
        )
    settings = DraftModelSettings(model=str(tmp_path))
    head = DraftModel.for_target(settings, target.config, target.head)
    weights = small.state_dict()
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in head.model.state_dict().items()
    )


def test_models_that_cannot_draft_are_refused(target: Target, tmp_path: Path) -> None:
    """Another vocabulary, and a model that cannot read trees."""
    no_trees = AutoConfig.for_model(
        "openai-gpt",
        vocab_size=48,
        n_embd=32,
        n_layer=2,
        n_head=4,
    )
    for model, words in (
        (model_of(1, 0, 50), "50 tokens, the target 48"),
        (AutoModelForCausalLM.from_config(no_trees), "openai-gpt cannot read a tree"),
    ):
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=words):
            load_drafter(tmp_path, target)


def test_a_model_with_another_vocabulary_is_not_distilled(target: Target, tmp_path: Path) -> None:
    """Its tokens would mean other words than the target's."""
    model_of(1, 0, 50).save_pretrained(tmp_path)
    settings = DraftModelSettings(model=str(tmp_path))
    with pytest.raises(ValueError, match="50 tokens, the target 48"):
        DraftModel.for_target(settings, copy.copy(target.config), target.head)


def test_models_that_cannot_be_trained_are_refused(target: Target, tmp_path: Path) -> None:
    """Logits must be a product of states with a matrix, and a width must fit the heads."""
    for name in ("bert", "gemma2"):
        build(name).save_pretrained(tmp_path / name)
        settings = DraftModelSettings(model=str(tmp_path / name))
        with pytest.raises(ValueError, match=f"a {name} cannot be distilled here"):
            DraftModel.for_target(
                settings,
                copy.copy(target.config),
                target.head,
            )
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        DraftModel.for_target(DraftModelSettings(hidden_size=20), target.config)
    fresh = DraftModel.for_target(DraftModelSettings(layers=3, hidden_size=16), target.config)
    assert fresh.model.config.num_hidden_layers == 3


def test_the_doctor_examines_heads_alone(small: Any, tmp_path: Path) -> None:
    """A draft model is not called broken for being none."""
    save_head(
        tmp_path,
        DraftModel(DraftModelSettings(), small.config, small),
        "",
        {},
    )
    with pytest.raises(ValueError, match="is a draft_model, expected a head"):
        examine(tmp_path, "any target")


# -- training -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact() -> Target:
    """Return the target in fp64, so that little depends on a processor's rounding."""
    return Target(model_of(3, 0).double())


@pytest.fixture(scope="module")
def batch(exact: Target) -> Batch:
    """Return two sequences, supervised from their fifth token on."""
    torch.manual_seed(3)
    texts = [torch.randint(48, (length,)) for length in (11, 7)]
    features = [exact.features(text[None], (-1,))[0] for text in texts]
    masks = [torch.arange(len(text)) >= 4 for text in texts]
    return Batch(
        torch.cat(texts),
        torch.cat(masks),
        torch.cat(features),
        lengths=(11, 7),
        taps=(-1,),
        seeds=(0, 1),
    )


def supervised_logits(model: Any, batch: Batch) -> Tensor:
    """Return [S, V], the logits before each supervised token, by stock forwards."""
    found = []
    masks = batch.loss_mask.split(batch.lengths)
    for tokens, mask in zip(batch.tokens.split(batch.lengths), masks, strict=True):
        # a model with fewer rows reads its last one instead
        known = tokens.clamp(max=model.config.vocab_size - 1)
        found.append(model(input_ids=known[None]).logits[0, :-1][mask[1:]])
    return torch.cat(found)


def naive_loss(
    model: Any,
    target: Target,
    batch: Batch,
    divergence: str,
) -> Tensor:
    """Return the mean loss of the supervised tokens, by torch's own functions."""
    log_q = supervised_logits(model, batch).log_softmax(-1)
    with torch.no_grad():
        # the target's probs of the tokens that the model has
        log_p = supervised_logits(target.model, batch)[:, : log_q.shape[1]].log_softmax(-1)
    p = log_p.exp()
    q = log_q.exp()
    log_mean = ((p + q) / 2).log()
    if divergence == "tokens":
        return torch.nn.functional.nll_loss(log_q, batch.tokens[batch.loss_mask])
    terms = {
        # less the target's entropy, which no weight can change
        "forward_kl": -(p * log_q),
        "reverse_kl": q * (log_q - log_p),
        "jsd": (p * (log_p - log_mean) + q * (log_q - log_mean)) / 2,
        "tv": (q - p).abs() / 2,
    }
    return terms[divergence].sum(-1).mean()


@pytest.mark.parametrize(
    ("divergence", "vocab_size"),
    [
        ("tokens", 48),
        ("forward_kl", 48),
        ("forward_kl", 40),
        ("reverse_kl", 48),
        ("jsd", 48),
        ("tv", 48),
    ],
)
def test_loss_and_gradients_are_those_of_stock_forwards(
    divergence: Any,
    vocab_size: int,
    exact: Target,
    batch: Batch,
) -> None:
    """For every divergence; a model with fewer rows learns the probs of the tokens it has."""
    model = model_of(2, 5, vocab_size).double()
    head = DraftModel(
        DraftModelSettings(divergence=divergence),
        model.config,
        model,
    ).train()
    weights = list(head.parameters())
    loss = head(batch, exact.head)["total"]
    expected = naive_loss(model, exact, batch, divergence)
    torch.testing.assert_close(
        loss,
        expected,
        rtol=1e-7,
        atol=1e-9,
    )
    gradients = torch.autograd.grad(loss, weights)
    for got, naive in zip(
        gradients,
        torch.autograd.grad(expected, weights),
        strict=True,
    ):
        # norms round to fp32 whatever they are given
        scale = float(naive.abs().max())
        torch.testing.assert_close(
            got,
            naive,
            rtol=0,
            atol=1e-6 * scale,
        )


def test_validation_measures_the_overlap_of_probs(
    exact: Target,
    batch: Batch,
    small: Any,
) -> None:
    """The mean over supervised tokens of the smaller probs, by stock forwards."""
    model = copy.deepcopy(small).double()
    head = DraftModel(DraftModelSettings(), model.config, model)
    sums = head.validate(batch, exact.head, {"chain": chain_paths(3)})
    with torch.no_grad():
        q = supervised_logits(model, batch).softmax(-1)
        p = supervised_logits(exact.model, batch).softmax(-1)
    overlaps = torch.minimum(p, q).sum(-1)
    assert float(sums["slots"]) == len(overlaps)
    assert float(sums["overlap"] / sums["slots"]) == pytest.approx(float(overlaps.mean()), abs=1e-7)


def test_rotary_frequencies_stay_precise(tmp_path: Path) -> None:
    """A target in bf16 says what the stock model says in bf16, far from the start too."""
    model_of(2, 0, initializer_range=0.2).save_pretrained(tmp_path)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = Target.load(tmp_path, dtype="bfloat16", device="cpu")
    tokens = torch.randint(48, (1, 900))
    logits = loaded.model(tokens).logits
    assert torch.equal(logits, stock(tokens).logits)
    # `to` rounds the frequencies too, which are buffers
    assert not torch.equal(logits, stock.to(torch.bfloat16)(tokens).logits)
    dtypes = {weight.dtype for weight in in_dtype(model_of(1, 0), torch.float64).parameters()}
    assert dtypes == {torch.float64}
