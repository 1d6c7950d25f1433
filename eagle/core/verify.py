"""Which drafted tokens are kept. The target's law decides; where a draft came from never matters."""

# N nodes, V vocabulary, P positions

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from eagle.core.noise import Noise, mix64
from eagle.core.sampling import Sampling, penalise, warp
from eagle.core.tree import DraftTree, TargetOutput

Coin = Callable[[float], bool]
Pick = Callable[[Tensor], int]
Law = Callable[[int], Tensor]


class Choose:
    """The target's choice after a node, as a function of its logits and of noise that no drafter can touch.

    With `drawn` drafts are drawn by lot, so that what the package remembers may know the noise of earlier requests:
    then the noise is as new in every request as the coins are.
    """

    def __init__(
        self, sampling: Sampling, uses: Counter[tuple[int, int]] | None = None, *, drawn: bool = False
    ) -> None:
        self.sampling, self.uses = sampling, Counter() if uses is None else uses
        self.noise: Noise | None = None
        if sampling.temperature > 0:
            seed = mix64(mix64(self.private_seed)) if drawn else sampling.seed
            self.noise = Noise(seed, sampling.request)

    @cached_property
    def private_seed(self) -> int:
        """Another one each time that a seed and request draw by lot, as `uses` counts: no request sees coins again."""
        sampling = self.sampling
        self.uses[sampling.seed, sampling.request] += 1
        use = self.uses[sampling.seed, sampling.request]
        return sampling.seed if use == 1 else mix64(mix64(sampling.seed) + use)

    @cached_property
    def dice(self) -> random.Random:
        """What coins and picks are drawn with."""
        return random.Random(mix64(mix64(self.private_seed) ^ self.sampling.request))

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        """The tokens chosen after `nodes`."""
        logits = self._penalised(output, nodes)
        if self.noise is None:
            return logits.argmax(-1).tolist()
        positions = [output.positions[node] for node in nodes]
        noise = self.noise(positions, logits.shape[-1], logits.device)
        return (warp(logits, self.sampling) + noise).argmax(-1).tolist()

    def offer(self, vocab_size: int, device: torch.device) -> Offer | None:
        """What a drafter may know of the noise and the filters; None for a greedy target."""
        return None if self.noise is None else Offer(self.sampling, self.noise, vocab_size, device, self)

    def law(self, output: TargetOutput, node: int) -> Tensor:
        """[V], the law that the token after `node` has."""
        logits = self._penalised(output, [node])
        if self.sampling.temperature > 0:
            return warp(logits, self.sampling)[0].softmax(-1)
        if self.sampling.lenience < 1:
            return logits[0].softmax(-1)
        return torch.zeros_like(logits[0]).index_fill_(0, logits[0].argmax(), 1)

    def coin(self, probability: float) -> bool:
        """True with this probability."""
        return self.dice.random() < probability

    def pick(self, law: Tensor) -> int:
        """A token drawn from the law [V]."""
        cumulative = law.cumsum(-1)
        drawn = torch.searchsorted(cumulative, self.dice.random() * cumulative[-1:], right=True)
        return min(int(drawn), int(law.nonzero()[-1]))

    def _penalised(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes), V] logits after the repetition penalty, in fp32 or better."""
        nodes = list(nodes)
        every = nodes == list(range(len(output.logits)))  # then nothing need be copied
        logits = output.logits if every else output.logits[nodes]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        rows = [penalise(row, output.prefix(node), penalty) for row, node in zip(logits, nodes, strict=True)]
        return torch.stack(rows)


class Offer:
    """What a drafter may know of a target that samples (`eagle.core.drafter.Noise`), in units of its plain logits."""

    def __init__(
        self,
        sampling: Sampling,
        noise: Noise,
        vocab_size: int,
        device: torch.device,
        choose: Choose | None = None,
    ) -> None:
        self.sampling, self.temperature, self.noise = sampling, sampling.temperature, noise
        self.vocab_size, self.device = vocab_size, device
        self.choose, self.drawn = choose or Choose(sampling), 0

    @cached_property
    def private(self) -> Noise:
        """A stream of its own: drafts that share the coins of their verification would bend the law."""
        return Noise(mix64(self.choose.private_seed), self.sampling.request)

    def __call__(self, positions: list[int]) -> Tensor:
        """[P, V], what the target adds to its logits when it chooses the tokens standing there."""
        return self.noise(positions, self.vocab_size, self.device) * self.temperature

    def own(self, rows: int) -> Tensor:
        """[rows, V], noise of the same kind that the target never sees, and new in every call."""
        # counted, not by position: what a place was drawn with may have decided that it is drafted again
        first, self.drawn = self.drawn, self.drawn + rows
        self.private.forget(first)
        return self.private(range(first, self.drawn), self.vocab_size, self.device) * self.temperature

    def filtered(self, logits: Tensor) -> Tensor:
        """[K, V], the logits, far lower where a target with these logits would not sample, so that no law is left."""
        sampling = self.sampling
        if sampling.top_k == 0 and sampling.top_p == 1 and sampling.min_p == 0:
            return logits
        # to sort whole vocabularies at all nodes would cost more than a small head does
        best = logits.topk(min(256, logits.shape[-1]))
        outside = torch.ones_like(logits, dtype=torch.bool)
        outside.scatter_(1, best.indices, warp(best.values, sampling).isinf())
        return torch.where(outside, logits - 1000, logits)


def walk(tree: DraftTree, choices: Sequence[int] | dict[int, int]) -> list[int]:
    """The accepted nodes: from the root, step to the child that equals the target's choice."""
    children = {(parent, token): node for node, (parent, token) in _edges(tree)}
    path = [0]
    while (child := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path


def _edges(tree: DraftTree) -> Iterable[tuple[int, tuple[int, int]]]:
    return enumerate(zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True), start=1)


