"""Beam search with the results of transformers' own; one forward reads the drafts of all beams.

The tokens that all beams share are one row of the target's state. The tokens after them, of all beams and of their
drafts, form a trie. A forward reads the trie's new nodes, each of which attends to its ancestors.
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
from eagle.decoding.rows import stops_for
from eagle.device import pick_rows, to_host, upload
from eagle.target.target import Target

Processor = Callable[[Tensor, Tensor], Tensor]
"""Tokens [W, T] and log-probs [W, V] -> log-probs, as a LogitsProcessor of transformers."""

# the greatest natural logarithm of length ** length_penalty, by which scores are divided: fp32 ends at e^88
MAX_LOG = 80.0
SHARED_ROW = 0  # the row of the target's state that holds the tokens that all beams share


@dataclass(frozen=True, slots=True)
class BeamResult:
    """The best answers, best first, and the numbers of steps and forwards that they took."""

    tokens: list[list[int]]  # of each answer, its end token included
    scores: list[float]  # sum of log-probs / length ** length_penalty
    steps: int  # tokens by which the beams grew
    forwards: int  # of the target, after the prompt's
    near_ties: int  # steps in which rounding might have chosen otherwise

    @property
    def steps_per_forward(self) -> float:
        """Beam-search steps per forward of the target; 0 if one step was enough.

        The prompt's forward, and the first step, which needs no other, are not counted. Plain beam search has 1.
        """
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
    """Return the answers of transformers' beam search, `generate(num_beams=...)`, in fewer forward passes.

    Args:
        target: The model that answers.
        drafter: Any drafter that does not read the target's cache.
        prompt: A single prompt. It has the types of `generate`, as have `max_new_tokens` and `stop`.
        beams: Number of beams, `num_beams` in transformers. `length_penalty`, `early_stopping` and
            `num_return_sequences` are as in transformers.
        processors: Functions that change log-probs, such as transformers' LogitsProcessor objects.
        budget: Maximum number of draft tokens of all beams in one forward pass, spread evenly over the levels.
    """
    # everything is checked before a forward runs
    tokens = token_ids(prompt)
    limit = positive_int("max_new_tokens", max_new_tokens)
    beams = positive_int("beams", beams)
    if budget is None:
        # 12 draft nodes a beam on 3 levels; each beam needs more children than a greedy draft
        budget = Budget(nodes=12 * beams, depth=3, top_k=2 * beams, sharpness=1.0)
    check_call(target, drafter, Sampling(), budget)
    num_return_sequences = positive_int("num_return_sequences", num_return_sequences)
    if num_return_sequences > beams:
        raise ValueError(
            f"num_return_sequences is {num_return_sequences}, expected at most {beams} as beams: raise beams"
        )
    _check_options(drafter, early_stopping, budget)
    target.check_prompt(tokens)
    # how many tokens the target can write after this prompt
    room = target.room(tokens)
    if limit > room:
        raise ValueError(
            f"{len(tokens)} prompt tokens and {limit} new ones exceed what the model reads in one sequence: lower "
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
    """Refuse an `early_stopping`, a budget or a drafter that beam search cannot use.

    Args:
        drafter: One that reads the target's KV cache (`reads.kv_cache`) is refused, as all beams share one
            sequence there.
        early_stopping: transformers' option.
        budget: A policy, which chooses a budget in each cycle of one sequence, is refused.
    """
    # EarlyStopping is the union of bool and a Literal, whose words are the second member's arguments
    if not isinstance(early_stopping, bool) and early_stopping not in get_args(
        get_args(EarlyStopping)[1]
    ):
        raise ValueError(f"early_stopping is {early_stopping!r}, expected True, False or 'never'")
    if not isinstance(budget, Budget):
        raise ValueError(
            "the budget is a policy, which counts accepted tokens of one sequence: pass a Budget, as Budget(24, 3)"
        )
    if drafter.reads.kv_cache:
        raise ValueError(
            f"{type(drafter).__name__} drafts behind the target's own sequence, which all beams share: pass a drafter "
            "that does without"
        )


def _check_penalty(value: Any, limit: int) -> float:
    """Return the length penalty as a float; ValueError if limit ** penalty is no fp32 number.

    Args:
        value: The caller's `length_penalty`: scores are divided by length ** penalty.
        limit: The most tokens of an answer.
    """
    # a power that overflows fp32 would make all scores equal
    penalty = number("length_penalty", value)
    if abs(penalty) * math.log(limit) > MAX_LOG:
        raise ValueError(
            f"length_penalty is {penalty:g}, and {limit} tokens to that power are no float32: expected at most "
            f"{MAX_LOG / math.log(limit):.1f} either way"
        )
    return penalty


def _check_processors(processors: Any) -> tuple[Processor, ...]:
    """Return the caller's processors of log-probs as a tuple; ValueError for what cannot be called."""
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
    """The search for one prompt: tokens that all beams share are a row of the target's state, the others a trie."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        prompt: list[int],
        beams: BeamState,
        processors: tuple[Processor, ...],
        budget: Budget,
    ) -> None:
        """Open the states of target and drafter for a beam search over one prompt.

        Args:
            target: The target.
            drafter: The drafter.
            prompt: Its tokens.
            beams: The running beams and the answers.
            processors: Functions that change the log-probs of a step before beams are ranked by them.
            budget: The most draft nodes of one forward, over all beams together, and the most levels of a draft.
        """
        self.target = target
        self.prompt = prompt
        self.beams = beams
        self.processors = processors
        self.budget = budget
        # the most draft nodes of one level, of all beams together
        self.nodes_per_level = max(budget.nodes // max(budget.depth, 1), 1)
        # a drafter that drafts with layers of the target gets them
        if drafter.reads.view:
            drafter.bind_target(target.view())
        self.target_state = target.open(drafter.taps)
        self.draft_state = drafter.open()
        if not hasattr(self.draft_state, "fork"):
            raise ValueError(
                f"{type(self.draft_state).__name__} has no fork, which beams that part need: write fork(row, other), "
                "after which both rows go on from the same sequence"
            )
        # the row of each beam in the drafter's state; at first all beams share one
        self.rows = [0] * len(beams.sequences)
        self.next_row = 1  # a row number that was never used
        # how many tokens of every beam, prompt included, the drafter has read
        self.num_drafter_read = 0
        # the tokens after the shared ones that the target has read, and in `_read_drafts` those that it reads next
        self.trie = Trie()
        # the last trie node of each beam that the target has read; -1 for the end of the shared tokens
        self.leaves = [-1] * len(beams.sequences)
        self.forwards = 0

    @torch.inference_mode()
    def run(self) -> None:
        """Take beam-search steps until the search is over; `beams` then holds the answers."""
        # a forward reads each beam's last token and the drafts, all of which the cache must hold
        drafted = self.budget.nodes + len(self.leaves)
        self.target_state.admit(SHARED_ROW, self.prompt, self.beams.limit + drafted)
        outputs = self.target_state.finish_prompts()
        self.draft_state.admit(0)
        self._read_prompt()
        # all beams continue the prompt: its logits [1, V] are those after node -1, where every beam is
        self._step(outputs[SHARED_ROW].output.logits, nodes=self.leaves, first=-1)
        while not self.beams.is_done:
            self._read_drafts()
        for row in dict.fromkeys(self.rows):
            self.draft_state.release(row)

    def _read_prompt(self) -> None:
        """Let the drafter read the prompt once, before its state is copied for several beams.

        The prompt's last token is the root of its first draft, and is read with the beams. Copies are then made of a
        state that has read it, in place of one read for each beam.
        """
        # without several beams, without tokens before the last or without drafts, there is nothing to share
        if len(self.rows) > 1 and len(self.prompt) > 1 and not self.budget.is_empty:
            self.num_drafter_read = len(self.prompt) - 1
            features = self.target_state.features_at(SHARED_ROW, range(self.num_drafter_read))
            update = Committed(torch.tensor(self.prompt[:-1]), features, self.prompt[-1])
            # a drafter has no call that only reads: it proposes one token, which is dropped
            self.draft_state.propose({0: update}, {0: Budget(nodes=1, depth=1, top_k=1)})

    def _read_drafts(self) -> None:
        """Run one forward over each beam's last token and its draft, and take all beam-search steps that it allows.

        A beam's draft is a tree of tokens that may follow it. All beams and drafts share one trie (prefix tree), whose
        new nodes the target reads in this forward.
        """
        trie = self.trie
        first_new = len(trie)  # the target has read the nodes before this one in earlier forwards
        trees = self._draft()
        # each beam's last token, which the target has not read; beams with the same tokens share a node
        nodes = [
            trie.add(leaf, sequence[-1])
            for leaf, sequence in zip(self.leaves, self.beams.sequences, strict=True)
        ]
        self._add_drafts(nodes, trees)
        # Only the new nodes are read, so only their tokens are passed. They also attend to nodes that earlier forwards
        # read, so the mask [1, N, R] has a column for every node, and depths are those of all nodes.
        tokens = torch.tensor([trie.tokens[first_new:]])
        mask = trie.ancestors(first_new)[None]
        # [N, V], after each of the N new nodes, over V tokens
        logits = self.target_state.read_ahead([SHARED_ROW], tokens, trie.depths, mask)[0]
        self.forwards += 1
        self._step(logits, nodes, first_new)

    def _draft(self) -> list[DraftTree]:
        """Return a draft tree for each beam, rooted at its last token; an empty list if nothing may be drafted."""
        answers = self.beams.sequences
        # the target adds one token after the last draft that it accepts, so drafts end one level before the limit
        budget = self.budget.within(self.beams.limit - len(answers[0]) - 1)
        if budget.is_empty:
            return []
        shared = self.target_state.length(
            SHARED_ROW
        )  # how many tokens all beams share, the prompt included
        updates = {}  # row of the drafter's state -> the tokens of its beam that the drafter has not read
        for row, answer, leaf in zip(self.rows, answers, self.leaves, strict=True):
            # The cache columns of the beam's states: first those of the shared tokens, then those of its trie nodes.
            # The answer's last token is the root of the draft, and the target has no state of it yet.
            columns = list(range(shared)) + [shared + node for node in self.trie.path(leaf)]
            # the drafter needs the target's states at tokens that it has not read yet
            features = self.target_state.features_at(SHARED_ROW, columns[self.num_drafter_read :])
            tokens = torch.tensor([*self.prompt, *answer][self.num_drafter_read : -1])
            updates[row] = Committed(tokens, features, answer[-1])
        # all beams have the same length: after this proposal the drafter has read all of their tokens but the root
        self.num_drafter_read = len(self.prompt) + len(answers[0]) - 1
        trees = self.draft_state.propose(updates, dict.fromkeys(updates, budget))
        return [trees[row] for row in self.rows]

    def _add_drafts(self, nodes: list[int], trees: list[DraftTree]) -> None:
        """Add the best draft nodes of each level to the trie, ranked by the beam's score plus the path's log-prob.

        Args:
            nodes: The trie node of each beam's last token, after which its draft is added.
            trees: The draft of each beam; empty if nothing was drafted.
        """
        tokens = [tree.tokens.tolist() for tree in trees]
        children = [tree.children() for tree in trees]
        # of each beam, and of each node of its tree: the score of beam and path together
        node_scores = []
        # not strict: there may be no trees. A drafter without likelihoods ranks all nodes of a beam alike.
        for tree, score in zip(trees, self.beams.scores.tolist(), strict=False):
            path_scores = (
                [0.0] * len(tree) if tree.likelihoods is None else tree.likelihoods.tolist()
            )
            node_scores.append([score + path_score for path_score in path_scores])
        # the nodes of one level: (beam, node of its tree, node of the trie)
        level = [(beam, 0, nodes[beam]) for beam in range(len(trees))]
        while level:
            # only children of the best nodes of a level are candidates for the next level
            candidates = []
            for beam, node, trie_node in level:
                for child in children[beam][node]:
                    # a beam ends at a stop token, so its logits would never be used
                    if tokens[beam][child] not in self.beams.stops.tokens:
                        candidates.append((node_scores[beam][child], beam, child, trie_node))
            level = []
            # a candidate: its score, its beam, its node in the beam's tree, and its parent's node in the trie
            for _, beam, child, trie_node in nlargest(self.nodes_per_level, candidates):
                level.append((beam, child, self.trie.add(trie_node, tokens[beam][child])))

    def _step(self, logits: Tensor, nodes: list[int], first: int) -> None:
        """Take beam-search steps as long as the forward has read the last token of every beam.

        Then rows of the drafter's state are given to the new beams, and tokens that all of them share are committed.

        Args:
            logits: [N, V], the target's over V tokens, after each of the N nodes that the forward read.
            nodes: The trie node of each beam's last token; -1 is the end of the tokens that all beams share.
            first: The trie node that `logits[0]` belongs to.
        """
        beams = self.beams
        log_probs = logits.float().log_softmax(-1)
        # Without processors the best tokens after all nodes are found, and read from the device, once for all steps.
        # With processors they depend on the running beams, so each step finds its own.
        best = None if self.processors else self._best_tokens(log_probs)
        # of each beam: which beam before this call it continues
        origins = list(range(len(nodes)))
        is_covered = True
        while is_covered:
            rows = [node - first for node in nodes]  # of each beam, its row of `logits`
            if best is None:
                values, tokens = self._best_tokens(self._process(pick_rows(log_probs, rows)))
            else:
                values = best[0][rows]
                tokens = best[1][rows]
            parents = beams.step(values, tokens)  # of each new beam, the beam that it continues
            origins = [origins[parent] for parent in parents]
            self.leaves = [nodes[parent] for parent in parents]
            # a further step needs the target's logits after the new token of every beam: it must be a node of the trie
            nodes = []
            for leaf, sequence in zip(self.leaves, beams.sequences, strict=True):
                node = self.trie.children.get((leaf, sequence[-1]))
                if node is not None:
                    nodes.append(node)
            is_covered = not beams.is_done and len(nodes) == len(self.leaves)
        self._reassign_rows(origins)
        self._commit_shared()

    def _process(self, log_probs: Tensor) -> Tensor:
        """Return log-probs after the W running beams, changed by the processors in turn; ValueError for another shape.

        Processors are the caller's functions, as transformers' LogitsProcessor objects.

        Args:
            log_probs: [W, V], of the next token of each beam.
        """
        sequences = upload(
            torch.tensor([[*self.prompt, *sequence] for sequence in self.beams.sequences]),
            log_probs.device,
        )
        for process in self.processors:
            shape = log_probs.shape
            log_probs = process(sequences, log_probs)
            is_tensor = isinstance(log_probs, Tensor)
            if not is_tensor or log_probs.shape != shape:
                got = f"shape {list(log_probs.shape)}" if is_tensor else type(log_probs).__name__
                raise ValueError(
                    f"the processor {getattr(process, '__name__', type(process).__name__)} gave {got}, expected "
                    f"log-probs {list(shape)}"
                )
        return log_probs

    def _best_tokens(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the greatest log-probs after each of N nodes, and their tokens, on the host; ValueError for nan.

        Both are [N, C] with the C best, highest first. A step of beam search needs no more than C candidates of a beam.

        Args:
            log_probs: [N, V], over the V tokens of the vocabulary.
        """
        best = log_probs.topk(min(self.beams.candidate_count, log_probs.shape[-1]))
        # one transfer for both, as [2, N, C]: the bits of the fp32 values travel as integers
        bits = best.values.view(torch.int32).long()
        (packed,) = to_host([torch.stack([best.indices, bits])])
        values = packed[1].int().view(torch.float32)
        if values.isnan().any():
            raise ValueError(
                "log-probs are nan: the target's logits are, or a processor made them so"
            )
        return values, packed[0]

    def _reassign_rows(self, origins: list[int]) -> None:
        """Give each new beam a row of the drafter's state; a row is copied if several beams continue it.

        A row holds what the drafter has read of one sequence, such as a KV cache.

        Args:
            origins: Of each new beam, which earlier beam it continues.
        """
        rows = [self.rows[beam] for beam in origins]
        for row in dict.fromkeys(self.rows):
            if row not in rows:
                self.draft_state.release(row)
        # the first beam that continues a row keeps it, further beams get copies
        self.rows = []
        for row in rows:
            if row in self.rows:
                self.draft_state.fork(row, self.next_row)
                row = self.next_row
                self.next_row += 1
            self.rows.append(row)

    def _commit_shared(self) -> None:
        """Commit the tokens that all beams now share, and drop nodes that no beam needs.

        They are dropped from the target's KV cache and from the trie, the prefix tree of the beams' tokens.
        """
        trie = self.trie
        # nodes on the path of every beam, and further nodes on the path of at least one
        shared, needed = trie.split(self.leaves)
        self.target_state.keep_columns(
            {SHARED_ROW: [*shared, *needed]},
            {SHARED_ROW: [trie.tokens[node] for node in shared]},
        )
        # old node -> new node; a leaf that is no longer in the trie was committed
        numbers = {node: i for i, node in enumerate(needed)}
        self.trie = trie.subset(needed)
        self.leaves = [numbers.get(leaf, -1) for leaf in self.leaves]


