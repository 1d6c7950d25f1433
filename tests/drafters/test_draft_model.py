"""A small model as a drafter: what it drafts is its own continuation, whatever was confirmed of the drafts before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
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

slow = pytest.mark.slow
PROMPT = [5, 9, 2, 7, 7, 1]
MODES = {
    "greedy": (Sampling(), "noise"),
    "shared noise": (Sampling(1.0, seed=2), "noise"),
    "drawn": (Sampling(1.0, seed=2), "sampled"),
    "drawn, top-p": (Sampling(0.7, top_p=0.8, seed=2), "sampled"),
}


def model_of(layers: int, seed: int, vocab_size: int = 48, **more: Any) -> Any:
    """A small random model, surer than random ones are."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab_size, num_hidden_layers=layers, **sizes, **more)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return model.eval()


def drafter_of(model: Any, target: Target) -> DraftModel:
    """The model as a drafter of the target."""
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


class Watched(Drafter):
    """A drafter whose every tree is looked at."""

    def __init__(self, drafter: Drafter, check: Callable[[Committed, DraftTree], None]) -> None:
        self.drafter, self.check = drafter, check

    def begin(self, noise: Noise | None = None) -> Any:
        """A text of the drafter's."""
        self.text = self.drafter.begin(noise)
        return self

    def propose(self, news: Committed, budget: Budget) -> DraftTree:
        """The drafter's tree, once it was looked at."""
        tree = self.text.propose(news, budget)
        self.check(news, tree)
        return tree


@pytest.fixture(scope="module")
def target() -> Target:
    """A target of 48 tokens."""
    return Target(model_of(3, 0))


@pytest.fixture(scope="module")
def alike() -> Any:
    """A model that often says what the target says."""
    return resembling(model_of(3, 0), 0.15)


def resembling(model: Any, unlike: float) -> Any:
    """The model with noise in its weights."""
    torch.manual_seed(7)
    for weight in model.parameters():
        weight.data += unlike * weight.data.std() * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("mode", MODES)
def test_the_target_drafts_for_itself(mode: str, target: Target) -> None:
    """All that a model drafts for itself is kept: gamma + 1 tokens in every cycle."""
    sampling, draw = MODES[mode]
    drafter, budget = drafter_of(model_of(3, 0), target), Budget.fixed(chain_paths(4), draw)
    trace = generate(
        target, drafter, PROMPT, sampling=sampling, budget=budget, max_new_tokens=41, stop=[]
    )
    assert [cycle.committed for cycle in trace.cycles] == [5] * 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chains_are_the_models_own_continuation(kind: str, target: Target, alike: Any) -> None:
    """Cycle by cycle the draft is what the untouched model says of the whole text, uncached, whatever was kept."""
    model = alike
    if kind == "mistral":  # whose window is shorter than the text
        config = MistralConfig(
            **{**alike.config.to_dict(), "sliding_window": 5, "model_type": "mistral"}
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        model.load_state_dict(alike.state_dict())
    drafter, text, counts = drafter_of(model, target), list[int](), set[int]()

    def check(news: Committed, tree: DraftTree) -> None:
        text.extend(news.tokens.tolist())
        counts.add(len(news.tokens) - 1)
        said = [*text, news.root]
        for drafted in tree.tokens.tolist()[1:]:
            assert drafted == int(own_logits(model, said)[-1].argmax())
            said.append(drafted)

    watched = Watched(drafter, check)
    for prompt in (PROMPT, PROMPT[::-1], [40, 3], [17]):
        text.clear()
        generate(
            target, watched, prompt, budget=Budget.fixed(chain_paths(3)), max_new_tokens=40, stop=[]
        )
    assert {0, 3} <= counts  # all of a draft was kept, and nothing of one


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget", [Budget(12, 4, 3), Budget.fixed(((0,), (1,), (0, 0), (1, 0), (1, 1), (1, 0, 0)))]
)
def test_trees_hold_what_the_model_says_on_each_path(budget: Budget) -> None:
    """Every node is among the likeliest children of its parent by an uncached forward over its path.

    With six tokens, the same one often stands in several branches, of which one is confirmed.
    """
    target, alike = Target(model_of(3, 0, 6)), resembling(model_of(3, 0, 6), 0.3)
    drafter, text = drafter_of(alike, target), list[int]()

    def check(news: Committed, tree: DraftTree) -> None:
        text.extend(news.tokens.tolist())
        for node, children in enumerate(tree.children()):
            path = [int(tree.tokens[step]) for step in tree.path(node)]
            best = own_logits(alike, [*text, *path])[-1].topk(len(children) or 1).indices.tolist()
            drafted = [int(tree.tokens[child]) for child in children]
            if budget.paths is None:
                assert set(drafted) <= set(best)
            else:
                assert drafted == best[: len(drafted)]

    watched = Watched(drafter, check)
    for prompt in ([1, 2, 3], [5], [4, 4, 0, 2]):
        text.clear()
        generate(target, watched, prompt, budget=budget, max_new_tokens=30, stop=[])


