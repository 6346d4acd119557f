//! The work of a trainer between steps: evaluate, save checkpoints, generate text.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use dataset::HeldOut;
use model::SamplingSettings;
use run_config::OnSaveError;

use super::{Position, Trainer, bf16_units, execution, matmul_algorithms};
use crate::{
    checkpoint::{self, BestEvaluation, Checkpoint, CheckpointContents, Improvement, TrainerState},
    completion::{Completion, CompletionRequest, complete, generator},
    engine::Engine,
    error::{CheckpointError, Result, TrainerError},
    evaluation::Evaluator,
    report::{AdviceReport, EndReport, EvaluationReport, SampleReport},
    stop::StopSignal,
    units::grouped,
};

impl Trainer {
    /// Evaluates the current weights on the held-out text; returns None if it has no target tokens.
    pub fn evaluate(&mut self) -> Result<Option<EvaluationReport>> {
        self.evaluate_unless(&StopSignal::new())
    }

    /// Evaluates as [`Trainer::evaluate`] does, but returns None if the signal is raised before it is done.
    pub fn evaluate_unless(&mut self, stop: &StopSignal) -> Result<Option<EvaluationReport>> {
        let start = Instant::now();
        let evaluated = self.evaluate_weights(stop);
        self.observation.evaluated(start.elapsed());
        if self.ranks().exchange().is_some() {
            self.own_stop.time_limit().observe_evaluation(start.elapsed());
        }
        self.profile.span("evaluation", start);
        evaluated
    }

    fn evaluate_weights(&mut self, stop: &StopSignal) -> Result<Option<EvaluationReport>> {
        let config = &self.stage_run.config;
        let most = config.runtime.evaluation.max_batches * config.data.sequences_per_step;
        let held_out = self.data.held_out(&self.stage_run)?;
        let (pool, step) = (self.engine.pool(), self.position.step);
        let Engine { decoder, micro_batch, sharding, .. } = &mut self.engine;
        let mut evaluator = Evaluator { decoder, micro_batch, ranks: sharding.ranks(), stop };
        let report = pool.install(|| evaluator.evaluate(held_out, most, step))?;
        self.notices.extend(held_out.iter_mut().flat_map(HeldOut::take_notices));
        let Some(mut report) = report else {
            return Ok(None);
        };
        let Some(samples) = self.samples(&report, stop)? else {
            return Ok(None);
        };
        report.samples = samples;
        self.metrics.record(&report.record());
        report.samples.iter().for_each(|sample| self.metrics.record(&sample.record()));
        self.observation.evaluation(report.step, report.loss, &mut self.metrics);
        self.saved = None;
        self.position.evaluation_loss = Some(report.loss);
        if self.position.best.is_none_or(|best| report.loss < best.loss) {
            self.position.best = Some(BestEvaluation { step: report.step, loss: report.loss });
        }
        let evaluation = &self.run.config.runtime.evaluation;
        if evaluation.patience.is_some() {
            let previous = self.position.improvement;
            self.position.improvement = Improvement::after(previous, report.step, report.loss, evaluation.min_delta);
        }
        Ok(Some(report))
    }

    /// Completes the prompts of `runtime.evaluation.prompts`; returns no samples if the loss is not finite. None if the
    /// signal is raised meanwhile: the run that resumes then repeats the evaluation with its samples.
    fn samples(&mut self, report: &EvaluationReport, stop: &StopSignal) -> Result<Option<Vec<SampleReport>>> {
        let pool = self.engine.pool();
        let (prompts, tokenizer) = (&self.prompts, &self.data.tokenizer);
        match &mut self.engine.generator {
            Some(generator) if report.loss.is_finite() => {
                pool.install(|| prompts.continued(generator, tokenizer, report.step, stop))
            }
            _ => Ok(Some(Vec::new())),
        }
    }

    /// Saves a checkpoint of the current weights, and prunes old ones as configured.
    pub fn save(&mut self) -> Result<PathBuf> {
        let start = Instant::now();
        let saved = self.save_checkpoint();
        self.observation.saved(start.elapsed());
        self.own_stop.time_limit().observe_save(start.elapsed());
        self.profile.span("save", start);
        saved
    }

    /// Saves a checkpoint after which training continues. With `runtime.checkpoint.on_error: continue`, one that the disk
    /// does not take is told and recorded, and there is none: None.
    pub(crate) fn save_on_the_way(&mut self) -> Result<Option<PathBuf>> {
        match self.save() {
            Err(TrainerError::Checkpoint(error)) if self.may_continue_after(&error) => {
                self.tell_unsaved(&error);
                if self.is_best() {
                    self.position.best = self.best_saved();
                }
                Ok(None)
            }
            saved => saved.map(Some),
        }
    }

    fn may_continue_after(&self, error: &CheckpointError) -> bool {
        self.run.config.runtime.checkpoint.on_error == OnSaveError::Continue && error.is_of_disk()
    }

    /// Returns the evaluation of the checkpoint that is marked as the best, the one that later ones are compared with.
    fn best_saved(&self) -> Option<BestEvaluation> {
        let state = Checkpoint::open(&checkpoint::best(self.checkpoint_directory())?).ok()?.state().ok()?;
        Some(BestEvaluation { step: state.step, loss: state.evaluation_loss? })
    }

