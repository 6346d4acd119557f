//! The training loop of a run: steps, evaluations, checkpoints, progress, and an orderly stop.
//!
//! The binary and the Python bindings both call [`run_training`], so a config and a seed give the same losses either
//! way.

use std::{fmt, path::PathBuf};

use dataset::hub::HubSettings;
use run_config::ResolvedRun;

use crate::{
    error::{Result, TrainerError},
    launcher::orchestrate,
    progress::{Progress, ProgressMode},
    run_options::RunOptions,
    stop::{StopReason, StopSignal},
    terminal::typed,
    trainer::{Step, Trainer},
    units::{bytes, counted, grouped},
};

/// How a run ended without an error. Its last weights are saved in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// All steps are taken, the data have ended, or `max_steps` is reached.
    Finished,
    /// A signal or the time limit asked the run to stop.
    Stopped(StopReason),
}

impl RunOutcome {
    /// Returns the exit code: 0, or that of the signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Stopped(reason) => reason.exit_code(),
        }
    }
}

/// Why a session of training ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Ending {
    /// The trainer has nothing left to do, for this reason.
    Finished(String),
    /// `max_steps` is reached.
    MaxSteps(u64),
    /// A signal or the time limit asked the run to stop.
    Stopped(StopReason),
}

impl Ending {
    fn outcome(&self) -> RunOutcome {
        match *self {
            Self::Finished(_) | Self::MaxSteps(_) => RunOutcome::Finished,
            Self::Stopped(reason) => RunOutcome::Stopped(reason),
        }
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finished(reason) => f.write_str(reason),
            Self::MaxSteps(steps) => {
                write!(f, "step {} is reached, the last of this session (--max-steps)", grouped(*steps))
            }
            Self::Stopped(reason) => write!(f, "stopped by {}", reason.name()),
        }
    }
}

/// Trains until the last step, `max_steps`, or the stop signal. Saves a checkpoint in each case, also when the data can
/// no longer be read.
///
/// # Errors
/// Anything that prevents the run from starting or continuing; an interruption ([`TrainerError::is_interruption`]) if
/// the stop signal arrives before training starts, when there is nothing to save.
pub fn run_training(mut run: ResolvedRun, options: &RunOptions, stop: &StopSignal) -> Result<RunOutcome> {
    if let Some(device) = options.device {
        run.config.runtime.device = device;
    }
    if options.rebatch && options.resume.is_none() {
        let message = "--rebatch changes how a resumed run computes its steps: give it with --resume";
        return Err(TrainerError::Request(message.into()));
    }
    if options.accept_changed_data && options.resume.is_none() {
        let message = "--accept-changed-data is about the data of a resumed run: give it with --resume";
        return Err(TrainerError::Request(message.into()));
    }
    let trainer = start(run, options, stop)?;
    // Several ranks stop only after agreeing to.
    let agreed = if options.ranks.exchange().is_some() { &StopSignal::new() } else { stop };
    // From here on a signal is answered with a checkpoint.
    stop.set_saves_on_stop();
    let mut session = Session::new(trainer, options);
    session.announce();
    let ending = session.train(agreed);
    session.print_warnings();
    session.report_skipped_rows();
    session.record_end(&ending);
    session.print_warnings();
    let profiled = session.report_profile();
    session.progress.finish();
    let outcome = ending?.outcome();
    profiled.map(|()| outcome)
}

/// Creates the trainer and reports its waits for data.
fn start(run: ResolvedRun, options: &RunOptions, stop: &StopSignal) -> Result<Trainer> {
    let is_silent = options.progress == ProgressMode::Silent || !options.ranks.rank_info().is_first();
    let mode = if is_silent { ProgressMode::Silent } else { ProgressMode::Plain };
    let hub = HubSettings::from_environment();
    let make = || Trainer::start(run, options, &hub, stop);
    Progress::new(mode, 0, None, 1).with_wait_reports(|| hub.retries.longest(), make)
}