def test_a_model_that_was_not_asked_reads_what_it_missed(target: Target, alike: Any) -> None:
    """News that comes late gives the same draft as news that comes in time."""
    patient, asked = drafter_of(alike, target).begin(), drafter_of(alike, target).begin()
    pieces = [
        Committed(torch.tensor(part), None, root)
        for part, root in ((PROMPT, 3), ([3, 4], 8), ([8], 11))
    ]
    budget = Budget.fixed(chain_paths(4))
    drafts = [asked.propose(piece, budget) for piece in pieces]
    assert torch.equal(patient.propose(Committed.join(pieces), budget).tokens, drafts[-1].tokens)


@pytest.mark.quick("drawn-40")
@pytest.mark.parametrize("rows", [40, 56])
@pytest.mark.parametrize("mode", MODES)
def test_rows_without_words_may_differ_in_number(mode: str, rows: int, target: Target) -> None:
    """A model with fewer or more rows than the target drafts, and the output is still the target's."""
    sampling, draw = MODES[mode]
    drafter, budget = (
        drafter_of(model_of(2, 4, rows), target),
        Budget.fixed(((0,), (1,), (0, 0)), draw),
    )
    options = {"sampling": sampling, "max_new_tokens": 24, "stop": []}
    trace = generate(target, drafter, PROMPT, budget=budget, **options)
    assert all(int(cycle.tree.tokens.max()) < 48 for cycle in trace.cycles)
    if draw == "noise":
        assert (
            trace.tokens == generate(target, load_drafter("none", target), PROMPT, **options).tokens
        )


def test_a_text_that_outgrows_the_model_is_not_drafted(target: Target) -> None:
    """Beyond its positions a model drafts nothing, and the target goes on alone."""
    drafter = drafter_of(model_of(3, 0, max_position_embeddings=16), target)
    trace = generate(
        target, drafter, PROMPT, budget=Budget.fixed(chain_paths(4)), max_new_tokens=30, stop=[]
    )
    assert [cycle.nodes for cycle in trace.cycles if cycle.context >= 16] == [0] * (
        30 + len(PROMPT) - 17
    )
    assert (
        trace.tokens
        == generate(target, load_drafter("none", target), PROMPT, max_new_tokens=30, stop=[]).tokens
    )


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 20,
}


@pytest.mark.quick("drawn")
@pytest.mark.parametrize("mode", MODES)
def test_a_longrope_model_is_silent_behind_its_border(mode: str, target: Target) -> None:
    """Its drafts end at the border of its frequencies, and the target goes on alone; a longer prompt is drafted for."""
    model = model_of(3, 0, rope_parameters=LONGROPE, original_max_position_embeddings=20)
    sampling, draw = MODES[mode]
    drafter, budget = drafter_of(model, target), Budget.fixed(chain_paths(4), draw)
    options: dict[str, Any] = {
        "sampling": sampling,
        "budget": budget,
        "max_new_tokens": 30,
        "stop": [],
    }
    trace = generate(target, drafter, PROMPT, **options)
    nodes = {cycle.context: cycle.nodes for cycle in trace.cycles}
    assert all(context + count <= 20 for context, count in nodes.items() if count)
    assert sum(nodes.values()) > 0 and not any(
        count for context, count in nodes.items() if context >= 20
    )
    if draw == "noise":
        assert (
            trace.tokens == generate(target, load_drafter("none", target), PROMPT, **options).tokens
        )
    beyond = generate(target, drafter, PROMPT * 4, **options)
    assert all(cycle.nodes for cycle in beyond.cycles[:5])


def test_a_model_that_reads_no_trees_is_refused_as_draft_model(
    target: Target, tmp_path: Path
) -> None:
    """A draft tree is read by the draft model too, so the same sentence holds."""
    config = AutoConfig.for_model("openai-gpt", vocab_size=48, n_embd=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="openai-gpt cannot read a tree: it "):
        load_drafter(tmp_path, target)


