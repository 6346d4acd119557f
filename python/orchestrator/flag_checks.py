"""Checks before anything is written: flags that contradict each other, and what this machine cannot train with."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator import _native, dataset_name, gpus, launch
from orchestrator.base_config import BaseConfig
from orchestrator.command_error import CommandError
from orchestrator.paths import Roots
from orchestrator.settings import DEMO_DATASET, Launch, Settings
from orchestrator.training_source import streamed_flags


def check_flags(settings: Settings) -> None:
    """Refuse flags that contradict each other, or that name what is no data set."""
    dataset_name.check(settings.dataset, settings.split)
    _check_data(settings)
    _check_start(settings)
    _check_tokenizer(settings)
    _check_launch(settings)


def check_machine(settings: Settings, base: BaseConfig, roots: Roots) -> None:
    """Refuse what the trainer would refuse after a tokenizer was trained: threads, a GPU, a profile, ranks."""
    values = base.values
    _native.check_threads(values["runtime"]["threads"], values["data"]["num_workers"])
    if settings.launch is not Launch.NONE:
        trainer = launch.trainer(settings.launch, roots.target) if settings.nproc is None else None
        gpus.require(values["runtime"]["device"], trainer)
    if settings.profile is not None:
        _native.check_profile(settings.profile, values["scheduler"]["total_steps"])
    sequences = values["data"]["sequences_per_step"]
    if settings.nproc is not None and sequences is not None and not values["stages"]:
        _native.check_sequences(sequences, settings.nproc)


def _check_data(settings: Settings) -> None:
    if settings.input and streamed_flags(settings):
        flags = ", ".join(streamed_flags(settings))
        raise CommandError(f"--input reads local files, and {flags} is for a streamed data set: give one or the other")
    if settings.dataset == DEMO_DATASET and (settings.revision or settings.data_config):
        raise CommandError(
            "this machine makes the data set demo itself, and there is only one: leave out --revision and --data-config"
        )


def _check_start(settings: Settings) -> None:
    starts = _present({"--config": settings.config, "--preset": settings.preset, "--depth": settings.depth})
    if len(starts) > 1:
        raise CommandError(f"{' and '.join(starts)} say what to start from: give one of them")
    if settings.depth is not None and settings.init_from is not None:
        raise CommandError("--init-from takes the model's own sizes: leave out --depth")


def _check_tokenizer(settings: Settings) -> None:
    if settings.skip_tokenizer and settings.force_retrain_tokenizer:
        raise CommandError("--skip-tokenizer and --force-retrain-tokenizer contradict each other: give one of them")
    retrains = {"--vocab-size": settings.vocab_size, "--force-retrain-tokenizer": settings.force_retrain_tokenizer}
    if settings.init_from is not None and (flags := [flag for flag, value in retrains.items() if value]):
        raise CommandError(f"--init-from trains on with the model's tokenizer: leave out {' and '.join(flags)}")


def _check_launch(settings: Settings) -> None:
    if settings.rebatch and settings.resume is None:
        raise CommandError("--rebatch changes how a resumed run computes its steps: give it with --resume")
    if settings.accept_changed_data and settings.resume is None:
        raise CommandError("--accept-changed-data is about the data of a resumed run: give it with --resume")
    if settings.nproc is not None:
        launch.check_ranks(settings.launch)
    if settings.time_limit is not None:
        _native.check_time_limit(settings.time_limit)
    trains = _present({"--resume": settings.resume, "--profile": settings.profile})
    if trains and settings.launch is Launch.NONE:
        raise CommandError(f"{trains[0]} trains and --launch none does not: give one of them")


def _present(flags: Mapping[str, object]) -> list[str]:
    """Return the flags that have a value."""
    return [flag for flag, value in flags.items() if value is not None]
