"""Heads, features and answers go to a hub and come back: the real client talks to a hub on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
import torch

from data_prep.dataset_card import dataset_card
from eagle import Target
from eagle.command import share
from eagle.command.share import pack, run_pull, run_push
from eagle.data.store import FeatureStore
from eagle.disk import lock_path, sha256
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.formats.custom_generate import write_custom_generate
from eagle.formats.hub import check_name, push_to_hub
from eagle.formats.parcel import Parcel
from eagle.recipe import Recipe
from tests.formats.stub_hub import TOKEN, StubHub, serving
from tests.trained import ROOT, prepared

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # the client's own


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """A hub that knows this user; large files go as they did before xet, which has a server of its own."""
    stub = StubHub()
    with serving(stub) as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(
            huggingface_hub.utils._http.time, "sleep", lambda seconds: None
        )  # before it asks again
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stub


@pytest.fixture
def folder(
    tiny_target: Target, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A head as a run leaves it, by a recipe that names a home and a server."""
    torch.manual_seed(1)
    head = DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1"}, "test"), tiny_target.config
    )
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    (tmp_path / "alice/models").mkdir(parents=True)
    regenerate = {
        "source": "/home/bob/chats.jsonl",
        "out": "x",
        "endpoint": "http://10.1.2.3:8000/v1",
    }
    data = recipe.data.model_copy(update={"train": str(tmp_path / "alice/chats.jsonl")})
    target = recipe.target.model_copy(update={"path": str(tmp_path / "alice/models")})
    values = {**recipe.model_dump(mode="json"), "regenerate": regenerate}
    private = Recipe.parse(
        {**values, "data": data.model_dump(), "target": target.model_dump()}, "test"
    )
    run = tmp_path / "runs/mine"
    save_head(
        run / "head",
        head,
        private.dump(),
        {"torch": torch.__version__, "validation": {"tree_tau": 2.5}},
    )
    shutil.copytree(run / "head", run / "last")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "total": 9.0}) + "\n")
    (run / "results.jsonl").write_text(json.dumps({"run": {"recipe": "/home/bob/r.yaml"}}) + "\n")
    (run / "report.html").write_text("<p>by /home/bob/r.yaml, not of /home/bobby, at 10.1.2.3:8000")
    return run / "head"


def push(*words: Any) -> None:
    """The command."""
    run_push([str(word) for word in words])


def pull(*words: Any) -> None:
    """The other one."""
    run_pull([str(word) for word in words])


def contents(out: Path) -> dict[str, bytes]:
    """The bytes of every file in a folder, by its name."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_nothing_is_sent_before_it_is_meant(
    folder: Path, hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file is named with its size and why, what is hidden, and what stays; the hub is not asked."""
    before = contents(folder.parent)
    push(folder, "someone/head", "--private")
    said = capsys.readouterr().out
    assert not hub.asked and contents(folder.parent) == before
    assert (
        "to someone/head, a private model repository" in said
        and "Nothing was sent: --yes sends it." in said
    )
    for name in (
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "README.md",
        "report.html",
        "metrics.jsonl",
    ):
        assert f"\n  {name} " in said
    assert (
        "hidden in recipe.yaml: " in said
        and "/home/bob is now ~" in said
        and "10.1.2.3:8000 is now SERVER" in said
    )
    assert (
        not {"report.html", "metrics.jsonl"}
        & pack(folder.parent / "last", "someone/head", []).files.keys()
    )
    assert f"stays here: {folder.parent / 'last'} is not part of what is shared" in said


