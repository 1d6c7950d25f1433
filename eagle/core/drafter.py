"""The protocol of drafting methods: their inputs and their outputs."""

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
from eagle.core.target_head import TargetHead as TargetHead
from eagle.core.tree import DraftTree, Paths


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a network that a conversion can exchange in silence; `eagle doctor` asks about each of them."""

    by_tap: tuple[
        str, ...
    ] = ()  # parameters whose columns, and stacks whose modules, come one for each tap
    halves: tuple[
        tuple[str, ...], ...
    ] = ()  # matrices, those of one input together, that read embedding and state
    alike: tuple[
        tuple[str, str], ...
    ] = ()  # pairs of parameters of one shape beside those of blocks
    tokens: tuple[str, ...] = ()  # settings that name a token of the vocabulary
    # so many tokens are guessed in one forward; None where each level reads the one before
    levels: int | None = None


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
    """The sampling noise of the target, as a drafter may use it, in units of the plain logits."""

    @property
    def temperature(self) -> float:
        """Above 0."""

    def __call__(self, positions: list[int]) -> Tensor:
        """Return what the target adds to its logits [P, V] when it chooses the tokens at these positions."""

    def own(self, rows: int) -> Tensor:
        """Return noise [rows, V] of the same kind that the target never sees, new in every call."""

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Return the logits [K, V], far lower for tokens that a target with these logits would not sample."""


@dataclass(frozen=True, slots=True)
class Reads:
    """The things a drafter reads from the target besides its `taps` at accepted tokens; it gets nothing else."""

    choices: int = 0  # so many of the tokens that the target prefers after each node of the last tree: `Committed`
    view: bool = False  # the target's layers, to draft with: they come by `bind_target`
    texts: bool = False  # keys and values in the target's cache: they come by `open_with`
    weights: bool = False  # the target's tensors by name when a head is made: `for_target` gets them as `weights`
    states: bool = False  # the target's states after each node of the last tree, at the drafter's taps: `Committed`


class ColumnBytes(NamedTuple):
    """Bytes of one token in the target."""

    cached: int  # of its keys and values in all layers
    tapped: int  # of its state at one tap


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens that the target has committed since the drafter's last proposal."""

    tokens: Tensor  # [A]
    features: Tensor | None  # [A, L, D], the taps that the drafter asked for
    root: int  # chosen by the target, not yet read by it
    # that the target read last, where the drafter reads choices or states
    tree: DraftTree | None = None
    # [N, C], the target's choice after each node of the tree, then what comes next
    choices: Tensor | None = None
    states: Tensor | None = None  # [N, L, D], the target's states after each node of the tree

    @classmethod
    def join(cls, updates: Sequence[Committed]) -> Committed:
        """Return one update from several in a row, for a drafter that was not asked in between."""
        last = updates[-1]
        if len(updates) == 1:
            return last
        tokens = torch.cat([update.tokens for update in updates])
        features = [update.features for update in updates if update.features is not None]
        return replace(last, tokens=tokens, features=torch.cat(features) if features else None)


class DraftText(Protocol):
    """A drafter's state for one sequence."""

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return a tree rooted at `update.root`, of at most `budget.nodes` further nodes."""


class DraftState(Protocol):
    """A drafter's state for several sequences, by row."""

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a sequence in a row; `noise` is the target's sampling noise (None if it is greedy)."""

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return a tree for each row, rooted at its update's root, with at most its budget's nodes."""

    def fork(self, row: int, other: int) -> None:
        """Copy the state of `row` to a new row `other`."""

    def release(self, row: int) -> None:
        """Release a row."""


class Drafter:
    """Proposes a draft tree after the committed tokens; the loop and the tuner use this interface and no concrete type.

    It holds no sequence itself: `begin` makes the state for one sequence, `open` for several. A subclass defines one of
    them and inherits the other. Drafters that read the target's cache define `open_with` instead.
    """

    taps: tuple[int, ...] = ()  # the target's layer inputs that it reads of accepted tokens
    # "files" are read by its own `load(folder, target)`
    stored_as: Literal["nothing", "files", "head"] = "nothing"
    reads: Reads = Reads()
    budget: Budget | None = None  # what it was tuned to
    rates_nodes = False  # whether it says how likely a child of a node is kept, which `Budget.confidence` asks for
    frozen: tuple[TargetHead, ...] = ()  # what it borrows once it is bound

    def begin(self, noise: Noise | None = None) -> DraftText:
        """Return the state for one new sequence, by default the only row of what `open` returns for many.

        Args:
            noise: The target's sampling noise; None if it is greedy.
        """
        # this begin calls open, and the default open calls begin: a class that defines neither would call for ever
        if type(self).open is Drafter.open:
            # a drafter that reads the target's cached sequences gets them from open_with alone
            missing = (
                " without the target's texts: call open_with"
                if self.reads.texts
                else ": write begin or open"
            )
            raise NotImplementedError(f"{type(self).__name__} cannot draft{missing}")
        return _OnlyText(self.open(), noise)

    def open(self) -> DraftState:
        """Return the state for several sequences decoded in a batch."""
        return EachText(self)

    def open_with(self, texts: Any) -> DraftState:
        """Return the state for several sequences, with the target's cache rows (`eagle.target.view.TargetTexts`)."""
        raise NotImplementedError(
            f"{type(self).__name__} reads the target's texts: write open_with(texts)"
        )

    def bind_target(self, view: Any) -> None:
        """Receive the target's layers (`eagle.target.view.TargetView`) before any sequence, if it `reads` a view."""
        raise NotImplementedError(
            f"{type(self).__name__} reads a view of the target: write bind_target(view)"
        )

    def forwards(self, budget: Budget) -> tuple[int, ...] | None:
        """Return the number of rows in each of a draft's forwards after the first.

        The first reads the newly committed tokens. None if it does not always run a network: then the measured seconds
        of drafts are their cost.
        """
        return None

    def unread(self, accepted: int, depth: int) -> int:
        """Return the rows of the next draft's first forward, after `accepted` tokens of a tree of `depth` levels."""
        return accepted + 1

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes that its state comes to keep of so many tokens, a draft's included.

        Tensors with columns for a sequence count, not weights or what a draft computes and forgets.

        Args:
            tokens: Of the sequence.
            column: What a token takes in the target.
        """
        return 0

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any] | None:
        """Return a function to time: a forward of `rows` rows after `context` tokens, the last `scored` with logits."""
        return None


class _OnlyText:
    """One sequence on top of a `DraftState` with a single row."""

    def __init__(self, state: DraftState, noise: Noise | None) -> None:
        self.state = state
        state.admit(0, noise)

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Return the tree of the single row."""
        return self.state.propose({0: update}, {0: budget})[0]


