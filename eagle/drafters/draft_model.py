"""A smaller language model as drafter (Leviathan et al. 2023, arXiv 2211.17192), with distillation (DistillSpec).

Distillation is that of Zhou et al. 2023, arXiv 2310.08461.
"""

# N tokens of all sequences, S supervised slots, K rows of one level, R of all levels, H width, V vocabulary, B rows

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from eagle.core.budget import Budget
from eagle.core.drafter import (
    ColumnBytes,
    Committed,
    HeadShape,
    Noise,
    TargetHead,
    TrainableDrafter,
)
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
from eagle.device import to_host, upload
from eagle.drafters.other_tokenizer import SameTokens, SharedTokens, TextPieces, TextState
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.growth import grow_rows, level_rows
from eagle.drafters.parts.objectives import Kind, Objective, OwnHead, distillation_loss
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.sequence_state import split_ragged
from eagle.drafters.parts.validation import validate_batch
from eagle.target.borrowed import is_close
from eagle.target.cache import NoCache
from eagle.target.loading import load_model, tokenizer_of
from eagle.target.slots import with_room
from eagle.target.structure import base_of, cache_name_of, count_cache_layers
from eagle.target.target import Target

Divergence = Literal["tokens", "forward_kl", "reverse_kl", "jsd", "tv"]
KINDS: dict[Divergence, Kind] = {
    "tokens": "cross_entropy",
    "forward_kl": "cross_entropy",
    "reverse_kl": "reverse_kl",
    "jsd": "jsd",
    "tv": "tv",
}
NAMED = 5  # tokens that a refusal names