def verify(output: TargetOutput, choose: Choose) -> tuple[list[int], int]:
    """The accepted path and the token that the target says after it."""
    tree, sampling = output.tree, choose.sampling
    if choose.noise is not None:
        choose.noise.forget(output.positions[0])
    if tree.laws is not None:
        rule = sample_block if sampling.rule == "block" else sample_tree
        options = {"lenience": sampling.lenience} if sampling.lenience < 1 else {}
        return rule(tree, lambda node: choose.law(output, node), choose.coin, choose.pick, **options)
    if sampling.lenience < 1:
        if sampling.temperature > 0:
            raise ValueError("lenience at temperature > 0 needs drafts that carry their law; use lenience=1")
        return walk_leniently(tree, lambda node: choose.law(output, node), sampling.lenience)
    choices = _Choices(output, choose)
    path = walk(tree, choices)
    return path, choices[path[-1]]


class _Choices(dict[int, int]):
    """Choices by node: all at once where that is cheap or the device slow to ask, else those that the walk looks at."""

    def __init__(self, output: TargetOutput, choose: Choose) -> None:
        super().__init__()
        self.output, self.choose = output, choose

    def __missing__(self, node: int) -> int:
        one_by_one = self.output.logits.device.type == "cpu" and self.choose.noise is not None
        nodes = [node] if one_by_one else list(range(len(self.output.tree)))
        self.update(zip(nodes, self.choose(self.output, nodes), strict=True))
        return self[node]


def sample_tree(tree: DraftTree, law: Law, coin: Coin, pick: Pick, lenience: float = 1.0) -> tuple[list[int], int]:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023), siblings drawn without replacement in order."""
    assert tree.laws is not None
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    while True:
        residual, accepted = law(path[-1]), None
        taken: list[int] = []
        for child in children[path[-1]]:
            drawn_from = _without(tree.laws[child].to(residual), taken)
            if not drawn_from[tokens[child]] > 0:
                break  # the law has underflowed, and says nothing of this sibling and of later ones
            remainder = (residual - lenience * drawn_from).clamp_(min=0)
            odds = residual[tokens[child]] / (lenience * drawn_from[tokens[child]])
            # nothing remains only where both laws are equal, so that rounding alone kept the odds below one
            if coin(min(1.0, float(odds))) or not remainder.any():
                accepted = child
                break
            residual = remainder / remainder.sum()
            taken.append(tokens[child])
        if accepted is None:
            return path, pick(residual)
        path.append(accepted)


def _without(law: Tensor, taken: list[int]) -> Tensor:
    """The law once the tokens in `taken` are gone."""
    if not taken:
        return law
    rest = law.index_fill(0, torch.tensor(taken, device=law.device), 0)
    return rest / rest.sum()


def sample_block(tree: DraftTree, law: Law, coin: Coin, pick: Pick) -> tuple[list[int], int]:
    """Block verification of a sampled chain (Sun et al. 2024): as exact as token by token, and never shorter."""
    assert tree.laws is not None
    last = len(tree) - 1
    if tree.parents.tolist() != list(range(-1, last)):
        raise ValueError("block verification is defined for chains: got a tree with branches; use rule='token'")
    tokens, target = tree.tokens.tolist(), [law(node) for node in range(last + 1)]
    draft = tree.laws.to(target[0])
    weights, remainders = [torch.ones_like(target[0][0])], []
    for node in range(1, last + 1):
        remainders.append((weights[-1] * target[node - 1] - draft[node]).clamp_(min=0))
        token = tokens[node]
        weights.append((weights[-1] * target[node - 1][token] / draft[node][token]).clamp(max=1))
    for node in range(last, 0, -1):
        if node == last:
            odds = weights[last]
        else:
            mass = remainders[node].sum()
            odds = mass / (mass + 1 - weights[node]) if mass > 0 else mass
        if coin(float(odds)):
            break
    else:
        node = 0
    remainder = target[last] if node == last else remainders[node]
    return list(range(node + 1)), pick(remainder / remainder.sum() if remainder.any() else target[node])


def walk_leniently(tree: DraftTree, law: Law, lenience: float) -> tuple[list[int], int]:
    """Greedy with lenience (lossy): step to the likeliest child of at least `lenience` times the top probability."""
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    while True:
        here = law(path[-1])
        child = max(children[path[-1]], key=lambda node: float(here[tokens[node]]), default=None)
        if child is None or here[tokens[child]] < lenience * here.max():
            return path, int(here.argmax())
        path.append(child)
