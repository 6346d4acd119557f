//! Retries with exponential backoff.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::retry_status::RetryStatus;
use super::settings::HubSettings;
use crate::DataError;
use crate::cancel::CancelToken;

/// The longest delay that the backoff chooses, and the longest that the Hub may request (its rate limits are counted
/// over five minutes).
const MAX_BACKOFF: Duration = Duration::from_mins(1);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(310);

/// Attempts at a Hub that has never responded: a wrong endpoint or a missing network should be reported within seconds.
const MAX_ATTEMPTS_WITHOUT_RESPONSE: u32 = 6;

/// Attempts at a file whose size differs from the listing: one of several servers may have a wrong copy.
const MAX_ATTEMPTS_ON_MISMATCH: u32 = 4;

/// Why a request did not give what was requested.
#[derive(Debug)]
pub(super) enum RequestError {
    /// Retrying cannot help.
    Permanent(DataError),
    /// Retrying may help; the server may have said when.
    Transient { url: String, message: String, retry_after: Option<Duration> },
    /// The response contradicts the listing. Permanent if the data set was changed, transient if one server has a wrong
    /// copy.
    ListingMismatch { url: String, error: DataError },
}

/// The retries of one read: exponential backoff since its last progress.
pub(super) struct Backoff<'a> {
    settings: &'a HubSettings,
    cancel: &'a CancelToken,
    /// Whether the Hub has ever responded.
    responded: &'a AtomicBool,
    streak: Option<FailureStreak>,
}

/// Consecutive failures without progress.
struct FailureStreak {
    since: Instant,
    failures: u32,
    /// Id of the request in the [`super::RetryMonitor`].
    id: u64,
}

impl<'a> Backoff<'a> {
    pub(super) fn new(settings: &'a HubSettings, cancel: &'a CancelToken, responded: &'a AtomicBool) -> Self {
        Self { settings, cancel, responded, streak: None }
    }

    /// Resets the backoff after progress.
    pub(super) fn progress(&mut self) {
        if let Some(streak) = self.streak.take() {
            self.settings.retries.remove(streak.id);
        }
    }

    /// Waits before the next attempt, or returns the error if there must not be one.
    pub(super) fn wait(&mut self, failure: RequestError) -> Result<(), DataError> {
        let (since, failures, id) = match &self.streak {
            Some(streak) => (streak.since, streak.failures + 1, Some(streak.id)),
            None => (Instant::now(), 1, None),
        };
        let (url, reason, retry_after) = match failure {
            RequestError::Permanent(error) => return Err(error),
            RequestError::ListingMismatch { error, .. } if failures >= MAX_ATTEMPTS_ON_MISMATCH => return Err(error),
            RequestError::ListingMismatch { url, error } => (url, error.to_string(), None),
            RequestError::Transient { url, message, retry_after } => (url, message, retry_after),
        };
        let remaining = self.settings.retry_timeout.saturating_sub(since.elapsed());
        let unreachable = !self.responded.load(Ordering::Relaxed);
        if remaining.is_zero() || (unreachable && failures >= MAX_ATTEMPTS_WITHOUT_RESPONSE) {
            return Err(DataError::Network { url, attempts: failures, message: reason });
        }
        // The server's request is a minimum: a server that keeps failing must not be asked ever faster.
        let retry_after = retry_after.unwrap_or_default().min(MAX_RETRY_AFTER);
        let delay = self.backoff(failures).max(retry_after).min(remaining);
        let id = self
            .settings
            .retries
            .record_failure(id, RetryStatus { url, reason, since, next_attempt: Instant::now() + delay });
        self.streak = Some(FailureStreak { since, failures, id });
        self.cancel.sleep(delay)
    }

    /// Returns a delay that doubles with each failure, random from half to all of it, so that readers do not retry at
    /// once.
    fn backoff(&self, failures: u32) -> Duration {
        let limit = self.settings.initial_backoff.saturating_mul(1 << (failures - 1).min(16)).min(MAX_BACKOFF);
        let random = RandomState::new().build_hasher().finish();
        limit.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
    }
}

impl Drop for Backoff<'_> {
    fn drop(&mut self) {
        self.progress();
    }
}

