"""The command `orchestrate`: the pipeline when no command is given, and what one does with a run."""

from __future__ import annotations

import enum
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from orchestrator import _native, finetuning, start_screen, terminal, urls, written_files
from orchestrator.arguments import Command, Group, stopped
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.export import Format, Type
from orchestrator.options import ConfigFlag, parameter, takes, trainer_command
from orchestrator.settings import Depth, Launch, LaunchMode, PlannedPreset, Ranks, Settings, takes_settings
from orchestrator.signals import Stopped, stoppable

app = typer.Typer(
    name="orchestrate",
    cls=Group,
    help="Stream a text data set, train a tokenizer, pre-train a Llama-style model.\n\n"
    "Without a command it does all of it: resolve the data set, train the tokenizer, write the run's files, train.",
    no_args_is_help=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN, PLAN = trainer_command("train"), trainer_command("plan")
DEVICE = ConfigFlag("device", "runtime.device", panel=None)
GENERATE = trainer_command("generate")
SAMPLING = ("temperature", "top_k", "top_p", "seed")
NEWEST = "The newest intact checkpoint of an experiment."
VocabSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens in the vocabulary. Default: by the depth.")
]
ExperimentName = Annotated[str | None, typer.Option(metavar="NAME", help=NEWEST)]
ModelFolder = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A checkpoint, a run's folder, or a model in Hugging Face's format."),
]

BaseModel = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|OWNER/NAME[@REVISION]", help="The model of LoRA adapters. Default: where it was in training."
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE|chatml|qwen3", help="The chat template. Default: the model's."),
]
ShardSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The size of a file of weights at most, in hf format. Default: 5GB.")
]


@app.callback(invoke_without_command=True)
@takes_settings
def pipeline(context: typer.Context, settings: Settings) -> None:
    """Run the pipeline when no command is named."""
    if context.invoked_subcommand is None:
        from orchestrator.pipeline import run

        raise typer.Exit(run(settings))


@app.command("finetune", cls=Command)
@takes(finetuning.parameters(), finetuning.ABOUT)
def finetune(**typed: Any) -> None:
    """Train a pretrained model on conversations."""
    from orchestrator.pipeline import run

    raise typer.Exit(run(finetuning.settings(**typed)))


@app.command("train", cls=Command)
@takes(
    [*TRAIN.parameters(), parameter("launch", LaunchMode, Launch.AUTO), parameter("nproc", Ranks, None)], TRAIN.about
)
def train(launch: Launch, nproc: int | None, **typed: Any) -> None:
    """Run the trainer's `train`, in its program, in this process or in several processes."""
    from orchestrator.launch import check_ranks, start, start_ranks
    from orchestrator.paths import Roots

    if launch is Launch.NONE:
        raise CommandError("--launch none has nothing to do here: `train` trains")
    if nproc is not None:
        check_ranks(launch)
        raise typer.Exit(start_ranks(TRAIN.words(typed), nproc))
    raise typer.Exit(start(TRAIN.words(typed), launch, Roots.from_environment().target))


@app.command("plan", cls=Command)
@takes([*PLAN.optional_parameters(), parameter("preset", PlannedPreset), parameter("depth", Depth)], PLAN.about)
def plan(preset: str | None, depth: int | None, **typed: Any) -> None:
    """Run the trainer's `plan`, also of a shipped config or of a depth."""
    from orchestrator.base_config import config_file, preset_text
    from orchestrator.depth import preset as preset_of_depth

    if sum(said is not None for said in (typed["config"], preset, depth)) != 1:
        raise CommandError("say what to plan: --config FILE, --preset NAME or --depth N")
    with tempfile.TemporaryDirectory() as folder:
        name = preset or f"depth-{depth}"
        if preset is not None:
            typed["config"] = config_file(name, preset_text(preset), Path(folder))
        elif depth is not None:
            typed["config"] = config_file(name, preset_of_depth(depth), Path(folder))
        try:
            code = _run_in_the_trainer(PLAN.words(typed))
        except _native.TrainerError as error:
            # The message names the temporary file, which no longer exists when it is read.
            raise CommandError(str(error).replace(str(Path(folder, f"{name}.yaml")), name), error.exit_code) from error
        raise typer.Exit(code)


@app.command("preset", cls=Command)
@takes(
    [parameter("depth", Depth), *PLAN.parameters(["gpu", "memory"]), parameter("vocab_size", VocabSize)],
    "Write the config of `--depth N` to standard output, with the reason for each value and what the plan says of it.",
)
def preset(depth: int | None, vocab_size: int | None, **plan_options: Any) -> None:
    """Print the config of a depth."""
    from orchestrator.base_config import preset_of_depth

    if depth is None:
        raise CommandError("say how many layers: --depth N")
    terminal.result(preset_of_depth(depth, vocab_size, plan_options).rstrip("\n"))


