"""The main job: resolve the flags, open the data, prepare the tokenizer, write the run's files, start the trainer."""

from __future__ import annotations

from orchestrator import (
    _native,
    experiment_tokenizer,
    flag_checks,
    launch,
    resume,
    run_files,
    run_preparation,
    run_request,
    signals,
    summary,
    tokenizer,
    training_source,
)
from orchestrator.command_error import CommandError, ExitCode
from orchestrator.paths import Roots, RunLocation, shown
from orchestrator.run_request import RunRequest
from orchestrator.screen import step
from orchestrator.settings import Launch, Settings


def run(settings: Settings) -> int:
    """Run the pipeline and return the exit code. Nothing is written before every flag has been checked."""
    roots = Roots.from_environment()
    flag_checks.check_flags(settings)
    if settings.resume is not None:
        job, location = resume.resolve(settings, settings.resume, roots)
        return _train(job, settings.launch, roots, location)
    request = run_request.resolve(settings, roots)
    folder = request.location.folder.absolute()
    with _native.RunLock(folder) as lock, signals.on_forced_exit(lock.release):
        _refuse_an_earlier_run(request)
        source = training_source.open_source(request.settings, request.base)
        ready = experiment_tokenizer.prepare(request, source)
        config = run_preparation.write_files(request, source, ready)
        run_preparation.warn_of_repeated_text(request, source, ready)
        if settings.launch is Launch.NONE:
            summary.show_prepared(config)
            return ExitCode.DONE
        job = launch.Job(
            config, time_limit=settings.time_limit, profile=settings.profile, lock=lock, ranks=settings.nproc
        )
        return _train(job, settings.launch, roots, request.location)


def _refuse_an_earlier_run(request: RunRequest) -> None:
    """Refuse a run directory with checkpoints: the trainer does too, but only after its files were rewritten.

    Checked while holding the run's lock, so that no other command can write the first checkpoint meanwhile.
    """
    if (request.checkpoints / "latest").exists():
        raise CommandError(
            f"{shown(request.checkpoints)} holds the checkpoints of an earlier run: add --resume to continue it, "
            "or give this run its own --experiment"
        )


def _train(job: launch.Job, mode: Launch, roots: Roots, location: RunLocation) -> int:
    step("training", launch.describe(job, mode, roots.target))
    try:
        if job.ranks is None:
            code = launch.start(job.words(), mode, roots.target, job.lock)
        else:
            code = launch.start_ranks(job.words(), job.ranks, job.lock)
    except _native.TrainerError as error:
        summary.suggest_settings(job, error.exit_code)
        raise
    summary.suggest_settings(job, code)
    if code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) or (code == ExitCode.DONE and summary.ran_out_of_time(job)):
        summary.show_stopped(job, location)
    elif code == ExitCode.DONE:
        summary.show_finished(job, location, tokenizer.facts(location.folder / run_files.TOKENIZER.parent))
    return code
