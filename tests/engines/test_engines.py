"""Trained heads guess in real engines as they do here, and spoilt ones do not; `make test-engines` runs this."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Budget, Target, generate, load_drafter
from eagle.core.drafter import Committed
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.decoder_block import rotary_tables
from tests.engines.compare_engines import (
    Comparison,
    compare_engine,
    merge_rows,
    read_prompts,
    row_of,
    table,
)
from tests.engines.engine_builds import holds
from tests.engines.engine_families import FAMILIES, write_model
from tests.engines.engine_openvino import count_drafts
from tests.engines.engine_reference import (
    READINGS,
    Job,
    Rule,
    decode_as_engine,
    same_counts,
    sum_rows,
)
from tests.engines.engine_vllm import check_version

TINY = Path(__file__).parents[2] / "runs/tiny"
WHERE = {"vllm": "EAGLE_VLLM", "openvino": "EAGLE_OPENVINO", "llamacpp": "EAGLE_LLAMACPP"}
MATRIX = [
    *(
        ("vllm", head)
        for head in (
            "eagle1",
            "hass",
            "eagle3-full",
            "eagle3",
            "eagle3.1",
            "eagle3-normed",
            "medusa",
        )
    ),
    *((engine, head) for engine in ("openvino", "llamacpp") for head in ("eagle3-full", "eagle3")),
]
BLOCKS = [
    ("vllm", "peagle"),
    *((engine, head) for engine in ("vllm", "llamacpp") for head in ("dflash", "dspark")),
]
MTP = [*(("vllm", family) for family in FAMILIES), ("llamacpp", "glm")]
CHAIN, TREE = Budget(3, 3, 1), Budget(10, 4, 4)
LEAST = {
    "medusa": 1.4,
    "peagle": 1.4,
    "dflash": 1.4,
    "dspark": 1.4,
}  # acceptance length of no idle head; of others 2


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the target stays as each engine reads it."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def target() -> Target:
    """The trained tiny target."""
    if not (TINY / "target").is_dir():
        pytest.skip("no trained target in runs/tiny/target: `make tiny` trains one")
    return Target.load(TINY / "target", dtype="float32")


Prove = Callable[..., Comparison]


@pytest.fixture
def prove(work: Path, target: Target) -> Prove:
    """Both sides on 48 held-out conversations, 16 new tokens each, in fp32."""

    def compare(
        engine: str,
        head: str,
        budget: Budget = CHAIN,
        spoil: Callable[[Path], None] | None = None,
        family: str | None = None,
    ) -> Comparison:
        folder = os.environ.get(WHERE[engine])
        if folder is None or not holds(engine, Path(folder)):
            pytest.skip(
                f"no {engine} in {folder}: `make test-engines` makes its environment and sets {WHERE[engine]}"
            )
        if not (TINY / head / "head").is_dir():
            pytest.skip(
                f"no trained head in runs/tiny/{head}/head: docs/serving.md has the command"
            )
        prompts = read_prompts(target, TINY / "data/heldout.jsonl", 48, room=64)
        job = Job(TINY / "target", prompts, budget)
        return compare_engine(
            job, TINY / head / "head", engine, Path(folder), target, work, spoil, family
        )

    return compare


@pytest.mark.engine
@pytest.mark.parametrize(("engine", "head"), MATRIX)
def test_an_engine_accepts_what_this_decoder_accepts(engine: str, head: str, prove: Prove) -> None:
    """Text, drafts and acceptances at every place are equal in every single answer; the head is no idle one."""
    comparison = prove(engine, head)
    assert comparison.theirs and comparison.same == (48, 48)
    assert sum_rows(comparison.theirs) == sum_rows(comparison.ours)
    assert sum_rows(comparison.theirs)["tau"] > LEAST.get(head, 2)


@pytest.mark.engine
@pytest.mark.parametrize("depth", [3, 7])
@pytest.mark.parametrize(("engine", "head"), BLOCKS)
def test_an_engine_guesses_the_blocks_that_this_decoder_guesses(
    engine: str, head: str, depth: int, prove: Prove
) -> None:
    """Heads that guess a draft by one forward, whose guesses may hang on how long it is."""
    comparison = prove(engine, head, Budget(depth, depth, 1))
    assert comparison.theirs and comparison.same == (48, 48)
    assert sum_rows(comparison.theirs)["tau"] > LEAST[head]


@pytest.mark.engine
@pytest.mark.parametrize("depth", [3, 7])
@pytest.mark.parametrize(("engine", "family"), MTP)
def test_an_engine_goes_on_from_an_mtp_layer_as_its_rule_says(
    engine: str, family: str, depth: int, prove: Prove
) -> None:
    """In the files of each family's own models, since an MTP layer is read there alone."""
    comparison = prove(engine, "mtp", Budget(depth, depth, 1), family=family)
    assert comparison.theirs and comparison.same == (48, 48)
    assert sum_rows(comparison.theirs)["tau"] > 2


