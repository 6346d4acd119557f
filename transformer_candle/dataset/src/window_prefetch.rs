//! The thread that prepares a component's windows: read, shuffle, tokenise, pack, hand over.

use std::sync::mpsc::SyncSender;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::cancel::CancelToken;
use crate::cursor::WindowStart;
use crate::held_out_split::Selection;
use crate::open_shards::{EpochFiles, Lanes, Share};
use crate::shuffle_window::{Window, WindowSettings};
use crate::skipped_rows::SkippedRows;
use crate::{DataError, DataSource, StreamSettings, Tokenizer};

/// Files read at the same moment; the threads mostly wait for disks and networks.
const READERS: usize = 8;

/// A window, the end of the last epoch, or what went wrong; nothing follows the latter two.
pub(crate) type Message = Result<Option<Window>, DataError>;

/// What the thread works with.
pub(crate) struct Producer {
    part: Part,
    settings: StreamSettings,
    tokenizer: Tokenizer,
    cancel: CancelToken,
}

/// The component that windows are made of.
pub(crate) struct Part {
    /// Its place in the mixture.
    pub component: usize,
    pub source: DataSource,
    /// How much a window holds.
    pub window: Share,
}

/// The threads below the thread: its own that read, and those that tokenise for all components.
struct Pools<'a> {
    readers: ThreadPool,
    workers: &'a ThreadPool,
}

/// What an epoch amounted to.
#[derive(Default)]
struct Tally {
    sequences: usize,
    documents: u64,
    skipped: SkippedRows,
}

impl Producer {
    pub(crate) fn new(part: Part, settings: &StreamSettings, tokenizer: &Tokenizer, cancel: CancelToken) -> Self {
        Self { part, settings: settings.clone(), tokenizer: tokenizer.clone(), cancel }
    }

    /// Sends windows from `start` on until the last epoch ends, something goes wrong, or nobody receives.
    pub(crate) fn run(self, start: WindowStart, workers: &ThreadPool, windows: &SyncSender<Message>) {
        let end = self.produce(start, workers, windows);
        // Where nobody receives any more there is nobody to tell.
        let _ = windows.send(end.map(|()| None));
    }

    fn produce(
        &self,
        mut start: WindowStart,
        workers: &ThreadPool,
        windows: &SyncSender<Message>,
    ) -> Result<(), DataError> {
        let source = &self.part.source;
        let readers = READERS.min(self.settings.lanes).min(source.files().len()).max(1);
        let pools = Pools { readers: thread_pool("data-read", readers)?, workers };
        let selection = source.selection(self.settings.wanted(), &self.cancel)?;
        while self.settings.epochs.is_none_or(|epochs| start.epoch < epochs) {
            let (epoch, whole) = (start.epoch, start.window == 0);
            let tally = self.epoch(start, &selection, &pools, windows)?;
            if whole && tally.sequences == 0 {
                if let Some(missing) = source.missing_column(tally.skipped, &self.cancel)? {
                    return Err(DataError::MissingColumn(missing));
                }
                return Err(DataError::NoDocuments {
                    name: source.name().to_owned(),
                    rows: tally.documents + tally.skipped.total(),
                    skipped: tally.skipped,
                    held_out: !selection.held_out_files().is_empty(),
                });
            }
            start = WindowStart::of_epoch(epoch + 1, self.settings.lanes);
        }
        Ok(())
    }

    /// Prepares and sends the windows of an epoch from `start` on.
    fn epoch(
        &self,
        mut start: WindowStart,
        selection: &Selection,
        pools: &Pools,
        windows: &SyncSender<Message>,
    ) -> Result<Tally, DataError> {
        let files = EpochFiles::new(&self.part.source, selection, &self.cancel, self.settings.seed, start.epoch);
        let settings = WindowSettings {
            component: self.part.component,
            tokenizer: &self.tokenizer,
            sequence_length: self.settings.sequence_length,
            packing: self.settings.packing,
            seed: self.settings.seed,
            cancel: &self.cancel,
        };
        let mut lanes = Lanes::at(&start.lanes, start.next_file);
        let mut tally = Tally::default();
        loop {
            let taken = pools.readers.install(|| lanes.take(&files, self.part.window))?;
            tally.documents += taken.documents.len() as u64;
            tally.skipped += taken.skipped;
            if taken.documents.is_empty() {
                return Ok(tally);
            }
            let (positions, next_file) = lanes.positions();
            let next = WindowStart { epoch: start.epoch, window: start.window + 1, next_file, lanes: positions };
            let window = pools.workers.install(|| Window::prepare(start, next.clone(), taken, &settings))?;
            start = next;
            if window.sequences() > 0 {
                tally.sequences += window.sequences();
                self.cancel.check()?;
                windows.send(Ok(Some(window))).map_err(|_| DataError::Closed)?;
            }
        }
    }
}

/// A pool of so many threads.
pub(crate) fn thread_pool(name: &'static str, threads: usize) -> Result<ThreadPool, DataError> {
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |index| format!("{name}-{index}"))
        .build()
        .map_err(|error| DataError::Threads { message: error.to_string() })
}
