"""The command line: wrong input, options and their values, and the text that people read."""

from __future__ import annotations

import inspect
import json
import os
import re
from typing import Any
from unittest.mock import patch

import pytest
import typer
from fake_hub import FakeHub
from orchestrator import _native, cli
from orchestrator.config_flags import CONFIG_FLAGS
from orchestrator.help_text import PANELS
from workspace import REPOSITORY, TINY_CONFIG, TINY_MODEL, Workspace


def test_wrong_flags_end_with_2_and_touch_nothing(workspace: Workspace) -> None:
    for flags in (["--heads=3", "--hidden-size=32"], ["--experiment=../up"], ["--steps=-1"], ["--no-such-flag"]):
        workspace.orchestrate("--stream", "--dataset=demo", *flags).refused(2)
    assert not (workspace.root / "runs").exists()
    assert not (workspace.root / "artifacts").exists()


def test_every_problem_of_a_config_is_reported_in_one_go(workspace: Workspace) -> None:
    config = workspace.root / "bad.yaml"
    config.write_text("optimizer: {learning_rat: 1, beta1: 2}\nmodel: {num_layers: -3}\n")
    workspace.trainer("train", "--config", config).refused(
        2, "optimizer.learning_rat", "learning_rate", "optimizer.beta1", "model.num_layers"
    )


def test_a_missing_config_is_one_sentence(workspace: Workspace) -> None:
    workspace.trainer("train", "--config", "nowhere.yaml").refused(2, "nowhere.yaml")


@pytest.mark.parametrize("preset", sorted(path.stem for path in (REPOSITORY / "configs").glob("*.yaml")))
def test_plan_prints_parameters_bytes_flops_and_disk(workspace: Workspace, preset: str) -> None:
    out = workspace.trainer("plan", "--config", REPOSITORY / "configs" / f"{preset}.yaml").succeeded().out
    for word in ("parameters", "weights", "gradients", "activations", "FLOP", "checkpoint"):
        assert word in out.lower() or word in out, out
    if preset == "rtx5090_1b":
        assert "1,318,832,128" in out


@pytest.mark.slow
def test_bench_measures_a_step_whatever_the_budget(workspace: Workspace) -> None:
    config = workspace.root / "bench.yaml"
    config.write_text(f"{TINY_CONFIG}\n")
    words = ["bench", "--json", "--config", str(config), "--override", "model.vocab_size=300", "--steps=100000000"]
    report = json.loads(workspace.trainer(*words, "--seconds=1", timeout=60).succeeded().out)
    assert 1 <= report["steps"] < 100_000_000
    assert report["tokens_per_second"] > 0
    assert report["milliseconds"]["step"] > 0
    # A step of seconds: none ends in the budget, and one is measured all the same.
    words += ["--override", "data.gradient_accumulation_steps=10000"]
    report = json.loads(workspace.trainer(*words, "--seconds=1", timeout=120).succeeded().out)
    assert report["steps"] == 1
    assert list(report["milliseconds"]) == ["step"]


def test_a_run_that_cannot_fit_is_refused_before_it_starts(workspace: Workspace) -> None:
    text = workspace.write_text()
    big = "--hidden-size=8192 --intermediate-size=32768 --layers=64 --heads=64 --kv-heads=8".split()
    workspace.orchestrate(*TINY_MODEL, *big, "--input", text, "--steps=9", "--experiment=big").refused(4, "memory")
    assert workspace.checkpoints("big") == []


def test_an_unknown_data_set_and_a_gated_one_end_with_3(hub_workspace: Workspace, hub: FakeHub) -> None:
    flags = [*TINY_MODEL, "--stream", "--experiment=none", "--steps=9"]
    hub_workspace.orchestrate(*flags, "--dataset=nobody/nothing").refused(3, "nobody/nothing")
    hub.token = "hf_needed"
    hub_workspace.orchestrate(*flags, "--dataset=HuggingFaceFW/fineweb").refused(3, "HF_TOKEN")


def test_the_token_reaches_the_endpoint_only_and_no_file(hub_workspace: Workspace, hub: FakeHub) -> None:
    hub.token = "hf_canaryCANARYcanary"
    hub_workspace.extra_environment["HF_TOKEN"] = hub.token
    flags = [*TINY_MODEL, "--stream", "--dataset=HuggingFaceFW/fineweb", "--max-samples=200", "--steps=3"]
    process = hub_workspace.orchestrate(*flags, "--experiment=secret").succeeded()
    assert hub.token not in process.out + process.err
    signed = [request for request in hub.requests if request.path.startswith("/cdn/")]
    assert signed
    assert all(request.authorization is None for request in signed)
    for path in hub_workspace.root.rglob("*"):
        assert not path.is_file() or hub.token.encode() not in path.read_bytes(), path


def test_both_programs_generate_the_same_text_for_a_seed(workspace: Workspace) -> None:
    text = workspace.write_text()
    workspace.orchestrate(*TINY_MODEL, "--input", text, "--steps=4", "--experiment=talk").succeeded()
    ask = ["generate", "--experiment=talk", "--prompt=def main", "--max-tokens=12", "--seed=3", "--json"]
    answers = [json.loads(run(*ask).succeeded().out) for run in (workspace.trainer, workspace.orchestrate)]
    for answer in answers:
        assert answer["prompt"] == "def main"
        assert answer["tokens_per_second"] > 0
    assert answers[0]["completion"] == answers[1]["completion"]
    assert answers[0]["tokens"] == answers[1]["tokens"]
    workspace.trainer("generate", "--experiment=nobody", "--prompt=x").refused(2, "nobody")