@pytest.mark.engine
@pytest.mark.parametrize(("engine", "family"), [("vllm", "deepseek"), ("llamacpp", "glm")])
def test_a_spoilt_mtp_layer_is_seen(engine: str, family: str, prove: Prove) -> None:
    """Its projection reads state and token in the other order."""
    comparison = prove(engine, "mtp", spoil=swapped_projection, family=family)
    assert comparison.same[1] < 48
    assert sum_rows(comparison.theirs)["accepted"] != sum_rows(comparison.ours)["accepted"]


@pytest.mark.engine
@pytest.mark.parametrize("head", ["eagle3-full", "eagle3"])
def test_openvino_grows_the_trees_that_this_decoder_grows(head: str, prove: Prove) -> None:
    """Ten nodes, four levels, four children: equal in every answer, and more is accepted than of a chain."""
    comparison = prove("openvino", head, TREE)
    assert comparison.same == (48, 48)
    assert sum_rows(comparison.theirs)["tau"] > sum_rows(prove("openvino", head).ours)["tau"]


def rewrite_fc(head: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put another `fc` into an exported head."""
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"] = change(tensors["fc.weight"]).contiguous()
    save_file(tensors, head / "model.safetensors")


def swapped_halves(head: Path) -> None:
    """Let `fc` read [feature; embedding] where it was trained on [embedding; feature]."""
    rewrite_fc(head, lambda weight: torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))


def swapped_taps(head: Path) -> None:
    """Let `fc` read the last layer where it was trained on the first."""
    rewrite_fc(head, lambda weight: torch.cat(weight.chunk(3, dim=1)[::-1], dim=1))


def shifted_layers(head: Path) -> None:
    """Name every layer one too high."""
    config = json.loads((head / "config.json").read_text())
    for place in (config, config["eagle_config"]):
        place["eagle_aux_hidden_state_layer_ids"] = [
            layer + 1 for layer in place["eagle_aux_hidden_state_layer_ids"]
        ]
    (head / "config.json").write_text(json.dumps(config))


def rewrite_config(head: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an exported head's config."""
    config = json.loads((head / "config.json").read_text())
    change(config)
    (head / "config.json").write_text(json.dumps(config))


def shifted_outputs(head: Path) -> None:
    """Name every layer that a block's features come from one too high."""

    def shift(config: dict[str, Any]) -> None:
        for place in (config, config.get("dflash_config", {})):
            if "target_layer_ids" in place:
                place["target_layer_ids"] = [layer + 1 for layer in place["target_layer_ids"]]

    rewrite_config(head, shift)


def other_mask(head: Path) -> None:
    """Let slots without a token read another one."""
    rewrite_config(head, lambda config: config["dflash_config"].update(mask_token_id=5))


def swapped_biases(head: Path) -> None:
    """Let a Markov head's two tables change places."""
    tensors = load_file(head / "model.safetensors")
    first, second = (f"markov_head.markov_w{number}.weight" for number in (1, 2))
    save_file(
        {**tensors, first: tensors[second], second: tensors[first]}, head / "model.safetensors"
    )


def no_mask_state(head: Path) -> None:
    """Leave zeros where states are not known yet."""
    tensors = load_file(head / "model.safetensors")
    save_file(
        {**tensors, "mask_hidden": torch.zeros_like(tensors["mask_hidden"])},
        head / "model.safetensors",
    )


def swapped_projection(head: Path) -> None:
    """Let an MTP layer's projection read its two inputs in the other order."""
    tensors = load_file(head / "model.safetensors")
    (name,) = [name for name in tensors if name.endswith("eh_proj.weight")]
    swapped = torch.cat(tensors[name].chunk(2, dim=1)[::-1], dim=1).contiguous()
    save_file({**tensors, name: swapped}, head / "model.safetensors")


def forgotten_biases(head: Path) -> None:
    """Leave out the key without which biases are dropped."""
    config = json.loads((head / "config.json").read_text())
    del config["medusa_fc_bias"]
    (head / "config.json").write_text(json.dumps(config))


def swapped_levels(head: Path) -> None:
    """Let the second level guess what the third was trained for."""
    tensors = load_file(head / "model.safetensors")
    swapped = {
        name.replace("s.1.", "s.x.").replace("s.2.", "s.1.").replace("s.x.", "s.2."): name
        for name in tensors
    }
    save_file({name: tensors[other] for name, other in swapped.items()}, head / "model.safetensors")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("engine", "head", "fault"),
    [
        ("vllm", "eagle1", swapped_halves),
        ("vllm", "medusa", forgotten_biases),
        ("vllm", "medusa", swapped_levels),
        ("vllm", "eagle3", shifted_layers),
        ("openvino", "eagle3", swapped_taps),
        ("openvino", "eagle3", shifted_layers),
        ("vllm", "dflash", shifted_outputs),
        ("vllm", "dflash", other_mask),
        ("vllm", "dspark", swapped_biases),
        ("vllm", "peagle", no_mask_state),
        ("llamacpp", "dflash", shifted_outputs),
        ("llamacpp", "dspark", swapped_biases),
        ("llamacpp", "eagle3", swapped_taps),
        ("llamacpp", "eagle3", shifted_layers),
    ],
)
def test_a_spoilt_export_is_seen_by_acceptance_alone(
    engine: str, head: str, fault: Callable[[Path], None], prove: Prove
) -> None:
    """The check can fail: the engine loads the spoilt head without a word, and only the counts are others."""
    comparison = prove(engine, head, spoil=fault)
    answers = zip(comparison.theirs, comparison.ours, strict=True)
    assert all(row["tokens"] == ours["tokens"] for row, ours in answers if "tokens" in row)
    assert comparison.same[1] < 48 and not comparison.equal
    assert sum_rows(comparison.theirs)["accepted"] != sum_rows(comparison.ours)["accepted"]


