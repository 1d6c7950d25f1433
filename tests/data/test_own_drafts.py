"""What a head learns from its own drafts: the untouched model's states, a naive replay of each draft, exact resume."""

# T tokens, L taps, H hidden, V vocabulary

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Sampling, Target, generate
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Example, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.data.on_policy import OwnDrafts
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.none import NoDrafter
from eagle.recipe import OnPolicySection
from eagle.training.drafts_loss import losses_of_drafts
from tests.registry import TRAINED
from tests.trained import (
    ROOT,
    apart,
    equal,
    finished,
    fixture_seed,
    launched,
    prepared,
    rows,
    run,
    weights,
)

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
        "num_attention_heads": 4,
    }
    config = LlamaConfig(
        vocab_size=99,
        initializer_range=0.25,
        num_hidden_layers=8,
        **sizes,
    )
    return Target(LlamaForCausalLM(config).double().eval())


def new_head(name: str, target: Target) -> Any:
    """Return a head in fp64 of which no weight is where it starts; some have a draft vocabulary."""
    torch.manual_seed(fixture_seed())
    options = {"draft_vocab": 60} if name in ("eagle3", "peagle") else {}
    settings = settings_of({"kind": name, **options}, "test")
    method = DRAFTERS[name]
    more = {"weights": target.tensor} if method.reads.weights else {}
    supervised = [torch.arange(99).repeat(2)[:150]]
    head = method.for_target(
        settings,
        target.config,
        target.head,
        supervised,
        **more,
    )
    with torch.no_grad():
        # weights where a head starts, such as zeros, would hide faults
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    return head.double().train()


def write_with_drafts(
    head: Any,
    target: Target,
    policy: OnPolicySection = POLICY,
) -> tuple[OwnDrafts, Batch]:
    """Return sequences that the target has written with the head's drafts, as they are read in one step."""
    torch.manual_seed(1)
    examples = []
    for index in range(PROMPTS):
        tokens = torch.randint(5, target.vocab_size, (30 - index,))
        examples.append(Example(tokens, torch.arange(30 - index) >= 9 + index))
    taps = taps_of(head.settings, target.config)
    live = LiveFeatures(
        target,
        examples,
        {"taps": list(taps), "dtype": "float32"},
    )
    features = OwnDrafts(live, target, head, policy)
    # all answers of the step with seed 7 are written at once
    features.write([(7, range(PROMPTS))])
    torch.manual_seed(7)
    batch = collate(features.read(range(PROMPTS)), live.taps)
    return features, replace(batch, features=batch.features.double())


@torch.no_grad()
def hidden_of(
    target: Target,
    tokens: Tensor,
    taps: tuple[int, ...],
) -> Tensor:
    """Return the untouched model's hidden states of a sequence in one forward, [T, L, H]."""
    output = target.model(input_ids=tokens[None], output_hidden_states=True)
    return torch.stack([output.hidden_states[tap][0] for tap in taps], dim=1)


class Replay(NamedTuple):
    """A draft as a sequence of its own."""

    row: int  # of the batch's drafts
    tokens: Tensor  # all before its root, the root and the drafted tokens
    slot: int  # in its sequence, of which its first level learns
    num_accepted: int
    num_drafted: int
    following: list[int]  # the tokens that the sequence has after the root


def replay_drafts(batch: Batch) -> list[Replay]:
    """Return every draft of a batch."""
    assert batch.drafts is not None
    drafts = batch.drafts
    found = []
    begin = 0
    for length in batch.lengths:
        # slots count through the whole batch
        for row, slot in enumerate(drafts.slots.tolist()):
            if begin <= slot < begin + length:
                num_drafted = int(drafts.drafted[row])
                root_end = slot + 2
                drafted = drafts.tokens[row, :num_drafted]
                replay = Replay(
                    row=row,
                    tokens=torch.cat([batch.tokens[begin:root_end], drafted]),
                    slot=slot - begin,
                    num_accepted=int(drafts.accepted[row]),
                    num_drafted=num_drafted,
                    following=batch.tokens[root_end : begin + length].tolist(),
                )
                found.append(replay)
        begin += length
    return found


