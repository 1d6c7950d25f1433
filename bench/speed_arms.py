"""What decodes in the tables of speed: a target as it is or at the cost of a large one, drafters, transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria

from bench.widen import count_weights, find_mlps, widen, widened_model
from eagle import Budget, Sampling, Target, load_drafter, stream
from eagle.core.budget import Policy
from eagle.core.drafter import Drafter
from eagle.core.trace import Trace
from eagle.decoding.cycle_times import clock_of
from eagle.decoding.goodput import Goodput
from eagle.drafters.draft_model import DraftModel
from eagle.target.weights.packed import pack_model
from eval.tune import chain

SHAPES = {
    "chain 3": chain(3),
    "chain 7": chain(7),
    "dynamic 8": Budget(8, 4, 4),
    "dynamic 25": Budget(25, 6, 6),
    "dynamic 60": Budget(60, 7, 10),
    "dynamic 80": Budget(80, 6, 8),
}
POLICY = "Goodput"
PLAIN = "none"
THEIRS = "transformers"
ASSISTED = f"{THEIRS}, assisted"
# options of `generate`; by default assisted generation drafts until the draft model is unsure, at most 20 tokens
PEERS: dict[str, dict[str, Any]] = {
    THEIRS: {},
    f"{THEIRS}, prompt lookup": {"prompt_lookup_num_tokens": 10},
    ASSISTED: {"num_assistant_tokens": 20, "assistant_confidence_threshold": 0.4},
    f"{ASSISTED} by 5": {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
}
# shares of the target's weights: an EAGLE head's of an 8B, a 0.5B's of an 8B
HEAD_SHARE = 1 / 32
MODEL_SHARE = 1 / 16
POLICY_CONTEXT = 128  # tokens of context at which the cycles of batches are timed

Timed = tuple[dict[str, Any], list[list[int]]]  # figures and answers
Prompts = list[list[int]]


class Watch(StoppingCriteria):
    """Times decoding from the moment at which every request has a token, which leaves out the prefill.

    Args:
        device: Where the target is; on one CPU thread CPU seconds count.
    """

    def __init__(self, device: torch.device) -> None:
        self.clock = clock_of(device)
        self.begun = 0.0
        self.tokens = 0

    def begin(self, tokens: int) -> None:
        """Note that all requests have a token, and the number of tokens."""
        # assisted generation of older versions asks about drafts, too, before it knows which are kept
        if not self.tokens or tokens < self.tokens:
            self.begun = self.clock()
            self.tokens = tokens

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Begin when transformers first asks whether to stop, and never stop."""
        self.begin(input_ids.numel())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def figures(self, tokens: int) -> dict[str, Any]:
        """Return tokens and seconds since then."""
        seconds = round(self.clock() - self.begun, 4)
        return {"tokens": tokens - self.tokens, "seconds": seconds}


def decode_here(
    target: Target,
    drafter: Drafter,
    plan: Any,
    prompts: Prompts,
    sampling: Sampling,
    max_new_tokens: int,
) -> Timed:
    """Return figures and answers of this project's decoder; one prompt is decoded without a batch.

    Args:
        target: The model that verifies.
        drafter: What drafts for it.
        plan: A budget or a policy, None for the drafter's own.
        prompts: All of them are decoded together.
        sampling: Of every request.
        max_new_tokens: The length of every answer, as nothing stops one before.
    """
    traces = [Trace() for _ in prompts]
    options = {"budget": plan, "sampling": sampling, "max_new_tokens": max_new_tokens, "stop": []}
    # a drafter reuses what the target has read of a prompt before
    target.forget()
    watch = Watch(target.device)
    if len(prompts) == 1:
        steps: Any = stream(target, drafter, prompts[0], trace=traces[0], **options)
    else:
        steps = stream(target, drafter, prompts, trace=traces, batch_size=len(prompts), **options)
    for _ in steps:
        if all(trace.tokens for trace in traces):
            watch.begin(sum(len(trace.tokens) for trace in traces))
    answers = [trace.checked().tokens for trace in traces]
    figures = watch.figures(sum(map(len, answers)))
    # each cycle commits the accepted drafts and one more token
    cycles = [cycle for trace in traces for cycle in trace.cycles]
    figures["cycles"] = len(cycles)
    figures["committed"] = sum(cycle.committed for cycle in cycles)
    return figures, answers


