"""EAGLE-3's trees: tokens, likelihoods and laws are those of a loop over single tokens, saved or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import Choose, warp
from eagle.drafters.parts.growth import SHARPNESS
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab
from eagle.formats.checkpoint import load_head, save_head
from tests.naive_unroll import eagle3_logits, sayable_ids
from tests.unrolled_heads import draft_vocab, moved

DYNAMIC = Budget(12, 4, 3)


@pytest.fixture(scope="module")
def vocab_file(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 tokens from all over the target's vocabulary."""
    return draft_vocab(
        tmp_path_factory.mktemp("vocab") / "draft_vocab.safetensors", tiny_target.vocab_size, 300
    )


def new_head(target: Target, **settings: Any) -> Eagle3:
    """A head whose laws are not the target's own."""
    torch.manual_seed(0)
    return moved(Eagle3.for_target(Eagle3.Settings(**settings), target.config, target.head))


@pytest.fixture(scope="module", params=["full", "draft vocabulary", "3.1"])
def head(request: pytest.FixtureRequest, tiny_target: Target, vocab_file: Path) -> Eagle3:
    """Ready to draft, with and without a vocabulary of its own, and with the norms of 3.1."""
    values: dict[str, dict[str, Any]] = {
        "full": {},
        "draft vocabulary": {"draft_vocab": str(vocab_file)},
        "3.1": {"draft_vocab": str(vocab_file), "fc_norm": True, "norm_output": True},
    }
    return new_head(tiny_target, **values[request.param]).bind(tiny_target.head)


def drafted(
    head: Any, target: Target, budget: Budget, noise: Any = None
) -> tuple[Committed, DraftTree]:
    """What the head has read after a prompt, and its tree."""
    news = target.open(head.taps).begin(target.chat("What does copy do?"), Choose(Sampling()))
    return news, head.begin(noise).propose(news, budget)


