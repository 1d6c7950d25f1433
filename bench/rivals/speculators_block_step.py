"""The DFlash, DSpark or P-EAGLE step of `speculators`: run by an interpreter that has it, see `bench.rivals.serve`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.peagle import PEagleDraftModel
from torch import nn
from transformers import AutoConfig

from bench.rivals.serve import Step, Work, serve, update_step

MODELS: dict[str, Any] = {"dflash": DFlashDraftModel, "dspark": DSparkDraftModel, "peagle": PEagleDraftModel}
LOSSES = {"dflash": "kl_div", "dspark": '{"ce": 0.1, "tv": 0.9}', "peagle": "kl_div"}


def side(work: Work) -> tuple[Step, Iterable[nn.Parameter]]:
    """Their model and loss on one text, with the attention that is their fastest with gradients on a CPU.

    P-EAGLE's embedding is frozen as the others' are.
    """
    kind, settings = work.head["kind"], work.head
    config = AutoConfig.from_pretrained(work.target)
    width, config.num_hidden_layers = config.hidden_size, settings["blocks"]
    model = MODELS[kind].from_training_args(
        config,
        draft_vocab_size=work.draft_vocab,
        block_size=settings.get("slots"),
        mask_token_id=work.draft_vocab - 1,
        target_layer_ids=settings["taps"],
        verifier_name_or_path=work.target,
        draft_attn_impl="sdpa",
    )
    for frozen in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        frozen.requires_grad_(False).to(work.frozen_dtype)
    options, _ = MODELS[kind].get_trainer_kwargs(
        loss_fn=LOSSES[kind],
        loss_implementation="eager",
        max_anchors=settings.get("anchors"),
        num_depths=settings.get("depths"),
        down_sample_ratio=settings.get("keep"),
    )
    ((text,),) = work.batches
    tokens, mask = work.tokens_and_mask(text)
    batch = {
        "input_ids": tokens[None],
        "hidden_states": torch.randn(1, len(tokens), len(settings["taps"]) * width, dtype=work.frozen_dtype),
        "verifier_last_hidden_states": torch.randn(1, len(tokens), width, dtype=work.frozen_dtype),
        "loss_mask": mask[None],
        "document_ids": torch.zeros(1, len(tokens), dtype=torch.long),
        "position_ids": torch.arange(len(tokens))[None],
    }
    model.train()
    parameters = [*model.parameters()]
    return update_step(lambda _: model(**batch, **options)[1], parameters, work), parameters


if __name__ == "__main__":
    serve(side)
