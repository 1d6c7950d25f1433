"""Whole examinations: prompts from files, trained heads of runs/tiny as engines read them, and servers' counters."""

from __future__ import annotations

import json
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
from eagle.core.budget import Budget
from eagle.decoding.decode import generate
from eagle.doctor import ServerCounts, examine, read_server
from eagle.doctor.agreement import measure
from eagle.doctor.examine import try_templates
from eagle.doctor.texts import NEW_TOKENS, answer_prompts, read_prompts, render_prompts
from eagle.doctor.wiring import Wiring
from eagle.formats.checkpoint import load_head
from eagle.formats.export import export
from tests import foreign_heads

TINY = Path(__file__).parents[2] / "runs/tiny"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A trained head as vLLM reads it."""
    if not (TINY / "eagle3-full/head").is_dir():
        pytest.skip(
            "no trained head in runs/tiny/eagle3-full/head: train recipes/tiny/eagle3.yaml with draft_vocab=null"
        )
    head, target = (
        load_head(TINY / "eagle3-full/head"),
        Target.load(TINY / "target", dtype="float32"),
    )
    export(
        head.bind(target.head), target.config, "vllm", tmp_path / "head", TINY / "eagle3-full/head"
    )
    return tmp_path / "head"


@pytest.mark.slow
def test_a_whole_head_is_not_called_broken(exported: Path, server: Callable[[str], str]) -> None:
    """Its export is as good as itself; a server that accepts less is told apart from it."""
    said = examine(exported, str(TINY / "target"), server=server(VLLM))
    assert not said.broken and not said.faults
    assert "vLLM accepts 2.100 tokens a step over 200 drafts" in str(said)


@pytest.mark.slow
def test_a_server_is_compared_with_its_own_prompts_and_depth(
    exported: Path, tmp_path: Path, server: Callable[[str], str]
) -> None:
    """Counters of plain greedy decoding, cycle by cycle, are told as right, whatever training's validation says."""
    target, file, depth = (
        Target.load(TINY / "target", dtype="float32"),
        tmp_path / "prompts.jsonl",
        4,
    )
    head, asked = load_head(TINY / "eagle3-full/head").bind(target.head), read_prompts(None)[:4]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    chain = Budget(nodes=depth, depth=depth, top_k=1)
    cycles = [
        cycle
        for prompt in render_prompts(target, asked)
        for cycle in generate(target, head, prompt, budget=chain, max_new_tokens=NEW_TOKENS).cycles
        if cycle.nodes == depth
    ]
    page = f"vllm:spec_decode_num_drafts_total {len(cycles)}\n"
    page += (
        f"vllm:spec_decode_num_accepted_tokens_total {sum(cycle.accepted for cycle in cycles)}\n"
    )
    for place in range(depth):
        count = sum(cycle.accepted > place for cycle in cycles)
        page += (
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'
        )
    made = json.loads((exported / "provenance.json").read_text())
    (exported / "provenance.json").write_text(
        json.dumps({**made, "acceptance": {"per_position": [0.99] * 3}})
    )
    said = str(examine(exported, str(TINY / "target"), str(file), server(page)))
    assert f"greedy on {file}, keeps" in said
    assert "with chains of 4: drafts add 100% of what they should" in said


@pytest.mark.slow
def test_two_faults_are_both_named(exported: Path) -> None:
    """Layer ids two too high and the blocks of fc out of order: nothing in the files is wrong."""
    config, tensors = (
        json.loads((exported / "config.json").read_text()),
        load_file(exported / "model.safetensors"),
    )
    ids = "eagle_aux_hidden_state_layer_ids"
    for section in (config, config["eagle_config"]):
        section[ids] = [layer + 2 for layer in section[ids]]
    low, middle, high = tensors["fc.weight"].chunk(3, dim=1)
    tensors["fc.weight"] = torch.cat([high, low, middle], dim=1)
    (exported / "config.json").write_text(json.dumps(config))
    save_file(tensors, exported / "model.safetensors")
    said = examine(exported, str(TINY / "target"))
    assert said.broken and {effect.probe.kind for effect in said.faults} == {
        "fc order",
        "layer ids",
    }
    assert "2 too high" in said.verdict and "order [2, 0, 1]" in said.verdict


