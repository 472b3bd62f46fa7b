"""A rank that is told to stop while it imports."""

from __future__ import annotations

from pathlib import Path

from helpers.runs import run, run_dir, write_job

from trigrid.train.stopping import read_marker

SIGNALLED = """
import os, signal, sys

class Told:
    def find_spec(self, name, path=None, target=None):
        # Twice, as from a scheduler that signals every process and a launcher that passes it on.
        if name in ("cyclopts", "torch") and name not in seen:
            seen.add(name)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGUSR1)

seen = set()
sys.meta_path.insert(0, Told())
"""


def test_a_rank_told_to_stop_while_it_imports_does_so_in_order(tmp_path: Path) -> None:
    """R90: by itself SIGUSR1 ends a process, and an import of torch takes minutes from a busy file system."""
    job = write_job(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SIGNALLED)
    env = {"PYTHONPATH": str(tmp_path / "site"), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    code, _, err = run("train", job, "--run.trackers", "[]", **env)
    assert code == 0, err
    marker = read_marker(run_dir(job))
    assert marker is not None
    assert (marker.step, marker.signal) == (0, "SIGUSR1")
    assert "told to stop by SIGUSR1 after step 0" in err