/// A trainer with its evaluations, checkpoints and progress output.
struct Session {
    trainer: Trainer,
    progress: Progress,
    max_steps: Option<u64>,
    evaluate_every: Option<u64>,
    save_every: u64,
    /// For each mixture component, the number of epochs at which the next report is due.
    next_reported_epochs: Vec<u64>,
}

impl Session {
    fn new(trainer: Trainer, options: &RunOptions) -> Self {
        let config = &trainer.run().config;
        let last_step = options.last_step(config);
        let mode = if options.ranks.rank_info().is_first() { options.progress } else { ProgressMode::Silent };
        let steps_done = trainer.steps_done();
        let progress = Progress::new(mode, steps_done, last_step, config.runtime.log_every_n_steps);
        Self {
            progress: progress.with_stages(trainer.memory_plan().stage_costs(), trainer.stage()),
            max_steps: options.max_steps,
            evaluate_every: config.runtime.evaluation.every_n_steps,
            save_every: config.runtime.checkpoint.every_n_steps,
            next_reported_epochs: trainer.epochs_done().iter().map(|epochs| (epochs + 1).next_power_of_two()).collect(),
            trainer,
        }
    }

    fn announce(&self) {
        for note in self.trainer.notes() {
            self.progress.print(note);
        }
        if let Some(reason) = self.nothing_left() {
            self.progress.print(&format!("nothing is left to train: {reason}"));
            return;
        }
        let plan = self.trainer.memory_plan();
        let device = self.trainer.device();
        let gpu = device.as_cuda().map_or_else(String::new, |gpu| format!(" ({})", gpu.name()));
        let ranks = plan.ranks.map_or_else(String::new, |ranks| format!(" in {ranks} ranks, each"));
        let trained = match plan.trainable_parameters {
            all if all == plan.parameters => format!("{} parameters", grouped(all)),
            adapters => {
                let base = if plan.fp8_base { ", those of the blocks in fp8," } else { "" };
                format!("{} parameters of adapters beside {}{base}", grouped(adapters), grouped(plan.parameters))
            }
        };
        self.progress.print(&format!(
            "training {trained} on {device}{gpu}{ranks} with {}, {}; {} of buffers; {} tokens per step",
            counted(self.trainer.threads() as u64, "thread"),
            counted(self.trainer.data_workers() as u64, "data worker"),
            bytes(plan.bytes),
            grouped(plan.tokens_per_step_of(self.trainer.stage())),
        ));
        self.progress.print(&self.where_to_watch());
    }

    /// Returns what to type to see the run while it trains.
    fn where_to_watch(&self) -> String {
        let run = self.trainer.run();
        let watch = format!("`{} watch {}` shows this run", orchestrate(), typed(&run.run_directory));
        let logging = &run.config.runtime.logging;
        let curves = logging.tensorboard_directory.as_deref().filter(|_| logging.tensorboard);
        curves.map_or_else(
            || watch.clone(),
            |folder| format!("{watch}, `tensorboard --logdir {}` its curves", typed(folder)),
        )
    }

    /// Returns why a resumed run takes no step; None where it does.
    fn nothing_left(&self) -> Option<String> {
        let steps_done = self.trainer.steps_done();
        let at = format!("the run is at step {}", grouped(steps_done));
        if steps_done == 0 {
            return None;
        }
        if let Some(total) = self.trainer.run().config.scheduler.total_steps.filter(|total| steps_done >= *total) {
            // What a resumed session was given on its command line is not in the config.
            let more =
                if steps_done > total { "; if an earlier session was given more steps, give them again" } else { "" };
            return Some(format!("{at} and ends at step {} (scheduler.total_steps){more}", grouped(total)));
        }
        if let Some(reason) = self.trainer.finished() {
            return Some(format!("{at}, and {reason}"));
        }
        let max = self.max_steps.filter(|max| steps_done >= *max)?;
        Some(format!("{at}, and --max-steps ends this session at step {}", grouped(max)))
    }

