"""The protocol of drafting methods: what they borrow from the target, their inputs and their outputs."""

# A committed tokens, N nodes, C choices, L taps, D target width, K rows, P positions, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.examples import Batch
from eagle.core.row_errors import run_rows
from eagle.core.tree import DraftTree, Paths
from eagle.device import in_dtype


@dataclass(frozen=True, slots=True)
class Parts:
    """Weights that a faulty conversion of a head can swap without an error of shapes; `eagle doctor` tests for each."""

    # parameters whose columns, or module lists whose entries, belong to one tap each: taps can be in a wrong order
    by_tap: tuple[str, ...] = ()
    # matrices that read a concatenated embedding and state, whose halves can be swapped; those of one input are a group
    halves: tuple[tuple[str, ...], ...] = ()
    # pairs of parameters of equal shape outside the decoder blocks, which can be exchanged
    alike: tuple[tuple[str, str], ...] = ()
    # modules that only choose among good drafts: without a part of one a head may draft as well
    choosing: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()  # settings whose value is a token id
    # how many levels one forward drafts in parallel; None if each level reads the token of the level before
    levels: int | None = None


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's frozen embedding and LM head, which drafters borrow."""

    embedding: nn.Module
    output: nn.Module  # the LM head
    embed_scale: float = 1.0  # factor on embeddings, beside one that the module applies itself
    logit_scale: float = 1.0  # factor on logits
    softcap: float | None = None  # c in logits = c tanh(logits / c), as in Gemma 2
    # the hidden size of the layers if it is known; a few models have embeddings of another size
    width: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetHead:
        """Return itself, so that `copy.deepcopy` of a drafter copies none of the target's weights.

        It is shared, and the weights may be large.
        """
        return self

    @property
    def scale(self) -> float:
        """The factor from a row of the embedding matrix to the embedding that the first layer reads.

        It is `embed_scale` times the factor that the embedding module applies itself, as Gemma's does. A store of the
        target's head keeps it, because only the matrix is written there.
        """
        # rounded to the weights' precision, as the module does
        factor = torch.as_tensor(getattr(self.embedding, "embed_scale", 1.0))
        return self.embed_scale * factor.to(self.embedding.get_parameter("weight").dtype).item()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings [.., width] as the target's first layer reads them, without learned positions.

        Args:
            tokens: [..], token ids.
        """
        embedded = self.embedding(tokens)
        if self.width not in (None, embedded.shape[-1]):
            raise ValueError(
                f"the target embeds tokens in width {embedded.shape[-1]} and its layers have width {self.width}: got a "
                "method that reads both as one, expected one without embeddings, as draft_model, ngram or suffix"
            )
        if self.embed_scale == 1.0:
            return embedded
        return embedded * self.embed_scale

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits of V tokens from the LM head's input, in the weights' dtype: [.., V].

        Args:
            hidden: [.., D], hidden states of the target's width D, after its final norm.
            out: A tensor [.., V] that the matrix product is written to, which saves memory. With a logit scale or a
                softcap the result is another tensor.
        """
        hidden = hidden.to(self.weight.dtype)
        if out is None:
            logits = self.output(hidden)
        else:
            logits = torch.matmul(hidden, self.weight.T, out=out)
            bias = getattr(self.output, "bias", None)
            if bias is not None:
                logits += bias
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the derivative of each logit by its value before the softcap, [.., V]; None if there is no softcap.

        `pull_back` needs it. The loss computes gradients by hand, one chunk of tokens at a time, and overwrites the
        logits with them, so it asks for this before.

        Args:
            logits: [.., V], of V tokens, after the softcap.
            hidden: [.., D], the LM head's input. It is not read here: subclasses whose logits are no matrix product
                need it (`eagle.target`).
        """
        if self.softcap is None:
            return None
        # d/dx c tanh(x / c) = 1 - tanh(x / c)^2
        return 1 - (logits / self.softcap) ** 2

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient of a loss at the hidden states that the LM head reads, [.., D], by the chain rule.

        d logits / d hidden = slope of the softcap * logit scale * matrix

        Args:
            gradient: [.., V], at the logits of V tokens; it is overwritten.
            slope: What `slope` returned: the derivative of the softcap, or None without one.
        """
        if slope is not None:
            gradient = gradient.mul_(slope)
        hidden = gradient.to(self.weight.dtype) @ self.weight
        if self.logit_scale == 1.0:
            return hidden
        return hidden * self.logit_scale

    def narrow(self, tokens: Tensor | slice) -> TargetHead:
        """Return a head whose logits are those of a subset of the vocabulary, in the order of `tokens`.

        Drafters with a draft vocabulary, a part of the target's, learn and draft with such a head.

        Args:
            tokens: Token ids, for which rows of the matrix are copied; or a slice of ids, which copies nothing.
        """
        bias = getattr(self.output, "bias", None)
        rows = self.weight[tokens]
        # on the meta device, so that no matrix is initialised only to be replaced
        output = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
        output.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            output.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return replace(self, output=output)

    def cast(self, dtype: torch.dtype) -> TargetHead:
        """Return this head in a precision: itself if it has that precision already, else a copy.

        Training does so if the drafter has another precision than the target.
        """
        if self.weight.dtype == dtype:
            return self
        embedding = in_dtype(copy.deepcopy(self.embedding), dtype)
        output = in_dtype(copy.deepcopy(self.output), dtype)
        return replace(self, embedding=embedding, output=output)

    @property
    def is_linear(self) -> bool:
        """Whether the logits are a linear function of the hidden states: the LM head has no softcap."""
        return self.softcap is None

    def start_matrix(self) -> Tensor:
        """Return the LM head's matrix times the logit scale, as initial weights of a drafter's own LM head.

        It is [V, D], a row of the target's width D for each of V tokens.
        """
        return self.weight * self.logit_scale

    @property
    def weight(self) -> Tensor:
        """The LM head's matrix, [V, D]: a row of D numbers, the target's width, for each of V tokens."""
        return self.output.get_parameter("weight")


