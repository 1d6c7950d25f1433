"""Trained heads draft in real engines as they do here, and faulty ones do not; `make test-engines` runs this."""

from __future__ import annotations

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
from eagle.drafters import DRAFTERS, settings_of
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
    Job,
    Row,
    Rule,
    decode_as_engine,
    same_counts,
    sum_rows,
)
from tests.engines.engine_vllm import check_version

TINY = Path(__file__).parents[2] / "runs/tiny"
WHERE = {
    "vllm": "EAGLE_VLLM",
    "openvino": "EAGLE_OPENVINO",
    "llamacpp": "EAGLE_LLAMACPP",
}
HEADS = {
    "vllm": ["eagle1", "hass", "eagle3-full", "eagle3", "eagle3.1", "eagle3-normed", "medusa"],
    "openvino": ["eagle3-full", "eagle3"],
    "llamacpp": ["eagle3-full", "eagle3"],
}
# their guesses may depend on the length of the draft, so they draft two lengths
BLOCKS = {"vllm": ["peagle", "dflash", "dspark"], "llamacpp": ["dflash", "dflash2", "dspark"]}
# an MTP layer is read only in the files of a family's own models
MTP = {"vllm": list(FAMILIES), "llamacpp": ["glm"]}
CASES = [
    *((engine, head, 3, None) for engine in HEADS for head in HEADS[engine]),
    *(
        (engine, head, depth, None)
        for depth in (3, 7)
        for engine in BLOCKS
        for head in BLOCKS[engine]
    ),
    # blocks as long as in training; in Triton's interpreter these walks take minutes
    ("vllm", "dflash2", 7, None),
    ("vllm", "lilicorr", 7, None),
    *(
        (engine, "mtp", depth, family)
        for depth in (3, 7)
        for engine in MTP
        for family in MTP[engine]
    ),
]
CHAIN = Budget(3, 3, 1)
TREE = Budget(10, 4, 4)
COUNT = 48

# acceptance lengths that show that a head has learned; of other heads 2
LEAST = {
    "medusa": 1.4,
    "peagle": 1.4,
    "dflash": 1.4,
    "dflash2": 1.4,
    "lilicorr": 1.4,
    "dspark": 1.4,
}

Prove = Callable[..., Comparison]
Spoil = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the target stays as each engine reads it."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def target() -> Target:
    """The trained tiny target."""
    if not (TINY / "target").is_dir():
        pytest.skip("no trained target in runs/tiny/target: `make tiny` trains one")
    return Target.load(TINY / "target", dtype="float32")


@pytest.fixture
def prove(work: Path, target: Target) -> Prove:
    """Compare both sides on 48 held-out conversations, 16 new tokens each, in fp32."""

    def compare(engine: str, head: str, budget: Budget = CHAIN, **options: Any) -> Comparison:
        folder = os.environ.get(WHERE[engine])
        if folder is None or not holds(engine, Path(folder)):
            pytest.skip(
                f"no {engine} in {folder}: `make test-engines` makes its environment and sets {WHERE[engine]}"
            )

        path = TINY / head / "head"
        if not path.is_dir():
            pytest.skip(f"no trained head in {path}: docs/serving.md has the command")
        prompts = read_prompts(target, TINY / "data/heldout.jsonl", COUNT, room=64)
        job = Job(TINY / "target", prompts, budget)
        return compare_engine(
            job,
            path,
            engine,
            environment=Path(folder),
            target=target,
            work=work,
            **options,
        )

    return compare


@pytest.mark.engine
@pytest.mark.parametrize(("engine", "head", "depth", "family"), CASES)
def test_an_engine_accepts_what_this_decoder_accepts(
    engine: str,
    head: str,
    depth: int,
    family: str | None,
    prove: Prove,
) -> None:
    """Text, drafts and acceptances at every position are equal in every answer, and many drafts are accepted."""
    comparison = prove(engine, head, Budget(depth, depth, 1), family=family)
    assert comparison.theirs
    assert comparison.same == (COUNT, COUNT)
    assert sum_rows(comparison.theirs)["tau"] > LEAST.get(head, 2)


@pytest.mark.engine
@pytest.mark.parametrize("head", ["eagle3-full", "eagle3"])
def test_openvino_grows_the_trees_that_this_decoder_grows(head: str, prove: Prove) -> None:
    """Trees of ten nodes are equal in every answer, and longer drafts are accepted than of a chain."""
    comparison = prove("openvino", head, TREE)
    assert comparison.same == (COUNT, COUNT)
    assert sum_rows(comparison.theirs)["tau"] > sum_rows(prove("openvino", head).ours)["tau"]


# -- planted faults, each a change of an export's config and tensors --------------------------------------------------


