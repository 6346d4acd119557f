//! Prefetching: one thread for each component prepares its next window while sequences of the current one are
//! delivered.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rayon::{ThreadPool, ThreadPoolBuilder};
use run_config::FIRST_READING_VERSION;

use crate::corrupted_rows::{CorruptedRows, FoundCorruption};
use crate::cursor::WindowStart;
use crate::held_out_split::HeldOutSplit;
use crate::mixture::ReadBudget;
use crate::open_shards::{EpochShards, OpenShards, WindowRequest};
use crate::sequence_packer::SequencePacker;
use crate::shuffle_window::{Window, WindowSettings};
use crate::skipped_rows::SkippedRows;
use crate::{DataError, DataSource, StreamSettings};

/// Threads that read shards of one component; they mostly wait for disks and networks.
const MAX_READER_THREADS: usize = 8;

/// A message of the prefetch thread. All but windows end it.
pub(crate) type Message = Result<Prepared, DataError>;

/// What the prefetch thread has prepared.
pub(crate) enum Prepared {
    /// The next window.
    Window(Box<Window>),
    /// The end of the last epoch, with the corrupted rows that were found after the last window.
    End(Vec<FoundCorruption>),
}

/// Reads, shuffles, tokenizes and packs the windows of a component, and sends them one after the other.
pub(crate) struct WindowPrefetcher {
    pub component: ComponentInput,
    pub settings: StreamSettings,
    pub packer: SequencePacker,
}

/// The component whose windows are prepared.
pub(crate) struct ComponentInput {
    /// Index in the mixture.
    pub index: usize,
    /// The source, whose token cancels the preparation.
    pub source: DataSource,
    /// How much text a window holds.
    pub window_budget: ReadBudget,
    /// Corrupted rows that are known at the start.
    pub corrupted: Vec<CorruptedRows>,
}

/// Corrupted rows of the component.
struct Corruption {
    all_rows: Vec<CorruptedRows>,
    /// Those found since the last window that was sent.
    new_findings: Vec<FoundCorruption>,
}

impl Corruption {
    /// Returns those that a window skips.
    fn known_at(&self, start: &WindowStart) -> Vec<CorruptedRows> {
        let is_known = |rows: &&CorruptedRows| (rows.epoch, rows.window) <= (start.epoch, start.window);
        self.all_rows.iter().filter(is_known).copied().collect()
    }

    /// Adds those that a window has found; fails where there are too many.
    fn add(&mut self, source: &DataSource, findings: Vec<FoundCorruption>) -> Result<(), DataError> {
        self.all_rows.extend(findings.iter().map(|finding| finding.rows));
        self.new_findings.extend(findings);
        source.check_corrupted(&self.all_rows, self.new_findings.last())
    }
}

/// Threads that read for this component, and threads that tokenize for all components.
struct ThreadPools<'a> {
    readers: ThreadPool,
    workers: &'a ThreadPool,
}

#[derive(Default)]
struct EpochTotals {
    sequences: usize,
    documents: u64,
    skipped: SkippedRows,
}

impl WindowPrefetcher {
    /// Sends windows from `start` on until the last epoch ends, an error occurs, or the receiver is dropped.
    pub(crate) fn run(self, start: WindowStart, workers: &ThreadPool, windows: &SyncSender<Message>) {
        let end = self.send_windows(start, workers, windows);
        // An error of `send` means that the receiver is gone and nobody needs the message.
        let _ = windows.send(end.map(Prepared::End));
    }

    fn send_windows(
        &self,
        mut start: WindowStart,
        workers: &ThreadPool,
        windows: &SyncSender<Message>,
    ) -> Result<Vec<FoundCorruption>, DataError> {
        let source = &self.component.source;
        let readers = MAX_READER_THREADS.min(self.settings.open_shards).min(source.shards().len()).max(1);
        let pools = ThreadPools { readers: thread_pool("data-read", readers)?, workers };
        let split = source.held_out_split(self.settings.split_settings())?;
        let mut corruption = Corruption { all_rows: self.component.corrupted.clone(), new_findings: Vec::new() };
        source.check_corrupted(&corruption.all_rows, None)?;
        while self.settings.epochs.is_none_or(|epochs| start.epoch < epochs) {
            let (epoch, is_whole_epoch) = (start.epoch, start.window == 0);
            let totals = self.send_epoch(start, &split, &mut corruption, &pools, windows)?;
            if is_whole_epoch && totals.sequences == 0 {
                source.check_columns(totals.skipped)?;
                return Err(DataError::NoDocuments {
                    name: source.name().to_owned(),
                    rows: totals.documents + totals.skipped.total(),
                    skipped: Box::new(totals.skipped),
                    first_problem: self.packer.chat().and_then(|chat| chat.first_problem()).map(str::to_owned),
                    held_out: !split.held_out_shards().is_empty(),
                });
            }
            start = WindowStart::epoch_start(epoch + 1, self.settings.open_shards);
        }
        Ok(corruption.new_findings)
    }

    /// Sends the windows of an epoch from `start` on.
    fn send_epoch(
        &self,
        mut start: WindowStart,
        split: &Arc<HeldOutSplit>,
        corruption: &mut Corruption,
        pools: &ThreadPools,
        windows: &SyncSender<Message>,
    ) -> Result<EpochTotals, DataError> {
        let source = &self.component.source;
        let shards = EpochShards::new(source, split, self.settings.seed, start.epoch);
        let settings = WindowSettings {
            component: self.component.index,
            packer: &self.packer,
            seed: self.settings.seed,
            cancel: source.cancel(),
        };
        let mut open_shards = OpenShards::resume_at(&start.open_shards, start.next_shard);
        let mut totals = EpochTotals::default();
        loop {
            let corrupted = &corruption.known_at(&start);
            let request = WindowRequest { budget: self.component.window_budget, window: start.window, corrupted };
            let mut rows = pools.readers.install(|| open_shards.read(&shards, request))?;
            corruption.add(source, std::mem::take(&mut rows.corrupted))?;
            if rows.documents.is_empty() {
                totals.skipped += rows.skipped;
                return Ok(totals);
            }
            let (positions, next_shard) = open_shards.positions();
            let next = WindowStart { epoch: start.epoch, window: start.window + 1, next_shard, open_shards: positions };
            let mut window = pools.workers.install(|| Window::prepare(start, next.clone(), rows, &settings))?;
            totals.documents += window.record.documents;
            totals.skipped += window.record.skipped;
            start = next;
            if window.sequences() > 0 {
                totals.sequences += window.sequences();
                source.cancel().check()?;
                window.corrupted = std::mem::take(&mut corruption.new_findings);
                let is_recorded = source.reading_version() > FIRST_READING_VERSION;
                window.split = is_recorded.then(|| Arc::clone(split));
                windows.send(Ok(Prepared::Window(Box::new(window)))).map_err(|_| DataError::Closed)?;
            }
        }
    }
}

/// Creates a pool of `threads` threads named after `name`.
pub(crate) fn thread_pool(name: &'static str, threads: usize) -> Result<ThreadPool, DataError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |index| format!("{name}-{index}"))
        .build()
        .map_err(|error| DataError::Threads { message: error.to_string() })
}