class HeadShape(Protocol):
    """The sizes of a head, as transformers' config of a Llama names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    model_type: Any

    def to_dict(self) -> dict[str, Any]:
        """Return all keys of the config."""


class Noise(Protocol):
    """The sampling noise of the target, as a drafter may use it, in units of the plain logits.

    The target samples by Gumbel-max: it takes the argmax of logits plus noise. The noise is fixed by the position in
    the sequence, so that a sampled answer does not depend on the draft. A drafter may add it to its own logits too.
    """

    @property
    def temperature(self) -> float:
        """The target's sampling temperature, above 0: a greedy target offers no noise."""

    def __call__(self, positions: list[int]) -> Tensor:
        """Return what the target adds to its logits when it chooses the tokens at P positions of a sequence, [P, V].

        V is the size of the vocabulary.
        """

    def draft_noise(self, rows: int) -> Tensor:
        """Return noise for the drafter's own sampling: new in every call, and never used by the target.

        It is [rows, V]: `rows` distributions are sampled from, over V tokens.
        """

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return the logits, far lower for tokens that a target with these logits would not sample (top-k, top-p, ...).

        A drafter that samples then does not propose tokens that are always rejected.

        Args:
            logits: [K, V], K distributions over V tokens.
        """


@dataclass(frozen=True, slots=True)
class Reads:
    """The things a drafter reads from the target besides its `taps` at accepted tokens; it gets nothing else."""

    # how many of the target's best tokens after each node of the last tree are in `Committed.choices`
    choices: int = 0
    view: bool = False  # whether it drafts with the target's layers, which `bind_target` receives
    # whether it reads keys and values in the target's cache, which `open_with` receives
    kv_cache: bool = False
    weights: bool = False  # whether `for_target` gets the target's tensors by name, as `weights`
    # whether the target's states after each node of the last tree, at the drafter's taps, are in `Committed.states`
    states: bool = False
    # how many likely next tokens of every token that the target has read are in `Committed.followers`
    followers: int = 0

    @property
    def trees(self) -> bool:
        """Whether the drafter reads what the target computes at the nodes of a draft tree, rejected ones included.

        Then the tree must be on the host, and the loop returns it to the drafter after verification.
        """
        return bool(self.choices or self.states or self.followers)


class ColumnBytes(NamedTuple):
    """The memory that one token of a sequence takes in the target, in bytes."""

    cached: int  # its keys and values in all layers
    tapped: int  # its hidden state at one tap


class Followers(NamedTuple):
    """All tokens that the target has read, rejected ones too, with its likeliest next tokens, whatever it chose."""

    tokens: Tensor  # [R], of the prompt or of all nodes of a tree, on the host
    likeliest: Tensor  # [R, C], likeliest first; of equally likely tokens the one with the lowest id comes first

    @classmethod
    def join(cls, batches: Sequence[Followers]) -> Followers | None:
        """Join consecutive batches, each of the tokens of one target forward, into one; None if there are none.

        A drafter that did not draft for some cycles gets all that the target read in them at once.
        """
        if not batches:
            return None
        tokens, likeliest = zip(*batches, strict=True)
        return cls(torch.cat(tokens), torch.cat(likeliest))


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens that the target has committed since the drafter's last proposal."""

    tokens: Tensor  # [A]
    features: Tensor | None  # [A, L, D], the target's states at the drafter's taps
    root: int  # the token that the target chose next and has not read yet
    # the tree that the target read last, if the drafter reads choices or states
    tree: DraftTree | None = None
    # [N, C], the target's best tokens after each node of the tree, best first
    choices: Tensor | None = None
    states: Tensor | None = None  # [N, L, D], the target's states after each node of the tree
    followers: Followers | None = (
        None  # of all tokens that the target has read since the last update
    )

    @classmethod
    def join(cls, updates: Sequence[Committed]) -> Committed:
        """Join consecutive updates of one sequence into one, for a drafter that did not draft in the cycles between.

        A cycle is one draft, one forward of the target, and the tokens on which both agree.

        Args:
            updates: At least one, the oldest first; each holds the tokens that one cycle has committed.
        """
        last = updates[-1]
        if len(updates) == 1:
            return last
        tokens = torch.cat([update.tokens for update in updates])
        features = [update.features for update in updates if update.features is not None]
        followers = [update.followers for update in updates if update.followers is not None]
        # root, tree, choices and states describe the newest cycle alone, so those of the last update stay
        return replace(
            last,
            tokens=tokens,
            features=torch.cat(features) if features else None,
            followers=Followers.join(followers),
        )


