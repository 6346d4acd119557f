"""Ranks that are killed, stopped or out of memory: who is named, how soon the others end, and what a restart gives.

Runs that are disturbed have more steps than they can take: at the end they are asked to save, and a run that nothing
has disturbed is trained up to that step.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from orchestrator import RunConfig, memory_plan
from orchestrator.distributed.heartbeat import RunningClock
from orchestrator.distributed.launcher import shutdown_seconds
from test_ranks import (
    TORCHRUN,
    assert_same_state,
    checkpoint,
    copy_of,
    ranks_of,
    rows,
    started,
    template,
    train,
    until_step,
)  # fmt: skip
from torch.distributed import TCPStore
from workspace import REPOSITORY, Workspace

__all__ = ["template"]
LONG = ("--override=scheduler.total_steps=1000000", "--override=runtime.evaluation.every_n_steps=null")
RANK_TIMEOUT = 10
PROCESS = re.compile(r"rank (\d) is process (\d+)")


def assert_continued(workspace: Workspace, template: Path, config: Path) -> None:
    """Check that a stopped run equals, at its last step, a run that nothing has disturbed."""
    last = int(rows(config)[-1]["step"])
    straight = copy_of(template, "straight")
    train(
        workspace, straight, 2, *LONG, "--override=runtime.checkpoint.every_n_steps=1000", f"--max-steps={last}"
    ).succeeded()
    assert [row["step"] for row in rows(config)] == list(range(1, last + 1))
    assert [row["loss"] for row in rows(config)] == [row["loss"] for row in rows(straight)]
    assert_same_state(checkpoint(config, last), checkpoint(straight, last))


def save_and_end(launcher: subprocess.Popen[str]) -> str:
    launcher.send_signal(signal.SIGTERM)
    return launcher.communicate(timeout=120)[0]


def test_ranks_killed_twenty_times_lose_nothing(workspace: Workspace, template: Path) -> None:
    """A moment is a line that the launch prints: the start of a rank, a note, a step, a checkpoint."""
    config = copy_of(template, "killed")
    draw = random.Random(20)
    script = Path(__file__).with_name("forked_ranks.py")
    words = ("--config", config, *LONG, "--override=runtime.checkpoint.every_n_steps=2")
    launcher = workspace.start(sys.executable, script, "20", *words)
    assert launcher.stdout is not None
    output, reported_deaths = "", 0
    for kill in range(20):
        victim, moment = kill % 2, draw.randrange(24)
        processes: dict[int, int] = {}
        for line in launcher.stdout:
            output += line
            starting = PROCESS.match(line)
            processes |= {int(starting[1]): int(starting[2])} if starting else {}
            moment -= 1
            if moment < 0 and len(processes) == 2:
                break
        os.kill(processes[victim], signal.SIGKILL)
    output += until_step(launcher, int(rows(config)[-1]["step"]) + 3)
    output += save_and_end(launcher)
    reported_deaths = len(
        re.findall(r"^orchestrate: rank \d on \S+: process \d+ has ended without a word", output, re.M)
    )
    assert reported_deaths >= 5, output
    assert output.count("orchestrate: ") == reported_deaths, output
    assert_continued(workspace, template, config)


def test_a_stopped_rank_is_named_killed_and_started_again(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "stopped")
    workspace.extra_environment["ORCHESTRATE_RANK_TIMEOUT"] = str(RANK_TIMEOUT)
    words = ("--nproc-per-node=2", "--max-restarts=2", "-m", "orchestrator.distributed", "--config", config, *LONG)
    launcher = started(workspace, *TORCHRUN, *words)
    output = until_step(launcher, 5)
    for victim in (1, 0):
        process = ranks_of(launcher)[victim]
        os.kill(process, signal.SIGSTOP)
        output += until_line(launcher, "resuming at step")
        message = f"process {process} has not answered for {RANK_TIMEOUT} seconds and was killed"
        assert re.search(rf"^orchestrate: rank {victim} on \S+: {message}", output, re.M), output
        output += until_step_after(launcher, 3)
    output += save_and_end(launcher)
    assert output.count("orchestrate: ") == 2, output
    assert_continued(workspace, template, config)


def test_the_rank_that_serves_the_store_may_be_killed(workspace: Workspace, template: Path) -> None:
    """torchrun serves no store here, so after the kill the ranks cannot tell each other anything."""
    config = copy_of(template, "killed")
    workspace.extra_environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = ("--nproc-per-node=2", "--max-restarts=1", "-m", "orchestrator.distributed", "--config", config, *LONG)
    launcher = started(workspace, *TORCHRUN, *words)
    output = until_step(launcher, 5)
    os.kill(ranks_of(launcher)[0], signal.SIGKILL)
    output += until_line(launcher, "resuming at step")
    assert re.search(r"^orchestrate: rank 0 on \S+: process \d+ has ended without a word", output, re.M), output
    output += until_step_after(launcher, 3)
    output += save_and_end(launcher)
    assert output.count("orchestrate: ") == 1, output
    assert_continued(workspace, template, config)


LATE = """
import os, runpy
from orchestrator.distributed import heartbeat
if os.environ["RANK"] == "0":
    heartbeat.PATIENCE += 1.0
