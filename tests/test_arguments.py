"""Values that every option refuses: empty, too large, not UTF-8; and Ctrl-C at the start of a command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_hub import FakeHub
from orchestrator import cli
from workspace import ORCHESTRATE, TINY_MODEL, TRAINER, Workspace

GROUP: Any = typer.main.get_command(cli.app)
COMMANDS = {"": GROUP, **GROUP.commands}
# Options of Typer itself.
NOT_OURS = {"install_completion", "show_completion", "help"}


def options(takes: str) -> list[tuple[str, str]]:
    """Return every command with each of its options that takes an integer, or of those that take any other value."""
    return [
        (name, max(parameter.opts, key=len))
        for name, command in COMMANDS.items()
        for parameter in command.params
        if parameter.opts[0].startswith("-") and not parameter.is_flag and parameter.name not in NOT_OURS
        if ("int" in parameter.bare_type() or parameter.metavar in ("N", "K", "STEP")) == (takes == "integers")
    ]


@pytest.mark.parametrize(("command", "option"), options("text"))
def test_an_empty_value_is_refused(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if option == "--prompt":
        return
    for value in ("", "  "):
        assert cli._run([*command.split(), option, value]) == 2
        assert f"{option} is empty" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("command", "option"), options("integers"))
def test_an_integer_beyond_64_bits_is_refused(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = "--config=x.yaml"
    required_arguments = {"train": [config, "--launch=bindings"], "plan": [config], "validate-data": ["x"]}.get(
        command, []
    )
    for value in (str(2**64), "-" + str(2**64), str(10**30)):
        assert cli._run([*command.split(), *required_arguments, f"{option}={value}"]) == 2
        assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --gpu", "Option '--gpu' requires an argument (`orchestrate plan --help` lists what there is)"),
        ("plan --gpus 2", "`orchestrate plan` has no option --gpus: type --ranks N"),
        ("generate demo", "--prompt <TEXT> or --prompt-file <FILE> is missing"),
        ("push", "Missing argument 'OWNER/NAME' (`orchestrate push --help` lists what there is)"),
        ("runs a", "Got unexpected extra argument(s) (a) (`orchestrate runs --help` lists what there is)"),
        ("--steps x", "Invalid value for '--steps': must be an integer (`orchestrate --help` lists what there is)"),
        (
            "export a --type q3",
            "Invalid value for '--type': 'q3' is not one of 'f32', 'f16', 'bf16', 'q8_0' (`orchestrate export --help` "
            "lists what there is)",
        ),
        (
            "finetune --lora-rank 0",
            "Invalid value for '--lora-rank': must be greater than or equal to 1 (`orchestrate finetune --help` lists "
            "what there is)",
        ),
    ],
)
def test_a_wrong_command_line_gets_one_sentence(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(words.split()) == 2
    assert capsys.readouterr().err == f"orchestrate: {message}\n"


def test_bytes_that_are_not_utf8_are_refused(workspace: Workspace) -> None:
    for program in (ORCHESTRATE, TRAINER):
        for command in (["generate", "--experiment=e", "--prompt"], ["evaluate", "--experiment=e", "--input"]):
            line = "\"$@\" $(printf 'b\\xff')"
            workspace.command("bash", "-c", line, "bash", program, *command).refused(2, "UTF-8")


def test_unset_variables_train_on_nothing(workspace: Workspace) -> None:
    workspace.write_text()
    for option in ("--input", "--dataset", "--run-dir", "--experiment", "--text-column", "--tokenizer-json"):
        workspace.orchestrate(*TINY_MODEL, "--input=book.txt", "--steps=3", option, "").refused(2, f"{option} is empty")
    workspace.orchestrate(*TINY_MODEL, "--input=book.txt", "--override", "runtime.seed=").refused(2, "runtime.seed")
    assert sorted(path.name for path in workspace.root.iterdir()) == ["book.txt"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--vocab-size=3000000000"],
        ["--vocab-size=99999999999999999999"],
        ["--layers=1000000"],
        ["--heads=1000000"],
        ["--seq-len=100000000"],
        ["--shuffle-buffer=1000000000"],
        ["--loader-workers=100000"],
        ["--batch-size=1000000000"],
        ["--grad-accum=1000000000"],
        ["--hidden-size=1000000000"],
        ["--seed=9223372036854775808"],
        ["--max-samples=18446744073709551616"],
        ["--device=foo"],
        ["--override=runtime.threads=4096"],
    ],
    ids=lambda flags: flags[0],
)
def test_absurd_sizes_are_refused(workspace: Workspace, flags: list[str]) -> None:
    workspace.write_text()
    source = ["--dataset=demo"] if "--max-samples" in flags[0] else ["--input=book.txt"]
    workspace.orchestrate(*TINY_MODEL, *source, "--steps=3", "--experiment=absurd", *flags).refused(2)
    assert workspace.checkpoints("absurd") == []


def test_missing_threads_are_reported_in_a_sentence(workspace: Workspace) -> None:
    text = str(workspace.write_text(characters=40_000))
    local = [*TINY_MODEL, "--input", text, "--steps=3"]
    workspace.orchestrate(*local, "--experiment=talk").succeeded()
    # Stacks of 16 GiB each in an address space of 64 GiB.
    few = Workspace(workspace.root, {"RUST_MIN_STACK": str(1 << 34)})
    resume = ["train", "--config=runs/talk/training.yaml", "--resume", "--override=scheduler.total_steps=5"]
    ask = ["generate", "--experiment=talk", "--prompt=x", "--max-tokens=2"]
    commands = [(ORCHESTRATE, [*local, "--experiment=few"]), (ORCHESTRATE, [*resume, "--launch=bindings"])]
    for program in (ORCHESTRATE, TRAINER):
        commands += [(program, ask), (program, ["evaluate", "--experiment=talk"]), (program, resume)]
    for program, command in commands:
        line = 'ulimit -v $((1 << 26)); exec "$@"'
        few.command("bash", "-c", line, "bash", program, *command).refused(2, "threads", "ulimit")
    assert workspace.checkpoints("talk") == ["step-00000003"]


def test_a_folder_whose_name_is_no_text_is_refused(workspace: Workspace) -> None:
    workspace.write_text()
    line = 'folder=$(printf "odd\\xff"); mkdir "$folder"; cp book.txt "$folder"; cd "$folder"; exec "$@"'
    process = workspace.command("bash", "-c", line, "bash", ORCHESTRATE, *TINY_MODEL, "--input=book.txt", "--steps=3")
    process.refused(2, "UTF-8")


def test_a_device_that_is_none_is_called_so(workspace: Workspace) -> None:
    for program in (ORCHESTRATE, TRAINER):
        workspace.command(program, "train", "--config=x.yaml", "--device=foo").refused(2, "foo", "cuda:N")
    workspace.write_text()
    for launch in ("process", "bindings"):
        flags = ["--input=book.txt", "--device=foo", f"--launch={launch}"]
        workspace.orchestrate(*flags).refused(2, "foo", "cuda:N")
    workspace.orchestrate("doctor", "--device=foo").refused(2, "foo", "cuda:N")


def test_the_demo_has_no_revision_and_no_configuration(workspace: Workspace) -> None:
    for flag in ("--revision=abc", "--data-config=sample"):
        flags = [*TINY_MODEL, "--dataset=demo", "--steps=3", "--experiment=pinned", flag]
        workspace.orchestrate(*flags).refused(2, "demo", "--revision", "--data-config")
    assert not (workspace.root / "runs").exists()


def test_ctrl_c_during_imports_ends_with_a_sentence(workspace: Workspace, tmp_path: Path) -> None:
    # A package that takes its time, in front of the real one.
    slow = tmp_path / "slow" / "typer.py"
    slow.parent.mkdir()
    slow.write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    for command in ([ORCHESTRATE], [sys.executable, "-m", "orchestrator"]):
        workspace.extra_environment["PYTHONPATH"] = str(slow.parent)
        process = workspace.start(*command, "--help")
        assert process.stdout
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "orchestrate: stopped by Ctrl-C\n"
        assert process.returncode == 130


@pytest.mark.slow
def test_the_endpoints_password_reaches_nobody_else(hub_workspace: Workspace, hub: FakeHub) -> None:
    secret = "s3cretPASSWORD"
    host = hub.endpoint.removeprefix("http://")
    hub_workspace.extra_environment["RUST_LOG"] = "trace"
    flags = [*TINY_MODEL, "--stream", "--dataset=HuggingFaceFW/fineweb", "--steps=3"]
    for number, endpoint in enumerate((host, "127.0.0.1:1", "cdn.invalid", "sl/ash@h", "")):
        hub_workspace.extra_environment["HF_ENDPOINT"] = f"http://user:{secret}@{endpoint}"
        patience = ["--override=data.network_patience=1s", "--max-samples=200", f"--experiment=e{number}"]
        for command in (["doctor"], ["doctor", "--json"], [*flags, *patience]):
            process = hub_workspace.orchestrate(*command)
            assert secret not in process.out + process.err
            assert process.code == 0 or endpoint != host or "doctor" in command, process.err
    config = hub_workspace.run_folder("e0") / "training.yaml"
    for command in (["validate-data", str(config.parent), "--replay=1"], ["evaluate", "--experiment=e0"]):
        assert secret not in hub_workspace.trainer(*command).err
    for path in hub_workspace.root.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    own = [request.authorization for request in hub.requests if request.host == host and request.authorization]
    assert own
    assert all(authorization.startswith("Basic ") for authorization in own)
    assert not any(request.authorization for request in hub.requests if request.host != host)