/// Parses the delay that the server requests: `Retry-After` in seconds, else the `t` of `RateLimit: "name";r=0;t=55`.
pub(super) fn retry_delay(retry_after: Option<&str>, rate_limit: Option<&str>) -> Option<Duration> {
    let seconds = retry_after.and_then(|value| value.trim().parse::<f64>().ok()).or_else(|| {
        let fields = rate_limit?.split(';').map(str::trim);
        fields.filter_map(|field| field.strip_prefix("t=")).find_map(|value| value.parse().ok())
    })?;
    Duration::try_from_secs_f64(seconds.max(0.0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    static RESPONDED: AtomicBool = AtomicBool::new(true);

    fn transient() -> RequestError {
        RequestError::Transient { url: "http://hub/x".to_owned(), message: "reset".to_owned(), retry_after: None }
    }

    #[test]
    fn retry_headers_are_parsed() {
        let seconds = |value: Option<Duration>| value.map(|wait| wait.as_secs_f64());
        assert_eq!(seconds(retry_delay(Some("7"), None)), Some(7.0));
        assert_eq!(seconds(retry_delay(None, Some("\"resolvers\";r=0;t=55"))), Some(55.0));
        assert_eq!(seconds(retry_delay(Some("Wed, 21 Oct 2026 07:28:00 GMT"), None)), None);
        assert_eq!(seconds(retry_delay(Some("-1"), None)), Some(0.0));
        assert_eq!(seconds(retry_delay(Some("1e300"), None)), None);
        assert_eq!(seconds(retry_delay(None, None)), None);
    }

    #[test]
    fn backoff_doubles_up_to_a_minute_with_jitter() {
        let (settings, cancel) = (HubSettings::default(), CancelToken::new());
        let backoff = Backoff::new(&settings, &cancel, &RESPONDED);
        for (failures, limit) in [(1, 0.2), (2, 0.4), (5, 3.2), (10, 60.0), (100, 60.0)] {
            let delay = backoff.backoff(failures).as_secs_f64();
            assert!((limit / 2.0..=limit).contains(&delay), "{failures}: {delay}");
        }
    }

    #[test]
    fn progress_resets_the_retry_timeout() {
        let settings = HubSettings { initial_backoff: Duration::ZERO, ..HubSettings::default() };
        let cancel = CancelToken::new();
        let mut backoff = Backoff::new(&settings, &cancel, &RESPONDED);
        let two_hours_later = |backoff: &mut Backoff| {
            let streak = backoff.streak.as_mut().unwrap();
            streak.since = streak.since.checked_sub(Duration::from_hours(2)).unwrap();
        };
        for _ in 0..1000 {
            backoff.wait(transient()).unwrap();
        }
        two_hours_later(&mut backoff);
        backoff.progress();
        backoff.wait(transient()).unwrap();
        two_hours_later(&mut backoff);
        let error = backoff.wait(transient()).unwrap_err();
        assert!(matches!(error, DataError::Network { attempts: 2, .. }), "{error}");
    }

    #[test]
    fn retries_are_reported_until_progress() {
        let settings = HubSettings { initial_backoff: Duration::ZERO, ..HubSettings::default() };
        let cancel = CancelToken::new();
        let mut first = Backoff::new(&settings, &cancel, &RESPONDED);
        assert_eq!(settings.retries.longest(), None);
        first.wait(transient()).unwrap();
        let message = settings.retries.longest().unwrap().to_string();
        assert_eq!(message, "waiting for the Hub for 0 s: http://hub/x: reset; retrying");
        let mut second = Backoff::new(&settings, &cancel, &RESPONDED);
        second.wait(transient()).unwrap();
        first.progress();
        assert!(settings.retries.longest().is_some());
        drop(second);
        assert_eq!(settings.retries.longest(), None);
    }

    #[test]
    fn retry_after_sets_the_next_attempt() {
        let (settings, cancel) = (HubSettings::default(), CancelToken::new());
        let mut backoff = Backoff::new(&settings, &cancel, &RESPONDED);
        cancel.cancel();
        let RequestError::Transient { url, message, .. } = transient() else { unreachable!() };
        let retry_after = RequestError::Transient { url, message, retry_after: Some(Duration::from_secs(12)) };
        backoff.wait(retry_after).unwrap_err();
        let message = settings.retries.longest().unwrap().to_string();
        assert_eq!(message, "waiting for the Hub for 0 s: http://hub/x: reset; retrying in 12 s");
    }

    #[test]
    fn listing_mismatches_are_retried_a_few_times() {
        let settings = HubSettings { initial_backoff: Duration::ZERO, ..HubSettings::default() };
        let cancel = CancelToken::new();
        let mut backoff = Backoff::new(&settings, &cancel, &RESPONDED);
        let url = || "http://hub/x".to_owned();
        let failure = || RequestError::ListingMismatch {
            url: url(),
            error: DataError::InvalidResponse { url: url(), message: "shorter".to_owned() },
        };
        let failures = (0..100).take_while(|_| backoff.wait(failure()).is_ok()).count();
        assert_eq!(failures, 3);
    }

    #[test]
    fn an_unreachable_hub_fails_after_few_attempts() {
        let settings = HubSettings { initial_backoff: Duration::ZERO, ..HubSettings::default() };
        let (cancel, responded) = (CancelToken::new(), AtomicBool::new(false));
        let mut backoff = Backoff::new(&settings, &cancel, &responded);
        let failures = (0..100).take_while(|_| backoff.wait(transient()).is_ok()).count();
        assert_eq!(failures, 5);
    }

    #[test]
    fn cancellation_ends_the_backoff() {
        let settings = HubSettings { initial_backoff: Duration::from_mins(10), ..HubSettings::default() };
        let cancel = CancelToken::new();
        cancel.cancel();
        let error = Backoff::new(&settings, &cancel, &RESPONDED).wait(transient()).unwrap_err();
        assert!(matches!(error, DataError::Closed));
    }
}
