"""A smaller language model as drafter (Leviathan et al. 2023, arXiv 2211.17192), with distillation (DistillSpec).

Distillation is that of Zhou et al. 2023, arXiv 2310.08461.
"""

# N tokens of all sequences, S supervised slots, K rows of one level, R of all levels, H width, V vocabulary, B rows

from __future__ import annotations

import math
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
    # a causal language model to start from; by default fresh weights of the sizes below
    model: str | None = None
    layers: int = Field(2, ge=1)  # of a fresh model
    hidden_size: int | None = None  # of a fresh model; by default the target's
    intermediate_size: int | None = None  # of a fresh model's MLP
    # what is minimized; "tokens": cross-entropy with the sequence
    divergence: Divergence = "forward_kl"
    samples: Literal["data", "own"] = "data"  # learn on the data's answers, or on the model's own


class DraftModel(TrainableDrafter):
    """A language model with its own cache that reads the committed tokens and drafts a tree after them."""

    teacher_taps = (-1,)
    stored_as = "files"
    Settings = DraftModelSettings
    settings: DraftModelSettings
    as_target: tuple[Target, ...] = ()  # the model as a target, which reads trees, once it is bound

    def __init__(self, settings: DraftModelSettings, shape: HeadShape, model: Any = None) -> None:
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
        """Return a model to train: a new one with the target's vocabulary, or the one that `settings.model` names."""
        if settings.model is None:
            return cls(settings, _fresh_config(target_config, settings))
        model = load_model(settings.model, torch.float32)
        check_matrix(model)
        tokenizer = tokenizer_of(settings.model)
        target_tokenizer = tokenizer_of(target_config._name_or_path)
        size = model.config.get_text_config().vocab_size
        check_vocabulary(tokenizer, target_tokenizer, size, target_config.vocab_size)
        return cls(settings, model.config, model)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> DraftModel:
        """Return any causal language model as a drafter for a target, in the target's dtype and on its device."""
        small = Target.load(folder, dtype=target.model.dtype, device=str(target.device))
        check_vocabulary(small.tokenizer, target.tokenizer, small.vocab_size, target.vocab_size)
        settings = DraftModelSettings(layers=small.config.num_hidden_layers)
        return cls(settings, small.config, small.model).bind(target.head)

    @property
    def network(self) -> dict[str, Any]:
        """The model's architecture."""
        return {"network": "draft_model", "model_type": self.shape.model_type}

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the distillation loss, or the cross-entropy of the data's tokens: a mean over supervised tokens.

        `target_head` has the target's LM head, whose distribution is the teacher.
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
        student = self._states(batch).index_select(0, before)
        divergence = self.settings.divergence
        if divergence == "tokens":
            teacher = batch.tokens.index_select(0, before + 1)
            teacher_head = None
        else:
            teacher = batch.select_taps((-1,))[:, 0].index_select(0, before)
            teacher_head = target_head.narrow(slice(len(head.weight)))
        # each supervised token counts alike: the sum is their mean
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
        """Return the LM head's input [N, H] at every token: a loss needs logits at few of them."""
        # padded on the right: attention is causal, so that no mask is needed
        tokens = pad_sequence(list(batch.tokens.split(batch.lengths)), batch_first=True)
        base = base_of(self.model)
        # without any cache transformers looks for packed sequences, for which the host waits
        cache = NoCache(count_cache_layers(self.model.config.get_text_config()))
        output = base(
            input_ids=self.clip_to_vocab(tokens), use_cache=False, **{cache_name_of(base): cache}
        )
        states = output.last_hidden_state  # [B, T, H]
        return torch.cat([row[:length] for row, length in zip(states, batch.lengths, strict=True)])

    def clip_to_vocab(self, tokens: Tensor) -> Tensor:
        """Return tokens clipped to the model's vocabulary: targets have unused rows beyond the tokenizer's tokens."""
        return tokens.clamp(max=self.model.get_input_embeddings().weight.shape[0] - 1)

    @torch.no_grad()
    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return validation sums: tokens that each tree would have kept, and agreement with the target's probs."""
        output = self.model.get_output_embeddings()
        size = target_head.weight.shape[0]

        # logits over the target's vocabulary: tokens that the model lacks get minus infinity
        def student(state: Tensor) -> Tensor:
            logits = output(state.to(output.weight.dtype))[..., :size]
            return F.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)

        states = self._states(batch)
        before = (batch.loss_mask.nonzero()[:, 0] - 1).to(batch.tokens.device)
        steps = max(max(map(len, paths)) for paths in trees.values())
        # the state of level d is that of d tokens later; an index beyond the end of a sequence has no weight
        level_states = [states[(before + step).clamp(max=len(states) - 1)] for step in range(steps)]
        return validate_batch(batch, level_states, ([student] * steps, target_head.logits), trees)

    # -- drafting -----------------------------------------------------------------------------------------------------

    def bind(self, target_head: TargetHead) -> DraftModel:
        """Make the model read draft trees, as a target does; its weights are not trained from here on."""
        model = Target(self.model)
        model.reader.check()
        self.as_target = (model,)
        self.target_vocab_size = target_head.weight.shape[0]
        return self.eval()

    def open(self) -> ModelState:
        """Return the state for several sequences drafted in a batch."""
        return ModelState(self.as_target[0], self.target_vocab_size, self.clip_to_vocab)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """Return the rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """Return the rows to read: the root, and an accepted node of the last level; others were read when drafting."""
        return 1 + (accepted == depth > 0)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """Return the bytes of the model's own cache."""
        return self.as_target[0].cache_bytes(with_room(tokens))

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """Return a function to time: a forward of `rows` rows after `context` tokens, the last `scored` with logits."""
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
    # four tokens show it
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
    """Refuse a model whose tokens have other ids than the target's.

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
    ids = tokenizer.get_vocab()
    target_ids = target_tokenizer.get_vocab()
    differ = sorted(
        word for word in ids.keys() | target_ids.keys() if ids.get(word) != target_ids.get(word)
    )
    if not differ:
        return
    some = ", ".join(
        f"{word!r} is {ids.get(word)} here and {target_ids.get(word)} there"
        for word in differ[:NAMED]
    )
    raise ValueError(
        f"the draft model has another vocabulary than the target: {len(differ)} tokens differ ({some}); expected a "
        "model with the target's tokenizer"
    )


class ModelState:
    """The sequences of a batch in the draft model's KV cache, each followed by the nodes of its last draft.

    The nodes that the target has accepted stay in the cache, so that their tokens are not read again.
    """

    def __init__(
        self, model: Target, target_vocab_size: int, clip_to_vocab: Callable[[Tensor], Tensor]
    ) -> None:
        self.model = model
        self.target_vocab_size = target_vocab_size
        self.clip_to_vocab = clip_to_vocab
        self.state = model.open()
        self.noises: dict[int, Noise | None] = {}
        self.confirmed: dict[int, int] = {}  # tokens, the root not counted
        # of the last draft: the tokens of each level, and their parents in the level above
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; its tokens are read at the first proposal."""
        self.noises[row] = noise
        self.confirmed[row] = 0
        self.levels[row] = []

    def fork(self, row: int, other: int) -> None:
        """Copy a row to the new row `other`; only the old row keeps its last draft."""
        self.noises[other] = self.noises[row]
        self.confirmed[other] = self.confirmed[row]
        self.levels[other] = []
        if row in self.state.rows:
            self._update_columns()
            self.state.fork(row, other)

    def release(self, row: int) -> None:
        """Release a row."""
        del self.noises[row], self.confirmed[row], self.levels[row]
        if row not in self.state.rows:
            return
        rows_before = list(self.state.rows)
        self._update_columns()
        self.state.release(row)
        for moved, before in zip(self.state.rows, rows_before, strict=False):
            # the row that moves to the free place in the cache leaves the columns of its draft there
            if moved != before:
                self.levels[moved] = []

    @torch.inference_mode()
    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Read what was committed, and return trees grown from the model's logits.

        A row whose sequence the model cannot read on gets a tree with the root alone.
        """
        trees: dict[int, DraftTree] = {}
        new_tokens: dict[int, list[int]] = {}
        depths: dict[int, int] = {}
        for row, update in updates.items():
            self.confirmed[row] += len(update.tokens)
            depths[row] = self._clamp_depth(row, budgets[row].depth)
            if depths[row] > 0:
                new_tokens[row] = [*update.tokens.tolist(), update.root]
            else:
                trees[row] = DraftTree.chain([update.root])
        logits = self._read(new_tokens)
        # a read may have changed the order of rows in the cache
        for rows in self._group_rows([row for row in self.state.rows if row in new_tokens]):
            requests = []
            for row in rows:
                budget = budgets[row].within(depths[row])
                # the cache holds the root now, so its length is the position of the root's children
                requests.append(
                    DraftRequest(
                        updates[row].root, self.state.length(row), budget, self.noises[row]
                    )
                )
            grown = self._grow(rows, requests, [logits[row] for row in rows])
            trees |= zip(rows, grown, strict=True)
        return trees

    def _grow(
        self, rows: list[int], requests: list[DraftRequest], logits: Sequence[Tensor]
    ) -> list[DraftTree]:
        """Return the trees of rows that may share a forward, from the logits [V] after their roots."""
        depths: list[int] = []  # of all nodes that were read so far

        def level(
            depth: int, indices: list[int], tokens: Tensor, parents: Tensor, tree_mask: Tensor
        ) -> Tensor:
            """Return the logits [B, K, V] after the nodes [B, K] of one level; `indices` are those of their rows."""
            # rows with another budget grow after those before them, again from the first level on
            if depth == 1:
                depths.clear()
            depths.extend([depth - 1] * tokens.shape[1])
            drafting = [rows[index] for index in indices]
            for row, row_tokens, row_parents in zip(drafting, tokens, parents, strict=True):
                self.levels[row].append((row_tokens, row_parents))
            return self.state.read_ahead(drafting, self.clip_to_vocab(tokens), depths, tree_mask)[
                ..., : self.target_vocab_size
            ]

        # a model with a smaller vocabulary than the target's drafts only its own tokens
        shared_size = min(self.model.vocab_size, self.target_vocab_size)
        draft_tokens = (
            torch.arange(shared_size, device=self.model.device)
            if shared_size < self.target_vocab_size
            else None
        )
        return grow_rows(
            requests, torch.stack(list(logits))[:, : self.target_vocab_size], level, draft_tokens
        )

    # -- what may be read together ------------------------------------------------------------------------------------

    def _clamp_depth(self, row: int, depth: int) -> int:
        """Return `depth`, limited by the model's last position and by the border of its rotary frequencies."""
        border = self.model.border
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
        """Tell the state how many cache columns each row may need, its draft included; it frees what is beyond them."""
        for row in self.state.rows:
            drafted = sum(len(tokens) for tokens, _ in self.levels.get(row, ()))
            # half as many again, as a sequence grows
            self.state.columns_by_row[row] = (self.state.length(row) + drafted) * 3 // 2

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def _read(self, new_tokens: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read new sequences, and what was committed of others, and return the logits [V] after each root."""
        logits = self._read_prompts(
            {row: tokens for row, tokens in new_tokens.items() if row not in self.state.rows}
        )
        earlier = [row for row in self.state.rows if row in new_tokens and row not in logits]
        for rows in self._group_rows(earlier):
            logits |= self._read_confirmed({row: new_tokens[row] for row in rows})
        return logits

    def _read_prompts(self, prompts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read sequences from their first token on, and return the logits [V] after each."""
        logits: dict[int, Tensor] = {}
        if prompts:
            self._update_columns()
        for row, prompt in prompts.items():
            self.state.admit(row, self.clip_to_vocab(torch.tensor(prompt)).tolist())
        # a call reads as many prompts as fit in one forward
        while len(logits) < len(prompts):
            for row, prompt_output in self.state.read_prompts().items():
                logits[row] = prompt_output.output.logits[0]
        return logits

    def _read_confirmed(self, committed: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """Read committed tokens, by row, and return the logits [V] after each sequence.

        Nodes of the last draft that the target accepted stay in the cache, and only the tokens after them are read.
        """
        columns: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        unread: dict[int, list[int]] = {}
        for row, levels in self._download_levels(list(committed)).items():
            # the first token is the last root, which was read then
            new = committed[row][1:]
            columns[row] = _find_accepted(levels, new[:-1])
            count = len(columns[row])
            tokens[row] = new[:count]
            unread[row] = self.clip_to_vocab(torch.tensor(new[count:])).tolist()
            self.levels[row] = []
        self.state.keep_columns(columns, tokens)
        logits: dict[int, Tensor] = {}
        # rows with about as many tokens share a forward, so that little is padded
        for group in split_ragged({row: len(row_tokens) for row, row_tokens in unread.items()}):
            logits |= self.state.extend({row: unread[row] for row in group})
        return logits

    def _download_levels(self, rows: list[int]) -> dict[int, list[tuple[list[int], list[int]]]]:
        """Return the levels of each row's last draft as lists on the host: tokens and parents."""
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

    Nodes are numbered over all levels, as their columns in the cache.
    """
    path: list[int] = []
    parent = None  # the index of the path's node in the level above
    first = 0  # the number of the level's first node
    for (level_tokens, parents), token in zip(levels, tokens, strict=False):
        matches = []
        for index, level_token in enumerate(level_tokens):
            if level_token == token and (parent is None or parents[index] == parent):
                matches.append(index)
        if not matches:
            break
        parent = matches[0]
        path.append(first + parent)
        first += len(level_tokens)
    return path