@pytest.mark.slow
def test_what_was_pushed_is_pulled(
    folder: Path, hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes, but for what names this machine; given again nothing moves, and a changed file moves alone."""
    push(folder, "someone/head", "--private", "--yes")
    assert f"{hub.address}/someone/head" in capsys.readouterr().out
    repository = hub.repositories["model", "someone/head"]
    assert repository.private and len(repository.commits) == 1
    pull("someone/head", tmp_path / "out")
    fetched, here = contents(tmp_path / "out"), contents(folder)
    assert fetched == repository.files
    for name in ("model.safetensors", "config.json", "provenance.json"):
        assert fetched[name] == here[name]
    assert fetched["report.html"] == b"<p>by ~/r.yaml, not of /home/bobby, at SERVER"
    everything = b"".join(fetched.values())
    assert not [word for word in (b"alice", b"/home/bob/", b"10.1.2.3") if word in everything]
    said = capsys.readouterr().out
    assert (
        "9 files of someone/head" in said
        and f"eagle generate {tmp_path / 'out'}" in said
        and "--target ~/mod" in said
    )
    hub.asked.clear()
    push(folder, "someone/head", "--yes")
    pull("someone/head", tmp_path / "out")
    assert "holds all 9 files of someone/head already" in capsys.readouterr().out
    assert len(repository.commits) == 1 and not [
        line for line in hub.asked if line.startswith("PUT") or "/resolve/" in line
    ]
    (folder / "README.md").write_text("mine")
    push(folder, "someone/head", "--yes")
    assert not [line for line in hub.asked if line.startswith("PUT")]
    assert repository.commits[1:] == [["README.md"]] and repository.files["README.md"] == b"mine"


def test_a_byte_that_changed_on_the_hub_is_noticed(
    folder: Path, hub: StubHub, tmp_path: Path
) -> None:
    """Of large files and of small ones, by the checksums that it lists; once mended, the rest is not asked again."""
    push(folder, "someone/head", "--yes")
    hub.spoiled = {"model.safetensors", "recipe.yaml"}
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors, recipe\.yaml of someone/head did not come as the hub",
    ):
        pull("someone/head", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    hub.spoiled = set()
    hub.asked.clear()
    pull("someone/head", tmp_path / "out")
    assert contents(tmp_path / "out") == hub.repositories["model", "someone/head"].files
    assert {
        line.rpartition("/")[2]
        for line in hub.asked
        if line.startswith("GET") and "/resolve/" in line
    } == {*("model.safetensors", "recipe.yaml")}
    assert not list(tmp_path.glob("out.part*"))


def test_a_folder_that_differs_is_not_touched(folder: Path, hub: StubHub, tmp_path: Path) -> None:
    """Neither a file of the same name nor one of another; a part of the same is completed."""
    push(folder, "someone/head", "--yes")
    out = tmp_path / "out"
    out.mkdir()
    for name, message in (
        ("config.json", r"holds config\.json, which is not"),
        ("mine", "holds mine, which is not"),
    ):
        (out / name).write_text("mine")
        with pytest.raises(
            ValueError, match=f"{message} in someone/head with these bytes: name another folder"
        ):
            pull("someone/head", out)
        assert contents(out) == {name: b"mine"}
        (out / name).unlink()
    shutil.copy(folder / "model.safetensors", out)
    pull("someone/head", out)
    assert contents(out) == hub.repositories["model", "someone/head"].files


@pytest.mark.slow
def test_a_push_that_was_interrupted_goes_on(folder: Path, hub: StubHub) -> None:
    """What has arrived is not sent again, and nothing shows before all has."""
    hub.faults = [("POST .*/commit/", 500)]
    with pytest.raises(
        ValueError,
        match=r"someone/head: the hub answers 500: it has a fault of its own: give the same",
    ):
        push(folder, "someone/head", "--yes")
    assert len(hub.objects) == 1 and not hub.repositories["model", "someone/head"].files
    hub.asked.clear()
    push(folder, "someone/head", "--yes")
    assert not [line for line in hub.asked if line.startswith("PUT")]
    assert "model.safetensors" in hub.repositories["model", "someone/head"].files


def test_two_pulls_into_one_folder_do_not_share_what_has_arrived(
    folder: Path, hub: StubHub, tmp_path: Path
) -> None:
    """The second ends with a sentence before it asks the hub; a pull that fails leaves nothing behind."""
    push(folder, "someone/head", "--yes")
    hub.asked.clear()
    with (
        lock_path(tmp_path / "out"),
        pytest.raises(ValueError, match=r"another run is writing .*/out"),
    ):
        pull("someone/head", tmp_path / "out")
    assert not hub.asked and not list(tmp_path.glob("out*"))
    with pytest.raises(ValueError, match="someone/nothing"):
        pull("someone/nothing", tmp_path / "new/folder/out")
    assert not (tmp_path / "new").exists()


FAULTS = {
    (
        "POST /api/repos/create",
        503,
    ): "the hub answers 503: it has a fault of its own: give the same command again",
    ("POST .*/preupload/", 403): "the hub answers 403: your token may not do that there",
    (
        "POST .*/commit/",
        409,
    ): "the hub answers 409: somebody else changed it meanwhile: give the same command again",
    ("POST .*/commit/", 413): "the hub answers 413: ",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_hub_answers_is_told(fault: tuple[str, int], folder: Path, hub: StubHub) -> None:
    """In a sentence, with what to do."""
    hub.faults = [fault]
    with pytest.raises(ValueError, match=f"someone/head: {FAULTS[fault]}"):
        push(folder, "someone/head", "--yes")
    assert not hub.faults


def test_who_may_not_is_told(
    folder: Path, hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's repository, a wrong token, none at all; what is not there; no network; no name."""
    with pytest.raises(
        ValueError, match="other/head: the hub answers 403: your token may not do that there"
    ):
        push(folder, "other/head", "--yes")
    with pytest.raises(
        ValueError, match="someone/nothing: the hub answers 404: there is no such repository"
    ):
        pull("someone/nothing", tmp_path / "out")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(
        ValueError,
        match=r"the hub answers 401: it does not know you.*`hf auth login`, or set HF_TOKEN",
    ):
        push(folder, "someone/head", "--yes")
    monkeypatch.setattr(share, "has_token", lambda: False)
    hub.asked.clear()
    with pytest.raises(
        ValueError, match="there is no token of the hub here: `hf auth login`, or set HF_TOKEN"
    ):
        push(folder, "someone/head", "--yes")
    assert not hub.asked
    for name in (
        "head",
        "a/b/c",
        "some one/head",
        "someone/-head",
        "someone/he--ad",
        "../head",
        "someone/head/",
    ):
        with pytest.raises(ValueError, match="is no name on a hub: expected OWNER/NAME"):
            check_name(name)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        ValueError,
        match=r"someone/head: the hub is not reached .* Check the network, and give the same",
    ):
        pull("someone/head", tmp_path / "out")


