"""What a head learns from its own drafts: the untouched model's states, a naive replay of each draft, exact resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained import ROOT, apart, equal, finished, launched, prepared, rows, run, weights
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Sampling, Target, generate
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Drafts, Example, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.own_drafts import OwnDrafts
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from eagle.recipe import OnPolicySection
from eagle.training.drafts_loss import losses_of_drafts
from tests.registry import TRAINED
from tests.trained import fixture_seed

REPLAYED = [
    name for name in TRAINED if DRAFTERS[name].draft_levels is not TrainableDrafter.draft_levels
]
POLICY = OnPolicySection(share=1, depth=4, temperature=1.0)
PROMPTS = 3
ON_POLICY = ["train.on_policy.share=0.6", "train.on_policy.every=3", "train.on_policy.depth=3"]


@pytest.fixture(scope="module")
def target() -> Target:
    """Eight layers of random weights in fp64, so large that every token depends on all before; it never ends."""
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
    }
    model = (
        LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.25, **sizes))
        .double()
        .eval()
    )
    return Target(model)


def new_head(name: str, target: Target) -> Any:
    """A head in fp64 of which no weight stands where it starts; some have a draft vocabulary."""
    torch.manual_seed(fixture_seed())
    options = {"draft_vocab": 60} if name in ("eagle3", "peagle") else {}
    checked, method = settings_of({"kind": name, **options}, "test"), DRAFTERS[name]
    more = {"weights": target.tensor} if method.reads.weights else {}
    head = method.for_target(
        checked, target.config, target.head, [torch.arange(99).repeat(2)[:150]], **more
    )
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return head.double().train()


def written(
    head: Any, target: Target, policy: OnPolicySection = POLICY, seed: int = 7
) -> tuple[OwnDrafts, Batch]:
    """Texts that the target has written with the head's drafts, as they are read in one step."""
    torch.manual_seed(1)
    texts = torch.randint(5, target.vocab_size, (PROMPTS, 30)).unbind()
    examples = [
        Example(text[: 30 - place], torch.arange(30 - place) >= 9 + place)
        for place, text in enumerate(texts)
    ]
    taps = taps_of(head.settings, target.config)
    live = LiveFeatures(target, examples, {"taps": list(taps), "dtype": "float32"})
    features = OwnDrafts(live, target, head, policy)
    features.write([(seed, range(PROMPTS))])
    torch.manual_seed(seed)
    batch = collate(features.read(range(PROMPTS)), live.taps)
    return features, replace(batch, features=batch.features.double())


@torch.no_grad()
def states_of(target: Target, text: Tensor, taps: tuple[int, ...]) -> Tensor:
    """[T, L, D], what the untouched model says of a text in one forward."""
    output = target.model(input_ids=text[None], output_hidden_states=True)
    return torch.stack([output.hidden_states[tap][0] for tap in taps], dim=1)


def replays(batch: Batch) -> list[tuple[Tensor, int, int, int]]:
    """Of every draft its text: all before its root, root and drafted tokens; its slot there, accepted and drafted."""
    assert batch.drafts is not None
    drafts, found, begin = batch.drafts, [], 0
    for length in batch.lengths:
        for row in (
            ((drafts.slots >= begin) & (drafts.slots < begin + length)).nonzero()[:, 0].tolist()
        ):
            slot, drafted = int(drafts.slots[row]), int(drafts.drafted[row])
            text = torch.cat([batch.tokens[begin : slot + 2], drafts.tokens[row, :drafted]])
            found.append((text, slot - begin, int(drafts.accepted[row]), drafted))
        begin += length
    return found


