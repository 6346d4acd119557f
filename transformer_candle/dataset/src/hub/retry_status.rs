//! Who waits for the network at the moment, and for what: so that whoever waits for data can say so.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the log repeats what it has said already.
const BETWEEN_WARNINGS: Duration = Duration::from_mins(1);

/// What a reader that got no byte waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The address, without its query.
    pub url: String,
    /// What went wrong the last time.
    pub reason: String,
    /// When it first went wrong.
    pub since: Instant,
    /// When it is tried again.
    pub next_attempt: Instant,
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, reason, since, next_attempt } = self;
        let (waited, left) = (since.elapsed().as_secs(), next_attempt.saturating_duration_since(Instant::now()));
        write!(f, "waiting for the Hub for {waited} s: {url}: {reason}; ")?;
        if left.is_zero() {
            f.write_str("trying again")
        } else {
            write!(f, "next try in {:.0} s", left.as_secs_f64().ceil())
        }
    }
}

/// The readers that have failed since they last got a byte. Clones share it.
#[derive(Clone, Default)]
pub struct Waits(Arc<Mutex<Board>>);

#[derive(Default)]
struct Board {
    next: u64,
    waits: BTreeMap<u64, Waiting>,
    /// The reason that the log told last, and when.
    told: Option<(String, Instant)>,
}

impl Waits {
    /// Notes a failure of the reader with this number, or of a new one; returns its number.
    pub(super) fn note(&self, number: Option<u64>, waiting: Waiting) -> u64 {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = number.unwrap_or_else(|| {
            board.next += 1;
            board.next
        });
        let same = |(reason, at): &(String, Instant)| *reason == waiting.reason && at.elapsed() < BETWEEN_WARNINGS;
        if board.told.as_ref().is_some_and(same) {
            tracing::debug!("{waiting}");
        } else {
            tracing::warn!("{waiting}");
            board.told = Some((waiting.reason.clone(), Instant::now()));
        }
        board.waits.insert(number, waiting);
        number
    }

    /// The reader got something, or gave up.
    pub(super) fn over(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).waits.remove(&number);
    }

    /// What the reader that has waited longest waits for; none if all goes well.
    pub fn longest(&self) -> Option<Waiting> {
        let board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        board.waits.values().min_by_key(|waiting| waiting.since).cloned()
    }
}
