"""Heads, features and answers go to a hub and come back: the real client talks to a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import huggingface_hub.utils._http
import pytest
import torch

from data_prep.dataset_card import dataset_card
from eagle import Target, load_drafter
from eagle.command import share
from eagle.command.share import pack, run_pull, run_push
from eagle.data.store import FeatureStore
from eagle.disk import lock_path, sha256
from eagle.formats.checkpoint import from_pretrained, load_head, save_head
from eagle.formats.custom_generate import write_custom_generate
from eagle.formats.hub import check_name, push_to_hub
from eagle.formats.parcel import UploadPlan
from eagle.recipe import Recipe
from tests.formats.make_heads import assert_equal, make_head, make_target
from tests.formats.stub_hub import TOKEN, Repository, StubHub, serving
from tests.trained import ROOT, prepared

# the client's own warning
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
HEAD = "someone/head"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """A hub that knows this user; large files go as they did before xet, which has a server of its own."""
    stub = StubHub()
    constants = huggingface_hub.constants
    with serving(stub) as address:
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        # the client sleeps before it asks again
        monkeypatch.setattr(huggingface_hub.utils._http.time, "sleep", lambda seconds: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stub


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target."""
    return make_target()


@pytest.fixture
def folder(
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A head as a run leaves it, by a recipe that names a home and a server."""
    home = tmp_path / "alice"
    # a home in a path is private, and so is the address of a server
    monkeypatch.setenv("HOME", str(home))
    (home / "models").mkdir(parents=True)
    answers = {
        "source": "/home/bob/chats.jsonl",
        "out": "x",
        "endpoint": "http://10.1.2.3:8000/v1",
    }
    overrides = [f"target.path={home / 'models'}", f"data.train={home / 'chats.jsonl'}"]
    recipe = Recipe.load(
        ROOT / "recipes/tiny/eagle1.yaml", [*overrides, f"regenerate={json.dumps(answers)}"]
    )
    run = tmp_path / "runs/mine"
    record = {"torch": torch.__version__, "validation": {"tree_tau": 2.5}}
    save_head(
        run / "head",
        make_head({"kind": "eagle1"}, target),
        recipe.dump(),
        record,
    )
    # the last checkpoint, which is not the best one
    shutil.copytree(run / "head", run / "last")
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "total": 9.0}) + "\n")
    (run / "results.jsonl").write_text(json.dumps({"run": {"recipe": "/home/bob/r.yaml"}}) + "\n")
    (run / "report.html").write_text("<p>by /home/bob/r.yaml, not of /home/bobby, at 10.1.2.3:8000")
    return run / "head"


def push(*words: Any) -> None:
    """Run the command."""
    run_push([str(word) for word in words])


def pull(*words: Any) -> None:
    """Run the command."""
    run_pull([str(word) for word in words])


def read_files(out: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder, by its name."""
    paths = [path for path in out.rglob("*") if path.is_file()]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def pushed(hub: StubHub, name: str = HEAD) -> Repository:
    """Return what the hub holds of a head."""
    return hub.repositories["model", name]


def sent_large(hub: StubHub) -> list[str]:
    """Return the requests that sent a large file."""
    return [request for request in hub.asked if request.startswith("PUT")]


def test_nothing_is_sent_before_it_is_meant(
    folder: Path,
    hub: StubHub,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every file is named with its size and why, what is hidden, and what stays; the hub is not asked."""
    before = read_files(folder.parent)
    push(folder, HEAD, "--private")
    printed = capsys.readouterr().out
    assert not hub.asked
    assert read_files(folder.parent) == before

    last = folder.parent / "last"
    for words in (
        "to someone/head, a private model repository",
        "Nothing was sent: --yes sends it.",
        "\n  config.json ",
        "\n  model.safetensors ",
        "\n  recipe.yaml ",
        "\n  README.md ",
        "\n  report.html ",
        "\n  metrics.jsonl ",
        "hidden in recipe.yaml: ",
        "/home/bob is now ~",
        "10.1.2.3:8000 is now SERVER",
        f"stays here: {last} is not part of what is shared",
    ):
        assert words in printed
    # results belong to the head that was measured, not to the last step's
    assert not {"report.html", "metrics.jsonl"} & pack(last, HEAD, []).files.keys()


@pytest.mark.slow
def test_what_was_pushed_is_pulled(
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same bytes, but for what names this machine; given again nothing moves, and a changed file moves alone."""
    out = tmp_path / "out"
    push(folder, HEAD, "--private", "--yes")
    assert f"{hub.address}/{HEAD}" in capsys.readouterr().out

    repository = pushed(hub)
    assert repository.private
    assert len(repository.commits) == 1

    pull(HEAD, out)
    fetched = read_files(out)
    assert fetched == repository.files
    for name in ("model.safetensors", "config.json", "provenance.json"):
        assert fetched[name] == (folder / name).read_bytes()
    assert fetched["report.html"] == b"<p>by ~/r.yaml, not of /home/bobby, at SERVER"

    everything = b"".join(fetched.values())
    for private in (b"alice", b"/home/bob/", b"10.1.2.3"):
        assert private not in everything

    printed = capsys.readouterr().out
    for words in ("9 files of someone/head", f"eagle generate {out}", "--target ~/mod"):
        assert words in printed

    # once more: nothing is sent or fetched
    hub.asked.clear()
    push(folder, HEAD, "--yes")
    pull(HEAD, out)
    assert "holds all 9 files of someone/head already" in capsys.readouterr().out
    assert len(repository.commits) == 1
    assert not sent_large(hub)
    assert not [request for request in hub.asked if "/resolve/" in request]

    (folder / "README.md").write_text("mine")
    push(folder, HEAD, "--yes")
    assert not sent_large(hub)
    assert repository.commits[1:] == [["README.md"]]
    assert repository.files["README.md"] == b"mine"


def test_a_head_is_loaded_by_its_id(
    folder: Path,
    hub: StubHub,
    target: Target,
) -> None:
    """Without the weights of other formats; an id that is not there is refused."""
    push(folder, HEAD, "--yes")
    # weights of another format
    pushed(hub).files["pytorch_model.bin"] = b"pickled"
    expected: Any = load_head(folder)
    for head in (
        from_pretrained(HEAD),
        from_pretrained(HEAD, revision="main"),
        load_drafter(HEAD, target),
    ):
        assert_equal(head.state_dict(), expected.state_dict())  # type: ignore[attr-defined]
    assert not [request for request in hub.asked if "/resolve/" in request and ".bin" in request]

    words = "no head at someone/other: expected a folder, or a hub id"
    with pytest.raises(ValueError, match=words):
        from_pretrained("someone/other")


def test_a_byte_that_changed_on_the_hub_is_noticed(
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
) -> None:
    """Of large files and of small ones, by the checksums that it lists; once mended, the rest is not asked again."""
    out = tmp_path / "out"
    push(folder, HEAD, "--yes")
    hub.spoiled = {"model.safetensors", "recipe.yaml"}
    words = r"model\.safetensors, recipe\.yaml of someone/head did not come as the hub"

    with pytest.raises(ValueError, match=words):
        pull(HEAD, out)
    assert not out.exists()

    # the hub is mended: only what was damaged is fetched again
    hub.spoiled = set()
    hub.asked.clear()
    pull(HEAD, out)
    assert read_files(out) == pushed(hub).files

    fetched = [path for path in hub.asked if path.startswith("GET") and "/resolve/" in path]
    names = {path.rpartition("/")[2] for path in fetched}
    assert names == {"model.safetensors", "recipe.yaml"}
    assert not list(tmp_path.glob("out.part*"))


@pytest.mark.parametrize("name", ["config.json", "mine"])
def test_a_folder_that_differs_is_not_touched(
    name: str,
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
) -> None:
    """Neither a file of the same name nor one of another; a folder with some of the same files is completed."""
    push(folder, HEAD, "--yes")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("mine")
    words = f"holds {name}, which is not in someone/head with these bytes: name another folder"

    with pytest.raises(ValueError, match=words):
        pull(HEAD, out)
    assert read_files(out) == {name: b"mine"}

    (out / name).unlink()
    # as a pull that was interrupted leaves it
    shutil.copy(folder / "model.safetensors", out)
    pull(HEAD, out)
    assert read_files(out) == pushed(hub).files


@pytest.mark.slow
def test_a_push_that_was_interrupted_goes_on(folder: Path, hub: StubHub) -> None:
    """What has arrived is not sent again, and nothing shows before all has."""
    hub.faults = [("POST .*/commit/", 500)]
    words = "someone/head: the hub answers 500: it has a fault of its own: give the same"
    with pytest.raises(ValueError, match=words):
        push(folder, HEAD, "--yes")
    assert len(hub.objects) == 1
    assert not pushed(hub).files

    hub.asked.clear()
    push(folder, HEAD, "--yes")
    assert not sent_large(hub)
    assert "model.safetensors" in pushed(hub).files


def test_two_pulls_into_one_folder_do_not_share_what_has_arrived(
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
) -> None:
    """The second ends with a sentence before it asks the hub; a pull that fails leaves nothing behind."""
    push(folder, HEAD, "--yes")
    hub.asked.clear()
    out = tmp_path / "out"
    with lock_path(out), pytest.raises(ValueError, match=r"another run is writing .*/out"):
        pull(HEAD, out)
    assert not hub.asked
    assert not list(tmp_path.glob("out*"))
    with pytest.raises(ValueError, match="someone/nothing"):
        pull("someone/nothing", tmp_path / "new/folder/out")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_pattern", "status", "words"),
    [
        ("POST /api/repos/create", 503, "it has a fault of its own: give the same command again"),
        ("POST .*/preupload/", 403, "your token may not do that there"),
        ("POST .*/commit/", 409, "somebody else changed it meanwhile: give the same command again"),
        ("POST .*/commit/", 413, ""),
    ],
)
def test_what_a_hub_answers_is_said(
    request_pattern: str,
    status: int,
    words: str,
    folder: Path,
    hub: StubHub,
) -> None:
    """In a sentence, with what to do."""
    hub.faults = [(request_pattern, status)]
    with pytest.raises(ValueError, match=f"someone/head: the hub answers {status}: {words}"):
        push(folder, HEAD, "--yes")
    assert not hub.faults


def test_who_may_not_is_told(
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another's repository, one that is not there, a wrong token, none at all, no network."""
    out = tmp_path / "out"
    words = "other/head: the hub answers 403: your token may not do that there"
    with pytest.raises(ValueError, match=words):
        push(folder, "other/head", "--yes")

    words = "someone/nothing: the hub answers 404: there is no such repository"
    with pytest.raises(ValueError, match=words):
        pull("someone/nothing", out)

    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    words = r"answers 401: it does not know you.*`hf auth login`, or set HF_TOKEN"
    with pytest.raises(ValueError, match=words):
        push(folder, HEAD, "--yes")

    hub.asked.clear()
    # no token at all
    monkeypatch.setattr(share, "has_token", lambda: False)
    words = "there is no token of the hub here: `hf auth login`, or set HF_TOKEN"
    with pytest.raises(ValueError, match=words):
        push(folder, HEAD, "--yes")
    assert not hub.asked

    # a port where nobody listens
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    words = r"someone/head: the hub is not reached .* Check the network, and give the same"
    with pytest.raises(ValueError, match=words):
        pull(HEAD, out)


@pytest.mark.parametrize(
    "name", ["head", "a/b/c", "some one/head", "a/-head", "a/he--ad", "../head", "a/head/"]
)
def test_what_is_no_name_is_refused(name: str) -> None:
    """By the hub's rules, before it is asked."""
    with pytest.raises(ValueError, match="is no name on a hub: expected OWNER/NAME"):
        check_name(name)


def test_secrets_and_damaged_heads_stay_here(folder: Path, hub: StubHub) -> None:
    """A token in any text is refused by the file's name, before anything is asked; so is a head that does not load."""
    planted = folder.parent / "metrics.jsonl"
    # as long as tokens of the hub are
    planted.write_text(json.dumps({"step": 0, "note": "hf_" + "a" * 34}))
    words = r"metrics\.jsonl holds what looks like a token of the hub: take it out"
    with pytest.raises(ValueError, match=words):
        push(folder, HEAD, "--yes")

    planted.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        push_to_hub(folder, HEAD)
    with pytest.raises(ValueError, match=r"nothing to push at .*; did you mean .*mine/head\?"):
        push(folder.parent, HEAD)
    assert not hub.asked


def test_exports_go_beside_a_head_or_alone(
    folder: Path,
    hub: StubHub,
    tmp_path: Path,
) -> None:
    """Below their folder's name; what is no export is refused."""
    exported = tmp_path / "vllm"
    exported.mkdir()
    (exported / "config.json").write_text('{"architectures": ["X"]}')
    (exported / "README.md").write_text(f"lies in {tmp_path / 'alice/vllm'}")
    files = pack(folder, HEAD, [exported]).files

    assert "vllm/config.json" in files
    assert files["vllm/README.md"].read() == b"lies in ~/vllm"

    push(exported, "someone/head-vllm", "--yes")
    assert pushed(hub, "someone/head-vllm").files.keys() == {"config.json", "README.md"}

    words = "holds no export: expected a folder that `eagle export` wrote"
    with pytest.raises(ValueError, match=words):
        pack(folder, HEAD, [folder])
    with pytest.raises(ValueError, match=r"exports go beside a head, and .* is none"):
        pack(exported, HEAD, [exported])


def test_a_feature_store_goes_with_its_card(
    tiny_target_dir: Path,
    hub: StubHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As a data set; its shards come first, so that an interruption leaves no index of what is not there."""
    prepared(tiny_target_dir, tmp_path)
    store = tmp_path / "store"
    out = tmp_path / "out"
    push(store, "someone/features", "--yes")
    repository = hub.repositories["dataset", "someone/features"]
    # one commit for the shards, one for the rest
    first, second, *_ = repository.commits

    assert all(name.endswith(".safetensors") for name in first)
    assert {"index.json", "README.md"} <= set(second)

    capsys.readouterr()
    pull("someone/features", out)
    assert f"features.store={out}" in capsys.readouterr().out

    fetched = read_files(out)
    assert fetched.pop("README.md").decode() == dataset_card(store, "someone/features")
    assert fetched == read_files(store)

    name = next(name for name in repository.files if name.endswith(".safetensors.sha256"))
    # another checksum beside a whole shard, for which the hub has none
    repository.large.clear()
    repository.files[name] = b"0" * 64 + repository.files[name][64:]
    words = r"shard-00000\.safetensors of someone/features is not what its \.sha256 says"
    with pytest.raises(ValueError, match=words):
        pull("datasets/someone/features", tmp_path / "again")


def test_a_store_with_a_flipped_byte_is_not_pushed(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Whoever fetches it would be refused; the shard is named here, before anything is sent."""
    prepared(tiny_target_dir, tmp_path)
    shard = tmp_path / "store/shard-00000.safetensors"
    damaged = bytearray(shard.read_bytes())
    # one bit of a tensor
    damaged[-7] ^= 4
    shard.write_bytes(damaged)

    with pytest.raises(ValueError, match=r"shard-00000.* not those that were written.* --repair"):
        pack(tmp_path / "store", "someone/features", [])


def test_a_home_in_the_config_of_a_store_is_hidden(tiny_target_dir: Path, tmp_path: Path) -> None:
    """And the index has the checksum of what is sent, so that the store is whole where it arrives."""
    prepared(tiny_target_dir, tmp_path)
    store = tmp_path / "store"
    out = tmp_path / "out"
    config = store / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "_name_or_path": "/home/bob/model"}))
    index = json.loads((store / "index.json").read_text())
    # the store is as whole as if it had been written with this config
    index["made"]["borrowed"]["config.json"] = sha256(config)
    (store / "index.json").write_text(json.dumps(index))
    out.mkdir()
    for name, item in pack(store, "someone/features", []).files.items():
        (out / name).write_bytes(item.read())

    assert json.loads((out / "config.json").read_text())["_name_or_path"] == "~/model"
    assert FeatureStore(out).borrowed_folder() == out

    (out / "config.json").write_bytes(config.read_bytes())
    with pytest.raises(ValueError, match=r"config\.json is missing or damaged"):
        FeatureStore(out).borrowed_folder()