class DraftModelSettings(BaseModel):
    """Settings of the draft model in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["draft_model"] = "draft_model"
    # causal language model to start from; null: a new model of the sizes below
    model: str | None = None
    layers: int = Field(2, ge=1)  # number of layers of a new model
    hidden_size: int | None = None  # hidden size of a new model; by default the target's
    intermediate_size: int | None = None  # MLP width of a new model
    # the loss: a divergence from the target, or "tokens": cross-entropy with the tokens of the data
    divergence: Divergence = "forward_kl"
    # train on the answers in the data, or on answers that the draft model samples
    samples: Literal["data", "own"] = "data"


class DraftModel(TrainableDrafter):
    """A language model with its own cache that reads the committed tokens and drafts a tree after them."""

    # the input of the target's LM head, from which a loss takes the target's probs
    teacher_taps = (-1,)
    stored_as = "files"  # it is loaded by `load`, not as a head of another model
    Settings = DraftModelSettings
    settings: DraftModelSettings
    # one entry, the model as a target, which reads trees, once it is bound
    as_target: tuple[Target, ...] = ()
    # which tokens it shares with a target that has another tokenizer; None if it has the target's
    shared: SharedTokens | None = None
    # the tokenizers of the model and of the target, if drafts are translated as text
    pieces: tuple[TextPieces, TextPieces] | None = None

    def __init__(self, settings: DraftModelSettings, shape: HeadShape, model: Any = None) -> None:
        """Take a transformers model with the config `shape`, or make one with fresh weights."""
        super().__init__(settings, shape)
        self.model = (
            AutoModelForCausalLM.from_config(shape, dtype=torch.float32) if model is None else model
        )

    @classmethod
    def for_target(
        cls,
        settings: DraftModelSettings,
        target_config: Any,
        target_head: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> DraftModel:
        """Return a model to train: a new one with the target's vocabulary, or the one that `settings.model` names.

        A named model is refused if its tokens are not the target's, or its logits no plain product with its LM head.
        `target_head` and `supervised` are not used: nothing is copied, and all tokens are drafted.
        """
        if settings.model is None:
            return cls(settings, _fresh_config(target_config, settings))
        model = load_model(settings.model, torch.float32)
        check_matrix(model)
        tokenizer = tokenizer_of(settings.model)
        target_tokenizer = tokenizer_of(target_config._name_or_path)
        size = model.config.get_text_config().vocab_size
        # both checks refuse
        check_vocabulary(tokenizer, target_tokenizer, size, target_config.vocab_size)
        return cls(settings, model.config, model)

    @classmethod
    def load(
        cls, folder: str | Path, target: Target, translate: Literal["tokens", "text"] = "tokens"
    ) -> DraftModel:
        """Return any causal language model as a drafter for a target, in the target's dtype and on its device.

        Args:
            folder: The model's folder.
            target: The target.
            translate: What one with another tokenizer drafts: "tokens", those that both have, or "text", all of its
                own, whose text the target's tokenizer splits again.
        """
        if translate not in ("tokens", "text"):
            raise ValueError(f"translate is {translate!r}, expected tokens or text")
        # loaded as a target is, since it reads trees in the same way
        small = Target.load(folder, dtype=target.model.dtype, device=str(target.device))
        settings = DraftModelSettings(layers=small.config.num_hidden_layers)
        drafter = cls(settings, small.config, small.model)
        if None in (small.tokenizer, target.tokenizer):
            check_vocabulary(small.tokenizer, target.tokenizer, small.vocab_size, target.vocab_size)
        elif translate == "text":
            drafter.pieces = (TextPieces(small.tokenizer), TextPieces(target.tokenizer))
        elif differing_words(small.tokenizer, target.tokenizer):
            drafter.shared = SharedTokens(small.tokenizer, target.tokenizer, small.device)
            print(
                f"{folder} has another tokenizer than the target: it drafts the {len(drafter.shared.drafts):,} of "
                f"{target.vocab_size:,} tokens that both have",
                file=sys.stderr,
            )
        return drafter.bind(target.head)

    @property
    def network(self) -> dict[str, Any]:
        """The model's architecture."""
        return {"network": "draft_model", "model_type": self.shape.model_type}

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss, or the cross-entropy of the data's tokens: a mean over S supervised tokens.

        It is "total", and the same number under the name of the divergence is logged.

        Args:
            batch: The sequences, with the target's states.
            target_head: Has the target's LM head, whose distribution is the teacher.
        """
        output = self.model.get_output_embeddings()
        if getattr(output, "bias", None) is not None or getattr(self.shape, "logit_scale", None):
            raise ValueError(
                f"a {self.shape.model_type} cannot be distilled here: its LM head has a bias or a scale"
            )
        # both vocabularies may have unused rows at the end, so the first rows of both are compared
        head = OwnHead(output.weight[: target_head.weight.shape[0]])
        # [S], the index of the token before each supervised one, whose state predicts it
        before = upload(batch.loss_mask.nonzero()[:, 0] - 1, batch.tokens.device)
        # [S, H], and the teacher's tokens [S] or states [S, D]
        student = self._states(batch).index_select(0, before)
        divergence = self.settings.divergence
        if divergence == "tokens":
            teacher = batch.tokens.index_select(0, before + 1)
            teacher_head = None
        else:
            teacher = batch.select_taps((-1,))[:, 0].index_select(0, before)
            # the target's LM head with as many rows as the draft model's
            teacher_head = target_head.narrow(slice(len(head.weight)))
        # each supervised token counts alike: the sum is their mean; a batch without any has no row to weigh
        weights = torch.full((1, len(before)), 1 / max(len(before), 1), device=student.device)
        total, _ = distillation_loss(
            student[None],
            teacher,
            weights,
            (head, teacher_head),
            objective=Objective(KINDS[divergence]),
            dtype=target_head.weight.dtype,
        )
        return {"total": total, divergence: total.detach()}

    def _states(self, batch: Batch) -> Tensor:
        """Return the input [N, H] of the draft model's LM head at all N tokens of a batch.

        No logits are made here, as a loss needs them at few tokens.
        """
        # padded on the right: attention is causal, so that no mask is needed
        tokens = pad_sequence(list(batch.tokens.split(batch.lengths)), batch_first=True)
        base = base_of(self.model)
        # without any cache transformers looks for packed sequences, for which the host waits
        cache = NoCache(count_cache_layers(self.model.config.get_text_config()))
        output = base(
            input_ids=self.clip_to_vocab(tokens), use_cache=False, **{cache_name_of(base): cache}
        )
        states = output.last_hidden_state  # [B, T, H], for B sequences padded to T tokens
        # the sequences one after the other again, without padding
        return torch.cat([row[:length] for row, length in zip(states, batch.lengths, strict=True)])

    def clip_to_vocab(self, tokens: Tensor) -> Tensor:
        """Return tokens clipped to the model's vocabulary: targets have unused rows beyond the tokenizer's tokens."""
        return tokens.clamp(max=self.last_token)

    @property
    def last_token(self) -> int:
        """The largest id that the model reads: its embedding may have other rows than its LM head."""
        return self.model.get_input_embeddings().weight.shape[0] - 1

    @torch.no_grad()
    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return sums over a batch: tokens that each tree would have kept, and agreement with the target's probs.

        Args:
            batch: The sequences, with the target's states.
            target_head: The target's LM head.
            trees: Fixed tree shapes by name, each a tuple of paths from the root.
        """
        output = self.model.get_output_embeddings()
        size = target_head.weight.shape[0]

        # logits over the target's vocabulary: tokens that the model lacks get minus infinity
        def student(state: Tensor) -> Tensor:
            """Return the draft model's logits [.., V] over the target's V tokens, from its states [.., H]."""
            logits = output(state.to(output.weight.dtype))[..., :size]
            return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)

        states = self._states(batch)
        # [S], the index of the token before each supervised one
        before = (batch.loss_mask.nonzero()[:, 0] - 1).to(batch.tokens.device)
        # the levels of the deepest tree
        steps = max(max(map(len, paths)) for paths in trees.values())
        # the state of level d is that of d tokens later; an index beyond the end of a sequence has no weight
        level_states = [states[(before + step).clamp(max=len(states) - 1)] for step in range(steps)]
        return validate_batch(batch, level_states, ([student] * steps, target_head.logits), trees)

    # -- drafting -----------------------------------------------------------------------------------------------------

    def bind(self, target_head: TargetHead) -> DraftModel:
        """Make the model read draft trees, as a target does; its weights are not trained from here on.

        Of `target_head` it takes the size of the target's vocabulary.
        """
        model = Target(self.model)
        # refuses a model that cannot read trees
        model.reader.check()
        self.as_target = (model,)
        # drafts that become text are of all of its own tokens
        target_size = model.vocab_size if self.pieces else target_head.weight.shape[0]
        self.tokens = self.shared or SameTokens(
            model.vocab_size, target_size, self.last_token, model.device
        )
        return self.eval()

    def open(self) -> ModelState | TextState:
        """Return the state for several sequences drafted in a batch."""
        state = ModelState(self.as_target[0], self.tokens)
        return TextState(state, *self.pieces) if self.pieces else state

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return how many nodes each forward of a draft after the first reads, level by level."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return how many tokens the next draft's first forward reads: the root, and an accepted node of the last one.

        Accepted nodes of other levels were read when they were drafted; those of the last level are not.

        Args:
            accepted: How many draft tokens of the last tree were accepted.
            depth: The levels of that tree.
        """
        # a node of the last level is accepted if as many tokens as levels are
        return 1 + (accepted == depth > 0)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of the model's own KV cache for a sequence of `tokens` tokens.

        `column`, the bytes of a token in the target, does not count.
        """
        return self.as_target[0].cache_bytes(with_room(tokens))

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: a forward of `rows` tokens after `context` cached ones.

        The last `scored` of them get logits. Each call overwrites the tokens of the call before.
        """
        (model,) = self.as_target
        reader = model.reader
        reader.check()
        cache = reader.new_cache()
        tokens = torch.ones(context + rows, dtype=torch.long)

        @torch.inference_mode()
        def run() -> Tensor:
            hidden = reader.read_text(tokens[context:], context, cache)
            return model.head.logits(hidden[0, -scored:])

        with torch.inference_mode():
            reader.read_text(tokens[:context], 0, cache)
        return run


def _fresh_config(target_config: Any, settings: DraftModelSettings) -> Any:
    """Return the config of a new draft model: the target's shape at another width and depth.

    Its attention heads are as wide as the target's, so a smaller width has fewer of them.
    """
    # `head_shape` makes the config of a whole draft head or model; the first call reads the target's sizes
    target_shape: Any = head_shape(target_config, num_hidden_layers=settings.layers)
    width = settings.hidden_size or target_shape.hidden_size
    if width % target_shape.head_dim:
        raise ValueError(
            f"drafter.hidden_size is {width}, expected a multiple of {target_shape.head_dim}, a head's width"
        )
    heads = width // target_shape.head_dim
    # as many key heads as the target, or one for each query head if those cannot be shared out evenly among them
    keys = heads if heads % target_shape.num_key_value_heads else target_shape.num_key_value_heads
    return head_shape(
        target_config,
        num_hidden_layers=settings.layers,
        hidden_size=width,
        intermediate_size=settings.intermediate_size
        or target_shape.intermediate_size * width // target_shape.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=keys,
    )


@torch.no_grad()
def check_matrix(model: Any) -> None:
    """Refuse to train a model whose logits are not a plain matrix product of its base's output.

    The chunked loss computes logits by that product, which scales or caps would change.
    """
    # four tokens show it; a very small vocabulary has fewer different ones
    tokens = torch.arange(1, 5)[None] % model.get_input_embeddings().weight.shape[0]
    was_training = model.training
    model.eval()
    states = base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model(input_ids=tokens, use_cache=False).logits
    model.train(was_training)
    output = model.get_output_embeddings()
    if states.shape[-1] != output.weight.shape[1] or not is_close(output(states), logits):
        raise ValueError(
            f"a {model.config.model_type} cannot be distilled here: its logits are scaled, capped or made of "
            "transformed states. It drafts as it is; as a model to train take one whose LM head is a plain matrix"
        )


def check_vocabulary(tokenizer: Any, target_tokenizer: Any, size: int, target_size: int) -> None:
    """Refuse a draft model whose tokens have other ids than the target's: its drafts would mean other words.

    Args:
        tokenizer: The draft model's, or None.
        target_tokenizer: The target's, or None. Without both tokenizers only sizes can be compared.
        size: The draft model's vocabulary size. Unused rows at the end may differ.
        target_size: The target's.
    """
    if tokenizer is None or target_tokenizer is None:
        if size != target_size:
            raise ValueError(
                f"the draft model has {size} tokens, the target {target_size}, and without both tokenizers nobody "
                "knows whether they mean the same: save the tokenizers beside the models"
            )
        return
    differ = differing_words(tokenizer, target_tokenizer)
    if not differ:
        return
    # word -> token id
    ids = tokenizer.get_vocab()
    target_ids = target_tokenizer.get_vocab()
    some = ", ".join(
        f"{word!r} is {ids.get(word)} here and {target_ids.get(word)} there"
        for word in differ[:NAMED]
    )
    raise ValueError(
        f"the draft model has another vocabulary than the target: {len(differ)} tokens differ ({some}); expected a "
        "model with the target's tokenizer"
    )


def differing_words(tokenizer: Any, target_tokenizer: Any) -> list[str]:
    """Return the words of two vocabularies that have not the same id in both."""
    ids = tokenizer.get_vocab()
    target_ids = target_tokenizer.get_vocab()
    return sorted(
        word for word in ids.keys() | target_ids.keys() if ids.get(word) != target_ids.get(word)
    )


class ModelState:
    """The sequences of a batch in the draft model's KV cache, each followed by the nodes of its last draft.

    The nodes that the target has accepted stay in the cache, so that their tokens are not read again.
    """

    def __init__(self, model: Target, tokens: SameTokens | SharedTokens) -> None:
        """Begin without rows.

        Args:
            model: The draft model as a target, which reads trees.
            tokens: Which tokens of the target it drafts, and how it reads the target's tokens.
        """
        self.model = model
        self.tokens = tokens
        self.state = model.open()
        # by row: the target's sampling noise, which trees are ranked with; None if the target is greedy
        self.noises: dict[int, Noise | None] = {}
        # by row: committed tokens, the root not counted; the target's, and the draft model's that spell them
        self.positions: dict[int, int] = {}
        self.confirmed: dict[int, int] = {}
        # by row, for each level of the last draft that was read: its nodes' tokens, and their parents' indices in the
        # level above
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; its tokens are read at the first proposal."""
        self.noises[row] = noise
        self.positions[row] = 0
        self.confirmed[row] = 0
        self.levels[row] = []

    def fork(self, row: int, other: int) -> None:
        """Copy a row to the new row `other`; only the old row keeps its last draft."""

        self.noises[other] = self.noises[row]
        self.positions[other] = self.positions[row]
        self.confirmed[other] = self.confirmed[row]
        self.levels[other] = []
        # a row that has not drafted is not in the cache yet
        if row in self.state.rows:
            self._update_columns()
            self.state.fork(row, other)

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.positions[row], self.confirmed[row], self.levels[row]
        # a row that has not drafted is not in the cache yet
        if row not in self.state.rows:
            return
        rows_before = list(self.state.rows)
        self._update_columns()
        self.state.release(row)
        for moved, before in zip(self.state.rows, rows_before, strict=False):
            # the row that moves to the free place in the cache leaves the columns of its draft there
            if moved != before:
                self.levels[moved] = []

    def rewind(self, row: int, tokens: list[int]) -> int:
        """Drop what a row has read beyond the beginning that it shares with `tokens`; return the tokens that stay.

        The next update continues after these, with the last of them as the last root.

        Args:
            row: The row.
            tokens: Its whole sequence from now on. The last one is never kept, as it must be read to give logits.
        """
        cached = self.state.sequence(row) if row in self.state.rows else []
        limit = min(len(cached), len(tokens) - 1)
        kept = next((i for i in range(limit) if cached[i] != tokens[i]), limit)
        if kept < len(cached):
            kept = self.state.rewind(row, kept)
            # the last draft followed tokens that are gone
            self.levels[row] = []
            if not kept:
                # read as a new sequence
                noise = self.noises[row]
                self.release(row)
                self.admit(row, noise)
        self.positions[row] = self.confirmed[row] = max(kept - 1, 0)
        return kept

    @torch.inference_mode()
    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Read what was committed, and return trees grown from the model's logits.

        A row whose sequence the model cannot read on gets a tree with the root alone.

        Args:
            updates: By row, the tokens that the target has committed since the last call, and the new root.
            budgets: By row, the limits on its tree.
        """
        trees: dict[int, DraftTree] = {}
        new_tokens: dict[int, list[int]] = {}  # by row: the committed tokens, then the root
        depths: dict[int, int] = {}  # by row: the levels of its tree
        for row, update in updates.items():
            committed = update.tokens.tolist()
            self.positions[row] += len(committed)
            self.confirmed[row] += len(self.tokens.spell(committed))
            # the root is read too, maybe as several tokens, of which a draft can do without one
            more = len(self.tokens.spell([update.root])) - 1
            depths[row] = self._clamp_depth(row, budgets[row].depth + more) - more
            if depths[row] > 0:
                new_tokens[row] = [*committed, update.root]
            else:
                trees[row] = DraftTree.chain([update.root])
        logits = self._read(new_tokens)  # by row, [V], after the root
        # a read may have changed the order of rows in the cache
        for rows in self._group_rows([row for row in self.state.rows if row in new_tokens]):
            requests = []
            for row in rows:
                budget = budgets[row].within(depths[row])
                # of the root's children, in the target's sequence
                position = self.positions[row] + 1
                requests.append(DraftRequest(updates[row].root, position, budget, self.noises[row]))
            grown = self._grow(rows, requests, [logits[row] for row in rows])
            trees |= zip(rows, grown, strict=True)
        return trees

    def _grow(
        self, rows: list[int], requests: list[DraftRequest], logits: Sequence[Tensor]
    ) -> list[DraftTree]:
        """Return the trees of B rows that may share a forward.

        Args:
            rows: The rows, in the order of the cache.
            requests: The root, position, budget and noise of each row's tree.
            logits: [V] of each row, after its root.
        """
        depths: list[int] = []  # of all nodes that were read so far

        def level(
            depth: int, indices: list[int], tokens: Tensor, parents: Tensor, tree_mask: Tensor
        ) -> Tensor:
            """Return the logits [B, K, V] after the K nodes of one level of B rows' trees, and note them in `levels`.

            Args:
                depth: The depth of the nodes, 1 for the root's children.
                indices: The indices in `rows` of the rows whose trees still grow.
                tokens: [B, K], the tokens of the nodes.
                parents: [B, K], the index of each node's parent in the level above.
                tree_mask: [B, K, R], which of the R nodes read so far each of them sees.
            """
            # rows with another budget grow after those before them, again from the first level on
            if depth == 1:
                depths.clear()
            # the root is committed in this model's cache, so depth 0 is that of its children
            depths.extend([depth - 1] * tokens.shape[1])
            drafting = [rows[index] for index in indices]
            for row, row_tokens, row_parents in zip(drafting, tokens, parents, strict=True):
                self.levels[row].append((row_tokens, row_parents))
            own_tokens = self.tokens.translate(tokens)
            return self.tokens.select(
                self.state.read_ahead(drafting, own_tokens, depths, tree_mask)
            )

        first = self.tokens.select(torch.stack(list(logits)))
        return grow_rows(requests, first, level, self.tokens.drafts)

    # -- what may be read together ------------------------------------------------------------------------------------

    def _clamp_depth(self, row: int, depth: int) -> int:
        """Return how many levels a row's tree may have: `depth`, limited by what the model can read; 0 or less: none.

        The limits are the model's last position and the border of its rotary frequencies, a length beyond which some
        models (longrope) read the whole sequence with other frequencies.
        """
        border = self.model.border
        # tokens in the cache
        read = self.state.length(row) if row in self.state.rows else 0
        ends = [self.model.max_positions or math.inf]
        # all of a sequence must be read with one set of frequencies: one that began below the border cannot grow
        # across it, and one that was longer at its first read can go on
        if 0 < read <= border or self.confirmed[row] < border:
            ends.append(border)
        return int(min(depth, min(ends) - self.confirmed[row]))

    def _group_rows(self, rows: list[int]) -> list[list[int]]:
        """Return the rows of each forward: one for all, but each sequence beyond the border of frequencies alone."""
        alone = [row for row in rows if self.model.is_alone(self.confirmed[row])]
        together = [row for row in rows if row not in alone]
        groups = [[row] for row in alone]
        if together:
            groups.append(together)
        return groups

    def _update_columns(self) -> None:
        """Tell the model's state how many cache columns each row may need, its draft included.

        The state frees what is beyond them when it next changes the size of its cache.
        """
        for row in self.state.rows:
            drafted = sum(len(tokens) for tokens, _ in self.levels.get(row, ()))
            # half as many again, as a sequence grows
            self.state.columns_by_row[row] = (self.state.length(row) + drafted) * 3 // 2

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def _read(self, new_tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read new sequences, and what was committed of others, and return by row the logits [V] after its root.

        `new_tokens` are by row the committed tokens since the last call, then the root.
        """
        logits = self._read_prompts(
            {row: tokens for row, tokens in new_tokens.items() if row not in self.state.rows}
        )
        # rows that were in the cache before this call
        earlier = [row for row in self.state.rows if row in new_tokens and row not in logits]
        for rows in self._group_rows(earlier):
            logits |= self._read_confirmed({row: new_tokens[row] for row in rows})
        return logits

    def _read_prompts(self, prompts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read new sequences, by row, from their first token on, and return by row the logits [V] after each."""
        logits: dict[int, Tensor] = {}
        if prompts:
            self._update_columns()
        for row, prompt in prompts.items():
            self.state.admit(row, self.tokens.spell(prompt))
        # a call reads as many prompts as fit in one forward
        while len(logits) < len(prompts):
            for row, prompt_output in self.state.read_prompts().items():
                logits[row] = prompt_output.output.logits[0]
        return logits

    def _read_confirmed(self, committed: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read what was committed of rows in the cache, and return by row the logits [V] after the new root.

        Nodes of the last draft that the target accepted stay in the cache, and only the tokens after them are read.

        Args:
            committed: By row, the last root, the tokens accepted after it, and the new root.
        """
        columns: dict[
            int, list[int]
        ] = {}  # by row: the cache columns of accepted nodes, after those of the sequence
        tokens: dict[int, list[int]] = {}  # by row: the tokens of these nodes
        unread: dict[int, list[int]] = {}  # by row: the tokens after them, the new root last
        for row, levels in self._download_levels(list(committed)).items():
            # the first token is the last root, which was read then
            new = committed[row][1:]
            # the new root is not looked for: it must be read to give logits
            columns[row] = _find_accepted(levels, new[:-1])
            count = len(columns[row])
            # drafted tokens are one token of the draft model each
            tokens[row] = self.tokens.spell(new[:count])
            unread[row] = self.tokens.spell(new[count:])
            self.levels[row] = []
        self.state.keep_columns(columns, tokens)
        logits: dict[int, Tensor] = {}
        # rows with about as many tokens share a forward, so that little is padded
        for group in split_ragged({row: len(row_tokens) for row, row_tokens in unread.items()}):
            logits |= self.state.extend({row: unread[row] for row in group})
        return logits

    def _download_levels(self, rows: list[int]) -> dict[int, list[tuple[list[int], list[int]]]]:
        """Return the levels of each row's last draft as lists on the host.

        A level is the tokens of its nodes, and the index of each node's parent in the level above.
        """
        tensors = []
        for row in rows:
            for tokens, parents in self.levels[row]:
                tensors += [tokens, parents]
        # all tensors in one transfer, in the order in which they are taken apart below
        values = iter(to_host(tensors))
        drafted: dict[int, list[tuple[list[int], list[int]]]] = {}
        for row in rows:
            drafted[row] = [
                (next(values).tolist(), next(values).tolist()) for _ in self.levels[row]
            ]
        return drafted


def _find_accepted(levels: list[tuple[list[int], list[int]]], tokens: list[int]) -> list[int]:
    """Return the path of the last draft along these committed tokens, as far as it was drafted.

    It is a list of nodes, one for each level, which are numbered over all levels, as their columns in the cache.

    Args:
        levels: Of each level of the draft, its nodes' tokens and their parents' indices in the level above.
        tokens: The tokens that were committed after the draft's root.
    """
    path: list[int] = []
    parent = None  # the index of the path's node in the level above
    first = 0  # the number of the level's first node
    for (level_tokens, parents), token in zip(levels, tokens, strict=False):
        matches = []
        for index, level_token in enumerate(level_tokens):
            # at the first level all nodes are children of the root
            if level_token == token and (parent is None or parents[index] == parent):
                matches.append(index)
        if not matches:
            break
        parent = matches[0]
        path.append(first + parent)
        first += len(level_tokens)
    return path