TEXT = "The function returns the sum. The function returns the sum. The function returns"


def counting(target: Target, prompts: list[list[int]], new_tokens: int) -> Job:
    """A job by chains of three."""
    return Job(Path(), prompts, CHAIN, new_tokens)


@pytest.mark.slow
def test_whole_drafts_are_counted(tiny_target: Target) -> None:
    """The counts are those of an answer that goes on: of its cycles that begin before the limit."""
    prompt, total = tiny_target.tokenizer.encode(TEXT), 0
    for limit in (1, 2, 28, 30, 31):
        (row,) = decode_as_engine(
            counting(tiny_target, [prompt], limit), "ngram", tiny_target, Rule()
        )
        ngram = load_drafter("ngram", tiny_target)
        trace = generate(
            tiny_target, ngram, prompt, max_new_tokens=limit + 20, stop=[], budget=CHAIN
        )
        begins = list(accumulate((cycle.committed for cycle in trace.cycles), initial=1))
        longs = [
            cycle.accepted
            for cycle, begin in zip(trace.cycles, begins, strict=False)
            if begin < limit
        ]
        assert row["tokens"] == trace.tokens[:limit]
        assert row["drafts"] == len(longs)
        assert row["accepted"] == [sum(count > place for count in longs) for place in range(3)]
        total += sum(longs)
    assert total > 0


