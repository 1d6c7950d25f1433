"""EAGLE-3's trees: tokens, likelihoods and probs are those of a loop over single tokens, saved or not."""

# V the target's vocabulary, D the head's own

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.tree import PUBLISHED_TREE, DraftTree
from eagle.core.verify import Choose, warp
from eagle.drafters.parts.growth import SHARPNESS
from eagle.drafters.parts.reduced_vocab import load_draft_vocab
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.formats.checkpoint import load_head, save_head
from tests import naive_unroll
from tests.drafters.recurrent.test_windowed_heads import windowed
from tests.enumerate_law import texts_of
from tests.naive_unroll import eagle3_logits, sayable_ids
from tests.unrolled_heads import draft_vocab, moved

DYNAMIC = Budget(12, 4, 3)
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "draft vocabulary": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "one norm of all taps": {"norm_before_fc": True},
    # the prompt is longer than the window, and so are drafted paths
    "window": {"window": Window(2, 3)},
}


@pytest.fixture(scope="module")
def vocab_file(
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return the file of a draft vocabulary: 300 tokens from all over the target's."""
    file = tmp_path_factory.mktemp("vocab") / "draft_vocab.safetensors"
    return draft_vocab(file, tiny_target.vocab_size, 300)


def new_head(target: Target, **settings: Any) -> Eagle3:
    """Return a head with random weights."""
    # the LM head starts as the target's, which would hide a wrong one
    torch.manual_seed(0)
    return moved(
        Eagle3.for_target(
            Eagle3.Settings(**settings),
            target.config,
            target.head,
        )
    )


@pytest.fixture(scope="module", params=SETTINGS)
def head(
    request: pytest.FixtureRequest,
    tiny_target: Target,
    vocab_file: Path,
) -> Iterator[Eagle3]:
    """Return a head ready to draft, and let the loop see what it sees."""
    settings = SETTINGS[request.param]
    if request.param != "full":
        settings = {**settings, "draft_vocab": str(vocab_file)}
    with pytest.MonkeyPatch.context() as patch:
        if "window" in settings:
            patch.setattr(naive_unroll, "seen", windowed(settings["window"]))
        yield new_head(tiny_target, **settings).bind(tiny_target.head)


def draft(
    head: Any,
    target: Target,
    budget: Budget,
    noise: Any = None,
) -> tuple[Committed, DraftTree]:
    """Return what the head has read after a prompt, and its tree."""
    prompt = target.chat("What does copy do?")
    update = target.open(head.taps).begin(prompt, Choose(Sampling()))
    return update, head.begin(noise).propose(update, budget)


class Loop:
    """A head's logits after any drafted path, by a loop over single tokens that has no cache and no tree."""

    def __init__(
        self,
        head: Eagle3,
        target: Target,
        update: Committed,
        choose: Choose | None = None,
    ) -> None:
        self.head = head
        self.target = target
        self.update = update
        self.choose = choose
        self.known: dict[tuple[int, ...], Tensor] = {}

    def logits(self, path: tuple[int, ...]) -> Tensor:
        """Return [V], -inf at tokens that the head cannot say, plus the target's noise for the position if any."""
        if path not in self.known:
            self.known[path] = self.compute_logits(path)
        return self.known[path]

    @torch.no_grad()
    def compute_logits(self, path: tuple[int, ...]) -> Tensor:
        """Return the same, without a look at what is known."""
        size = self.target.vocab_size
        weights = self.head.state_dict()
        anchor = len(self.update.tokens) - 1
        steps = len(path) + 1
        # the loop reads one text: what was committed, the root, the path
        drafted = torch.tensor([self.update.root, *path])
        text = (torch.cat([self.update.tokens, drafted]), self.update.features)
        logits = eagle3_logits(
            weights,
            settings=self.head.settings.model_copy(update={"steps": steps}),
            shape=self.head.shape,
            text=text,
            target_head=self.target.head,
            anchors={anchor: steps},
        )
        # from the draft vocabulary to the target's
        scores = torch.full((size,), -torch.inf)
        scores[sayable_ids(weights, size)] = logits[anchor, len(path)]
        if self.choose is None or self.choose.noise is None:
            return scores
        noise = self.choose.noise([anchor + 1 + steps], size, scores.device)[0]
        return scores + self.choose.sampling.temperature * noise


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_fixed_tree_holds_the_ranked_children(
    head: Eagle3,
    tiny_target: Target,
    temperature: float,
) -> None:
    """Each node is the child of its rank after its own path, with the noise of its position at T > 0."""
    choose = Choose(Sampling(temperature=temperature, seed=4))
    noise = choose.offer(tiny_target.vocab_size, tiny_target.device)
    update, tree = draft(head, tiny_target, Budget.fixed(PUBLISHED_TREE), noise)
    loop = Loop(head, tiny_target, update, choose)
    # from the ranks on the way to a node to its tokens, parents first
    expected: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in sorted(PUBLISHED_TREE, key=len):
        above = expected[path[:-1]]
        ranked = loop.logits(above).sort(descending=True).indices
        expected[path] = *above, int(ranked[path[-1]])
    assert set(texts_of(tree)) == set(expected.values())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_dynamic_tree_holds_the_likeliest_paths(
    head: Eagle3,
    tiny_target: Target,
    temperature: float,
) -> None:
    """Every node has the likelihood of its path by the loop, and its likelier siblings are in the tree."""
    choose = Choose(Sampling(temperature=temperature, seed=4))
    noise = choose.offer(tiny_target.vocab_size, tiny_target.device)
    update, tree = draft(head, tiny_target, DYNAMIC, noise)
    loop = Loop(head, tiny_target, update, choose)
    paths = texts_of(tree)
    assert len(paths) == 13
    for path, likelihood in zip(paths[1:], tree.likelihoods[1:].tolist(), strict=True):
        # a path's likelihood is the product of its tokens' probs, sharpened
        levels = []
        for depth in range(len(path)):
            levels.append((SHARPNESS * loop.logits(path[:depth])).log_softmax(-1))
        expected = sum(float(level[token]) for level, token in zip(levels, path, strict=True))
        assert likelihood == pytest.approx(expected, abs=1e-4)
        # a tree without its best children would pass the check above
        likelier = (levels[-1] > levels[-1][path[-1]]).nonzero().flatten().tolist()
        assert {(*path[:-1], token) for token in likelier} <= set(paths)


def test_a_sampled_tree_carries_probs_over_the_targets_vocabulary(
    head: Eagle3,
    tiny_target: Target,
) -> None:
    """They are the loop's under the target's own filters; tokens that the head cannot say have none."""
    sampling = Sampling(temperature=0.7, top_k=9, seed=4)
    noise = Choose(sampling).offer(tiny_target.vocab_size, tiny_target.device)
    update, tree = draft(
        head,
        tiny_target,
        Budget.fixed(PUBLISHED_TREE, "sampled"),
        noise,
    )
    loop = Loop(head, tiny_target, update)
    assert tree.draft_probs.shape == (len(tree), tiny_target.vocab_size)
    assert tree.draft_probs.dtype == torch.float32
    for path, probs in zip(texts_of(tree)[1:], tree.draft_probs[1:], strict=True):
        # transformers' order of filters, applied to the loop's logits
        expected = warp(loop.logits(path[:-1])[None], sampling).softmax(-1)[0]
        torch.testing.assert_close(probs, expected, rtol=0, atol=1e-5)
        assert probs[path[-1]] > 0


def test_a_saved_head_drafts_without_the_file_of_its_vocabulary(
    tiny_target: Target,
    vocab_file: Path,
    tmp_path: Path,
) -> None:
    """Its folder holds every tensor and setting; conformance saves heads without such a file."""
    # a copy, which can be deleted
    file = tmp_path / "draft_vocab.safetensors"
    file.write_bytes(vocab_file.read_bytes())
    head = new_head(tiny_target, draft_vocab=str(file), taps=(1, 3, 6))
    offsets, marks = load_draft_vocab(file)
    assert head.d2t.equal(offsets)
    assert head.t2d.equal(marks)
    save_head(tmp_path / "head", head, "", {})
    file.unlink()
    loaded = load_head(tmp_path / "head")
    assert loaded.settings == head.settings
    assert loaded.taps == (1, 3, 6)
    saved = head.state_dict()
    assert loaded.state_dict().keys() == saved.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.equal(saved[name])
        assert tensor.dtype == saved[name].dtype
