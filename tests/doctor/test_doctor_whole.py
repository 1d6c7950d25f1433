"""Whole examinations: prompts from files, trained heads of runs/tiny as engines read them, and servers' counters."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Target
from eagle.__main__ import main
from eagle.command.ship import run_doctor
from eagle.core.budget import Budget
from eagle.decoding.decode import generate
from eagle.doctor import ServerCounts, examine, read_server
from eagle.doctor.agreement import measure
from eagle.doctor.examine import try_templates
from eagle.doctor.target_answers import NEW_TOKENS, answer_prompts, read_prompts, render_prompts
from eagle.doctor.wiring import Wiring
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import export
from eagle.recipe import Recipe
from tests import foreign_heads

# an untrained head of the suite's tiny target
from tests.drafters.recurrent.test_eagle1 import head as head

TINY = Path(__file__).parents[2] / "runs/tiny"
HEAD = TINY / "eagle3-full/head"
TARGET = str(TINY / "target")
VLLM = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 450.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 110.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 60.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 40.0
"""
SGLANG = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{model_name="m",tp_rank="0"} 1.25
sglang:spec_accept_length{model_name="m",tp_rank="1"} NaN
sglang:num_running_reqs{model_name="m"} 0.0
"""
# a page of metrics -> the address of a server that has it
Serve = Callable[[str], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return how to serve a page of metrics."""
    servers: list[HTTPServer] = []

    def run(page: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_found = self.path == "/metrics"
                self.send_response(200 if is_found else 404)
                self.end_headers()
                self.wfile.write(page.encode() if is_found else b"")

            def log_message(self, *args: Any) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield run
    for server in servers:
        server.shutdown()
        server.server_close()


# -- trained heads ----------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> Target:
    """Return the target of the trained head, where it was trained."""
    if not HEAD.is_dir():
        pytest.skip(f"no head in {HEAD}: train recipes/tiny/eagle3.yaml with draft_vocab=null")
    return Target.load(TARGET, dtype="float32")


@pytest.fixture
def exported(target: Target, tmp_path: Path) -> Path:
    """Return a trained head as vLLM reads it."""
    folder = tmp_path / "head"
    export(
        load_head(HEAD).bind(target.head),
        target.config,
        "vllm",
        out=folder,
        head=HEAD,
    )
    return folder


@pytest.mark.slow
def test_a_whole_head_is_not_called_broken(exported: Path, serve: Serve) -> None:
    """Its export is as good as itself, also where a server accepts less."""
    # two engines behind one page, 220 accepted tokens of 200 drafts
    diagnosis = examine(exported, TARGET, server=serve(VLLM))
    assert not diagnosis.broken
    assert not diagnosis.faults
    assert "vLLM accepts 2.100 tokens a step over 200 drafts" in str(diagnosis)


@pytest.mark.slow
def test_a_server_is_compared_on_its_own_prompts_and_depth(
    exported: Path,
    target: Target,
    tmp_path: Path,
    serve: Serve,
) -> None:
    """Counters made of greedy decoding's own cycles are right, whatever training's validation says."""
    depth = 4
    questions = read_prompts(None)[:4]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    head = load_head(HEAD).bind(target.head)
    chain = Budget(nodes=depth, depth=depth, top_k=1)
    accepted = []
    for prompt in render_prompts(target, questions):
        trace = generate(
            target,
            head,
            prompt,
            budget=chain,
            max_new_tokens=NEW_TOKENS,
        )
        # a cycle cut short by the answer's end is no cycle of four drafts
        accepted += [cycle.accepted for cycle in trace.cycles if cycle.nodes == depth]
    prefix = "vllm:spec_decode_num"
    lines = [
        f"{prefix}_drafts_total {len(accepted)}",
        f"{prefix}_accepted_tokens_total {sum(accepted)}",
    ]
    for level in range(depth):
        count = sum(length > level for length in accepted)
        lines.append(f'{prefix}_accepted_tokens_per_pos_total{{position="{level}"}} {count}')
    provenance = json.loads((exported / "provenance.json").read_text())
    provenance["acceptance"] = {"per_position": [0.99] * 3}
    (exported / "provenance.json").write_text(json.dumps(provenance))
    report = str(examine(exported, TARGET, str(file), serve("\n".join(lines))))
    assert f"greedy on {file}, keeps" in report
    assert "with chains of 4: drafts add 100% of what they should" in report


@pytest.mark.slow
def test_two_faults_are_both_named(exported: Path) -> None:
    """Layer ids two too high and the blocks of fc out of order, of which the files show nothing."""
    config = json.loads((exported / "config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    for section in (config, config["eagle_config"]):
        # written twice in an export for vLLM
        section[ids] = [layer + 2 for layer in section[ids]]
    (exported / "config.json").write_text(json.dumps(config))
    tensors = load_file(exported / "model.safetensors")
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat(
        [high, low, middle],
        dim=1,
    )
    save_file(tensors, exported / "model.safetensors")
    diagnosis = examine(exported, TARGET)
    assert diagnosis.broken
    assert {effect.probe.kind for effect in diagnosis.faults} == {"fc order", "layer ids"}
    assert "2 too high" in diagnosis.verdict
    assert "order [2, 0, 1]" in diagnosis.verdict


@pytest.mark.slow
def test_arguments_of_the_template_are_tried(target: Target) -> None:
    """Those that change the prompts, each with the acceptance that it leads to."""
    head = load_head(HEAD).eval()
    questions = read_prompts(None)[:2]
    target.tokenizer.chat_template += (
        "{% if enable_thinking is defined and not enable_thinking %}No.{% endif %}"
    )
    texts = answer_prompts(target, render_prompts(target, questions), 16, (0.0,))
    figures = measure(
        Wiring(head, target.head, levels=2),
        texts,
        target.head,
    )
    (note,) = try_templates(head, target, questions, {}, figures)
    assert 'rendered with {"enable_thinking": false} instead of {}' in note
    assert f"τ {figures.greedy_tau:.3f} becomes" in note


@pytest.mark.slow
def test_few_tokens_make_an_examination_short_and_it_says_how_long_it_takes(
    recipe: Recipe,
    head: Eagle1,
    tiny_target_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The forecast comes after the first round of answers, before all that is long."""
    folder = tmp_path / "head"
    save_head(folder, head, recipe.dump(), {})
    diagnosis = examine(folder, str(tiny_target_dir / "target"), tokens=2 * NEW_TOKENS)
    assert "own 2 prompts" in str(diagnosis)
    said = capsys.readouterr().err
    forecast = re.search(r"about [0-9:]+ in all: [0-9:]+ until the target has answered", said)
    assert forecast is not None
    assert forecast.start() < said.index("the target's answers: ") < said.index("single changes on")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens is 0, expected at least 1"),
        (["--tokens", "9", "--base", "-"], "--tokens is for an examination without --base"),
    ],
)
def test_numbers_of_tokens_that_make_no_sense_are_refused(options: list[str], message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(ValueError, match=message):
        run_doctor(["no/head", "--target", "no/target", *options])


# -- prompts and servers ----------------------------------------------------------------------------------------------


def test_prompts_of_many_layouts(tmp_path: Path) -> None:
    """Questions, chats and plain texts; a line without a question is refused by its number."""
    lines: list[Any] = [
        {"prompt": "a"},
        {"turns": ["b", "later"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]},
        {"conversations": [{"from": "human", "value": "d"}]},
        "e",
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_prompts(str(file)) == ["a", "b", "c", "d", "e"]
    file.write_text('{"prompt": "a"}\n{"id": 3}\n')
    with pytest.raises(ValueError, match="jsonl:2 asks nothing"):
        read_prompts(str(file))
    with pytest.raises(ValueError, match="no prompts at"):
        read_prompts(str(tmp_path / "none.jsonl"))


def test_vllm_is_read_and_compared(serve: Serve) -> None:
    """All engines of the page together; a loss is stated with what may cause it."""
    counts = read_server(serve(VLLM))
    assert counts == ServerCounts("vLLM", 2.1, (0.6, 0.3, 0.2), 200)
    same = counts.compare([0.6, 0.3, 0.2, 0.1], "export")
    assert "export keeps 2.100 with chains of 3: drafts add 100%" in same
    less = counts.compare([0.9, 0.6, 0.5], "export")
    assert "3.000 with chains of 3: drafts add 55%" in less
    assert "layer ids" in less


@pytest.mark.parametrize(
    ("counts", "rates", "sentence"),
    [
        # the server's fourth position is no gain over an export without one
        (
            ServerCounts("vLLM", 2.5, (0.6, 0.4, 0.3, 0.2), 1000),
            [0.7, 0.5, 0.4],
            "export keeps 2.600 with chains of 3, where the server keeps 2.300: drafts add 81%",
        ),
        (
            ServerCounts("SGLang", 2.3),
            [0.6, 0.4, 0.3],
            "does not tell how many tokens it drafts: start it with 3): drafts add 100%",
        ),
    ],
)
def test_as_many_positions_are_compared_as_both_have(
    counts: ServerCounts,
    rates: list[float],
    sentence: str,
) -> None:
    """A gauge has none: it is taken to draft as many as the export was measured with."""
    assert sentence in counts.compare(rates, "export")


def test_sglang_is_read(serve: Serve) -> None:
    """Its gauge; the address may be the page's own."""
    counts = read_server(serve(SGLANG) + "/metrics")
    assert (counts.engine, counts.tau, counts.per_position) == (
        "SGLang",
        1.25,
        (),
    )
    with pytest.raises(ValueError, match="counts no drafts"):
        read_server(serve("up 1\n"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:9", "no metrics at"),
        ("http://ann:secret@127.0.0.1:9", "a user or a key"),
        ("localhost:8000", "expected an address"),
    ],
)
def test_a_wrong_address_is_refused(address: str, message: str) -> None:
    """Without repeating a password."""
    with pytest.raises(ValueError, match=message) as raised:
        read_server(address)
    assert "secret" not in str(raised.value)


def test_the_exit_status_tells_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for a broken head, 2 for a wrong call: a script need not read the verdict."""
    head = tmp_path / "head"
    target = foreign_heads.write_target(tmp_path / "target")
    # a fault that the files show, so that no examination is needed
    foreign_heads.write(head, foreign_heads.without(foreign_heads.specforge(), "fc.weight"))
    command = ["doctor", str(head), "--target", str(target)]
    with pytest.raises(SystemExit) as broken:
        main([*command, "--json"])
    assert broken.value.code == 1
    printed = capsys.readouterr()
    assert "verdict: broken: fc.weight is missing" in printed.err
    assert json.loads(printed.out)["broken"] is True
    with pytest.raises(SystemExit) as misused:
        main([*command, "--prompts", str(tmp_path / "none.jsonl")])
    assert misused.value.code == 2
    assert "error: no prompts at" in capsys.readouterr().err
