"""Requests of a batch, random schedules of them, and the untouched model's own answer to each."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
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
from eagle.drafters.lookup.recycling import RecyclingDrafter
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.several import FirstOf
from tests.families import VOCAB_SIZE, build, own_choices, random_tokens

# in the order in which transformers applies them
WARPERS = {
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
        """Return its sampling, with a noise of its own."""
        return Sampling(**self.setting, seed=5, request=self.number)

    def choices(self, model: PreTrainedModel, tokens: list[int]) -> list[int]:
        """Return what the untouched model chooses at each of these tokens, warped by transformers."""
        names = [name for name in WARPERS if name in self.setting]
        warp = LogitsProcessorList([WARPERS[name](self.setting[name]) for name in names])
        noise = Choose(self.sampling).noise
        if noise is None:
            return own_choices(model, self.prompt, tokens, warp)

        def noise_at(position: int) -> Tensor:
            return noise([position], VOCAB_SIZE, torch.device("cpu"))[0]

        return own_choices(model, self.prompt, tokens, warp, noise=noise_at)


class Bench:
    """A model nobody touches, and a target made from its copy."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = build(name, dtype)
        self.target = Target(copy.deepcopy(self.model))

    def requests(
        self,
        count: int,
        seed: int,
        longest: int = 60,
        most: int = 16,
        least: int = 1,
    ) -> list[Request]:
        """Return requests that the target answers without drafts as the untouched model does.

        Args:
            count: how many.
            seed: draws prompts and lengths.
            longest: the longest prompt.
            most: the most tokens of an answer.
            least: the fewest tokens of an answer.
        """
        dice = random.Random(seed)
        requests = []
        for number in range(count):
            lengths = [
                1,
                2,
                dice.randint(1, 12),
                dice.randint(1, longest),
                dice.randint(1, longest),
            ]
            length = dice.choice(lengths)
            prompt = random_tokens(length, seed=dice.randrange(10**6))
            if number % 4 == 3:  # repeated tokens, so that lookup drafts are sometimes right
                prompt = (prompt[: length // 3 + 1] * 3)[:length]
            setting = SETTINGS[(seed + number) % len(SETTINGS)]
            request = Request(prompt, setting, dice.randint(least, most), number)
            # the oracle: whole forwards of the untouched model, warped by transformers
            request.answer = self.run_alone(NoDrafter(), request).tokens
            assert request.answer == request.choices(self.model, request.answer)
            assert len(request.answer) == request.limit
            requests.append(request)
        return requests

    def run_alone(self, drafter: Drafter, request: Request, budget: Any = None) -> Trace:
        """Answer one request by itself."""
        return generate(
            self.target,
            drafter,
            request.prompt,
            stop=[],
            sampling=request.sampling,
            max_new_tokens=request.limit,
            budget=budget,
        )

    def run(
        self,
        drafter: Drafter,
        requests: list[Request],
        batch_size: int,
        dice: random.Random | None = None,
        budget: Any = None,
        most: int | None = None,
    ) -> list[Trace]:
        """Answer the requests in one decoding, with never more tokens in its cache than `most`.

        Without dice all come at once, else each comes in at a random moment.

        Args:
            drafter: for all rows.
            requests: what is asked.
            batch_size: the most rows at a time.
            dice: lets requests come at random moments; without it all come at once.
            budget: of drafts.
            most: the most tokens in the cache.
        """
        traces = [Trace([]) for _ in requests]
        coming = list(requests)
        # requests come while others are written, as a server has them
        options = {
            "budget": budget,
            "batch_size": batch_size,
            "max_tokens_in_cache": most,
        }
        decoding = Decoding(self.target, drafter, **options)
        while coming or not decoding.is_done:
            while coming and (dice is None or decoding.is_done or dice.random() < 0.4):
                add(decoding, coming.pop(0), traces)
            emitted = decoding.step()
            for trace in traces:
                trace.checked()
            assert all(tokens for _, tokens in emitted)
            assert len(decoding.rows) <= batch_size
            assert most is None or allocated(decoding) <= most
        decoding.close()
        return traces


def add(decoding: Decoding, request: Request, traces: list[Trace]) -> None:
    """Let a request join a decoding."""
    decoding.add(
        request.number,
        request.prompt,
        request.sampling,
        request.limit,
        trace=traces[request.number],
        stop=[],
    )


def allocated(decoding: Decoding) -> int:
    """Return rows times positions of the largest buffer of a decoding's cache."""
    return max(rows.tensor.shape[0] * rows.tensor.shape[2] for rows in decoding.state.cache.buffers)


class KnowsAnswers(Drafter):
    """Plants the next tokens of each row's answer among wrong branches, in trees of any size up to ten nodes."""

    def __init__(
        self,
        requests: list[Request],
        chains: bool = False,
        taps: tuple[int, ...] = (),
    ) -> None:
        self.texts = {request.number: [*request.prompt, *request.answer] for request in requests}
        self.chains = chains
        self.taps = taps
        self.seeds = {request.number: request.number for request in requests}

    def open(self) -> KnownRows:
        """Return what is kept of the rows."""
        return KnownRows(self)

    def follows(self, row: int, tokens: list[int], root: int) -> bool:
        """Return whether the row's text ends as this drafter knows it to."""
        return self.texts[row][: len(tokens) + 1] == [*tokens, root]


class KnownRows:
    """The tokens that each row has committed."""

    def __init__(self, drafter: KnowsAnswers) -> None:
        self.drafter = drafter
        self.read: dict[int, list[int]] = {}

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """Begin a row."""
        assert row not in self.read
        self.read[row] = []

    def release(self, row: int) -> None:
        """Forget a row."""
        del self.read[row]

    def propose(
        self,
        updates: Mapping[int, Committed],
        budgets: Mapping[int, Budget],
    ) -> dict[int, DraftTree]:
        """Return a tree for each row, the same whatever other rows there are."""
        return {row: self._grow(row, update, budgets[row].depth) for row, update in updates.items()}

    def _grow(self, row: int, update: Committed, depth: int) -> DraftTree:
        drafter = self.drafter
        self.read[row] += update.tokens.tolist()
        # a row that has parted from its answer was given another's drafts
        is_known = drafter.follows(row, self.read[row], update.root)
        assert is_known, f"row {row} has parted from its answer"
        count = len(self.read[row])
        dice = random.Random(1000 * drafter.seeds[row] + count)
        right_depth = min(dice.choice([0, 1, 3, 3]), depth)
        right = drafter.texts[row][count + 1 :][:right_depth]
        if drafter.chains:
            wrong = range(min(dice.randrange(3), depth - len(right)))
            tokens = [dice.randrange(VOCAB_SIZE) for _ in wrong]
            return DraftTree.chain([update.root, *right, *tokens])
        # wrong branches leave the paths so far at any node
        paths = [right]
        for _ in range(dice.choice([0, 3, 7]) if depth else 0):
            path = dice.choice(paths)
            shared = path[: dice.randint(0, min(len(path), depth - 1))]
            paths.append([*shared, dice.randrange(VOCAB_SIZE)])
        dice.shuffle(paths)
        return DraftTree.from_paths(update.root, paths)


def new_head(kind: str, target: Target) -> Any:
    """Return an untrained head, the same every time."""
    torch.manual_seed(0)
    settings = settings_of({"kind": kind}, "test")
    head = DRAFTERS[kind].for_target(settings, target.config, target.head)
    return head.to(target.head.weight.dtype).bind(target.head)


def own_model(target: Target) -> DraftModel:
    """Return the target's own model as a draft model, all of whose drafts are accepted at T = 0."""
    model = copy.deepcopy(target.model)
    return DraftModel(DraftModelSettings(), model.config, model).bind(target.head)


# made anew for each test, as some drafters know its requests
MAKE: dict[str, Any] = {
    "none": lambda target, requests: NoDrafter(),
    "trees": lambda target, requests: KnowsAnswers(requests, taps=(1, -1)),
    "chains": lambda target, requests: KnowsAnswers(requests, chains=True),
    "ngram": lambda target, requests: NgramDrafter(),
    "suffix": lambda target, requests: SuffixDrafter(),
    "recycling": lambda target, requests: RecyclingDrafter(),
    "eagle1": lambda target, requests: new_head("eagle1", target),
    "eagle3": lambda target, requests: new_head("eagle3", target),
    "draft_model": lambda target, requests: own_model(target),
    "ngram,eagle1": lambda target, requests: FirstOf([NgramDrafter(), new_head("eagle1", target)]),
}
REMEMBERS = {
    "suffix",
    "recycling",
}  # earlier texts, so that its drafts depend on which requests have ended
