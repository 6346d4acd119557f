//! A run from its first step to its last: steps, evaluations, checkpoints, progress, and an orderly stop.
//!
//! The binary and the Python bindings both call [`run_training`], so a config and a seed give the same losses either way.

use dataset::hub::HubSettings;
use run_config::ResolvedRun;

use crate::{
    error::{Result, TrainerError},
    progress::{Progress, ProgressMode},
    run_options::RunOptions,
    stop::{Signal, StopSignal},
    trainer::{Step, Trainer},
    units::{bytes, grouped},
};

/// How a run ended, if not with an error. There is a checkpoint of it in either case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome {
    /// All steps are taken, the data have ended, or `max_steps` is reached.
    Finished,
    /// A signal asked for it.
    Stopped(Signal),
}

impl RunOutcome {
    /// 0, or what the signal stands for.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Stopped(signal) => signal.exit_code(),
        }
    }
}

/// Trains until the config's end, `max_steps`, or the stop signal. A checkpoint holds what was reached in each case, also
/// when the data cannot be read any further.
///
/// # Errors
/// What keeps a run from starting or from going on; an interruption ([`TrainerError::is_interruption`]) where the stop signal
/// comes before there is a trainer, which leaves nothing to save.
pub fn run_training(mut run: ResolvedRun, options: &RunOptions, stop: &StopSignal) -> Result<RunOutcome> {
    if let Some(device) = options.device {
        run.config.runtime.device = device;
    }
    if options.rebatch && options.resume.is_none() {
        let message = "--rebatch changes how a resumed run computes its steps: give it with --resume";
        return Err(TrainerError::Request(message.into()));
    }
    let trainer = start(run, options, stop)?;
    // From here on a signal is answered with a checkpoint.
    stop.mark_saves_on_stop();
    let mut session = Session::new(trainer, options.max_steps, options.progress);
    session.announce();
    let ended = session.train(stop);
    session.tell_news();
    session.note_skipped_rows();
    session.progress.finish();
    ended
}

/// Makes the trainer, and says meanwhile what that waits for.
fn start(run: ResolvedRun, options: &RunOptions, stop: &StopSignal) -> Result<Trainer> {
    let mode = if options.progress == ProgressMode::Silent { ProgressMode::Silent } else { ProgressMode::Plain };
    let hub = HubSettings::from_environment();
    let make = || Trainer::start(run, options, &hub, stop);
    Progress::new(mode, 0, None, 1).watching(|| hub.retries.longest(), make)
}

/// A trainer and what is due between its steps.
struct Session {
    trainer: Trainer,
    progress: Progress,
    max_steps: Option<u64>,
    evaluate_every: Option<u64>,
    save_every: u64,
    /// Passes over each component of the data after which the next note is due.
    next_noted_epochs: Vec<u64>,
}

impl Session {
    fn new(trainer: Trainer, max_steps: Option<u64>, progress: ProgressMode) -> Self {
        let config = &trainer.run().config;
        let last_step = config.scheduler.total_steps.into_iter().chain(max_steps).min();
        Self {
            progress: Progress::new(progress, trainer.steps_done(), last_step, config.runtime.log_every_n_steps),
            max_steps,
            evaluate_every: config.runtime.evaluation.every_n_steps,
            save_every: config.runtime.checkpoint.every_n_steps,
            next_noted_epochs: trainer.epochs_done().iter().map(|done| (done + 1).next_power_of_two()).collect(),
            trainer,
        }
    }

    fn announce(&self) {
        for note in self.trainer.notes() {
            self.progress.say(note);
        }
        let plan = self.trainer.memory_plan();
        let device = self.trainer.device();
        let gpu = device.as_cuda().map_or_else(String::new, |gpu| format!(" ({})", gpu.name()));
        self.progress.say(&format!(
            "training {} parameters on {device}{gpu} with {} threads; {} of buffers; {} tokens per step",
            grouped(plan.parameters),
            self.trainer.threads(),
            bytes(plan.bytes),
            grouped(plan.tokens_per_step),
        ));
    }

