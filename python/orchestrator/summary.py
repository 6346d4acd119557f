"""The summary after a run: losses, a sample, where the files are, and what to type next."""

from __future__ import annotations

import math
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from orchestrator import _native
from orchestrator.command_error import ExitCode
from orchestrator.config_flags import CONFIG_FLAGS, values_of
from orchestrator.launch import Job
from orchestrator.paths import RunLocation, quoted, shown, this_command
from orchestrator.resume_flags import flat
from orchestrator.run_files import read_streaming_config
from orchestrator.screen import counted, heading, plain, warn
from orchestrator.settings import DEMO_DATASET
from orchestrator.tokenizer import Facts
from orchestrator.training_record import read_rows

SAMPLE_TOKENS = 96
FEW_STEPS = 10
COMPARED_STEPS = 20
"""Logged steps at either end of a run whose mean losses are compared, at most."""
MORE_STEPS = "Give it more steps: {flags}, or fewer sequences per step (--batch-size, --grad-accum)"
OUT_OF_PATIENCE = "evaluation has not improved"
"""The start of the trainer's reason for ending a run by `runtime.evaluation.patience`."""
OUT_OF_TIME = "stopped by the time limit"
"""The start of its reason for ending a session by `--time-limit`."""


def show_prepared(config: Path) -> None:
    """Print what to type after the files were written without training."""
    heading("Prepared, not trained. What to type next")
    path = quoted(config)
    plain(f"{this_command()} plan --config {path}   # what it needs: memory, disk, time")
    plain(f"{this_command()} train --config {path}")
    plain(f"cargo run train --config {path}    # the same, in a checkout")


def ran_out_of_time(job: Job) -> bool:
    """Whether the session ended because of its time limit."""
    if job.time_limit is None:
        return False
    rows = _metrics(_native.RunConfig.load(job.config, job.overrides).run_directory / "metrics.jsonl")
    return bool(rows) and str(rows[-1].get("reason", "")).startswith(OUT_OF_TIME)


def show_stopped(job: Job, location: RunLocation) -> None:
    """Print how to resume a run that was stopped, if it has a checkpoint."""
    checkpoints = _native.RunConfig.load(job.config, job.overrides).checkpoint_directory
    if checkpoints is None or not (checkpoints / "latest").exists():
        return
    flags = [location.flags, "--resume", *_flags_beyond_the_config(job), *_ranks(job)]
    heading("Stopped and saved. What to type to resume")
    plain(f"{this_command()} {' '.join(flags)}")


def _ranks(job: Job) -> list[str]:
    return [] if job.ranks is None else [f"--nproc {job.ranks}"]


def _flags_beyond_the_config(job: Job) -> list[str]:
    """Return the flags of a resumed session that its training.yaml does not say: the next session needs them again."""
    own, session = (flat(_native.RunConfig.load(job.config, overrides).to_dict()) for overrides in ([], job.overrides))
    names = {flag.key: flag.flag for flag in CONFIG_FLAGS}
    flags = []
    for key, value in values_of(job.overrides).items():
        if own.get(key) == session.get(key):
            continue
        is_plain = key in names and not isinstance(session.get(key), bool)
        flags.append(f"{names[key]} {quote(value)}" if is_plain else f"--override {quote(f'{key}={value}')}")
    return flags


def suggest_settings(job: Job, code: int) -> None:
    """Print what finds other settings, if the run has ended because its own do not fit or have diverged."""
    if code not in (ExitCode.OUT_OF_MEMORY, ExitCode.DIVERGED):
        return
    unstable = " --unstable" if code == ExitCode.DIVERGED else ""
    config, target = quoted(job.config), quoted(job.config.with_name("stable.yaml" if unstable else "fits.yaml"))
    has_checkpoint = (job.config.parent / "checkpoints" / "latest").exists()
    heading(
        "What could be changed, each setting with what it saves and costs" if not unstable else "What could be changed"
    )
    plain(f"{this_command()} plan --config {config}{unstable}")
    heading("The same, written as a config and trained")
    plain(f"{this_command()} plan --config {config}{unstable} --apply {target}")
    plain(f"{this_command()} train --config {target}{' --resume' if has_checkpoint else ''}")