@pytest.mark.quick("early_exit_adapter")
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "medusa", "dflash", "early_exit_adapter"])
def test_sequences_and_states_are_the_targets_own(name: str, target: Target) -> None:
    """Each answer is what the target writes alone; states, of rejected tokens too, are the untouched model's."""
    features, batch = write_with_drafts(new_head(name, target), target)
    assert len(features.written) == PROMPTS
    for index, example in enumerate(features.written.values()):
        start = int(example.loss_mask.nonzero()[0])
        prompt = features.tokens_and_mask(index)[0][:start].tolist()
        alone = generate(
            target,
            NoDrafter(),
            prompt,
            sampling=Sampling(temperature=1.0, seed=7, request=index),
            max_new_tokens=len(example.tokens) - start,
        )
        assert example.tokens.tolist() == prompt + alone.tokens
    replays = replay_drafts(batch)
    assert batch.drafts is not None
    for replay in replays:
        expected = hidden_of(
            target,
            replay.tokens,
            batch.taps,
        )[replay.slot + 2 :]
        states = batch.drafts.states[replay.row, : replay.num_drafted].double()
        assert torch.allclose(states, expected, rtol=1e-4, atol=1e-4)
        # accepted tokens are the sequence's, and the next one is not the draft's
        drafted = batch.drafts.tokens[replay.row].tolist()
        end = replay.num_accepted
        assert replay.following[:end] == drafted[:end]
        if end < replay.num_drafted:
            assert replay.following[end] != drafted[end]
    # else the check says little
    assert len({replay.num_accepted for replay in replays}) > 1
    assert any(replay.num_accepted < replay.num_drafted for replay in replays)


def losses_naively(
    head: Any,
    batch: Batch,
    target: Target,
) -> dict[str, Tensor]:
    """Return the losses of each draft as a sequence of its own, with divergences by formula."""
    accepted = torch.zeros((), dtype=torch.float64)
    rejected = torch.zeros((), dtype=torch.float64)
    for replay in replay_drafts(batch):
        features = hidden_of(target, replay.tokens, batch.taps)
        # a sequence is cut after what is supervised; its first slot is the draft's
        mask = torch.arange(len(replay.tokens)) >= replay.slot + 2
        alone = collate(
            [
                Example(
                    replay.tokens,
                    mask,
                    features,
                )
            ],
            batch.taps,
        )
        levels = head.draft_levels(
            alone,
            target.head,
            replay.num_drafted,
        )
        for level, (states, logits_of) in enumerate(levels):
            student = logits_of(states[:1])[0].log_softmax(-1)
            hidden = features[replay.slot + 1 + level, batch.taps.index(-1)]
            logits = target.head.logits(hidden[None])[0]
            if head.drafts is not None:
                logits = logits[head.drafts]
            teacher = logits.log_softmax(-1)
            if level < replay.num_accepted:
                # cross entropy
                accepted = accepted - (teacher.exp() * student).sum()
            else:
                # reverse KL, less for each token after the first rejected one
                weight = POLICY.decay ** (level - replay.num_accepted)
                rejected = rejected + weight * (student.exp() * (student - teacher)).sum()
    return {"accepted": accepted / batch.slots, "rejected": rejected / batch.slots}


