//! Commands that the first Ctrl-C or SIGTERM ends.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use signal_hook::low_level;

use super::output::print_error;
use crate::stop::StopSignal;
use crate::{Result, TrainerError};

/// How often the watching thread looks for a signal.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long a command has to end by itself. One that computes, or waits for a disk, does not look for signals meanwhile.
const GRACE: Duration = Duration::from_millis(500);

/// Runs a command that ends with [`TrainerError::Interrupted`] soon after a signal asks for it. One that has something to
/// save ([`StopSignal::mark_saves_on_stop`]) takes its time; any other is ended if it does not end by itself.
pub(super) fn until_stopped(command: impl FnOnce(&StopSignal) -> Result<u8>) -> Result<u8> {
    let stop = StopSignal::new();
    let listening = stop.listen().map_err(TrainerError::io("listen for", "signals"))?;
    let ended = thread::scope(|scope| {
        let (_until_dropped, running) = mpsc::channel::<()>();
        let watched = stop.clone();
        scope.spawn(move || exit_if_unresponsive(&watched, &running));
        command(&stop)
    });
    drop(listening);
    match stop.requested() {
        Some(signal) if ended.as_ref().is_err_and(TrainerError::is_interruption) => {
            Err(TrainerError::Interrupted(signal))
        }
        _ => ended,
    }
}

/// Ends the process where the command does not, until `running` is disconnected.
fn exit_if_unresponsive(stop: &StopSignal, running: &Receiver<()>) {
    while running.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        let Some(signal) = stop.requested().filter(|_| !stop.saves_on_stop()) else {
            continue;
        };
        let unanswered = running.recv_timeout(GRACE) == Err(RecvTimeoutError::Timeout);
        if unanswered && !stop.saves_on_stop() {
            let error = TrainerError::Interrupted(signal);
            print_error(&error);
            // At once, and not through the cleaning up of libraries whose threads are at work.
            low_level::exit(error.exit_code().into());
        }
    }
}
