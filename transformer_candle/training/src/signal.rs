//! The signals that ask a program to stop.

use std::fmt;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// A signal that asks a run to save and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// SIGTERM, as schedulers and `kill` send it.
    Terminate,
    /// SIGHUP: the terminal or the connection is gone.
    HangUp,
}

impl Signal {
    /// Returns the exit code by the shell's convention: 128 plus the signal's number. A closed terminal counts as
    /// SIGTERM, as which `orchestrate` forwards it.
    pub fn exit_code(self) -> u8 {
        let counted = if self == Self::HangUp { Self::Terminate } else { self };
        128 + counted.number() as u8
    }

    /// Returns the system's name of the signal, such as `SIGINT`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
        }
    }

    /// Returns the system's number of the signal.
    pub(crate) fn number(self) -> i32 {
        match self {
            Self::Interrupt => SIGINT,
            Self::Terminate => SIGTERM,
            Self::HangUp => SIGHUP,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "Ctrl-C",
            Self::Terminate => "SIGTERM",
            Self::HangUp => "SIGHUP",
        })
    }
}