runpy.run_module("orchestrator.distributed", run_name="__main__")
"""


def test_ranks_do_not_outlive_torchrun(workspace: Workspace, template: Path) -> None:
    """Rank 0, which is to say why, is two seconds later than rank 1, and does not take that one for the reason."""
    config = copy_of(template, "orphaned")
    script = workspace.root / "late.py"
    script.write_text(LATE)
    launcher = workspace.start(*TORCHRUN, "--nproc-per-node=2", script, "--config", config, *LONG)
    output = until_step(launcher, 5)
    launcher.kill()
    output += launcher.communicate(timeout=120)[0]  # until the ranks have closed it too
    assert re.search(r"^orchestrate: rank 0 on \S+: the store of torchrun at \S+ is gone", output, re.M), output
    assert output.count("orchestrate: ") == 1, output
    train(workspace, config, 2, *LONG, "--resume", f"--max-steps={int(rows(config)[-1]['step']) + 1}").succeeded()


def until_line(process: subprocess.Popen[str], start: str) -> str:
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if line.startswith(start):
            return output
    raise AssertionError(f"{start!r} was not printed:\n{output}")


def until_step_after(process: subprocess.Popen[str], steps: int) -> str:
    return "".join(until_line(process, "step ") for _ in range(steps))


WAITS = """
import os, runpy
from orchestrator.distributed.exchange import TorchExchange
connect = TorchExchange.connect
def connect_after_reading(exchange):
    if exchange.rank == 1:
        open(os.environ["PIPE"]).read()
    connect(exchange)
