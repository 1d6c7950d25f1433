"""A smaller language model as drafter (Leviathan et al. 2023, arXiv 2211.17192), with distillation (DistillSpec).

Distillation is that of Zhou et al. 2023, arXiv 2310.08461.
"""

# N tokens of all texts, S supervised slots, K rows of one level, R of all levels, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from eagle.core.budget import Budget
from eagle.core.drafter import ColumnBytes, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths
from eagle.device import upload
from eagle.drafters.model_state import ModelState
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.growth import level_rows
from eagle.drafters.parts.objectives import Kind, Objective, OwnHead, distillation_loss
from eagle.drafters.parts.validation import validate_batch
from eagle.target.cache import NoCache, TreeCache, with_room
from eagle.target.loading import load_model, tokenizer_of
from eagle.target.target import Target

Divergence = Literal["tokens", "forward_kl", "reverse_kl", "jsd", "tv"]
KINDS: dict[str, Kind] = {"tokens": "cross_entropy", "forward_kl": "cross_entropy"}  # the others have their own names
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
    own: tuple[Target, ...] = ()  # in a tuple, as heads keep what they borrow

    def __init__(self, settings: Any, shape: Any, model: Any = None) -> None:
        super().__init__(settings, shape)
        self.model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32) if model is None else model

    @classmethod
    def for_target(
        cls,
        settings: Any,
        target_config: Any,
        frozen: TargetHead | None = None,
        supervised: Iterable[Tensor] | None = None,
    ) -> DraftModel:
        """A new model with the target's vocabulary, or the model that the settings name."""
        if settings.model is None:
            return cls(settings, _small(target_config, settings))
        model = load_model(settings.model, torch.float32)
        known = tokenizer_of(settings.model), tokenizer_of(target_config._name_or_path)
        check_vocabulary(*known, model.config.get_text_config().vocab_size, target_config.vocab_size)
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
        objective = Objective(KINDS.get(divergence, divergence))
        total, _ = distillation_loss(
            student[None], teacher, weights, (own, teacher_head), objective, frozen.weight.dtype
        )
        return {"total": total, divergence: total.detach()}

    def _states(self, batch: Batch) -> Tensor:
        """[N, H], the LM head's input at every token."""
        slots = pad_sequence(list(batch.tokens.split(batch.lengths)), batch_first=True)
        cache = NoCache(self.model.config.get_text_config().num_hidden_layers)
        output = self.model.base_model(input_ids=self.clip_to_vocab(slots), past_key_values=cache, use_cache=False)
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
        own = Target(self.model)
        own.reader.check()
        self.own, self.size = (own,), frozen.weight.shape[0]
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
        (own,) = self.own
        cache = TreeCache(own.config.num_hidden_layers)
        tokens = torch.ones(context + rows, dtype=torch.long)

        @torch.inference_mode()
        def run() -> Tensor:
            hidden = own.reader.read_text(tokens[context:], context, cache)
            return own.head.logits(hidden[0, -scored:])

        with torch.inference_mode():
            own.reader.read_text(tokens[:context], 0, cache)
        return run


def _small(target_config: Any, settings: Any) -> Any:
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


def check_vocabulary(own: Any, its: Any, own_size: int, size: int) -> None:
    """Refuse a model with another vocabulary; only the number of unused rows at its end may differ."""
    if own is None or its is None:
        if own_size != size:
            raise ValueError(
                f"the draft model has {own_size} tokens, the target {size}, and without both tokenizers nobody knows "
                "whether they mean the same: save the tokenizers beside the models"
            )
        return
    words, meant = own.get_vocab(), its.get_vocab()
    if words == meant:
        return
    differ = sorted(word for word in words.keys() | meant.keys() if words.get(word) != meant.get(word))
    some = ", ".join(f"{word!r} is {words.get(word)} here and {meant.get(word)} there" for word in differ[:NAMED])
    raise ValueError(
        f"the draft model has another vocabulary than the target: {len(differ)} tokens differ ({some}); expected a "
        "model with the target's tokenizer"
    )