def decode_there(
    model: Any, options: dict[str, Any], prompts: Prompts, sampling: Sampling, max_new_tokens: int
) -> Timed:
    """Return figures and answers of transformers' `generate`, prompts padded on the left.

    Args:
        model: A causal language model of transformers.
        options: Of `generate`, for prompt lookup or an assistant.
        prompts: One batch.
        sampling: Temperature, and the request whose index seeds torch.
        max_new_tokens: The length of every answer, as nothing stops one before.
    """
    # B prompts, T tokens of the longest
    width = max(map(len, prompts))
    padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(padded, device=model.device)  # [B, T]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    mask = torch.arange(width, device=model.device) >= width - lengths[:, None]
    draws: dict[str, Any] = {"do_sample": False}
    if sampling.temperature:
        draws = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(sampling.request)
    watch = Watch(model.device)
    written = model.generate(
        ids,
        attention_mask=mask.long(),
        stopping_criteria=[watch],
        max_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        **draws,
        **options,
    )
    return watch.figures(written.numel()), written[:, width:].tolist()


def widen_drafter(drafter: Drafter, weights: float) -> float:
    """Widen a head or a draft model to its usual share of a target of so many weights; return the share that it has.

    A head without an MLP, or a larger one, stays as it is.

    Args:
        drafter: Of any kind; what is no module has a share of 0.
        weights: The number of weights of the target.
    """
    if not isinstance(drafter, nn.Module):
        return 0.0
    share = MODEL_SHARE if isinstance(drafter, DraftModel) else HEAD_SHARE
    if find_mlps(drafter) and count_weights(drafter) < weights * share:
        widen(drafter, weights * share)
    return count_weights(drafter) / weights


class WideTarget:
    """A target as it is, or a small chat model widened to a size, and whatever decodes with it.

    Args:
        small: The model as it is.
        weights: How many the widened one has; None: the model and its drafters stay as they are.
        load: Loads a drafter by its name for a target.
        names: The drafters that there are; the first draft model among them assists transformers.
        packed: Whether this project's decoder reads weights in a CPU's own layout.
    """

    def __init__(
        self,
        small: Target,
        weights: float | None,
        load: Callable[[str, Target], Drafter],
        names: Iterable[str],
        packed: bool = False,
    ) -> None:
        self.small = small
        self.load = load
        self.names = list(names)
        self.is_widened = weights is not None
        # transformers' `generate` decodes with this one, whose weights are never packed
        self.model = small.model
        if weights is not None:
            self.model = widened_model(small.model, weights)
        served = self.model
        if packed:
            served = copy.deepcopy(self.model)
            pack_model(served)
        self.target = Target(served, small.tokenizer)
        self.weights = count_weights(self.model)
        self.drafters = {PLAIN: load_drafter(PLAIN, self.target)}
        self.shares: dict[str, float] = {}

    def drafter(self, name: str) -> Drafter:
        """Return a drafter, widened as the target is and loaded once."""
        if name not in self.drafters:
            self.drafters[name] = self.load(name, self.target)
            if self.is_widened:
                self.shares[name] = widen_drafter(self.drafters[name], self.weights)
        return self.drafters[name]

    def runner(self, arm: str, plan: Budget | Policy | None) -> Callable[..., Timed]:
        """Return an arm as a function of prompts, a sampling and a number of tokens.

        Args:
            arm: `none`, one of `PEERS`, or a drafter and a shape as "eagle1, chain 3".
            plan: How much that drafter drafts.
        """
        if arm not in PEERS:
            return partial(decode_here, self.target, self.drafter(arm.partition(", ")[0]), plan)
        options = PEERS[arm]
        if not arm.startswith(ASSISTED):
            return partial(decode_there, self.model, options)
        for name in self.names:
            drafter = self.drafter(name)
            if isinstance(drafter, DraftModel):
                return partial(_decode_assisted, self.model, drafter.model, options)
        raise ValueError(
            "assisted generation needs a draft model: name one in eval.drafters, or leave the arm out"
        )

    def policy(self, name: str, prompts: Prompts, budget: Budget) -> Policy:
        """Return a policy that has measured the costs of cycles and learned nothing yet.

        Args:
            name: The drafter.
            prompts: As many as will be decoded together.
            budget: The most that the policy may draft.
        """
        options: dict[str, Any] = {}
        asked: Any = prompts[0]
        if len(prompts) > 1:
            asked = prompts
            options = {"batch_sizes": (1, len(prompts)), "contexts": (POLICY_CONTEXT,)}
        return Goodput.measure(self.target, self.drafter(name), asked, budget, **options)


def _decode_assisted(model: Any, assistant: Any, options: dict[str, Any], *asked: Any) -> Timed:
    # transformers reads these from the assistant, which all assisted arms share
    assistant.generation_config.update(num_assistant_tokens_schedule="constant", **options)
    return decode_there(model, {"assistant_model": assistant}, *asked)
