//! When a wait for data is reported in plain lines.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use dataset::hub::RetryStatus;

use crate::units::duration;

/// Shorter waits are not reported; longer ones are reported at this interval.
const MIN_REPORTED_WAIT: Duration = Duration::from_secs(1);
const WAIT_REPORT_INTERVAL: Duration = Duration::from_mins(1);

/// Decides when a wait for data is reported: after a second, when its reason changes, and once a minute.
#[derive(Debug, Default)]
pub struct WaitMessages(Mutex<Option<ReportedWait>>);

/// The last report of a wait for data.
#[derive(Debug)]
struct ReportedWait {
    began: Instant,
    reason: String,
    reported: Instant,
}

impl WaitMessages {
    /// Returns the line to print for the current wait, if one is due; it counts as reported. `waiting` is None once the
    /// wait is over.
    pub fn line(&self, waiting: Option<&RetryStatus>) -> Option<String> {
        let mut wait = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = waiting else {
            return wait.take().map(|last| format!("data resumed after {}", duration(last.began.elapsed())));
        };
        let is_reported =
            |last: &ReportedWait| last.reason == waiting.reason && last.reported.elapsed() < WAIT_REPORT_INTERVAL;
        if waiting.since.elapsed() < MIN_REPORTED_WAIT || wait.as_ref().is_some_and(is_reported) {
            return None;
        }
        let now = Instant::now();
        let start = wait.as_ref().map_or(now, |last| last.began);
        *wait = Some(ReportedWait { began: start, reason: waiting.reason.clone(), reported: now });
        Some(waiting.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_reported_once_a_minute_or_on_a_new_reason() {
        let messages = WaitMessages::default();
        let is_reported = |waiting: &RetryStatus| messages.line(Some(waiting)).is_some();
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        let waiting = |since, reason: &str| RetryStatus {
            url: "http://hub/x".to_owned(),
            reason: reason.to_owned(),
            since: ago(since),
            next_attempt: Instant::now(),
        };
        assert!(!is_reported(&waiting(0, "reset")), "it may pass in a moment");
        assert!(is_reported(&waiting(2, "reset")));
        assert!(!is_reported(&waiting(3, "reset")));
        assert!(is_reported(&waiting(3, "it answered 503")));
        messages.0.lock().unwrap().as_mut().unwrap().reported = ago(61);
        assert!(is_reported(&waiting(70, "it answered 503")));
        assert_eq!(messages.line(None).unwrap(), "data resumed after 0 s");
        assert_eq!(messages.line(None), None);
        assert!(is_reported(&waiting(2, "it answered 503")), "another wait");
    }
}
