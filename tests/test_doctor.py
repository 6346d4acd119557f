"""`orchestrate doctor`: what it finds on this machine, and what it says where training cannot run."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

import pytest
from fake_hub import FakeHub
from orchestrator import _native, base_config, doctor, trainer_program
from orchestrator.doctor import Verdict
from orchestrator.paths import Roots
from orchestrator.settings import Settings
from workspace import Workspace

GIB = 1 << 30


class Gpu:
    """A GPU as the driver would list it."""

    ordinal = 0
    name = "NVIDIA GeForce RTX 5090"
    total_bytes = 32122 << 20
    compute_capability = (12, 0)
    refusal: str | None = None


class OldGpu(Gpu):
    """A GPU without bf16."""

    compute_capability = (7, 5)
    refusal = "Tesla T4 has compute capability 7.5, 8.0 is needed"


def test_a_cpu_is_ready_and_the_json_says_what_was_found(hub_workspace: Workspace) -> None:
    answer = json.loads(hub_workspace.orchestrate("doctor", "--device=cpu", "--json").succeeded().out)
    assert answer["ready"]
    assert answer["device"]["device"] == "cpu"
    assert answer["machine"]["cores"] >= 1
    assert answer["disk"]["free_bytes"] > 0
    assert answer["disk"]["bytes_per_second"] > 0
    assert answer["hub"]["verdict"] == "good"
    assert answer["trainer"]["package"].startswith(_native.__version__)
    assert list(hub_workspace.root.iterdir()) == []


def test_a_gpu_that_cannot_be_used_ends_with_2_and_a_sentence(workspace: Workspace) -> None:
    if trainer_program.has_nvidia_driver():
        pytest.skip("this machine has a GPU")
    workspace.extra_environment["HF_HUB_OFFLINE"] = "1"
    process = workspace.orchestrate("doctor", "--device=cuda").refused(2, "cuda:0")
    assert "BAD" in process.out
    for command in (["doctor"], ["generate", "--checkpoint=.", "--prompt=x"], ["evaluate", "--checkpoint=."]):
        message = 'the device is "gpu"' if command == ["doctor"] else "'gpu' for '--device"
        workspace.orchestrate(*command, "--device=gpu").refused(2, message, "cuda:N")


def test_a_folder_that_cannot_be_written_is_named(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    runs = workspace.root / "deep" / "runs"
    finding = topic(doctor.examine("cpu", Roots(runs, workspace.root, None)), "disk")
    assert finding.verdict is Verdict.BAD
    assert str(runs) in finding.text
    assert "ORCHESTRATE_RUNS_ROOT" in finding.text


def test_offline_and_unreachable_hubs_are_remarks(workspace: Workspace, hub: FakeHub, monkeypatch: Any) -> None:
    roots = Roots(workspace.root, workspace.root, None)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    unreachable = doctor.examine("cpu", roots)
    assert topic(unreachable, "hub").verdict is Verdict.REMARK
    assert "http://127.0.0.1:9" in topic(unreachable, "hub").text
    assert "(Connection refused)" in topic(unreachable, "hub").text
    assert doctor.is_ready(unreachable)
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in topic(doctor.examine("cpu", roots), "hub").text
    assert hub.requests == []


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        ("0.1.0 (CUDA 13.0)", Verdict.GOOD, ""),
        ("0.1.0", Verdict.BAD, "make cuda"),
        ("0.1.0 (CUDA stand-in)", Verdict.BAD, "for tests"),
        ("0.0.9 (CUDA 13.0)", Verdict.REMARK, "alike"),
    ],
)
def test_the_program_must_suit_the_gpu(
    workspace: Workspace, monkeypatch: Any, version: str, verdict: Verdict, words: str
) -> None:
    program = workspace.root / "release" / trainer_program.NAME
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho transformer-candle '{version}'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    gpu = {"device": "cuda:0", "name": Gpu.name, "compute_capability": [12, 0], "free_bytes": GIB, "total_bytes": GIB}
    built = {**_native.environment(), "version": "0.1.0", "cuda": "13.0"}
    monkeypatch.setattr(_native, "open_device", lambda _device: {**gpu, "software": "driver 13.0, cuBLAS 13.1.0"})
    monkeypatch.setattr(_native, "environment", lambda: built)
    findings = doctor.examine("auto", Roots(workspace.root, workspace.root, workspace.root))
    assert topic(findings, "trainer").verdict is verdict
    assert words in topic(findings, "trainer").text
    assert "RTX 5090, compute capability 12.0" in topic(findings, "device").text
    assert doctor.is_ready(findings) is (verdict is not Verdict.BAD)


@pytest.mark.parametrize(
    ("fitting", "preset"),
    [(["1b", "500m", "125m"], "1b"), (["500m", "125m"], "500m"), (["125m"], "125m"), ([], "smoke_cpu")],
)
def test_a_gpu_gets_the_largest_preset_that_it_holds(
    monkeypatch: Any, capsys: pytest.CaptureFixture[str], fitting: list[str], preset: str
) -> None:
    monkeypatch.setattr(_native, "gpus", lambda: [Gpu()])
    monkeypatch.setattr(base_config, "_fits", lambda name, _gpu: name in fitting)
    assert base_config.choose(Settings(dataset="somebody/something")).origin == f"preset {preset}"
    assert "RTX 5090 (33.7 GB)" in capsys.readouterr().out
    for settings in (
        Settings(dataset="demo"),
        Settings(keys={"device": "cpu"}),
        Settings(override=["runtime.device=cpu"]),
    ):
        assert base_config.choose(settings).origin == "preset smoke_cpu"
    assert base_config.choose(Settings(preset="rtx5090_1b", keys={"device": "cpu"})).origin == "preset rtx5090_1b"


def test_without_gpus_auto_uses_the_cpu_and_cuda_is_refused(monkeypatch: Any) -> None:
    def no_driver() -> list[Gpu]:
        raise _native.ConfigError("no NVIDIA driver was found")

    monkeypatch.setattr(_native, "gpus", no_driver)
    assert base_config.choose(Settings()).origin == "preset smoke_cpu"
    with pytest.raises(_native.ConfigError, match="no NVIDIA driver"):
        base_config.choose(Settings(keys={"device": "cuda"}))


def test_an_old_gpu_is_not_used_and_the_reason_is_printed(
    workspace: Workspace, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_native, "gpus", lambda: [OldGpu()])
    monkeypatch.setattr(_native, "open_device", lambda _device: {"device": "cpu"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert base_config.choose(Settings()).origin == "preset smoke_cpu"
    assert OldGpu.refusal in capsys.readouterr().out
    findings = doctor.examine("auto", Roots(workspace.root, workspace.root, None))
    assert topic(findings, "device").text == f"cpu; no GPU, because {OldGpu.refusal}"


def test_on_a_machine_with_a_gpu_the_build_for_gpus_goes_first(workspace: Workspace, monkeypatch: Any) -> None:
    older, newer = (workspace.root / folder / trainer_program.NAME for folder in ("cuda/release", "debug"))
    for age, program in ((100, older), (0, newer)):
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        os.utime(program, (program.stat().st_atime, program.stat().st_mtime - age))
    for has_driver, expected in ((True, older), (False, newer)):
        monkeypatch.setattr(trainer_program, "has_nvidia_driver", lambda has_driver=has_driver: has_driver)
        assert trainer_program.find(workspace.root) == expected


def topic(findings: list[doctor.Finding], name: str) -> doctor.Finding:
    return next(finding for finding in findings if finding.topic == name)
