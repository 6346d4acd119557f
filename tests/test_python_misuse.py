"""Whatever the Python API is called with, it answers or raises an error of its own, a ValueError or a TypeError."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from orchestrator import RunConfig, TokenStream, Trainer, TrainerError, _native, generate, logits, memory_plan
from workspace import TINY_MODEL, Workspace

EXPECTED = (TrainerError, ValueError, TypeError)
NUMBERS: list[Any] = [
    -1, 0, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 10**30, 1.5, 1e308, float("nan"), float("inf"),
    True, None, "3", b"3", [], {}, [[]],
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "\0", "a\0b", "\udcff", "x" * 100_000, "..", "/nonexistent/x.yaml", "/dev/null", "/proc/self/mem",
    "a\x1b]0;b", 3, 1.5, None, b"x", [], {}, Path(),
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A trained run, its folder the current one, whose parent holds nothing else."""
    root = tmp_path_factory.mktemp("parent") / "run"
    root.mkdir()
    workspace = Workspace(root)
    workspace.write_text(characters=30_000)
    flags = [*TINY_MODEL, "--input=book.txt", "--steps=3", "--experiment=misused"]
    workspace.orchestrate(*flags).succeeded()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.root)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("ORCHESTRATE_CACHE_ROOT", str(workspace.root / "cache"))
        yield workspace.run_folder("misused")


def survive(call: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
    """Call, and accept an answer or an expected error that is no panic."""
    try:
        call(*arguments, **keywords)
    except EXPECTED as error:
        assert "internal error" not in str(error), (arguments, keywords, error)


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_of_any_kind_are_survived(run: Path, value: Any) -> None:
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
        survive(generate, run, "x", **{"max_tokens": 2, name: value})
    survive(logits, run, [value])
    survive(logits, run, value)
    survive(_native.evaluate, run, ["book.txt"], "text", value)
    survive(_native.validate_data, run, [value])
    survive(_native.run_command, ["train", "--config=nowhere.yaml", f"--max-steps={value}"], print)
    survive(_native.check_threads, value, 1)
    survive(_native.check_threads, 1, value)
    source = _native.DataSource.local(["book.txt"])
    survive(lambda: next(source.documents(value), None))
    survive(lambda: next(_native.DataSource.mixture([(source, value), (source, 1.0)]).documents(2), None))


@pytest.mark.parametrize("value", TEXTS, ids=lambda value: repr(value)[:20])
def test_texts_and_paths_of_any_kind_are_survived(run: Path, value: Any) -> None:
    config = RunConfig.load(run / "training.yaml")
    of_a_run = (RunConfig.load, RunConfig.load_for_planning, Trainer, Trainer.resume, TokenStream, memory_plan)
    of_data = (_native.DataSource.streaming, _native.DataSource.local, _native.DataSource.mixture)
    commands = (_native.evaluate, _native.validate_data, _native.open_device)
    texts = (_native.parse_config, _native.config_to_yaml)
    for function in (*of_a_run, *of_data, *commands, *texts):
        survive(function, value)
    survive(RunConfig.load, run / "training.yaml", [value])
    survive(RunConfig.load, run / "training.yaml", value)
    survive(generate, value, "x")
    survive(generate, run, value, max_tokens=2)
    survive(generate, run, "x", max_tokens=2, device=value)
    survive(logits, value, [1])
    survive(_native.evaluate, run, [value])
    survive(_native.evaluate, run, ["book.txt"], value)
    survive(_native.run_command, value, print)
    survive(_native.run_command, ["evaluate", "--checkpoint", value], print)
    survive(_native.DataSource.local, [value])
    survive(_native.DataSource.streaming, "a/b", value, value, value)
    survive(_native.parse_config, "model: {}", value)
    survive(Trainer.resume, run, [value])
    survive(TokenStream, config, state=value)


def test_states_of_any_kind_are_survived(run: Path) -> None:
    config = RunConfig.load(run / "training.yaml")
    state = TokenStream(config).state()
    for path in places(state):
        for value in NUMBERS:
            survive(read_on, config, with_part(state, path, value))


def test_values_nested_too_deeply_are_a_value_error() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="deep"):
        _native.config_to_yaml(nested)


@pytest.mark.parametrize("value", [-1, 2**64, 10**30])
def test_an_integer_out_of_range_is_a_value_error(run: Path, value: int) -> None:
    write: Callable[..., object] = generate
    for name in ("max_tokens", "top_k", "seed"):
        with pytest.raises(ValueError, match="must be from 0 to"):
            write(run, "x", **{name: value})
    with pytest.raises(ValueError, match="must be from 0 to 4294967295"):
        logits(run, [value])


def test_a_trainer_survives_what_it_is_asked(run: Path) -> None:
    trainer = Trainer.resume(run, ["scheduler.total_steps=6"])
    for value in NUMBERS:
        for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"):
            survive(trainer.generate, "x", **{"max_tokens": 2, name: value})
    for value in TEXTS:
        survive(trainer.generate, value, max_tokens=2)
    assert next(trainer).step == 4


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to everything in a value of dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


def with_part(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """Return a copy of the value with another part at a path."""
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = part
    return value


def read_on(config: RunConfig, state: Any) -> None:
    """Read two batches from a state."""
    stream = TokenStream(config, state=state)
    next(stream, None)
    next(stream, None)
    stream.state()
