"""Answers that are written while training: sampled by the draft model itself, or drafted by the head for the target."""

# T tokens of a sequence, K tokens of a draft, L taps, D target width

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.examples import Drafts, Example, Features
from eagle.core.noise import mix64
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures
from eagle.data.stored_rows import round_features
from eagle.decoding.decode import generate
from eagle.device import in_dtype
from eagle.drafters.none import NoDrafter
from eagle.recipe import OnPolicySection
from eagle.target.target import Target

BATCH_SIZE = 64  # answers that are written in a batch
Key = tuple[int, int]
"""The seed of a step, and the index of one of its examples."""


class OnPolicyFeatures(LiveFeatures):
    """Conversations cut at one of their answers, which the draft model in training answers itself, at temperature 1.

    A sampled answer is at most as long as the one it replaces. The step's seed and the example's index decide which
    answer it is and its tokens, so that a resumed run samples the same. With the head in evaluation mode the
    conversations are those of the data.
    """

    sampled = True  # an example's loss mask is known only once its answer is sampled

    def __init__(self, live: LiveFeatures, head: Any) -> None:
        """Take the conversations and the target from `live`, and the draft model from `head`, which is trained."""
        super().__init__(live.target, live.examples, live.identity, live.batch_tokens)
        self.head = head
        # no thread may load ahead: an answer is sampled with the weights of the step that it is read in
        self.together = True
        # the draft model as a target to decode with, made when the first answers are sampled
        self.student: Target | None = None

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples with newly sampled answers, and the target's features of them.

        In evaluation mode of the head, as for held-out examples, the answers are those of the data.
        """
        if not self.head.training:
            return super().read(indices)
        # the training loop seeds torch in every step, so that the seed identifies the step
        step_seed = mix64(torch.initial_seed())
        # by example: the tokens before the answer, its most tokens, and its seed
        prompts = []
        limits = []
        samplings = []
        for index in indices:
            example = self.examples[index]
            start, end = choose_answer(example.loss_mask, mix64(step_seed + index))
            prompts.append(example.tokens[:start])
            limits.append(end - start)
            samplings.append(Sampling(temperature=1.0, seed=step_seed, request=index))
        # without dropout while it decodes
        self.head.eval()
        self.student = self.student or trained_target(self.head.model)
        answers = sample_answers(
            self.student, prompts, limits, samplings, stops=self.target.stop_tokens
        )
        self.head.train()
        examples = []
        for prompt, answer in zip(prompts, answers, strict=True):
            tokens = torch.cat([prompt, answer])
            # the loss mask marks the answer
            examples.append(Example(tokens, torch.arange(len(tokens)) >= len(prompt)))
        answered = LiveFeatures(self.target, examples, self.identity, self.batch_tokens)
        return answered.read(range(len(examples)))


def trained_target(model: Any) -> Target:
    """Return a model as a target, to decode with it while its weights are trained.

    Weights that required gradients still do.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    target = Target(model)
    # Target freezes its model: let the weights learn again
    for weight in trained:
        weight.requires_grad_(True)
    return target


def sample_answers(
    model: Target,
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    samplings: Sequence[Sampling],
    stops: Sequence[int],
) -> list[Tensor]:
    """Sample a continuation of each prompt, without drafts, up to a stop token or the prompt's limit.

    Args:
        model: The model that answers.
        prompts: The tokens [T] of each prompt.
        limits: The most tokens of each answer.
        samplings: The temperature and the seed of each answer.
        stops: The stop tokens of the training target, of which the model may have fewer.
    """
    # the weights have changed since the last call, so what the target caches of them is wrong
    model.forget()
    prompt_tokens = [prompt.tolist() for prompt in prompts]
    # a trace has the tokens after a prompt; the model may have room for fewer than the limit
    traces = generate(
        model,
        NoDrafter(),
        prompt_tokens,
        sampling=samplings,
        stop=[token for token in stops if 0 <= token < model.vocab_size],
        max_new_tokens=[
            min(limit, model.room(tokens))
            for limit, tokens in zip(limits, prompt_tokens, strict=True)
        ],
        batch_size=len(prompts),
    )
    # `checked` raises the error of a row that failed
    return [torch.tensor(trace.checked().tokens) for trace in traces]


