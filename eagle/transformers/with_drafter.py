"""`generate_with`: what `model.generate(custom_generate=...)` calls to decode with a drafter."""

# B prompts, R rows, T tokens

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationMixin,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from eagle.core.arguments import check_call, check_policy
from eagle.core.budget import Budget, Policy
from eagle.core.drafter import Drafter, TrainableDrafter
from eagle.core.sampling import Sampling, whole
from eagle.core.trace import Trace
from eagle.decoding.beam import beam_search
from eagle.decoding.loop import Decoding
from eagle.decoding.rows import Stops
from eagle.device import in_dtype
from eagle.formats.checkpoint import load_drafter
from eagle.target.target import Target
from eagle.transformers.held_targets import count_from_zero, held_by, in_evaluation
from eagle.transformers.node_processors import NodeProcessors, check_processors, sampling_of
from eagle.transformers.request import Request, read_request
from eagle.transformers.stepwise import RowLogits, Stepwise

# by its code object the frame of `model.generate` is found among the callers
GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
# options of `generate_with` that `generate_from_folder` takes, too
OPTIONS = (
    "seed",
    "budget",
    "stateless",
)
# the stopping criteria that beam search with drafts can follow
BEAM_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)


def generate_with(
    drafter: Drafter | str | Path | Sequence[str | Path],
    *,
    seed: int | None = None,
    budget: Budget | Policy | None = None,
    stateless: Sequence[type] = (),
    **options: Any,
) -> WithDrafter:
    """Return the argument for `model.generate(custom_generate=...)`, which then decodes with a drafter.

    Args:
        drafter: A head's folder or hub id, a method such as "ngram", or a drafter.
        seed: Seed for `do_sample`; by default, it is taken from torch's generator. Samples follow the model's
            distribution with any seed.
        budget: The draft tree, or a policy that chooses it.
        stateless: Your own classes of logits processors, if they keep no state between calls.
        options: Further options of `load_drafter`.
    """
    return WithDrafter(drafter, seed=seed, budget=budget, stateless=stateless, **options)