SERVED = ["qwen3_5_text", "jamba", "nemotron_h", "bloom", "gpt_neo", "rwkv"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "jamba" else pytest.param(name, marks=slow) for name in SERVED]
)
def test_models_with_states_draft_what_they_would_write(name: str) -> None:
    """Every draft is the model's own continuation, by naive loops, whatever of the one before was kept."""
    target, model = Target(model_of(2, 0, vocab_size=VOCAB)), build(name)
    drafter, text, drafted = drafter_of(model, target), list[int](), 0
    steps = target_steps(drafter)

    def check(news: Committed, tree: DraftTree) -> None:
        nonlocal drafted
        text.extend(news.tokens.tolist())
        root, count = [*text, int(tree.tokens[0])], len(tree) - 1
        assert tree.tokens[1:].tolist() == answer_naively(steps(model), root, count, Sampling())
        drafted += count

    options: dict[str, Any] = {
        "budget": Budget.fixed(chain_paths(3)),
        "max_new_tokens": 10,
        "stop": [],
    }
    trace = generate(target, Watched(drafter, check), PROMPT, **options)
    assert (
        trace.tokens == generate(target, load_drafter("none", target), PROMPT, **options).tokens
        and drafted > 20
    )


def target_steps(drafter: DraftModel) -> Any:
    """The truth of a draft model: its forwards over whole texts, or its own steps where these differ."""
    drafter.own[0].reader.check()
    return cached_steps if drafter.own[0].reader.follows_steps else whole_texts


# -- vocabularies -----------------------------------------------------------------------------------------------------


def tokenizer_of(words: dict[str, int]) -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a"))
    )


def test_other_words_are_refused_by_name() -> None:
    """What differs is named; sizes alone decide where a tokenizer is missing."""
    own, its = tokenizer_of({"a": 0, "b": 1, "c": 2}), tokenizer_of({"a": 0, "b": 2, "d": 1})
    with pytest.raises(
        ValueError,
        match=r"3 tokens differ \('b' is 1 here and 2 there, 'c' is 2 here and None there",
    ):
        check_vocabulary(own, its, 3, 3)
    check_vocabulary(own, own, 3, 8)
    with pytest.raises(ValueError, match="has 3 tokens, the target 8"):
        check_vocabulary(None, own, 3, 8)


@pytest.mark.slow
def test_a_folder_of_a_language_model_is_a_drafter(
    target: Target, alike: Any, tmp_path: Path
) -> None:
    """Any causal language model on disk drafts, in a list too; one of another vocabulary is refused."""
    alike.save_pretrained(tmp_path / "small")
    drafter = load_drafter(tmp_path / "small", target)
    assert isinstance(drafter, DraftModel)
    both = load_drafter(["suffix", tmp_path / "small"], target)
    expected = generate(
        target, load_drafter("none", target), PROMPT, max_new_tokens=20, stop=[]
    ).tokens
    for one in (drafter, both):
        assert generate(target, one, PROMPT, max_new_tokens=20, stop=[]).tokens == expected
    model_of(1, 0, 50).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="50 tokens, the target 48"):
        load_drafter(tmp_path / "other", target)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact() -> Target:
    """That target in fp64, so that little depends on how a processor rounds: slots' weights and norms stay fp32."""
    return Target(model_of(3, 0).double())


@pytest.fixture(scope="module")
def batch(exact: Target) -> Batch:
    """Two texts end to end."""
    torch.manual_seed(3)
    lengths = (11, 7)
    texts = [torch.randint(48, (length,)) for length in lengths]
    features = torch.cat([exact.features(text[None], (-1,))[0] for text in texts])
    masks = [torch.arange(length) >= 4 for length in lengths]
    return Batch(torch.cat(texts), torch.cat(masks), features, lengths, (-1,), (0, 1))


def naively(model: Any, target: Target, batch: Batch, divergence: str) -> Tensor:
    """The loss text by text, by stock forwards and torch's own functions."""
    found = []
    for text, mask in zip(
        batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    ):
        own = model(input_ids=text[None]).logits[0, :-1][mask[1:]].log_softmax(-1)
        law = own_logits(target.model, text.tolist())[:-1][mask[1:]].log_softmax(-1)
        mean = ((own.exp() + law.exp()) / 2).log()
        terms = {
            "tokens": -own.gather(1, text[1:][mask[1:]][:, None])[:, 0],
            "forward_kl": -(law.exp() * own).sum(-1),  # but for what no weight can change
            "reverse_kl": (own.exp() * (own - law)).sum(-1),
            "jsd": 0.5 * (law.exp() * (law - mean) + own.exp() * (own - mean)).sum(-1),
            "tv": 0.5 * (own.exp() - law.exp()).abs().sum(-1),
        }
        found.append(terms[divergence])
    return torch.cat(found).mean()


