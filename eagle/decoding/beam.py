"""Beam search with the results of transformers' own; one forward reads the drafts of all beams."""

# W beams, N nodes of a forward, R columns behind the shared text, C candidates of a node, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nlargest
from typing import Any, get_args

import torch
from torch import Tensor

from eagle.core.arguments import check_call, positive_int, token_ids
from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter
from eagle.core.sampling import number
from eagle.core.tree import DraftTree
from eagle.core.verify import Sampling
from eagle.decoding.beam_state import BeamState, EarlyStopping
from eagle.decoding.stops import stops_for
from eagle.decoding.trie import Trie
from eagle.device import pick_rows, to_host, upload
from eagle.target.target import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Tokens [W, T] and log-probs [W, V] -> log-probs, as a LogitsProcessor of transformers."""

MOST_LOG = 80.0  # of a power of a length, by which scores in fp32 are divided
ROW = 0  # of the target's state: the text that all beams share


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The best answers, best first, with the numbers of steps and forwards."""

    tokens: list[list[int]]  # of each answer, its end token included
    scores: list[float]  # sums of log-probs, over the length to the power of the length penalty
    steps: int  # tokens by which the beams grew
    forwards: int  # of the target, after the prompt's
    near_ties: int  # steps in which rounding might have chosen otherwise

    @property
    def steps_per_forward(self) -> float:
        """Steps per forward, without the prompt's forward and the first step."""
        return (self.steps - 1) / self.forwards if self.forwards else 0.0


def beam_search(
    target: Target,
    drafter: Drafter,
    prompt: Any,
    *,
    beams: int = 4,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    max_new_tokens: int = 128,
    stop: Any = None,
    processors: Iterable[Processor] = (),
    budget: Budget | None = None,
) -> BeamResult:
    """Beam search with the answers of transformers' `generate(num_beams=...)`, in fewer forwards.

    `budget` is for all beams of one forward: its nodes are spread evenly over its levels. `processors`
    change log-probs as transformers' LogitsProcessor objects do. `stop` is as in `generate`.
    """
    tokens, limit = token_ids(prompt), positive_int("max_new_tokens", max_new_tokens)
    beams = positive_int("beams", beams)
    budget = Budget(12 * beams, 3, 2 * beams, sharpness=1.0) if budget is None else budget
    check_call(target, drafter, Sampling(), budget)
    _check_options(drafter, beams, early_stopping, positive_int("num_return_sequences", num_return_sequences), budget)
    target.check_prompt(tokens)
    if limit > (room := target.room(tokens)):
        raise ValueError(
            f"{len(tokens)} prompt tokens and {limit} new ones exceed what the model reads in one text: lower "
            f"max_new_tokens to {room} or shorten the prompt"
        )
    state = BeamState(beams, stops_for(target, stop), limit, check_penalty(length_penalty, limit), early_stopping)
    search = _Search(target, drafter, tokens, state, check_processors(processors), budget)
    try:
        search.run()
    finally:
        target.close(search.texts)
    answers, scores = state.answers[:num_return_sequences], state.answer_scores[:num_return_sequences].tolist()
    return BeamResult(answers, scores, state.steps, search.forwards, state.near_ties)


def _check_options(drafter: Drafter, beams: int, early_stopping: Any, returned: int, budget: Any) -> None:
    """Refuse options with which no search is possible."""
    if returned > beams:
        raise ValueError(f"num_return_sequences is {returned}, expected at most {beams} as beams: raise beams")
    if not isinstance(early_stopping, bool) and early_stopping not in get_args(get_args(EarlyStopping)[1]):
        raise ValueError(f"early_stopping is {early_stopping!r}, expected True, False or 'never'")
    if not isinstance(budget, Budget):
        raise ValueError(
            "the budget is a policy, which counts accepted tokens of one text: pass a Budget, as Budget(24, 3)"
        )
    if drafter.reads.texts:
        raise ValueError(
            f"{type(drafter).__name__} drafts behind the target's own text, which all beams share: pass a drafter "
            "that does without"
        )


def check_penalty(value: Any, limit: int) -> float:
    """The length penalty as a float, if scores of `limit` tokens can be divided by it."""
    penalty = number("length_penalty", value)
    if abs(penalty) * math.log(limit) > MOST_LOG:
        raise ValueError(
            f"length_penalty is {penalty:g}, and {limit} tokens to that power are no float32: expected at most "
            f"{MOST_LOG / math.log(limit):.1f} either way"
        )
    return penalty


