//! Runs a program from its command line to its exit code.

use std::panic::{self, UnwindSafe};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};
use tracing_subscriber::EnvFilter;

use super::output::print_error;
use super::{arguments, until_stopped::until_stopped};
use crate::stop::StopSignal;
use crate::terminal::LogWriter;
use crate::{Result, stop};

/// Parses the command line and runs the command, until it ends or a signal stops it.
pub fn run<C: CommandFactory + FromArgMatches>(
    command: impl FnOnce(C, &StopSignal) -> Result<u8> + UnwindSafe,
) -> ExitCode {
    guarded(|| {
        let parsed = arguments::parse()?;
        until_stopped(|stop| command(parsed, stop))
    })
}

/// Runs a command: logs and errors go to stderr, an error is one paragraph, a panic one sentence.
fn guarded(command: impl FnOnce() -> Result<u8> + UnwindSafe) -> ExitCode {
    log_to_stderr();
    // Otherwise a write beyond the limit on the size of files would end the process instead of failing.
    let _ = stop::ignore_file_size_signal();
    panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, |location| format!(" at {location}"));
        let reason = panic.payload_as_str().unwrap_or("no reason given").trim_end();
        print_error(&format!("internal error{place}: {reason}. This is a bug in transformer_candle; please report it"));
    }));
    match panic::catch_unwind(command) {
        Ok(Ok(code)) => ExitCode::from(code),
        Ok(Err(error)) => {
            print_error(&error);
            ExitCode::from(error.exit_code())
        }
        Err(_) => ExitCode::FAILURE,
    }
}

/// Logs warnings, or what `RUST_LOG` asks for, to stderr.
pub(super) fn log_to_stderr() {
    let filter = EnvFilter::builder().with_default_directive(tracing::Level::WARN.into()).from_env_lossy();
    // Keeps a subscriber that the caller has installed.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| LogWriter)
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .try_init();
}
