"""`plan` on the command line: named GPUs, prices, what does not fit, and the config that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orchestrator import RunConfig, _native
from workspace import REPOSITORY, Workspace

GPUS = ("rtx5090", "rtx4090", "rtx3090", "a100-40", "a100-80", "h100", "h200")


def plan(workspace: Workspace, *words: str | Path) -> dict[str, Any]:
    return dict(json.loads(workspace.orchestrate("plan", "--json", *words).succeeded().out))


def test_the_table_has_every_gpu_of_the_help(workspace: Workspace) -> None:
    table = _native.gpu_table()
    assert tuple(table) == GPUS
    text = " ".join(workspace.orchestrate("plan", "--help").succeeded().out.split())
    assert all(name in text for name in GPUS)
    assert table["rtx5090"]["memory_bytes"] == 32_122 << 20


@pytest.mark.parametrize("gpu", GPUS)
def test_a_preset_is_planned_for_every_gpu(workspace: Workspace, gpu: str) -> None:
    report = plan(workspace, "--preset=1b", f"--gpu={gpu}")
    slow, fast = report["speed"]["tokens_per_second"]
    assert 0 < slow < fast
    assert report["shortage"] is None
    assert report["device"]["memory_bytes"] == _native.gpu_table()[gpu]["memory_bytes"]
    late, early = report["training_time"]["end_dates"]
    assert early <= late
    assert [fit["activation_recompute"] for fit in report["largest_micro_batches"]][-1] == "block"


def test_tokens_and_prices_scale_the_run(workspace: Workspace) -> None:
    words = ("--preset=350m", "--gpu=rtx4090", "--watts=500", "--price-per-kwh=0.4", "--price-per-hour=2")
    short, long = (plan(workspace, *words, f"--tokens={tokens}") for tokens in ("2B", "4B"))
    assert short["training_time"]["tokens"] == pytest.approx(2e9, rel=1e-3)
    assert short["training_time"]["chinchilla_share"] == pytest.approx(2e9 / (20 * short["parameters"]), rel=1e-3)
    for key in ("kilowatt_hours", "electricity", "rent"):
        assert long["cost"][key] == pytest.approx([2 * cost for cost in short["cost"][key]], rel=1e-3)
    hours = short["training_time"]["seconds"][0] / 3600
    assert short["cost"]["electricity"][0] == pytest.approx(hours * 0.5 * 0.4)
    assert short["cost"]["rent"][0] == pytest.approx(hours * 2)


def test_ranks_share_the_time_and_multiply_the_price(workspace: Workspace) -> None:
    words = (
        "--preset=1b",
        "--gpu=rtx5090",
        "--override=data.batch_size=4",
        "--price-per-hour=2",
        "--price-per-kwh=0.4",
    )
    one, four = (plan(workspace, *words, *more) for more in ((), ("--ranks=4",)))
    exchange = four["speed"]["exchange"]
    for end in (0, 1):
        speedup = four["speed"]["tokens_per_second"][end] / one["speed"]["tokens_per_second"][end]
        assert speedup == pytest.approx(4 * exchange["efficiency"][end])
        assert 3.7 < speedup < 4
        for key in ("rent", "electricity"):
            assert four["cost"][key][end] == pytest.approx(4 / speedup * one["cost"][key][end])
    slower = plan(workspace, *words, "--ranks=4", "--interconnect=5GB/s")["speed"]
    assert slower["exchange"]["seconds"] == pytest.approx(
        [exchange["bytes_per_rank"] / 5e9 / share for share in (0.7, 0.9)]
    )
    text = workspace.orchestrate("plan", *words, "--ranks=4").succeeded().out
    assert "% of 4 times one rank" in text
    assert "over PCIe 5.0 x16" in text


def test_several_machines_need_a_network(workspace: Workspace) -> None:
    words = ("--preset=1b", "--gpu=h100", "--ranks=16", "--nodes=2")
    workspace.orchestrate("plan", *words).refused(2, "--interconnect 400Gb/s")
    assert plan(workspace, *words, "--interconnect=400Gb/s")["speed"]["exchange"]["link"] == "400 Gb/s"
    workspace.orchestrate("plan", *words[:3], "--nodes=3", "--interconnect=400Gb/s").refused(2, "3 machines")


def test_ranks_on_one_cpu_take_the_exchange_longer(workspace: Workspace) -> None:
    report = plan(workspace, f"--config={tiny_config(workspace)}", "--gpu=this", "--ranks=2",
                   "--override=data.sequences_per_step=8")  # fmt: skip
    exchange = report["speed"]["exchange"]
    assert exchange["link"] == "loopback (gloo)"
    assert exchange["bytes_per_rank"] == pytest.approx(4 * report["parameters"], rel=0.2), "padding of the vocabulary"
    assert 0 < exchange["efficiency"][0] < exchange["efficiency"][1] < 1


def test_apply_writes_a_config_that_fits(workspace: Workspace) -> None:
    out = workspace.root / "fits.yaml"
    arguments = ("--preset=1b", "--gpu=rtx4090", "--override=data.batch_size=32")
    before = plan(workspace, *arguments)
    assert before["shortage"] is not None
    assert {option["name"] for option in before["options"]} >= {"shorter sequences", "smaller micro-batch"}
    text = workspace.orchestrate("plan", *arguments, f"--apply={out}").succeeded().out
    assert "does not fit" in text
    assert f"wrote {out}, which fits and takes the same tokens per step" in text
    after = plan(workspace, f"--config={out}", "--gpu=rtx4090")
    assert after["shortage"] is None
    assert after["tokens_per_step"] == before["tokens_per_step"]
    assert f"data.batch_size: {after['micro_batch']} (was 32)" in text
    assert RunConfig.load_for_planning(out).to_dict()["data"]["batch_size"] == after["micro_batch"]
    workspace.orchestrate("plan", *arguments, f"--apply={out}").refused(2, "there is such a file")


def test_nothing_is_written_if_nothing_fits(workspace: Workspace) -> None:
    out = workspace.root / "fits.yaml"
    arguments = ("plan", "--preset=1b", "--gpu=rtx4090", "--memory=1GB")
    assert workspace.orchestrate(*arguments).succeeded().out.endswith("\nNo combination of these is enough.\n")
    process = workspace.orchestrate(*arguments, f"--apply={out}").refused(4, "does not fit")
    assert process.out.endswith("\nNo combination of these is enough.\n")
    assert not out.exists()
    workspace.orchestrate(*arguments, f"--apply={out}", "--json").refused(4, "does not fit")
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--gpu=rtx2080", "must be one of rtx5090"),
        ("--memory=lots", "must be an amount of memory"),
        ("--memory=24", "must be at least 1 MB: did you mean `24GB`?"),
        ("--memory=9kB", "must be at least 1 MB\n"),
        ("--tokens=many", "must be an integer such as 2000000, 10k"),
        ("--tokens=0", "must be at least 1"),
        ("--watts=-1", "must be a number, at least 0"),
        ("--price-per-kwh=nan", "must be a number, at least 0"),
        ("--ranks=2.5", "invalid value"),
        ("--nodes=2", "add `--ranks N`"),
        ("--interconnect=400", "must be a rate such as `400Gb/s` (bits) or `50GB/s` (bytes)"),
        ("--apply=fits.json", "the name must end in .yaml"),
        ("--apply=nowhere/fits.yaml", "there is no such folder"),
    ],
)
def test_a_bad_value_is_a_sentence(workspace: Workspace, option: str, words: str) -> None:
    workspace.orchestrate("plan", "--preset=1b", "--gpu=rtx5090", option).refused(2, words)


def test_a_shipped_config_is_named_in_errors(workspace: Workspace) -> None:
    process = workspace.orchestrate("plan", "--preset=25m", "--override=data.batch_size=0").refused(
        2, "data.batch_size"
    )
    assert process.err.startswith("orchestrate: 25m: data.batch_size: ")


def test_an_assumed_gpu_is_told(workspace: Workspace) -> None:
    assumed = ", assumed, as there is no usable GPU here (--gpu names another)\n"
    text = workspace.orchestrate("plan", "--preset=1b").succeeded().out
    assert assumed in next(line for line in text.splitlines(keepends=True) if line.startswith("device"))
    assert assumed not in workspace.orchestrate("plan", "--preset=1b", "--gpu=rtx5090").succeeded().out
    assert plan(workspace, "--preset=1b")["device"]["assumed"] is True


def test_electricity_of_a_cpu_needs_its_watts(workspace: Workspace) -> None:
    arguments = ("plan", f"--config={tiny_config(workspace)}", "--price-per-kwh=0.3")
    text = workspace.orchestrate(*arguments).succeeded().out
    assert text.endswith("cost       electricity: add --watts, what this machine draws\n")
    assert "kWh at 150 W, 0.00\n" in workspace.orchestrate(*arguments, "--watts=150").succeeded().out


def tiny_config(workspace: Workspace) -> Path:
    config = workspace.root / "tiny.yaml"
    model = "{vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_attention_heads: 4}"
    config.write_text(
        f"model: {model}\ndata: {{sequence_length: 32, batch_size: 2}}\nscheduler: {{total_steps: 100}}\n"
    )
    return config


def test_settings_that_leave_speed_on_the_table_are_named(workspace: Workspace) -> None:
    config = f"--config={tiny_config(workspace)}"
    assert plan(workspace, config)["advice"] == []
    overrides = ("data.batch_size=1", "data.sequences_per_step=8", "runtime.activation_recompute=block")
    slow = [config, *(f"--override={override}" for override in overrides)]
    text = workspace.orchestrate("plan", *slow).succeeded().out
    assert "data.batch_size is 1, and 8 sequences at a time would fit" in text
    assert "runtime.activation_recompute is block" in text
    assert len(plan(workspace, *slow)["advice"]) == 2


def test_bench_replaces_the_prediction(workspace: Workspace) -> None:
    config = tiny_config(workspace)
    predicted = plan(workspace, f"--config={config}", "--gpu=this")["speed"]
    assert predicted["source"] == "calibration"
    report = json.loads(workspace.trainer("bench", f"--config={config}", "--steps=3", "--json").succeeded().out)
    assert report["prediction"]["step_milliseconds"][0] > 0
    measured_speed = plan(workspace, f"--config={config}", "--gpu=this")["speed"]
    assert measured_speed["source"] == "bench"
    assert measured_speed["step_seconds"][0] * 1e3 == pytest.approx(report["median_step_milliseconds"])
    assert len(list((REPOSITORY / "configs").glob("*.yaml"))) == len(_native.presets())