class DraftSequence(Protocol):
    """A drafter's state for one sequence: what it has read of it, such as a KV cache."""

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return a tree rooted at `update.root`, of at most `budget.nodes` further nodes.

        Args:
            update: The tokens that the target has committed since the last call, which the drafter reads first.
            budget: The limits on the tree's nodes, levels and children.
        """


DraftText = DraftSequence  # the older name, for methods written with it


class DraftState(Protocol):
    """A drafter's state for several sequences, by row."""

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a sequence as `row` of the batch; `noise` is the target's sampling noise (None if it is greedy)."""

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return a tree for each row, rooted at its update's root, with at most its budget's nodes.

        Args:
            updates: Row -> the tokens that the target has committed since this row's last call.
            budgets: Row -> the limits on its tree.
        """

    def fork(self, row: int, other: int) -> None:
        """Copy the state of `row` to a new row `other`: beam search continues one beam as several."""

    def release(self, row: int) -> None:
        """Drop the state of `row`, whose sequence has ended."""


class Drafter:
    """Proposes a draft tree after the committed tokens; the loop and the tuner use this interface and no concrete type.

    It holds no sequence itself: `begin` makes the state for one sequence, `open` for several. A subclass defines one of
    them and inherits the other. Drafters that read the target's cache define `open_with` instead.
    """

    # the target's layers whose inputs it reads at accepted tokens: 0 reads the embedding, -1 the final norm's output
    taps: tuple[int, ...] = ()
    # what a folder keeps of it: nothing, "files" for its own method `load(folder, target)`, or a "head" with weights
    stored_as: Literal["nothing", "files", "head"] = "nothing"
    reads: Reads = Reads()
    budget: Budget | None = None  # the budget that it was tuned to
    # whether it predicts how likely a child of a node is accepted, which `Budget.confidence` needs
    rates_nodes = False
    # of each level, by which the log-odds of that prediction are divided (`eagle measure --tune` fits them)
    confidence_temperatures: tuple[float, ...] | None = None
    # whether it learns from all sequences, so that the drafts of one depend on those before and beside it
    remembers = False
    bound_to: tuple[TargetHead, ...] = ()  # the target's head, once it is bound to one

    @property
    def target_head(self) -> TargetHead:
        """The target's embedding and LM head, which the drafter was bound to; RuntimeError before `bind`."""
        if not self.bound_to:
            raise RuntimeError(f"{type(self).__name__} has no target: call bind(target.head) first")
        return self.bound_to[0]

    @property
    def frozen(self) -> tuple[TargetHead, ...]:
        """The older name of `bound_to`, for methods written with it."""
        return self.bound_to

    def begin(self, noise: Noise | None = None) -> DraftSequence:
        """Return the state for one new sequence, such as a KV cache; a drafter defines this or `open`.

        By default `open` makes a state for several sequences, of which this is the only row.

        Args:
            noise: The target's sampling noise, fixed by position, which drafts may use; None if the target is greedy.
        """
        # this begin calls open, and the default open calls begin: a class that defines neither would call for ever
        if type(self).open is Drafter.open:
            # a drafter that reads the target's cached sequences gets them from open_with alone
            missing = (
                " without the target's sequences: call open_with"
                if self.reads.kv_cache
                else ": write begin or open"
            )
            raise NotImplementedError(f"{type(self).__name__} cannot draft{missing}")
        return _SingleSequence(self.open(), noise)

    def open(self) -> DraftState:
        """Return the state for several sequences decoded in a batch; by default one state of `begin` for each.

        A drafter defines this or `begin`.
        """
        return PerSequenceState(self)

    def open_with(self, sequences: Any) -> DraftState:
        """Return a state for several sequences, for a drafter that reads the target's KV cache (`Reads.kv_cache`).

        Args:
            sequences: Access to the sequences in that cache (`eagle.target.view.TargetSequences`).
        """
        raise NotImplementedError(
            f"{type(self).__name__} reads the target's sequences: write open_with(sequences)"
        )

    def bind_target(self, view: Any) -> None:
        """Receive the target's layers before any sequence begins, for a drafter that drafts with them (`Reads.view`).

        Args:
            view: Access to the layers (`eagle.target.view.TargetView`).
        """
        raise NotImplementedError(
            f"{type(self).__name__} reads a view of the target: write bind_target(view)"
        )

    def forwards(self, budget: Budget) -> tuple[int, ...] | None:
        """Return how many tokens of a sequence each forward of a draft reads, in order, without the first forward.

        From these numbers the seconds of a draft are forecast. The first forward reads the newly committed tokens and
        is counted by `unread`. None if the drafter does not always run a network: its cost is then the measured
        seconds of whole drafts.

        Args:
            budget: The limits on the draft.
        """
        return None

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens the next draft's first forward reads: those that the drafter has not read yet.

        A draft's seconds are forecast from it and from `forwards`.

        Args:
            accepted: How many draft tokens of the last tree were accepted, the root not counted.
            depth: The levels of that tree.
        """
        # by default the accepted tokens and the root
        return accepted + 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of the drafter's state for one sequence, to report the memory that drafting takes.

        Only tensors that grow with the sequence count, such as a KV cache, and not weights or temporary tensors.

        Args:
            tokens: The length of the sequence, the tokens of a draft included.
            column: The bytes that one token takes in the target: its keys and values, and its state at one tap.
        """
        return 0

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any] | None:
        """Return a function that runs one forward of the drafter, to be timed; None if it has no forward.

        The policy of draft lengths and the tuner time it, to know the seconds of drafts of each size.

        Args:
            context: How many tokens are in the KV cache before the forward.
            rows: How many tokens the forward reads.
            scored: How many of them, from the last, get logits.
        """
        return None


