//! Evaluation batches: held-out documents, packed in listing order, the same in every evaluation.

use std::collections::VecDeque;

use run_config::ResolvedRun;

use crate::formats::{Document, Row};
use crate::sequence_packer::{PackedSequences, SequencePacker};
use crate::sequential_reader::{Findings, PrefetchThread, SequentialReader};
use crate::skip_notices::SkipNotices;
use crate::{Batch, CancelToken, DataError, DataSource, Mixture, SkippedRows, StreamSettings, Tokenizer};

/// Rows read at a time.
const ROWS_PER_READ: usize = 64;
/// Text that is tokenized between two checks for an interruption.
const BYTES_PER_ENCODE: usize = 2 << 20;
/// An evaluation set ends with the first document that brings it to this many tokens: more would say nothing more about
/// the loss, and all tokens stay in memory (64 MiB).
const MAX_TOKENS: usize = 16 << 20;

/// An evaluation set, read once and only as far as needed.
pub struct HeldOut {
    name: String,
    weight: f64,
    reader: PrefetchThread,
    packer: SequencePacker,
    /// Documents that were read and not yet tokenized.
    documents: VecDeque<Document>,
    packed: PackedSequences,
    findings: Findings,
    notices: SkipNotices,
    /// Whether all documents are packed.
    complete: bool,
}

impl HeldOut {
    /// Opens the evaluation sets of a run: `data.validation_shards` if there are any, else what the run's stream holds
    /// out of each component of `training`, with the component's weight.
    pub fn from_run(run: &ResolvedRun, training: &Mixture, tokenizer: &Tokenizer) -> Result<Vec<Self>, DataError> {
        let settings = StreamSettings::from_run(run);
        if let Some(validation) = DataSource::validation_from_run(run, training.cancel())? {
            return Ok(vec![Self::whole(&validation, &settings, tokenizer)?]);
        }
        let component = |(component, source): (usize, &DataSource)| {
            Ok(Self { weight: training.weight(component), ..Self::open(source, &settings, tokenizer)? })
        };
        training.sources().iter().enumerate().map(component).collect()
    }

    /// Opens the rows that a [`crate::TokenStream`] of the same source with the same settings holds out.
    pub fn open(source: &DataSource, settings: &StreamSettings, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let split = source.held_out_split(settings.split_settings())?;
        let reader = SequentialReader::held_out(&source.cancelled_by(&CancelToken::new()), split);
        Self::new(source, reader, false, settings, tokenizer)
    }

    /// Opens all rows of `source`, a separate validation set.
    pub fn whole(source: &DataSource, settings: &StreamSettings, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let reader = SequentialReader::all(&source.cancelled_by(&CancelToken::new()));
        Self::new(source, reader, true, settings, tokenizer)
    }

    fn new(
        source: &DataSource,
        reader: SequentialReader,
        is_whole: bool,
        settings: &StreamSettings,
        tokenizer: &Tokenizer,
    ) -> Result<Self, DataError> {
        if settings.sequence_length == 0 {
            return Err(DataError::Setting { setting: "data.sequence_length", must: "at least 1" });
        }
        let packer = SequencePacker::new(settings, tokenizer)?;
        let findings = reader.findings();
        let mut held_out = Self {
            name: source.name().to_owned(),
            weight: 1.0,
            reader: PrefetchThread::start(reader, ROWS_PER_READ)?,
            documents: VecDeque::new(),
            packed: packer.empty(),
            packer,
            findings,
            notices: SkipNotices::default(),
            complete: false,
        };
        if held_out.read_sequence(0, &|| source.cancel().is_cancelled())? {
            return Ok(held_out);
        }
        let skipped = held_out.skipped();
        source.check_columns(skipped)?;
        Err(DataError::NothingHeldOut { name: held_out.name, is_whole, skipped: Box::new(skipped) })
    }

