"""A random EAGLE-3 head of `speculators`, saved as its trainer does, and its logits; see `bench.rivals.foreign`."""

from __future__ import annotations

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from transformers import AutoConfig

from bench.rivals.foreign import Asked, heard, scatter, told


def main() -> None:
    """Their model in the steps of their training, whose tokens are those of the text."""
    asked, said = Asked.here(), []
    tokens, features, drafts = asked.text()
    config = AutoConfig.from_pretrained(asked.target)
    layers, config.num_hidden_layers = config.num_hidden_layers, 1
    full = len(drafts) == config.vocab_size
    mask = torch.zeros(config.vocab_size, dtype=torch.bool)
    mask[drafts] = True
    model = Eagle3DraftModel.from_training_args(
        config,
        None if full else mask,
        None if full else drafts - torch.arange(len(drafts)),
        draft_vocab_size=len(drafts),
        target_layer_ids=[2, layers // 2, layers - 3],
        verifier_name_or_path=asked.target,
        ttt_steps=asked.steps,
        draft_attn_impl="sdpa",
        **{"norm_before_residual": False, **asked.switches},
    ).float()
    own = (weight for name, weight in model.named_parameters() if not name.startswith(("verifier", "embed")))
    scatter(own, asked.moved)
    heard(model.lm_head, said)
    with torch.no_grad():  # a text loses its first token, as in their `shift_batch`
        model.eval()(
            hidden_states=features[None, :-1],
            input_ids=tokens[None, 1:],
            document_ids=torch.zeros(1, len(tokens) - 1, dtype=torch.long),
            ttt_steps=asked.steps,
        )
    model.save_pretrained(asked.out)
    told(asked, said, "speculators")


if __name__ == "__main__":
    main()
