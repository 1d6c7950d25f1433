"""`generate_with`: what `model.generate(custom_generate=...)` calls to decode with a drafter."""

# R rows, T tokens

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from eagle.core.arguments import check_call, check_policy
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Drafter, TrainableDrafter
from eagle.core.sampling import whole
from eagle.core.trace import Trace
from eagle.decoding.loop import Decoding
from eagle.device import in_dtype
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target
from eagle.transformers.beams import search_beams
from eagle.transformers.calling_frame import arguments_of_generate
from eagle.transformers.held_targets import count_from_zero, held_by, in_evaluation
from eagle.transformers.node_processors import NodeProcessors, check_processors, sampling_of
from eagle.transformers.request import Request, read_request
from eagle.transformers.stepwise import RowLogits, Stepwise


def generate_with(
    drafter: Drafter | str | Path | Sequence[str | Path],
    *,
    seed: int | None = None,
    budget: Budget | Policy | None = None,
    stateless: Sequence[type] = (),
    **options: Any,
) -> WithDrafter:
    """The callable for `model.generate(..., custom_generate=...)`: the same tokens, several a forward.

    `drafter` is a head's folder or hub id, a method such as "ngram", or a drafter; further options are those of
    `load_drafter`. With `do_sample` the model's distribution is kept, and its noise comes from `seed`, else from
    torch's generator. `stateless` are classes of logits processors of your own whose scores depend on nothing but what
    they are called with.
    """
    return WithDrafter(drafter, seed=seed, budget=budget, stateless=stateless, **options)