    /// The data set's name, or the patterns.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The weight of this set; the weights of all evaluation sets of a run sum to 1.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns batches of `sequences` sequences (at least one) from the start, at most `max_sequences` in all; the last
    /// batch may be smaller. Text is tokenized in the threads of the current rayon pool.
    pub fn batches(&mut self, sequences: usize, max_sequences: usize) -> HeldOutBatches<'_> {
        HeldOutBatches { held_out: self, sequences: sequences.max(1), max_sequences, next: 0, interrupted: &|| false }
    }

    /// Returns how many sequences there are, at most `limit`; reads no further than that. The text is tokenized in the
    /// threads of the current rayon pool.
    ///
    /// # Errors
    /// [`DataError::Interrupted`] soon after `interrupted` returns true, and errors of reading.
    pub fn sequences_up_to(&mut self, limit: usize, interrupted: &dyn Fn() -> bool) -> Result<usize, DataError> {
        if let Some(last) = limit.checked_sub(1) {
            self.read_sequence(last, interrupted)?;
        }
        Ok(self.packed.sequences().min(limit))
    }

    /// Rows skipped so far.
    pub fn skipped(&self) -> SkippedRows {
        self.notices.skipped
    }

    /// Takes the notices of skipped rows and corrupted files since the last call, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        let notices = self.findings.take_warnings().into_iter().chain(self.notices.take());
        notices.map(|notice| format!("held-out text of {}: {notice}", self.name)).collect()
    }

    /// Reads until sequence `k` is complete; false if there is no such sequence.
    fn read_sequence(&mut self, k: usize, interrupted: &dyn Fn() -> bool) -> Result<bool, DataError> {
        while !self.complete && !self.packed.is_complete(k) {
            self.read_more(interrupted)?;
        }
        Ok(k < self.packed.sequences())
    }

    fn read_more(&mut self, interrupted: &dyn Fn() -> bool) -> Result<(), DataError> {
        if self.documents.is_empty() {
            let rows = self.reader.next_rows(interrupted)?;
            self.complete = rows.is_empty();
            let (read, mut skipped) = (rows.len() as u64, SkippedRows::default());
            for row in rows {
                match row {
                    Row::Document(document) => self.documents.push_back(document),
                    Row::Skipped(reason) => skipped.count(reason),
                }
            }
            let first = if skipped.total() > 0 { self.findings.take_first_skipped() } else { None };
            self.notices.add(read, skipped, first);
        }
        if interrupted() {
            return Err(DataError::Interrupted);
        }
        let (mut documents, mut bytes) = (Vec::new(), 0);
        while bytes < BYTES_PER_ENCODE
            && let Some(document) = self.documents.pop_front()
        {
            bytes += document.text.len();
            documents.push(document);
        }
        let packing = self.packer.append(&mut self.packed, documents, &CancelToken::new())?;
        self.notices.add(0, packing.skipped, None);
        self.complete |= self.packed.tokens() >= MAX_TOKENS;
        Ok(())
    }
}

/// The batches of one pass over an evaluation set. Ends after an error.
pub struct HeldOutBatches<'a> {
    held_out: &'a mut HeldOut,
    sequences: usize,
    max_sequences: usize,
    next: usize,
    interrupted: &'a dyn Fn() -> bool,
}

impl<'a> HeldOutBatches<'a> {
    /// Stops waiting for data soon after `interrupted` returns true, with [`DataError::Interrupted`]. No text is lost:
    /// a later pass resumes reading there.
    #[must_use]
    pub fn unless(self, interrupted: &'a dyn Fn() -> bool) -> Self {
        Self { interrupted, ..self }
    }
}

impl Iterator for HeldOutBatches<'_> {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let tokenizer = self.held_out.packer.tokenizer().clone();
        let mut batch = self.held_out.packer.empty_batch();
        while batch.sequences() < self.sequences && self.next < self.max_sequences {
            match self.held_out.read_sequence(self.next, self.interrupted) {
                Ok(true) => {
                    let packed = &self.held_out.packed;
                    packed.write(self.next, tokenizer.token_bytes(), &mut batch);
                }
                Ok(false) => break,
                Err(error) => {
                    self.next = self.max_sequences;
                    return Some(Err(error));
                }
            }
            self.next += 1;
        }
        (!batch.is_empty()).then_some(Ok(batch))
    }
}
