"""Verification: which drafted tokens are accepted, decided by the target's probabilities alone.

Lossless rules keep the distribution of plain decoding. Greedy decoding and position-keyed noise choose the same token
whatever was drafted, so a draft can only be right or wrong (`walk`). Sampled drafts are accepted by chance
(`sample_tree`, `sample_block`), such that accepted and replaced tokens together follow the target's distribution.
"""

# N nodes of a tree, K of these nodes, V vocabulary

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock

import torch
from torch import Tensor

from eagle.core.noise import DrafterNoise, Noise, fill_rows, mix64
from eagle.core.row_errors import run_rows
from eagle.core.sampling import Sampling, in_fp32, penalise, penalise_nodes, warp
from eagle.core.tree import DraftTree, TargetOutput
from eagle.device import must_wait, pick_rows, to_host, upload

Coin = Callable[[float], bool]
"""Probability -> True with that probability."""
Pick = Callable[[Tensor], int]
"""[V] probabilities -> a token sampled from them."""
Probs = Callable[[int], Tensor]
"""Node -> [V], the target's probabilities of the token after it."""
Process = Callable[[TargetOutput, Sequence[int]], Tensor]
"""Output and nodes -> [K, V], changed logits after these nodes."""

NAN = -(2**40)  # returned in place of a token id where the logits are nan; no token has this id
COUNTING = Lock()  # guards `uses`: two threads that got the same count would toss the same coins
ENTROPY_SHIFT = 1e-5  # added to a probability before its logarithm, as in Medusa's code


