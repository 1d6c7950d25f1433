"""Methods to come, one short class each: every tool takes them as they are, from conformance to a comparison."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import test_conformance as conformance
import torch
import torch.nn.functional as F
from comparisons import small_comparison, written
from pydantic import Field
from torch import Tensor, nn

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.drafter import Committed, Drafter, Noise, Reads, TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import PUBLISHED_TREE, DraftTree, Paths, chain_paths
from eagle.decoding.cycle_times import bare_costs
from eagle.doctor import diagnose
from eagle.doctor.texts import answer_prompts
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts import text_blocks
from eagle.drafters.parts.decoder_block import head_shape
from eagle.drafters.parts.growth import grow
from eagle.drafters.parts.objectives import OwnHead, align_steps, distillation_loss, step_weights
from eagle.drafters.parts.validation import figures, validate_batch
from eagle.drafters.recurrent.hass import Hass, HassSettings
from eagle.drafters.several import FirstOf
from eagle.formats.export import EXPORTERS
from eagle.recipe import Section
from eagle.target.view import TargetTexts
from eval.compare import main as compare
from eval.replay import answer
from eval.tune import NOT_DRAFTING, Tuning, chain
from recipes.forecast import empty_head, token_flops, training_bytes
from tests.drafters.parts.test_judge import TREES, batch_of, counted_by_drafting
from tests.families import build, own_answer, own_logits, random_tokens

BUDGETS = [Budget(8, 4, 3), Budget.fixed(PUBLISHED_TREE), Budget(0, 0, 0)]


class SeveralSettings(Section):
    """What a recipe may say about the heads."""

    kind: Literal["several_heads"] = "several_heads"
    levels: int = Field(5, ge=1)


class SeveralHeads(TrainableDrafter):
    """In the manner of Medusa: from one state of the target, a residual block and an LM head per level."""

    taps = (-1,)
    Settings = SeveralSettings

    def __init__(self, settings: Any, shape: Any) -> None:
        super().__init__(settings, shape)
        width = shape.hidden_size
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(settings.levels)])
        self.heads = nn.ModuleList([nn.Linear(width, shape.vocab_size, bias=False) for _ in range(settings.levels)])

    @classmethod
    def for_target(cls, settings: Any, target_config: Any, frozen: Any = None, supervised: Any = None) -> SeveralHeads:
        """A new head whose LM heads start from the target's."""
        head = cls(settings, head_shape(target_config))
        for part in head.heads:
            part.weight.data.copy_(frozen.weight)
        return head

    def level_states(self, hidden: Tensor) -> list[Tensor]:
        """Per level [.., H], of the target's states [.., H]."""
        return [hidden + F.silu(block(hidden)) for block in self.blocks]

    def unroll(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Supervised slots [S], and their states of every level."""
        slots = batch.loss_mask.nonzero()[:, 0].to(batch.tokens.device) - 2
        return slots, self.level_states(batch.select_taps(self.taps)[slots, 0].to(self.blocks[0].weight.dtype))

    def forward(self, batch: Batch, frozen: TargetHead) -> dict[str, Tensor]:
        """The distillation loss, with a head for each level."""
        slots, states = self.unroll(batch)
        heads = [OwnHead(part.weight) for part in self.heads]
        true = batch.select_taps((-1,))[slots + 1, 0]
        total, _ = distillation_loss(align_steps(states), true, step_weights(slots, len(states)), (heads, frozen))
        return {"total": total}

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Sums of what each tree would have kept."""
        _, states = self.unroll(batch)
        return validate_batch(batch, states, (list(self.heads), frozen.logits), trees)

    def draft_levels(self, batch: Batch, frozen: TargetHead, levels: int) -> list[Any]:
        """The states of each level, with its LM head."""
        return list(zip(self.unroll(batch)[1], self.heads, strict=True))[:levels]

    def begin(self, noise: Noise | None = None) -> Any:
        """Forget the previous sequence."""
        self.noise, self.length = noise, 0
        return self

    @torch.inference_mode()
    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """A tree whose levels do not depend on one another."""
        assert update.features is not None
        self.length += len(update.tokens)
        hidden = update.features[-1:, 0].to(self.blocks[0].weight)
        logits = [head(state) for head, state in zip(self.heads, self.level_states(hidden), strict=True)]

        def level(depth: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            return logits[depth].expand(len(tokens), -1)

        return grow(update.root, logits[0][0], level, budget.within(len(logits)), self.noise, self.length + 1)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """None after the first, which makes all levels."""
        return ()

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Any]:
        """All levels of one state, however much was committed."""
        hidden = torch.zeros(1, self.shape.hidden_size, dtype=self.blocks[0].weight.dtype)
        return lambda: [head(state) for head, state in zip(self.heads, self.level_states(hidden), strict=True)]


class TwoBlockSettings(HassSettings):
    """What a recipe may say about the head."""

    kind: Literal["two_blocks"] = "two_blocks"  # type: ignore[assignment]


class TwoBlocks(Hass):
    """HASS with a second block, which has keys and values of its own."""

    Settings = TwoBlockSettings

    @classmethod
    def for_target(cls, settings: Any, target_config: Any, frozen: Any = None, supervised: Any = None) -> TwoBlocks:
        """A new head of two blocks."""
        return cls(settings, head_shape(target_config, num_hidden_layers=2))


class FollowChoices(Drafter):
    """Drafts what the target found likely after the same token, at whatever node it was seen."""

    reads = Reads(choices=3)

    def begin(self, noise: Noise | None = None) -> Any:
        """Forget what was seen."""
        self.seen: dict[int, list[int]] = {}
        self.updates: list[Committed] = []
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """Every path of likely followers, the first few nodes of it; any token where nothing was seen yet."""
        self.updates.append(update)
        if update.tree is not None and update.choices is not None:
            self.seen |= dict(zip(update.tree.tokens.tolist(), update.choices.tolist(), strict=True))
        paths: list[list[int]] = []
        reach: list[list[int]] = [[]]
        while reach and len(paths) < budget.nodes:
            path = reach.pop(0)
            token = path[-1] if path else update.root
            if len(path) < budget.depth:
                reach += [[*path, follower] for follower in self.seen.get(token, [token])[: budget.top_k]]
            paths += [path] if path else []
        return DraftTree.from_paths(update.root, paths)


class ReadsTexts(Drafter):
    """Drafts greedily with all layers of the target behind its own keys and values: everything is accepted."""

    reads = Reads(texts=True)

    def open_with(self, texts: Any) -> WholeTarget:
        """Texts that are drafted for together."""
        return WholeTarget(texts)


class WholeTarget:
    """What the target holds of the texts, and nothing else."""

    def __init__(self, texts: Any) -> None:
        self.texts = texts

    def admit(self, row: int, noise: Noise | None = None) -> None:
        """A text begins, of which nothing is kept."""

    def release(self, row: int) -> None:
        """A text has ended."""

    def propose(self, updates: Any, budgets: Any) -> dict[int, DraftTree]:
        """Chains as long as the longest budget, each cut to its own; all rows in one forward a token."""
        rows = list(updates)
        tokens = torch.tensor([[updates[row].root] for row in rows])
        levels = [min(budgets[row].nodes, budgets[row].depth) if budgets[row].top_k else 0 for row in rows]
        for depth in range(max(levels)):
            seen = torch.ones(len(rows), 1, depth + 1, dtype=torch.bool)
            hidden = self.texts.ahead(rows, tokens[:, -1:], list(range(depth + 1)), seen)
            tokens = torch.cat([tokens, self.texts.view.logits(hidden)[..., -1, :].argmax(-1, keepdim=True)], dim=1)
        parts = zip(rows, tokens.tolist(), levels, strict=True)
        return {row: DraftTree.chain(chosen[: count + 1]) for row, chosen, count in parts}


# whoever adds a tool for all methods adds a test over these names
METHODS: dict[str, type[Any]] = {
    "several_heads": SeveralHeads,
    "two_blocks": TwoBlocks,
    "follow_choices": FollowChoices,
    "reads_texts": ReadsTexts,
}
TRAINED = ["several_heads", "two_blocks"]
examples, batch = conformance.examples, conformance.batch  # fixtures


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """One line in the registry each, as long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, method in METHODS.items():
            patch.setitem(DRAFTERS, name, method)
        patch.setattr(conformance, "TRAINED", [*conformance.TRAINED, *TRAINED])
        patch.setattr(conformance, "LAWFUL", [*conformance.LAWFUL, *TRAINED])
        patch.setattr(conformance, "load_drafter", lambda name, target: METHODS[name]())
        patch.setattr(conformance, "RANKED", BUDGETS)
        patch.setattr(conformance, "DYNAMIC", [BUDGETS[0], BUDGETS[2]])
        patch.setattr(conformance, "DRAWN", [])
        yield


@pytest.mark.parametrize("sampling", [conformance.SAMPLINGS[0], conformance.SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", METHODS)
def test_decoding_is_lossless_and_forgets(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """The untouched model's own tokens, and a second text as if it were the first."""
    conformance.test_output_is_the_untouched_models_own(name, sampling, tiny_target)
    conformance.test_begin_forgets(name, sampling, tiny_target)


@pytest.mark.parametrize("budget", [Budget(8, 4, 3), Budget(3, 1, 3), Budget(5, 5, 1), Budget(0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_trees_stay_within_the_budget(name: str, budget: Budget, tiny_target: Target) -> None:
    """Rooted, and no larger than was asked."""
    conformance.test_trees_are_rooted_and_within_budget(name, budget, tiny_target)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained_is_learned_saved_and_loaded(
    name: str, tiny_target: Target, batch: Batch, examples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss falls, sees no future, and adds up in validation; a head from disk drafts the same."""
    monkeypatch.setattr(conformance, "load_drafter", load_drafter)
    conformance.test_loss_falls_on_one_batch(name, tiny_target, batch)
    conformance.test_loss_counts_supervised_tokens_alone(name, tiny_target, batch)
    conformance.test_loss_depends_on_what_is_supervised(name, tiny_target, batch)
    conformance.test_what_is_judged_adds_up(name, tiny_target, batch, examples)
    conformance.test_save_and_load_give_the_same_proposal(name, tiny_target, tmp_path)


def learned(name: str, target: Target, prompts: list[list[int]]) -> tuple[Any, Batch]:
    """A head that has learned the target's own answers to the prompts by heart, and these."""
    none = load_drafter("none", target)
    texts = [prompt + generate(target, none, prompt, max_new_tokens=24, stop=[]).tokens for prompt in prompts]
    given = batch_of(target, texts, [torch.arange(len(text)) >= len(text) - 24 for text in texts])
    head = conformance.new_head(name, target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        head(given, target.head)["total"].backward()
        optimizer.step()
    return head.bind(target.head), given


@pytest.mark.parametrize("name", TRAINED)
def test_validation_counts_what_drafting_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot by slot with real trees, to the last count; planted: a second block that sees nothing of the first."""
    target = Target(build("llama"))  # random, so that no training decides whether there is something to count
    head, given = learned(name, target, [random_tokens(12, seed) for seed in range(2)])
    sums = head.validate(given, target.head, TREES)
    for tree, paths in TREES.items():
        counts = counted_by_drafting(head, target, given, paths)
        assert {kind: sums[f"{tree}/{kind}"].tolist() for kind in counts} == counts
        assert min(counts["accepted"][:2]) > 0  # there was something to count
    if name == "two_blocks":
        attend = text_blocks.attend

        def blind(query: Tensor, key: Tensor, value: Tensor, spans: Any, own: Any) -> Tensor:
            found = attend(query, key, value, spans, own)
            return found * (len(spans.rows) < spans.count)  # nothing where all slots are read

        monkeypatch.setattr(text_blocks, "attend", blind)
        wrong = head.validate(given, target.head, TREES)
        assert any(wrong[key].tolist() != sums[key].tolist() for key in sums if "/" in key)


@pytest.mark.parametrize("name", METHODS)
def test_the_tuner_prices_every_draft(name: str, tiny_target: Target, ticking: None) -> None:
    """By bare forwards where there are such, else by the seconds that drafts took; never for free."""
    drafter = conformance.drafter_of(name, tiny_target)
    prompts = [tiny_target.chat(asked) for asked in (conformance.ASKED, "Who?")]
    answers = [answer(tiny_target, drafter.taps, prompt, limit=16, sampling=Sampling()) for prompt in prompts]
    costs = bare_costs(tiny_target, drafter, (16,), (1, 4), rounds=2)
    assert (costs.first is not None) == (name in TRAINED)
    tuning = Tuning(tiny_target, drafter, answers, costs)
    for budget in (chain(2), BUDGETS[1]):
        trial = tuning.trial(budget)
        records = [row for rows in tuning.records[budget] for row in rows]
        reading = sum(costs.read(row["nodes"] + 1, row["context"]) for row in records)
        assert trial.seconds > reading > 0 and trial.acceptance_length >= 1
        assert tuning.break_even(budget) > 1
    assert tuning.trial(NOT_DRAFTING).acceptance_length == 1


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_is_forecast(name: str, tiny_target: Target) -> None:
    """Memory of weights, gradients and moments at least, more for more tokens; the FLOPs of every matrix."""
    head, config = empty_head(settings_of({"kind": name}, "test"), tiny_target.config), tiny_target.config
    sizes = sum(weight.numel() for weight in head.parameters())
    few, many = (training_bytes(head, config, [tokens], torch.float32) for tokens in (64, 256))
    assert many > few > 16 * sizes
    matrices = sum(weight.numel() for weight in head.parameters() if weight.ndim == 2)
    assert token_flops(head, config, 100, 1.0) > 4 * matrices


@pytest.mark.parametrize("name", TRAINED)
def test_the_doctor_examines_a_head(name: str) -> None:
    """Levels that say what the target says are no fault of theirs; what does not apply to a head is named.

    It has learned the answers of a random target by heart, so that no change can help and all its parts are needed.
    """
    target, prompts = Target(build("llama")), [random_tokens(count, seed=count) for count in (12, 14, 16)]
    head, _ = learned(name, target, prompts)
    texts = answer_prompts(target, prompts, 24, (0.0,))
    diagnosis = diagnose(head, target, texts)
    expected = figures(head.validate(texts, target.head, {"chain": chain_paths(3)}))
    assert diagnosis.figures is not None and not diagnosis.faults
    assert diagnosis.figures.rates() == pytest.approx([expected[f"chain/{level}"] for level in (1, 2, 3)])
    (missing,) = (note for note in diagnosis.notes if note.startswith("does not apply to this head"))
    assert ("projections" in missing) == (name == "several_heads")


def test_a_comparison_takes_them_as_arms(tiny_target_dir: Path, tmp_path: Path) -> None:
    """A line each in a file of arms: trained, measured, and in the table."""
    values = small_comparison(tiny_target_dir, tmp_path)
    arms = {name: {"recipe": {"drafter": {"kind": name}}} for name in TRAINED}
    shapes = {"tree": values["shapes"]["tree"]}
    recipe = {**values["recipe"], "drafter": {"kind": "two_blocks"}}
    changes = {"arms": {"follow_choices": {"untrained": "follow_choices"}, **arms}, "shapes": shapes, "recipe": recipe}
    compare([written(values, tmp_path, seeds=[0], **changes)])
    rows = json.loads((tmp_path / "out/comparison.json").read_text())["arms"]
    assert [row["arm"] for row in rows] == ["follow_choices", "several_heads", "two_blocks"]
    assert all(tau["value"] >= 1 for row in rows for tau in row["tau"].values())


def test_a_head_of_two_blocks_is_another_network(tiny_target: Target) -> None:
    """No engine's layout of one block takes it."""
    head: Any = conformance.new_head("two_blocks", tiny_target).bind(tiny_target.head)
    assert head.network == {"network": "features", "blocks": 2} and len(head.layers) == 2
    for engine in ("vllm", "sglang", "eagle"):
        with pytest.raises(ValueError, match=f"{engine}: "):
            EXPORTERS[engine](head, tiny_target.config)


def test_choices_are_the_targets_at_every_node(tiny_target: Target) -> None:
    """By the untouched model on the path of each node, accepted or not; none before a tree was read."""
    drafter, prompt = FollowChoices(), tiny_target.chat(conformance.ASKED)
    trace = generate(tiny_target, drafter, prompt, max_new_tokens=10, stop=[], budget=Budget(6, 3, 3))
    first, *later = drafter.updates
    assert first.choices is None and first.tree is None and len(later) > 1
    text = [*prompt, trace.tokens[0]]
    for update, cycle in zip(later, trace.cycles, strict=False):
        assert update.tree is not None and update.choices is not None and len(update.choices) == len(update.tree) > 1
        tokens = update.tree.tokens.tolist()
        for node, choices in enumerate(update.choices.tolist()):
            path = [tokens[step] for step in update.tree.path(node)[1:]]
            assert choices == own_logits(tiny_target.model, [*text, *path])[-1].topk(3).indices.tolist()
        text += trace.tokens[len(text) - len(prompt) :][: cycle.committed]


def test_drafters_in_turn_get_what_each_reads() -> None:
    """One that reads choices behind one that reads none; the output stays the target's own.

    A random target of 96 tokens says some of them again, so that lookup is silent at times.
    """
    target, prompt = Target(build("llama")), random_tokens(20, seed=1)
    several = FirstOf([load_drafter("ngram", target), FollowChoices()])
    assert several.reads == Reads(choices=3) and several.forwards(BUDGETS[0]) is None
    trace = generate(target, several, prompt, max_new_tokens=16, stop=[])
    assert trace.tokens == own_answer(target.model, prompt, 16)
    updates = several.drafters[1].updates  # type: ignore[attr-defined]
    assert len(updates) < len(trace.cycles) and any(update.choices is not None for update in updates)


def test_a_drafter_may_draft_behind_the_targets_own_text(
    mixing_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches that wait for room, behind another drafter and in threads everything is kept, and the output is the
    target's; planted: drafts that do not see their root, and a layer too few.
    """
    prompts = [mixing_target.chat(asked) for asked in conformance.BESIDE]
    options: dict[str, Any] = {"max_new_tokens": 20, "stop": [], "budget": chain(3)}
    none = load_drafter("none", mixing_target)
    expected = [generate(mixing_target, none, prompt, **options).tokens for prompt in prompts]

    def kept(drafter: Any, **more: Any) -> bool:
        traces = generate(mixing_target, drafter, prompts, **options, **more)
        assert [trace.tokens for trace in traces] == expected
        return all(cycle.accepted == cycle.depth > 0 for trace in traces for cycle in trace.cycles[:-1])

    room = 2 * (max(map(len, prompts)) + 24)  # of two texts at a time
    assert kept(ReadsTexts()) and kept(ReadsTexts(), batch_size=3)
    assert kept(ReadsTexts(), batch_size=3, max_tokens_in_cache=room)
    silent = FirstOf([none, ReadsTexts()])
    assert kept(silent, batch_size=2)
    drafter = ReadsTexts()
    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(lambda prompt: generate(mixing_target, drafter, prompt, **options), prompts)
    assert [trace.tokens for trace in answers] == expected
    conformance.test_texts_side_by_side_are_as_each_alone("reads_texts", Sampling(), mixing_target)
    ahead = TargetTexts.ahead

    def blind(texts: Any, rows: Any, tokens: Tensor, depths: list[int], seen: Tensor) -> Tensor:
        return ahead(texts, rows, tokens, depths, seen & (torch.arange(seen.shape[-1]) > 0))

    def shallow(texts: Any, rows: Any, tokens: Tensor, depths: list[int], seen: Tensor) -> Tensor:
        return ahead(texts, rows, tokens, depths, seen, len(texts.view) - 1)

    for fault in (blind, shallow):
        monkeypatch.setattr(TargetTexts, "ahead", fault)
        assert not kept(ReadsTexts())


class ReadsLayers(Drafter):
    """Drafts with the first layers of the target and a cache of its own: early exit, as a view allows it."""

    reads = Reads(view=True)

    def bind_target(self, view: Any) -> None:
        """Get the layers."""
        self.view = view

    def begin(self, noise: Noise | None = None) -> Any:
        """Forget the text."""
        self.cache = self.view.new_cache()
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """A chain, each token by half of the layers."""
        read, tokens = partial(self.view.run_layers, start=0, end=len(self.view) // 2), [update.root]
        start = self.cache.length
        pending = [*update.tokens.tolist(), update.root]
        pending = pending[1:] if start else pending
        committed = start + len(pending)
        for _ in range(min(budget.nodes, budget.depth)):
            places = list(range(self.cache.length, self.cache.length + len(pending)))
            hidden = read(self.view.embed(torch.tensor(pending)), places, cache=self.cache)
            self.cache.length += len(pending)
            pending = [int(self.view.logits(hidden[-1:]).argmax())]
            tokens.append(pending[0])
        self.cache.length = min(self.cache.length, committed)
        return DraftTree.chain(tokens)


def test_a_drafter_may_run_the_targets_layers(tiny_target: Target) -> None:
    """The view comes before the text begins; with all layers every draft would be kept, with half some are."""
    drafter, prompt = ReadsLayers(), tiny_target.chat(conformance.ASKED)
    options: dict[str, Any] = {"max_new_tokens": 16, "stop": [], "budget": chain(3)}
    trace = generate(tiny_target, drafter, prompt, **options)
    assert trace.tokens == conformance.reference(tiny_target, tuple(prompt), Sampling(), 16)
    assert len(drafter.view) == tiny_target.config.num_hidden_layers


def test_weights_of_the_target_come_to_who_asks(tiny_target: Target, examples: Any) -> None:
    """By name when a head is made, and to nobody else."""
    from eagle.recipe import Recipe
    from eagle.training.first_head import first_head

    class Cut(SeveralHeads):
        reads = Reads(weights=True)

        @classmethod
        def for_target(
            cls, settings: Any, target_config: Any, frozen: Any = None, supervised: Any = None, weights: Any = None
        ) -> Cut:
            """A head that keeps one of the target's matrices."""
            head = super().for_target(settings, target_config, frozen)
            head.heads[0].weight.data.copy_(weights("lm_head.weight"))
            return head

    recipe = Recipe.load(Path(__file__).parent.parent / "recipes/tiny/eagle1.yaml")
    settings = settings_of({"kind": "several_heads"}, "test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRAFTERS, "several_heads", Cut)
        head: Any = first_head(recipe, settings, tiny_target, examples)
        empty: Any = empty_head(settings, tiny_target.config)
    assert torch.equal(head.heads[0].weight, tiny_target.model.state_dict()["lm_head.weight"])
    assert empty.heads[0].weight.is_meta
