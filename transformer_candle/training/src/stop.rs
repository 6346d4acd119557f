//! Graceful shutdown: Ctrl-C, SIGTERM, SIGHUP, SIGXCPU and a time limit set a flag that the training loop checks; a
//! second Ctrl-C exits immediately. SIGUSR1 and SIGUSR2 ask a run to save and continue.

use std::{
    fs, io,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use dataset::CancelToken;
use signal_hook::{
    SigId,
    consts::{SIGHUP, SIGINT, SIGUSR1, SIGUSR2},
    flag, low_level,
};

use crate::error::{Result, TrainerError};
pub use crate::stop_reason::StopReason;
use crate::time_limit::TimeLimit;

/// The signals that ask a run to save and continue: schedulers send one of them a while before they end a job.
const SAVE_REQUESTS: [(i32, &str); 2] = [(SIGUSR1, "SIGUSR1"), (SIGUSR2, "SIGUSR2")];

/// A stop flag. Clones share it; without [`StopSignal::listen`] only [`StopSignal::request`] and a time limit set it.
#[derive(Clone, Debug, Default)]
pub struct StopSignal {
    /// The position of the reason in [`StopReason::ALL`], from 1; 0 for none.
    reason_code: Arc<AtomicUsize>,
    /// Whether the program saves a checkpoint before it stops.
    saves: Arc<AtomicBool>,
    /// The signal that asks to save and continue; 0 for none.
    save_request: Arc<AtomicUsize>,
    time_limit: Arc<TimeLimit>,
}

impl StopSignal {
    /// Returns an unset flag.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag, as the signal itself would.
    pub fn request(&self, reason: StopReason) {
        self.reason_code.store(code(reason), Ordering::Relaxed);
    }

    /// The time limit, which sets the flag once it is reached.
    pub fn time_limit(&self) -> &TimeLimit {
        &self.time_limit
    }

    /// Asks the run to save and continue, as the signal of this name would; as SIGUSR1, where another process got one.
    pub fn request_save(&self, name: Option<&str>) {
        let number =
            SAVE_REQUESTS.iter().find(|(_, label)| Some(*label) == name).map_or(SIGUSR1, |(number, _)| *number);
        self.save_request.store(number as usize, Ordering::Relaxed);
    }

    /// Whether a signal asked to save and continue.
    pub(crate) fn is_save_requested(&self) -> bool {
        self.save_request.load(Ordering::Relaxed) != 0
    }

    /// Returns the name of the signal that asked to save and continue, and clears it.
    pub(crate) fn take_save_request(&self) -> Option<&'static str> {
        let signal = self.save_request.swap(0, Ordering::Relaxed) as i32;
        SAVE_REQUESTS.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name)
    }

    /// Clears the flag, so that interrupted work can be resumed.
    pub fn clear(&self) {
        self.reason_code.store(0, Ordering::Relaxed);
    }

    /// Fails with [`TrainerError::Interrupted`] once the flag is set.
    pub fn check(&self) -> Result<()> {
        self.requested().map_or(Ok(()), |reason| Err(TrainerError::Interrupted(reason)))
    }

    /// Breaks once the flag is set.
    pub fn flow(&self) -> ControlFlow<()> {
        if self.requested().is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
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

    /// Returns what set the flag; None if it is not set.
    pub fn requested(&self) -> Option<StopReason> {
        let reason =
            self.reason_code.load(Ordering::Relaxed).checked_sub(1).and_then(|index| StopReason::ALL.get(index));
        reason.copied().or_else(|| self.time_limit.is_reached().then_some(StopReason::TimeLimit))
    }

    /// Handles SIGINT, SIGTERM, SIGXCPU and, unless it is ignored (`nohup`), SIGHUP until the returned guard is dropped,
    /// as well as SIGUSR1 and SIGUSR2. The first signal sets the flag; a second SIGINT exits immediately with 130, without
    /// saving.
    ///
    /// # Errors
    /// The system refuses to install a handler.
    pub fn listen(&self) -> io::Result<SignalHandlers> {
        let mut handlers = self.listen_for_save_requests()?;
        let interrupted = Arc::new(AtomicBool::new(false));
        // Order matters: the conditional exit must check the flag before the same signal sets it.
        handlers.0.push(flag::register_conditional_shutdown(
            SIGINT,
            i32::from(StopReason::Interrupt.exit_code()),
            Arc::clone(&interrupted),
        )?);
        handlers.0.push(flag::register(SIGINT, interrupted)?);
        for reason in StopReason::ALL {
            if let Some(signal) = reason.signal().filter(|signal| *signal != SIGHUP || !is_ignored(SIGHUP)) {
                handlers.0.push(flag::register_usize(signal, Arc::clone(&self.reason_code), code(reason))?);
            }
        }
        Ok(handlers)
    }

    /// Handles SIGUSR1 and SIGUSR2 until the returned guard is dropped.
    ///
    /// # Errors
    /// The system refuses to install a handler.
    pub fn listen_for_save_requests(&self) -> io::Result<SignalHandlers> {
        let register = |(signal, _)| flag::register_usize(signal, Arc::clone(&self.save_request), signal as usize);
        SAVE_REQUESTS.into_iter().map(register).collect::<io::Result<_>>().map(SignalHandlers)
    }
}

/// The value of [`StopSignal`]'s flag for a reason.
fn code(reason: StopReason) -> usize {
    1 + StopReason::ALL.into_iter().position(|other| other == reason).unwrap_or_default()
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
    use signal_hook::consts::{SIGTERM, SIGXCPU};

    use super::*;

    #[test]
    fn every_clone_sees_a_request() {
        for reason in StopReason::ALL {
            let stop = StopSignal::new();
            let seen_by_loop = stop.clone();
            assert_eq!(seen_by_loop.requested(), None);
            stop.request(reason);
            assert_eq!(seen_by_loop.requested(), Some(reason));
        }
    }

    #[test]
    fn exit_codes_follow_the_shell() {
        let reasons = [StopReason::Interrupt, StopReason::Terminate, StopReason::HangUp, StopReason::CpuLimit];
        assert_eq!(reasons.map(StopReason::exit_code), [130, 143, 143, 143], "all but Ctrl-C count as SIGTERM");
        assert_eq!(StopReason::TimeLimit.exit_code(), 0);
    }

    #[test]
    fn a_signal_sets_the_flag() {
        for (number, reason) in [(SIGTERM, StopReason::Terminate), (SIGXCPU, StopReason::CpuLimit)] {
            let stop = StopSignal::new();
            let handlers = stop.listen().unwrap();
            low_level::raise(number).unwrap();
            assert_eq!(stop.requested(), Some(reason));
            drop(handlers);
        }
    }

    #[test]
    fn requests_to_save_do_not_stop() {
        let stop = StopSignal::new();
        let handlers = stop.listen().unwrap();
        for (number, name) in SAVE_REQUESTS {
            low_level::raise(number).unwrap();
            assert!(stop.is_save_requested());
            assert_eq!((stop.take_save_request(), stop.take_save_request()), (Some(name), None));
        }
        assert_eq!(stop.requested(), None);
        drop(handlers);
    }
}