class Choose:
    """The target's choice after a node, from its logits and noise that does not depend on drafts."""

    def __init__(
        self,
        sampling: Sampling,
        uses: Counter[tuple[int, int]] | None = None,
        *,
        drawn: bool = False,
        process: Process | None = None,
    ) -> None:
        """Make the chooser of one request's tokens, with its noise if the temperature is above 0.

        Args:
            sampling: How the target samples.
            uses: How often each (seed, request number) was used; shared by all requests to a target.
            drawn: Whether drafts are sampled (`Budget.draw`). Drafters and policies may remember tokens that depend on
                the noise of earlier requests, so such a request gets noise and coins from `private_seed`, which no
                earlier request had. Coins are the random numbers that accept or reject a sampled draft.
            process: Replaces the sampling's penalty, temperature and filters. The fields of the sampling then only
                tell drafters roughly what it does.
        """
        self.sampling = sampling
        self.process = process
        self.uses = Counter() if uses is None else uses
        self.noise: Noise | None = None
        if sampling.temperature > 0:
            # hashed twice, as the drafter's own noise (`DrafterNoise.private`) has the private seed hashed once: drafts
            # that shared the target's noise would bias the output
            seed = mix64(mix64(self.private_seed)) if drawn else sampling.seed
            self.noise = Noise(seed, sampling.request)

    @cached_property
    def private_seed(self) -> int:
        """A seed that differs at each use of the same seed and request, so that no coin repeats.

        A coin is a random number that accepts or rejects a sampled draft. It must not depend on noise that drafts saw.
        """
        # the first use has the seed itself, so that the same request in a new process has the same answer
        seed = self.sampling.seed
        key = (seed, self.sampling.request)
        with COUNTING:
            self.uses[key] += 1
            use = self.uses[key]
        return seed if use == 1 else mix64(mix64(seed) + use)

    @cached_property
    def dice(self) -> random.Random:
        """The random generator of `coin` and `pick`, which verify sampled drafts.

        Coins accept or reject a drafted token, and picks sample the token after the accepted ones.
        """
        return random.Random(mix64(mix64(self.private_seed) ^ self.sampling.request))

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        """Return the token that the target chooses after each of these nodes, on the host; `NAN` where logits are nan.

        Args:
            output: The target's output on a draft tree.
            nodes: Nodes of the tree.
        """
        return to_host([self.pick_tokens(output, nodes)])[0].tolist()

    def pick_tokens(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return the tokens chosen after K nodes of a tree, [K], on the logits' device; `NAN` where these are nan."""
        if self.noise is None or must_wait(output.logits.device):
            return _pick_best(self._score(output, nodes))
        # on a CPU, `Noise.pick` makes noise only for tokens that can still win
        tokens = []
        for row, node in zip(self.logits_after(output, nodes), nodes, strict=True):
            token = self.noise.pick(row, output.positions[node])
            tokens.append(NAN if token is None else token)
        return torch.tensor(tokens)

    def pick_on_device(
        self, output: TargetOutput, tokens: Tensor, tree_mask: Tensor, depths: Tensor
    ) -> Tensor:
        """Return the tokens [N] chosen after all nodes of a tree that is on the device, without a transfer.

        Trees that were grown on a device are verified there, and the host waits once a cycle.

        Args:
            output: The target's output on the tree.
            tokens: [N], of the tree's N nodes, the root first.
            tree_mask: [N, N] bool, row i marks node i and its ancestors.
            depths: [N], the steps of each node from the root.
        """
        logits = in_fp32(output.logits)
        penalty = self.sampling.repetition_penalty
        if penalty != 1:
            logits = penalise_nodes(logits, output.sequence, tokens, tree_mask, penalty)
        if self.noise is None:
            return _pick_best(logits)
        # noise depends on the position alone, and all nodes of a level choose for the same one: a row for each level
        first = output.start + 1
        noise = self.noise(
            range(first, first + output.tree.levels + 1), logits.shape[-1], logits.device
        )
        return _pick_best(warp(logits, self.sampling) + noise.index_select(0, depths))

    def rank_tokens(self, output: TargetOutput, count: int) -> Tensor:
        """Return the target's best tokens after each of a tree's N nodes, [N, count], for drafters that read them.

        Its choice comes first, because the tokens are ranked with the noise that it samples with.
        """
        scores = self._score(output, range(len(output.tree)))
        return scores.topk(min(count, scores.shape[-1])).indices

    def _score(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return scores of all V tokens after K nodes of a tree, [K, V]; the maximum of a row is the target's choice.

        Gumbel-max: argmax(log p + Gumbel noise) is a sample of p. The noise is a function of the position alone, so the
        choice at a position does not depend on what was drafted.
        """
        logits = self.logits_after(output, nodes)
        if self.noise is None:
            return logits
        all_positions = output.positions
        positions = [all_positions[node] for node in nodes]
        return logits + self.noise(positions, logits.shape[-1], logits.device)

    def logits_after(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return logits of V tokens after K nodes, [K, V]: the target samples from their softmax, or takes the best.

        Penalty, temperature and filters are applied, or `process` in place of all of them.
        """
        logits = self._penalise(output, nodes)
        # `process` has filtered already, and a greedy target needs no filters
        if self.process is not None or self.noise is None:
            return logits
        return warp(logits, self.sampling)

    def offer(self, vocab_size: int, device: torch.device) -> DrafterNoise | None:
        """Return the noise and filters that the drafter of this request may use; None for a greedy target.

        A drafter that adds the target's noise to its own logits proposes the token that the target will sample more
        often.
        """
        return None if self.noise is None else DrafterNoise(self, vocab_size, device)

    def probs(self, output: TargetOutput, node: int) -> Tensor:
        """Return the target's probabilities of all V tokens after a node, [V], by which drafts are accepted."""
        if self.sampling.temperature > 0:
            return self.probs_after(output, [node])[0]
        logits = self._penalise(output, [node])[0]
        # lenient greedy verification compares probabilities with that of the best token
        if self.sampling.lenience < 1:
            return logits.softmax(-1)
        # greedy decoding is the distribution with all probability on one token
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1)

    def probs_after(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return the probabilities of V tokens that the target samples from after K nodes of a tree, [K, V]."""
        return self.logits_after(output, nodes).softmax(-1)

    def coin(self, probability: float) -> bool:
        """Toss a coin that is True with this probability."""
        return self.dice.random() < probability

    def pick(self, probs: Tensor) -> int:
        """Sample a token from probabilities [V], with the random numbers of `dice`; `NAN` if they are nan.

        They need not sum to exactly 1.
        """
        # inversion: the first token whose cumulative probability exceeds a uniform number. Only it is transferred.
        cumulative = probs.cumsum(-1)
        total = cumulative[-1:]
        token = torch.searchsorted(cumulative, self.dice.random() * total, right=True)
        # by rounding the number may exceed every cumulative probability: take the last token with a probability above 0
        last = len(probs) - 1 - (probs.flip(0) > 0).int().argmax()
        token = torch.minimum(token, last).masked_fill_(total.isnan(), NAN)
        return int(to_host([token])[0])

    def _penalise(self, output: TargetOutput, nodes: Sequence[int]) -> Tensor:
        """Return the logits of V tokens after K nodes, [K, V], after the repetition penalty, in fp32 or fp64.

        With a `process` they are what it makes of them.
        """
        if self.process is not None:
            return self.process(output, nodes)
        logits = in_fp32(pick_rows(output.logits, nodes))
        penalty = self.sampling.repetition_penalty
        if penalty == 1:
            return logits
        # each node has another path, and so other repeated tokens
        rows = []
        for row, node in zip(logits, nodes, strict=True):
            rows.append(penalise(row, output.prefix(node), penalty))
        return torch.stack(rows)


def _pick_best(scores: Tensor) -> Tensor:
    """Return the token of the highest score after each of K nodes, [K], from scores [K, V]; `NAN` for nan."""
    # argmax returns the index of a nan if a row holds one
    tokens = scores.argmax(-1, keepdim=True)
    is_nan = scores.gather(-1, tokens).isnan()
    return tokens.masked_fill_(is_nan, NAN)[:, 0]


def verify_rows(rows: Sequence[tuple[TargetOutput, Choose]]) -> list[tuple[list[int], int]]:
    """Verify the trees of several sequences; the target's choices are copied from the device in one transfer.

    Args:
        rows: The target's output on each sequence's tree, and how it chooses.

    Returns:
        Of each sequence the accepted nodes, the root first, and the target's token after them.

    Raises:
        RowErrors: If only some of them fail, with results and errors by index.
    """
    # Where acceptance depends on the target's choices alone (`_is_walked`), those of all rows are read now, in one
    # transfer. A single row gains nothing by that, and on a CPU choices are better made lazily.
    choices_by_row: dict[int, list[int]] = {}
    if len(rows) > 1:
        at_once = [
            row for row, pair in enumerate(rows) if _is_walked(*pair) and not _is_lazy(pair[0])
        ]
        _fill_noise([rows[row] for row in at_once])
        tokens = []
        for row in at_once:
            output, choose = rows[row]
            tokens.append(choose.pick_tokens(output, range(len(output.tree))))
        for row, choices in zip(at_once, to_host(tokens), strict=True):
            choices_by_row[row] = choices.tolist()

    def verify_row(row: int) -> tuple[list[int], int]:
        """Return the accepted nodes of a row (sequence) and the target's token after them.

        The target's choices are used if they were read already.
        """
        output, choose = rows[row]
        return verify(output, choose, choices_by_row.get(row))

    return [*run_rows(range(len(rows)), verify_row).values()]


def _fill_noise(rows: Sequence[tuple[TargetOutput, Choose]]) -> None:
    """Make and cache the noise of all sampled rows (sequences) at once, which `Choose` then finds.

    On a device, the noise of one row takes as many kernels as that of all rows together.

    Args:
        rows: The target's output on each sequence's tree, and how it chooses.
    """
    requests = [
        (choose.noise, output.positions) for output, choose in rows if choose.noise is not None
    ]
    if requests:
        logits = rows[0][0].logits
        fill_rows(requests, logits.shape[-1], logits.device)


def verify(
    output: TargetOutput, choose: Choose, choices: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """Return the accepted nodes, the root first, and the target's token after them; ValueError if logits are nan.

    Args:
        output: The target's output on a draft tree.
        choose: How the target chooses. It drops the noise that it has cached for committed positions.
        choices: The target's choice after every node, if it was computed already.
    """
    # positions up to the root are committed: no token is chosen there again
    if choose.noise is not None:
        choose.noise.forget(output.start + 1)
    path, following = _apply_rule(output, choose, choices)
    check_choice(following, output, len(path))
    return path, following


def _apply_rule(
    output: TargetOutput, choose: Choose, choices: Sequence[int] | None
) -> tuple[list[int], int]:
    """Return the accepted nodes, the root first, and the token after them, by the rule of the tree and the sampling.

    Args:
        output: The target's output on a draft tree.
        choose: How the target chooses.
        choices: The target's choice after every node; None if it was not computed yet.
    """
    tree = output.tree
    sampling = choose.sampling
    if sampling.typical is not None:
        path = walk_typically(tree, partial(choose.probs_after, output), sampling.typical)
        # the target chooses the token after the last accepted node itself
        return path, choose(output, path[-1:])[0]

    # a sampled draft is accepted by chance, from both models' probabilities; any other draft is right or wrong
    target_probs = partial(choose.probs, output)
    if tree.draft_probs is not None:
        # whole paths, by default; lenience is defined for single tokens
        if sampling.rule != "token" and sampling.lenience == 1:
            return sample_block(tree, target_probs, choose.coin, choose.pick)
        return sample_tree(tree, target_probs, choose.coin, choose.pick, lenience=sampling.lenience)
    if sampling.lenience < 1:
        if sampling.temperature > 0:
            raise ValueError(
                "lenience at temperature > 0 needs sampled drafts (Budget.draw); use lenience=1"
            )
        return walk_leniently(tree, target_probs, sampling.lenience)

    # node -> the target's token after it
    chosen = _Choices(output, choose) if choices is None else choices
    path = walk(tree, chosen)
    return path, chosen[path[-1]]


def check_choice(token: int, output: TargetOutput, accepted: int) -> None:
    """Raise an error if the target's token is `NAN`, a number that stands for logits that are nan.

    Args:
        token: The token that follows the accepted path.
        output: The target's output, for the message.
        accepted: The number of nodes of the accepted path, the root included.
    """
    if token == NAN:
        dtype = str(output.logits.dtype).removeprefix("torch.")
        raise ValueError(
            f"the target's logits are nan after {output.start + accepted} tokens: its states overflow in "
            f"{dtype}, or its weights are damaged; load it in float32 to see"
        )


def _is_walked(output: TargetOutput, choose: Choose) -> bool:
    """Return whether a tree is verified by `walk`, which steps from node to node along the target's choices.

    So it is for drafts that were not sampled, under a lossless rule. That needs no probabilities.
    """
    return output.tree.draft_probs is None and choose.sampling.is_lossless


def _is_lazy(output: TargetOutput) -> bool:
    """Return whether to make the target's choices node by node, as a walk down the tree asks for them.

    On a CPU, noise and argmax over the vocabulary are slow, and a walk needs them at few nodes. On a device, all nodes
    cost as much as one.
    """
    return not must_wait(output.logits.device)


class _Choices(dict[int, int]):
    """The target's choices by node, computed for all nodes at once, or lazily on a CPU."""

    def __init__(self, output: TargetOutput, choose: Choose) -> None:
        """Begin without choices: `__missing__` makes the target's choice after a node when it is asked for."""
        super().__init__()
        self.output = output
        self.choose = choose

    def __missing__(self, node: int) -> int:
        """Return the target's choice after a node that is asked for first, and keep it."""
        # a walk asks only for the nodes on the accepted path, which are few of the tree
        nodes = [node] if _is_lazy(self.output) else list(range(len(self.output.tree)))
        self.update(zip(nodes, self.choose(self.output, nodes), strict=True))
        return self[node]


def walk(tree: DraftTree, choices: Sequence[int] | dict[int, int]) -> list[int]:
    """Return the accepted nodes, the root first: from the root, step to the child that equals the target's choice.

    Args:
        tree: The draft.
        choices: Node -> the token that the target chooses after it, as a list over all nodes or a dict.
    """
    parents = tree.parents.tolist()
    tokens = tree.tokens.tolist()
    # parent and token -> node
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    path = [0]
    while True:
        child = children.get((path[-1], choices[path[-1]]))
        if child is None:
            return path
        path.append(child)


def sample_tree(
    tree: DraftTree, target_probs: Probs, coin: Coin, pick: Pick, lenience: float = 1.0
) -> tuple[list[int], int]:
    """Verify siblings that were sampled without replacement, by speculative sampling.

    Leviathan et al. 2023 and Chen et al. 2023 for one child, SpecInfer (Miao et al. 2023) for several. With target p
    and draft q, child x is accepted with probability min(1, p(x) / q(x)). If it is rejected, the token must come from
    max(p - q, 0), normalised, which takes the place of p for the next sibling. In sum x is emitted with probability
    min(p, q) + (p - min(p, q)) = p.

    Args:
        tree: The draft, with the distribution that each node was sampled from.
        target_probs: Node -> p, the target's probabilities [V] of V tokens after it.
        coin: Probability -> True with that probability.
        pick: Probabilities [V] -> a token sampled from them.
        lenience: A factor on q: below 1 more drafts are accepted, and the output no longer follows p.

    Returns:
        The accepted nodes, the root first, and the token after them; `NAN` in its place if the target's logits are nan.
    """
    assert tree.draft_probs is not None
    tokens = tree.tokens.tolist()
    children = tree.children()
    path = [0]
    while True:
        # [V]: what the token must follow, given the siblings that were rejected so far
        residual = target_probs(path[-1])
        accepted = None  # the accepted child of the last node
        rejected: list[int] = []
        for child in children[path[-1]]:
            token = tokens[child]
            draft_probs = _remove_tokens(tree.draft_probs[child].to(residual), rejected)
            remainder = (residual - lenience * draft_probs).clamp_(min=0)
            mass = remainder.sum()
            # everything that the coin depends on is read in one transfer
            values = torch.stack([residual[token], draft_probs[token], mass])
            target_prob, draft_prob, remains = to_host([values])[0].unbind()
            if target_prob.isnan():
                return path, NAN
            if not draft_prob > 0:
                # the draft's probabilities have underflowed, for this sibling and for the later ones
                break
            # Accepted with probability min(1, p / q). A lenience below 1 raises this probability, which is lossy.
            # If nothing remains, both distributions are equal and only rounding has kept p / q below 1.
            if coin(min(1.0, float(target_prob / (lenience * draft_prob)))) or not remains > 0:
                accepted = child
                break
            residual = remainder / mass
            rejected.append(token)
        if accepted is None:
            # every child was rejected: the token comes from what they left
            return path, pick(residual)
        path.append(accepted)


def _remove_tokens(probs: Tensor, tokens: list[int]) -> Tensor:
    """Return probabilities [V] of V tokens with those of some tokens set to 0, renormalised to sum to 1.

    So the k-th sibling was sampled, after k - 1 others.
    """
    if not tokens:
        return probs
    # siblings are sampled without replacement: the k-th was sampled from q without the tokens of those before it
    rest = probs.index_fill(0, upload(torch.tensor(tokens), probs.device), 0)
    return rest / rest.sum()


def sample_block(
    tree: DraftTree, target_probs: Probs, coin: Coin, pick: Pick
) -> tuple[list[int], int]:
    """Verify whole paths of sampled drafts: exact, and on average it accepts at least as many as `sample_tree`.

    Traversal verification (arXiv 2505.12398), which on a chain is block verification (Sun et al. 2024, arXiv
    2403.10444). Let w(u) be the weight of node u, p the target and q the draft after it:

        w(root) = 1,  w(child x of u) = min(1, w(u) p(x) / q(x))

    The first leaf is kept, with all nodes before it, with probability w(leaf). If it is not, it is removed, and what
    its parent u owes changes:

        r = max(0, w(u) p - q),  p <- r / |r|,  q <- q without the removed token,  w(u) <- |r| / (|r| + 1 - w(u))

    A node without children left is a leaf itself. The root always is kept. `target_probs` is node -> p, [V], `coin` a
    probability -> True with that probability, and `pick` probabilities [V] -> a sampled token. The result is the
    accepted nodes, the root first, and the token after them.
    """
    children = tree.children()
    law = target_probs(0)
    # the nodes from the root to the leaf that is judged now; `law` is p and `proposal` is q, which the root lacks
    path = [_Step(0, 1.0, law, proposal=law, untried=children[0])]
    while True:
        # appends to the path the nodes down to the next leaf
        _lengthen(path, tree, children, target_probs)
        last = path[-1]
        nodes = [step.node for step in path]
        # only nan differs from itself
        if last.weight != last.weight:
            return nodes[:-1], NAN
        if len(path) == 1 or coin(last.weight):
            return nodes, pick(last.law)
        parent = path[-2]
        remainder = (parent.weight * parent.law - last.proposal).clamp_(min=0)
        mass = float(to_host([remainder.sum()])[0])
        if mass > 0:
            parent.law = remainder / mass
            parent.removed.append(int(tree.tokens[last.node]))
            parent.weight = mass / (mass + 1 - parent.weight)
        else:
            # nothing remains: draft and target are equal here up to rounding, or the weight is 0
            parent.untried.clear()
            parent.weight = 0.0
        path.pop()


@dataclass
class _Step:
    """A node of the path that `sample_block` judges."""

    node: int
    weight: float  # w
    law: Tensor  # [V], p: what the token after the node must follow
    proposal: Tensor  # [V], q: what the node was sampled from; the root's is never read
    untried: list[int]  # its children that were not tried yet, in order
    removed: list[int] = field(default_factory=list)  # the tokens of its removed children


def _lengthen(
    path: list[_Step], tree: DraftTree, children: list[list[int]], target_probs: Probs
) -> None:
    """Append the nodes from the end of a path to the first leaf below it, with their weights w, in place.

    A weight is nan where the target's probabilities are; the path then ends there.

    Args:
        path: The steps of `sample_block` from the root on. Their children on the way are no longer untried.
        tree: The sampled draft.
        children: The children of each node.
        target_probs: Node -> the target's probabilities [V] of V tokens after it.
    """
    assert tree.draft_probs is not None
    start = len(path)
    pairs = []  # of each new node in turn: the probability of its token by target and draft, two scalars
    while path[-1].untried:
        parent = path[-1]
        node = parent.untried.pop(0)
        token = tree.tokens[node]
        draft_probs = tree.draft_probs[node].to(parent.law)
        proposal = _remove_tokens(draft_probs, parent.removed)
        pairs += [parent.law[token], proposal[token]]
        path.append(_Step(node, 1.0, target_probs(node), proposal, untried=children[node]))
    if not pairs:
        return
    # everything that the weights depend on is read in one transfer
    values = to_host([torch.stack(pairs)])[0].tolist()
    probs = zip(values[::2], values[1::2], strict=True)
    for i, (target_prob, draft_prob) in enumerate(probs, start=start):
        if not draft_prob > 0:
            # the draft's probability has underflowed: this token and its later siblings count as not drafted
            path[i - 1].untried.clear()
            del path[i:]
            return
        path[i].weight = min(path[i - 1].weight * target_prob / draft_prob, 1.0)
        # only nan differs from itself
        if target_prob != target_prob:
            del path[i + 1 :]
            return


def walk_leniently(tree: DraftTree, target_probs: Probs, lenience: float) -> tuple[list[int], int]:
    """Verify greedily with lenience (lossy): step to the likeliest child of at least `lenience` times the best.

    Args:
        tree: The draft.
        target_probs: Node -> the target's probabilities [V] of V tokens after it.
        lenience: The least ratio, up to 1, of an accepted token's probability to that of the likeliest token.

    Returns:
        The accepted nodes, the root first, and the likeliest token after them; `NAN` if the target's logits are nan.
    """
    tokens = tree.tokens.tolist()
    children = tree.children()
    path = [0]
    while True:
        probs = target_probs(path[-1])
        nodes = children[path[-1]]
        child_tokens = torch.tensor([tokens[node] for node in nodes], dtype=torch.long)
        child_probs = probs[upload(child_tokens, probs.device)]
        # the best probability and those of the children are read in one transfer
        values = to_host([torch.cat([probs.amax(0, keepdim=True), child_probs])])[0].tolist()
        best = values[0]
        drafted = values[1:]
        # only nan differs from itself
        if best != best:
            return path, NAN
        if not nodes or max(drafted) < lenience * best:
            return path, int(to_host([probs.argmax()])[0])
        path.append(nodes[drafted.index(max(drafted))])


def walk_typically(
    tree: DraftTree,
    target_probs: Callable[[Sequence[int]], Tensor],
    bounds: tuple[float, float],
) -> list[int]:
    """Verify by typical acceptance (Cai et al. 2024, arXiv 2401.10774), which is lossy.

    Args:
        tree: The draft.
        target_probs: K nodes -> [K, V], the target's probabilities of V tokens after them.
        bounds: Epsilon and delta, from which `typical_floors` makes the thresholds.

    Returns:
        The longest path of tokens above the threshold, the likeliest one of equal length: its nodes, the root first.
    """
    if tree.draft_probs is not None:
        raise ValueError(
            "typical acceptance asks the target alone: got sampled drafts, use Budget(draw='likeliest')"
        )
    # the root alone: nothing was drafted
    if len(tree) == 1:
        return [0]
    # inner [K]: the nodes with children, for which probabilities are computed once; rows [N - 1]: the index in `inner`
    # of each draft node's parent
    inner, rows = tree.parents[1:].unique(return_inverse=True)
    probs = target_probs(inner.tolist())
    rows, tokens = upload(torch.stack([rows, tree.tokens[1:]]), probs.device)
    # [2, N - 1], the probability of each draft token, and the threshold that it must exceed
    values = torch.stack([probs[rows, tokens], typical_floors(probs, *bounds)[rows]])
    child_probs, child_floors = to_host([values])[0].tolist()

    ranks = {0: (0, 1.0)}  # accepted node -> length and probability of its path
    for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
        prob = child_probs[node - 1]
        if parent in ranks and prob > child_floors[node - 1]:
            length, likelihood = ranks[parent]
            ranks[node] = (length + 1, likelihood * prob)
    # the longest path; of equal lengths the most likely one
    return tree.path(max(ranks, key=ranks.__getitem__))


def typical_floors(probs: Tensor, epsilon: float, delta: float) -> Tensor:
    """Return the threshold of typical acceptance, which a token's probability must exceed, after K nodes: [K].

    min(epsilon, delta * exp(-entropy)): where the target is unsure, less likely tokens are accepted.

    Args:
        probs: [K, V], the target's probabilities of V tokens after these nodes.
        epsilon: The highest threshold.
        delta: The factor of exp(-entropy), where entropy = -sum p log p in nats.
    """
    entropy = -(probs * (probs + ENTROPY_SHIFT).log()).sum(-1)
    return (delta * (-entropy).exp()).clamp(max=epsilon)