def test_secrets_and_torn_heads_stay_here(folder: Path, hub: StubHub) -> None:
    """A token in any text is refused by the file's name, before anything is asked; so is a head that does not load."""
    planted = folder.parent / "metrics.jsonl"
    planted.write_text(json.dumps({"step": 0, "note": "hf_" + "a" * 34}))
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl holds what looks like a token of the hub: take it out"
    ):
        push(folder, "someone/head", "--yes")
    planted.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        push_to_hub(folder, "someone/head")
    with pytest.raises(ValueError, match=r"nothing to push at .*; did you mean .*mine/head\?"):
        push(folder.parent, "someone/head")
    assert not hub.asked


def test_exports_go_beside_a_head_or_alone(folder: Path, hub: StubHub, tmp_path: Path) -> None:
    """Below their folder's name; what is no export is refused."""
    export = tmp_path / "vllm"
    export.mkdir()
    (export / "config.json").write_text('{"architectures": ["X"]}')
    (export / "README.md").write_text(f"lies in {tmp_path / 'alice/vllm'}")
    parcel = pack(folder, "someone/head", [export])
    assert {"vllm/config.json", "vllm/README.md"} <= parcel.files.keys()
    assert parcel.files["vllm/README.md"].read() == b"lies in ~/vllm"
    push(export, "someone/head-vllm", "--yes")
    assert hub.repositories["model", "someone/head-vllm"].files.keys() == {
        "config.json",
        "README.md",
    }
    with pytest.raises(
        ValueError, match=r"holds no export: expected a folder that `eagle export` wrote"
    ):
        pack(folder, "someone/head", [folder])
    with pytest.raises(ValueError, match=r"exports go beside a head, and .* is none"):
        pack(export, "someone/head", [export])


