"""The EAGLE-3 step of `speculators`: run by an interpreter that has it, as `bench.rivals.serve` describes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch import nn
from transformers import AutoConfig

from bench.rivals.serve import Step, Work, serve, update_step


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """Their model and loss, with the attention that is their fastest on the device; its LM head is frozen.

    Several texts of the first batch are packed into one sequence, as their trainer does.
    """
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
        draft_attn_impl="sdpa" if work.device == "cpu" else "flex_attention",
    ).to(work.device)
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.to(work.frozen_dtype)
    options, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=work.steps, ttt_step_loss_decay=0.8, loss_fn="kl_div", loss_implementation="eager"
    )
    # a text loses its first token, as in their `shift_batch`
    texts = [[part[1:] for part in work.tokens_and_mask(text)] for text in work.batches[0]]
    tokens, masks = (torch.cat(parts) for parts in zip(*texts, strict=True))
    lengths = torch.tensor([len(text[0]) for text in texts])
    batch = {
        "input_ids": tokens[None],
        "hidden_states": torch.randn(1, len(tokens), 3 * width, dtype=work.frozen_dtype),
        "verifier_last_hidden_states": torch.randn(1, len(tokens), width, dtype=work.frozen_dtype),
        "loss_mask": masks[None],
        "document_ids": torch.arange(len(texts)).repeat_interleave(lengths)[None],
        "position_ids": torch.cat([torch.arange(1, length + 1) for length in lengths.tolist()])[None],
    }
    batch = {name: tensor.to(work.device) for name, tensor in batch.items()}
    model.train()
    parameters = [*model.parameters()]
    return update_step(lambda _: model(**batch, **options)[1], parameters, work), parameters


if __name__ == "__main__":
    serve(side)
