//! A run's data, opened where training starts.

use dataset::{CancelToken, ChatSettings, ConversationEncoder, Tokenizer, hub::HubSettings};
use run_config::ResolvedRun;

use super::{changed_data::ChangedData, planned_run::PlannedRun};
use crate::{
    checkpoint::TokenizerFiles,
    config_fingerprint::{self, ConfigFingerprint},
    error::Result,
    pool,
    trainer::data::{Data, DataPlan, cursor_of},
    workers::TokenSpeeds,
};

/// The open data of a run, and what is derived from it.
pub(super) struct OpenedData {
    pub(super) data: Data,
    /// The run with the settings of the stage that it starts in.
    pub(super) stage_run: ResolvedRun,
    /// The tokenizer's files that checkpoints keep.
    pub(super) tokenizer_files: TokenizerFiles,
    pub(super) fingerprint: ConfigFingerprint,
    pub(super) speeds: TokenSpeeds,
    /// Whether files have changed since the checkpoint, which was accepted.
    pub(super) has_changed_files: bool,
}

impl OpenedData {
    /// Opens the data, at the checkpoint's position if the run is resumed, and pins its revision in the run.
    ///
    /// # Errors
    /// [`crate::TrainerError::ChangedOnResume`] if the checkpoint is one of another run; those of
    /// [`ChangedData::accept`].
    pub(super) fn new(
        planned: &mut PlannedRun,
        hub: &HubSettings,
        accept_changed_data: bool,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let (stage, mut cursor) = (planned.stage(), planned.state().map(cursor_of).transpose()?);
        let PlannedRun { run, device, shape, plan, resumed, notes, .. } = planned;
        let mut data = DataPlan::new(&run.at_stage(stage), shape.vocab_size, hub, cancel)?;
        let (encoder, threads) = (data.tokenizer.measure_speed()?, pool::threads(&run.config)?);
        let speeds = TokenSpeeds::new(encoder, plan.flops_per_token, device, threads);
        data.settings.workers = speeds.workers(&run.config, data.settings.workers);
        run.config.data.bos = data.tokenizer.document_tokens().starts_with_bos.into();
        if data.tokenizer.parses_special_tokens() {
            run.config.data.parse_special_tokens = Some(true);
        }
        let tokenizer_files = tokenizer_files(run, &data.tokenizer, notes)?;
        let mut has_changed_files = false;
        if let (Some(resumed), Some(cursor)) = (&resumed, &mut cursor) {
            match ChangedData::find(run, &resumed.state, cursor, &data, accept_changed_data, cancel)? {
                Some(changed_data) => {
                    notes.push(changed_data.accept(run, &mut data, &resumed.state, cursor, accept_changed_data)?);
                    has_changed_files = true;
                }
                None => data.mixture = data.mixture.arranged(cursor),
            }
        }
        let sources = data.mixture.describe();
        config_fingerprint::pin_data_versions(run, &sources);
        let fingerprint = config_fingerprint::compute(run, data.tokenizer.content_hash(), &sources);
        if let Some(resumed) = resumed {
            let recorded_fingerprint = &resumed.state.fingerprint;
            let with_files =
                has_changed_files.then(|| config_fingerprint::with_files_of(recorded_fingerprint, &fingerprint));
            resumed.require_same(with_files.as_ref().unwrap_or(recorded_fingerprint), &fingerprint)?;
        }
        let mut stage_run = run.at_stage(stage);
        let data = data.open(&mut stage_run, cursor, notes)?;
        run.config.runtime.evaluation.every_n_steps = stage_run.config.runtime.evaluation.every_n_steps;
        Ok(Self { data, stage_run, tokenizer_files, fingerprint, speeds, has_changed_files })
    }
}

/// Reads the files that checkpoints keep, and notes what a user must know of the chat template.
fn tokenizer_files(run: &ResolvedRun, tokenizer: &Tokenizer, notes: &mut Vec<String>) -> Result<TokenizerFiles> {
    let longest = run.config.model.max_position_embeddings;
    let mut files = TokenizerFiles::of(tokenizer, longest)?;
    if let Some(model) = &run.config.model.init_from {
        files = files.with_generation_of(tokenizer.path(), model)?;
    }
    let data = &run.config.data;
    match ChatSettings::from_config(data) {
        None => Ok(files),
        Some(chat) => {
            let encoder = ConversationEncoder::new(tokenizer, &chat, data.sequence_length)?;
            notes.extend(encoder.notes());
            Ok(files.with_chat(&encoder))
        }
    }
}
