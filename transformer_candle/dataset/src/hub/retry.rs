//! When to try again, and how long to wait before.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::settings::HubSettings;
use super::waits::Waits;
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

/// How a read has gone since its last progress.
pub(super) struct Patience<'a> {
    settings: &'a HubSettings,
    stop: &'a Stop,
    /// Whether the Hub has ever answered anything.
    answered: &'a AtomicBool,
    waits: &'a Waits,
    failing: Option<Failing>,
}

/// Failures without a byte between them.
struct Failing {
    since: Instant,
    failures: u32,
    /// In [`Waits`].
    number: u64,
}

impl<'a> Patience<'a> {
    pub(super) fn new(settings: &'a HubSettings, stop: &'a Stop, answered: &'a AtomicBool, waits: &'a Waits) -> Self {
        Self { settings, stop, answered, waits, failing: None }
    }

    /// Something came through: what failed before no longer counts.
    pub(super) fn progress(&mut self) {
        if let Some(failing) = self.failing.take() {
            self.waits.over(failing.number);
        }
    }

    /// Waits before the next attempt, or gives up.
    pub(super) fn wait(&mut self, failure: Failure) -> Result<(), DataError> {
        let (url, message, ordered) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Passing { url, message, wait } => (url, message, wait),
        };
        let (since, failures, number) = match &self.failing {
            Some(failing) => (failing.since, failing.failures + 1, Some(failing.number)),
            None => (Instant::now(), 1, None),
        };
        let number = self.waits.note(number, since, &url, &message);
        self.failing = Some(Failing { since, failures, number });
        let left = self.settings.patience.saturating_sub(since.elapsed());
        let unknown = !self.answered.load(Ordering::Relaxed);
        if left.is_zero() || (unknown && failures >= FIRST_ATTEMPTS) {
            return Err(DataError::Network { url, attempts: failures, message });
        }
        // What the Hub orders is the least: one that goes on failing is not asked ever faster.
        let ordered = ordered.unwrap_or_default().min(LONGEST_ORDERED_PAUSE);
        let pause = self.pause(failures).max(ordered);
        tracing::warn!("{url}: {message}; trying again in {:.1} s", pause.as_secs_f64());
        self.stop.wait(pause.min(left))
    }

    /// Doubles with each failure; between half and all of it, so that many readers do not come back at once.
    fn pause(&self, failures: u32) -> Duration {
        let full = self.settings.pause.saturating_mul(1 << (failures - 1).min(16)).min(LONGEST_PAUSE);
        let random = RandomState::new().build_hasher().finish();
        full.mul_f64(0.5 + 0.5 * (random as f64 / u64::MAX as f64))
    }
}

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        self.progress();
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
        let (settings, stop, waits) = (HubSettings::default(), Stop::default(), Waits::default());
        let patience = Patience::new(&settings, &stop, &ANSWERED, &waits);
        for (failures, full) in [(1, 0.5), (2, 1.0), (5, 8.0), (8, 60.0), (100, 60.0)] {
            let pause = patience.pause(failures).as_secs_f64();
            assert!((full / 2.0..=full).contains(&pause), "{failures}: {pause}");
        }
    }

    #[test]
    fn only_the_time_without_progress_counts() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (stop, waits) = (Stop::default(), Waits::default());
        let mut patience = Patience::new(&settings, &stop, &ANSWERED, &waits);
        let two_hours_later = |patience: &mut Patience| {
            let failing = patience.failing.as_mut().unwrap();
            failing.since = failing.since.checked_sub(Duration::from_hours(2)).unwrap();
        };
        for _ in 0..1000 {
            patience.wait(passing()).unwrap();
        }
        two_hours_later(&mut patience);
        patience.progress();
        patience.wait(passing()).unwrap();
        two_hours_later(&mut patience);
        let error = patience.wait(passing()).unwrap_err();
        assert!(matches!(error, DataError::Network { attempts: 2, .. }), "{error}");
    }

    #[test]
    fn who_waits_says_for_what_until_it_comes() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (stop, waits) = (Stop::default(), Waits::default());
        let mut first = Patience::new(&settings, &stop, &ANSWERED, &waits);
        assert_eq!(waits.longest(), None);
        first.wait(passing()).unwrap();
        assert_eq!(waits.longest().unwrap(), "waiting 0 s for http://hub/x: reset");
        let mut second = Patience::new(&settings, &stop, &ANSWERED, &waits);
        second.wait(passing()).unwrap();
        first.progress();
        assert!(waits.longest().is_some());
        drop(second);
        assert_eq!(waits.longest(), None);
    }

    #[test]
    fn a_hub_that_never_answered_is_given_up_sooner() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (stop, waits, answered) = (Stop::default(), Waits::default(), AtomicBool::new(false));
        let mut patience = Patience::new(&settings, &stop, &answered, &waits);
        let failures = (0..100).take_while(|_| patience.wait(passing()).is_ok()).count();
        assert_eq!(failures, 4);
    }

    #[test]
    fn a_stop_ends_the_waiting_at_once() {
        let settings = HubSettings { pause: Duration::from_mins(10), ..HubSettings::default() };
        let (stop, waits) = (Stop::default(), Waits::default());
        stop.order();
        let error = Patience::new(&settings, &stop, &ANSWERED, &waits).wait(passing()).unwrap_err();
        assert!(matches!(error, DataError::Closed));
    }
}