class Trie:
    """Token sequences after a common beginning, which share the nodes of common prefixes.

    Nodes are numbered in the order in which they were added, so a parent precedes its children. The parent of nodes
    without another one is -1.
    """

    def __init__(self) -> None:
        """Begin a prefix tree without nodes; `add` adds them."""
        # by node: its token, its parent (-1 for none), and the number of its ancestors
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.children: dict[tuple[int, int], int] = {}  # parent and token -> node

    def __len__(self) -> int:
        """Return the number of nodes, which is also the number that the next new node gets."""
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Return the child of node `parent` (-1: the common beginning) with this token, added if it is missing."""
        edge = (parent, token)
        if edge not in self.children:
            self.children[edge] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
        return self.children[edge]

    def path(self, node: int) -> list[int]:
        """Return the nodes on the path to this one, the ancestor without a parent first; empty for -1."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def ancestors(self, first: int) -> Tensor:
        """Return the tree mask of the nodes from `first` on, [N, R] bool: row i marks node first + i and its ancestors.

        N is the number of these nodes, and R that of all nodes of the trie. It is the attention mask of a forward over
        these nodes.
        """
        # the row and the column of each entry that is true
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
        """Return the nodes that the paths to all of these leaves share, and the other nodes on at least one path.

        Both are in ascending order, so that parents precede their children. A leaf -1 has an empty path. A leaf is the
        node of a beam's last token: the shared nodes are final, and the others are still needed.
        """
        paths = [set(self.path(leaf)) for leaf in set(leaves)]
        shared = set.intersection(*paths)
        return sorted(shared), sorted(set.union(*paths) - shared)

    def subset(self, nodes: list[int]) -> Trie:
        """Return a trie of only these nodes, renumbered in this order; a node whose parent is not among them gets -1.

        The other nodes belong to beams that have been dropped, or were committed.

        Args:
            nodes: In ascending order.
        """
        trie = Trie()
        numbers: dict[int, int] = {}  # old node -> new node
        # in ascending order a parent gets its new number before its children need it
        for node in nodes:
            parent = numbers.get(self.parents[node], -1)
            numbers[node] = trie.add(parent, self.tokens[node])
        return trie
