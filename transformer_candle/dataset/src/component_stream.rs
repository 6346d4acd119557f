//! The sequences of one component of a mixture, from the windows that its prefetch thread prepares.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rayon::ThreadPool;

use crate::cancel::receive;
use crate::cursor::{ComponentPosition, WindowStart};
use crate::held_out_split::HeldOutSplit;
use crate::ledger::{RowRange, SequenceRange, WindowRecord};
use crate::sequence_packer::PackedSequences;
use crate::shuffle_window::Window;
use crate::skip_notices::SkipNotices;
use crate::window_prefetch::{Message, Prepared, WindowPrefetcher};
use crate::{CorruptedRows, DataError, FoundCorruption};

/// The stream of one component.
pub(crate) struct ComponentStream {
    windows: Receiver<Message>,
    /// The window in use, and how many of its sequences were delivered.
    window: Option<(Window, usize)>,
    /// The position to deliver from when no window is in use: a window's start, and its sequences already delivered.
    next_position: (WindowStart, u64),
    /// Whether the last epoch is over.
    is_over: bool,
    /// Rows of all windows that came into use.
    pub notices: SkipNotices,
    /// Corrupted rows that all windows so far have skipped.
    pub corrupted: Vec<CorruptedRows>,
    /// Corrupted rows of the windows that came into use since [`Self::clear_opened`].
    pub new_corruption: Vec<FoundCorruption>,
    /// The held-out rows, where cursors record them.
    pub split: Option<Arc<HeldOutSplit>>,
    /// Conversations, in all windows that came into use, whose end was cut off.
    pub truncated: u64,
    /// Documents and conversations, in the same windows, that spell special tokens.
    pub spelling_special_tokens: u64,
    /// Conversations, in the same windows, whose rows have fields that are not used.
    pub with_unused_fields: u64,
    /// Windows that came into use since [`Self::clear_opened`].
    pub opened: Vec<WindowRecord>,
    /// Total time that calls have waited for windows.
    pub waited: Duration,
    thread: Option<JoinHandle<()>>,
}

impl ComponentStream {
    /// Starts the thread that prepares the component's windows; `workers` tokenize.
    pub(crate) fn start(
        prefetcher: WindowPrefetcher,
        workers: Arc<ThreadPool>,
        position: &ComponentPosition,
    ) -> Result<Self, DataError> {
        // The channel holds nothing: while one window is in use, the thread prepares the next one or waits to hand it
        // over.
        let (sender, windows) = sync_channel(0);
        let start = position.start.clone();
        let thread = std::thread::Builder::new()
            .name("data".to_owned())
            .spawn(move || prefetcher.run(start, &workers, &sender))
            .map_err(|error| DataError::Threads { message: error.to_string() })?;
        Ok(Self {
            windows,
            window: None,
            next_position: (position.start.clone(), position.sequence),
            is_over: false,
            notices: SkipNotices::default(),
            corrupted: position.corrupted.clone(),
            new_corruption: Vec::new(),
            split: position.split.clone().map(Arc::new),
            truncated: 0,
            spelling_special_tokens: 0,
            with_unused_fields: 0,
            opened: Vec::new(),
            waited: Duration::ZERO,
            thread: Some(thread),
        })
    }

