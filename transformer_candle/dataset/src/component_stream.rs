//! The sequences of one component of a mixture, one after the other, from the windows that its thread prepares.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rayon::ThreadPool;

use crate::cancel::receive;
use crate::cursor::{ComponentPosition, WindowStart};
use crate::ledger::WindowRecord;
use crate::packing::PackedTokens;
use crate::shuffle_window::Window;
use crate::window_prefetch::{Message, WindowPrefetcher};
use crate::{DataError, SkippedRows};

/// One component's stream.
pub(crate) struct ComponentStream {
    windows: Receiver<Message>,
    /// The window in use, and how many of its sequences were delivered.
    window: Option<(Window, usize)>,
    /// Where the window in use, or else the next one, starts, and how many of its sequences lie behind.
    next_position: (WindowStart, u64),
    /// The last epoch is over.
    ended: bool,
    skipped: SkippedRows,
    /// Windows taken into use since they were last forgotten.
    opened: Vec<WindowRecord>,
    waited: Duration,
    thread: Option<JoinHandle<()>>,
}

impl ComponentStream {
    /// Starts the thread that prepares the component's windows with `workers`.
    pub(crate) fn start(
        prefetcher: WindowPrefetcher,
        workers: Arc<ThreadPool>,
        position: &ComponentPosition,
    ) -> Result<Self, DataError> {
        // Nothing waits in the channel: one window is in use while the next is prepared or held ready by its thread.
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
            ended: false,
            skipped: SkippedRows::default(),
            opened: Vec::new(),
            waited: Duration::ZERO,
            thread: Some(thread),
        })
    }

    /// The next sequence: tokens and its place in them; none when the last epoch is over. After an error the stream is
    /// of no more use.
    pub(crate) fn next_sequence(
        &mut self,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Option<(&PackedTokens, usize)>, DataError> {
        self.drop_exhausted_window();
        if self.window.is_none() {
            let Some(window) = self.receive(interrupted)? else {
                return Ok(None);
            };
            self.skipped += window.record.skipped;
            // Only the window that the stream was opened in starts behind its first sequence.
            let delivered = if window.record.start == self.next_position.0 { self.next_position.1 as usize } else { 0 };
            if delivered >= window.sequences() {
                return Err(DataError::Cursor { difference: "the content of the files" });
            }
            self.opened.push(window.record.clone());
            self.window = Some((window, delivered));
        }
        Ok(self.window.as_mut().map(|(window, delivered)| {
            *delivered += 1;
            window.sequence(*delivered - 1)
        }))
    }

    fn drop_exhausted_window(&mut self) {
        if let Some((window, _)) = self.window.take_if(|(window, delivered)| *delivered == window.sequences()) {
            self.next_position = (window.next, 0);
        }
    }

    fn receive(&mut self, interrupted: &dyn Fn() -> bool) -> Result<Option<Window>, DataError> {
        if self.ended {
            return Ok(None);
        }
        let started = Instant::now();
        let message = receive(&self.windows, interrupted);
        self.waited += started.elapsed();
        self.ended = matches!(message, Ok(None));
        message
    }

    /// Where the next sequence lies: its window's start and its place in the window.
    pub(crate) fn position(&self) -> (WindowStart, u64) {
        match &self.window {
            Some((window, delivered)) if *delivered == window.sequences() => (window.next.clone(), 0),
            Some((window, delivered)) => (window.record.start.clone(), *delivered as u64),
            None => self.next_position.clone(),
        }
    }

    /// The windows taken into use since [`Self::clear_opened`].
    pub(crate) fn opened(&self) -> &[WindowRecord] {
        &self.opened
    }

    pub(crate) fn clear_opened(&mut self) {
        self.opened.clear();
    }

    /// Rows left out of the windows taken into use.
    pub(crate) fn skipped(&self) -> SkippedRows {
        self.skipped
    }

    /// How long calls have waited for windows.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }

    /// RetryMonitor for the end of the thread, which was told to end, but no longer than `until`. What it still sends is
    /// taken so that it can end.
    pub(crate) fn join(&mut self, deadline: Instant) {
        while self.thread.is_some() {
            match self.windows.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
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