    fn train(&mut self, stop: &StopSignal) -> Result<RunOutcome> {
        loop {
            let step = self.trainer.steps_done();
            if step > 0 {
                self.do_what_is_due(step, stop)?;
            }
            self.tell_news();
            if let Some(signal) = stop.requested() {
                self.progress.say(&format!("{signal}: saving step {}", grouped(step)));
                self.save()?;
                return Ok(RunOutcome::Stopped(signal));
            }
            if self.max_steps.is_some_and(|max| step >= max) {
                self.save()?;
                return Ok(RunOutcome::Finished);
            }
            let progress = &self.progress;
            let step = self.trainer.step_unless(stop, &|waiting| progress.waiting(waiting));
            match step {
                Ok(Step::Done(report)) => {
                    self.progress.step(&report);
                    self.note_epochs();
                }
                Ok(Step::Abandoned) => {}
                Ok(Step::Finished) => return self.end(stop),
                Err(error @ TrainerError::Data(_)) => return Err(self.rescue(error)),
                Err(error) => return Err(error),
            }
        }
    }

    /// Warns of what does not hold up training.
    fn tell_news(&mut self) {
        for news in self.trainer.take_notices() {
            self.progress.say(&format!("warning: {news}"));
        }
    }

    /// Tells when data begin again, for whoever thought there were enough: the first time, the second, the fourth, ...
    fn note_epochs(&mut self) {
        for (component, done) in self.trainer.epochs_done().into_iter().enumerate() {
            if done >= self.next_noted_epochs[component] {
                let step = grouped(self.trainer.steps_done());
                let data = self.component_name(component).unwrap_or("the training text".to_owned());
                let epoch = done + 1;
                self.progress.say(&format!("step {step}: {data} is exhausted; starting epoch {epoch}"));
                self.next_noted_epochs[component] = (done + 1).next_power_of_two();
            }
        }
    }

    fn note_skipped_rows(&self) {
        for (component, skipped) in self.trainer.skipped_rows().into_iter().enumerate() {
            if skipped.total() > 0 {
                let of = self.component_name(component).map_or_else(String::new, |name| format!(" of {name}"));
                self.progress.say(&format!("rows{of} skipped: {skipped}"));
            }
        }
    }

    /// The name of a component of a mixture; none where there is but one source.
    fn component_name(&self, component: usize) -> Option<String> {
        let sources = self.trainer.mixture().sources();
        (sources.len() > 1).then(|| sources[component].describe().name)
    }

    /// A resumed run finds here what the stop kept it from.
    fn do_what_is_due(&mut self, step: u64, stop: &StopSignal) -> Result<()> {
        let finished = self.trainer.is_finished();
        if self.evaluate_every.is_some_and(|every| finished || step.is_multiple_of(every)) {
            self.evaluate(stop)?;
        }
        if finished || step.is_multiple_of(self.save_every) || self.trainer.is_best() {
            self.save()?;
        }
        Ok(())
    }

    /// The last step is taken, or the data have ended: judge and keep what came out.
    fn end(&mut self, stop: &StopSignal) -> Result<RunOutcome> {
        if self.evaluate_every.is_some() {
            self.evaluate(stop)?;
        }
        self.save()?;
        Ok(stop.requested().map_or(RunOutcome::Finished, RunOutcome::Stopped))
    }

    /// The data are gone and the weights are not: keep what was trained, for a resume.
    fn rescue(&mut self, error: TrainerError) -> TrainerError {
        if self.trainer.steps_done() > 0
            && let Err(second) = self.save()
        {
            self.progress.say(&format!("saving a checkpoint failed as well: {second}"));
        }
        error
    }

    /// Evaluates unless these very weights are evaluated already.
    fn evaluate(&mut self, stop: &StopSignal) -> Result<()> {
        if self.trainer.is_evaluated() {
            return Ok(());
        }
        let mixture = self.trainer.mixture().clone();
        let trainer = &mut self.trainer;
        let report = self.progress.watching(|| mixture.retry_status(), || trainer.evaluate_unless(stop))?;
        if let Some(report) = report {
            self.progress.evaluation(&report);
        }
        Ok(())
    }

    /// Saves unless these very weights and what is known of them are saved already.
    fn save(&mut self) -> Result<()> {
        if self.trainer.last_checkpoint().is_none() {
            let path = self.trainer.save()?;
            self.progress.checkpoint(&path);
        }
        Ok(())
    }
}
