"""Ctrl-C ends a command with status 130 and a hint, leaves nothing half, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle.__main__ import main as eagle

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_a_stopped_extraction_goes_on(tiny_target_dir: Path, tmp_path: Path) -> None:
    """Its whole shards are kept, and no half one lies beside them."""
    command = [sys.executable, "-m", "data_prep.extract", str(ROOT / "recipes/tiny/eagle1.yaml")]
    command += [
        f"target.path={tiny_target_dir / 'target'}",
        f"data.train={tiny_target_dir / 'data/train.jsonl'}",
    ]
    command += [
        f"features.store={tmp_path / 'store'}",
        "features.shard_bytes=60000",
        "target.dtype=float32",
    ]
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while len(list((tmp_path / "store").glob("*.sha256"))) < 3:
        assert run.poll() is None
        time.sleep(0.005)
    run.send_signal(signal.SIGINT)
    output = run.communicate()[0]
    assert run.returncode == 130 and "Traceback" not in output
    assert "stopped; whole shards are kept, and the same command goes on" in output
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("*.sha256")}
    assert not [
        path for path in (tmp_path / "store").iterdir() if path.suffix in (".part", ".lock")
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(
        (tmp_path / "store" / name).stat().st_mtime_ns == when for name, when in kept.items()
    )


def test_a_stopped_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verbs of the package say it too."""
    monkeypatch.setattr(
        "eagle.command.ship.inspect", lambda *_: os.kill(os.getpid(), signal.SIGINT)
    )
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            eagle(["inspect", "head"])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (
        ended.value.code == 130
        and capsys.readouterr().err == "\nstopped; give the same command again\n"
    )