TorchExchange.connect = connect_after_reading
runpy.run_module("orchestrator.distributed", run_name="__main__")
"""


def test_a_rank_that_is_busy_is_not_taken_for_hung(workspace: Workspace, template: Path) -> None:
    """Rank 1 is kept busy until it has shown three times as long as the timeout that it is alive."""
    config = copy_of(template, "busy")
    script, pipe = workspace.root / "waits.py", workspace.root / "pipe"
    script.write_text(WAITS)
    os.mkfifo(pipe)
    workspace.extra_environment |= {"ORCHESTRATE_RANK_TIMEOUT": "5", "PIPE": str(pipe)}
    launcher = started(workspace, *TORCHRUN, "--nproc-per-node=2", script, "--config", config)
    with pipe.open("w"):  # opens once rank 1 reads
        variables = Path(f"/proc/{ranks_of(launcher)[1]}/environ").read_text().split("\0")
        port = next(word.partition("=")[2] for word in variables if word.startswith("MASTER_PORT="))
        store = TCPStore("localhost", int(port), is_master=False)
        beat = f"orchestrator/{store.get('orchestrator/attempt').decode()}/beat/1"
        while int(store.get(beat)) < 3 * 5 / 0.5:
            assert launcher.poll() is None
    output = launcher.communicate(timeout=120)[0]
    assert launcher.returncode == 0, output
    assert "orchestrate: " not in output, output


def test_a_rank_that_gets_no_memory_is_named(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "out-of-memory")
    launcher = started(workspace, "orchestrate", "train", f"--config={config}", "--nproc=2", *LONG)
    output = until_step(launcher, 5)
    resource.prlimit(ranks_of(launcher)[1], resource.RLIMIT_AS, (1, 1))
    output += launcher.communicate(timeout=120)[0]
    assert launcher.returncode in (1, 4), output
    message = r"(it has run out of memory|process \d+ has ended without a word: it was killed, or the machine ran out)"
    assert len(re.findall(rf"^orchestrate: rank 1 on \S+: {message}", output, re.M)) == 1, output
    assert output.count("orchestrate: ") == 1, output


LIMITED = """
import os, re, resource, runpy
from orchestrator.distributed import exchange
if os.environ["RANK"] == "1":
    size = int(re.search(r"VmSize:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, size + 2**30))
runpy.run_module("orchestrator.distributed", run_name="__main__")
"""


def test_a_rank_whose_machine_is_too_small_is_named(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "too-large")
    (workspace.root / "limited.py").write_text(LIMITED)
    size = ("model.hidden_size=1024", "model.intermediate_size=8192", "model.num_layers=8")
    words = [f"--override={key}" for key in size]
    command = (*TORCHRUN, "--nproc-per-node=2", workspace.root / "limited.py", "--config", config, *words)
    process = workspace.command(*command)
    assert len(re.findall(r"^orchestrate: rank 1 on \S+: .*address space", process.err, re.M)) == 1, process.err
    assert process.err.count("orchestrate: ") == 1, process.err
    assert "exitcode  : 4" in process.err, process.err
    assert not (config.parent / "metrics.jsonl").exists()


def test_a_pytorch_without_gloo_is_refused_once(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "without-gloo")
    script = "import runpy, torch.distributed as dist; dist.is_gloo_available = lambda: False; "
    script += "runpy.run_module('orchestrator.distributed', run_name='__main__')"
    (workspace.root / "without_gloo.py").write_text(script)
    command = (*TORCHRUN, "--nproc-per-node=2", workspace.root / "without_gloo.py", "--config", config)
    process = workspace.command(*command)
    assert process.err.count("orchestrate: ") == 1, process.err
    assert "has no gloo" in process.err
    assert "exitcode  : 2" in process.err, process.err
    assert sorted(path.name for path in config.parent.iterdir()) == sorted(path.name for path in template.iterdir())


OLDER = """
import os, re, runpy
from orchestrator.distributed.exchange import TorchExchange
gather = TorchExchange.gather
if os.environ["RANK"] == "1":
    older = lambda text: re.sub('"the version":"[^"]+"', '"the version":"0.0.1"', text)
    TorchExchange.gather = lambda exchange, text: gather(exchange, older(text))
runpy.run_module("orchestrator.distributed", run_name="__main__")
"""


def test_ranks_of_different_versions_are_refused_once(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "versions")
    (workspace.root / "older.py").write_text(OLDER)
    process = workspace.command(*TORCHRUN, "--nproc-per-node=2", workspace.root / "older.py", "--config", config)
    assert re.search(r"^orchestrate: .*the version is \S+ on rank 0 and \"0.0.1\" on rank 1", process.err, re.M), (
        process.err
    )
    assert process.err.count("orchestrate: ") == 1, process.err
    assert "exitcode  : 2" in process.err, process.err
    assert not (config.parent / "metrics.jsonl").exists()


def test_a_missing_network_interface_is_refused_once(workspace: Workspace, template: Path) -> None:
    workspace.extra_environment["GLOO_SOCKET_IFNAME"] = "nowhere0"
    config = copy_of(template, "nowhere")
    process = train(workspace, config, 2).refused(2, "GLOO_SOCKET_IFNAME asks for the network interface nowhere0")
    assert process.err.count("orchestrate: ") == 1, process.err


def test_a_rank_killed_while_it_starts_is_named(workspace: Workspace, template: Path) -> None:
    """The other rank is told to end while it waits for this one."""
    config = copy_of(template, "killed")
    (workspace.root / "sitecustomize.py").write_text(
        "import os, signal\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    own = str(workspace.root)
    workspace.extra_environment["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    process = train(workspace, config, 2)
    process.refused(1, "orchestrate: rank 1: process ", "was ended by SIGKILL")
    assert process.err.count("orchestrate: ") == 1, process.err


def test_a_restart_does_not_resume_what_was_refused(workspace: Workspace, template: Path) -> None:
    config = copy_of(template, "finished")
    train(workspace, config, None, "--max-steps=3").succeeded()
    words = ("--nproc-per-node=2", "--max-restarts=1", "-m", "orchestrator.distributed", "--config", config)
    process = workspace.command(*TORCHRUN, *words)
    assert process.err.count("already holds checkpoints, the newest of step 3") == 2, process.err
    assert len(rows(config)) == 3


def test_a_stop_leaves_time_to_save_the_plan() -> None:
    config = REPOSITORY / "configs" / "rtx5090_1b.yaml"
    plan = memory_plan(RunConfig.load_for_planning(config))
    assert plan.bytes > 20e9
    at_50_megabytes_per_second = plan.bytes / 50e6
    assert shutdown_seconds([f"--config={config}"]) == 60 + int(at_50_megabytes_per_second)
    assert shutdown_seconds(["--config=nowhere.yaml"]) == 60


def test_a_pause_of_this_process_is_no_silence_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a pause is that between Ctrl-Z and `fg`, or of a laptop that is closed and opened again."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = RunningClock()
    counted = []
    for seconds in (0.5, 0.6, 3600.0, 0.5):
        now += seconds
        counted.append(clock.seconds())
    assert counted == pytest.approx([0.5, 1.1, 2.1, 2.6])


@pytest.mark.parametrize("value", ["0", "soon", "inf"])
def test_a_wrong_timeout_is_refused(workspace: Workspace, template: Path, value: str) -> None:
    workspace.extra_environment |= {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1",
        "ORCHESTRATE_RANK_TIMEOUT": value,
    }  # fmt: skip
    rank = workspace.command(workspace.python, "-m", "orchestrator.distributed", "--config", template)
    rank.refused(2, f"ORCHESTRATE_RANK_TIMEOUT is '{value}'", "at least 5")