class _SingleSequence:
    """A `DraftSequence` made of a `DraftState` with a single row."""

    def __init__(self, state: DraftState, noise: Noise | None) -> None:
        """Begin the only sequence, in row 0 of a new state.

        Args:
            state: The state, which changes.
            noise: The target's sampling noise; None if it is greedy.
        """
        self.state = state
        state.admit(0, noise)

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return the draft tree after the new tokens `update`, within `budget`, from row 0, the state's only one."""
        return self.state.propose({0: update}, {0: budget})[0]


class PerSequenceState:
    """Several sequences, each with its own `DraftSequence`, drafted for one after the other."""

    def __init__(self, drafter: Drafter) -> None:
        """Begin without rows (sequences); `drafter.begin` makes the state of each new one."""
        self.drafter = drafter
        # row -> the state of its sequence
        self.sequences: dict[int, DraftSequence] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a sequence as `row`, with a state of its own; `noise` is the target's (None if it is greedy)."""
        self.sequences[row] = self.drafter.begin(noise)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return a tree for each row (sequence), drafted one after the other; `RowErrors` if only some rows fail.

        Args:
            updates: Row -> the tokens that were committed since this row's last call.
            budgets: Row -> the limits on its tree.
        """

        def propose_row(row: int) -> DraftTree:
            """Return the tree of one row (sequence), by the state of its own; `run_rows` calls this for each."""
            return self.sequences[row].propose(updates[row], budgets[row])

        return run_rows(updates, propose_row)

    def fork(self, row: int, other: int) -> None:
        """Copy the state of the sequence `row` to a new one, `other`, for beam search; the drafter itself is shared."""
        # deepcopy takes objects that its memo holds already for copied, so weights and tables are not duplicated
        shared = [self.drafter, *vars(self.drafter).values()]
        memo = {id(value): value for value in shared}
        self.sequences[other] = copy.deepcopy(self.sequences[row], memo)

    def release(self, row: int) -> None:
        """Drop the state of `row`, whose sequence has ended."""
        del self.sequences[row]


class TrainableDrafter(nn.Module, Drafter):
    """A drafter with weights. `forward` returns the loss, because data-parallel wrappers synchronise only `forward`."""

    # the taps that the loss reads of the target, beside those that the head reads itself
    teacher_taps: tuple[int, ...] = (-1,)
    stored_as = "head"
    # whether the divisor of the loss is known only after `forward(batch, target_head, count=True)`, which returns it as
    # "divisor"
    counts_by_forward = False
    # [D], the token ids of the draft vocabulary, to which its logits belong; None for the whole vocabulary
    drafts: Tensor | None = None
    # whether its logits are those of the target's LM head, without any of its own: they may then be computed for a
    # subset of the vocabulary
    borrows_logits = False
    # whether its loss depends on `batch.progress`, so that the same step of a longer run has another loss
    follows_progress = False
    Settings: type  # the class of the recipe's section `drafter`

    def __init__(self, settings: Any, shape: HeadShape) -> None:
        """Make a head from its settings and a transformers config with its sizes, as a checkpoint does."""
        # a subclass makes its modules in its own __init__, after this one
        super().__init__()
        self.shape = shape
        self.settings: Any = settings  # of the subclass's own class `Settings`

    @classmethod
    def taps_for(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """Return the taps, indices of the target's layer inputs, that a head with these settings reads when it drafts.

        Args:
            settings: An instance of the class `Settings`.
            target_config: The target's transformers config.
        """
        return cls.taps

    @classmethod
    def context_taps(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """Return the taps (target layers) that the head reads at all tokens, also far from supervised ones.

        A store of features on disk keeps other taps only where a supervised token is predicted. The arguments are those
        of `taps_for`, whose taps these are by default.
        """
        return cls.taps_for(settings, target_config)

    @property
    def network(self) -> dict[str, Any]:
        """The name of the network and everything, besides sizes, that decides the meaning of its weights.

        Heads with the same network can start from one another and are served by the same engines.
        """
        return {"network": self.settings.kind}

    @property
    def query_groups(self) -> int:
        """The number of query heads that share one key head, in grouped-query attention."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion of this head could swap, for `eagle doctor` to test; by default none.

        Weights of decoder blocks need no entry.
        """
        return Parts()

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> TrainableDrafter:
        """Return a new head with the target's sizes.

        Args:
            settings: An instance of the class `Settings`.
            target_config: The target's transformers config.
            target_head: The target's embedding and LM head, from which weights may be copied.
            supervised: The supervised tokens of each training sequence, from which a draft vocabulary may be chosen.

        A class that `reads` the target's weights takes one more argument, `weights`: name -> tensor.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be made for a target: write for_target")

    def bind(self, target_head: TargetHead) -> TrainableDrafter:
        """Give the head the target's embedding and LM head, which it needs to draft; return it in evaluation mode.

        Nothing is copied: the target's modules stay its own, and are not stored with the head.
        """
        self.bound_to = (target_head,)
        return self.eval()

    def compile_parts(self) -> None:
        """Train with modules compiled by `torch.compile` from now on; results are the same up to rounding.

        Here there is nothing to compile, so it refuses; a head with such modules replaces this method.
        """
        raise ValueError(f"{type(self).__name__} has no parts to compile: leave train.compile out")

    def weight_groups(self) -> list[tuple[float, list[Tensor]]]:
        """Return the weights that training changes in groups, each with its factor of the learning rate."""
        return [(1.0, [weight for weight in self.parameters() if weight.requires_grad])]

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...] | None:
        """Return the numbers by which `forward` divides its sums over these sequences; None: by supervised tokens.

        A step that is split into several batches needs these numbers of the whole step, so that its loss does not
        depend on the split.

        Args:
            masks: The loss mask of each sequence, [T] for T tokens: true at supervised tokens.
            seeds: The random seed of each sequence, as some losses sample the positions that they count.
        """
        return None

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return loss terms by name: "total" is minimised, the rest is logged.

        Args:
            batch: Sequences, with the target's hidden states at their tokens.
            target_head: The target's embedding and LM head.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define its loss: write forward(batch, target_head)"
        )

    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return sums of this batch, from which drafters/parts/validation.py makes the figures of validation.

        Sums and not means, because they are added up over batches and processes first.

        Args:
            batch: Sequences, with the target's hidden states at their tokens.
            target_head: The target's embedding and LM head.
            trees: Tree shapes by name, of which the expected acceptance is estimated.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be validated: write validate(batch, target_head, trees), see "
            "parts/validation.py"
        )

    def draft_levels(
        self, batch: Batch, target_head: TargetHead, levels: int
    ) -> Iterable[tuple[Tensor, Any]]:
        """Yield for each draft level the head's states [S, ..] at all S supervised slots, and the level's LM head.

        A draft begins at each slot i, by reading token i + 1; its level d, from 0, predicts token i + 2 + d. The LM
        head is a function from states to logits, which `eagle doctor` compares with the target's.

        Args:
            batch: Sequences, with the target's hidden states at their tokens.
            target_head: The target's embedding and LM head.
            levels: How many levels to yield, from the first.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot be examined: write draft_levels, see recurrent/unroll.py"
        )
