"""A signal ends every command and every call from Python soon, whatever it waits for or works on."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard
from fake_hub import FakeHub
from killing import prepare
from workspace import ORCHESTRATE, TINY_CONFIG, TINY_MODEL, TRAINER, Workspace

DATASET, SAMPLES = "HuggingFaceFW/fineweb", 150
STREAM = [*TINY_MODEL, "--stream", f"--max-samples={SAMPLES}", "--steps=9", "--experiment=waits"]
# A guard against hanging: what is asked for takes a second, what was wrong took minutes.
GUARD = 20
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def silent_hub() -> Iterator[socket.socket]:
    """A Hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(120)
        yield server


IMPORTED = """
import os, signal, sys

class Interrupt:
    counted = 0

    def find_spec(self, name, path=None, target=None):
        self.counted += self.counted > 0 or name.startswith("orchestrator.")
        if self.counted == int(os.environ["INTERRUPTED_IMPORT"]):
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""
"""A `sitecustomize.py` that sends Ctrl-C as the package imports its n-th module."""


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 40, 100, 150])
@pytest.mark.parametrize("words", [["doctor"], ["train", "nothing"], ["--version"]], ids=lambda words: words[0])
@pytest.mark.parametrize("program", [[ORCHESTRATE], ["python", "-m", "orchestrator"]], ids=["script", "module"])
def test_ctrl_c_during_imports_is_one_sentence(
    workspace: Workspace, program: list[str | Path], words: list[str], count: int
) -> None:
    (workspace.root / "sitecustomize.py").write_text(IMPORTED)
    workspace.extra_environment |= {"PYTHONPATH": str(workspace.root), "INTERRUPTED_IMPORT": str(count)}
    command = [workspace.python if word == "python" else word for word in program]
    result = workspace.command(*command, *words)
    assert (result.code, result.err) == (130, "orchestrate: stopped by Ctrl-C\n")


def silent_workspace(root: Path, silent_hub: socket.socket) -> Workspace:
    return Workspace(root, {"HF_ENDPOINT": f"http://127.0.0.1:{silent_hub.getsockname()[1]}"})


def wait_until_asked(silent_hub: socket.socket) -> socket.socket:
    """Wait for a request to the silent Hub; return its connection."""
    connection, _ = silent_hub.accept()
    assert connection.recv(1)
    return connection


def wait_until(process: subprocess.Popen[str], is_there: Callable[[Path], bool]) -> None:
    """Look at what /proc says of a process until it is in a state."""
    while not is_there(Path(f"/proc/{process.pid}")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def catches_signals(process: Path) -> bool:
    caught = int((process / "status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return all(caught & 1 << (number - 1) for number in SIGNALS)


def has_open(process: Path, file: Path) -> bool:
    with contextlib.suppress(OSError):
        return file in [link.readlink() for link in (process / "fd").iterdir()]
    return False


def assert_stopped(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """Send the signal and require the exit code and the sentence that it has; return all that was printed."""
    process.send_signal(number)
    try:
        out, _ = process.communicate(timeout=GUARD)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 128 + number, out
    assert f"stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}" in out
    assert "Traceback" not in out
    assert "Stopped and saved" not in out
    return out


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("command", ["train", "evaluate", "validate-data", "orchestrate", "orchestrate validate-data"])
def test_a_silent_hub_outlasts_no_signal(
    hub_workspace: Workspace, silent_hub: socket.socket, command: str, number: signal.Signals
) -> None:
    (run,) = prepare(hub_workspace, DATASET, SAMPLES, "trained")
    config = run.folder / "training.yaml"
    hub_workspace.trainer("train", "--config", config, "--max-steps=2").succeeded()
    workspace = silent_workspace(hub_workspace.root, silent_hub)
    words: dict[str, list[str | Path]] = {
        "train": [TRAINER, "train", "--config", config, "--resume"],
        "evaluate": [TRAINER, "evaluate", "--experiment=trained"],
        "validate-data": [TRAINER, "validate-data", run.folder],
        "orchestrate": [ORCHESTRATE, *STREAM],
        "orchestrate validate-data": [ORCHESTRATE, "validate-data", run.folder],
    }
    process = workspace.start(*words[command])
    with wait_until_asked(silent_hub):
        assert_stopped(process, number)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("place", ["/tree/", "/cdn/"])
def test_the_pipeline_says_what_it_waits_for_and_stops(
    hub_workspace: Workspace, hub: FakeHub, place: str, number: signal.Signals
) -> None:
    hub.faults.add(place, "503", count=10_000)
    process = hub_workspace.start(ORCHESTRATE, *STREAM)
    assert process.stdout
    message = next((line for line in process.stdout if "waiting for the Hub" in line), "nothing")
    assert "it answered 503" in message
    out = assert_stopped(process, number)
    assert out.count("waiting for the Hub") <= 1, "not a line for each attempt"
    assert not hub_workspace.run_folder("waits").exists()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("program", [TRAINER, ORCHESTRATE])
def test_a_line_of_a_tebibyte_outlasts_no_signal(workspace: Workspace, program: Path, number: signal.Signals) -> None:
    workspace.orchestrate(*TINY_MODEL, "--input", workspace.write_text(), "--steps=3", "--experiment=made").succeeded()
    line = workspace.root / "line.jsonl.zst"
    line.write_bytes(zstandard.compress(b"x" * (64 << 20)) * (1 << 14))
    process = workspace.start(program, "evaluate", "--experiment=made", "--input", line)
    wait_until(process, lambda state: has_open(state, line))
    assert_stopped(process, number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_computes_is_ended(workspace: Workspace, number: signal.Signals) -> None:
    config = workspace.root / "training.yaml"
    config.write_text(TINY_CONFIG)
    process = workspace.start(TRAINER, "bench", "--config", config, "--steps=1000000")
    wait_until(process, catches_signals)
    assert_stopped(process, number)


# The signal may also find the interpreter before the compiled code is entered.
COMPILED = """
import hashlib
import sys
from orchestrator.signals import Stopped, stoppable
try:
    with stoppable():
        print("ready", flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
except Stopped as stopped:
    print(f"orchestrate: {stopped}", file=sys.stderr)
    sys.exit(stopped.code)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_compiled_code_that_ignores_it(workspace: Workspace, number: signal.Signals) -> None:
    process = workspace.start(workspace.python, "-c", COMPILED)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    assert_stopped(process, number)


CALLS = {
    "streaming": "_native.DataSource.streaming('HuggingFaceFW/fineweb')",
    "token_stream": "TokenStream(RunConfig.load(f'{run}/training.yaml'))",
    "new": "Trainer(RunConfig.load(f'{run}/training.yaml', ['runtime.checkpoint.directory=elsewhere']))",
    "resume": "Trainer.resume(run)",
    "evaluate": "_native.evaluate(run)",
    "validate_data": "_native.validate_data(run)",
}
CALL = """
import sys
from orchestrator import RunConfig, TokenStream, Trainer, _native
run = sys.argv[1]
try:
    {call}
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("call", CALLS)
def test_python_calls_that_list_raise_keyboard_interrupt(
    hub_workspace: Workspace, silent_hub: socket.socket, call: str
) -> None:
    (run,) = prepare(hub_workspace, DATASET, SAMPLES, "trained")
    hub_workspace.trainer("train", "--config", run.folder / "training.yaml", "--max-steps=2").succeeded()
    workspace = silent_workspace(hub_workspace.root, silent_hub)
    process = workspace.start(workspace.python, "-c", CALL.format(call=CALLS[call]), run.folder)
    with wait_until_asked(silent_hub):
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=GUARD)
    assert (process.returncode, out) == (0, "interrupted\n")


READS = {
    "documents": "next(source.documents())",
    "token_stream": "next(stream)",
    "step": "next(trainer)",
    "held_out": "trainer.evaluate()",
}
READ = """
import sys, time
from orchestrator import RunConfig, TokenStream, Trainer, _native
config = RunConfig.load(sys.argv[1], ["runtime.evaluation.every_n_steps=null"])
source = _native.DataSource.streaming("HuggingFaceFW/fineweb")
stream = TokenStream(config)
trainer = Trainer(config)
try:
    print("ready", flush=True)
    {read}
except KeyboardInterrupt:
    print("interrupted", flush=True)
while not sys.stdin.readline():
    time.sleep(0.01)
assert len(next(stream)[0]) == 8
print([next(trainer).step, trainer.evaluate().step, next(trainer).step])
"""


@pytest.mark.parametrize("read", READS)
def test_reading_from_python_is_interrupted_and_loses_nothing(
    hub_workspace: Workspace, hub: FakeHub, read: str
) -> None:
    (run,) = prepare(hub_workspace, DATASET, SAMPLES, "trained")
    empty = {"ORCHESTRATE_CACHE_ROOT": str(hub_workspace.root / "empty")}
    hub_workspace.extra_environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "2", **empty}
    hub.faults.add("/cdn/", "stall", count=10_000)
    script = hub_workspace.root / "read.py"
    script.write_text(READ.format(read=READS[read]))
    process = subprocess.Popen(
        [hub_workspace.python, str(script), str(run.folder / "training.yaml")], cwd=hub_workspace.root, text=True,
        env=hub_workspace.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    message = process.stdout.readline()
    assert message == "interrupted\n", message + process.communicate("")[0]
    hub.faults.clear()
    out, _ = process.communicate("go\n", timeout=120)
    assert json.loads(out) == [1, 1, 2], out


SAYS_WHY = """
import os, signal
from orchestrator.launch import stopping_the_trainer
with stopping_the_trainer() as stopping:
    stopping.ignored = {ignored}
    os.kill(os.getpid(), signal.SIGTERM)
    print("why it has ended")
"""


@pytest.mark.parametrize(("ignored", "code", "output"), [(True, 0, "why it has ended\n"), (False, 143, "")])
def test_a_run_that_has_failed_says_why_before_a_signal_ends_it(
    workspace: Workspace, ignored: bool, code: int, output: str
) -> None:
    """torchrun sends SIGTERM as soon as it sees that another rank has ended."""
    process = workspace.command(workspace.python, "-c", SAYS_WHY.format(ignored=ignored))
    assert (process.code, process.out) == (code, output)
