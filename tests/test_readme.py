"""The commands of the README work as typed."""

from __future__ import annotations

import re

from workspace import REPOSITORY, TINY_MODEL, Workspace


def test_the_python_example_runs(workspace: Workspace) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    text = workspace.write_text()
    flags = [*TINY_MODEL, "--input", str(text), "--steps=4", "--experiment=first", "--launch=none"]
    workspace.orchestrate(*flags).succeeded()
    out = workspace.command(workspace.python, "-c", example).succeeded().out
    assert "parameters" in out
    assert workspace.checkpoints("first") == ["step-00000004"]
    resumed_example = example.replace("Trainer(config) ", 'Trainer.resume("runs/first") ').replace("1e-3", "2e-3")
    workspace.command(workspace.python, "-c", resumed_example).succeeded()


def test_the_commands_that_need_no_network_run(workspace: Workspace) -> None:
    workspace.write_text("my_texts/one.txt")
    workspace.write_text("my_texts/two.txt", characters=60_000)
    local = [*TINY_MODEL, "--steps=4", "--input", "my_texts/", "--experiment", "mine"]
    workspace.orchestrate(*local).succeeded()
    workspace.orchestrate("--experiment", "mine", "--resume", "--steps=6").succeeded()
    assert [row["step"] for row in workspace.metrics("mine")] == [1, 2, 3, 4, 5, 6]
    workspace.orchestrate("plan", "--config", "runs/mine/training.yaml").succeeded()