def test_answers_go_as_they_are(
    hub: StubHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Texts that name a home are data; what made them is not."""
    chats = tmp_path / "data/chats.jsonl"
    chats.parent.mkdir()
    turns = [{"from": "gpt", "value": "ls /home/bob/x"}]
    record = {"conversations": turns, "finish_reasons": ["stop"]}
    chats.write_text(json.dumps(record) + "\n")
    settings = {
        "target": {"path": "/home/bob/model"},
        "sampling": {"seed": 0},
        "data": {"source": "abc"},
    }
    Path(f"{chats}.settings").write_text(json.dumps(settings))
    out = tmp_path / "out"
    push(chats, "someone/answers", "--yes")
    pull("someone/answers", out)
    fetched = read_files(out)

    assert fetched.keys() == {"chats.jsonl", "chats.jsonl.settings", "README.md"}
    assert fetched["chats.jsonl"] == chats.read_bytes()
    assert b"bob" not in fetched["README.md"] + fetched["chats.jsonl.settings"]
    assert f"data.train={out / 'chats.jsonl'}" in capsys.readouterr().out


def test_what_transformers_runs_goes_with_a_head(folder: Path, tmp_path: Path) -> None:
    """As `write_custom_generate` writes it beside one, unless the user wrote another."""
    name = "custom_generate/generate.py"
    write_custom_generate(tmp_path)
    assert pack(folder, HEAD, []).files[name].read() == (tmp_path / name).read_bytes()

    write_custom_generate(folder)
    # a user may have changed what generate does
    (folder / name).write_text("my own")
    upload = pack(folder, HEAD, [])
    assert upload.files[name].read() == b"my own"
    assert not [path for path in upload.left_out if "custom_generate" in path]


def test_servers_are_hidden_and_pages_are_not() -> None:
    """With a port or a password, by number, without a domain, or wherever a recipe names its endpoint."""
    config = {
        "endpoint": ["https://gpu.firm.example/v1", "http://localhost:8000/v1"],
        "more": [
            "http://me:word@firm.example/x",
            "http://node7/v1",
            "https://huggingface.co/a",
            "/Users/eve/x",
        ],
    }
    readme = b"by /home/ann/x and /home/annie at gpu.firm.example:80, gpu.firm.example"
    upload = UploadPlan("model", Path("/home/ann"))
    upload.add("config.json", json.dumps(config).encode(), "test")
    upload.add("README.md", readme, "test")
    files = upload.clean().files

    assert json.loads(files["config.json"].read()) == {
        "endpoint": ["https://SERVER/v1", "http://localhost:8000/v1"],
        "more": ["http://SERVER/x", "http://SERVER/v1", "https://huggingface.co/a", "~/x"],
    }
    assert files["README.md"].read() == b"by ~/x and /home/annie at SERVER:80, SERVER"
