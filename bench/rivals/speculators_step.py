"""The EAGLE-3 step of `speculators`: run by an interpreter that has it, as `bench.rivals.serve` describes."""

from __future__ import annotations

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoConfig

from bench.rivals.serve import Made, Work, serve


def side(work: Work) -> Made:
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
        frozen.to(work.numbers)
    how, _ = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=work.steps, ttt_step_loss_decay=0.8, loss_fn="kl_div", loss_implementation="eager"
    )
    tokens, mask = work.text()
    batch = {  # a text loses its first token, as in their `shift_batch`
        "input_ids": tokens[None, 1:],
        "hidden_states": torch.randn(1, work.length - 1, 3 * width, dtype=work.numbers),
        "verifier_last_hidden_states": torch.randn(1, work.length - 1, width, dtype=work.numbers),
        "loss_mask": mask[None, 1:],
        "document_ids": torch.zeros(1, work.length - 1, dtype=torch.long),
        "position_ids": torch.arange(1, work.length)[None],
    }
    model.train()
    return lambda: model(**batch, **how)[1], model.parameters()


if __name__ == "__main__":
    serve(side)