@pytest.mark.quick("early_exit_adapter")
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "dflash", "early_exit_adapter"])
def test_texts_and_states_are_the_targets_own(name: str, target: Target) -> None:
    """Each answer is what the target writes alone; states, of rejected tokens too, are those of the untouched model."""
    head = new_head(name, target)
    features, batch = written(head, target)
    examples = list(features.written.values())
    assert batch.drafts is not None and len(examples) == PROMPTS
    for index, example in enumerate(examples):
        prompt = features.text(index)[0][: int(example.loss_mask.nonzero()[0])].tolist()
        alone = generate(
            target,
            NoDrafter(),
            prompt,
            sampling=Sampling(temperature=1.0, seed=7, request=index),
            max_new_tokens=len(example.tokens) - len(prompt),
        )
        assert example.tokens.tolist() == prompt + alone.tokens
    kept = set()
    for row, (text, slot, accepted, drafted) in enumerate(replays(batch)):
        true = states_of(target, text, batch.taps)[slot + 2 :]
        assert torch.allclose(
            batch.drafts.states[row, :drafted].double(), true, rtol=1e-4, atol=1e-4
        )
        kept.add((accepted, drafted))
    assert len({accepted for accepted, _ in kept}) > 1 and any(
        accepted < drafted for accepted, drafted in kept
    )
    begin = 0
    for length in (
        batch.lengths
    ):  # accepted tokens are the text's, and the one behind them is not the draft's
        text = batch.tokens[begin : begin + length].tolist()
        for row in (
            ((batch.drafts.slots >= begin) & (batch.drafts.slots < begin + length))
            .nonzero()[:, 0]
            .tolist()
        ):
            place, accepted = (
                int(batch.drafts.slots[row]) - begin + 2,
                int(batch.drafts.accepted[row]),
            )
            tokens = batch.drafts.tokens[row].tolist()
            assert text[place : place + accepted] == tokens[:accepted]
            if accepted < int(batch.drafts.drafted[row]):
                assert text[place + accepted] != tokens[accepted]
        begin += length


def naive_losses(
    head: Any, batch: Batch, target: Target, policy: OnPolicySection
) -> dict[str, Tensor]:
    """Draft by draft, each a text of its own whose only supervised slot is where it began; divergences by formula."""
    terms = {name: torch.zeros((), dtype=torch.float64) for name in ("accepted", "rejected")}
    for text, slot, accepted, drafted in replays(batch):
        features = states_of(target, text, batch.taps)
        mask = torch.zeros(len(text), dtype=torch.bool)
        # a text is cut behind what is supervised; its first slot is the draft's
        mask[slot + 2 :] = True
        alone = collate([Example(text, mask, features)], batch.taps)
        levels = head.draft_levels(alone, target.head, drafted)
        for level, (states, logits_of) in enumerate(levels):
            student = logits_of(states[:1])[0].log_softmax(-1)
            logits = target.head.logits(features[slot + 1 + level, batch.taps.index(-1)][None])[0]
            teacher = (logits if head.drafts is None else logits[head.drafts]).log_softmax(-1)
            if level < accepted:
                terms["accepted"] = terms["accepted"] - (teacher.exp() * student).sum()
            else:
                divergence = (student.exp() * (student - teacher)).sum()
                terms["rejected"] = (
                    terms["rejected"] + policy.decay ** (level - accepted) * divergence
                )
    return {name: term / batch.slots for name, term in terms.items()}


