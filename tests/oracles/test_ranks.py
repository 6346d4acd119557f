"""Training in several processes under torchrun: one process's numbers, DistributedDataParallel's, and failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from orchestrator import RunConfig, TokenStream, Trainer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from workspace import Finished, Workspace

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
MODEL = (
    "--preset=smoke_cpu --hidden-size=32 --intermediate-size=64 --layers=2 --heads=4 --kv-heads=2 --seq-len=32 "
    "--batch-size=2 --grad-accum=4 --vocab-size=384 --learning-rate=3e-3 --warmup-steps=0 --schedule=constant "
    "--weight-decay=0.1 --log-every=1 --shuffle-buffer=64 --eval-batches=2 --device=cpu --seed=7 --steps=6 "
    "--checkpoint-every=3 --evaluate-every=3 --launch=none --experiment=template --override optimizer.algorithm=adamw "
    "--override optimizer.max_grad_norm=1.0 --override runtime.checkpoint.max_keep=10"
).split()


@pytest.fixture
def template(workspace: Workspace) -> Path:
    """A run that is prepared and not started: 8 sequences per step in 4 micro-batches."""
    workspace.orchestrate(*MODEL, "--input", workspace.write_text()).succeeded()
    return workspace.run_folder("template")


def copy_of(template: Path, name: str) -> Path:
    """Return the config of a run of this name that is prepared like the template."""
    folder = shutil.copytree(template, template.parent / name)
    return folder / "training.yaml"


def train(workspace: Workspace, config: Path, ranks: int | None, *words: str) -> Finished:
    nproc = [] if ranks is None else [f"--nproc={ranks}"]
    return workspace.orchestrate("train", f"--config={config}", *nproc, *words, timeout=120)


def rows(config: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (config.parent / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def checkpoint(config: Path, step: int) -> Path:
    return config.parent / "checkpoints" / f"step-{step:08}"


def state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights and optimizer state of a checkpoint, whatever files they are in."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        file_tensors = load_file(file)
        assert not tensors.keys() & file_tensors.keys()
        tensors |= file_tensors
    return tensors


def assert_same_state(one: Path, other: Path) -> None:
    first, second = state(one), state(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(("ranks", "algorithm"), [(2, "adamw"), (4, "adamw"), (2, "muon")])
def test_the_number_of_ranks_changes_losses_by_rounding_only(
    workspace: Workspace, template: Path, ranks: int, algorithm: str
) -> None:
    alone, config = copy_of(template, "alone"), copy_of(template, "shared")
    train(workspace, alone, None, f"--override=optimizer.algorithm={algorithm}").succeeded()
    train(workspace, config, ranks, f"--override=optimizer.algorithm={algorithm}").succeeded()
    for kind, keys in (("train", ("loss", "grad_norm")), ("evaluation", ("loss", "bits_per_byte"))):
        assert len(rows(config, kind)) == len(rows(alone, kind)) == (6 if kind == "train" else 2)
        for ours, expected in zip(rows(config, kind), rows(alone, kind), strict=True):
            for key in keys:
                assert abs(ours[key] - expected[key]) <= 1e-6 * max(1, abs(expected[key])), (kind, key)
            assert ours["tokens"] == expected["tokens"]
    assert state(checkpoint(config, 6)).keys() == state(checkpoint(alone, 6)).keys()
    parts = {file.name for file in checkpoint(config, 6).glob("optimizer*")}
    assert parts == {f"optimizer-{rank + 1:05}-of-{ranks:05}.safetensors" for rank in range(ranks)}
    AutoModelForCausalLM.from_pretrained(checkpoint(config, 6))
    workspace.orchestrate("validate-data", config.parent).succeeded()
    assert (config.parent / "ledger.jsonl").read_bytes() == (alone.parent / "ledger.jsonl").read_bytes()


def test_times_of_all_ranks_are_recorded_and_shown(workspace: Workspace, template: Path) -> None:
    config, alone = copy_of(template, "shared"), copy_of(template, "alone")
    words = ("--override=scheduler.total_steps=60", "--override=runtime.utilization_every=1s")
    output = train(workspace, config, 2, *words).succeeded().out
    assert "tokens/s  exchange " in output, output
    steps = rows(config)
    assert len(steps) == 60
    for row in steps:
        compute = row["rank_compute_seconds"]
        assert len(compute) == 2
        assert min(compute) > 0
        assert row["exchange_seconds"] > 0
        assert row["slowest_rank_seconds"] == max(compute) == compute[int(row["slowest_rank"])]
        assert row["median_rank_seconds"] == min(compute)
    parts = sum(row["rank_compute_seconds"][0] + row["exchange_seconds"] for row in steps)
    assert parts <= sum(row["step_seconds"] for row in steps), "parts of the steps of rank 0"
    for sample in rows(config, "utilization"):
        assert sample["max_rank_rss_bytes"] < sample["rss_bytes"] <= 2 * sample["max_rank_rss_bytes"]
    assert len(json.loads((config.parent / "environment.json").read_text())["hosts"]) == 2
    status = json.loads(workspace.orchestrate("watch", "shared", "--once", "--json").succeeded().out)
    assert status["ranks"]["count"] == 2
    assert sum(status["shares"].values()) == pytest.approx(1.0)
    assert status["shares"]["exchange"] > 0
    assert "slowest rank  " in workspace.orchestrate("watch", "shared", "--once").succeeded().out
    train(workspace, alone, None).succeeded()
    assert all("exchange_seconds" not in row for row in rows(alone))


def test_losses_are_those_of_distributed_data_parallel(workspace: Workspace, template: Path) -> None:
    steps, learning_rate = 20, 3e-3
    config = copy_of(template, "ours")
    resolved = RunConfig.load(copy_of(template, "start"))
    start = Trainer(resolved).save()
    batches = [batch for _, batch in zip(range(steps), TokenStream(resolved), strict=False)]
    batches_file = workspace.root / "batches.npz"
    np.savez(batches_file, inputs=np.stack([b[0] for b in batches]), targets=np.stack([b[1] for b in batches]))
    script = Path(__file__).with_name("ddp_losses.py")
    theirs = workspace.command(
        *TORCHRUN, "--nproc-per-node=2", script, start, batches_file, str(learning_rate)
    ).succeeded()
    train(workspace, config, 2, f"--override=scheduler.total_steps={steps}").succeeded()
    losses = [row["loss"] for row in rows(config)]
    np.testing.assert_allclose(losses, json.loads(theirs.out.splitlines()[-1]), atol=1e-5, rtol=0)
    assert losses[-1] < losses[0] - 0.3, "the model learns"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_is_resumed_on_any_number_of_ranks(workspace: Workspace, template: Path, ranks: int) -> None:
    bf16 = ("--override=runtime.precision=bf16", "--override=optimizer.algorithm=muon")
    straight_run, interrupted_run = copy_of(template, "straight"), copy_of(template, "stopped")
    train(workspace, straight_run, 2, *bf16).succeeded()
    train(workspace, interrupted_run, 2, *bf16, "--max-steps=3").succeeded()
    assert_same_state(checkpoint(interrupted_run, 3), checkpoint(straight_run, 3))
    train(workspace, interrupted_run, ranks, *bf16, "--resume").succeeded()
    expected = [row["loss"] for row in rows(straight_run)]
    losses = [row["loss"] for row in rows(interrupted_run)]
    assert losses[:4] == pytest.approx(expected[:4], abs=1e-6), "the first loss after it is of the saved weights"
    if ranks == 2:
        assert losses == expected
        assert_same_state(checkpoint(interrupted_run, 6), checkpoint(straight_run, 6))
    else:
        assert losses == pytest.approx(expected, abs=1e-2)


def test_loading_keeps_every_bit_of_other_ranks_state(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "saved")
    train(workspace, config, 4, "--override=runtime.precision=bf16", "--max-steps=3").succeeded()
    away = shutil.move(checkpoint(config, 3), workspace.root / "step-00000003")
    overrides = ["runtime.precision=bf16"]
    second_save = Trainer.resume(copy_of(template, "again"), overrides=overrides, checkpoint=away).save()
    assert (second_save / "optimizer.safetensors").exists()
    assert_same_state(second_save, Path(away))


def ranks_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Return the ids of the processes that a launcher has started, by their ranks."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = dict(line.partition("=")[::2] for line in (folder / "environ").read_text().split("\0"))
            session = os.getsid(int(folder.name))
        except (OSError, UnicodeDecodeError):
            continue
        if variables.get("TEST_LAUNCH") == str(launcher.args) and "RANK" in variables and session:
            processes[int(variables["RANK"])] = int(folder.name)
    return processes


def started(workspace: Workspace, *command: str | Path) -> subprocess.Popen[str]:
    workspace.extra_environment["TEST_LAUNCH"] = str([str(word) for word in command])
    return workspace.start(*command)


def until_step(process: subprocess.Popen[str], step: int) -> str:
    """Read what a run prints until it reports this step."""
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if line.startswith(f"step {step}/"):
            return output
    raise AssertionError(f"step {step} was not reached:\n{output}")


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_ranks_are_started_again_and_end_with_the_same_weights(
    workspace: Workspace, template: Path, victim: int
) -> None:
    steps = ("--override=scheduler.total_steps=400", "--override=runtime.checkpoint.every_n_steps=15")
    straight, config = copy_of(template, "straight"), copy_of(template, "killed")
    train(workspace, straight, 2, *steps).succeeded()
    command = (
        *TORCHRUN,
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "orchestrator.distributed",
        "--config",
        config,
    )
    process = started(workspace, *command, *steps)
    output = until_step(process, 20)
    os.kill(ranks_of(process)[victim], signal.SIGKILL)
    output += process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert f"rank {victim} on" in output, output
    assert "was killed" in output, output
    assert "resuming at step" in output, output
    assert [row["step"] for row in rows(config)] == list(range(1, 401))
    assert_same_state(checkpoint(config, 400), checkpoint(straight, 400))


def test_a_killed_rank_ends_the_run_with_a_sentence(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "killed")
    process = started(
        workspace, "orchestrate", "train", f"--config={config}", "--nproc=2", "--override=scheduler.total_steps=5000"
    )
    until_step(process, 5)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    assert output.count("orchestrate: ") == 1, output
    assert "rank 1 on" in output, output
    assert "Traceback" not in output, output


def test_ctrl_c_saves_and_ends_with_130(workspace: Workspace, template: Path) -> None:
    config, straight = copy_of(template, "stopped"), copy_of(template, "straight")
    steps = ("--override=scheduler.total_steps=400", "--override=runtime.checkpoint.every_n_steps=1000")
    process = workspace.start("orchestrate", "train", f"--config={config}", "--nproc=2", *steps)
    until_step(process, 3)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Traceback" not in output and "death signal" not in output, output
    last = max(int(path.name[5:]) for path in (config.parent / "checkpoints").glob("step-*"))
    assert last < 400
    train(workspace, config, 2, "--resume", *steps).succeeded()
    train(workspace, straight, 2, *steps).succeeded()
    assert_same_state(checkpoint(config, 400), checkpoint(straight, 400))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_other_signals_save_and_are_named(workspace: Workspace, template: Path, number: signal.Signals) -> None:
    config = copy_of(template, "stopped")
    steps = ("--override=scheduler.total_steps=100000", "--override=runtime.checkpoint.every_n_steps=100000")
    process = workspace.start("orchestrate", "train", f"--config={config}", "--nproc=2", *steps)
    until_step(process, 3)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143, output
    assert f"{number.name}: saving step" in output, output
    assert "Traceback" not in output, output
    assert list((config.parent / "checkpoints").glob("step-*"))


def test_what_ranks_cannot_share_is_refused(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "refused")
    for ranks, words, message in (
        (3, [], "8 sequences cannot be shared equally by 3 ranks"),
        (8, [], "4 micro-batches of 2, which 8 ranks cannot share equally"),
        (2, ["--override=model.hidden_size=-1"], "model.hidden_size"),
        (2, ["--launch=process"], "leave out --launch"),
    ):
        refused_process = train(workspace, config, ranks, *words).refused(2, message)
        assert refused_process.err.count("orchestrate: ") == 1, refused_process.err
        assert sorted(path.name for path in config.parent.iterdir()) == sorted(p.name for p in template.iterdir())
    timeout = Workspace(workspace.root, {**workspace.extra_environment, "ORCHESTRATE_RANK_TIMEOUT": "2"})
    process = train(timeout, config, 2).refused(2, "ORCHESTRATE_RANK_TIMEOUT is '2'", "at least 5")
    assert process.err.count("orchestrate: ") == 1, process.err
    flags = ("--input", workspace.write_text(), "--experiment=new", "--preset=smoke_cpu", "--nproc=3")
    workspace.command("orchestrate", *flags).refused(2, "16 sequences cannot be shared equally by 3 ranks")
    assert not workspace.run_folder("new").exists()
    usage = workspace.command(workspace.python, "-m", "orchestrator.distributed", "--help").succeeded()
    assert "--config FILE" in usage.out
    alone = workspace.command(workspace.python, "-m", "orchestrator.distributed", f"--config={config}")
    alone.refused(2, "torchrun --nproc-per-node N -m orchestrator.distributed")


def test_ranks_save_when_the_data_cannot_be_read(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "emptied")
    steps = ("--override=scheduler.total_steps=100000", "--override=runtime.evaluation.every_n_steps=null")
    process = workspace.start("orchestrate", "train", f"--config={config}", "--nproc=2", *steps)
    until_step(process, 3)
    os.truncate(workspace.root / "book.txt", 1000)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 3, output
    assert output.count("orchestrate: ") == 1, output
    assert "book.txt" in output, output
    assert checkpoint(config, int(rows(config)[-1]["step"])).exists(), "the last step is saved"


def test_a_port_in_use_is_named(workspace: Workspace, template: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        workspace.extra_environment |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        rank = workspace.command(workspace.python, "-m", "orchestrator.distributed", "--config", template)
    rank.refused(2, f"port {port}", "--master-port")


def test_the_pipeline_trains_in_several_processes(workspace: Workspace) -> None:
    flags = [flag for flag in MODEL if flag not in ("--launch=none", "--experiment=template")]
    text = workspace.write_text()
    process = workspace.orchestrate(*flags, "--experiment=run", "--input", text, "--nproc=2").succeeded()
    assert "in 2 processes of torchrun" in process.out
    assert "in 2 ranks, each with" in process.out
    assert len(workspace.losses("run")) == 6
    more = workspace.orchestrate("--experiment=run", "--resume", "--nproc=2", "--steps=8").succeeded()
    assert "--resume --nproc 2 --steps 16" in more.out
    assert len(workspace.losses("run")) == 8
    assert workspace.checkpoints("run")[-1] == "step-00000008"


def test_ranks_with_different_configs_are_refused(workspace: Workspace, template: Path) -> None:
    one, other = copy_of(template, "one"), copy_of(template, "other")
    script = (
        "import os, sys, runpy; sys.argv[1:] = ['--config', sys.argv[1 + int(os.environ['RANK'])], *sys.argv[3:]]; "
    )
    script += "runpy.run_module('orchestrator.distributed', run_name='__main__')"
    (workspace.root / "each_its_own.py").write_text(script)
    command = (*TORCHRUN, "--nproc-per-node=2", workspace.root / "each_its_own.py", one, other)
    text = other.read_text()
    assert "learning_rate: 0.003" in text
    other.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.004"))
    differ = workspace.command(*command)
    assert "optimizer.learning_rate is 0.003 on rank 0 and 0.004 on rank 1" in differ.err, differ.err
    assert differ.err.count("orchestrate: ") == 1, differ.err
    assert not (one.parent / "metrics.jsonl").exists()


def test_two_launches_of_one_run_exclude_each_other(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "run")
    words = ("orchestrate", "train", f"--config={config}", "--nproc=2", "--override=scheduler.total_steps=5000")
    process = workspace.start(*words)
    until_step(process, 1)
    train(workspace, config, 2).refused(2, "is in use by process")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
