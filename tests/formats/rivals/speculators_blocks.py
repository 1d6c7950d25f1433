"""A random head of `speculators` that guesses blocks, saved as its trainer does, with its logits; see `random_head`."""

# A anchors, E guesses of all anchors, T tokens, V vocabulary

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.models.xpress import XPressDraftModel
from torch import Tensor
from transformers import AutoConfig

from tests.formats.rivals.random_head import HeadRequest, randomize_

MODELS: dict[str, Any] = {
    "dflash": DFlashDraftModel,
    "dflash2": DFlash2DraftModel,
    "dspark": DSparkDraftModel,
    "peagle": PEagleDraftModel,
    "xpress": XPressDraftModel,
}


def main() -> None:
    """Write the guesses of their model in a step of their training, by the slot that we number them by."""
    request = HeadRequest.from_command_line()
    inputs = load_file(request.inputs)
    options = dict(request.switches)
    kind = options.pop("kind")
    if options.pop("load", False):
        model = MODELS[kind].from_pretrained(request.out)
        # speculators 0.9.0 leaves this buffer unset, as it is not in the file
        if kind == "xpress":
            model.refiner_head.causal_tril.fill_(1).tril_()
    else:
        model = make_model(kind, request, options, inputs)
        model.save_pretrained(request.out)
    read: list[Tensor] = []
    trusted: list[Tensor] = []
    if getattr(model, "confidence_head", None) is not None:
        model.confidence_head.register_forward_hook(
            lambda _module, _input, output: trusted.append(output.flatten())
        )
    chosen: list[Tensor] = []
    if kind == "dflash2":
        record_choices(model.candidate_selector, chosen)
    kwargs, _ = model.get_trainer_kwargs(loss_fn="tv", loss_implementation="eager")
    if kind == "peagle":
        batch, calls = peagle_batch(inputs, request.steps)
        slots, levels = peagle_guesses(inputs, request.steps)
    else:
        batch, calls = block_batch(inputs)
        slots, levels = block_guesses(inputs, model, request.steps)
    # a loss that records the logits that it gets
    kwargs["loss_config"] = {"read": (lambda logits, _: keep(read, logits), 1.0)}
    with torch.no_grad():
        model.eval()(**batch, **{**kwargs, **calls})
    # the first of a block may name nothing
    named = levels >= 0
    results = {
        "slots": slots[named],
        "levels": levels[named],
        "logits": read[0][named],
    }
    if chosen:
        # a level's logits are the scores of its candidates
        results |= {"slot_logits": results["logits"], "logits": chosen[0][named]}
    if trusted:
        results["confidence"] = trusted[0][named]
    results = {name: tensor.contiguous() for name, tensor in results.items()}
    save_file(results, f"{request.out}.logits")


def keep(read: list[Tensor], logits: Tensor) -> Tensor:
    """Keep the logits that a loss gets, all biases added."""
    read.append(logits[0].float())
    return logits.sum(-1)


def record_choices(selector: Any, chosen: list[Tensor]) -> None:
    """Keep what the selector drafts by, at every later call: the scores of candidates [E, V], and -100 elsewhere."""
    score = selector.score_candidates

    def record(
        unary: Tensor,
        hidden: Tensor,
        before: Tensor,
        training_candidates: Tensor,
    ) -> Tensor:
        # `select` scores the candidates of a draft, and calls this method for it
        selector.score_candidates = score
        candidates, scores = selector.select(unary, hidden, before)
        chosen.append(torch.full_like(unary, -100.0).scatter(-1, candidates, scores)[0].float())
        return score(unary, hidden, before, training_candidates)

    selector.score_candidates = record


def make_model(
    kind: str,
    request: HeadRequest,
    options: dict[str, Any],
    inputs: dict[str, Tensor],
) -> Any:
    """Return a model as their trainer makes it for the target, with random weights."""
    config = AutoConfig.from_pretrained(request.target)
    config.num_hidden_layers = options.pop("blocks")
    model = MODELS[kind].from_training_args(
        config,
        draft_vocab_size=config.vocab_size,
        block_size=request.steps,
        mask_token_id=config.vocab_size - 1,
        target_layer_ids=inputs["taps"].tolist(),
        verifier_name_or_path=request.target,
        draft_attn_impl="sdpa",
        **options,
    )
    model = model.float()
    borrowed = ("verifier", "embed", "lm_")
    own = [weight for name, weight in model.named_parameters() if not name.startswith(borrowed)]
    randomize_(own)
    return model


def block_batch(inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a text whose anchors alone are supervised, so that sampling takes all of them."""
    tokens = inputs["tokens"][None]
    anchors = inputs["anchors"]
    supervised = torch.zeros(tokens.shape, dtype=torch.bool).index_fill_(1, anchors, True)
    return text_batch(tokens, inputs["features"], supervised), {"max_anchors": len(anchors)}


def block_guesses(
    inputs: dict[str, Tensor],
    model: Any,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Return slot and level of every guess [E]: the slot before an anchor, and the guesses before it in the block."""
    level = torch.arange(steps)
    if not model.config.sample_from_anchor:
        level = level - 1
    slots, levels = torch.broadcast_tensors(inputs["anchors"][:, None] - 1, level)
    return slots.flatten(), levels.flatten()


def peagle_batch(inputs: dict[str, Tensor], steps: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a text without its first token, as in their `shift_batch`, and nearly all elements of all depths."""
    tokens = inputs["tokens"][None, 1:]
    batch = text_batch(tokens, inputs["features"][:-1], torch.ones_like(tokens))
    return batch, {"num_depths": steps, "down_sample_ratio": 0.9}


def peagle_guesses(inputs: dict[str, Tensor], steps: int) -> tuple[Tensor, Tensor]:
    """Return what their forward will sample from the same seed."""
    torch.manual_seed(1)
    length = len(inputs["tokens"]) - 1
    sampled = generate_cod_sample_indices(
        length, torch.ones(1, length), steps, down_sample_ratio=0.9
    )
    torch.manual_seed(1)
    return sampled


def text_batch(
    tokens: Tensor,
    features: Tensor,
    supervised: Tensor,
) -> dict[str, Tensor]:
    """Return a batch of one text [1, T]; the target's last states decide no logits."""
    return {
        "input_ids": tokens,
        "hidden_states": features.flatten(1)[None],
        "verifier_last_hidden_states": torch.zeros(1, *features[:, 0].shape),
        "loss_mask": supervised,
        "document_ids": torch.zeros_like(tokens),
    }


if __name__ == "__main__":
    main()