class WithDrafter:
    """Decodes with a drafter for `model.generate`; loads it at the first call with a model."""

    def __init__(
        self,
        drafter: Any,
        *,
        seed: int | None = None,
        budget: Budget | Policy | None = None,
        stateless: Sequence[type] = (),
        **options: Any,
    ) -> None:
        if not isinstance(drafter, (Drafter, str, Path, list, tuple)):
            raise ValueError(
                f"generate_with got a {type(drafter).__name__}, expected a head's folder or hub id, a method such as "
                "'ngram', or a Drafter"
            )
        if isinstance(drafter, Drafter) and options:
            raise ValueError(
                f"{', '.join(options)} is for drafters that are loaded by name, got one that is made already"
            )
        self.drafter, self.options = drafter, options
        self.set_options(seed=seed, budget=budget, stateless=stateless)
        self.traces: list[Trace] = []  # of the last call, one for each row; none after beams

    def __repr__(self) -> str:
        return f"generate_with({self.drafter!r})"

    def set_options(
        self, *, seed: int | None = None, budget: Budget | Policy | None = None, stateless: Sequence[type] = ()
    ) -> None:
        """Decode by these options of `generate_with` from now on."""
        if wrong := [item for item in stateless if not isinstance(item, type)]:
            raise ValueError(f"stateless holds {wrong[0]!r:.60}, expected classes of logits processors")
        self.seed = None if seed is None else whole("seed", seed)
        self.budget, self.stateless = budget, tuple(stateless)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target forward in the last call, over all its rows."""
        cycles = [cycle for trace in self.traces for cycle in trace.cycles]
        return sum(cycle.committed for cycle in cycles) / len(cycles) if cycles else 0.0

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """What `model.generate` gives without a drafter: tokens [R, T + new], or an output that holds them."""
        caller = arguments_of_generate()
        streamer = caller.get("streamer") if streamer is None else streamer
        kwargs = {**{name: caller.get(name) for name in ("assistant_model", "synced_gpus")}, **kwargs}
        prepared = (input_ids, logits_processor, stopping_criteria, generation_config)
        request = read_request(model, *prepared, kwargs, caller.get("kwargs", {}))
        check_processors(request.processors, self.stateless)
        if request.is_beams and streamer is not None:
            raise ValueError("a streamer cannot follow beams, which are chosen at the end: leave it or num_beams out")
        with in_evaluation(model):
            target, drafter = self._prepare(model)
            if request.has_positions:
                count_from_zero(target)
            self.traces = held_by(model).traces = []
            if request.is_beams:
                return search_beams(target, drafter, request, self.budget)
            return self._write(target, drafter, request, streamer)

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """`model.generate(*args, **kwargs)` with the drafter; `stop_strings` are served here with their `tokenizer`."""
        config, tokenizer = kwargs.get("generation_config"), kwargs.pop("tokenizer", None)
        strings = kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None)
        default = getattr(model.generation_config, "stop_strings", None)
        strings = strings or default
        if strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings are given without their tokenizer: pass tokenizer=...")
            criterion = StopStringCriteria(tokenizer, strings)
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
            if config is not None:
                kwargs["generation_config"] = config = copy.deepcopy(config)
                config.stop_strings = None
            if default is not None:  # else it would take the place of what is not given
                kwargs["stop_strings"] = None
        return model.generate(*args, **kwargs, custom_generate=self)

    def _prepare(self, model: Any) -> tuple[Target, Drafter]:
        """The target over the model and the drafter for it, those of the last call where the model is the same."""
        held = held_by(model)
        target = held.target_of(model)
        if self not in held.drafters:
            held.drafters[self] = self._load(target)
        return target, held.drafters[self]

    def _load(self, target: Target) -> Drafter:
        """The drafter, bound to the target."""
        drafter = self.drafter
        if not isinstance(drafter, Drafter):
            return load_drafter(drafter, target, **self.options)
        if isinstance(drafter, TrainableDrafter) and not drafter.frozen:
            # a copy is bound, over the same weights where they fit: the head stays as it was, free for other models
            place, weights = {(target.device, target.model.dtype)}, list(drafter.parameters())
            fits = {(weight.device, weight.dtype) for weight in weights} <= place
            head = copy.deepcopy(drafter, {id(weight): weight for weight in weights} if fits else {})
            head = head if fits else in_dtype(head.to(target.device), target.model.dtype)
            drafter = head.bind(target.head)
        if drafter.reads.view:
            drafter.bind_target(target.view())
        return drafter

    def _write(self, target: Target, drafter: Drafter, request: Request, streamer: Any) -> Any:
        """Decode greedily or by sampling."""
        rows = range(len(request.prompts))
        config, seed = request.config, self._draw_seed(request)
        wants = config.return_dict_in_generate
        raw, processed = (bool(wants and kept) for kept in (config.output_logits, config.output_scores))
        traces, logits = [Trace() for _ in rows], [RowLogits(raw=raw, processed=processed) for _ in rows]
        decoding = Decoding(target, drafter, budget=self.budget, batch_size=len(rows))
        try:
            samplings = []
            for row in rows:
                bound = request.processors_of(row)
                padding = len(request.paddings[row])
                sampling, is_whole = sampling_of(
                    bound, do_sample=bool(config.do_sample), padding=padding, seed=seed, request=row
                )
                check_call(target, drafter, sampling, self.budget)
                process = NodeProcessors(bound, request.paddings[row], request.input_ids.device)
                decoding.add(
                    row,
                    request.prompts[row],
                    sampling,
                    request.limit,
                    traces[row],
                    stop=[token for token in request.stop_tokens if 0 <= token < target.vocab_size],
                    process=None if is_whole else process,
                    observe=logits[row].observe if raw or processed else None,
                )
                samplings.append(sampling)
            check_policy(decoding.budget, samplings, len(rows))
            self.traces[:] = traces
            stepwise = Stepwise(decoding, request, traces, logits)
            tokens = stepwise.run(streamer)
        finally:
            decoding.close()
        if not wants:
            return tokens
        output: Any = GenerateDecoderOnlyOutput
        return output(sequences=tokens, scores=stepwise.scores, logits=stepwise.raw)

    def _draw_seed(self, request: Request) -> int:
        """The seed of a call's noise: the one that was given, else one from torch's generator where it is sampled."""
        if self.seed is not None or not request.config.do_sample:
            return self.seed or 0
        return int(torch.randint(2**63 - 1, ()))
