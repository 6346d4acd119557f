//! Stopping in order: Ctrl-C, SIGTERM and SIGHUP raise a flag that the loop looks at between steps; a second Ctrl-C ends the
//! process at once.

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

/// The flag a running loop looks at. Clones share it; without [`StopSignal::listen`] only [`StopSignal::request`] raises it.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    /// Number of the signal seen, 0 for none.
    seen: Arc<AtomicUsize>,
    /// Whoever runs answers by saving, which takes its time.
    saves: Arc<AtomicBool>,
}

impl StopSignal {
    /// A flag that nothing has raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Raises the flag, as the signal itself would.
    pub fn request(&self, signal: Signal) {
        self.seen.store(signal.number() as usize, Ordering::Relaxed);
    }

    /// Lowers the flag, so that what was interrupted can be taken up again.
    pub fn clear(&self) {
        self.seen.store(0, Ordering::Relaxed);
    }

    /// Fails with [`TrainerError::Interrupted`] once the flag is raised.
    pub fn check(&self) -> Result<()> {
        self.requested().map_or(Ok(()), |signal| Err(TrainerError::Interrupted(signal)))
    }

    /// What cancels reading once the flag is raised.
    pub fn cancel_token(&self) -> CancelToken {
        let flag = self.clone();
        CancelToken::when(move || flag.requested().is_some())
    }

    /// Says that from here on there is something to save when the flag is raised.
    pub fn mark_saves_on_stop(&self) {
        self.saves.store(true, Ordering::Relaxed);
    }

    /// Whether there is something to save.
    pub fn saves_on_stop(&self) -> bool {
        self.saves.load(Ordering::Relaxed)
    }

    /// The signal that raised the flag.
    pub fn requested(&self) -> Option<Signal> {
        match self.seen.load(Ordering::Relaxed) as i32 {
            SIGINT => Some(Signal::Interrupt),
            SIGTERM => Some(Signal::Terminate),
            SIGHUP => Some(Signal::HangUp),
            _ => None,
        }
    }

    /// Listens for SIGINT, SIGTERM and, unless the caller had it ignored (`nohup`), SIGHUP until the returned guard is
    /// dropped. The first raises the flag; a SIGINT that follows one ends the process at once with 130, for whoever does
    /// not want to wait for the save.
    ///
    /// # Errors
    /// The system refuses to install a handler.
    pub fn listen(&self) -> io::Result<SignalHandlers> {
        let mut listening = SignalHandlers(Vec::new());
        let interrupted = Arc::new(AtomicBool::new(false));
        // Order matters: the conditional exit looks at the flag before this very signal raises it.
        listening.0.push(flag::register_conditional_shutdown(
            SIGINT,
            i32::from(Signal::Interrupt.exit_code()),
            Arc::clone(&interrupted),
        )?);
        listening.0.push(flag::register(SIGINT, interrupted)?);
        let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
        for signal in [SIGINT, SIGTERM].into_iter().chain(hang_up) {
            listening.0.push(flag::register_usize(signal, Arc::clone(&self.seen), signal as usize)?);
        }
        Ok(listening)
    }
}

/// Lets a write beyond the system's limit on the size of a file (`ulimit -f`) fail like one on a full disk, instead of
/// ending the process.
///
/// # Errors
/// The system refuses to install a handler.
pub(crate) fn outlive_file_size_limit() -> io::Result<()> {
    flag::register(rustix::process::Signal::XFSZ.as_raw(), Arc::default()).map(drop)
}

/// Whether whoever started this process had it ignore a signal. Where the system does not tell, it is taken as ignored.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (signal - 1) & 1 == 1)
}

/// Handlers that live as long as this value.
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
        let listening = stop.listen().unwrap();
        low_level::raise(SIGTERM).unwrap();
        assert_eq!(stop.requested(), Some(Signal::Terminate));
        drop(listening);
    }
}
