//! The token stream: packed sequences in batches. The crate's documentation defines their order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cancel::CancelToken;
use crate::component_stream::ComponentStream;
use crate::cursor::ComponentPosition;
use crate::hub::RetryStatus;
use crate::ledger::{RowRange, SequenceRange, WindowRecord};
use crate::sequence_packer::SequencePacker;
use crate::window_prefetch::{ComponentInput, WindowPrefetcher, thread_pool};
use crate::{
    Batch, ConversationEncoder, Cursor, DataError, DataSource, FoundCorruption, Mixture, SkippedRows,
    StreamFingerprint, StreamSettings, Tokenizer,
};

/// How long dropping a stream waits for its threads. A thread in a dead connection ends later, at its timeout.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Data and settings of a run's stream in one stage. The stages of a run differ in sequence length and mixture weights.
#[derive(Clone, Debug)]
pub struct StreamStage {
    /// The sources with their weights.
    pub mixture: Mixture,
    /// The settings of the stream.
    pub settings: StreamSettings,
}

/// The stream of a stage, opened where the stream of the stage before it ended.
pub struct NextStage {
    /// The stream, which starts at the next window of each component.
    pub stream: TokenStream,
    /// Sequences of the previous stream's windows in use that were not delivered, and never will be: of at most one
    /// window of each component.
    pub left_out: Vec<SequenceRange>,
    /// Those of these windows that the previous stream was resumed in and had not delivered from.
    pub opened: Vec<WindowRecord>,
}

/// The rows whose documents have targets in a sequence, of one component.
pub(crate) struct DeliveredRows {
    pub component: usize,
    pub rows: Vec<RowRange>,
}

/// A stream of packed sequences. Dropping it ends its threads.
pub struct TokenStream {
    mixture: Mixture,
    components: Vec<ComponentStream>,
    /// Number of sequences delivered of each component.
    delivered: Vec<u64>,
    /// The position before the next batch.
    cursor: Cursor,
    /// The incomplete batch of an interrupted call.
    partial: Option<Batch>,
    /// The rows of each sequence of the batch, where they are asked for.
    delivered_rows: Option<Vec<DeliveredRows>>,
    /// Whether an error was returned.
    failed: bool,
    packer: SequencePacker,
    cancel: CancelToken,
}

/// Where a batch ends, unless the data end before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// After this many sequences.
    Count(usize),
    /// With the window in use, or after this many sequences. Only for a single component.
    WindowEnd(usize),
}

impl TokenStream {
    /// Opens a stream at its beginning or exactly at `cursor`; rejects a cursor of another stream. Returns before
    /// anything is read: errors in the data are returned by [`Self::next_sequences`].
    pub fn open(
        data: impl Into<Mixture>,
        settings: &StreamSettings,
        tokenizer: &Tokenizer,
        cursor: Option<Cursor>,
    ) -> Result<Self, DataError> {
        settings.check()?;
        let mixture: Mixture = data.into();
        let mixture = cursor.as_ref().map_or_else(|| mixture.clone(), |cursor| mixture.arranged(cursor));
        let packer = SequencePacker::new(settings, tokenizer)?;
        let fingerprint = StreamFingerprint::new(&mixture, settings, &packer);
        let cursor = match cursor {
            Some(cursor) => cursor.validated(&fingerprint, &mixture, settings.open_shards)?,
            None => Cursor::at_start(fingerprint, mixture.sources().len(), settings.open_shards),
        };
        mixture.restore(&cursor, settings);
        let cancel = CancelToken::new();
        let workers = Arc::new(thread_pool("data-work", settings.workers)?);
        let start = |(index, position): (usize, &ComponentPosition)| {
            let component = ComponentInput {
                index,
                source: mixture.sources()[index].cancelled_by(&cancel),
                corrupted: position.corrupted.clone(),
                window_budget: mixture.window_budget(index, settings.shuffle_buffer_size),
            };
            let prefetcher = WindowPrefetcher { component, settings: settings.clone(), packer: packer.clone() };
            ComponentStream::start(prefetcher, Arc::clone(&workers), position)
        };
        Ok(Self {
            components: cursor.components.iter().enumerate().map(start).collect::<Result<_, _>>()?,
            delivered: cursor.delivered(),
            mixture,
            cursor,
            partial: None,
            delivered_rows: None,
            failed: false,
            packer,
            cancel,
        })
    }

