"""The EAGLE-3 step of `speculators`: run by an interpreter that has it, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch import nn
from transformers import AutoConfig

from bench.rivals.serve import Step, Work, serve, update_step


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """Their model and loss, with the attention that is their fastest with gradients on a CPU; its LM head is frozen."""
    config = AutoConfig.from_pretrained(work.target)
    layers, width, config.num_hidden_layers = config.num_hidden_layers, config.hidden_size, 1
    model = Eagle3DraftModel.from_training_args(
        config,
        torch.arange(config.vocab_size) < work.draft_vocab,
        torch.zeros(work.draft_vocab, dtype=torch.long),
        draft_vocab_size=work.draft_vocab,
        norm_before_residual=False,
        target_layer_ids=[2, layers // 2, layers - 3],
        verifier_name_or_path=work.target,
        ttt_steps=work.steps,
        draft_attn_impl="sdpa",
    )
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.to(work.frozen_dtype)
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=work.steps, ttt_step_loss_decay=0.8, loss_fn="kl_div", loss_implementation="eager"
    )
    tokens, mask = work.tokens_and_mask(work.batches[0][0])
    batch = {  # a text loses its first token, as in their `shift_batch`
        "input_ids": tokens[None, 1:],
        "hidden_states": torch.randn(1, len(tokens) - 1, 3 * width, dtype=work.frozen_dtype),
        "verifier_last_hidden_states": torch.randn(1, len(tokens) - 1, width, dtype=work.frozen_dtype),
        "loss_mask": mask[None, 1:],
        "document_ids": torch.zeros(1, len(tokens) - 1, dtype=torch.long),
        "position_ids": torch.arange(1, len(tokens))[None],
    }
    model.train()
    parameters = [*model.parameters()]
    return update_step(lambda _: model(**batch, **options)[1], parameters, work), parameters


if __name__ == "__main__":
    serve(side)
