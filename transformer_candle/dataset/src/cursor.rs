//! The state to resume from.

use serde::{Deserialize, Serialize};

/// Where a lane stands: file (place in the epoch's permutation), group (place in the file's permutation), row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePosition {
    /// Place of the file in the epoch's permutation of files.
    pub file: u64,
    /// Place of the group in the file's permutation of groups.
    pub group: u64,
    /// Rows of the group already taken.
    pub row: u64,
}

/// A position between two sequences of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Window of the epoch, from 0.
    pub window: u64,
    /// Sequences of the window already delivered.
    pub sequence: u64,
    /// Where the lanes stood at the window's start; `None` for a lane that has run out of files.
    pub lanes: Vec<Option<LanePosition>>,
    /// Place in the files' permutation of the first file that no lane has taken.
    pub next_file: u64,
    /// The stream that the position belongs to.
    pub identity: StreamIdentity,
}

/// Everything that the order of the stream depends on, as one hash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamIdentity(String);