    /// Returns the next sequence as packed sequences and its index in them; `None` after the last epoch. After an error
    /// other than [`DataError::Interrupted`] the stream must not be used.
    pub(crate) fn next_sequence(
        &mut self,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<(&PackedSequences, usize)>, DataError> {
        self.drop_exhausted_window();
        self.open_window(interrupted)?;
        Ok(self.window.as_mut().map(|(window, delivered)| {
            *delivered += 1;
            window.sequence(*delivered - 1)
        }))
    }

    /// Returns the rows of the sequence that was delivered last.
    pub(crate) fn delivered_rows(&self) -> Vec<RowRange> {
        self.window.as_ref().map_or_else(Vec::new, |(window, delivered)| window.rows_of(delivered - 1))
    }

    /// Waits for the next window, unless one is in use or the last epoch is over.
    fn open_window(&mut self, interrupted: &dyn Fn() -> bool) -> Result<(), DataError> {
        if self.window.is_some() {
            return Ok(());
        }
        let Some(mut window) = self.receive(interrupted)? else {
            return Ok(());
        };
        self.truncated += window.record.truncated;
        self.spelling_special_tokens += window.packing.spelling_special_tokens;
        self.with_unused_fields += window.packing.with_unused_fields;
        // Only the window that the stream was resumed in starts after its first sequence.
        let delivered = if window.record.start == self.next_position.0 { self.next_position.1 as usize } else { 0 };
        if delivered >= window.sequences() {
            return Err(DataError::Cursor { difference: "the content of the files" });
        }
        if let Some(corruption) = window.corrupted.first().filter(|_| delivered > 0) {
            // Sequences of this window were delivered when the file could be read.
            let message = format!("{}, but the run was trained on them: restore the file", corruption.problem);
            return Err(DataError::Format { file: corruption.file.clone(), message });
        }
        let WindowRecord { documents, skipped, .. } = window.record;
        self.notices.add(documents + skipped.total(), skipped, window.first_skipped.take());
        self.add_corrupted(std::mem::take(&mut window.corrupted));
        self.split = window.split.take().or(self.split.take());
        self.opened.push(window.record.clone());
        self.window = Some((*window, delivered));
        Ok(())
    }

    /// Returns the start of the window after the one in use, and the undelivered sequences of the one in use; between
    /// two windows, the start of the next one and `None`. Waits for the window that the stream was resumed in.
    pub(crate) fn end_of_window(
        &mut self,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<(WindowStart, Option<SequenceRange>), DataError> {
        let (start, sequence) = self.position();
        if sequence == 0 {
            return Ok((start, None));
        }
        self.open_window(interrupted)?;
        let Some((window, delivered)) = &self.window else {
            return Err(DataError::Cursor { difference: "the content of the files" });
        };
        let left_out = SequenceRange {
            component: window.record.component,
            epoch: start.epoch,
            window: start.window,
            first_sequence: sequence,
            sequences: (window.sequences() - delivered) as u64,
        };
        Ok((window.next.clone(), Some(left_out)))
    }

    /// Adds what the component's previous stream has counted: skipped rows, truncated conversations, those that spell
    /// special tokens or have unused fields, waiting time.
    pub(crate) fn carry_over(&mut self, previous: &Self) {
        self.notices.carry_over(&previous.notices);
        self.truncated += previous.truncated;
        self.spelling_special_tokens += previous.spelling_special_tokens;
        self.with_unused_fields += previous.with_unused_fields;
        self.waited += previous.waited;
    }

    fn add_corrupted(&mut self, findings: Vec<FoundCorruption>) {
        self.corrupted.extend(findings.iter().map(|corruption| corruption.rows));
        self.new_corruption.extend(findings);
    }

    fn drop_exhausted_window(&mut self) {
        if let Some((window, _)) = self.window.take_if(|(window, delivered)| *delivered == window.sequences()) {
            self.next_position = (window.next, 0);
        }
    }

    fn receive(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Option<Box<Window>>, DataError> {
        if self.is_over {
            return Ok(None);
        }
        let start = Instant::now();
        let message = receive(&self.windows, interrupted);
        self.waited += start.elapsed();
        match message? {
            Prepared::Window(window) => Ok(Some(window)),
            Prepared::End(findings) => {
                self.is_over = true;
                self.add_corrupted(findings);
                Ok(None)
            }
        }
    }

    /// The position of the next sequence: the start of its window, and its index in the window.
    pub(crate) fn position(&self) -> (WindowStart, u64) {
        match &self.window {
            Some((window, delivered)) if *delivered == window.sequences() => (window.next.clone(), 0),
            Some((window, delivered)) => (window.record.start.clone(), *delivered as u64),
            None => self.next_position.clone(),
        }
    }

    pub(crate) fn clear_opened(&mut self) {
        self.opened.clear();
        self.new_corruption.clear();
    }

    /// Waits until `deadline` for the end of the thread, which must have been cancelled. Receives what it still sends,
    /// so that it can end.
    pub(crate) fn join(&mut self, deadline: Instant) {
        while self.thread.is_some() {
            match self.windows.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => self.thread = None,
                Err(RecvTimeoutError::Disconnected) => {
                    // If it panicked, the receiver of its messages has reported that.
                    let _ = self.thread.take().map(JoinHandle::join);
                }
            }
        }
    }
}