@pytest.mark.quick("blockwise")
@pytest.mark.parametrize("name", REPLAYED)
def test_the_loss_is_that_of_each_draft_alone(
    name: str,
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Value and gradients hold for every method; the planted fault reads the sequence in place of the draft."""
    head = new_head(name, target)
    _, batch = write_with_drafts(head, target)
    # noise and dropout belong to the slots of a sequence, and a draft alone is another sequence
    head.eval()
    expected = losses_naively(head, batch, target)
    found = losses_of_drafts(head, batch, target.head, POLICY)
    assert expected["rejected"] > 0.01
    for term, value in expected.items():
        assert found[term].item() == pytest.approx(
            value.item(),
            rel=2e-4,
            abs=1e-6,
        )
    learned = [weight for weight in head.parameters() if weight.requires_grad]
    gradients = []
    for losses in (expected, found):
        total = losses["accepted"] + losses["rejected"]
        gradients.append(
            torch.autograd.grad(
                total,
                learned,
                materialize_grads=True,
            )
        )
    # gradients near zero are compared by the largest one
    largest = max(float(gradient.abs().max()) for gradient in gradients[0])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(
            one,
            other,
            rtol=1e-3,
            atol=1e-4 * largest,
        )

    def read_sequence(
        self: Batch,
        places: Tensor,
        steps: Any,
    ) -> Tensor:
        return (places + steps).clamp(max=self.slots)

    monkeypatch.setattr(Batch, "places_behind", read_sequence)
    faulty = losses_of_drafts(head, batch, target.head, POLICY)
    assert faulty["rejected"].item() != pytest.approx(expected["rejected"].item(), rel=1e-3)


@pytest.fixture(scope="module")
def command(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twelve steps of four conversations on a store, of which some get new answers, three steps at a time."""
    return [*prepared(tiny_target_dir, tmp_path_factory.mktemp("store")), *ON_POLICY]


@pytest.mark.slow
def test_a_run_that_was_stopped_comes_to_the_same_bits(command: list[str], tmp_path: Path) -> None:
    """After a stop at each of its checkpoints, in the middle of what was written at once, metrics are equal too.

    A run without these checkpoints, which goes on with what it had written, is the planted fault.
    """
    options = ("train.checkpoint_every=4", "train.keep=9")
    whole = run(command, tmp_path / "whole", *options)
    # without a rejected draft there would be nothing to learn
    assert any(row.get("drafts/rejected", 0) > 0 for row in rows(whole))
    for left in (4, 8):
        out = tmp_path / f"from-{left}"
        shutil.copytree(whole, out)
        for step in (out / "checkpoints").iterdir():
            if int(step.name.removeprefix("step-")) > left:
                shutil.rmtree(step)
        assert equal(run(command, out, *options), whole)
    assert not equal(
        run(
            command,
            tmp_path / "other",
            "train.checkpoint_every=12",
        ),
        whole,
    )
    plain = run(command[: -len(ON_POLICY)], tmp_path / "plain")
    assert apart(weights(plain), weights(whole)) > 1e-4


@pytest.mark.quick("eagle1")
@pytest.mark.parametrize("kind", ["eagle1", "medusa"])
def test_gradients_of_a_split_step_are_those_of_the_step(
    kind: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One batch or three: the same head up to rounding, whether a loss divides by slots or by what it counts.

    A planted fault divides drafts by the slots of their own batch.
    """
    command = [*command, f"drafter={{kind: {kind}}}", "train.max_steps=4"]
    # both losses are tried: the one divides by slots, the other by what it counts
    one = run(command, tmp_path / "one")
    three = run(command, tmp_path / "three", "train.accumulation=3")
    assert apart(weights(one), weights(three)) < 1e-5
    totals = [[row["total"] for row in rows(out) if "total" in row] for out in (one, three)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)
    if kind == "eagle1":
        return

    def divide_alone(head: Any, batch: Batch, *others: Any) -> dict[str, Tensor]:
        drafts = batch.drafts and replace(batch.drafts, divisor=None)
        return losses_of_drafts(
            head,
            replace(batch, drafts=drafts),
            *others,
        )

    monkeypatch.setattr("eagle.training.drafts_loss.losses_of_drafts", divide_alone)
    fault = run(command, tmp_path / "fault", "train.accumulation=3")
    assert apart(weights(one), weights(fault)) > 1e-4


@pytest.mark.parametrize(
    ("overrides", "keyword"),
    [
        ("drafter={kind: draft_model, layers: 1}|features.store=null", "draft_levels"),
        ("train.stem=nowhere|train.schedule=wsd|train.warmup=1|train.max_steps=9", "exclude one"),
        ("train.on_policy.share=0", "greater than 0"),
        ("train.on_policy.refreshed=3", "unknown key train.on_policy.refreshed"),
    ],
)
def test_what_cannot_be_is_refused(
    overrides: str,
    keyword: str,
    command: list[str],
    tmp_path: Path,
) -> None:
    """It is refused before a step is made."""
    with pytest.raises(ValueError, match=keyword):
        run(command, tmp_path / "run", *overrides.split("|"))


def test_sequences_of_the_data_have_no_drafts(target: Target) -> None:
    """The share that is asked for is written; in validation none is."""
    head = new_head("eagle1", target)
    features, batch = write_with_drafts(
        head,
        target,
        POLICY.model_copy(update={"share": 0.5}),
    )
    # half of three prompts, by chance
    assert 0 < len(features.written) < PROMPTS
    assert batch.drafts is not None
    head.eval()
    assert [example.drafts for example in features.read(range(PROMPTS))] == [None] * PROMPTS


@pytest.mark.slow
@pytest.mark.not_long("ddp")
@pytest.mark.parametrize("config", ["ddp", "zero2"])
def test_processes_share_what_is_written(
    config: str,
    command: list[str],
    tmp_path: Path,
) -> None:
    """Two processes, each of which writes its own part of a step, learn what one does; sharded heads are refused."""
    command = [*command, "train.max_steps=6"]
    one = weights(run(command, tmp_path / "one"))
    others = weights(
        run(
            command,
            tmp_path / "others",
            "train.on_policy.temperature=0.9",
        )
    )
    script = str(ROOT / "recipes/train_eagle.py")
    launch = launched(config, script, *command, f"train.out={tmp_path / 'two'}")
    done = finished(launch)
    assert done.returncode == 0, done.stdout
    # sums in another order are rounded otherwise, which steps of 1e-3 enlarge
    assert apart(one, weights(tmp_path / "two")) < 1e-4
    assert apart(one, others) > 1e-3
    if config == "ddp":
        out = f"train.out={tmp_path / 'split'}"
        split = finished(
            launched(
                "ddp",
                script,
                *command,
                out,
                "train.shard_head=true",
            )
        )
        assert split.returncode
        assert "needs all weights of head and target on every process" in split.stdout