@pytest.mark.slow
def test_arguments_of_the_template_are_tried(exported: Path) -> None:
    """Only those that change the prompts, each with what becomes of the acceptance."""
    target, head = (
        Target.load(TINY / "target", dtype="float32"),
        load_head(TINY / "eagle3-full/head").eval(),
    )
    asked = read_prompts(None)[:2]
    target.tokenizer.chat_template += (
        "{% if enable_thinking is defined and not enable_thinking %}No.{% endif %}"
    )
    texts = answer_prompts(target, render_prompts(target, asked), 16, (0.0,))
    found = measure(Wiring(head, target.head, levels=2), texts, target.head)
    (told,) = try_templates(head, target, asked, {}, found)
    assert (
        'rendered with {"enable_thinking": false} instead of {}' in told
        and f"τ {found.greedy_tau:.3f} becomes" in told
    )


# -- prompts and servers ----------------------------------------------------------------------------------------------


def test_prompts_of_many_layouts(tmp_path: Path) -> None:
    """Questions, chats and plain texts; a line that asks nothing is refused by its number."""
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


VLLM = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
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


@pytest.fixture
def server() -> Iterator[Callable[[str], str]]:
    """A server that shows a page of metrics."""
    running: list[HTTPServer] = []

    def serve(page: str) -> str:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(page.encode() if self.path == "/metrics" else b"")

            def log_message(self, *_: Any) -> None:
                pass

        running.append(HTTPServer(("127.0.0.1", 0), Page))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_port}"

    yield serve
    for one in running:
        one.shutdown()
        one.server_close()


def test_vllm_is_read_and_compared(server: Callable[[str], str]) -> None:
    """All engines of the page together, as far as both chains go; too little is said plainly."""
    found = read_server(server(VLLM))
    assert (found.engine, found.tau, found.per_position, found.drafts) == (
        "vLLM",
        2.1,
        (0.6, 0.3, 0.2),
        200,
    )
    assert "export keeps 2.100 with chains of 3: drafts add 100%" in found.compare(
        [0.6, 0.3, 0.2, 0.1], "export"
    )
    less = found.compare([0.9, 0.6, 0.5], "export")
    assert "3.000 with chains of 3: drafts add 55%" in less and "layer ids" in less


def test_as_many_places_are_compared_as_both_have() -> None:
    """Four places of a server beside three of an export: its fourth place is no gain over an export without one."""
    server = ServerCounts("vLLM", 1 + 0.6 + 0.4 + 0.3 + 0.2, (0.6, 0.4, 0.3, 0.2), 1000)
    said = server.compare([0.7, 0.5, 0.4], "export")
    assert (
        "export keeps 2.600 with chains of 3, where the server keeps 2.300: drafts add 81%" in said
    )
    assert "layer ids" in said
    gauge = ServerCounts("SGLang", 2.3).compare([0.6, 0.4, 0.3], "export")
    assert "does not tell how many tokens it drafts: start it with 3): drafts add 100%" in gauge


def test_sglang_is_read(server: Callable[[str], str]) -> None:
    """Its gauge; a page without drafts, and a server that is not there, say what to do."""
    found = read_server(server(SGLANG) + "/metrics")
    assert (found.engine, found.tau, found.per_position) == ("SGLang", 1.25, ())
    with pytest.raises(ValueError, match="counts no drafts"):
        read_server(server("up 1\n"))
    with pytest.raises(ValueError, match="no metrics at"):
        read_server("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="a user or a key") as raised:
        read_server("http://ann:secret@127.0.0.1:9")
    assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match="expected an address"):
        read_server("localhost:8000")


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_tells_by_its_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1 for a broken head, 2 for a wrong call: a script need not read the verdict."""
    head, target = tmp_path / "head", foreign_heads.write_target(tmp_path / "target")
    foreign_heads.write(head, foreign_heads.without(foreign_heads.specforge(), "fc.weight"))
    with pytest.raises(SystemExit) as broken:
        main(["doctor", str(head), "--target", str(target)])
    assert (
        broken.value.code == 1
        and "verdict: broken: fc.weight is missing" in capsys.readouterr().out
    )
    with pytest.raises(SystemExit) as misused:
        main(
            [
                "doctor",
                str(head),
                "--target",
                str(target),
                "--prompts",
                str(tmp_path / "none.jsonl"),
            ]
        )
    assert misused.value.code == 2 and "error: no prompts at" in capsys.readouterr().err