@pytest.mark.slow
def test_a_draft_behind_the_prompt_is_one_behind_a_first_token(tiny_target: Target) -> None:
    """To draft from a prompt's last token is to draft from the answer's first, where the prompt holds it already."""
    prompt = tiny_target.tokenizer.encode(TEXT)
    (plain,) = decode_as_engine(counting(tiny_target, [prompt], 36), "ngram", tiny_target, Rule())
    longer = [*prompt, plain["tokens"][0]]
    (row,) = decode_as_engine(
        counting(tiny_target, [longer], 35), "ngram", tiny_target, Rule(from_prompt=True)
    )
    assert same_counts(row, plain) and row["own"] == plain["own"]
    assert row["tokens"] == plain["tokens"][1:]
    assert plain["accepted"][2] > 0
    other = [*prompt, prompt[0]]  # which the target would not have said
    (row,) = decode_as_engine(
        counting(tiny_target, [other], 35), "ngram", tiny_target, Rule(from_prompt=True)
    )
    assert (
        row["tokens"]
        == generate(
            tiny_target, load_drafter("none", tiny_target), other, max_new_tokens=35, stop=[]
        ).tokens
    )
    stop = plain["own"][1]
    (short,) = decode_as_engine(
        counting(tiny_target, [longer], 35), "ngram", tiny_target, Rule(True, stops=[stop])
    )
    assert short["own"] == [*plain["own"][: plain["own"].index(stop)], stop]


def test_what_a_stop_cuts_off_is_not_counted() -> None:
    """Of [5, 2, 7 | 8], three drafts and the target's token: 2 ends the answer, and counts only as a draft's last."""
    rule = Rule(stops=[2])
    assert [
        rule.count(new, 3, 3) for new in ([5, 6, 7, 8], [5, 2, 7, 8], [2, 6, 7, 8], [5, 6, 2, 8])
    ] == [3, 1, 0, 3]
    assert rule.count([5, 2], 1, 3) == 1  # the target's own token
    assert Rule().count([5, 2, 7, 8], 3, 3) == 3


@torch.no_grad()
def draft_naively(
    head: Any, target: Target, prompt: list[int], root: int, reads: tuple[str, ...]
) -> list[int]:
    """A chain of three by whole forwards over the text, as an engine's source has them."""
    states: dict[str, torch.Tensor] = {}
    norm = target.model.base_model.norm
    handle = norm.register_forward_hook(
        lambda _, given, made: states.update(raw=given[0], normed=made)
    )
    target.model.base_model(torch.tensor([prompt]))
    handle.remove()
    hidden = states["raw" if "before_norm" in reads else "normed"]
    tokens = [*prompt[1:], root]
    if "first_token" in reads:
        tokens, hidden = (
            [*prompt, root],
            torch.cat([torch.zeros_like(hidden[:, :1]), hidden], dim=1),
        )
    drafted: list[int] = []
    for _ in range(3):
        embedded = target.head.embed(torch.tensor([tokens + drafted]))
        if "blank_first" in reads:
            embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
        tables = rotary_tables(head.rotary, hidden, torch.arange(hidden.shape[1])[None])
        state = head.first_block(embedded, hidden, tables, None, None)[:, -1:]
        drafted.append(int(head.logits(state, target.head).argmax()))
        hidden = torch.cat([hidden, state if "raw_states" in reads else head.norm(state)], dim=1)
    return drafted