def show_finished(job: Job, location: RunLocation, text: Facts | None) -> None:
    """Print the result of a run that reached its last step."""
    run = _native.RunConfig.load(job.config, job.overrides)
    config = run.to_dict()
    is_chat, has_adapters = config["data"]["format"] == "chat", config["lora"]["rank"] is not None
    rows = _metrics(run.run_directory / "metrics.jsonl")
    metrics = {row["kind"]: row for row in rows}
    heading("What it learnt")
    _show_losses(metrics, text)
    for doubt in doubts([row for row in rows if row["kind"] == "train"], config):
        plain(doubt)
    streaming = read_streaming_config(run.run_directory)
    prompt = "def " if streaming and streaming["dataset"] == DEMO_DATASET else ""
    if not is_chat:
        _show_sample(run, prompt)
    heading("Where it is")
    reader = "peft's" if has_adapters else "transformers'"
    plain(f"checkpoints  {shown(run.checkpoint_directory)} ({reader} from_pretrained loads them)")
    plain(f"metrics      {shown(run.run_directory / 'metrics.jsonl')}")
    logging = config["runtime"]["logging"]
    if logging["tensorboard"]:
        plain(f"TensorBoard  {logging['tensorboard_directory']}")
    heading("What to type next")
    if is_chat:
        _suggest_for_chat(location, has_adapters)
        return
    steps = metrics.get("train", {}).get("step", 0)
    plain(f"{this_command()} generate {location.typed} --prompt '{prompt or 'The '}'")
    further = f"--steps {2 * steps}"
    if str(metrics.get("end", {}).get("reason", "")).startswith(OUT_OF_PATIENCE):
        further = "--override runtime.evaluation.patience=null   # although it has stopped improving"
    plain(f"{this_command()} {' '.join([location.flags, '--resume', *_ranks(job)])} {further}")


def _suggest_for_chat(location: RunLocation, has_adapters: bool) -> None:
    """Print what one does with a model that was fine-tuned on conversations."""
    plain(f"{this_command()} chat {location.typed}")
    plain(f"{this_command()} evaluate {location.typed}")
    if has_adapters:
        plain(f"{this_command()} export {location.typed} --format adapter   # a directory for peft")
    merge = " --merge" if has_adapters else ""
    plain(f"{this_command()} export {location.typed} --format hf{merge}   # for transformers and vLLM")
    plain(f"{this_command()} export {location.typed} --format gguf{merge}   # for llama.cpp and Ollama")


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`, with NaN for a loss that was not finite, for which JSON has no number."""
    losses = ("loss", "perplexity")
    return [row | {name: math.nan for name in losses if row.get(name, "") is None} for row in read_rows(path)]


def doubts(steps: list[dict[str, Any]], config: dict[str, Any]) -> list[str]:
    """Return why a run has learnt nothing or little, and what would change that; empty for any other run.

    Args:
        steps: The lines of `metrics.jsonl` of kind `train`.
        config: The run's config.
    """
    if not steps:
        return []
    if math.isnan(steps[-1]["loss"]):
        return ["nothing: the training loss is no longer finite. Resume from an earlier checkpoint, or lower the rate"]
    last, warmup = steps[-1]["step"], config["scheduler"]["warmup_steps"]
    # Only `finetune` has --epochs.
    more_steps = MORE_STEPS.format(flags="--epochs, --steps" if config["data"]["format"] == "chat" else "--steps")
    if last < warmup:
        rate, peak = steps[-1]["learning_rate"], config["optimizer"]["learning_rate"]
        return [
            f"little or nothing: the run ended at step {last:,} of a warm-up of {counted(warmup, 'step')}, at a "
            f"learning rate of {rate:.1e} on its way to {peak:.1e}. {more_steps}, or a shorter --warmup-steps"
        ]
    if last < FEW_STEPS:
        return [f"little: {counted(last, 'step')} hardly change a model. {more_steps}"]
    step_count = min(COMPARED_STEPS, len(steps) // 2)
    if step_count:
        first, final = (fmean(row["loss"] for row in rows) for rows in (steps[:step_count], steps[-step_count:]))
        if final >= first:
            return [
                f"nothing that the training loss shows: {first:.3f} in the first {counted(step_count, 'logged step')}, "
                f"{final:.3f} in the last. {more_steps}, or another --learning-rate"
            ]
    return []


def _show_losses(metrics: dict[str, dict[str, Any]], text: Facts | None) -> None:
    train, evaluation = metrics.get("train"), metrics.get("evaluation")
    if train:
        plain(f"training loss    {train['loss']:.3f} nats per token at step {train['step']:,}")
    if evaluation:
        bits = evaluation["bits_per_byte"]
        also = f", {bits:.2f} bits per byte" if bits is not None else ""
        plain(f"validation loss  {evaluation['loss']:.3f}: perplexity {evaluation['perplexity']:,.1f}{also}")
    if text:
        plain(f"unigram entropy  {text.unigram_entropy:.3f} of this text: the loss of knowing token frequencies only")


def _show_sample(run: _native.RunConfig, prompt: str) -> None:
    heading(f"A sample, continuing {prompt!r}" if prompt else "A sample, without a prompt")
    try:
        sample = _native.generate(run.checkpoint_directory, prompt, max_tokens=SAMPLE_TOKENS, top_k=40)
    except _native.TrainerError as error:
        # The run itself has succeeded.
        warn(f"no sample: {error}")
    else:
        plain(str(sample))
