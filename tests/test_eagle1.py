"""EAGLE-1: what it is trained on is what it sees when drafting, and its loss is the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import Budget, DraftTree, Sampling, Target
from eagle.drafter import Committed
from eagle.drafters.blocks import grow
from eagle.drafters.eagle1 import Eagle1
from eagle.examples import Batch, Example, collate
from eagle.extract import LiveFeatures
from eagle.verify import Choose


@pytest.fixture(scope="module")
def head(tiny_target: Target) -> Eagle1:
    """An untrained head, lent the target's embedding and LM head."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(noise=0.0), tiny_target.config).bind(tiny_target.head)


@pytest.fixture(scope="module")
def batch(tiny_target: Target) -> Batch:
    """Two random texts of different length."""
    generator = torch.Generator().manual_seed(4)
    lengths = (30, 21)
    texts = [torch.randint(10, tiny_target.vocab_size, (length,), generator=generator) for length in lengths]
    examples = [Example(text, torch.rand(len(text), generator=generator) < 0.6) for text in texts]
    live = LiveFeatures(tiny_target, examples, {"taps": [-1], "dtype": "float32"})
    return collate(live.read(range(len(examples))), live.taps)


def test_drafting_sees_what_training_saw(head: Eagle1, tiny_target: Target) -> None:
    """The law of the first drafted token equals that of a plain causal pass, however the text came in pieces."""
    text = torch.randint(10, tiny_target.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    features = tiny_target.features(text[None], (-1,))[0]
    plain = tiny_target.head.logits(head.states(text[None, 1:], features[None, :-1, 0], 0, tiny_target.head))[0]
    head.begin()
    for start, end in ((0, 12), (12, 13), (13, 20), (20, 39)):
        news = Committed(text[start:end], features[start:end], int(text[end]))
        tree = head.propose(news, Budget(6, 1, 6))
        assert set(tree.tokens[1:].tolist()) == set(plain[end - 1].topk(6).indices.tolist())


def test_a_drafted_chain_continues_its_own_features(head: Eagle1, tiny_target: Target) -> None:
    """Level by level with a cache equals one causal pass over the text and the head's own predictions."""
    prompt = tiny_target.chat("What does copy do?")
    head.begin()
    news = tiny_target.begin(prompt, Choose(Sampling()), (-1,))
    drafted = head.propose(news, Budget(5, 5, 1)).tokens.tolist()
    tokens, states = torch.tensor([*prompt[1:], news.root]), news.features[:, 0]
    for token in drafted[1:]:
        predicted = head.states(tokens[None], states[None], 0, tiny_target.head)[0, -1]
        assert int(tiny_target.head.logits(predicted).argmax()) == token
        tokens, states = torch.cat([tokens, torch.tensor([token])]), torch.cat([states, predicted[None]])


def plain_loss(head: Eagle1, batch: Batch, target: Target) -> Tensor:
    """The published loss, slot by slot: Smooth-L1 of the feature plus 0.1 cross-entropy of the laws."""
    losses = []
    for row in range(len(batch.tokens)):
        length = int(batch.lengths[row])
        tokens, features = batch.tokens[row, :length], batch.features[row, :length, 0]
        for slot in range(length - 2):
            if not batch.loss_mask[row, slot + 2]:
                continue
            seen = slice(0, slot + 1)
            predicted = head.states(tokens[1:][seen][None], features[seen][None], 0, target.head)[0, -1]
            regression = F.smooth_l1_loss(predicted, features[slot + 1])
            law = target.head.logits(features[slot + 1]).softmax(-1)
            entropy = -(law * target.head.logits(predicted).log_softmax(-1)).sum()
            losses.append(regression + 0.1 * entropy)
    return torch.stack(losses).mean()


def test_loss_and_gradients_equal_the_plain_rendering(head: Eagle1, batch: Batch, tiny_target: Target) -> None:
    """The batched loss is the mean over supervised slots of a loop that sees nothing but the past."""
    gradients = []
    for loss in (head(batch, tiny_target.head)["total"], plain_loss(head, batch, tiny_target)):
        head.zero_grad()
        loss.backward()
        gradients.append([loss.detach(), *(weight.grad.clone() for weight in head.parameters())])
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6)


def test_a_grown_tree_holds_the_likeliest_paths() -> None:
    """With every path within reach, the nodes kept are the most probable prefixes, by enumeration."""
    vocabulary, depth, nodes = 4, 3, 9
    laws = torch.rand(vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(1)).log_softmax(-1)

    def level(_: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        return laws[tokens]

    tree = grow(vocabulary, laws[vocabulary], level, Budget(nodes, depth, vocabulary**depth))
    likelihood, frontier = {(): 0.0}, [()]
    for _ in range(depth):
        frontier = [(*path, token) for path in frontier for token in range(vocabulary)]
        for path in frontier:
            likelihood[path] = likelihood[path[:-1]] + float(laws[path[-2] if len(path) > 1 else vocabulary, path[-1]])
    best = sorted(likelihood, key=lambda path: -likelihood[path])[1 : nodes + 1]
    assert paths_of(tree) == set(best)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The token paths that a tree holds, without the root."""
    tokens = tree.tokens.tolist()
    return {tuple(tokens[node] for node in tree.path(end)[1:]) for end in range(1, len(tree))}
