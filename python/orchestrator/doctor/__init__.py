"""`orchestrate doctor`: whether this machine can train on what is asked, how fast, and the way out where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator import _native, trainer_program
from orchestrator.command_error import CommandError
from orchestrator.doctor import crash, gpu, host, software
from orchestrator.doctor import device as devices
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import Roots, shown

__all__ = ["Finding", "Verdict", "as_json", "examine", "examine_crashes", "is_ready"]


def examine(device: str, roots: Roots) -> list[Finding]:
    """Look at everything that training on `device` needs, and at what slows it down. Nothing is left behind.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        roots: Where runs would be written.
    """
    built = _native.environment()
    findings = [devices.device(device)]
    on_a_gpu = "free_bytes" in findings[0].facts
    if findings[0].facts.get("device") != "cpu":
        findings.append(devices.libraries())
    if on_a_gpu:
        findings += gpu.state(findings[0].facts["device"])
    return [
        *findings,
        software.trainer(trainer_program.find(roots.target), built, on_a_gpu),
        host.machine(built),
        *host.governor(),
        *host.memory(),
        host.disk(roots.runs),
        software.hub(),
    ]


def examine_crashes(folder: Path, kills: int, roots: Roots, tell: Callable[[str], None]) -> list[Finding]:
    """Kill and resume a small run in a folder; say what its file system keeps. Nothing is left behind.

    Args:
        folder: Where the run is made.
        kills: How often it is killed.
        roots: Where the trainer's program may be.
        tell: Receives a line of progress now and then.

    Raises:
        CommandError: There is no such folder, it takes no file, or the trainer's program is not built.
    """
    if not folder.is_dir():
        raise CommandError(f"{shown(folder)} is no folder (--crash): name the one in which runs are to be kept")
    trainer = trainer_program.find(roots.target)
    if not trainer:
        raise CommandError(f"{trainer_program.NAME} is not there to be killed: `cargo build --release` builds it")
    return crash.examine(folder.absolute(), trainer.absolute(), kills, tell)


def is_ready(findings: list[Finding]) -> bool:
    """Whether no finding prevents training."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings by topic."""
    topics = {
        finding.topic: {"verdict": finding.verdict.value, "text": finding.text, **finding.facts} for finding in findings
    }
    return {"ready": is_ready(findings), **topics}
