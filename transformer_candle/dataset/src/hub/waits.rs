//! Who waits for the network at the moment, and for what: so that whoever waits for data can say so.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The readers that have failed since they last got a byte.
#[derive(Default)]
pub(crate) struct Waits(Mutex<Board>);

#[derive(Default)]
struct Board {
    next: u64,
    waits: BTreeMap<u64, Wait>,
}

struct Wait {
    since: Instant,
    url: String,
    message: String,
}

impl Waits {
    /// Notes a failure of the reader with this number, or of a new one; returns its number.
    pub(super) fn note(&self, number: Option<u64>, since: Instant, url: &str, message: &str) -> u64 {
        let mut board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = number.unwrap_or_else(|| {
            board.next += 1;
            board.next
        });
        board.waits.insert(number, Wait { since, url: url.to_owned(), message: message.to_owned() });
        number
    }

    /// The reader got something, or gave up.
    pub(super) fn over(&self, number: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).waits.remove(&number);
    }

    /// What the reader that has waited longest waits for; none if all goes well.
    pub(crate) fn longest(&self) -> Option<String> {
        let board = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = board.waits.values().min_by_key(|wait| wait.since)?;
        Some(format!("waiting {} s for {}: {}", wait.since.elapsed().as_secs(), wait.url, wait.message))
    }
}