class Truth:
    """The head's laws after any drafted path, by a loop over single tokens; each is found once."""

    def __init__(
        self, head: Eagle3, target: Target, news: Committed, choose: Choose | None = None
    ) -> None:
        self.head, self.target, self.news, self.choose = head, target, news, choose
        self.weights, self.known = head.state_dict(), dict[tuple[int, ...], Tensor]()
        self.ids = sayable_ids(self.weights, target.vocab_size)

    def logits(self, path: tuple[int, ...]) -> Tensor:
        """[V], -inf at tokens that the head cannot say; plus the target's noise for that place, if it has any."""
        if path not in self.known:
            self.known[path] = self._logits(path)
        return self.known[path]

    @torch.no_grad()
    def _logits(self, path: tuple[int, ...]) -> Tensor:
        anchor, steps, size = len(self.news.tokens) - 1, len(path), self.target.vocab_size
        known = (
            torch.cat([self.news.tokens, torch.tensor([self.news.root, *path])]),
            self.news.features,
        )
        settings, shape = (
            self.head.settings.model_copy(update={"steps": steps + 1}),
            self.head.shape,
        )
        made = eagle3_logits(
            self.weights, settings, shape, known, self.target.head, {anchor: steps + 1}
        )
        scores = torch.full((size,), -torch.inf).index_put((self.ids,), made[anchor, steps])
        if self.choose is None or self.choose.noise is None:
            return scores
        noise = self.choose.noise([anchor + 2 + steps], size, scores.device)[0]
        return scores + self.choose.sampling.temperature * noise


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The tokens on the way to every node but the root."""
    return [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(1, len(tree))]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("paths", [chain_paths(5), PUBLISHED_TREE], ids=["chain", "published"])
def test_a_fixed_tree_holds_the_ranked_children(
    head: Eagle3, tiny_target: Target, paths: tuple[tuple[int, ...], ...], temperature: float
) -> None:
    """Each node is the child of its rank by the loop over its own path, plus the noise of its place at T > 0."""
    choose = Choose(Sampling(temperature=temperature, seed=4))
    offered = choose.offer(tiny_target.vocab_size, tiny_target.device)
    news, tree = drafted(head, tiny_target, Budget.fixed(paths), offered)
    truth, named = (
        Truth(head, tiny_target, news, choose),
        dict[tuple[int, ...], tuple[int, ...]]({(): ()}),
    )
    for path in sorted(paths, key=len):
        above = named[path[:-1]]
        named[path] = *above, int(truth.logits(above).sort(descending=True).indices[path[-1]])
    assert {(), *paths_of(tree)} == {*named.values()}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_dynamic_tree_holds_the_likeliest_paths(
    head: Eagle3, tiny_target: Target, temperature: float
) -> None:
    """Of every node the likelihood is that of its path by the loop, and its likelier siblings are there too."""
    choose = Choose(Sampling(temperature=temperature, seed=4))
    offered = choose.offer(tiny_target.vocab_size, tiny_target.device)
    news, tree = drafted(head, tiny_target, DYNAMIC, offered)
    truth, found = Truth(head, tiny_target, news, choose), paths_of(tree)
    assert tree.likelihoods is not None and len(found) == 12
    for path, likelihood in zip(found, tree.likelihoods[1:].tolist(), strict=True):
        laws = [(SHARPNESS * truth.logits(path[:end])).log_softmax(-1) for end in range(len(path))]
        true = sum(float(law[token]) for law, token in zip(laws, path, strict=True))
        assert likelihood == pytest.approx(true, abs=1e-4)
        better = (laws[-1] > laws[-1][path[-1]]).nonzero().flatten().tolist()
        assert {(*path[:-1], token) for token in better} <= {*found}


@pytest.mark.parametrize("paths", [chain_paths(3), PUBLISHED_TREE], ids=["chain", "published"])
def test_a_drawn_tree_carries_laws_over_the_targets_vocabulary(
    head: Eagle3, tiny_target: Target, paths: tuple[tuple[int, ...], ...]
) -> None:
    """The loop's under the target's own filters: they sum to 1, and what cannot be said has no part in them."""
    sampling = Sampling(temperature=0.7, top_k=9, seed=4)
    offered = Choose(sampling).offer(tiny_target.vocab_size, tiny_target.device)
    news, tree = drafted(head, tiny_target, Budget.fixed(paths, "sampled"), offered)
    truth = Truth(head, tiny_target, news)
    assert tree.draft_probs is not None and tree.draft_probs.shape == (
        len(tree),
        tiny_target.vocab_size,
    )
    assert tree.draft_probs.dtype == torch.float32
    torch.testing.assert_close(tree.draft_probs[1:].sum(-1), torch.ones(len(tree) - 1))
    for path, law in zip(paths_of(tree), tree.draft_probs[1:], strict=True):
        true = warp(truth.logits(path[:-1])[None], sampling).softmax(-1)[0]
        torch.testing.assert_close(law, true, rtol=0, atol=1e-5)
        assert law[path[-1]] > 0


@pytest.mark.parametrize(
    "budget",
    [DYNAMIC, Budget.fixed(PUBLISHED_TREE), Budget.fixed(PUBLISHED_TREE, "sampled")],
    ids=str,
)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=1)], ids=["T=0", "T=1"]
)
def test_what_cannot_be_said_is_never_drafted(
    tiny_target: Target, vocab_file: Path, budget: Budget, sampling: Sampling
) -> None:
    """Whatever the tree, and whatever noise lifts the target's other tokens."""
    head = new_head(tiny_target, draft_vocab=str(vocab_file)).bind(tiny_target.head)
    offered = Choose(sampling).offer(tiny_target.vocab_size, tiny_target.device)
    _, marks = load_draft_vocab(vocab_file)
    _, tree = drafted(head, tiny_target, budget, offered)
    assert marks[tree.tokens[1:]].all()


def test_what_is_kept_drafts_without_its_file(
    tiny_target: Target, vocab_file: Path, tmp_path: Path
) -> None:
    """A head's folder holds all of it: every tensor, every setting, and the vocabulary."""
    file = tmp_path / "draft_vocab.safetensors"
    file.write_bytes(vocab_file.read_bytes())
    settings = {
        "draft_vocab": str(file),
        "fc_norm": True,
        "norm_output": True,
        "train_lm_head": False,
        "taps": (1, 3, 6),
    }
    head = new_head(tiny_target, **settings)
    save_head(tmp_path / "head", head, "", {})
    file.unlink()
    loaded = load_head(tmp_path / "head")
    assert loaded.settings == head.settings
    assert loaded.taps == head.taps == (1, 3, 6)
    given, found = head.state_dict(), loaded.state_dict()
    assert given.keys() == found.keys()
    assert all(
        found[name].equal(tensor) and found[name].dtype == tensor.dtype
        for name, tensor in given.items()
    )
    trees = [drafted(one.bind(tiny_target.head), tiny_target, DYNAMIC)[1] for one in (head, loaded)]
    assert trees[0].tokens.equal(trees[1].tokens)
