"""Verification: which drafted tokens are accepted, decided by the target's probabilities alone."""

# N nodes, V vocabulary, P positions

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from threading import Lock

import torch
from torch import Tensor

from eagle.core.noise import Noise, mix64
from eagle.core.offer import Offer
from eagle.core.row_errors import run_rows
from eagle.core.sampling import Sampling, in_fp32, penalise, penalise_nodes, warp
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.typical import walk_typically
from eagle.device import must_wait, pick_rows, to_host, upload

Coin = Callable[[float], bool]
Pick = Callable[[Tensor], int]
Probs = Callable[[int], Tensor]  # node -> [V], the target's probs of the token after it
Process = Callable[[TargetOutput, Sequence[int]], Tensor]  # output and nodes -> [len(nodes), V], changed logits
NAN = -(2**40)  # in place of a token chosen by logits that are nan
COUNTING = Lock()  # of uses: two threads that counted alike would toss the same coins


class Choose:
    """The target's choice after a node, from its logits and noise that does not depend on drafts.

    With `drawn` (sampled drafts), drafters and policies may remember tokens that depend on the noise of earlier
    requests, so every request gets new noise and coins.

    `process` takes the place of the sampling's penalty, temperature and filters, which then only tell drafters what
    it does.
    """

    def __init__(
        self,
        sampling: Sampling,
        uses: Counter[tuple[int, int]] | None = None,
        *,
        drawn: bool = False,
        process: Process | None = None,
    ) -> None:
        self.sampling, self.process = sampling, process
        self.uses = Counter() if uses is None else uses
        self.noise: Noise | None = None
        if sampling.temperature > 0:
            seed = mix64(mix64(self.private_seed)) if drawn else sampling.seed
            self.noise = Noise(seed, sampling.request)

    @cached_property
    def private_seed(self) -> int:
        """A seed that differs at each use of the same seed and request (counted in `uses`), so that no coin repeats."""
        seed, request = self.sampling.seed, self.sampling.request
        with COUNTING:
            self.uses[seed, request] += 1
            use = self.uses[seed, request]
        return seed if use == 1 else mix64(mix64(seed) + use)

    @cached_property
    def dice(self) -> random.Random:
        """The generator of coins and picks."""
        return random.Random(mix64(mix64(self.private_seed) ^ self.sampling.request))

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        """The tokens chosen after `nodes`; `NAN` where the target's logits are nan."""
        return to_host([self.pick_tokens(output, nodes)])[0].tolist()

    def pick_tokens(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes)], the tokens chosen after `nodes`, on the device of the logits; `NAN` where these are nan."""
        return self._best(self._scores(output, nodes))

    def pick_where_it_lies(self, output: TargetOutput, tokens: Tensor, seen: Tensor, depths: Tensor) -> Tensor:
        """[N], the tokens chosen after all nodes of a tree on the device, by their tokens, ancestors and depths."""
        logits, sampling = in_fp32(output.logits), self.sampling
        if sampling.repetition_penalty != 1:
            logits = penalise_nodes(logits, output.text, tokens, seen, sampling.repetition_penalty)
        if self.noise is None:
            return self._best(logits)
        after = range(output.start + 1, output.start + 2 + output.tree.levels)
        noise = self.noise(after, logits.shape[-1], logits.device)
        return self._best(warp(logits, sampling) + noise.index_select(0, depths))

    def _best(self, scores: Tensor) -> Tensor:
        """[K], the token of the highest of scores [K, V]; `NAN` where they are nan."""
        tokens = scores.argmax(-1, keepdim=True)  # a nan, where there is one
        return tokens.masked_fill_(scores.gather(-1, tokens).isnan(), NAN)[:, 0]

    def rank_tokens(self, output: TargetOutput, count: int) -> Tensor:
        """[N, count], the target's best tokens after every node, its choice first."""
        scores = self._scores(output, range(len(output.tree)))
        return scores.topk(min(count, scores.shape[-1])).indices

    def _scores(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes), V], scores whose maximum is the target's choice."""
        logits = self.logits_after(output, nodes)
        if self.noise is None:
            return logits
        positions = [output.positions[node] for node in nodes]
        return logits + self.noise(positions, logits.shape[-1], logits.device)

    def logits_after(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes), V], the logits whose softmax the target samples from, or whose maximum it takes."""
        logits = self._penalised_logits(output, nodes)
        return logits if self.process is not None or self.noise is None else warp(logits, self.sampling)

    def offer(self, vocab_size: int, device: torch.device) -> Offer | None:
        """The noise and filters for the drafter; None for a greedy target."""
        return None if self.noise is None else Offer(self, vocab_size, device)

    def probs(self, output: TargetOutput, node: int) -> Tensor:
        """[V], the target's probs of the token after `node`."""
        if self.sampling.temperature > 0:
            return self.probs_after(output, [node])[0]
        logits = self._penalised_logits(output, [node])
        if self.sampling.lenience < 1:
            return logits[0].softmax(-1)
        return torch.zeros_like(logits[0]).index_fill_(0, logits[0].argmax(), 1)

    def probs_after(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes), V], the target's probs after these nodes when it samples."""
        return self.logits_after(output, nodes).softmax(-1)

    def coin(self, probability: float) -> bool:
        """Toss a coin that is True with this probability."""
        return self.dice.random() < probability

    def pick(self, probs: Tensor) -> int:
        """Sample a token from probs [V]; `NAN` if they are nan."""
        cumulative = probs.cumsum(-1)
        token = torch.searchsorted(cumulative, self.dice.random() * cumulative[-1:], right=True)
        last = len(probs) - 1 - (probs.flip(0) > 0).int().argmax()
        return int(to_host([torch.minimum(token, last).masked_fill_(cumulative[-1:].isnan(), NAN)])[0])

    def _penalised_logits(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """[len(nodes), V], logits after the repetition penalty, or as `process` makes them, in fp32 or fp64."""
        if self.process is not None:
            return self.process(output, nodes)
        logits = in_fp32(pick_rows(output.logits, nodes))
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        rows = [penalise(row, output.prefix(node), penalty) for row, node in zip(logits, nodes, strict=True)]
        return torch.stack(rows)


def walk(tree: DraftTree, choices: Sequence[int] | dict[int, int]) -> list[int]:
    """The accepted nodes: from the root, step to the child that equals the target's choice."""
    edges = zip(tree.parents.tolist()[1:], tree.tokens.tolist()[1:], strict=True)
    children = {edge: node for node, edge in enumerate(edges, start=1)}
    path = [0]
    while (child := children.get((path[-1], choices[path[-1]]))) is not None:
        path.append(child)
    return path


def verify(output: TargetOutput, choose: Choose, choices: Sequence[int] | None = None) -> tuple[list[int], int]:
    """The accepted path and the target's token after it; `choices` are the target's after all nodes, if known."""
    if choose.noise is not None:
        choose.noise.forget(output.start + 1)
    path, root = _apply_rule(output, choose, choices)
    check_choice(root, output, len(path))
    return path, root


def _apply_rule(output: TargetOutput, choose: Choose, choices: Sequence[int] | None = None) -> tuple[list[int], int]:
    """`verify` by the rule that the tree and the sampling ask for."""
    tree, sampling = output.tree, choose.sampling
    if sampling.typical is not None:
        path = walk_typically(tree, partial(choose.probs_after, output), sampling.typical)
        return path, choose(output, path[-1:])[0]
    if tree.draft_probs is not None:
        rule = sample_block if sampling.rule == "block" else sample_tree
        options = {"lenience": sampling.lenience} if sampling.lenience < 1 else {}
        return rule(tree, lambda node: choose.probs(output, node), choose.coin, choose.pick, **options)
    if sampling.lenience < 1:
        if sampling.temperature > 0:
            raise ValueError("lenience at temperature > 0 needs sampled drafts (Budget.draw); use lenience=1")
        return walk_leniently(tree, lambda node: choose.probs(output, node), sampling.lenience)
    chosen = _Choices(output, choose) if choices is None else choices
    path = walk(tree, chosen)
    return path, chosen[path[-1]]


def check_choice(token: int, output: TargetOutput, accepted: int) -> None:
    """Refuse a token that was chosen by logits that are nan, after a path of so many nodes."""
    if token == NAN:
        raise ValueError(
            f"the target's logits are nan after {output.start + accepted} tokens: its states overflow in "
            f"{str(output.logits.dtype).removeprefix('torch.')}, or its weights are damaged; load it in float32 to see"
        )


def verify_rows(rows: Sequence[tuple[TargetOutput, Choose]]) -> list[tuple[list[int], int]]:
    """`verify` for several texts; their choices are copied from the device all at once.

    `RowErrors`, by place, if only some of them fail.
    """
    choices_by_row: dict[int, list[int]] = {}
    if len(rows) > 1:
        at_once = {place: pair for place, pair in enumerate(rows) if _is_walked(*pair) and not _is_lazy(pair[0])}
        tokens = [choose.pick_tokens(output, range(len(output.tree))) for output, choose in at_once.values()]
        choices_by_row = {place: chosen.tolist() for place, chosen in zip(at_once, to_host(tokens), strict=True)}
    return [*run_rows(range(len(rows)), lambda place: verify(*rows[place], choices_by_row.get(place))).values()]


def _is_walked(output: TargetOutput, choose: Choose) -> bool:
    """Whether acceptance depends only on the target's choices."""
    return output.tree.draft_probs is None and choose.sampling.is_lossless


def _is_lazy(output: TargetOutput) -> bool:
    """Whether to make choices one by one: on a CPU, noise and argmax over the vocabulary are slow."""
    return not must_wait(output.logits.device)


class _Choices(dict[int, int]):
    """The target's choices by node, computed for all nodes at once, or lazily on a CPU."""

    def __init__(self, output: TargetOutput, choose: Choose) -> None:
        super().__init__()
        self.output = output
        self.choose = choose

    def __missing__(self, node: int) -> int:
        nodes = [node] if _is_lazy(self.output) else list(range(len(self.output.tree)))
        self.update(zip(nodes, self.choose(self.output, nodes), strict=True))
        return self[node]


def sample_tree(
    tree: DraftTree, target_probs: Probs, coin: Coin, pick: Pick, lenience: float = 1.0
) -> tuple[list[int], int]:
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) of siblings sampled without replacement."""
    assert tree.draft_probs is not None
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    while True:
        residual, accepted = target_probs(path[-1]), None
        rejected: list[int] = []
        for child in children[path[-1]]:
            draft_probs = _remove_tokens(tree.draft_probs[child].to(residual), rejected)
            remainder = (residual - lenience * draft_probs).clamp_(min=0)
            mass = remainder.sum()
            numbers = torch.stack([residual[tokens[child]], draft_probs[tokens[child]], mass])
            target_prob, draft_prob, remains = to_host([numbers])[0].unbind()
            if target_prob.isnan():
                return path, NAN
            if not draft_prob > 0:
                break  # the draft's probs have underflowed, for this sibling and for later ones
            # nothing remains only if both distributions are equal and rounding alone kept the odds below one
            if coin(min(1.0, float(target_prob / (lenience * draft_prob)))) or not remains > 0:
                accepted = child
                break
            residual = remainder / mass
            rejected.append(tokens[child])
        if accepted is None:
            return path, pick(residual)
        path.append(accepted)


def _remove_tokens(probs: Tensor, tokens: list[int]) -> Tensor:
    """The probs [V] without these tokens, renormalised."""
    if not tokens:
        return probs
    rest = probs.index_fill(0, upload(torch.tensor(tokens), probs.device), 0)
    return rest / rest.sum()


def sample_block(tree: DraftTree, target_probs: Probs, coin: Coin, pick: Pick) -> tuple[list[int], int]:
    """Block verification of a sampled chain (Sun et al. 2024): exact, and on average it accepts at least as many."""
    assert tree.draft_probs is not None
    last = len(tree) - 1
    if tree.parents.tolist() != list(range(-1, last)):
        raise ValueError("block verification is defined for chains: got a tree with branches; use rule='token'")
    tokens = tree.tokens.tolist()
    target = [target_probs(node) for node in range(last + 1)]
    draft = tree.draft_probs.to(target[0])
    weights, remainders = [torch.ones_like(target[0][0])], []
    for node in range(1, last + 1):
        remainders.append((weights[-1] * target[node - 1] - draft[node]).clamp_(min=0))
        token = tokens[node]
        weights.append((weights[-1] * target[node - 1][token] / draft[node][token]).clamp(max=1))
    masses = [remainder.sum() for remainder in remainders]
    mass, weight = to_host([torch.stack([*masses, *weights])])[0].split([last, last + 1])
    if mass.isnan().any():
        return [0], NAN
    for node in range(last, 0, -1):
        if node == last:
            odds = weight[last]
        else:
            odds = mass[node] / (mass[node] + 1 - weight[node]) if mass[node] > 0 else mass[node]
        if coin(float(odds)):
            break
    else:
        node = 0
    if node == last:
        return list(range(node + 1)), pick(target[last])
    return list(range(node + 1)), pick(remainders[node] / masses[node] if mass[node] > 0 else target[node])


def walk_leniently(tree: DraftTree, target_probs: Probs, lenience: float) -> tuple[list[int], int]:
    """Greedy with lenience (lossy): step to the likeliest child of at least `lenience` times the top probability."""
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    while True:
        probs, nodes = target_probs(path[-1]), children[path[-1]]
        drafted = upload(torch.tensor([tokens[node] for node in nodes], dtype=torch.long), probs.device)
        best, *drafted_probs = to_host([torch.cat([probs.amax(0, keepdim=True), probs[drafted]])])[0].tolist()
        if best != best:
            return path, NAN
        if not nodes or max(drafted_probs) < lenience * best:
            return path, int(to_host([probs.argmax()])[0])
        path.append(nodes[drafted_probs.index(max(drafted_probs))])