    /// Returns the next `n` sequences; fewer, then none, when the last epoch ends. An error is returned after
    /// everything that was read before it; the cursor then stays where the call started, and the stream is closed.
    pub fn next_sequences(&mut self, n: usize) -> Result<Batch, DataError> {
        self.next_sequences_until(Until::Count(n), &|| false)
    }

    /// Like [`Self::next_sequences`], but stops waiting for data soon after `interrupted` returns true. That error,
    /// [`DataError::Interrupted`], loses nothing: the next call must ask for the same and returns the same batch.
    pub fn next_sequences_until(&mut self, until: Until, interrupted: &dyn Fn() -> bool) -> Result<Batch, DataError> {
        if self.failed {
            return Err(DataError::Closed);
        }
        let mut batch = self.partial.take().unwrap_or_else(|| {
            self.components.iter_mut().for_each(ComponentStream::clear_opened);
            self.packer.empty_batch()
        });
        match self.fill(&mut batch, until, interrupted) {
            Ok(()) => {
                self.cursor.components = self.positions();
                Ok(batch)
            }
            Err(DataError::Interrupted) => {
                self.partial = Some(batch);
                Err(DataError::Interrupted)
            }
            Err(error) => {
                self.failed = true;
                Err(error)
            }
        }
    }

    /// Like [`Self::next_sequences_until`] a count, with the rows of each sequence. After an error the stream must not be
    /// used.
    pub(crate) fn next_sequences_with_rows(
        &mut self,
        n: usize,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<(Batch, Vec<DeliveredRows>), DataError> {
        self.delivered_rows = Some(Vec::with_capacity(n));
        let batch = self.next_sequences_until(Until::Count(n), interrupted)?;
        Ok((batch, self.delivered_rows.take().unwrap_or_default()))
    }

    fn fill(&mut self, batch: &mut Batch, until: Until, interrupted: &dyn Fn() -> bool) -> Result<(), DataError> {
        let (Until::Count(n) | Until::WindowEnd(n)) = until;
        let token_bytes = self.packer.tokenizer().token_bytes();
        while batch.sequences() < n {
            let component = self.mixture.schedule().next_component(&self.delivered);
            let Some((tokens, index)) = self.components[component].next_sequence(interrupted)? else {
                break;
            };
            tokens.write(index, token_bytes, batch);
            self.delivered[component] += 1;
            if let Some(rows) = &mut self.delivered_rows {
                rows.push(DeliveredRows { component, rows: self.components[component].delivered_rows() });
            }
            if matches!(until, Until::WindowEnd(_)) && self.components[component].position().1 == 0 {
                break;
            }
        }
        Ok(())
    }

    fn positions(&self) -> Vec<ComponentPosition> {
        let components = self.components.iter().zip(self.mixture.sources());
        let positions = components.zip(&self.delivered).map(|((stream, source), &delivered)| {
            let (start, sequence) = stream.position();
            ComponentPosition {
                start,
                sequence,
                delivered,
                corrupted: stream.corrupted.clone(),
                split: stream.split.as_deref().cloned(),
                files: source.parts().to_vec(),
            }
        });
        positions.collect()
    }

    /// Whether the next sequence is the first of a window of each component.
    pub fn is_between_windows(&self) -> bool {
        self.cursor.components.iter().all(|component| component.sequence == 0)
    }

    /// Opens the stream of the next stage: the same sources, with other settings or weights, from the window after the
    /// one in use of each component. Its cursor, and so its order, is a pure function of this stream's cursor and of
    /// the stage. This stream keeps its position.
    ///
    /// # Errors
    /// [`DataError::Interrupted`] soon after `interrupted` returns true, if a window in use must be read to find its
    /// end.
    pub fn next_stage(&mut self, stage: &StreamStage, interrupted: &dyn Fn() -> bool) -> Result<NextStage, DataError> {
        let StreamStage { mixture, settings } = stage;
        let fingerprint =
            StreamFingerprint::new(mixture, settings, &SequencePacker::new(settings, self.packer.tokenizer())?);
        self.components.iter_mut().for_each(ComponentStream::clear_opened);
        let (mut left_out, mut components) = (Vec::new(), Vec::new());
        for (component, source) in self.components.iter_mut().zip(self.mixture.sources()) {
            let (start, rest) = component.end_of_window(interrupted)?;
            left_out.extend(rest);
            let (corrupted, split) = (component.corrupted.clone(), component.split.as_deref().cloned());
            let files = source.parts().to_vec();
            components.push(ComponentPosition { corrupted, split, files, ..ComponentPosition::at(start) });
        }
        let cursor = Cursor { fingerprint, components };
        let mut stream = Self::open(mixture, settings, self.packer.tokenizer(), Some(cursor))?;
        for (component, former) in stream.components.iter_mut().zip(&self.components) {
            component.carry_over(former);
        }
        Ok(NextStage { stream, left_out, opened: self.opened_windows().cloned().collect() })
    }

    /// The position before the next batch: a few numbers per open shard.
    pub fn cursor(&self) -> Cursor {
        self.cursor.clone()
    }

    /// The hashes of everything that the order of the stream depends on.
    pub fn fingerprint(&self) -> &StreamFingerprint {
        &self.cursor.fingerprint
    }

    /// The data of the stream.
    pub fn mixture(&self) -> &Mixture {
        &self.mixture
    }

    /// Total time that calls have waited for data.
    pub fn data_wait(&self) -> Duration {
        self.components.iter().map(|component| component.waited).sum()
    }

    /// The request that has been failing for the longest time; none if all succeed.
    pub fn retry_status(&self) -> Option<RetryStatus> {
        self.mixture.retry_status()
    }

    /// The windows from which the last call was the first to deliver, for the ledger. If the stream was resumed in the
    /// middle of a window, that window is among them.
    pub fn opened_windows(&self) -> impl Iterator<Item = &WindowRecord> {
        self.components.iter().flat_map(|component| &component.opened)
    }

    /// The corrupted rows that were found in these windows, with the index of their component; those that were recorded
    /// before are not among them.
    pub fn found_corruption(&self) -> impl Iterator<Item = (usize, &FoundCorruption)> {
        let components = self.components.iter().enumerate();
        components
            .flat_map(|(index, component)| component.new_corruption.iter().map(move |corruption| (index, corruption)))
    }

    /// Takes the notices of skipped rows since the last call, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        let names = self.mixture.sources().iter().map(DataSource::name);
        let single = self.components.len() == 1;
        let notices = self.components.iter_mut().zip(names).flat_map(|(component, name)| {
            let of = |notice| if single { notice } else { format!("{name}: {notice}") };
            component.notices.take().into_iter().map(of).collect::<Vec<_>>()
        });
        notices.collect()
    }

    /// Rows of the windows that were used so far, skipped ones included, for each component.
    pub fn rows(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.notices.rows).collect()
    }

    /// Skipped rows of the windows that were used so far, for each component.
    pub fn skipped(&self) -> Vec<SkippedRows> {
        self.components.iter().map(|component| component.notices.skipped).collect()
    }

    /// Conversations of the windows that were used so far whose end was cut off, for each component.
    pub fn truncated(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.truncated).collect()
    }

    /// Documents and conversations of the windows that were used so far that spell special tokens, for each component.
    pub fn spelling_special_tokens(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.spelling_special_tokens).collect()
    }

    /// Conversations of the windows that were used so far whose rows say what neither the chat template nor the loss
    /// uses, for each component.
    pub fn with_unused_fields(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.with_unused_fields).collect()
    }

    /// The encoder of the stream's conversations; `None` if its rows are text.
    pub fn conversation_encoder(&self) -> Option<&ConversationEncoder> {
        self.packer.chat()
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.cancel.cancel();
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        for component in &mut self.components {
            component.join(deadline);
        }
    }
}