    fn train(&mut self, stop: &StopSignal) -> Result<Ending> {
        let first = self.trainer.steps_done();
        let was_announced = self.nothing_left().is_some();
        loop {
            let step = self.trainer.steps_done();
            if step > 0 {
                self.evaluate_and_save_if_due(step, stop)?;
            } else if self.trainer.run().config.model.init_from.is_some() && self.evaluate_every.is_some() {
                self.evaluate(stop)?;
            }
            self.print_warnings();
            if let Some(reason) = stop.requested() {
                self.progress.print(&format!("{reason}: saving step {}", grouped(step)));
                self.save()?;
                return Ok(Ending::Stopped(reason));
            }
            if step > 0
                && let Some(signal) = stop.take_save_request()
            {
                self.progress.print(&format!("{signal}: saving step {}; training continues", grouped(step)));
                self.save_on_the_way()?;
            }
            if let Some(max) = self.max_steps.filter(|max| step >= *max) {
                self.save()?;
                let finished = self.trainer.finished().map(Ending::Finished);
                return Ok(finished.unwrap_or(Ending::MaxSteps(max)));
            }
            let progress = &self.progress;
            match self.trainer.step_unless(stop, &|waiting| progress.data_wait(waiting)) {
                Ok(Step::Done(report)) => {
                    self.report_stage();
                    self.progress.step(&report, self.epoch(), self.trainer.utilization());
                    self.report_epochs();
                }
                Ok(Step::Abandoned) => {}
                Ok(Step::Finished) => {
                    // That a text has no further epoch is known when its next batch is asked for.
                    if let Some(reason) = self.nothing_left().filter(|_| step == first && !was_announced) {
                        self.progress.print(&format!("nothing is left to train: {reason}"));
                    }
                    return self.end(stop);
                }
                Err(error @ (TrainerError::Data(_) | TrainerError::DataOnRank { .. })) => {
                    return Err(self.save_after_data_error(error));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the epoch that the data is in; None for a mixture, whose sources have epochs of their own.
    fn epoch(&self) -> Option<u64> {
        match self.trainer.epochs_done()[..] {
            [epochs] => Some(epochs + 1),
            _ => None,
        }
    }

    /// Prints the trainer's notices of problems that do not stop training, and its advice.
    fn print_warnings(&mut self) {
        for advice in self.trainer.take_advice() {
            self.progress.print(&format!("advice: {advice}"));
        }
        for warning in self.trainer.take_notices() {
            self.progress.print(&format!("warning: {warning}"));
        }
    }

    /// Reports that a stage begins.
    fn report_stage(&mut self) {
        if let Some(report) = self.trainer.take_stage_report() {
            self.progress.enter_stage(report.stage);
            self.progress.print(&report.to_string());
        }
    }

    /// Reports that a component starts another epoch, after 1, 2, 4, 8, ... epochs.
    fn report_epochs(&mut self) {
        for (component, epochs) in self.trainer.epochs_done().into_iter().enumerate() {
            if epochs >= self.next_reported_epochs[component] {
                let step = grouped(self.trainer.steps_done());
                let data = self.component_name(component).unwrap_or("the training text".to_owned());
                let epoch = grouped(epochs + 1);
                self.progress.print(&format!("step {step}: {data} is exhausted; starting epoch {epoch}"));
                self.next_reported_epochs[component] = (epochs + 1).next_power_of_two();
            }
        }
    }

    fn report_skipped_rows(&self) {
        let of = |component| self.component_name(component).map_or_else(String::new, |name| format!(" of {name}"));
        for (component, skipped) in self.trainer.skipped_rows().into_iter().enumerate() {
            if skipped.total() > 0 {
                self.progress.print(&format!("rows{} skipped: {skipped}", of(component)));
            }
        }
        if let files @ 1.. = self.trainer.bad_files() {
            let were = if files == 1 { "file of which rows were" } else { "files of which rows were" };
            self.progress.print(&format!("{files} {were} skipped because they are corrupted"));
        }
        let report = |what, why, counts: Vec<u64>| {
            for (component, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
                self.progress.print(&format!("{what}{} {why}: {}", of(component), grouped(count)));
            }
        };
        report("conversations", "cut to data.sequence_length", self.trainer.truncated_conversations());
        report("rows", "that spell special tokens", self.trainer.spelling_special_tokens());
        report("conversations", "with fields that are not used", self.trainer.conversations_with_unused_fields());
    }

    /// The name of a mixture component; none for a single source.
    fn component_name(&self, component: usize) -> Option<String> {
        let sources = self.trainer.mixture().sources();
        (sources.len() > 1).then(|| sources[component].describe().name)
    }

    /// Evaluates and saves if either is due after step `step`. A resumed run makes up here for what the stop prevented.
    fn evaluate_and_save_if_due(&mut self, step: u64, stop: &StopSignal) -> Result<()> {
        let finished = self.trainer.is_finished();
        if self.evaluate_every.is_some_and(|every| finished || step.is_multiple_of(every)) {
            self.evaluate(stop)?;
        }
        // The evaluation may have been the last.
        let finished = finished || self.trainer.is_finished();
        if finished {
            self.save()
        } else if step.is_multiple_of(self.save_every) || self.trainer.is_best() {
            self.save_on_the_way()
        } else {
            Ok(())
        }
    }

    /// Evaluates and saves after the last step or the end of the data.
    fn end(&mut self, stop: &StopSignal) -> Result<Ending> {
        if self.evaluate_every.is_some() {
            self.evaluate(stop)?;
        }
        self.save()?;
        let reason = || self.trainer.finished().unwrap_or_else(|| "there is nothing left to do".to_owned());
        Ok(stop.requested().map_or_else(|| Ending::Finished(reason()), Ending::Stopped))
    }

    /// Records why training ended, also by an error. An end before the last step is explained on the screen too.
    fn record_end(&mut self, ending: &Result<Ending>) {
        let total_steps = self.trainer.run().config.scheduler.total_steps;
        if let Ok(Ending::Finished(reason)) = ending
            && total_steps.is_some_and(|total| self.trainer.steps_done() < total)
        {
            self.progress.print(&format!("step {}: {reason}", grouped(self.trainer.steps_done())));
        }
        match ending {
            Ok(ending) => self.trainer.record_end(&ending.to_string(), None),
            // The files are another trainer's by now.
            Err(TrainerError::TakenOver { .. }) => {}
            Err(error) => self.trainer.record_end(&error.to_string(), Some(error.exit_code())),
        }
    }

    /// Prints where the time of the profiled steps went.
    fn report_profile(&mut self) -> Result<()> {
        let summary = self.trainer.finish_profile()?;
        summary.iter().flat_map(|text| text.lines()).for_each(|line| self.progress.print(line));
        Ok(())
    }

    /// Saves the weights for a resume when the data cannot be read.
    fn save_after_data_error(&mut self, error: TrainerError) -> TrainerError {
        if self.trainer.steps_done() > 0
            && let Err(second) = self.save()
        {
            self.progress.print(&format!("saving a checkpoint failed as well: {second}"));
        }
        error
    }

    /// Evaluates unless these weights were evaluated already.
    fn evaluate(&mut self, stop: &StopSignal) -> Result<()> {
        if self.trainer.is_evaluated() {
            return Ok(());
        }
        let mixture = self.trainer.mixture().clone();
        let trainer = &mut self.trainer;
        let report = self.progress.with_wait_reports(|| mixture.retry_status(), || trainer.evaluate_unless(stop))?;
        if let Some(report) = report {
            self.progress.evaluation(&report);
        }
        Ok(())
    }

    /// Saves unless this state was saved already.
    fn save(&mut self) -> Result<()> {
        self.save_by(|trainer| trainer.save().map(Some))
    }

    /// Saves a checkpoint that the run can do without, if it may.
    fn save_on_the_way(&mut self) -> Result<()> {
        self.save_by(Trainer::save_on_the_way)
    }

    fn save_by(&mut self, save: impl FnOnce(&mut Trainer) -> Result<Option<PathBuf>>) -> Result<()> {
        if self.trainer.last_checkpoint().is_none()
            && let Some(path) = save(&mut self.trainer)?
        {
            self.progress.checkpoint(&path);
        }
        Ok(())
    }
}