    fn tell_unsaved(&mut self, error: &CheckpointError) {
        let step = self.position.step;
        let saved = checkpoint::list(self.checkpoint_directory()).unwrap_or_default();
        let kept = saved.last().map_or_else(
            || "there is no checkpoint yet".to_owned(),
            |newest| format!("the newest checkpoint is {}", newest.path.display()),
        );
        let text = format!("step {} was not saved: {error}; training continues, and {kept}", grouped(step));
        self.metrics.record(&AdviceReport { step, text: text.clone() }.record());
        self.warn_once(text);
    }

    fn save_checkpoint(&mut self) -> Result<PathBuf> {
        self.check_place()?;
        self.metrics.flush();
        let state = self.state();
        let config = &self.run.config;
        let path = checkpoint::save(
            self.checkpoint_directory(),
            &CheckpointContents {
                shape: &self.shape,
                precision: config.runtime.precision,
                weights: &self.engine.decoder.weights().flat,
                optimizer: self.engine.optimizer.state(),
                tokenizer: &self.tokenizer_files,
                state: &state,
                base: self.base.as_ref(),
                ranks: self.ranks(),
            },
        )?;
        if self.ranks().rank_info().is_first() {
            self.mark_best_and_prune(&path)?;
        }
        self.saved = Some(path.clone());
        Ok(path)
    }

    /// Marks the latest checkpoint as the best if it is, and prunes old ones as configured. Idempotent, so that a
    /// resume can complete what a kill interrupted.
    pub(super) fn mark_best_and_prune(&mut self, latest: &Path) -> Result<()> {
        let runtime = &self.run.config.runtime;
        let best = &runtime.evaluation.best;
        let mut unremovable = Vec::new();
        if self.is_best() {
            checkpoint::mark_best(self.checkpoint_directory(), latest)?;
            if let Some(directory) = best.directory.as_deref().filter(|folder| *folder != self.checkpoint_directory()) {
                unremovable.extend(checkpoint::keep_best_in(directory, latest, best.max_keep)?.unremovable);
            }
        }
        let keep_best = if best.directory.is_none() { best.max_keep } else { 0 };
        let pruned = checkpoint::prune(self.checkpoint_directory(), runtime.checkpoint.max_keep, keep_best)?;
        for error in unremovable.into_iter().chain(pruned.unremovable) {
            self.warn_once(format!("{error}; it is kept, and training continues"));
        }
        Ok(())
    }

    fn warn_once(&mut self, warning: String) {
        if self.issued_warnings.insert(warning.clone()) {
            self.notices.push(warning);
        }
    }

    /// Records why training ends, as the last record of the metrics.
    pub fn record_end(&mut self, reason: &str, exit_code: Option<u8>) {
        let end = EndReport { step: self.position.step, reason: reason.to_owned(), exit_code };
        self.metrics.record(&end.record());
        self.metrics.flush();
        self.notices.extend(self.metrics.unwritten().into_iter().chain(self.ledger.unwritten()));
    }

    /// Continues a prompt with the current weights; an empty prompt starts a new text.
    pub fn generate(&self, prompt: &str, max_tokens: usize, settings: &SamplingSettings) -> Result<Completion> {
        self.generate_unless(prompt, max_tokens, settings, &StopSignal::new())
    }

    /// Continues a prompt as [`Trainer::generate`] does, unless the signal is raised before the last token.
    pub fn generate_unless(
        &self,
        prompt: &str,
        max_tokens: usize,
        settings: &SamplingSettings,
        stop: &StopSignal,
    ) -> Result<Completion> {
        let tokenizer = &self.data.tokenizer;
        let tokens = tokenizer.encode_prompt(prompt)?;
        let stop_tokens = &[tokenizer.end_of_text()];
        let (shape, weights) = (&self.shape, self.engine.decoder.weights().clone());
        self.engine.pool().install(|| {
            let mut generator = generator(shape, &weights, tokens.len().saturating_add(max_tokens))?;
            let request = CompletionRequest {
                prompt,
                prompt_tokens: &tokens,
                cached_tokens: 0,
                max_tokens,
                stop_tokens,
                settings,
            };
            let completion = complete(&mut generator, tokenizer, &request, |_| stop.flow())?;
            stop.check().map(|()| completion)
        })
    }

    fn state(&mut self) -> TrainerState {
        let ledger = self.ledger.head();
        let Position { step, stage, tokens, cursor, evaluation_loss, best, improvement, .. } = &self.position;
        TrainerState {
            format_version: checkpoint::FORMAT_VERSION,
            step: *step,
            stage: *stage as u64,
            tokens: *tokens,
            cursor: serde_json::to_value(cursor).expect("a cursor is plain numbers and text"),
            seed: self.run.config.runtime.seed,
            fingerprint: self.fingerprint.clone(),
            evaluation_loss: *evaluation_loss,
            best: *best,
            improvement: *improvement,
            execution: Some(execution::from_plan(&self.plan)),
            matmul_algorithms: matmul_algorithms::capture(self.engine.device()),
            bf16_units: bf16_units::of(self.engine.device(), self.run.config.runtime.precision),
            ledger,
        }
    }
}
