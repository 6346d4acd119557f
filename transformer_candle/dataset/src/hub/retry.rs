//! When to try again, and how long to wait before.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::settings::HubSettings;
use crate::DataError;
use crate::stop::Stop;

/// The longest pause of our own choosing, and the longest one that the Hub may ask for (its rate limits are counted over
/// five minutes).
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
const LONGEST_ORDERED_PAUSE: Duration = Duration::from_secs(310);

/// Attempts at a Hub that has not answered at all: whoever waits hears within seconds that its address is wrong or the
/// network down.
const FIRST_ATTEMPTS: u32 = 5;

/// A request that did not give what was asked for.
#[derive(Debug)]
pub(super) enum Failure {
    /// Trying again cannot help.
    Final(DataError),
    /// Trying again may help; the Hub may have said when.
    Passing { url: String, message: String, wait: Option<Duration> },
}

/// Counts failures since the last progress.
pub(super) struct Patience<'a> {
    settings: &'a HubSettings,
    stop: &'a Stop,
    /// Whether the Hub has ever answered anything.
    answered: &'a AtomicBool,
    failures: u32,
}

impl<'a> Patience<'a> {
    pub(super) fn new(settings: &'a HubSettings, stop: &'a Stop, answered: &'a AtomicBool) -> Self {
        Self { settings, stop, answered, failures: 0 }
    }

    /// Something came through: what failed before no longer counts.
    pub(super) fn progress(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt, or gives up.
    pub(super) fn wait(&mut self, failure: Failure) -> Result<(), DataError> {
        let (url, message, ordered) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { url, message, wait } => (url, message, wait),
        };
        self.failures += 1;
        if self.failures >= self.attempts() {
            return Err(DataError::Network { url, attempts: self.failures, message });
        }
        let pause = match ordered {
            Some(ordered) => ordered.min(LONGEST_ORDERED_PAUSE),
            None => self.pause(),
        };
        tracing::warn!("{url}: {message}; trying again in {:.1} s", pause.as_secs_f64());
        self.stop.wait(pause)
    }

    fn attempts(&self) -> u32 {
        let most = if self.answered.load(Ordering::Relaxed) { u32::MAX } else { FIRST_ATTEMPTS };
        self.settings.attempts.min(most)
    }

    /// Doubles with each failure; between half and all of it, so that many readers do not come back at once.
    fn pause(&self) -> Duration {
        let full = self.settings.pause.saturating_mul(1 << (self.failures - 1).min(16)).min(LONGEST_PAUSE);
        let random = RandomState::new().build_hasher().finish();
        full.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
    }
}

/// What the Hub says about when to come back: `Retry-After` in seconds, else the `t` of `RateLimit: "name";r=0;t=55`.
pub(super) fn ordered_wait(retry_after: Option<&str>, rate_limit: Option<&str>) -> Option<Duration> {
    let seconds = retry_after.and_then(|value| value.trim().parse::<f64>().ok()).or_else(|| {
        let fields = rate_limit?.split(';').map(str::trim);
        fields.filter_map(|field| field.strip_prefix("t=")).find_map(|value| value.parse().ok())
    })?;
    Duration::try_from_secs_f64(seconds.max(0.0)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    static ANSWERED: AtomicBool = AtomicBool::new(true);

    fn passing() -> Failure {
        Failure::Passing { url: "http://hub/x".to_owned(), message: "reset".to_owned(), wait: None }
    }

    #[test]
    fn the_hub_s_word_about_waiting_is_understood() {
        let seconds = |value: Option<Duration>| value.map(|wait| wait.as_secs_f64());
        assert_eq!(seconds(ordered_wait(Some("7"), None)), Some(7.0));
        assert_eq!(seconds(ordered_wait(None, Some("\"resolvers\";r=0;t=55"))), Some(55.0));
        assert_eq!(seconds(ordered_wait(Some("Wed, 21 Oct 2026 07:28:00 GMT"), None)), None);
        assert_eq!(seconds(ordered_wait(Some("-1"), None)), Some(0.0));
        assert_eq!(seconds(ordered_wait(Some("1e300"), None)), None);
        assert_eq!(seconds(ordered_wait(None, None)), None);
    }

    #[test]
    fn pauses_double_within_a_random_half_and_stay_under_a_minute() {
        let settings = HubSettings::default();
        let stop = Stop::default();
        let mut patience = Patience::new(&settings, &stop, &ANSWERED);
        for (failures, full) in [(1, 0.5), (2, 1.0), (5, 8.0), (8, 60.0), (100, 60.0)] {
            patience.failures = failures;
            let pause = patience.pause().as_secs_f64();
            assert!((full / 2.0..=full).contains(&pause), "{failures}: {pause}");
        }
    }

    #[test]
    fn only_failures_without_progress_count() {
        let settings = HubSettings { attempts: 3, pause: Duration::ZERO, ..HubSettings::default() };
        let stop = Stop::default();
        let mut patience = Patience::new(&settings, &stop, &ANSWERED);
        for _ in 0..5 {
            patience.wait(passing()).unwrap();
            patience.wait(passing()).unwrap();
            patience.progress();
        }
        patience.wait(passing()).unwrap();
        patience.wait(passing()).unwrap();
        let error = patience.wait(passing()).unwrap_err();
        assert!(matches!(error, DataError::Network { attempts: 3, .. }), "{error}");
    }

    #[test]
    fn a_hub_that_never_answered_is_given_up_sooner() {
        let settings = HubSettings { attempts: 100, pause: Duration::ZERO, ..HubSettings::default() };
        let (stop, answered) = (Stop::default(), AtomicBool::new(false));
        let mut patience = Patience::new(&settings, &stop, &answered);
        let failures = (0..100).take_while(|_| patience.wait(passing()).is_ok()).count();
        assert_eq!(failures, 4);
    }

    #[test]
    fn a_stop_ends_the_waiting_at_once() {
        let settings = HubSettings { pause: Duration::from_mins(10), ..HubSettings::default() };
        let stop = Stop::default();
        stop.order();
        let error = Patience::new(&settings, &stop, &ANSWERED).wait(passing()).unwrap_err();
        assert!(matches!(error, DataError::Closed));
    }
}