class EachText:
    """Several sequences, each with its own `DraftText`, drafted for one after the other."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        # by row
        self.texts: dict[int, DraftText] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a sequence for the row."""
        self.texts[row] = self.drafter.begin(noise)

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return a tree for each row, one after the other; `RowErrors` if only some rows fail."""

        def propose_row(row: int) -> DraftTree:
            return self.texts[row].propose(updates[row], budgets[row])

        return run_rows(updates, propose_row)

    def fork(self, row: int, other: int) -> None:
        """Copy the row's sequence to `other`; the drafter itself is shared."""
        # deepcopy does not copy what its memo holds already
        shared = [self.drafter, *vars(self.drafter).values()]
        memo = {id(value): value for value in shared}
        self.texts[other] = copy.deepcopy(self.texts[row], memo)

    def release(self, row: int) -> None:
        """Forget the row."""
        del self.texts[row]


class TrainableDrafter(nn.Module, Drafter):
    """A drafter with weights. `forward` returns the loss, because data-parallel wrappers synchronise only `forward`."""

    teacher_taps: tuple[int, ...] = (-1,)
    stored_as = "head"
    # whether only `forward(batch, frozen, count=True)` knows its divisor, as "divisor"
    counts_by_forward = False
    # [D], the draft vocabulary, whose tokens its logits have; None for all tokens
    drafts: Tensor | None = None
    # whether the logits of its drafts are those of the target's LM head alone, of which it may compute a part
    borrows_logits = False
    # whether its loss depends on `batch.progress`: a step of a longer run is another one
    follows_progress = False
    Settings: type  # what a recipe may say about it

    def __init__(self, settings: Any, shape: HeadShape) -> None:
        """Make a head from its settings and a transformers config with its sizes, as a checkpoint does."""
        # a method's own __init__ makes the modules
        super().__init__()
        self.shape = shape
        self.settings: Any = settings  # each method names the class of its own

    @classmethod
    def taps_for(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """Return the target's layer inputs that a head with these settings reads when it drafts."""
        return cls.taps

    @classmethod
    def context_taps(cls, settings: Any, target_config: Any) -> tuple[int, ...]:
        """Return the taps that training reads at every position, not only where a supervised token is predicted."""
        return cls.taps_for(settings, target_config)

    @property
    def network(self) -> dict[str, Any]:
        """The name of the network and everything, besides sizes, that decides the meaning of its weights.

        Heads with the same network can start from one another and are served by the same engines.
        """
        return {"network": self.settings.kind}

    @property
    def query_groups(self) -> int:
        """The number of query heads that share a key."""
        return self.shape.num_attention_heads // self.shape.num_key_value_heads

    @property
    def parts(self) -> Parts:
        """The parts that only this network has; those of blocks, norms and numbered stacks are known by their names."""
        return Parts()

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> TrainableDrafter:
        """Return a new head with the target's sizes.

        Args:
            settings: Of the recipe.
            target_config: The target's, of transformers.
            frozen: Its embedding and LM head, which a head may use.
            supervised: The supervised tokens of each sequence, of which a head may choose its vocabulary.

        A class that `reads` the target's weights takes one more argument, `weights`: name -> tensor.
        """
        raise NotImplementedError(f"{cls.__name__} cannot be made for a target: write for_target")

    def bind(self, frozen: TargetHead) -> TrainableDrafter:
        """Give the head the target's embedding and LM head, which it needs to draft."""
        self.frozen = (frozen,)
        return self.eval()

    def compile_parts(self) -> None:
        """Compile the head's parts for training with `torch.compile`; results are the same up to rounding."""
        raise ValueError(f"{type(self).__name__} has no parts to compile: leave train.compile out")

    def divisors(self, masks: Sequence[Tensor], seeds: Sequence[int]) -> tuple[float, ...] | None:
        """Return the divisors of `forward`, summed over sequences; None if it is a mean over their supervised slots."""
        return None

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """Return loss terms: "total" is minimised, the rest is logged."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define its loss: write forward(batch, frozen)"
        )

    def validate(
        self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return sums, added up over batches and processes, of which drafters/parts/validation.py makes figures."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be validated: write validate(batch, frozen, trees), see parts/validation.py"
        )

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> Iterable[tuple[Tensor, Any]]:
        """Yield for each level of a chain the states [S, ..] at all supervised slots and the head that gives logits."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot be examined: write draft_levels, see recurrent/unroll.py"
        )
