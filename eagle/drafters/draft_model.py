"""A smaller language model as drafter (Leviathan et al. 2023, arXiv 2211.17192), with distillation (DistillSpec).

Distillation is that of Zhou et al. 2023, arXiv 2310.08461.
"""

# N tokens of all texts, S supervised slots, K rows of one level, R of all levels, H width, V vocabulary, B rows of text

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, Committed, HeadShape, Noise, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree, Paths
from eagle.device import to_host, upload
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.growth import grow_rows, level_rows
from eagle.drafters.parts.objectives import Kind, Objective, OwnHead, distillation_loss
from eagle.drafters.parts.scoring import Seed
from eagle.drafters.parts.text_state import split_ragged
from eagle.drafters.parts.validation import validate_batch
from eagle.target.borrowed import is_close
from eagle.target.lent_cache import NoCache
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
NAMED = 5  # tokens of which a refusal tells


class DraftModelSettings(BaseModel):
    """Settings of the draft model in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["draft_model"] = "draft_model"
    model: str | None = None  # a causal language model to start from; by default fresh weights of the sizes below
    layers: int = Field(2, ge=1)  # of a fresh model
    hidden_size: int | None = None  # of a fresh model; by default the target's
    intermediate_size: int | None = None  # of a fresh model's MLP
    divergence: Divergence = "forward_kl"  # what is minimized; "tokens": cross-entropy with the text
    samples: Literal["data", "own"] = "data"  # learn on the data's answers, or on the model's own


class DraftModel(TrainableDrafter):
    """A language model with its own cache that reads the committed text and drafts a tree after it."""

    teacher_taps = (-1,)
    stored_as = "files"
    Settings = DraftModelSettings
    settings: DraftModelSettings
    own: tuple[Target, ...] = ()  # in a tuple, as heads keep what they borrow

    def __init__(self, settings: DraftModelSettings, shape: HeadShape, model: Any = None) -> None:
        super().__init__(settings, shape)
        self.model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32) if model is None else model

    @classmethod
    def for_target(
        cls,
        settings: DraftModelSettings,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> DraftModel:
        """A new model with the target's vocabulary, or the model that the settings name."""
        if settings.model is None:
            return cls(settings, _small(target_config, settings))
        model = load_model(settings.model, torch.float32)
        check_matrix(model)
        tokenizers = tokenizer_of(settings.model), tokenizer_of(target_config._name_or_path)
        check_vocabulary(*tokenizers, model.config.get_text_config().vocab_size, target_config.vocab_size)
        return cls(settings, model.config, model)

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> DraftModel:
        """Load any causal language model as a drafter for a target."""
        small = Target.load(folder, dtype=target.model.dtype, device=str(target.device))
        check_vocabulary(small.tokenizer, target.tokenizer, small.vocab_size, target.vocab_size)
        settings = DraftModelSettings(layers=small.config.num_hidden_layers)
        return cls(settings, small.config, small.model).bind(target.head)

    @property
    def network(self) -> dict[str, Any]:
        """The model's architecture."""
        return {"network": "draft_model", "model_type": self.shape.model_type}

    # -- training -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The distillation loss, a mean over the supervised tokens; or the cross-entropy of the text's own tokens."""
        output, size = self.model.get_output_embeddings(), frozen.weight.shape[0]
        if getattr(output, "bias", None) is not None or getattr(self.shape, "logit_scale", None):
            raise ValueError(f"a {self.shape.model_type} cannot be distilled here: its LM head has a bias or a scale")
        own = OwnHead(output.weight[:size])
        before = upload(batch.loss_mask.nonzero()[:, 0] - 1, batch.tokens.device)
        student, divergence = self._states(batch).index_select(0, before), self.settings.divergence
        teacher, teacher_head = batch.tokens.index_select(0, before + 1), None
        if divergence != "tokens":
            teacher = batch.select_taps((-1,))[:, 0].index_select(0, before)
            teacher_head = frozen.narrow(slice(len(own.weight)))
        weights = torch.full((1, len(before)), 1 / max(len(before), 1), device=student.device)
        objective = Objective(KINDS[divergence])
        total, _ = distillation_loss(
            student[None], teacher, weights, (own, teacher_head), objective, frozen.weight.dtype
        )
        return {"total": total, divergence: total.detach()}

    def _states(self, batch: Batch) -> Tensor:
        """[N, H], the LM head's input at every token."""
        slots = pad_sequence(list(batch.tokens.split(batch.lengths)), batch_first=True)
        base, cache = base_of(self.model), NoCache(count_cache_layers(self.model.config.get_text_config()))
        output = base(input_ids=self.clip_to_vocab(slots), use_cache=False, **{cache_name_of(base): cache})
        states = output.last_hidden_state
        return torch.cat([row[:length] for row, length in zip(states, batch.lengths, strict=True)])

    def clip_to_vocab(self, tokens: Tensor) -> Tensor:
        """Tokens clipped to the model's vocabulary: targets have unused rows beyond the tokenizer's last token."""
        return tokens.clamp(max=self.model.get_input_embeddings().weight.shape[0] - 1)

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Validation sums: tokens that each tree would have kept, and agreement with the target's probs."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        output, size = self.model.get_output_embeddings(), frozen.weight.shape[0]

        def student(state: Tensor) -> Tensor:
            logits = output(state.to(output.weight.dtype))[..., :size]
            return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)

        states, before = self._states(batch), (batch.loss_mask.nonzero()[:, 0] - 1).to(batch.tokens.device)
        # what lies beyond a text counts for nothing
        ahead = [states[(before + step).clamp(max=len(states) - 1)] for step in range(steps)]
        return validate_batch(batch, ahead, ([student] * steps, frozen.logits), trees)

    # -- drafting -----------------------------------------------------------------------------------------------------

    def bind(self, frozen: TargetHead) -> DraftModel:
        """Make the model read trees; its weights are frozen from here on."""
        model = Target(self.model)
        model.reader.check()
        self.own, self.size = (model,), frozen.weight.shape[0]
        return self.eval()

    def open(self) -> ModelState:
        """The state for several texts drafted together."""
        return ModelState(self.own[0], self.size, self.clip_to_vocab)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def unread(self, accepted: int, depth: int) -> int:
        """The root, plus an accepted leaf of the last level, which drafting did not read; the rest is in the cache."""
        return 1 + (accepted == depth > 0)

    def kept_bytes(self, tokens: int, column: ColumnBytes) -> int:
        """The model's own cache."""
        return self.own[0].cache_bytes(with_room(tokens))

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """A function to time: the model's forward of `rows` rows after `context` tokens, in a separate cache."""
        (model,) = self.own
        model.reader.check()
        cache = model.reader.new_cache()
        tokens = torch.ones(context + rows, dtype=torch.long)

        @torch.inference_mode()
        def run() -> Tensor:
            hidden = model.reader.read_text(tokens[context:], context, cache)
            return model.head.logits(hidden[0, -scored:])

        with torch.inference_mode():
            model.reader.read_text(tokens[:context], 0, cache)
        return run