@pytest.mark.slow
def test_small_files_go_through_the_clients_newer_way_too(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that streams large files to xet's own server, which this hub has not."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    (tmp_path / "counts").mkdir()
    (tmp_path / "counts/config.json").write_text('{"kind": "unigram"}')
    push(tmp_path / "counts", "someone/counts", "--yes")
    push(tmp_path / "counts", "someone/counts", "--yes")
    repository = hub.repositories["model", "someone/counts"]
    assert repository.files == contents(tmp_path / "counts") and repository.commits == [
        ["config.json"]
    ]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    pull("someone/counts", tmp_path / "out")
    assert contents(tmp_path / "out") == repository.files


def test_a_feature_store_goes_with_its_card(
    tiny_target_dir: Path, hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a data set; its shards come first, so that an interruption leaves no index of what is not there."""
    prepared(tiny_target_dir, tmp_path)
    store = tmp_path / "store"
    push(store, "someone/features", "--yes")
    repository = hub.repositories["dataset", "someone/features"]
    assert all(name.endswith(".safetensors") for name in repository.commits[0])
    assert "index.json" in repository.commits[1] and "README.md" in repository.commits[1]
    capsys.readouterr()
    pull("someone/features", tmp_path / "out")
    assert f"features.store={tmp_path / 'out'}" in capsys.readouterr().out
    fetched = contents(tmp_path / "out")
    assert fetched.pop("README.md").decode() == dataset_card(store, "someone/features")
    assert fetched == contents(store)
    name = next(name for name in repository.files if name.endswith(".safetensors.sha256"))
    repository.files[name] = b"0" * 64 + repository.files[name][64:]
    with pytest.raises(
        ValueError,
        match=r"shard-00000\.safetensors of someone/features is not what its \.sha256 says",
    ):
        pull("datasets/someone/features", tmp_path / "again")


def test_a_store_with_a_flipped_byte_is_not_pushed(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Whoever fetches it would be refused; the shard is named here, before anything is sent."""
    prepared(tiny_target_dir, tmp_path)
    shard = tmp_path / "store/shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-7] ^= 4
    shard.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"shard-00000.* not those that were written.* --repair"):
        pack(tmp_path / "store", "someone/features", [])


def test_a_home_in_the_config_of_a_store_is_hidden(tiny_target_dir: Path, tmp_path: Path) -> None:
    """And the index has the checksum of what goes, so that the store is whole where it comes to."""
    prepared(tiny_target_dir, tmp_path)
    config = tmp_path / "store/config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "_name_or_path": "/home/bob/model"})
    )
    index = json.loads((tmp_path / "store/index.json").read_text())
    index["made"]["borrowed"]["config.json"] = sha256(config)
    (tmp_path / "store/index.json").write_text(json.dumps(index))
    parcel, out = pack(tmp_path / "store", "someone/features", []), tmp_path / "out"
    out.mkdir()
    for name, item in parcel.files.items():
        (out / name).write_bytes(item.read())
    assert json.loads((out / "config.json").read_text())["_name_or_path"] == "~/model"
    assert FeatureStore(out).borrowed_folder() == out
    (out / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(ValueError, match=r"config\.json is missing or damaged"):
        FeatureStore(out).borrowed_folder()


def test_answers_go_as_they_are(
    hub: StubHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts that name a home are data; what made them is not."""
    chats = tmp_path / "data/chats.jsonl"
    chats.parent.mkdir()
    text = json.dumps(
        {"conversations": [{"from": "gpt", "value": "ls /home/bob/x"}], "finish_reasons": ["stop"]}
    )
    chats.write_text(text + "\n")
    made = {
        "target": {"path": "/home/bob/model"},
        "sampling": {"seed": 0},
        "data": {"source": "abc"},
    }
    Path(f"{chats}.settings").write_text(json.dumps(made))
    push(chats, "someone/answers", "--yes")
    pull("someone/answers", tmp_path / "out")
    fetched = contents(tmp_path / "out")
    assert fetched["chats.jsonl"] == chats.read_bytes() and fetched.keys() == {
        *("chats.jsonl", "chats.jsonl.settings", "README.md")
    }
    assert b"bob" not in fetched["README.md"] + fetched["chats.jsonl.settings"]
    assert f"data.train={tmp_path / 'out/chats.jsonl'}" in capsys.readouterr().out


def test_what_transformers_runs_goes_with_a_head(folder: Path, tmp_path: Path) -> None:
    """As `write_custom_generate` writes it beside one."""
    write_custom_generate(tmp_path)
    written = (tmp_path / "custom_generate/generate.py").read_bytes()
    assert pack(folder, "someone/head", []).files["custom_generate/generate.py"].read() == written
    write_custom_generate(folder)
    (folder / "custom_generate/generate.py").write_text("my own")
    parcel = pack(folder, "someone/head", [])
    assert parcel.files["custom_generate/generate.py"].read() == b"my own"
    assert not [place for place in parcel.stays if "custom_generate" in place]


def test_servers_are_hidden_and_pages_are_not() -> None:
    """With a port or a password, by number, without a domain, or wherever a recipe names its endpoint."""
    values = {
        "endpoint": ["https://gpu.firm.example/v1", "http://localhost:8000/v1"],
        "more": [
            "http://me:word@firm.example/x",
            "http://node7/v1",
            "https://huggingface.co/a",
            "/Users/eve/x",
        ],
    }
    parcel = Parcel("model", Path("/home/ann"))
    parcel.add("config.json", json.dumps(values).encode(), "test")
    parcel.add(
        "README.md",
        b"by /home/ann/x and /home/annie at gpu.firm.example:80, gpu.firm.example",
        "test",
    )
    text = json.loads(parcel.clean().files["config.json"].read())
    assert text["endpoint"] == ["https://SERVER/v1", "http://localhost:8000/v1"]
    assert text["more"] == [
        "http://SERVER/x",
        "http://SERVER/v1",
        "https://huggingface.co/a",
        "~/x",
    ]
    assert parcel.files["README.md"].read() == b"by ~/x and /home/annie at SERVER:80, SERVER"


@pytest.mark.slow
def test_the_verbs_go_through_a_users_environment(
    folder: Path, hub: StubHub, tmp_path: Path
) -> None:
    """By HF_ENDPOINT and HF_TOKEN, in processes of their own."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    for words in (
        ["push", str(folder), "someone/head", "--yes"],
        ["pull", "someone/head", str(tmp_path / "out")],
    ):
        command = [sys.executable, "-m", "eagle", *words]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "out") == hub.repositories["model", "someone/head"].files
    command = [sys.executable, "-m", "eagle", "pull", "someone/none", str(tmp_path / "other")]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(
        "error: someone/none: the hub answers 404"
    )