def check_processors(processors: Any) -> tuple[Processor, ...]:
    """The processors as a tuple; ValueError for what cannot be called."""
    if isinstance(processors, str) or not isinstance(processors, Iterable):
        raise ValueError(f"processors is {processors!r}, expected a list of functions of tokens and log-probs")
    listed = tuple(processors)
    if wrong := [processor for processor in listed if not callable(processor)]:
        raise ValueError(f"processors holds {wrong[0]!r}, expected functions of tokens [W, T] and log-probs [W, V]")
    return listed


class _Search:
    """The search of one prompt: the shared text is one row of the target's state, the beams are a trie after it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        beams: BeamState,
        processors: tuple[Processor, ...],
        budget: Budget,
    ) -> None:
        self.target, self.prompt, self.beams, self.processors = target, prompt, beams, processors
        self.budget, self.width = budget, max(budget.nodes // max(budget.depth, 1), 1)
        if drafter.reads.view:
            drafter.bind_target(target.view())
        self.texts = target.open(drafter.taps)
        self.drafts = drafter.open()
        if not hasattr(self.drafts, "fork"):
            raise ValueError(
                f"{type(self.drafts).__name__} has no fork, which beams that part need: write fork(row, other), after "
                "which both rows go on from the same text"
            )
        self.rows = [0] * len(beams.texts)  # of each beam in the drafter's state
        self.unused = 1  # the first number that no row has had
        self.read_tokens = 0  # of every row, by the drafter
        self.trie = Trie()
        self.leaves = [-1] * len(beams.texts)  # the last node of each beam that the target has read
        self.forwards = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Step until the search is over."""
        limit, drafted = self.beams.limit, self.budget.nodes + len(self.leaves)
        self.texts.admit(ROW, self.prompt, limit + drafted)
        outputs = self.texts.finish_prompts()
        self.drafts.admit(0)
        self._tell_prompt()
        self._step(outputs[ROW].output.logits, self.leaves, -1)
        while not self.beams.is_done:
            self._read_drafts()
        for row in dict.fromkeys(self.rows):
            self.drafts.release(row)

    def _tell_prompt(self) -> None:
        """Let the drafter read the shared text once, before the beams split."""
        if len(self.rows) > 1 and len(self.prompt) > 1 and not self.budget.is_empty:
            self.read_tokens = len(self.prompt) - 1
            features = self.texts.features_at(ROW, range(self.read_tokens))
            update = Committed(torch.tensor(self.prompt[:-1]), features, self.prompt[-1])
            self.drafts.propose({0: update}, {0: Budget(1, 1, 1)})

    def _read_drafts(self) -> None:
        """Run one forward over each beam's last token and its draft, then all beam-search steps that it allows."""
        trie, first = self.trie, len(self.trie)
        trees = self._draft()
        nodes = [trie.add(leaf, text[-1]) for leaf, text in zip(self.leaves, self.beams.texts, strict=True)]
        self._plant(nodes, trees)
        tokens = torch.tensor([trie.tokens[first:]])
        logits = self.texts.ahead([ROW], tokens, trie.depths, trie.seen(first)[None])[0]
        self.forwards += 1
        self._step(logits, nodes, first)

    def _draft(self) -> list[DraftTree]:
        """A draft tree for each beam; none if the next token is the last."""
        texts = self.beams.texts
        budget = self.budget.within(self.beams.limit - len(texts[0]) - 1)
        if budget.is_empty:
            return []
        shared, updates = self.texts.length(ROW), {}
        for row, text, leaf in zip(self.rows, texts, self.leaves, strict=True):
            columns = [*range(shared), *(shared + node for node in self.trie.path(leaf))][self.read_tokens :]
            features = self.texts.features_at(ROW, columns)
            tokens = torch.tensor([*self.prompt, *text][self.read_tokens : -1])
            updates[row] = Committed(tokens, features, text[-1])
        self.read_tokens = len(self.prompt) + len(texts[0]) - 1
        trees = self.drafts.propose(updates, dict.fromkeys(updates, budget))
        return [trees[row] for row in self.rows]

    def _plant(self, nodes: list[int], trees: list[DraftTree]) -> None:
        """Add the likeliest drafts of each level to the trie, ranked by the scores of beam and path together."""
        ends, likelihoods = self.beams.stops.tokens, list[list[float]]()
        for tree, score in zip(trees, self.beams.scores.tolist(), strict=False):
            likely = [0.0] * len(tree) if tree.likelihoods is None else tree.likelihoods.tolist()
            likelihoods.append([score + value for value in likely])
        tokens, children = [tree.tokens.tolist() for tree in trees], [tree.children() for tree in trees]
        level = [(number, 0, nodes[number]) for number in range(len(trees))]
        while level:
            grown = [
                (likelihoods[number][child], number, child, above)
                for number, node, above in level
                for child in children[number][node]
                if tokens[number][child] not in ends  # which no beam goes on from
            ]
            best = nlargest(self.width, grown)
            level = [(number, child, self.trie.add(above, tokens[number][child])) for _, number, child, above in best]

    def _step(self, logits: Tensor, nodes: list[int], first: int) -> None:
        """Step from these nodes while the target's forward covers all beams; `logits[0]` belongs to node `first`."""
        beams, log_probs = self.beams, logits.float().log_softmax(-1)
        ranked = None if self.processors else self._rank(log_probs)
        origins, following = list(range(len(nodes))), list[int | None](nodes)
        while None not in following:
            nodes = [node for node in following if node is not None]
            rows = [node - first for node in nodes]
            if ranked is None:  # what is changed depends on the beams, in their order
                values, tokens = self._rank(self._process(pick_rows(log_probs, rows)))
            else:
                values, tokens = (part[rows] for part in ranked)
            parents = beams.step(values, tokens)
            origins, self.leaves = [origins[beam] for beam in parents], [nodes[beam] for beam in parents]
            ends = zip(self.leaves, beams.texts, strict=True)
            following = [None if beams.is_done else self.trie.children.get((leaf, text[-1])) for leaf, text in ends]
        self._part(origins)
        self._drop()

    def _process(self, log_probs: Tensor) -> Tensor:
        """Log-probs [W, V] after the running beams, with the processors applied."""
        texts = upload(torch.tensor([[*self.prompt, *text] for text in self.beams.texts]), log_probs.device)
        for process in self.processors:
            before, log_probs = log_probs.shape, process(texts, log_probs)
            if not isinstance(log_probs, Tensor) or log_probs.shape != before:
                got = f"shape {list(log_probs.shape)}" if isinstance(log_probs, Tensor) else type(log_probs).__name__
                raise ValueError(
                    f"the processor {getattr(process, '__name__', type(process).__name__)} gave {got}, expected "
                    f"log-probs {list(before)}"
                )
        return log_probs

    def _rank(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probs [N, C] of the likeliest tokens, and these tokens [N, C], on the host after one transfer."""
        best = log_probs.topk(min(self.beams.count, log_probs.shape[-1]))
        (packed,) = to_host([torch.stack([best.indices, best.values.view(torch.int32).long()])])
        values = packed[1].int().view(torch.float32)
        if values.isnan().any():
            raise ValueError("log-probs are nan: the target's logits are, or a processor made them so")
        return values, packed[0]

    def _part(self, origins: list[int]) -> None:
        """Update the drafter's rows for beams that continue from `origins`; rows fork if several beams do."""
        rows = [self.rows[beam] for beam in origins]
        for row in dict.fromkeys(self.rows):
            if row not in rows:
                self.drafts.release(row)
        self.rows = []
        for row in rows:
            if row in self.rows:
                self.drafts.fork(row, self.unused)
                self.rows.append(self.unused)
                self.unused += 1
            else:
                self.rows.append(row)

    def _drop(self) -> None:
        """Commit the text that all beams share, and keep the nodes that at least one beam needs."""
        trie = self.trie
        shared, kept = trie.split(self.leaves)
        self.texts.keep_columns({ROW: [*shared, *kept]}, {ROW: [trie.tokens[node] for node in shared]})
        numbers = {node: number for number, node in enumerate(kept)}
        self.trie, self.leaves = trie.keep(kept), [numbers.get(leaf, -1) for leaf in self.leaves]