@app.command("doctor", cls=Command)
@takes(
    [DEVICE.parameter().replace(default="auto"), *PLAN.parameters(["json"])],
    "Tell whether this machine can train: GPU, driver, libraries, programs, disk, Hub.",
)
def examine(device: str, **typed: Any) -> None:
    """Print what `doctor` finds."""
    from orchestrator import doctor
    from orchestrator.paths import Roots
    from orchestrator.screen import finding

    findings = doctor.examine(device, Roots.from_environment())
    if typed["json"]:
        terminal.result(json.dumps(doctor.as_json(findings)))
    else:
        for found in findings:
            finding(found.topic, found.text, found.verdict.value)
    problems = [found.text for found in findings if found.verdict is doctor.Verdict.BAD]
    if problems:
        raise CommandError("\n".join(["this machine cannot train on what is asked:", *problems]))


@app.command("export", cls=Command)
def export(
    experiment: ExperimentName = None,
    checkpoint: ModelFolder = None,
    format: Annotated[
        Format,
        typer.Option(
            help="gguf: a file for llama.cpp, Ollama and LM Studio. hf: a folder for transformers and vLLM. "
            "adapter: a folder of LoRA adapters for peft."
        ),
    ] = Format.GGUF,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge LoRA adapters into the weights of their model.")
    ] = False,
    base_model: BaseModel = None,
    type: Annotated[
        Type | None,
        typer.Option(help="The type of a GGUF file's matrices; q8_0 takes half of f16. Default: f16."),
    ] = None,
    max_shard_size: ShardSize = None,
    list_wanted: Annotated[
        bool,
        typer.Option("--list", help="List the LoRA adapters of the run or folder instead: step, rank, loss, base."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The file or folder. Default: NAME-TYPE.gguf or NAME-FORMAT in this folder."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is no export of this program.")
    ] = False,
) -> None:
    """Write a trained model in the format of another program."""
    from orchestrator import adapter_list
    from orchestrator.export import Request, run
    from orchestrator.exported_model import Source

    source = Source(checkpoint, experiment, base_model)
    if list_wanted:
        source.check("list")
        adapter_list.run(source)
        return
    run(Request(source, format, merge, type, max_shard_size, out, overwrite))


@app.command("chat", cls=Command)
@takes(
    [
        parameter("experiment", Annotated[str | None, typer.Argument(metavar="[EXPERIMENT]", help=NEWEST)]),
        parameter("checkpoint", ModelFolder),
        parameter("base_model", BaseModel),
        parameter("once", Annotated[str | None, typer.Option(metavar="TEXT", help="Answer this and end.")]),
        parameter("system", Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")]),
        parameter("chat_template", ChatTemplate),
        parameter("max_tokens", Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an answer.")], 1024),
        *GENERATE.parameters([*SAMPLING, "device"]),
    ],
    "Talk with a fine-tuned model.\n\nWithout a terminal each line of the input is a turn.",
)
def chat(once: str | None, system: str | None, chat_template: Path | None, max_tokens: int, **typed: Any) -> None:
    """Converse in the terminal, or answer what a script asks."""
    from orchestrator.chat import Request, run
    from orchestrator.exported_model import Source

    source = Source(typed["checkpoint"], typed["experiment"], typed["base_model"])
    sampling = {name: typed[name] for name in SAMPLING}
    run(Request(source, once, system, chat_template, typed["device"] or "auto", max_tokens, sampling))


@app.command("push", cls=Command)
def push(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; made if there is none.")],
    experiment: ExperimentName = None,
    checkpoint: ModelFolder = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make the new repository public. Default: only you can see it.")
    ] = False,
    branch: Annotated[str, typer.Option(metavar="NAME", help="The branch; made from main if there is none.")] = "main",
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="The commit's message.")] = None,
    max_shard_size: ShardSize = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Upload the model with its LoRA adapters merged. Default: the adapters.")
    ] = False,
    base_model: BaseModel = None,
) -> None:
    """Upload a trained model to the Hugging Face Hub."""
    from orchestrator.exported_model import Source
    from orchestrator.push import run

    run(repository, Source(checkpoint, experiment, base_model), merge, public, branch, message, max_shard_size)


@app.command("watch", cls=Command)
def watch(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="[EXPERIMENT]",
            help="A run: its name, its directory, or a checkpoint inside it. Default: the run that wrote last.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the run's status once, as plain text.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="With --once: print one JSON object.")] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, help="Time between two looks at the files.")
    ] = 1.0,
) -> None:
    """Show a run live, also one of another terminal or machine, from its files."""
    from orchestrator.watch.live import run

    run(experiment, once, json_wanted, interval)


