//! Which requests are being retried, and why: for the progress display and the log.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often the log repeats the same reason.
const WARNING_INTERVAL: Duration = Duration::from_mins(1);

/// A request that is being retried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetryStatus {
    /// The URL, without its query.
    pub url: String,
    /// The last error.
    pub reason: String,
    /// Time of the first failure.
    pub since: Instant,
    /// Time of the next attempt.
    pub next_attempt: Instant,
}

impl fmt::Display for RetryStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { url, reason, since, next_attempt } = self;
        let (seconds, remaining) = (since.elapsed().as_secs(), next_attempt.saturating_duration_since(Instant::now()));
        write!(f, "waiting for the Hub for {seconds} s: {url}: {reason}; ")?;
        if remaining.is_zero() {
            f.write_str("retrying")
        } else {
            write!(f, "retrying in {:.0} s", remaining.as_secs_f64().ceil())
        }
    }
}

/// The requests that have failed since their last progress. Clones share it.
#[derive(Clone, Default)]
pub struct RetryMonitor(Arc<Mutex<ActiveRetries>>);

#[derive(Default)]
struct ActiveRetries {
    next_id: u64,
    by_id: BTreeMap<u64, RetryStatus>,
    /// The last reason that was logged, and when.
    logged: Option<(String, Instant)>,
}

impl RetryMonitor {
    /// Records a failure of the request with this id, or of a new one; returns its id.
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

    /// Removes a request that made progress or ended.
    pub(super) fn remove(&self, id: u64) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).by_id.remove(&id);
    }

    /// The request that has been failing for the longest time; none if all succeed.
    pub fn longest(&self) -> Option<RetryStatus> {
        let active = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        active.by_id.values().min_by_key(|status| status.since).cloned()
    }
}