def _small(target_config: Any, settings: DraftModelSettings) -> Any:
    """The config of a fresh model, with as many attention heads as fit in its width."""
    whole: Any = head_shape(target_config, num_hidden_layers=settings.layers)
    width = settings.hidden_size or whole.hidden_size
    if width % whole.head_dim:
        raise ValueError(f"drafter.hidden_size is {width}, expected a multiple of {whole.head_dim}, a head's width")
    heads = width // whole.head_dim
    sizes = {
        "hidden_size": width,
        "intermediate_size": settings.intermediate_size or whole.intermediate_size * width // whole.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % whole.num_key_value_heads else whole.num_key_value_heads,
    }
    return head_shape(target_config, num_hidden_layers=settings.layers, **sizes)


@torch.no_grad()
def check_matrix(model: Any) -> None:
    """Refuse to train a model whose logits are more than one product of its base's output with a matrix."""
    tokens = torch.arange(1, 5)[None] % model.get_input_embeddings().weight.shape[0]
    trained = model.training
    model.eval()
    states = base_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
    output, logits = model.get_output_embeddings(), model(input_ids=tokens, use_cache=False).logits
    model.train(trained)
    if states.shape[-1] != output.weight.shape[1] or not is_close(output(states), logits):
        raise ValueError(
            f"a {model.config.model_type} cannot be distilled here: its logits are scaled, capped or made of "
            "transformed states. It drafts as it is; as a model to train take one whose LM head is a plain matrix"
        )


