"""A disk that fills up while a run trains: the run says what is not saved, and loses nothing once there is room.

The trainer's output goes into a small pipe that the test reads, so that it is never many steps ahead of the test.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from disk_errors import NOT_SAVED, unsaved
from kill_sessions import CONFIG, PREPARE, RUN, TRAIN, Results, copy, write_text
from run_results import differences, run_results
from small_disk import small_disk
from workspace import TRAINER, Workspace

STEPS = 600
SAVES = 20
PIPE = 4096
"""Bytes of the pipe. The lines of all steps fill it many times."""
FILE_SIZE = 40 << 10
"""Less than the weights of a checkpoint, and than what all steps write to each log."""
LOGS = ("metrics.jsonl", "ledger.jsonl", "events.out.tfevents")
CONFIGURED = (
    CONFIG.replace("total_steps: 8", f"total_steps: {STEPS}")
    .replace("checkpoint: {every_n_steps: 2, max_keep: 2}", f"checkpoint: {{every_n_steps: {SAVES}, max_keep: 100}}")
    .replace("evaluation: {every_n_steps: 2,", f"evaluation: {{every_n_steps: {STEPS},")
)
CONTINUE = ("--override", "runtime.checkpoint.on_error=continue")


@dataclass(frozen=True)
class Prepared:
    """A prepared run, the folder that it is trained in, and the results of the run on a large disk."""

    base: Path
    work: Path
    undisturbed: Results

    def differences(self, folder: Path) -> list[str]:
        """Return which results of a run differ from the undisturbed ones, other than by their mode."""
        results = run_results(folder / RUN)
        results["resolved_config.json"] = results["resolved_config.json"].replace(b'"continue"', b'"stop"')
        return differences(results, self.undisturbed)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """A run that is prepared, and what it ends with."""
    root = tmp_path_factory.mktemp("small-disk")
    base, work = root / "prepared", root / "work"
    base.mkdir()
    write_text(base)
    Workspace(base).command(*PREPARE).succeeded()
    (base / RUN / "training.yaml").write_text(CONFIGURED)
    workspace = copy(base, work)
    workspace.command(*TRAIN).succeeded()
    return Prepared(base, work, run_results(work / RUN))


class Training:
    """A trainer whose output the test reads line by line."""

    def __init__(self, workspace: Workspace, command: Sequence[str | Path]) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command], cwd=workspace.root, env=workspace.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pipesize=PIPE,
        )  # fmt: skip
        self.output = ""

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        assert self.process.stdout
        self.process.stdout.close()
        self.process.wait()

    def until(self, *words: str) -> str:
        """Read until a line holds all `words`; return it."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if all(each in line for each in words):
                return line
        raise AssertionError(f"{words} are not in:\n{self.output}")

    def until_all_logs(self, words: str) -> None:
        """Read until `words` have been said of every file that a run appends to."""
        missing = set(LOGS)
        while missing:
            line = self.until(words)
            missing = {name for name in missing if name not in line}

    def ends(self, code: int) -> None:
        """Read to the end, which must have an exit code."""
        assert self.process.stdout
        self.output += self.process.stdout.read()
        assert self.process.wait() == code, self.output
        assert "panicked" not in self.output


def check_end(prepared: Prepared, training: Training, folder: Path) -> None:
    """Check that a run which trained on differs from the undisturbed one in nothing but what it said."""
    missing = unsaved(folder)
    assert missing
    for text in missing.values():
        assert training.output.count(f"warning: {text}\n") == 1
    assert {str(Path(name).parent) for name in prepared.differences(folder)} == {
        f"checkpoints/{name}" for name in missing
    }
    assert missing.keys().isdisjoint(path.name for path in (folder / RUN / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_full_disk_is_survived(prepared: Prepared) -> None:
    workspace = Workspace(prepared.work)
    with small_disk(prepared.work, "size=1500k") as disk:
        shutil.copytree(prepared.base, disk.seen, dirs_exist_ok=True)
        with Training(workspace, disk.command(*TRAIN, *CONTINUE)) as training:
            warning = training.until("warning: ", NOT_SAVED)
            assert "not enough room for the checkpoint of step" in warning
            assert f"the newest checkpoint is {prepared.work / RUN}/checkpoints/step-" in warning
            disk.fill()
            training.until_all_logs("cannot be written (No space left on device)")
            disk.resize("size=64m")
            training.until_all_logs("is written again, no line is lost")
            training.until(f"checkpoint {prepared.work}")
            training.ends(0)
        check_end(prepared, training, disk.seen)
        workspace.command(*disk.command(TRAINER, "checkpoint", "verify", RUN)).succeeded()


@pytest.mark.slow
@pytest.mark.parametrize("limits", ["size=1500k", "size=64m,nr_inodes=70"])
def test_a_run_stopped_by_a_full_disk_resumes(prepared: Prepared, limits: str) -> None:
    workspace = Workspace(prepared.work)
    with small_disk(prepared.work, limits) as disk:
        shutil.copytree(prepared.base, disk.seen, dirs_exist_ok=True)
        stopped = workspace.command(*disk.command(*TRAIN))
        stopped.refused(1, "not enough room for the checkpoint of step", f"{prepared.work / RUN}/checkpoints")
        assert not list((disk.seen / RUN).rglob("*.tmp-*"))
        workspace.command(*disk.command(TRAINER, "checkpoint", "verify", RUN)).succeeded()
        disk.resize("size=64m,nr_inodes=9999")
        workspace.command(*disk.command(*TRAIN, "--resume")).succeeded()
        assert prepared.differences(disk.seen) == []


@pytest.mark.slow
def test_a_disk_without_inodes_is_survived(prepared: Prepared) -> None:
    workspace = Workspace(prepared.work)
    with small_disk(prepared.work, "size=64m,nr_inodes=70") as disk:
        shutil.copytree(prepared.base, disk.seen, dirs_exist_ok=True)
        with Training(workspace, disk.command(*TRAIN, *CONTINUE)) as training:
            assert "not enough room" in training.until("warning: ", NOT_SAVED)
            disk.resize("size=64m,nr_inodes=9999")
            training.until(f"checkpoint {prepared.work}")
            training.ends(0)
        check_end(prepared, training, disk.seen)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_survived(prepared: Prepared) -> None:
    workspace = copy(prepared.base, prepared.work)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with Training(workspace, (*TRAIN, *CONTINUE)) as training:
        training.until(f"checkpoint {prepared.work}")
        resource.prlimit(training.process.pid, resource.RLIMIT_FSIZE, (FILE_SIZE, unlimited))
        assert "`ulimit -f`" in training.until("warning: ", NOT_SAVED)
        training.until_all_logs("cannot be written (File too large)")
        resource.prlimit(training.process.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))
        training.until_all_logs("is written again, no line is lost")
        training.until(f"checkpoint {prepared.work}")
        training.ends(0)
    check_end(prepared, training, prepared.work)