def test_help_answers_at_once_and_loads_nothing_heavy(workspace: Workspace) -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from orchestrator.cli import app; "
        "print(CliRunner().invoke(app, ['--help']).exit_code, "
        "sorted({'torch', 'datasets', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    assert workspace.command(workspace.python, "-c", script).succeeded().out.split("\n")[0] == "0 []"


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", ["", *sorted(cli.COMMANDS)])
def test_help_cuts_no_option(name: str, columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    group: Any = typer.main.get_command(cli.app)
    command = group.commands[name] if name else group
    has_more = any(parameter.name == "help_all" for parameter in command.params)
    with patch("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 24))):
        assert cli._run([*name.split(), "--help-all" if has_more else "--help"]) == 0
    help_text = capsys.readouterr().out
    assert max(map(len, help_text.splitlines())) <= columns
    for option in command.params:
        for word in option.opts:
            assert not word.startswith("-") or re.search(rf"(^|[ ,]){word}([ ,]|$)", help_text, re.MULTILINE), word


def test_help_shows_what_most_people_need(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("", "finetune"):
        assert cli._run([*name.split(), "--help"]) == 0
        short = capsys.readouterr().out
        assert cli._run([*name.split(), "--help-all"]) == 0
        every = capsys.readouterr().out
        hidden = set(re.findall(r"^  (--[a-z-]+)", every, re.MULTILINE)) - set(re.findall(r"--[a-z-]+", short))
        assert {"--shuffle-buffer", "--rebatch", "--seed"} <= hidden
        assert f"{len(hidden)} more options: orchestrate {name} --help-all".replace("  ", " ") in short
        assert {"--input", "--steps", "--resume", "--device"} <= set(re.findall(r"--[a-z-]+", short))


def test_flags_have_the_type_range_and_text_of_their_keys() -> None:
    flags = {parameter.name: parameter for parameter in typer.main.get_command(cli.app).params}
    keys = _native.json_schema()["properties"]
    for flag in CONFIG_FLAGS:
        schema: Any = {"properties": keys}
        for name in flag.key.split("."):
            schema = schema["properties"][name]
        option: Any = flags[flag.name]
        assert option.rich_help_panel == flag.panel
        assert option.opts == [flag.flag]
        assert schema["description"].startswith(option.help)
        if schema["type" if "type" in schema else "oneOf"] in ("integer", ["integer", "null"]):
            assert (option.min, option.max) == (schema["minimum"], schema["maximum"])
    panels = list(
        dict.fromkeys(option.rich_help_panel for option in flags.values() if hasattr(option, "rich_help_panel"))
    )
    assert [panel for panel in panels if panel] == list(PANELS)


def test_every_preset_is_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["preset"]) == 0
    assert capsys.readouterr().out.split() == list(_native.presets())
    for name in ("smoke_cpu", "1b"):
        assert cli._run(["preset", name]) == 0
        assert capsys.readouterr().out.strip() == _native.presets()[name].strip()
    for words in (["preset", "2b"], ["preset", "1b", "--depth=4"], ["preset", "1b", "--gpu=h100"]):
        assert cli._run(words) == 2
    assert "use one of smoke_cpu" in capsys.readouterr().err


def test_both_programs_take_the_same_options(workspace: Workspace) -> None:
    commands: Any = typer.main.get_command(cli.app)
    own = {"train": {"launch", "nproc"}, "plan": {"preset", "depth"}}
    for declaration in _native.declared_commands():
        command = commands.commands.get(declaration["name"])
        if command is not None:
            names = {parameter.name for parameter in command.params} - own.get(declaration["name"], set())
            assert names == {option["name"] for option in declaration["options"]}
    reported = [
        run("evaluate", "--experiment=none", "--max-sequences=0").err
        for run in (workspace.orchestrate, workspace.trainer)
    ]
    assert reported[0].partition(": ")[2].splitlines()[0] == reported[1].partition(": ")[2].splitlines()[0]


@pytest.mark.parametrize("function", [_native.generate, _native.Trainer.generate])
def test_generate_has_the_same_defaults_in_python(function: Any) -> None:
    [command] = [command for command in _native.declared_commands() if command["name"] == "generate"]
    declared_defaults = {
        option["name"]: option["help"].partition("[default: ")[2].rstrip("]")
        for option in command["options"]
        if "[default: " in option["help"]
    }
    keywords = [item for item in inspect.signature(function).parameters.values() if item.kind is item.KEYWORD_ONLY]
    assert {keyword.name for keyword in keywords} <= {option["name"] for option in command["options"]}
    # A flag is off by default, and its help does not say so.
    signature = {
        keyword.name: f"{keyword.default:g}" if isinstance(keyword.default, float) else str(keyword.default)
        for keyword in keywords
        if keyword.default is not False
    }
    assert signature.items() <= declared_defaults.items()
    assert {"max_tokens", "temperature", "top_k", "top_p", "seed"} <= signature.keys()
