//! Why a program is asked to stop: signals, and the time limit.

use std::fmt;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXCPU};

use crate::error::ExitCode;

/// What asks a run to save and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// SIGHUP: the terminal or the connection is gone.
    HangUp,
    /// `--time-limit` is reached.
    TimeLimit,
    /// SIGXCPU: the limit of CPU time is reached (`ulimit -t`).
    CpuLimit,
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM, as schedulers and `kill` send it.
    Terminate,
}

impl StopReason {
    /// All reasons. Of several the last counts, where ranks of a run differ.
    pub(crate) const ALL: [Self; 5] = [Self::HangUp, Self::TimeLimit, Self::CpuLimit, Self::Interrupt, Self::Terminate];

    /// Returns the exit code of a run that was saved: by the shell's convention 128 plus the signal's number. A closed
    /// terminal and spent CPU time count as SIGTERM. A time limit is the user's own end of the session, as `--max-steps`
    /// is.
    pub fn exit_code(self) -> u8 {
        let code = match self {
            Self::TimeLimit => ExitCode::Done,
            Self::Interrupt => ExitCode::Interrupted,
            Self::HangUp | Self::CpuLimit | Self::Terminate => ExitCode::Terminated,
        };
        code as u8
    }

    /// Returns the system's number of the signal; `None` for a time limit.
    pub(crate) fn signal(self) -> Option<i32> {
        match self {
            Self::HangUp => Some(SIGHUP),
            Self::TimeLimit => None,
            Self::CpuLimit => Some(SIGXCPU),
            Self::Interrupt => Some(SIGINT),
            Self::Terminate => Some(SIGTERM),
        }
    }

    /// Returns the reason with this [`name`](Self::name).
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.name() == name)
    }

    /// Returns the system's name of the signal, such as `SIGINT`, or the option.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            other => other.shown(),
        }
    }

    fn shown(self) -> &'static str {
        match self {
            Self::HangUp => "SIGHUP",
            Self::TimeLimit => "the time limit (--time-limit)",
            Self::CpuLimit => "SIGXCPU",
            Self::Interrupt => "Ctrl-C",
            Self::Terminate => "SIGTERM",
        }
    }
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}
