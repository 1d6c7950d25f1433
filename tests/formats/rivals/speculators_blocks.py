"""A random head of `speculators` that guesses blocks, saved as its trainer does, with its logits; see `random_head`."""

# A anchors, E guesses of all anchors, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from torch import Tensor
from transformers import AutoConfig

from tests.formats.rivals.random_head import HeadRequest, randomize_

MODELS: dict[str, Any] = {
    "dflash": DFlashDraftModel,
    "dspark": DSparkDraftModel,
    "peagle": PEagleDraftModel,
}


def main() -> None:
    """Their model in a step of their training: guesses behind all anchors, by the slot that we number them by."""
    request = HeadRequest.from_command_line()
    inputs, options = load_file(request.inputs), dict(request.switches)
    kind = options.pop("kind")
    load = options.pop("load", False)
    model = (
        MODELS[kind].from_pretrained(request.out)
        if load
        else make_model(kind, request, options, inputs)
    )
    read: list[Tensor] = []
    trusted: list[Tensor] = []
    if getattr(model, "confidence_head", None) is not None:
        model.confidence_head.register_forward_hook(
            lambda _module, _input, output: trusted.append(output.flatten())
        )
    theirs, _ = model.get_trainer_kwargs(loss_fn="tv", loss_implementation="eager")
    batch, calls = (peagle_batch if kind == "peagle" else block_batch)(inputs, request.steps)
    slots, levels = (peagle_guesses if kind == "peagle" else block_guesses)(
        inputs, model, request.steps
    )
    with torch.no_grad():
        record = {"loss_config": {"read": (lambda logits, _: keep(read, logits), 1.0)}}
        model.eval()(**batch, **{**theirs, **calls, **record})
    if not load:
        model.save_pretrained(request.out)
    named = levels >= 0  # the first of a block may name nothing
    results = {"slots": slots[named], "levels": levels[named], "logits": read[0][named]}
    results |= {"confidence": trusted[0][named]} if trusted else {}
    save_file(
        {name: tensor.contiguous() for name, tensor in results.items()}, f"{request.out}.logits"
    )


def keep(read: list[Tensor], logits: Tensor) -> Tensor:
    """A loss that keeps the logits that it gets, all biases added."""
    read.append(logits[0].float())
    return logits.sum(-1)


def make_model(
    kind: str, request: HeadRequest, options: dict[str, Any], inputs: dict[str, Tensor]
) -> Any:
    """As their trainer makes it for the target, with random weights."""
    config = AutoConfig.from_pretrained(request.target)
    config.num_hidden_layers = options.pop("blocks")
    model = (
        MODELS[kind]
        .from_training_args(
            config,
            draft_vocab_size=config.vocab_size,
            block_size=request.steps,
            mask_token_id=config.vocab_size - 1,
            target_layer_ids=inputs["taps"].tolist(),
            verifier_name_or_path=request.target,
            draft_attn_impl="sdpa",
            **options,
        )
        .float()
    )
    randomize_(
        weight
        for name, weight in model.named_parameters()
        if not name.startswith(("verifier", "embed", "lm_"))
    )
    return model


def block_batch(inputs: dict[str, Tensor], _steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A text whose anchors alone are supervised, so that their drawing takes all of them."""
    tokens, anchors = inputs["tokens"][None], inputs["anchors"]
    supervised = torch.zeros(tokens.shape, dtype=torch.bool).index_fill_(1, anchors, True)
    return text_batch(tokens, inputs["features"], supervised), {"max_anchors": len(anchors)}


def block_guesses(inputs: dict[str, Tensor], model: Any, steps: int) -> tuple[Tensor, Tensor]:
    """Of every guess [E] its slot and level: the slot before an anchor, and what stands before it in the block."""
    level = torch.arange(steps) - (0 if model.config.sample_from_anchor else 1)
    slots, levels = torch.broadcast_tensors(inputs["anchors"][:, None] - 1, level)
    return slots.flatten(), levels.flatten()


def peagle_batch(inputs: dict[str, Tensor], steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A text that loses its first token, as in their `shift_batch`, and nearly all elements of all depths."""
    tokens = inputs["tokens"][None, 1:]
    batch = text_batch(tokens, inputs["features"][:-1], torch.ones_like(tokens))
    return batch, {"num_depths": steps, "down_sample_ratio": 0.9}


def peagle_guesses(inputs: dict[str, Tensor], _model: Any, steps: int) -> tuple[Tensor, Tensor]:
    """What their forward will draw from the same seed."""
    torch.manual_seed(1)
    length = len(inputs["tokens"]) - 1
    drawn = generate_cod_sample_indices(length, torch.ones(1, length), steps, down_sample_ratio=0.9)
    torch.manual_seed(1)
    return drawn


def text_batch(tokens: Tensor, features: Tensor, supervised: Tensor) -> dict[str, Tensor]:
    """One text of tokens [1, T]; the target's last states decide no logits."""
    return {
        "input_ids": tokens,
        "hidden_states": features.flatten(1)[None],
        "verifier_last_hidden_states": torch.zeros(1, *features[:, 0].shape),
        "loss_mask": supervised,
        "document_ids": torch.zeros_like(tokens),
    }


if __name__ == "__main__":
    main()