@pytest.mark.quick("blockwise")
@pytest.mark.parametrize("name", REPLAYED)
def test_the_loss_is_that_of_each_draft_alone(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value and gradients, for every method; a planted fault, which reads the text in place of the draft, is seen."""
    head = new_head(name, target)
    _, batch = written(head, target)
    head.eval()  # noise and dropout belong to the slots of a text, and a draft alone is another text
    expected = naive_losses(head, batch, target, POLICY)
    found = losses_of_drafts(head, batch, target.head, POLICY)
    assert expected["rejected"] > 0.01
    for term, value in expected.items():
        assert found[term].item() == pytest.approx(value.item(), rel=2e-4, abs=1e-6)
    learned = {key: weight for key, weight in head.named_parameters() if weight.requires_grad}
    gradients = [
        torch.autograd.grad(sum(terms.values()), learned.values(), allow_unused=True)
        for terms in (expected, found)
    ]
    size = max(float(part.abs().max()) for part in gradients[0] if part is not None)
    for one, other in zip(*gradients, strict=True):
        if one is not None or other is not None:
            assert one is not None and other is not None
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-4 * size)
    monkeypatch.setattr(
        Batch, "places_behind", lambda self, places, steps: (places + steps).clamp(max=self.slots)
    )
    spoilt = losses_of_drafts(head, batch, target.head, POLICY)
    assert spoilt["rejected"].item() != pytest.approx(expected["rejected"].item(), rel=1e-3)


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twelve steps of four conversations on a store, of which some get new answers, three steps at a time."""
    return [*prepared(tiny_target_dir, tmp_path_factory.mktemp("store")), *ON_POLICY]


@pytest.fixture(scope="module")
def whole(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That run, with a checkpoint in the middle of what was written at once."""
    return run(
        command,
        tmp_path_factory.mktemp("runs") / "whole",
        "train.checkpoint_every=4",
        "train.keep=9",
    )


@pytest.mark.slow
def test_a_run_that_was_stopped_comes_to_the_same_bits(
    whole: Path, command: list[str], tmp_path: Path
) -> None:
    """After five stops, at each of its checkpoints; metrics too; and it is another head than without drafts."""
    assert any(row.get("drafts/rejected", 0) > 0 for row in rows(whole))
    for left in (4, 8):
        out = tmp_path / f"from-{left}"
        shutil.copytree(whole, out)
        for step in (path for path in (out / "checkpoints").iterdir() if int(path.name[5:]) > left):
            shutil.rmtree(step)
        assert equal(run(command, out, "train.checkpoint_every=4", "train.keep=9"), whole)
    plain = run([*command[: -len(ON_POLICY)]], tmp_path / "plain")
    assert apart(weights(plain), weights(whole)) > 1e-4


@pytest.mark.slow
def test_texts_are_written_anew_behind_a_checkpoint(
    whole: Path, command: list[str], tmp_path: Path
) -> None:
    """A planted fault: one that went on with what it had written would not be what a stopped run comes to."""
    other = run(command, tmp_path / "other", "train.checkpoint_every=12")
    assert not equal(other, whole)


@pytest.mark.quick("eagle1")
@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_parts_of_a_step_are_the_step(
    kind: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part or three: the same head but for rounding, whether a loss divides by slots or by what it counts.

    A planted fault: drafts that are divided by the slots of their part are another loss.
    """
    overrides = [f"drafter={{kind: {kind}}}", "train.max_steps=4"]
    one, three, fault = (tmp_path / name for name in ("one", "three", "fault"))
    run(command, one, *overrides)
    run(command, three, *overrides, "train.accumulation=3")
    assert apart(weights(one), weights(three)) < 1e-5
    totals = [[row["total"] for row in rows(out) if "total" in row] for out in (one, three)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    if kind == "medusa":

        def by_part(head: Any, batch: Batch, *others: Any) -> dict[str, Tensor]:
            drafts = batch.drafts and replace(batch.drafts, divisor=None)
            return losses_of_drafts(head, replace(batch, drafts=drafts), *others)

        monkeypatch.setattr("eagle.training.drafts_loss.losses_of_drafts", by_part)
        run(command, fault, *overrides, "train.accumulation=3")
        assert apart(weights(one), weights(fault)) > 1e-4


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["drafter={kind: draft_model, layers: 1}", "features.store=null"],
            "replays drafts by `draft_levels`",
        ),
        (
            ["train.stem=nowhere", "train.schedule=wsd", "train.warmup=1", "train.max_steps=9"],
            "exclude one another",
        ),
        (["train.on_policy.share=0"], "greater than 0"),
        (["train.on_policy.refreshed=3"], "unknown key train.on_policy.refreshed"),
    ],
)
def test_what_cannot_be_is_refused(
    overrides: list[str], says: str, command: list[str], tmp_path: Path
) -> None:
    """In words, before a step is made."""
    with pytest.raises(ValueError, match=says):
        run(command, tmp_path / "run", *overrides)


def test_drafts_are_told_apart_from_the_data(target: Target) -> None:
    """Texts of the data have no drafts, nor has a text of one token; the shares are those that are asked for."""
    head = new_head("eagle1", target)
    features, batch = written(head, target, POLICY.model_copy(update={"share": 0.5}))
    assert 0 < len(features.written) < PROMPTS
    assert batch.drafts is not None and len(Drafts.join([None, None], (4, 5)) or ()) == 0
    head.eval()
    assert [example.drafts for example in features.read(range(PROMPTS))] == [None] * PROMPTS


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", pytest.param("zero2", marks=pytest.mark.long)])
def test_processes_share_what_is_written(config: str, command: list[str], tmp_path: Path) -> None:
    """Two processes, each of which writes its own part of a step, learn what one does; sharded heads are refused."""
    one = run(command, tmp_path / "one", "train.max_steps=6")
    others = run(
        command, tmp_path / "others", "train.max_steps=6", "train.on_policy.temperature=0.9"
    )
    script = str(ROOT / "recipes/train_eagle.py")
    two = finished(
        launched(config, script, *command, f"train.out={tmp_path / 'two'}", "train.max_steps=6")
    )
    assert two.returncode == 0, two.stdout
    rounding = apart(
        weights(one), weights(tmp_path / "two")
    )  # sums in another order, which steps of 1e-3 enlarge
    assert rounding < 1e-4 and apart(weights(one), weights(others)) > 1e-3
    split = finished(
        launched(
            "ddp", script, *command, f"train.out={tmp_path / 'split'}", "train.shard_head=true"
        )
    )
    assert (
        split.returncode and "needs all weights of head and target on every process" in split.stdout
    )