def check_vocabulary(tokenizer: Any, target_tokenizer: Any, size: int, target_size: int) -> None:
    """Refuse a model with another vocabulary; only the number of unused rows at its end may differ."""
    if tokenizer is None or target_tokenizer is None:
        if size != target_size:
            raise ValueError(
                f"the draft model has {size} tokens, the target {target_size}, and without both tokenizers nobody "
                "knows whether they mean the same: save the tokenizers beside the models"
            )
        return
    words, meant = tokenizer.get_vocab(), target_tokenizer.get_vocab()
    if words == meant:
        return
    differ = sorted(word for word in words.keys() | meant.keys() if words.get(word) != meant.get(word))
    some = ", ".join(f"{word!r} is {words.get(word)} here and {meant.get(word)} there" for word in differ[:NAMED])
    raise ValueError(
        f"the draft model has another vocabulary than the target: {len(differ)} tokens differ ({some}); expected a "
        "model with the target's tokenizer"
    )


class ModelState:
    """Rows of text in a state of the model's; behind each lie the rows of its last draft, until some are confirmed."""

    def __init__(self, own: Target, size: int, clip_to_vocab: Callable[[Tensor], Tensor]) -> None:
        self.own, self.size, self.clip_to_vocab = own, size, clip_to_vocab
        self.state = own.open()
        self.noises: dict[int, Noise | None] = {}
        self.confirmed: dict[int, int] = {}  # tokens, the root not counted
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = {}  # of the last draft: tokens, and what they follow

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row; its text is read at the first proposal."""
        self.noises[row], self.confirmed[row], self.levels[row] = noise, 0, []

    def fork(self, row: int, other: int) -> None:
        """A text goes on in two ways; the row's last draft stays behind it alone."""
        self.noises[other], self.confirmed[other], self.levels[other] = self.noises[row], self.confirmed[row], []
        if row in self.state.rows:
            self._state_needs()
            self.state.fork(row, other)

    def release(self, row: int) -> None:
        """A text has ended; another may take its place, but leaves its draft behind."""
        del self.noises[row], self.confirmed[row], self.levels[row]
        if row in self.state.rows:
            slots = list(self.state.rows)
            self._state_needs()
            self.state.release(row)
            for moved in [kept for kept, before in zip(self.state.rows, slots, strict=False) if kept != before]:
                self.levels[moved] = []

    @torch.inference_mode()
    def propose(self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]) -> dict[int, DraftTree]:
        """Trees grown from the model's own logits; nothing where a text outgrows what the model can read on."""
        trees, depths = {}, dict[int, int]()
        for row, update in updates.items():
            self.confirmed[row] += len(update.tokens)
            depths[row] = self._room(row, budgets[row].depth)
            if depths[row] <= 0:
                trees[row] = DraftTree.chain([update.root])
        texts = {row: [*updates[row].tokens.tolist(), updates[row].root] for row in updates if row not in trees}
        logits = self._read_prompts({row: text for row, text in texts.items() if row not in self.state.rows})
        earlier = [row for row in self.state.rows if row in texts and row not in logits]
        for rows in self._groups(earlier):
            logits |= self._read_confirmed({row: texts[row] for row in rows})
        for rows in self._groups([row for row in self.state.rows if row in texts]):
            seeds = [
                Seed(updates[row].root, self.state.length(row), budgets[row].within(depths[row]), self.noises[row])
                for row in rows
            ]
            trees |= dict(zip(rows, self._grow(rows, seeds, [logits[row] for row in rows]), strict=True))
        return trees

    def _grow(self, rows: list[int], seeds: list[Seed], logits: Sequence[Tensor]) -> list[DraftTree]:
        """The trees of rows that may share a forward, from the logits [V] behind their roots."""
        depths = list[int]()

        def level(depth: int, numbers: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            if depth == 1:
                depths.clear()
            depths.extend([depth - 1] * tokens.shape[1])
            drafting = [rows[number] for number in numbers]
            for row, columns in zip(drafting, zip(tokens, before, strict=True), strict=True):
                self.levels[row].append(columns)
            return self.state.ahead(drafting, self.clip_to_vocab(tokens), depths, seen)[..., : self.size]

        shared_size = min(self.own.vocab_size, self.size)
        drafts = torch.arange(shared_size, device=self.own.device) if shared_size < self.size else None
        return grow_rows(seeds, torch.stack(list(logits))[:, : self.size], level, drafts)

    # -- what may be read together ------------------------------------------------------------------------------------

    def _room(self, row: int, levels: int) -> int:
        """At most that many levels behind the root: fewer before the last position, or a border of frequencies."""
        own, read = self.own, self.state.length(row) if row in self.state.rows else 0
        ends = [own.max_positions or math.inf]
        # a text that has grown up to the border cannot be read on: one that was longer from the first can
        if (0 < read <= own.border) or self.confirmed[row] < own.border:
            ends.append(own.border)
        return int(min(levels, *(end - self.confirmed[row] for end in ends)))

    def _groups(self, rows: list[int]) -> list[list[int]]:
        """The rows of each forward: all, but for texts whose frequencies would change with others beside them."""
        alone = [row for row in rows if self.own.is_alone(self.confirmed[row])]
        together = [row for row in rows if row not in alone]
        return [[row] for row in alone] + ([together] if together else [])

    def _state_needs(self) -> None:
        """Tell the state how many columns each row may come to, its draft included: more are given back."""
        for row in self.state.rows:
            drafted = sum(len(tokens) for tokens, _ in self.levels.get(row, ()))
            self.state.needs[row] = (self.state.length(row) + drafted) * 3 // 2

    # -- committed tokens ---------------------------------------------------------------------------------------------

    def _read_prompts(self, texts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """[V] each, the logits behind texts that are read from their first token on."""
        logits: dict[int, Tensor] = {}
        if texts:
            self._state_needs()
        for row, text in texts.items():
            self.state.admit(row, self.clip_to_vocab(torch.tensor(text)).tolist())
        while len(logits) < len(texts):
            logits |= {row: prompt.output.logits[0] for row, prompt in self.state.read_prompts().items()}
        return logits

    def _read_confirmed(self, texts: Mapping[int, list[int]]) -> dict[int, Tensor]:
        """[V] each, the logits once the confirmed tokens are read; rows of the last draft that were confirmed stay."""
        columns: dict[int, list[int]] = {}
        tokens: dict[int, list[int]] = {}
        left: dict[int, list[int]] = {}
        for row, levels in self._drafted(list(texts)).items():
            new = texts[row][1:]  # the root was read already
            columns[row] = _confirm_rows(levels, new[:-1])
            tokens[row] = new[: len(columns[row])]
            left[row] = self.clip_to_vocab(torch.tensor(new[len(tokens[row]) :])).tolist()
            self.levels[row] = []
        self.state.keep_columns(columns, tokens)
        logits: dict[int, Tensor] = {}
        for group in split_ragged({row: len(part) for row, part in left.items()}):
            logits |= self.state.extend({row: left[row] for row in group})
        return logits

    def _drafted(self, rows: list[int]) -> dict[int, list[list[list[int]]]]:
        """Each row's levels as lists, all in one transfer."""
        parts = [part for row in rows for level in self.levels[row] for part in level]
        values = iter(to_host(parts))
        return {row: [[part.tolist() for part in islice(values, 2)] for _ in self.levels[row]] for row in rows}


def _confirm_rows(levels: list[list[list[int]]], tokens: list[int]) -> list[int]:
    """The rows of the last draft that read these tokens, as far as there are such."""
    path, column, first = [], None, 0
    for (read, before), wanted in zip(levels, tokens, strict=False):
        rows = [row for row, token in enumerate(read) if token == wanted and (column is None or before[row] == column)]
        if not rows:
            break
        column = rows[0]
        path.append(first + column)
        first += len(read)
    return path
