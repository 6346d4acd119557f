"""`orchestrate doctor`: whether this machine can train on what is asked, how fast, and the way out where it cannot."""

from __future__ import annotations

from typing import Any

from orchestrator import _native, trainer_program
from orchestrator.doctor import device as devices
from orchestrator.doctor import gpu, host, software
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.paths import Roots

__all__ = ["Finding", "Verdict", "as_json", "examine", "is_ready"]


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


def is_ready(findings: list[Finding]) -> bool:
    """Whether no finding prevents training."""
    return all(finding.verdict is not Verdict.BAD for finding in findings)


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Return the findings by topic."""
    topics = {
        finding.topic: {"verdict": finding.verdict.value, "text": finding.text, **finding.facts} for finding in findings
    }
    return {"ready": is_ready(findings), **topics}
