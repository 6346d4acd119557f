"""The state of the GPU that would be trained on: what makes it slower than it could be, by NVML."""

from __future__ import annotations

from typing import Any

from orchestrator import _native
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.screen import amount

State = dict[str, Any]
SLOWDOWNS = {
    "applications_clocks_setting": "clocks that somebody set (`sudo nvidia-smi -rac` resets them)",
    "sw_power_cap": "its power limit, which is usual under load; when idle, raise the limit",
    "hw_slowdown": "the hardware's protection from heat or lack of power: look at its cooling and its power cables",
    "sync_boost": "other GPUs that it keeps in step with (`nvidia-smi boost-slider`)",
    "sw_thermal_slowdown": "heat: give it air, or lower its power limit",
    "hw_thermal_slowdown": "heat that the hardware itself protects it from: look at its fans and the air around it",
    "hw_power_brake_slowdown": "the machine's power supply: look at its cables and what else it feeds",
    "display_clock_setting": "a display that is connected to it: connect that to another GPU",
}
"""The causes of lower clocks and what to do about them, by NVML's names of the reasons."""


def state(device: str) -> list[Finding]:
    """Look at PCIe, power, persistence mode, clocks, ECC and other processes of `cuda:N`."""
    try:
        (uuid,) = (gpu.uuid for gpu in _native.gpus() if f"cuda:{gpu.ordinal}" == device)
        facts = _native.gpu_state(uuid)
    except (ValueError, _native.TrainerError) as error:
        text = f"what slows the GPU down is not known: {error}; `nvidia-smi` tells whether the driver works"
        return [Finding("gpu", Verdict.REMARK, text)]
    checks = (_pcie, _power, _persistence, _clocks, _ecc, _other_processes)
    return [finding for check in checks if (finding := check(facts))]


def _pcie(state: State) -> Finding | None:
    facts = state["pcie"]
    if facts["width"] is None or facts["max_width"] is None:
        return None
    text = f"PCIe {facts['generation']} x{facts['width']} of PCIe {facts['max_generation']} x{facts['max_width']}"
    if facts["width"] < facts["max_width"]:
        way_out = "put the GPU into a slot with all lanes, or take out what shares them; saving checkpoints gets faster"
        return Finding("pcie", Verdict.REMARK, f"{text}: {way_out}", facts)
    slower = facts["generation"] is not None and facts["generation"] < (facts["max_generation"] or 0)
    return Finding("pcie", Verdict.GOOD, text + (", which it takes up under load" if slower else ""), facts)


def _power(state: State) -> Finding | None:
    facts = state["power"]
    limit, default = facts["limit_milliwatts"], facts["default_milliwatts"]
    if limit is None:
        return None
    text = f"{limit // 1000} W at most"
    if default is not None and limit < default:
        way_out = f"`sudo nvidia-smi -pl {default // 1000}` sets it, if its power supply and cooling allow it"
        return Finding("power", Verdict.REMARK, f"{text}, and {default // 1000} W is its default: {way_out}", facts)
    return Finding("power", Verdict.GOOD, text, facts)


def _persistence(state: State) -> Finding | None:
    enabled = state["persistence"]
    if enabled is None:
        return None
    facts = {"enabled": enabled}
    if enabled:
        return Finding("persistence", Verdict.GOOD, "on: the driver stays loaded between programs", facts)
    text = "off: every start waits for the driver; `sudo nvidia-smi -pm 1` keeps it loaded"
    return Finding("persistence", Verdict.REMARK, text, facts)


def _clocks(state: State) -> Finding | None:
    facts = state["clocks"]
    if facts["sm_mhz"] is None:
        return None
    text = f"{facts['sm_mhz']:,} MHz now, {facts['max_sm_mhz'] or 0:,} at most"
    if slowed := facts["slowed_by"]:
        reasons = "; ".join(SLOWDOWNS[name] for name in slowed)
        return Finding("clocks", Verdict.REMARK, f"{text}, lowered by {reasons}", facts)
    return Finding("clocks", Verdict.GOOD, text, facts)


def _ecc(state: State) -> Finding | None:
    facts = state["ecc"]
    if facts["enabled"] is None:
        return None
    if facts["uncorrected_errors"]:
        text = f"{facts['uncorrected_errors']:,} memory errors that could not be corrected since the driver was loaded"
        way_out = "do not trust what was trained since, restart the machine, and have the GPU replaced if they return"
        return Finding("ecc", Verdict.BAD, f"{text}: {way_out}", facts)
    text = "on: memory errors are corrected" if facts["enabled"] else "off: memory errors go unnoticed"
    return Finding("ecc", Verdict.GOOD, text, facts)


def _other_processes(state: State) -> Finding | None:
    others = state["other_processes"]
    if others is None:
        return None
    facts = {"others": others}
    if not others:
        return Finding("processes", Verdict.GOOD, "no other process is on the GPU", facts)
    total_bytes = sum(other["bytes"] or 0 for other in others)
    names = ", ".join(
        f"{other['pid']} ({'unknown' if other['bytes'] is None else amount(other['bytes'])})" for other in others
    )
    text = (
        f"other processes hold {amount(total_bytes)} of the GPU's memory: {names}; they take its time as well: end them"
    )
    return Finding("processes", Verdict.REMARK, text, facts)
