//! Graceful shutdown: Ctrl-C, SIGTERM and SIGHUP set a flag that the training loop checks; a second Ctrl-C exits
//! immediately.

use std::{
    fs, io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use dataset::CancelToken;
use signal_hook::{
    SigId,
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag, low_level,
};

use crate::error::{Result, TrainerError};
pub use crate::signal::Signal;

/// A stop flag. Clones share it; without [`StopSignal::listen`] only [`StopSignal::request`] sets it.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    /// Number of the received signal, 0 for none.
    seen: Arc<AtomicUsize>,
    /// Whether the program saves a checkpoint before it stops.
    saves: Arc<AtomicBool>,
}

impl StopSignal {
    /// Returns an unset flag.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag, as the signal itself would.
    pub fn request(&self, signal: Signal) {
        self.seen.store(signal.number() as usize, Ordering::Relaxed);
    }

    /// Clears the flag, so that interrupted work can be resumed.
    pub fn clear(&self) {
        self.seen.store(0, Ordering::Relaxed);
    }

    /// Fails with [`TrainerError::Interrupted`] once the flag is set.
    pub fn check(&self) -> Result<()> {
        self.requested().map_or(Ok(()), |signal| Err(TrainerError::Interrupted(signal)))
    }

    /// Returns a token that cancels reading once the flag is set.
    pub fn cancel_token(&self) -> CancelToken {
        let flag = self.clone();
        CancelToken::when(move || flag.requested().is_some())
    }

    /// Declares that from here on the program saves a checkpoint before it stops.
    pub fn set_saves_on_stop(&self) {
        self.saves.store(true, Ordering::Relaxed);
    }

    /// Whether the program saves a checkpoint before it stops.
    pub fn saves_on_stop(&self) -> bool {
        self.saves.load(Ordering::Relaxed)
    }

    /// Returns the signal that set the flag; None if it is not set.
    pub fn requested(&self) -> Option<Signal> {
        match self.seen.load(Ordering::Relaxed) as i32 {
            SIGINT => Some(Signal::Interrupt),
            SIGTERM => Some(Signal::Terminate),
            SIGHUP => Some(Signal::HangUp),
            _ => None,
        }
    }

    /// Handles SIGINT, SIGTERM and, unless it is ignored (`nohup`), SIGHUP until the returned guard is dropped. The
    /// first signal sets the flag; a second SIGINT exits immediately with 130, without saving.
    ///
    /// # Errors
    /// The system refuses to install a handler.
    pub fn listen(&self) -> io::Result<SignalHandlers> {
        let mut handlers = SignalHandlers(Vec::new());
        let interrupted = Arc::new(AtomicBool::new(false));
        // Order matters: the conditional exit must check the flag before the same signal sets it.
        handlers.0.push(flag::register_conditional_shutdown(
            SIGINT,
            i32::from(Signal::Interrupt.exit_code()),
            Arc::clone(&interrupted),
        )?);
        handlers.0.push(flag::register(SIGINT, interrupted)?);
        let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hang_up) {
            handlers.0.push(flag::register_usize(signal, Arc::clone(&self.seen), signal as usize)?);
        }
        Ok(handlers)
    }
}

/// Ignores SIGXFSZ: a write beyond the file size limit (`ulimit -f`) then fails with an error instead of ending the
/// process.
///
/// # Errors
/// The system refuses to install a handler.
pub(crate) fn ignore_file_size_signal() -> io::Result<()> {
    flag::register(rustix::process::Signal::XFSZ.as_raw(), Arc::default()).map(drop)
}

/// Whether the process was started with this signal ignored; true if unknown.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Installed signal handlers, removed on drop.
#[derive(Debug)]
#[must_use = "the handlers are removed when this value is dropped"]
pub struct SignalHandlers(Vec<SigId>);

impl Drop for SignalHandlers {
    fn drop(&mut self) {
        for id in self.0.drain(..) {
            low_level::unregister(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_clone_sees_a_request() {
        let stop = StopSignal::new();
        let seen_by_loop = stop.clone();
        assert_eq!(seen_by_loop.requested(), None);
        stop.request(Signal::Terminate);
        assert_eq!(seen_by_loop.requested(), Some(Signal::Terminate));
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        let codes = [Signal::Interrupt, Signal::Terminate, Signal::HangUp].map(Signal::exit_code);
        assert_eq!(codes, [130, 143, 143], "a closed terminal counts as SIGTERM");
    }

    #[test]
    fn a_signal_sets_the_flag() {
        let stop = StopSignal::new();
        let handlers = stop.listen().unwrap();
        low_level::raise(SIGTERM).unwrap();
        assert_eq!(stop.requested(), Some(Signal::Terminate));
        drop(handlers);
    }
}