def swap_inputs(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Let the fusing layer read its inputs in the other order: embedding and state, or the taps."""
    [name] = [name for name in tensors if name.endswith(("fc.weight", "eh_proj.weight"))]
    weight = tensors[name]
    inputs = weight.shape[1] // weight.shape[0]
    tensors[name] = torch.cat(weight.chunk(inputs, dim=1)[::-1], dim=1).contiguous()


def shift_layers(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Name every tapped layer one too high."""
    for section in (config, config.get("eagle_config", {}), config.get("dflash_config", {})):
        for name in ("eagle_aux_hidden_state_layer_ids", "target_layer_ids"):
            if name in section:
                section[name] = [layer + 1 for layer in section[name]]


def swap_biases(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Exchange the two tables of a Markov head."""
    first, second = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def clear_mask_state(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Leave zeros where states are not known yet."""
    tensors["mask_hidden"] = torch.zeros_like(tensors["mask_hidden"])


def swap_levels(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Let the second level guess what the third was trained for."""
    # names of tensors hold the number of their level
    before = dict(tensors)
    for name in before:
        if "s.1." in name:
            other = name.replace("s.1.", "s.2.")
            tensors[name], tensors[other] = before[other], before[name]


def rewrite(head: Path, fault: Spoil) -> None:
    """Plant a fault in an exported head."""
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    fault(config, tensors)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / "model.safetensors")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("engine", "head", "fault", "family"),
    [
        ("vllm", "eagle1", swap_inputs, None),
        ("vllm", "medusa", swap_levels, None),
        ("vllm", "eagle3", shift_layers, None),
        ("vllm", "dflash", shift_layers, None),
        ("vllm", "dspark", swap_biases, None),
        ("vllm", "peagle", clear_mask_state, None),
        ("vllm", "mtp", swap_inputs, "deepseek"),
        ("openvino", "eagle3", shift_layers, None),
        ("llamacpp", "dflash", shift_layers, None),
        ("llamacpp", "dspark", swap_biases, None),
        ("llamacpp", "eagle3", swap_inputs, None),
        ("llamacpp", "mtp", swap_inputs, "glm"),
    ],
)
def test_a_faulty_export_is_seen_by_acceptance_alone(
    engine: str,
    head: str,
    fault: Spoil,
    family: str | None,
    prove: Prove,
) -> None:
    """The engine loads the head without an error and answers rightly; only the counts differ."""
    comparison = prove(
        engine,
        head,
        spoil=lambda path: rewrite(path, fault),
        family=family,
    )
    for theirs, ours in zip(comparison.theirs, comparison.ours, strict=True):
        assert theirs.get("tokens", ours["tokens"]) == ours["tokens"]

    assert comparison.same[1] < COUNT
    assert not comparison.equal
    assert sum_rows(comparison.theirs)["accepted"] != sum_rows(comparison.ours)["accepted"]


# -- what engines count, on this side ---------------------------------------------------------------------------------

TEXT = "The function returns the sum. The function returns the sum. The function returns"


def decode_one(target: Target, prompt: list[int], new_tokens: int, rule: Rule | None = None) -> Row:
    """Decode one prompt with n-grams in chains of three, and count as an engine does."""
    job = Job(Path(), [prompt], CHAIN, new_tokens)
    [row] = decode_as_engine(job, "ngram", target, rule or Rule())
    return row


@pytest.mark.slow
def test_whole_drafts_are_counted(tiny_target: Target) -> None:
    """The counts are those of a longer answer, over its cycles that begin before the limit."""
    prompt = tiny_target.tokenizer.encode(TEXT)
    ngram = load_drafter("ngram", tiny_target)
    # limits at the start, and around the end of a draft
    total = 0
    for limit in (1, 2, 28, 30, 31):
        row = decode_one(tiny_target, prompt, limit)
        trace = generate(
            tiny_target, ngram, prompt, max_new_tokens=limit + 20, stop=[], budget=CHAIN
        )
        begins = accumulate((cycle.committed for cycle in trace.cycles), initial=1)
        accepted = []
        for cycle, begin in zip(trace.cycles, begins, strict=False):
            if begin < limit:
                accepted.append(cycle.accepted)

        assert row["tokens"] == trace.tokens[:limit]
        assert row["drafts"] == len(accepted)
        assert row["accepted"] == [sum(count > i for count in accepted) for i in range(3)]

        total += sum(accepted)

    assert total > 0


@pytest.mark.slow
def test_a_draft_after_the_prompt_is_one_after_a_first_token(tiny_target: Target) -> None:
    """To draft from the prompt's last token is to draft from the answer's first, if the prompt ends with it."""
    prompt = tiny_target.tokenizer.encode(TEXT)
    plain = decode_one(tiny_target, prompt, 36)
    longer = [*prompt, plain["tokens"][0]]
    row = decode_one(tiny_target, longer, 35, Rule(from_prompt=True))

    assert same_counts(row, plain)
    assert row["own"] == plain["own"]
    assert row["tokens"] == plain["tokens"][1:]
    assert plain["accepted"][2] > 0

    stop = plain["own"][1]
    short = decode_one(
        tiny_target,
        longer,
        35,
        Rule(from_prompt=True, stops=[stop]),
    )
    assert short["own"] == [*plain["own"][: plain["own"].index(stop)], stop]


@pytest.mark.parametrize(
    ("new", "accepted", "count"),
    [
        ([5, 6, 7, 8], 3, 3),
        ([5, 2, 7, 8], 3, 1),
        ([2, 6, 7, 8], 3, 0),
        # a stop counts as the last token of a draft
        ([5, 6, 2, 8], 3, 3),
        # and as the target's own token
        ([5, 2], 1, 1),
    ],
)
def test_what_a_stop_cuts_off_is_not_counted(new: list[int], accepted: int, count: int) -> None:
    """Of three drafts and the target's token, 2 ends the answer."""
    assert Rule(stops=[2]).count(new, accepted, 3) == count
    assert Rule().count(new, accepted, 3) == accepted


def new_mtp(target: Target) -> Any:
    """Return a new MTP layer of a target."""
    method: Any = DRAFTERS["mtp"]
    settings = settings_of({"kind": "mtp"}, "test")
    return method.for_target(settings, target.config).bind(target.head)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_a_family_holds_target_and_head(
    family: str,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """Every tensor of the target and of the layer is there, or twice, as two equal experts."""
    source = tiny_target_dir / "target"
    head = new_mtp(tiny_target)
    write_model(head, tiny_target.config, source, family, out=tmp_path / "model")
    tensors = load_file(tmp_path / "model/model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        copies = [name]
        if name not in tensors:
            copies = [name.replace("mlp.", f"mlp.experts.{i}.") for i in (0, 1)]
        for each in copies:
            assert torch.equal(tensors[each], tensor), each

    endings = ("eh_proj.weight", "input_proj.weight")
    [projection] = [tensor for name, tensor in tensors.items() if name.endswith(endings)]
    token, state = head.eh_proj.weight.chunk(2, dim=1)
    # MiMo reads the state first
    order = [state, token] if family == "mimo" else [token, state]

    assert torch.equal(projection, torch.cat(order, dim=1))
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("version", ["0.32.1", "0.33.0rc1", "1.0"])
def test_a_version_without_a_method_is_refused(version: str) -> None:
    """vLLM 0.32 is the last with Medusa, and later ones fail with an error that does not say so."""
    check_version("eagle3", version)
    if version.startswith("0.32"):
        check_version("medusa", version)
        return

    with pytest.raises(
        SystemExit, match=f"vLLM {version} serves no medusa heads, 0.32 is the last"
    ):
        check_version("medusa", version)


@pytest.mark.parametrize(("limit", "drafts", "accepted"), [(6, 2, [1, 1, 1]), (7, 3, [2, 1, 1])])
def test_steps_are_counted_up_to_the_limit(limit: int, drafts: int, accepted: list[int]) -> None:
    """OpenVINO reports the sizes of its steps: the prompt's one, then one more each than was accepted."""
    counted = count_drafts([1, 4, 1, 2, 4], {"new_tokens": limit, "depth": 3})
    assert counted == {"drafts": drafts, "accepted": accepted}


def test_rows_are_merged_by_what_was_measured(tmp_path: Path) -> None:
    """A second run of the same head replaces the first; the table says what differs."""
    row = {"tokens": [2], "own": [3], "drafts": 10, "accepted": [5, 3, 1]}
    job = Job(Path(), [[1]], CHAIN, 16)
    file = tmp_path / "engines.json"
    comparison = Comparison("1.0", [row], [{**row, "accepted": [5, 3, 0]}])
    # a folder called head has the name of its parent
    for head in ("one/head", "two/head", "one/head"):
        merge_rows([row_of(comparison, job, tmp_path / head, "vllm")], file)
    kept = json.loads(file.read_text())

    assert [one["head"] for one in kept] == ["one", "two"]
    assert not comparison.equal
    assert comparison.difference == pytest.approx(1.9 / 1.8 - 1)
    assert "+5.56%; counts of 0, text of 1 of 1" in table(kept)

    equal = Comparison("1.0", [row], [row])
    assert "| yes |" in table([row_of(equal, job, tmp_path / "head", "vllm")])
