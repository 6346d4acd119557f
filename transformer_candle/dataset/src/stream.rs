//! The endless stream of packed sequences, handed out in batches; its order is defined on the crate's first page.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use run_config::{Packing, ResolvedRun};

use crate::cursor::WindowStart;
use crate::hub::Waiting;
use crate::ledger::WindowRecord;
use crate::producer::{Message, Producer};
use crate::selection::Wanted;
use crate::stop::Stop;
use crate::window::Window;
use crate::{Batch, Cursor, DataError, DataSource, SkippedRows, StreamIdentity, Tokenizer};

/// Files open at the same time, where a run does not say otherwise.
const LANES: usize = 16;
/// How long a stream that is dropped waits for its thread; one that hangs in a dead connection ends at its timeout.
const LONGEST_FAREWELL: Duration = Duration::from_secs(2);
/// How often whoever waits for data looks whether it is still wanted.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// What the order of the stream depends on, besides the source and the tokenizer; and how it is prepared.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamSettings {
    /// Tokens in a sequence.
    pub sequence_length: usize,
    /// Whether the first token of a document is a target.
    pub packing: Packing,
    /// Documents in a window.
    pub shuffle_buffer_size: usize,
    /// Seed of every permutation.
    pub seed: u64,
    /// Train on the first so many rows in listing order.
    pub max_samples: Option<u64>,
    /// Files open at the same time.
    pub lanes: usize,
    /// Fraction of the row groups to hold out; 0 for none.
    pub held_out_fraction: f64,
    /// Passes over the data; none for no end. Not part of the stream's identity.
    pub epochs: Option<u64>,
    /// Threads that tokenise. Not part of the stream's identity.
    pub workers: usize,
}

impl Default for StreamSettings {
    /// An endless stream over everything, nothing held out.
    fn default() -> Self {
        Self {
            sequence_length: 256,
            packing: Packing::default(),
            shuffle_buffer_size: 8192,
            seed: 0,
            max_samples: None,
            lanes: LANES,
            held_out_fraction: 0.0,
            epochs: None,
            workers: 2,
        }
    }
}

impl StreamSettings {
    /// The settings of a run. Nothing is held out where the run has validation data of its own.
    pub fn from_run(run: &ResolvedRun) -> Self {
        let data = &run.config.data;
        let held_out_fraction = if data.validation_shards.is_empty() { data.held_out_fraction } else { 0.0 };
        Self {
            sequence_length: data.sequence_length,
            packing: data.packing,
            shuffle_buffer_size: data.shuffle_buffer_size,
            seed: run.config.runtime.seed,
            max_samples: run.streaming.as_ref().and_then(|streaming| streaming.max_samples),
            held_out_fraction,
            epochs: run.config.scheduler.total_epochs,
            workers: data.num_workers,
            ..Self::default()
        }
    }

    fn check(&self) -> Result<(), DataError> {
        let at_least_one = [
            ("data.sequence_length", self.sequence_length as u64),
            ("data.shuffle_buffer_size", self.shuffle_buffer_size as u64),
            ("max_samples", self.max_samples.unwrap_or(1)),
            ("lanes", self.lanes as u64),
            ("data.num_workers", self.workers as u64),
        ];
        match at_least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((setting, _)) => Err(DataError::Setting { setting, must: "at least 1" }),
            None => Ok(()),
        }
    }

    pub(crate) fn wanted(&self) -> Wanted {
        Wanted { max_samples: self.max_samples, held_out_fraction: self.held_out_fraction }
    }
}

/// Whether anything can still come.
enum State {
    Open,
    /// The last epoch is over.
    Ended,
    /// An error was told.
    Failed,
}

