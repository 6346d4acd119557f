"""`orchestrate doctor --crash DIR` trusts a file system that keeps runs; of another one it says what it does wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from orchestrator.doctor import Verdict, crash, file_system
from system_calls import require_strace
from workspace import ORCHESTRATE, TRAINER, Workspace

MOUNTS = """22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
36 22 {device} / /mnt/scratch rw,noatime - {kind} none rw,size=1g
"""


def test_a_disk_that_keeps_runs_is_trusted_and_left_as_it_was(workspace: Workspace) -> None:
    folder = workspace.root / "my disk"
    folder.mkdir()
    process = workspace.orchestrate("doctor", f"--crash={folder}", "--kills=3", "--json").succeeded()
    answer = json.loads(process.out)
    assert answer["ready"]
    assert answer["kills"]["kills"] == 3
    assert answer["locks"]["verdict"] == "good"
    assert answer["replacing"]["reads"] > 0
    assert list(folder.iterdir()) == []
    workspace.orchestrate("doctor", "--crash=elsewhere").refused(2, "elsewhere", "is no folder")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        # A byte of the newest checkpoint changes while nobody writes it.
        ('set -- killed/checkpoints/step-0* -- "$@"; [ "$2" != -- ] && printf x | '
         'dd of="$2/model.safetensors" bs=1 seek=999 conv=notrunc 2>/dev/null', "came back damaged"),
        # What a trainer has appended is gone, whatever it has synced.
        (": > killed/ledger.jsonl", "ledger"),
    ],
)  # fmt: skip
def test_a_disk_that_loses_bytes_is_not_trusted(tmp_path: Path, damage: str, problem: str) -> None:
    trainer = tmp_path / "trainer"
    trainer.write_text(f'#!/bin/sh\n[ -d killed/checkpoints ] && ( {damage} )\nexec "{TRAINER}" "$@"\n')
    trainer.chmod(0o755)
    findings = crash.examine(tmp_path, trainer, 8, lambda line: None)
    (finding,) = [finding for finding in findings if finding.verdict is Verdict.BAD]
    assert problem in finding.text
    assert [path.name for path in tmp_path.iterdir()] == ["trainer"]


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [("retval=0", 2, "two trainers can write into one run"), ("error=ENOLCK", 0, "there are none: a lease")],
)
def test_locks_are_tried(workspace: Workspace, answer: str, code: int, words: str) -> None:
    require_strace()
    inject = ["-e", "trace=flock", "-e", f"inject=flock:{answer}", "-e", "signal=none", "-o", "/dev/null"]
    doctor = [str(ORCHESTRATE), "doctor", "--crash=.", "--kills=1"]
    process = workspace.command("strace", "-f", "-qq", *inject, "--", *doctor)
    assert process.code == code, process.err
    assert words in process.out + process.err


def test_a_folder_whose_files_are_lost_is_named(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    for kind, verdict in (("ext4", Verdict.GOOD), ("tmpfs", Verdict.REMARK), ("overlay", Verdict.REMARK)):
        mounts.write_text(MOUNTS.format(device=f"{os.major(device)}:{os.minor(device)}", kind=kind))
        finding = file_system.describe(tmp_path, mounts)
        assert (finding.verdict, finding.facts["file_system"]) == (verdict, kind)
    mounts.write_text("")
    assert file_system.describe(tmp_path, mounts).verdict is Verdict.GOOD
