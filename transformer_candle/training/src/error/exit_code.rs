//! The exit codes of the programs.

/// The exit codes of the programs: README.md has them in a table, and `python/orchestrator/command_error.py` for
/// Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// What was asked for is done.
    Done = 0,
    /// Anything that has no code of its own.
    Unexpected = 1,
    /// The command, the config, or what it asks of this machine is wrong.
    WrongRequest = 2,
    /// Data cannot be read.
    DataUnreadable = 3,
    /// The run does not fit in memory.
    OutOfMemory = 4,
    /// A checkpoint is corrupted, and no intact one is left.
    CheckpointCorrupted = 5,
    /// Training diverged.
    Diverged = 6,
    /// Stopped by SIGINT, saved.
    Interrupted = 130,
    /// Stopped by SIGTERM, saved.
    Terminated = 143,
}
