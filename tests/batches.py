"""Requests of a batch, random schedules of them, and what each must come to: the untouched model's own answer."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle import Budget, Sampling, Target, Trace, generate
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.tree import DraftTree
from eagle.core.verify import Choose
from eagle.decoding.loop import Decoding
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from tests.families import VOCAB_SIZE, build, own_choices, random_tokens

WARPERS = {  # in the order in which transformers applies them
    "repetition_penalty": RepetitionPenaltyLogitsProcessor,
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.5, "top_k": 20},
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "temperature": 0.5},
    {"temperature": 1.0, "min_p": 0.05},
]


@dataclass
class Request:
    """What one row is asked, and what it must answer."""

    prompt: list[int]
    setting: dict[str, Any]  # of its sampling
    limit: int
    number: int
    answer: list[int] = field(default_factory=list)

    @property
    def sampling(self) -> Sampling:
        """With a request of its own, so that its noise is its own."""
        return Sampling(**self.setting, seed=5, request=self.number)

    def choices(self, model: PreTrainedModel, tokens: list[int]) -> list[int]:
        """What the untouched model chooses at each of these tokens, warped by transformers."""
        warp = LogitsProcessorList(
            [kind(self.setting[name]) for name, kind in WARPERS.items() if name in self.setting]
        )
        noise = Choose(self.sampling).noise
        place = noise and partial(noise, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        return own_choices(
            model, self.prompt, tokens, warp, place and (lambda position: place([position])[0])
        )


class Bench:
    """A model nobody touches, and a target made from its copy."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = build(name, dtype)
        self.target = Target(copy.deepcopy(self.model))

    def requests(
        self, count: int, seed: int, longest: int = 60, most: int = 16, least: int = 1
    ) -> list[Request]:
        """Requests that the target, alone, answers as the untouched model does: `least` to `most` tokens each."""
        dice, requests = random.Random(seed), []
        for number in range(count):
            length = dice.choice(
                [1, 2, dice.randint(1, 12), dice.randint(1, longest), dice.randint(1, longest)]
            )
            prompt = random_tokens(length, seed=dice.randrange(10**6))
            if number % 4 == 3:  # what is copied from the text is right now and then
                prompt = (prompt[: length // 3 + 1] * 3)[:length]
            request = Request(
                prompt, SETTINGS[(seed + number) % len(SETTINGS)], dice.randint(least, most), number
            )
            alone = self.run_alone(NoDrafter(), request)
            assert (
                alone.tokens == request.choices(self.model, alone.tokens)
                and len(alone.tokens) == request.limit
            )
            requests.append(Request(prompt, request.setting, request.limit, number, alone.tokens))
        return requests

    def run_alone(self, drafter: Drafter, request: Request, budget: Any = None) -> Trace:
        """One request by itself."""
        options: dict[str, Any] = {
            "sampling": request.sampling,
            "max_new_tokens": request.limit,
            "budget": budget,
        }
        return generate(self.target, drafter, request.prompt, stop=[], **options)

    def run(
        self,
        drafter: Drafter,
        requests: list[Request],
        batch_size: int,
        dice: random.Random | None = None,
        budget: Any = None,
        most: int | None = None,
    ) -> list[Trace]:
        """The requests in one decoding, all at once or coming in at random, never more in its cache than `most`."""
        traces, coming = [Trace([]) for _ in requests], list(requests)
        options = {"budget": budget, "batch_size": batch_size, "max_tokens_in_cache": most}
        decoding = Decoding(self.target, drafter, **options)
        while coming or not decoding.is_done:
            while coming and (dice is None or decoding.is_done or dice.random() < 0.4):
                add(decoding, coming.pop(0), traces)
            emitted = decoding.step()
            for trace in traces:
                trace.checked()
            assert all(tokens for _, tokens in emitted)
            assert len(decoding.rows) <= batch_size and (
                most is None or allocated(decoding) <= most
            )
        decoding.close()
        return traces


def add(decoding: Decoding, request: Request, traces: list[Trace]) -> None:
    """A request joins a decoding."""
    number = request.number
    decoding.add(number, request.prompt, request.sampling, request.limit, traces[number], stop=[])


def allocated(decoding: Decoding) -> int:
    """Slots times columns of the largest buffer of a decoding's cache."""
    return max(rows.buffer.shape[0] * rows.buffer.shape[2] for rows in decoding.state.cache.buffers)


class KnowsAnswers(Drafter):
    """Plants the next tokens of each row's answer among wrong branches, in trees of any size up to ten nodes."""

    def __init__(
        self, requests: list[Request], chains: bool = False, taps: tuple[int, ...] = ()
    ) -> None:
        self.texts = {request.number: [*request.prompt, *request.answer] for request in requests}
        self.chains, self.taps = chains, taps
        self.seeds = {request.number: request.number for request in requests}

    def open(self) -> KnownRows:
        """Where each row stands."""
        return KnownRows(self)

    def follows(self, row: int, tokens: list[int], root: int) -> bool:
        """Whether the row's text ends as this drafter knows it to."""
        return self.texts[row][: len(tokens) + 1] == [*tokens, root]


class KnownRows:
    """What each row has been told."""

    def __init__(self, drafter: KnowsAnswers) -> None:
        self.drafter, self.read = drafter, dict[int, list[int]]()

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """At its beginning."""
        assert row not in self.read
        self.read[row] = []

    def release(self, row: int) -> None:
        """Forget it."""
        del self.read[row]

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """A tree for each row, the same whatever rows are beside it."""
        return {row: self._grow(row, update, budgets[row].depth) for row, update in updates.items()}

    def _grow(self, row: int, update: Committed, depth: int) -> DraftTree:
        drafter, text = self.drafter, self.drafter.texts[row]
        self.read[row] += update.tokens.tolist()
        assert drafter.follows(row, self.read[row], update.root), (
            f"row {row} has parted from its answer"
        )
        count = len(self.read[row])
        dice = random.Random(1000 * drafter.seeds[row] + count)
        right = text[count + 1 :][: min(dice.choice([0, 1, 3, 3]), depth)]
        if drafter.chains:
            wrong = [
                dice.randrange(VOCAB_SIZE)
                for _ in range(min(dice.randrange(3), depth - len(right)))
            ]
            return DraftTree.chain([update.root, *right, *wrong])
        paths = [right]
        for _ in range(dice.choice([0, 3, 7]) if depth else 0):
            path = dice.choice(paths)
            paths.append(
                [*path[: dice.randint(0, min(len(path), depth - 1))], dice.randrange(VOCAB_SIZE)]
            )
        dice.shuffle(paths)
        return DraftTree.from_paths(update.root, paths)


def new_head(kind: str, target: Target) -> Any:
    """An untrained head, the same every time."""
    torch.manual_seed(0)
    head = DRAFTERS[kind].for_target(
        settings_of({"kind": kind}, "test"), target.config, target.head
    )
    return head.to(target.head.weight.dtype).bind(target.head)


def own_model(target: Target) -> DraftModel:
    """The target's own model as a draft model, all of whose drafts are kept at T = 0."""
    model = copy.deepcopy(target.model)
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


MAKE: dict[str, Any] = {
    "none": lambda target, requests: NoDrafter(),
    "trees": lambda target, requests: KnowsAnswers(requests, taps=(1, -1)),
    "chains": lambda target, requests: KnowsAnswers(requests, chains=True),
    "ngram": lambda target, requests: NgramDrafter(),
    "suffix": lambda target, requests: SuffixDrafter(),
    "eagle1": lambda target, requests: new_head("eagle1", target),
    "eagle3": lambda target, requests: new_head("eagle3", target),
    "draft_model": lambda target, requests: own_model(target),
    "ngram,eagle1": lambda target, requests: FirstOf([NgramDrafter(), new_head("eagle1", target)]),
}
REMEMBERS = {"suffix"}  # of earlier texts, so that its drafts depend on what ended before
