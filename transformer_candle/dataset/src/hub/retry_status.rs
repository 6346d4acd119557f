//! Who waits for the network at the moment, and for what: so that whoever waits for data can say so.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the log repeats what it has said already.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);

/// What a reader that got no byte waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryStatus {
    /// The address, without its query.
    pub url: String,
    /// What went wrong the last time.
    pub reason: String,
    /// When it first went wrong.
    pub since: Instant,
    /// When it is tried again.
    pub next_attempt: Instant,
}

impl fmt::Display for RetryStatus {
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
pub struct RetryMonitor(Arc<Mutex<ActiveRetries>>);

#[derive(Default)]
struct ActiveRetries {
    next_id: u64,
    by_id: BTreeMap<u64, RetryStatus>,
    /// The reason that the log told last, and when.
    logged: Option<(String, Instant)>,
}

impl RetryMonitor {
    /// Notes a failure of the reader with this id, or of a new one; returns its id.
    pub(super) fn record_failure(&self, id: Option<u64>, status: RetryStatus) -> u64 {
        let mut active = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let id = id.unwrap_or_else(|| {
            active.next_id += 1;
            active.next_id
        });
        let same = |(reason, at): &(String, Instant)| *reason == status.reason && at.elapsed() < WARNING_INTERVAL;
        if active.logged.as_ref().is_some_and(same) {
            tracing::debug!("{status}");
        } else {
            tracing::warn!("{status}");
            active.logged = Some((status.reason.clone(), Instant::now()));
        }
        active.by_id.insert(id, status);
        id
    }

    /// The reader got something, or gave up.
    pub(super) fn remove(&self, id: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_id.remove(&id);
    }

    /// What the reader that has waited longest waits for; none if all goes well.
    pub fn longest(&self) -> Option<RetryStatus> {
        let active = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        active.by_id.values().min_by_key(|status| status.since).cloned()
    }
}
