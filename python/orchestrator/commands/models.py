"""The commands that use a trained model: generate, evaluate, chat, export, push."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.arguments import Command
from orchestrator.export import Format, Type
from orchestrator.options import add_trainer_command, parameter, takes, trainer_command

app = typer.Typer()

GENERATE = trainer_command("generate")
SAMPLING = ("temperature", "top_k", "top_p", "seed")
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="A run: its name, its directory, a checkpoint of it, its config, or any model's directory. Default: the "
        "newest run.",
    ),
]
ExperimentName = Annotated[
    str | None, typer.Option(metavar="NAME", help="The newest intact checkpoint of an experiment.")
]
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

add_trainer_command(app, "generate")
add_trainer_command(app, "evaluate")


@app.command("chat", cls=Command)
@takes(
    [
        parameter("run", Run),
        parameter("experiment", ExperimentName),
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
def chat(once: str | None, system: str | None, chat_template: Path | None, max_tokens: int, **options: Any) -> None:
    """Converse in the terminal, or answer what a script asks."""
    from orchestrator.chat import Request, sampling_settings
    from orchestrator.chat import run as converse
    from orchestrator.model_source import named_source

    sampling = sampling_settings({name: options[name] for name in SAMPLING})
    source = named_source(
        "chat with", options["run"], options["checkpoint"], options["experiment"], options["base_model"]
    )
    converse(Request(source, once, system, chat_template, options["device"] or "auto", max_tokens, sampling))


@app.command("export", cls=Command)
def export(
    run: Run = None,
    experiment: ExperimentName = None,
    checkpoint: ModelFolder = None,
    format: Annotated[
        Format | None,
        typer.Option(
            help="gguf: a file for llama.cpp, Ollama and LM Studio. hf: a folder for transformers and vLLM. "
            "adapter: a folder of LoRA adapters for peft. Default: gguf, or hf where the package gguf is not installed."
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Merge LoRA adapters into the weights of their model.")
    ] = False,
    base_model: BaseModel = None,
    type: Annotated[
        Type | None,
        typer.Option(
            metavar="TYPE",
            help="The type of a GGUF file's matrices: f32, f16, bf16, or q8_0, which takes half of f16. Default: f16.",
        ),
    ] = None,
    max_shard_size: ShardSize = None,
    is_list: Annotated[
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
    from orchestrator.export import Request, default_format
    from orchestrator.export import run as write
    from orchestrator.model_source import named_source

    source = named_source("list" if is_list else "export", run, checkpoint, experiment, base_model)
    if is_list:
        adapter_list.run(source)
        return
    write(Request(source, format or default_format(type, out), merge, type, max_shard_size, out, overwrite))


@app.command("push", cls=Command)
def push(
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository; made if there is none.")],
    run: Run = None,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files that would be uploaded, and upload nothing.")
    ] = False,
) -> None:
    """Upload a trained model to the Hugging Face Hub."""
    from orchestrator.model_source import named_source
    from orchestrator.push import preview
    from orchestrator.push import run as upload

    source = named_source("push", run, checkpoint, experiment, base_model)
    if dry_run:
        preview(repository, source, merge, max_shard_size)
        return
    upload(repository, source, merge, public, branch, message, max_shard_size)
