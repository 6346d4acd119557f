//! Runs a command until it ends or a signal stops it.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use signal_hook::low_level;

use super::output::print_error;
use crate::stop::StopSignal;
use crate::{Result, TrainerError};

/// How often the watchdog thread checks for a signal.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a command may take to stop by itself: during compute and disk I/O it does not check for signals.
const GRACE: Duration = Duration::from_millis(500);

/// Runs a command that ends with [`TrainerError::Interrupted`] soon after a signal. A command that saves before it
/// stops ([`StopSignal::set_saves_on_stop`]) may take any time; the process of any other exits after [`GRACE`].
pub(super) fn until_stopped(command: impl FnOnce(&StopSignal) -> Result<u8>) -> Result<u8> {
    let stop = StopSignal::new();
    let handlers = stop.listen().map_err(TrainerError::io("listen for", "signals"))?;
    let outcome = thread::scope(|scope| {
        let (_until_dropped, running) = mpsc::channel::<()>();
        let watched = stop.clone();
        scope.spawn(move || exit_if_unresponsive(&watched, &running));
        command(&stop)
    });
    drop(handlers);
    match stop.requested() {
        Some(signal) if outcome.as_ref().is_err_and(TrainerError::is_interruption) => {
            Err(TrainerError::Interrupted(signal))
        }
        _ => outcome,
    }
}

/// Exits the process if the command does not stop after a signal; returns when `running` is disconnected.
fn exit_if_unresponsive(stop: &StopSignal, running: &Receiver<()>) {
    while running.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(signal) = stop.requested().filter(|_| !stop.saves_on_stop()) else {
            continue;
        };
        let unanswered = running.recv_timeout(GRACE) == Err(RecvTimeoutError::Timeout);
        if unanswered && !stop.saves_on_stop() {
            let error = TrainerError::Interrupted(signal);
            print_error(&error);
            // Skips the exit handlers of libraries whose threads are still running.
            low_level::exit(error.exit_code().into());
        }
    }
}