class WithDrafter:
    """Decodes with a drafter in `model.generate`. The first call loads the drafter."""

    def __init__(
        self,
        drafter: Any,
        *,
        seed: int | None = None,
        budget: Budget | Policy | None = None,
        stateless: Sequence[type] = (),
        **options: Any,
    ) -> None:
        """Check the arguments, which are those of `generate_with`; nothing is loaded yet."""
        if not isinstance(drafter, (Drafter, str, Path, list, tuple)):
            raise ValueError(
                f"generate_with got a {type(drafter).__name__}, expected a head's folder or hub id, a method such as "
                "'ngram', or a Drafter"
            )
        if isinstance(drafter, Drafter) and options:
            raise ValueError(
                f"{', '.join(options)} is for drafters that are loaded by name, got one that is made already"
            )
        self.drafter = drafter
        self.options = options
        self.set_options(seed=seed, budget=budget, stateless=stateless)
        self.traces: list[
            Trace
        ] = []  # traces of the last call, one per row; empty after beam search

    def __repr__(self) -> str:
        return f"generate_with({self.drafter!r})"

    def set_options(
        self,
        *,
        seed: int | None = None,
        budget: Budget | Policy | None = None,
        stateless: Sequence[type] = (),
    ) -> None:
        """Set these options of `generate_with` for all further calls."""
        for item in stateless:
            if not isinstance(item, type):
                raise ValueError(
                    f"stateless holds {item!r:.60}, expected classes of logits processors"
                )
        self.seed = None if seed is None else whole("seed", seed)
        self.budget = budget
        self.stateless = tuple(stateless)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target forward in the last call, over all its rows."""
        cycles = [cycle for trace in self.traces for cycle in trace.cycles]
        if not cycles:
            return 0.0
        return sum(cycle.committed for cycle in cycles) / len(cycles)

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
        """Return what `model.generate` would return without a drafter: tokens [R, T + new], or an output with them.

        transformers calls this for `custom_generate`, with prepared inputs.

        Args:
            model: The model whose `generate` was called.
            input_ids: [R, T], R prompts of T tokens; a prompt is repeated for its beams or answers.
            logits_processor: All logits processors of the call.
            stopping_criteria: All stopping criteria of the call.
            generation_config: The generation config of the call.
            streamer: Gets the tokens of each step; None for none.
            kwargs: The prepared inputs of the model's forward.
        """
        # transformers does not pass a callable all arguments: the others are read from the frame of `generate`
        caller = arguments_of_generate()
        if streamer is None:
            streamer = caller.get("streamer")
        for name in ("assistant_model", "synced_gpus"):
            kwargs.setdefault(name, caller.get(name))
        request = read_request(
            model,
            input_ids,
            processors=logits_processor,
            criteria=stopping_criteria,
            config=generation_config,
            kwargs=kwargs,
            caller_kwargs=caller.get("kwargs", {}),
        )
        check_processors(request.processors, self.stateless)
        if request.is_beams and streamer is not None:
            raise ValueError(
                "a streamer cannot follow beams, which are chosen at the end: leave it or num_beams out"
            )
        with in_evaluation(model):
            target, drafter = self._prepare(model)
            # the model's own `generate` counts positions from 0 in this case
            if request.has_positions:
                count_from_zero(target)
            # one list for both, which `_decode` fills
            self.traces = []
            held_by(model).traces = self.traces
            if request.is_beams:
                return _search_beams(target, drafter, request, self.budget)
            return self._decode(target, drafter, request, streamer)

    def generate(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `model.generate(*args, **kwargs)` with the drafter.

        `stop_strings`, which a callable of `custom_generate` cannot serve, are turned into a stopping criterion first.
        """
        config = kwargs.get("generation_config")
        tokenizer = kwargs.pop("tokenizer", None)
        default = getattr(model.generation_config, "stop_strings", None)
        strings = (
            kwargs.pop("stop_strings", None) or getattr(config, "stop_strings", None) or default
        )
        if strings is not None:
            if tokenizer is None:
                raise ValueError(
                    "stop_strings are given without their tokenizer: pass tokenizer=..."
                )
            # transformers passes a callable no tokenizer, so a criterion that holds it replaces the strings
            criteria = [
                *(kwargs.get("stopping_criteria") or []),
                StopStringCriteria(tokenizer, strings),
            ]
            kwargs["stopping_criteria"] = StoppingCriteriaList(criteria)
            if config is not None:
                config = copy.deepcopy(config)
                config.stop_strings = None
                kwargs["generation_config"] = config
            # an explicit None, because the model's default would be used otherwise
            if default is not None:
                kwargs["stop_strings"] = None
        return model.generate(*args, **kwargs, custom_generate=self)

    def _prepare(self, model: Any) -> tuple[Target, Drafter]:
        """Return a target over the model and the drafter bound to it.

        The model holds both, so that further calls reuse them: see `held_targets`.
        """
        held = held_by(model)
        target = held.target_of(model)
        if self not in held.drafters:
            held.drafters[self] = self._load(target)
        return target, held.drafters[self]

    def _load(self, target: Target) -> Drafter:
        """Load the drafter if it is a name, and return it bound to the target."""
        drafter = self.drafter
        if not isinstance(drafter, Drafter):
            return load_drafter(drafter, target, **self.options)
        if isinstance(drafter, TrainableDrafter) and not drafter.bound_to:
            drafter = _copy_head(drafter, target).bind(target.head)
        # a drafter that runs the target's own layers gets access to them
        if drafter.reads.view:
            drafter.bind_target(target.view())
        return drafter

    def _decode(self, target: Target, drafter: Drafter, request: Request, streamer: Any) -> Any:
        """Answer a request greedily or by sampling, and return what `generate` returns for it.

        Its rows are decoded in one batch. The traces of the call are kept in `self.traces`, in place, since the model
        holds the same list.
        """
        config = request.config
        seed = self._find_seed(request)
        returns_dict = config.return_dict_in_generate
        keeps_raw = bool(returns_dict and config.output_logits)
        keeps_processed = bool(returns_dict and config.output_scores)
        stop = _valid_stops(target, request)
        traces = []
        logits = []
        samplings: list[Sampling] = []
        decoding = Decoding(target, drafter, budget=self.budget, batch_size=len(request.prompts))
        try:
            for row, prompt in enumerate(request.prompts):
                padding = request.paddings[row]
                processors = request.processors_of(row)
                sampling, is_whole = sampling_of(
                    processors,
                    do_sample=bool(config.do_sample),
                    padding=len(padding),
                    seed=seed,
                    request=row,
                )
                check_call(target, drafter, sampling, self.budget)
                # processors are called only if a sampling cannot express them, because a sampling is faster
                process = None
                if not is_whole:
                    process = NodeProcessors(processors, padding, request.input_ids.device)
                trace = Trace()
                row_logits = RowLogits(raw=keeps_raw, processed=keeps_processed)
                decoding.add(
                    row,
                    prompt,
                    sampling=sampling,
                    limit=request.limit,
                    trace=trace,
                    stop=stop,
                    process=process,
                    observe=row_logits.observe if keeps_raw or keeps_processed else None,
                )
                samplings.append(sampling)
                traces.append(trace)
                logits.append(row_logits)
            check_policy(decoding.budget, samplings, len(request.prompts))
            self.traces[:] = traces
            stepwise = Stepwise(decoding, request, traces, logits)
            tokens = stepwise.run(streamer)
        finally:
            decoding.close()
        if not returns_dict:
            return tokens
        output: Any = GenerateDecoderOnlyOutput
        return output(sequences=tokens, scores=stepwise.scores, logits=stepwise.raw)

    def _find_seed(self, request: Request) -> int:
        """Return the seed of a call's sampling noise: the option `seed`, or else a number from torch's generator."""
        if self.seed is not None:
            return self.seed
        # greedy decoding has no noise, and must not change the state of torch's generator
        if not request.config.do_sample:
            return 0
        return int(torch.randint(2**63 - 1, ()))