@pytest.mark.parametrize("divergence", ["tokens", "forward_kl", "reverse_kl", "jsd", "tv"])
def test_loss_and_gradients_are_those_of_a_plain_loop(
    divergence: Any, exact: Target, batch: Batch
) -> None:
    """Every divergence, of the slots whose next token is supervised and of no others."""
    gradients = []
    for naive in (False, True):
        model = model_of(2, 5).double()
        head = DraftModel(DraftModelSettings(divergence=divergence), model.config, model).train()
        loss = (
            naively(model, exact, batch, divergence) if naive else head(batch, exact.head)["total"]
        )
        loss.backward()
        gradients.append((loss.detach(), [weight.grad for weight in head.parameters()]))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-7, atol=1e-9)
    for own, expected in zip(gradients[0][1], gradients[1][1], strict=True):
        scale = float(expected.abs().max())  # norms round to fp32 whatever they are given
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-6 * scale)


def test_fewer_rows_learn_the_law_of_the_words_that_they_have(exact: Target, batch: Batch) -> None:
    """The target's law without the words that the model does not know, by stock forwards."""
    model = model_of(2, 5, 40).double()
    head = DraftModel(DraftModelSettings(), model.config, model)
    found = []
    for text, mask in zip(
        batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    ):
        own = model(input_ids=text.clamp(max=39)[None]).logits[0, :-1][mask[1:]].log_softmax(-1)
        law = own_logits(exact.model, text.tolist())[:-1][mask[1:], :40].softmax(-1)
        found.append(-(law * own).sum(-1))
    torch.testing.assert_close(
        head(batch, exact.head)["total"], torch.cat(found).mean(), rtol=1e-7, atol=1e-9
    )


def test_what_is_judged_is_the_overlap_of_the_laws(exact: Target, batch: Batch, alike: Any) -> None:
    """The mean of the smaller probabilities, of stock forwards."""
    alike = copy.deepcopy(alike).double()
    head = DraftModel(DraftModelSettings(), alike.config, alike)
    sums, overlaps = head.validate(batch, exact.head, {"chain": chain_paths(3)}), []
    for text, mask in zip(
        batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
    ):
        laws = [
            own_logits(model, text.tolist())[:-1][mask[1:]].softmax(-1)
            for model in (alike, exact.model)
        ]
        overlaps.append(torch.minimum(*laws).sum(-1))
    assert float(sums["overlap"] / sums["slots"]) == pytest.approx(
        torch.cat(overlaps).mean().item(), abs=1e-7
    )
    assert float(sums["slots"]) == len(torch.cat(overlaps))


def test_a_draft_model_starts_from_one_on_disk(alike: Any, target: Target, tmp_path: Path) -> None:
    """`drafter.model` names weights to go on from."""
    alike.save_pretrained(tmp_path / "small")
    settings = DraftModelSettings(model=str(tmp_path / "small"))
    head = DraftModel.for_target(settings, target.config, target.head)
    assert all(
        torch.equal(weight, alike.state_dict()[name])
        for name, weight in head.model.state_dict().items()
    )


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_models_that_cap_logits_or_transform_states_are_refused(
    name: str, target: Target, tmp_path: Path
) -> None:
    """Their logits are no product of states with a matrix, which the loss of training takes them for."""
    build(name).save_pretrained(tmp_path)
    settings, config = DraftModelSettings(model=str(tmp_path)), copy.copy(target.config)
    with pytest.raises(ValueError, match=f"a {name} cannot be distilled here"):
        DraftModel.for_target(settings, config, target.head)


def test_a_width_that_no_head_fits_is_refused(target: Target) -> None:
    """Sizes come from the target; a width between heads has no meaning."""
    settings = DraftModelSettings(layers=3, hidden_size=16)
    assert DraftModel.for_target(settings, target.config).model.config.num_hidden_layers == 3
    with pytest.raises(ValueError, match="expected a multiple of 8"):
        DraftModel.for_target(DraftModelSettings(hidden_size=20), target.config)


def test_the_doctor_examines_heads_alone(target: Target, alike: Any, tmp_path: Path) -> None:
    """A draft model is not called broken for being none."""
    save_head(tmp_path / "head", DraftModel(DraftModelSettings(), alike.config, alike), "", {})
    with pytest.raises(ValueError, match="is a draft_model, expected a head"):
        examine(tmp_path / "head", "any target")


# -- precision --------------------------------------------------------------------------------------------------------


def test_rotary_frequencies_stay_precise(target: Target, tmp_path: Path) -> None:
    """A target in bf16 says what the stock model says in bf16, far from the start too."""
    model_of(2, 0, initializer_range=0.2).save_pretrained(tmp_path)
    stock: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = torch.randint(48, (1, 900))
    loaded = Target.load(tmp_path, dtype="bfloat16", device="cpu")
    assert torch.equal(loaded.model(tokens).logits, stock(tokens).logits)
    assert not torch.equal(stock.to(torch.bfloat16)(tokens).logits, loaded.model(tokens).logits)
    assert {weight.dtype for weight in in_dtype(model_of(1, 0), torch.float64).parameters()} == {
        torch.float64
    }
