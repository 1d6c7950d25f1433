"""Beam search with the results of transformers' own; one forward reads the drafts of all beams.

The sequence that all beams share is one row of the target's state. The beams after it, and their drafts, are a trie:
a forward reads its new nodes, each of which attends to its ancestors.
"""

# W beams, N nodes of a forward, R nodes after the shared sequence, C candidates of a node, T tokens, V vocabulary

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
from eagle.device import pick_rows, to_host, upload
from eagle.target.target import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Tokens [W, T] and log-probs [W, V] -> log-probs, as a LogitsProcessor of transformers."""

MAX_LOG = 80.0  # of a power of a length, by which scores in fp32 are divided
SHARED_ROW = 0  # of the target's state: the sequence that all beams share


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
    """Search with the answers of transformers' `generate(num_beams=...)`, in fewer forwards.

    Args:
        target: The model whose answers these are.
        drafter: Any drafter that does without the target's cache.
        prompt: As one of `generate`, as are `max_new_tokens` and `stop`.
        beams: transformers' `num_beams`; `length_penalty` to `num_return_sequences` are named as there.
        processors: Change log-probs as transformers' LogitsProcessor objects do.
        budget: For all beams of one forward: its nodes are spread evenly over its levels.
    """
    # everything is checked before a forward runs
    tokens = token_ids(prompt)
    limit = positive_int("max_new_tokens", max_new_tokens)
    beams = positive_int("beams", beams)
    if budget is None:
        budget = Budget(12 * beams, 3, 2 * beams, sharpness=1.0)
    check_call(target, drafter, Sampling(), budget)
    num_return_sequences = positive_int("num_return_sequences", num_return_sequences)
    if num_return_sequences > beams:
        raise ValueError(
            f"num_return_sequences is {num_return_sequences}, expected at most {beams} as beams: raise beams"
        )
    _check_options(drafter, early_stopping, budget)
    target.check_prompt(tokens)
    room = target.room(tokens)
    if limit > room:
        raise ValueError(
            f"{len(tokens)} prompt tokens and {limit} new ones exceed what the model reads in one text: lower "
            f"max_new_tokens to {room} or shorten the prompt"
        )
    state = BeamState(
        beams,
        stops_for(target, stop),
        limit=limit,
        length_penalty=_check_penalty(length_penalty, limit),
        early_stopping=early_stopping,
    )
    search = _Search(
        target,
        drafter,
        prompt=tokens,
        beams=state,
        processors=_check_processors(processors),
        budget=budget,
    )
    try:
        search.run()
    finally:
        target.close(search.target_state)
    return BeamResult(
        tokens=state.answers[:num_return_sequences],
        scores=state.answer_scores[:num_return_sequences].tolist(),
        steps=state.steps,
        forwards=search.forwards,
        near_ties=state.near_ties,
    )


def _check_options(drafter: Drafter, early_stopping: Any, budget: Any) -> None:
    """Refuse options with which no search is possible."""
    if not isinstance(early_stopping, bool) and early_stopping not in get_args(
        get_args(EarlyStopping)[1]
    ):
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


def _check_penalty(value: Any, limit: int) -> float:
    """Return the length penalty as a float, if scores of `limit` tokens can be divided by it."""
    # a power that overflows float32 would make all scores equal
    penalty = number("length_penalty", value)
    if abs(penalty) * math.log(limit) > MAX_LOG:
        raise ValueError(
            f"length_penalty is {penalty:g}, and {limit} tokens to that power are no float32: expected at most "
            f"{MAX_LOG / math.log(limit):.1f} either way"
        )
    return penalty


def _check_processors(processors: Any) -> tuple[Processor, ...]:
    """Return the processors as a tuple; ValueError for what cannot be called."""
    if isinstance(processors, str) or not isinstance(processors, Iterable):
        raise ValueError(
            f"processors is {processors!r}, expected a list of functions of tokens and log-probs"
        )
    listed = tuple(processors)
    for processor in listed:
        if not callable(processor):
            raise ValueError(
                f"processors holds {processor!r}, expected functions of tokens [W, T] and log-probs [W, V]"
            )
    return listed


class _Search:
    """The search of one prompt: the shared sequence is one row of the target's state, the beams are a trie after it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        beams: BeamState,
        processors: tuple[Processor, ...],
        budget: Budget,
    ) -> None:
        self.target = target
        self.prompt = prompt
        self.beams = beams
        self.processors = processors
        self.budget = budget
        # nodes of each level, of all beams
        self.width = max(budget.nodes // max(budget.depth, 1), 1)
        if drafter.reads.view:
            drafter.bind_target(target.view())
        self.target_state = target.open(drafter.taps)
        self.drafts = drafter.open()
        if not hasattr(self.drafts, "fork"):
            raise ValueError(
                f"{type(self.drafts).__name__} has no fork, which beams that part need: write fork(row, other), after "
                "which both rows go on from the same text"
            )
        self.rows = [0] * len(beams.texts)  # of each beam in the drafter's state
        self.unused = 1  # the first number that no row has had
        self.drafter_length = 0  # tokens of every row that the drafter has read
        self.trie = Trie()
        self.leaves = [-1] * len(beams.texts)  # the last node of each beam that the target has read
        self.forwards = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Step until the search is over."""
        drafted = self.budget.nodes + len(self.leaves)
        self.target_state.admit(SHARED_ROW, self.prompt, self.beams.limit + drafted)
        outputs = self.target_state.finish_prompts()
        self.drafts.admit(0)
        self._read_prompt()
        # every leaf is -1: the prompt's only row of logits serves all beams
        self._step(outputs[SHARED_ROW].output.logits, self.leaves, -1)
        while not self.beams.is_done:
            self._read_drafts()
        for row in dict.fromkeys(self.rows):
            self.drafts.release(row)

    def _read_prompt(self) -> None:
        """Let the drafter read the shared sequence once, before the beams split."""
        if len(self.rows) > 1 and len(self.prompt) > 1 and not self.budget.is_empty:
            self.drafter_length = len(self.prompt) - 1
            features = self.target_state.features_at(SHARED_ROW, range(self.drafter_length))
            update = Committed(torch.tensor(self.prompt[:-1]), features, self.prompt[-1])
            # a drafter reads where it drafts: the one token that it proposes is dropped
            self.drafts.propose({0: update}, {0: Budget(1, 1, 1)})

    def _read_drafts(self) -> None:
        """Run one forward over each beam's last token and its draft, then all beam-search steps that it allows."""
        trie = self.trie
        first = len(trie)
        trees = self._draft()
        # the beams' own last tokens come first; beams of equal tokens share a node
        nodes = [
            trie.add(leaf, text[-1])
            for leaf, text in zip(self.leaves, self.beams.texts, strict=True)
        ]
        self._add_drafts(nodes, trees)
        tokens = torch.tensor([trie.tokens[first:]])
        mask = trie.ancestors(first)[None]
        logits = self.target_state.read_ahead([SHARED_ROW], tokens, trie.depths, mask)[0]  # [N, V]
        self.forwards += 1
        self._step(logits, nodes, first)

    def _draft(self) -> list[DraftTree]:
        """Return a draft tree for each beam; none if the next token is the last."""
        answers = self.beams.texts
        # the target adds a token of its own after the last draft that it accepts
        budget = self.budget.within(self.beams.limit - len(answers[0]) - 1)
        if budget.is_empty:
            return []
        shared = self.target_state.length(SHARED_ROW)
        updates = {}
        for row, answer, leaf in zip(self.rows, answers, self.leaves, strict=True):
            # where the target keeps the beam's states: the sequence that all beams share, then the beam's nodes of the
            # trie. The answer's last token is the root, and has no state yet.
            columns = list(range(shared)) + [shared + node for node in self.trie.path(leaf)]
            features = self.target_state.features_at(SHARED_ROW, columns[self.drafter_length :])
            tokens = torch.tensor([*self.prompt, *answer][self.drafter_length : -1])
            updates[row] = Committed(tokens, features, answer[-1])
        # beams are of one length: every row of the drafter has now read all but the root
        self.drafter_length = len(self.prompt) + len(answers[0]) - 1
        trees = self.drafts.propose(updates, dict.fromkeys(updates, budget))
        return [trees[row] for row in self.rows]

    def _add_drafts(self, nodes: list[int], trees: list[DraftTree]) -> None:
        """Add the likeliest drafts of each level to the trie, ranked by the scores of beam and path together.

        Args:
            nodes: Of the trie, under which the beams' drafts grow.
            trees: The draft of each beam.
        """
        tokens = [tree.tokens.tolist() for tree in trees]
        children = [tree.children() for tree in trees]
        likelihoods = []
        for tree, score in zip(trees, self.beams.scores.tolist(), strict=False):
            of_paths = [0.0] * len(tree) if tree.likelihoods is None else tree.likelihoods.tolist()
            likelihoods.append([score + of_path for of_path in of_paths])
        # entries: beam, node of its tree, node of the trie
        level = [(beam, 0, nodes[beam]) for beam in range(len(trees))]
        while level:
            # what is not among the best of its level does not grow further
            candidates = []
            for beam, node, trie_node in level:
                for child in children[beam][node]:
                    if (
                        tokens[beam][child] not in self.beams.stops.tokens
                    ):  # which no beam goes on from
                        candidates.append((likelihoods[beam][child], beam, child, trie_node))
            level = []
            for _, beam, child, trie_node in nlargest(self.width, candidates):
                level.append((beam, child, self.trie.add(trie_node, tokens[beam][child])))

    def _step(self, logits: Tensor, nodes: list[int], first: int) -> None:
        """Take as many beam-search steps as the target's forward allows: while it read the last token of every beam.

        Args:
            logits: [N, V], the target's after each node that the forward read.
            nodes: The node of each beam's last token.
            first: The node that `logits[0]` belongs to.
        """
        beams = self.beams
        log_probs = logits.float().log_softmax(-1)
        # what processors change depends on the beams, in their order: only then is each step ranked by itself
        ranked = None if self.processors else self._rank(log_probs)
        # the beam before this call that each beam continues
        origins = list(range(len(nodes)))
        is_covered = True
        while is_covered:
            rows = [node - first for node in nodes]
            if ranked is None:
                values, tokens = self._rank(self._process(pick_rows(log_probs, rows)))
            else:
                values = ranked[0][rows]
                tokens = ranked[1][rows]
            parents = beams.step(values, tokens)
            origins = [origins[parent] for parent in parents]
            self.leaves = [nodes[parent] for parent in parents]
            # the next step needs the target's output after the new token of every beam
            nodes = []
            for leaf, text in zip(self.leaves, beams.texts, strict=True):
                node = self.trie.children.get((leaf, text[-1]))
                if node is not None:
                    nodes.append(node)
            is_covered = not beams.is_done and len(nodes) == len(self.leaves)
        self._fork(origins)
        self._drop()

    def _process(self, log_probs: Tensor) -> Tensor:
        """Return log-probs [W, V] after the running beams, with the processors applied."""
        texts = upload(
            torch.tensor([[*self.prompt, *text] for text in self.beams.texts]),
            log_probs.device,
        )
        for process in self.processors:
            shape = log_probs.shape
            log_probs = process(texts, log_probs)
            is_tensor = isinstance(log_probs, Tensor)
            if not is_tensor or log_probs.shape != shape:
                got = f"shape {list(log_probs.shape)}" if is_tensor else type(log_probs).__name__
                raise ValueError(
                    f"the processor {getattr(process, '__name__', type(process).__name__)} gave {got}, expected "
                    f"log-probs {list(shape)}"
                )
        return log_probs

    def _rank(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs [N, C] of the likeliest tokens, and these tokens [N, C], on the host."""
        best = log_probs.topk(min(self.beams.count, log_probs.shape[-1]))
        # one transfer for both: the bits of the fp32 values travel as integers
        bits = best.values.view(torch.int32).long()
        (packed,) = to_host([torch.stack([best.indices, bits])])
        values = packed[1].int().view(torch.float32)
        if values.isnan().any():
            raise ValueError(
                "log-probs are nan: the target's logits are, or a processor made them so"
            )
        return values, packed[0]

    def _fork(self, origins: list[int]) -> None:
        """Update the drafter's rows for beams that continue from `origins`; rows fork if several beams do."""
        rows = [self.rows[beam] for beam in origins]
        for row in dict.fromkeys(self.rows):
            if row not in rows:
                self.drafts.release(row)
        # the first beam of a row keeps it, the others get copies
        self.rows = []
        for row in rows:
            if row in self.rows:
                self.drafts.fork(row, self.unused)
                row = self.unused
                self.unused += 1
            self.rows.append(row)

    def _drop(self) -> None:
        """Commit the sequence that all beams share, and keep the nodes that at least one beam needs."""
        trie = self.trie
        shared, needed = trie.split(self.leaves)
        self.target_state.keep_columns(
            {SHARED_ROW: [*shared, *needed]},
            {SHARED_ROW: [trie.tokens[node] for node in shared]},
        )
        numbers = {node: i for i, node in enumerate(needed)}
        self.trie = trie.keep(needed)
        self.leaves = [numbers.get(leaf, -1) for leaf in self.leaves]


class Trie:
    """Nodes in the order in which they were added, parents first; -1 is the parent of the first nodes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.children: dict[tuple[int, int], int] = {}  # parent and token -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Return the parent's child with this token, added if it is missing."""
        edge = (parent, token)
        if edge not in self.children:
            self.children[edge] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        return self.children[edge]

    def path(self, node: int) -> list[int]:
        """Return the nodes from the first to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def ancestors(self, first: int) -> Tensor:
        """Return each node's ancestors and itself, [N, R] bool, for the nodes from `first` on."""
        rows = []
        columns = []
        for node in range(first, len(self)):
            path = self.path(node)
            rows += [node - first] * len(path)
            columns += path
        mask = torch.zeros(len(self) - first, len(self), dtype=torch.bool)
        mask[rows, columns] = True
        return mask

    def split(self, leaves: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the nodes on the paths to all of these leaves, and the other nodes on the path to at least one."""
        paths = [set(self.path(leaf)) for leaf in set(leaves)]
        shared = set.intersection(*paths)
        return sorted(shared), sorted(set.union(*paths) - shared)

    def keep(self, nodes: list[int]) -> Trie:
        """Keep only these nodes and renumber them; those without a parent among them come first."""
        trie = Trie()
        numbers: dict[int, int] = {}
        # a parent precedes its children, so it has its new number before they ask for it
        for node in nodes:
            parent = numbers.get(self.parents[node], -1)
            numbers[node] = trie.add(parent, self.tokens[node])
        return trie
