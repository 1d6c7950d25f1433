"""A random EAGLE-3 head of `speculators`, saved as its trainer does, and its logits; see `random_head`."""

from __future__ import annotations

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch import Tensor
from transformers import AutoConfig

from tests.formats.rivals.random_head import HeadRequest, randomize_, record_logits, save_logits


def main() -> None:
    """Write the logits of their model in the steps of their training, whose tokens are those of the text."""
    request = HeadRequest.from_command_line()
    logits: list[Tensor] = []
    tokens, features, drafts = request.load_inputs()
    config = AutoConfig.from_pretrained(request.target)
    # of the target, and of the head
    layers = config.num_hidden_layers
    config.num_hidden_layers = 1
    mask = None
    offsets = None
    if len(drafts) < config.vocab_size:
        mask = torch.zeros(config.vocab_size, dtype=torch.bool)
        mask[drafts] = True
        offsets = drafts - torch.arange(len(drafts))
    model = Eagle3DraftModel.from_training_args(
        config,
        mask,
        offsets,
        draft_vocab_size=len(drafts),
        target_layer_ids=[2, layers // 2, layers - 3],
        verifier_name_or_path=request.target,
        ttt_steps=request.steps,
        draft_attn_impl="sdpa",
        **{"norm_before_residual": False, **request.switches},
    ).float()
    weights = (
        weight
        for name, weight in model.named_parameters()
        if not name.startswith(("verifier", "embed"))
    )
    randomize_(weights)
    record_logits(model.lm_head, logits)
    with torch.no_grad():
        # a text loses its first token, as in their `shift_batch`
        model.eval()(
            hidden_states=features[None, :-1],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            ttt_steps=request.steps,
        )
    model.save_pretrained(request.out)
    save_logits(request, logits)


if __name__ == "__main__":
    main()
