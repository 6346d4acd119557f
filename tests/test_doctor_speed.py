"""`doctor` on a machine that is slower than it could be: its GPU, by a stand-in for NVML, and the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from orchestrator import _native
from orchestrator.doctor import Finding, Verdict, gpu, host

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
FAST = {
    "uuid": UUID, "pcie_generation": 5, "pcie_width": 16, "pcie_max_generation": 5, "pcie_max_width": 16,
    "power_limit": 575_000, "power_default": 575_000, "persistence": 1, "sm_mhz": 2400, "max_sm_mhz": 3090,
    "slowed_by": 0, "ecc": 0, "processes": "",
}  # fmt: skip
TOPICS = ["pcie", "power", "persistence", "clocks", "ecc", "processes"]


@pytest.fixture(scope="module", autouse=True)
def nvml(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The stand-in, loaded under the name that NVML is opened by."""
    source = Path(__file__).with_name("nvml_stand_in.c")
    library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    command = ["cc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", library, source], check=True)
    ctypes.CDLL(str(library))


def findings_of(monkeypatch: pytest.MonkeyPatch, **settings: object) -> dict[str, Finding]:
    """Return the findings on a GPU that is `FAST` but for the settings; None takes one away."""
    measures = {name: value for name, value in {**FAST, **settings}.items() if value is not None}
    monkeypatch.setenv("NVML_STAND_IN", ",".join(f"{name}={value}" for name, value in measures.items()))
    monkeypatch.setattr(
        _native, "gpus", lambda: [SimpleNamespace(ordinal=0, uuid="GPU-0"), SimpleNamespace(ordinal=1, uuid=UUID)]
    )
    return {finding.topic: finding for finding in gpu.state("cuda:1")}


def test_a_fast_gpu_gets_no_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = findings_of(monkeypatch)
    assert list(findings) == TOPICS
    assert {finding.verdict for finding in findings.values()} == {Verdict.GOOD}
    assert findings["pcie"].text == "PCIe 5 x16 of PCIe 5 x16"


@pytest.mark.parametrize(
    ("topic", "settings", "words"),
    [
        ("pcie", {"pcie_width": 4}, ["x4 of PCIe 5 x16", "slot"]),
        ("power", {"power_limit": 400_000}, ["400 W", "575 W", "nvidia-smi -pl 575"]),
        ("persistence", {"persistence": 0}, ["nvidia-smi -pm 1"]),
        ("clocks", {"slowed_by": 0x40 | 0x80}, ["2,400 MHz", "fans", "power supply"]),
        ("clocks", {"slowed_by": 0x02}, ["nvidia-smi -rac"]),
        ("processes", {"processes": "4321:2000000000+99:18446744073709551615"}, ["4321 (2.0 GB)", "99 (unknown)"]),
    ],
)
def test_causes_of_a_slow_gpu_are_reported_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, topic: str, settings: dict[str, object], words: list[str]
) -> None:
    findings = findings_of(monkeypatch, **settings)
    assert [name for name in findings if findings[name].verdict is not Verdict.GOOD] == [topic]
    assert findings[topic].verdict is Verdict.REMARK
    assert all(word in findings[topic].text for word in words), findings[topic].text


def test_memory_errors_are_in_the_way_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings_of(monkeypatch, ecc=1, ecc_errors=0)["ecc"].verdict is Verdict.GOOD
    ecc = findings_of(monkeypatch, ecc=1, ecc_errors=3)["ecc"]
    assert ecc.verdict is Verdict.BAD
    assert "3 memory errors" in ecc.text


def test_this_process_is_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings_of(monkeypatch, processes=f"{os.getpid()}:5")["processes"].verdict is Verdict.GOOD


def test_properties_that_a_gpu_does_not_report_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = dict.fromkeys(name for name in FAST if name != "uuid")
    assert findings_of(monkeypatch, **absent) == {}


@pytest.mark.parametrize("settings", [{"uuid": "GPU-another"}, {"unloaded": 1}])
def test_a_silent_nvml_is_a_remark(monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]) -> None:
    (finding,) = findings_of(monkeypatch, **settings).values()
    assert finding.verdict is Verdict.REMARK
    assert "NVML does not answer" in finding.text


@pytest.mark.parametrize(("governor", "verdict"), [("performance", Verdict.GOOD), ("powersave", Verdict.REMARK)])
def test_a_governor_that_saves_power_is_a_remark(tmp_path: Path, governor: str, verdict: Verdict) -> None:
    assert host.governor(tmp_path) == []
    for cpu in ("cpu0", "cpu1"):
        (tmp_path / cpu / "cpufreq").mkdir(parents=True)
        (tmp_path / cpu / "cpufreq" / "scaling_governor").write_text(f"{governor}\n")
    (finding,) = host.governor(tmp_path)
    assert finding.verdict is verdict
    assert ("cpupower" in finding.text) is (verdict is Verdict.REMARK)


@pytest.mark.parametrize(
    ("free", "swap_used", "verdict", "words"),
    [
        (16 << 20, 0, Verdict.GOOD, "17.2 GB of memory free"),
        (16 << 20, 3 << 20, Verdict.REMARK, "(swap)"),
        (1 << 20, 0, Verdict.REMARK, "end what is not needed"),
    ],
)
def test_little_memory_is_a_remark(tmp_path: Path, free: int, swap_used: int, verdict: Verdict, words: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {free} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {(8 << 20) - swap_used} kB\n")
    (finding,) = host.memory(meminfo)
    assert finding.verdict is verdict
    assert words in finding.text


@pytest.mark.parametrize(
    ("free", "rate", "words"),
    [
        (1000e9, 20e6, ["791 s"]),
        (20e9, 2e9, ["takes 15.8 GB"]),
        (20e9, 20e6, ["takes 15.8 GB", "791 s"]),
        (1000e9, 2e9, []),
    ],
)
def test_a_slow_or_full_disk_is_a_remark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, rate: float, words: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=int(free)))
    monkeypatch.setattr(host, "_written_and_synced", lambda _folder: rate)
    finding = host.disk(tmp_path)
    assert finding.verdict is (Verdict.REMARK if words else Verdict.GOOD)
    assert all(word in finding.text for word in words)
    assert ("1.3 B" in finding.text) is bool(words)