def choose_answer(loss_mask: Tensor, draw: int) -> tuple[int, int]:
    """Choose one of the answers of a conversation, and return the indices of its first token and of the one after it.

    Args:
        loss_mask: [T], true at the tokens of the answers, of which there is at least one.
        draw: A random number that decides which answer it is.
    """
    # +1 where an answer begins and -1 where it has ended
    changes = F.pad(loss_mask.long(), (1, 1)).diff()
    # [answers, 2], start and end
    answers = changes.nonzero()[:, 0].view(-1, 2).tolist()
    start, end = answers[draw % len(answers)]
    # the prompt before it needs at least one token
    return max(start, 1), end


class OwnDrafts:
    """Features of conversations, some of whose answers the target writes anew, with drafts of the head in training.

    `write` writes the answers of several steps in advance, with the head's weights of that time. `read` returns those
    of the present step, which it knows by torch's seed. The step's seed and the example's index decide which
    conversations get a new answer, which of their answers it is, and its noise. With the head in evaluation mode all
    conversations are those of the data.
    """

    sampled = True  # an example's loss mask may differ from that of the data, and is known once it is read
    # nothing may be loaded ahead: `read` finds a step's answers by torch's seed
    together = True

    def __init__(
        self, features: Features, target: Target, head: Any, policy: OnPolicySection
    ) -> None:
        """Wrap the features of the data; no answer is written yet.

        Args:
            features: Those of the data, stored or live.
            target: The model that writes the answers.
            head: The head that is trained and drafts.
            policy: The section `train.on_policy` of the recipe.
        """
        self.features = features
        self.target = target
        self.head = head
        self.policy = policy
        self.taps = features.taps
        self.identity = features.identity
        # the conversations with a new answer, for the steps of the last call of `write`
        self.written: dict[Key, Example] = {}

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.features)

    def mask(self, index: int) -> Tensor:
        """Return [T], the loss mask of an example as the data have it, true at the tokens of its answers."""
        return self.features.mask(index)

    def tokens_and_mask(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens [T] and loss mask [T] of an example as the data have it, before an answer is replaced."""
        return self.features.tokens_and_mask(index)

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples with their features, in the order of `indices`.

        In training, an example for which `write` had the target write a new answer for this step has that answer, with
        features computed now. All other examples are those of the data.
        """
        # an evaluation reads the data's own answers
        if not self.head.training:
            return self.features.read(indices)
        # training seeds torch before every step, so that the seed identifies the step in all processes
        step_seed = torch.initial_seed()
        rewritten: dict[int, Example] = {}  # by index: with the target's new answer
        unchanged = []  # indices of the others
        # an index may come twice, as `Plan.parts` repeats an example in a part that would be empty: dict.fromkeys keeps
        # each index once, in order
        for index in dict.fromkeys(indices):
            if (step_seed, index) in self.written:
                rewritten[index] = self.written[step_seed, index]
            else:
                unchanged.append(index)
        examples: dict[int, Example] = {}  # by index, with features
        if unchanged:
            examples |= zip(unchanged, self.features.read(unchanged), strict=True)
        if rewritten:
            live = LiveFeatures(self.target, list(rewritten.values()), self.identity)
            examples |= zip(rewritten, live.read(range(len(rewritten))), strict=True)
        return [examples[index] for index in indices]

    def write(self, steps: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Let the target write new answers for some steps, and drop those of earlier steps.

        `read` returns them, from `self.written`.

        Args:
            steps: The seed of each step, and the indices of its examples, of which a share gets a new answer.
        """
        chosen = []  # the (seed, index) of each conversation that gets a new answer
        for seed, indices in steps:
            # each index once
            for index in dict.fromkeys(indices):
                # true with the probability `share`
                if _draw_number((seed, index)) < self.policy.share * 2**64:
                    chosen.append((seed, index))
        self.written = {}
        if chosen:
            self.written = dict(zip(chosen, self._write_answers(chosen), strict=True))

    def _write_answers(self, keys: Sequence[Key]) -> list[Example]:
        """Return the conversations of these keys, each cut at one of its answers, which the target writes again.

        A key is the seed of a step, and the index of an example in it. The examples have drafts and no features.
        """
        # by key: the tokens before the answer, its most tokens, and how it is sampled
        prompts = []
        limits = []
        samplings = []
        for seed, index in keys:
            tokens, mask = self.features.tokens_and_mask(index)
            # mix64 makes a number that is independent of the one that chose the conversation
            start, end = choose_answer(mask, mix64(_draw_number((seed, index))))
            prompts.append(tokens[:start].tolist())
            limits.append(end - start)
            samplings.append(
                Sampling(temperature=self.policy.temperature, seed=seed, request=index)
            )
        # passes on the head's drafts, and notes them with the target's states
        recorder = Recorder(self._decoding_head(), self.taps)
        traces = generate(
            self.target,
            recorder,
            prompts,
            # a chain of fixed length, so that all cycles draft equally many tokens
            budget=Budget.fixed(chain_paths(self.policy.depth)),
            sampling=samplings,
            max_new_tokens=limits,
            batch_size=BATCH_SIZE,
        )
        examples = []
        # `generate` numbers rows as their prompts, and the recorder keeps the record of each
        for row, trace in enumerate(traces):
            prompt = trace.checked().prompt
            examples.append(self._make_example(prompt, trace.tokens, recorder.records[row]))
        return examples

    def _decoding_head(self) -> Any:
        """Return a copy of the head with its present weights, in the target's dtype and on its device, bound to it.

        The head itself goes on training in its own precision.
        """
        head = in_dtype(copy.deepcopy(self.head).to(self.target.device), self.target.model.dtype)
        # the caller may have changed the target's weights, of which it has cached results
        self.target.forget()
        return head.bind(self.target.head)

    def _make_example(self, prompt: list[int], answer: list[int], record: Record) -> Example:
        """Return a written conversation as a training example, with the drafts that were recorded while it was written.

        The last cycle's draft is missing: a recorder learns what became of a draft when the next one is asked for. All
        drafts are padded to the same number of tokens, the depth.

        Args:
            prompt: The tokens before the answer.
            answer: The tokens that the target wrote.
            record: The drafts of its decoding cycles.
        """
        tokens = torch.tensor(prompt + answer)
        mask = torch.arange(len(tokens)) >= len(prompt)
        cycles = record.cycles
        # a short answer may have ended in its first cycle
        if not cycles:
            return Example(tokens, mask)
        depth = self.policy.depth
        stop_tokens = set(self.target.stop_tokens)
        padding = torch.zeros(depth, dtype=torch.long)
        drafted = []  # of each cycle: the number of drafted tokens
        draft_tokens = []  # of each cycle: [depth], padded with zeros
        for cycle in cycles:
            draft = cycle.tokens.tolist()
            # what follows a stop token is no draft to learn from
            length = next(
                (count for count, token in enumerate(draft, start=1) if token in stop_tokens),
                len(draft),
            )
            drafted.append(length)
            draft_tokens.append(torch.cat([cycle.tokens, padding])[:depth])
        # [cycles, depth, L, D], rounded as those of the other examples
        states = torch.stack([_pad_states(cycle.states, depth) for cycle in cycles])
        drafts = Drafts(
            slots=torch.tensor([cycle.slot for cycle in cycles]),
            accepted=torch.tensor([cycle.accepted for cycle in cycles]),
            drafted=torch.tensor(drafted),
            tokens=torch.stack(draft_tokens),
            states=round_features(states, self.identity["dtype"]),
        )
        return Example(tokens, mask, drafts=drafts)


@dataclass(frozen=True, slots=True)
class DraftedCycle:
    """A chain of K tokens that was drafted, and how far the target accepted it."""

    slot: int  # the index in the sequence whose next token is the draft's root
    tokens: Tensor  # [K], without the root
    states: Tensor  # [K, L, D], the target's states after each, at L taps
    accepted: int  # how many tokens the target accepted


@dataclass(slots=True)
class Record:
    """The decoding cycles of one sequence."""

    committed: int = 0  # tokens of the sequence so far, the root not counted
    cycles: list[DraftedCycle] = field(default_factory=list)


class Recorder(Drafter):
    """A drafter that passes on another one's chains, and records them with the target's states at `taps`."""

    def __init__(self, drafter: Drafter, taps: tuple[int, ...]) -> None:
        """Wrap a bound drafter; `taps` are the target's layer inputs whose states are recorded, each of them once."""
        self.drafter = drafter
        # the taps to record come first, then those that only the drafter reads
        self.taps = tuple(dict.fromkeys((*taps, *drafter.taps)))
        self.recorded_taps = len(taps)  # so many of `self.taps` are recorded, from the first
        # asks the loop for the target's states after each node of a tree
        self.reads = replace(drafter.reads, states=True)
        self.rates_nodes = drafter.rates_nodes
        self.records: dict[int, Record] = {}  # by row; they stay when a row ends

    def open(self) -> RecorderState:
        """Return the state for several sequences of a batch, which records what the wrapped drafter proposes."""
        return RecorderState(self, self.drafter.open())

    def open_with(self, sequences: Any) -> RecorderState:
        """Return the state for several sequences, with access to `sequences`, which are in the target's KV cache."""
        return RecorderState(self, self.drafter.open_with(sequences))

    def bind_target(self, view: Any) -> None:
        """Pass the target's layers (`view`) on to the wrapped drafter, which drafts with them if it asks for them."""
        self.drafter.bind_target(view)


class RecorderState:
    """The state of a `Recorder` for the sequences of a batch, by row, around the wrapped drafter's state."""

    def __init__(self, recorder: Recorder, drafts: Any) -> None:
        """Begin without sequences.

        Args:
            recorder: It gets a record of each sequence.
            drafts: The wrapped drafter's state of the same sequences, which makes the drafts.
        """
        self.recorder = recorder
        self.drafts = drafts

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin the sequence `row`, with an empty record of its drafts."""
        self.recorder.records[row] = Record()
        self.drafts.admit(row, noise)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Record how far the target accepted the last trees, and return the wrapped drafter's next ones.

        Args:
            updates: By row, what the target has committed since the last call, with its states at all tapped layers.
            budgets: By row, the limits on its tree.
        """
        drafter_taps = self.recorder.drafter.taps
        # where the wrapped drafter's taps are among all taps
        columns = [self.recorder.taps.index(tap) for tap in drafter_taps]
        passed_on = {}  # by row: the update with what the wrapped drafter reads
        for row, update in updates.items():
            self._record(self.recorder.records[row], update)
            features = None
            if drafter_taps and update.features is not None:
                features = update.features[:, columns]
            # the tree and the states are there for the recorder alone
            passed_on[row] = replace(update, features=features, tree=None, states=None)
        return self.drafts.propose(passed_on, budgets)

    def _record(self, record: Record, update: Committed) -> None:
        """Add the cycle that this update ends to a sequence's record, and count its tokens.

        The first update brings the prompt and ends no cycle. A cycle is one draft and what the target accepted of it.
        """
        # node 0 is the root, which the target chose itself; a tree of the root alone has no draft
        if update.tree is not None and update.states is not None and len(update.tree) > 1:
            cycle = DraftedCycle(
                # the root is the first of the newly committed tokens, and a draft's slot is the token before it
                slot=record.committed - 1,
                tokens=update.tree.tokens[1:],
                states=update.states[1:, : self.recorder.recorded_taps].clone(),
                accepted=len(update.tokens) - 1,
            )
            record.cycles.append(cycle)
        record.committed += len(update.tokens)

    def fork(self, row: int, other: int) -> None:
        """Copy the drafter's state and the record of the sequence `row` to a new one, `other`."""
        self.recorder.records[other] = copy.deepcopy(self.recorder.records[row])
        self.drafts.fork(row, other)

    def release(self, row: int) -> None:
        """Drop the drafter's state of the sequence `row`, which has ended; its record stays."""
        self.drafts.release(row)


def _draw_number(key: Key) -> int:
    """Return a random number below 2^64 for an example in a step, always the same for the same key.

    So all processes choose the same examples without exchanging anything, and so does a resumed run.
    """
    seed, index = key
    return mix64(mix64(seed) + index)


def _pad_states(states: Tensor, depth: int) -> Tensor:
    """Return the states [K, L, D] of K draft tokens at L layers, padded to [depth, L, D] by repeating the last one.

    Drafts of different lengths are stacked in one tensor.
    """
    # padding with zeros would give NaN gradients, as a norm of zeros has none
    padding = states[-1:].expand(depth, *states.shape[1:])
    return torch.cat([states, padding])[:depth]