@pytest.mark.slow
def test_a_reading_is_that_of_whole_forwards(tiny_target_dir: Path) -> None:
    """Each drafts as a loop does that reads it so, and not as a loop that reads the layer as this project does."""
    torch.manual_seed(3)
    target = Target.load(tiny_target_dir / "target", dtype=torch.float32)
    head: Any = DRAFTERS["mtp"].for_target(settings_of({"kind": "mtp"}, "test"), target.config)
    norm = target.model.base_model.norm.weight
    with torch.no_grad():
        norm.add_(torch.rand_like(norm))
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.5 if weight.ndim == 1 else 0.2)
    head.bind(target.head)
    prompts = torch.randint(0, target.vocab_size, (12, 5)).tolist()
    for reads in (
        (),
        ("blank_first",),
        ("blank_first", "before_norm"),
        ("raw_states",),
        ("first_token",),
    ):
        changed: Any = copy.copy(head)
        for name in reads:
            READINGS[name](changed, target)
        drafts = []
        for prompt in prompts:
            state = changed.open()
            state.admit(0)
            features = target.features(torch.tensor([prompt[:-1]]), (-1,))[0]
            tree = state.propose(
                {0: Committed(torch.tensor(prompt[:-1]), features, prompt[-1])}, {0: CHAIN}
            )[0]
            drafts.append(tree.tokens[1:].tolist())
        assert drafts == [
            draft_naively(head, target, prompt[:-1], prompt[-1], reads) for prompt in prompts
        ]
        usual = [draft_naively(head, target, prompt[:-1], prompt[-1], ()) for prompt in prompts]
        assert (drafts == usual) == (not reads), reads


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_a_family_holds_target_and_head(
    family: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Every tensor of the target is there as it was, or as both of two equal experts, and so is the layer's."""
    target = Target.load(tiny_target_dir / "target", dtype=torch.float32)
    head: Any = (
        DRAFTERS["mtp"]
        .for_target(settings_of({"kind": "mtp"}, "test"), target.config)
        .bind(target.head)
    )
    write_model(head, target.config, tiny_target_dir / "target", family, tmp_path / "model")
    tensors, config = (
        load_file(tmp_path / "model/model.safetensors"),
        json.loads((tmp_path / "model/config.json").read_text()),
    )
    for name, tensor in load_file(tiny_target_dir / "target/model.safetensors").items():
        names = (
            [name]
            if name in tensors
            else [name.replace("mlp.", f"mlp.experts.{expert}.") for expert in (0, 1)]
        )
        assert all(torch.equal(tensors[each], tensor) for each in names), name
    (projection,) = [
        tensor
        for name, tensor in tensors.items()
        if name.endswith(("eh_proj.weight", "input_proj.weight"))
    ]
    token, state = head.eh_proj.weight.chunk(2, dim=1)
    assert torch.equal(
        projection, torch.cat([state, token] if family == "mimo" else [token, state], dim=1)
    )
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0", "0.33.0rc1", "1.0"])
def test_a_version_without_a_method_is_refused(version: str) -> None:
    """vLLM 0.32 is the last with Medusa, which a later one would call a ValidationError."""
    check_version("eagle3", version)
    if version.startswith("0.32"):
        check_version("medusa", version)
    else:
        with pytest.raises(
            SystemExit, match=f"vLLM {version} serves no medusa heads, 0.32 is the last"
        ):
            check_version("medusa", version)


def test_steps_are_counted_up_to_the_limit() -> None:
    """OpenVINO tells the sizes of its steps: the prompt's one, then one more each than was accepted."""
    job = {"new_tokens": 6, "depth": 3}
    assert count_drafts([1, 4, 1, 2, 4], job) == {"drafts": 2, "accepted": [1, 1, 1]}
    assert count_drafts([1, 4, 1, 2, 4], {**job, "new_tokens": 7}) == {
        "drafts": 3,
        "accepted": [2, 1, 1],
    }


def test_rows_are_merged_by_what_was_measured(tiny_target: Target, tmp_path: Path) -> None:
    """A second run of the same replaces the first, another head stands beside it; the table tells what differs."""
    rows = [{"tokens": [2], "own": [3], "drafts": 10, "accepted": [5, 3, 1]}]
    job, file = counting(tiny_target, [[1]], 16), tmp_path / "engines.json"
    comparison = Comparison("1.0", rows, [{**rows[0], "accepted": [5, 3, 0]}])
    for head in ("one/head", "two/head", "one/head"):
        merge_rows([row_of(comparison, job, tmp_path / head, "vllm")], file)
    kept = json.loads(file.read_text())
    assert [row["head"] for row in kept] == ["one", "two"]
    assert not comparison.equal and comparison.difference == pytest.approx(1.9 / 1.8 - 1)
    assert "+5.56%; counts of 0, text of 1 of 1" in table(kept)
    assert "| yes |" in table(
        [row_of(Comparison("1.0", rows, rows), job, tmp_path / "head", "vllm")]
    )