class Sampler(str, enum.Enum):
    """How `tune` draws values."""

    TPE = "tpe"
    RANDOM = "random"


class Pruner(str, enum.Enum):
    """Which trials `tune` ends early."""

    MEDIAN = "median"
    HYPERBAND = "hyperband"
    NONE = "none"


@app.command("tune", cls=Command)
def tune(
    space: Annotated[Path, typer.Argument(metavar="SPACE.yaml", help="The config keys to search, with their values.")],
    experiment: Annotated[str | None, typer.Option(metavar="NAME", help="The run to vary, by its experiment.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="The run to vary, by its config.")] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="The study's folder among the runs. Default: EXPERIMENT-tune.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Trials in all, the pruned ones included.")] = 24,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Trials at a time, which share the CPU's cores.")] = 1,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens of a trial, such as 20M. Default: the config's own run.")
    ] = None,
    evaluations: Annotated[int, typer.Option(min=1, max=1000, help="Evaluations of a trial.")] = 8,
    sampler: Annotated[Sampler, typer.Option(help="How values are drawn.")] = Sampler.TPE,
    pruner: Annotated[Pruner, typer.Option(help="Which trials end early.")] = Pruner.MEDIAN,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampler.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=0, max=100, help="Seeds with which base and winner are trained afterwards.")
    ] = 3,
    final_tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Tokens of these runs. Default: the config's own run.")
    ] = None,
) -> None:
    """Search hyperparameters with Optuna; train the best ones beside the base.

    The same command continues a search that was stopped.
    """
    from orchestrator.tune.command import Request, run

    run(Request(
        space, experiment, config, study, trials, jobs, tokens, evaluations, sampler.value, pruner.value, seed, seeds,
        final_tokens,
    ))  # fmt: skip


def _add_trainer_command(name: str) -> None:
    """Add a command of the trainer, with the options that the trainer declares."""
    command = trainer_command(name)

    @app.command(name, cls=Command)
    @takes(command.parameters(), command.about)
    def run(**typed: Any) -> None:
        raise typer.Exit(_run_in_the_trainer(command.words(typed)))


for name in ("generate", "evaluate", "validate-data"):
    _add_trainer_command(name)


def main() -> None:
    """Run the command and turn every failure into a sentence and an exit code."""
    sys.exit(_run(sys.argv[1:], before=_prepare_process))


def _prepare_process() -> None:
    terminal.take_over()
    threading.excepthook = _complain_of_a_thread


def _run(arguments: list[str], before: Callable[[], None] = lambda: None) -> int:
    try:
        before()
        if not arguments:
            terminal.result(start_screen.TEXT.rstrip("\n"))
            return ExitCode.DONE
        with stoppable():
            words = _with_resume_values(arguments)
            return int(app(words, prog_name="orchestrate", standalone_mode=False) or ExitCode.DONE)
    except Stopped as end:
        return _complain(str(end), end.code)
    except CommandError as failure:
        return _complain(str(failure), failure.code)
    except TyperException as error:
        return _complain(f"{error.format_message()} (orchestrate --help lists what there is)", error.exit_code)
    except (Abort, KeyboardInterrupt):
        return _complain(str(stopped()), ExitCode.INTERRUPTED)
    except OSError as error:
        return _complain(written_files.explain(error), ExitCode.UNEXPECTED)
    except MemoryError:
        return _complain("this machine has no memory left: close other programs", ExitCode.OUT_OF_MEMORY)
    except SystemExit:
        raise
    except BaseException as error:  # PyO3's PanicException is not an Exception
        return _complain(*_explained(error))


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the message and exit code of what the trainer raised, or of a bug with its file and line."""
    if isinstance(error, _native.TrainerError):
        return str(error), error.exit_code
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"a bug, please report it: {type(error).__name__} at {where}: {error}", ExitCode.UNEXPECTED


def _complain_of_a_thread(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None:
        _complain(*_explained(failure.exc_value))


def _complain(message: str, code: int) -> int:
    terminal.complain(f"orchestrate: {urls.redacted(message)}")
    return code


def _with_resume_values(arguments: list[str]) -> list[str]:
    """Give a bare `--resume` its value: Typer has no options whose value may be left out."""
    filled = []
    for here, following in zip_longest(arguments, arguments[1:]):
        bare = here == "--resume" and (following is None or following.startswith("-") or following in COMMANDS)
        filled.append("--resume=latest" if bare else here)
    return filled


def _run_in_the_trainer(words: list[str]) -> int:
    return _native.run_command(words, terminal.write, sys.stdout.isatty())


COMMANDS = {str(command.name or command.callback.__name__) for command in app.registered_commands if command.callback}