def _copy_head(head: TrainableDrafter, target: Target) -> TrainableDrafter:
    """Return a copy of a head to bind to a target, because the caller's head may be used with other models, too.

    The copy shares the weights if they have the target's device and precision.
    """
    weights = list(head.parameters())
    expected = (target.device, target.model.dtype)
    if all((weight.device, weight.dtype) == expected for weight in weights):
        # deepcopy takes objects in its memo for copied already
        return copy.deepcopy(head, {id(weight): weight for weight in weights})
    return in_dtype(copy.deepcopy(head).to(target.device), target.model.dtype)


def _valid_stops(target: Target, request: Request) -> list[int]:
    """Return the stop tokens of a request, without those that the target's vocabulary lacks."""
    return [token for token in request.stop_tokens if 0 <= token < target.vocab_size]


def generate_from_folder(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `model.generate` with the head in the folder or hub repository that `custom_generate` names.

    transformers runs the file `custom_generate/generate.py` of that folder, and the file calls this function.
    """
    # transformers does not pass the folder's name on
    folder = arguments_of_generate().get("custom_generate")
    if not isinstance(folder, str):
        raise ValueError(
            f"custom_generate is {folder!r}, expected the folder or the hub id of a head: call "
            "model.generate(.., custom_generate=FOLDER, trust_remote_code=True)"
        )
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    revision = kwargs.pop("revision", None)
    # a head that was written again has files with other times, and is loaded again
    times = [path.stat().st_mtime_ns for path in sorted(Path(folder).glob("*")) if path.is_file()]
    key = (folder, revision, tuple(times))
    callables = held_by(model).callables
    if key not in callables:
        # only the last head is kept
        callables.clear()
        # the caller has trusted the folder's generate.py, and so also the code of its method
        callables[key] = WithDrafter(folder, revision=revision, trust_code=True)
    callables[key].set_options(**options)
    return callables[key].generate(model, *args, **kwargs)


def arguments_of_generate() -> dict[str, Any]:
    """Return the local variables of the nearest caller that is `model.generate`, by name; an empty dict without one.

    transformers passes a callable neither the streamer nor the assistant model, and the code of a folder not the name
    of the folder. They are found only in the frame of `generate`; without this, a streamer would wait for ever.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not GENERATE:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


class _StringStops(Stops):
    """The stop tokens of a beam search, and transformers' criteria for its stop strings.

    Args:
        tokens: The stop tokens.
        criteria: transformers' `StopStringCriteria`, which are called with all tokens of a beam.
        prefix: The padding and the prompt, which precede the tokens of an answer.
        vocab_size: V.
    """

    def __init__(
        self, tokens: list[int], criteria: list[Any], prefix: list[int], vocab_size: int
    ) -> None:
        # the stop strings are left to the criteria, so that no tokenizer is needed
        super().__init__(tokens, tokenizer=None, vocab_size=vocab_size)
        self.criteria = criteria
        self.prefix = prefix

    def first_end(self, before: list[int], new: list[int]) -> tuple[int | None, str | None]:
        """Return how many of the new tokens belong to the answer (None: it goes on), and None for the stop string.

        Args:
            before: The answer so far.
            new: Tokens that follow it.
        """
        # criteria see a sequence end at each of the new tokens in turn, as they would without drafts
        for count in range(1, len(new) + 1):
            sequence = torch.tensor([[*self.prefix, *before, *new[:count]]])
            if new[count - 1] in self.tokens or any(
                bool(criterion(sequence, None).any()) for criterion in self.criteria
            ):
                return count, None
        return None, None


def _search_beams(target: Target, drafter: Drafter, request: Request, budget: Any) -> Any:
    """Answer a request by beam search, prompt by prompt, and return what `generate` returns for it.

    Returns:
        Tokens [B * returned, T + new] of B prompts of T tokens with `returned` answers to each, or an output with them.
    """
    config = request.config
    wrong = [
        type(criterion).__name__
        for criterion in request.criteria
        if type(criterion) not in BEAM_CRITERIA
    ]
    if wrong:
        raise ValueError(
            f"the stopping criteria {', '.join(wrong)} cannot be followed by beams with drafts: expected max_length, "
            "stop tokens and stop strings"
        )
    # stop tokens and lengths are passed to the search itself
    string_criteria = [
        criterion for criterion in request.criteria if type(criterion) is StopStringCriteria
    ]
    stop = _valid_stops(target, request)
    returned = config.num_return_sequences or 1
    # of each answer: its prompt [T], with padding, and its new tokens
    prompts: list[Tensor] = []
    answers: list[list[int]] = []
    # transformers has repeated each prompt for its beams: take the first of these rows
    for row in range(0, len(request.prompts), request.expansion):
        processors = request.processors_of(row)
        padding = request.paddings[row]
        prompt = request.prompts[row]
        node_processors = NodeProcessors(processors, padding, target.device)
        result = beam_search(
            target,
            drafter,
            prompt,
            beams=config.num_beams,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
            num_return_sequences=returned,
            max_new_tokens=request.limit,
            stop=_StringStops(stop, string_criteria, [*padding, *prompt], target.vocab_size),
            processors=[node_processors.after_beams] if processors else [],
            budget=budget,
        )
        prompts += [request.input_ids[row]] * returned
        answers += result.tokens
    # shorter answers are filled to the length of the longest, with the token that transformers takes
    new = torch.full((len(answers), max(map(len, answers))), _filling(config))
    for i, answer in enumerate(answers):
        new[i, : len(answer)] = torch.tensor(answer, dtype=torch.long)
    tokens = torch.cat([torch.stack(prompts), new.to(request.input_ids.device)], dim=1)
    output: Any = GenerateBeamDecoderOnlyOutput
    return output(sequences=tokens) if config.return_dict_in_generate else tokens


def _filling(config: Any) -> int:
    """Return the token with which transformers' beam search fills shorter answers.

    It is the padding token, or the first stop token if there is no padding token; -1 if there are no stop tokens. As in
    transformers, a padding token of 0 counts as none.
    """
    ends = getattr(config, "_eos_token_tensor", None)
    if ends is None:
        return -1
    padding = getattr(config, "_pad_token_tensor", None)
    if padding is not None and int(padding):
        return int(padding)
    return int(ends.flatten()[0])