/// The stream of packed sequences. Dropping it ends its thread.
pub struct TokenStream {
    windows: Receiver<Message>,
    /// The window in use, and how many of its sequences were delivered.
    window: Option<(Window, usize)>,
    state: State,
    /// Where the next call starts.
    cursor: Cursor,
    tokenizer: Tokenizer,
    sequence_length: usize,
    skipped: SkippedRows,
    opened: Vec<WindowRecord>,
    data_wait: Duration,
    source: DataSource,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl TokenStream {
    /// Starts at the beginning, or exactly at `cursor`; refuses a cursor of another stream. Nothing is read yet when this
    /// returns; what goes wrong with the data is told by [`Self::next_sequences`].
    pub fn open(
        source: &DataSource,
        settings: &StreamSettings,
        tokenizer: &Tokenizer,
        cursor: Option<Cursor>,
    ) -> Result<Self, DataError> {
        settings.check()?;
        let identity = StreamIdentity::of(source, settings, tokenizer);
        let cursor = match cursor {
            Some(cursor) => cursor.checked(&identity, settings.lanes, source.files().len())?,
            None => Cursor { identity, start: WindowStart::of_epoch(0, settings.lanes), sequence: 0 },
        };
        let stop = Stop::default();
        // Nothing waits in the channel: one window is in use while the next is prepared or held ready by its thread.
        let (sender, windows) = sync_channel(0);
        let producer = Producer::new(source, settings, tokenizer, cursor.start.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("data".to_owned()).spawn(move || producer.run(&sender));
        let thread = thread.map_err(|error| DataError::Threads { message: error.to_string() })?;
        Ok(Self {
            windows,
            window: None,
            state: State::Open,
            cursor,
            tokenizer: tokenizer.clone(),
            sequence_length: settings.sequence_length,
            skipped: SkippedRows::default(),
            opened: Vec::new(),
            data_wait: Duration::ZERO,
            source: source.clone(),
            stop,
            thread: Some(thread),
        })
    }

    /// The next `n` sequences; fewer, then none, when the last epoch ends. An error comes after everything that was read
    /// before it; the cursor then stands where the call started, and the stream is closed.
    pub fn next_sequences(&mut self, n: usize) -> Result<Batch, DataError> {
        self.next_sequences_unless(n, &|| false)
    }

    /// As [`Self::next_sequences`], but gives up waiting for data soon after `interrupted` says so. That is an error like
    /// any other: [`DataError::Interrupted`].
    pub fn next_sequences_unless(&mut self, n: usize, interrupted: &dyn Fn() -> bool) -> Result<Batch, DataError> {
        self.opened.clear();
        let tokenizer = self.tokenizer.clone();
        let mut batch = Batch::new(self.sequence_length, tokenizer.token_bytes().is_some());
        let mut cursor = None;
        while batch.sequences() < n {
            let Some((window, delivered)) = self.current_window(interrupted)? else {
                break;
            };
            let (tokens, place) = window.sequence(*delivered);
            tokens.write(place, tokenizer.token_bytes(), &mut batch);
            *delivered += 1;
            cursor = Some(if *delivered == window.sequences() {
                (window.next.clone(), 0)
            } else {
                (window.record.start.clone(), *delivered as u64)
            });
        }
        if let Some((start, sequence)) = cursor {
            self.cursor.start = start;
            self.cursor.sequence = sequence;
        }
        Ok(batch)
    }

    /// The window that the next sequence is in; none when the stream has ended.
    fn current_window(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Option<&mut (Window, usize)>, DataError> {
        if self.window.as_ref().is_some_and(|(window, delivered)| *delivered == window.sequences()) {
            self.window = None;
        }
        if self.window.is_none() {
            let Some(window) = self.receive(interrupted)? else {
                return Ok(None);
            };
            self.skipped += window.record.skipped;
            // Only the window that the cursor is in starts behind its first sequence.
            let delivered = if window.record.start == self.cursor.start { self.cursor.sequence as usize } else { 0 };
            if delivered >= window.sequences() {
                return Err(DataError::Cursor { difference: "the content of the files" });
            }
            self.opened.push(window.record.clone());
            self.window = Some((window, delivered));
        }
        Ok(self.window.as_mut())
    }

    fn receive(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Option<Window>, DataError> {
        match self.state {
            State::Open => {}
            State::Ended => return Ok(None),
            State::Failed => return Err(DataError::Closed),
        }
        let began = Instant::now();
        let message = loop {
            match self.windows.recv_timeout(BETWEEN_LOOKS) {
                Ok(message) => break message,
                Err(RecvTimeoutError::Timeout) if interrupted() => break Err(DataError::Interrupted),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    let message = "the data thread broke off; this is a fault of the program, please report it";
                    break Err(DataError::Threads { message: message.to_owned() });
                }
            }
        };
        self.data_wait += began.elapsed();
        match message {
            Ok(Some(window)) => Ok(Some(window)),
            Ok(None) => {
                self.state = State::Ended;
                Ok(None)
            }
            Err(error) => {
                self.state = State::Failed;
                Err(error)
            }
        }
    }

    /// Where the next call starts. Small: a few numbers a lane.
    pub fn cursor(&self) -> Cursor {
        self.cursor.clone()
    }

    /// What the order depends on.
    pub fn identity(&self) -> &StreamIdentity {
        &self.cursor.identity
    }

    /// How long calls have waited for data so far.
    pub fn data_wait(&self) -> Duration {
        self.data_wait
    }

    /// What the preparation of data waits for while the Hub or the network fails.
    pub fn waiting(&self) -> Option<Waiting> {
        self.source.waiting()
    }

    /// The windows that the last call was the first to deliver from, for the ledger. Where the stream was opened in the middle of a
    /// window, that window is among them.
    pub fn opened_windows(&self) -> &[WindowRecord] {
        &self.opened
    }

    /// Rows left out of the windows that were delivered from so far.
    pub fn skipped(&self) -> SkippedRows {
        self.skipped
    }
}

impl Drop for TokenStream {
    /// The thread is told to stop, and what it still sends is taken so that it can.
    fn drop(&mut self) {
        self.stop.order();
        let until = Instant::now() + LONGEST_FAREWELL;
        while self.thread.is_some() {
            match self.windows.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => self.thread = None,
                Err(RecvTimeoutError::Disconnected) => {
                    // That the thread broke off was told where its message was missing.
                    let _ = self.thread.take().map(JoinHandle::join);
                }
            }
        }
    }
}
