//! When to try again, and how long to wait before.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::retry_status::{Waiting, Waits};
use super::settings::HubSettings;
use crate::DataError;
use crate::cancel::CancelToken;

/// The longest pause of our own choosing, and the longest one that the Hub may ask for (its rate limits are counted over
/// five minutes).
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
const LONGEST_ORDERED_PAUSE: Duration = Duration::from_secs(310);

/// Attempts at a Hub that has not answered at all: whoever waits hears within seconds that its address is wrong or the
/// network down.
const FIRST_ATTEMPTS: u32 = 6;

/// Attempts at a file that is not the one that was listed: of many servers one may be wrong.
const CONTRADICTED_ATTEMPTS: u32 = 4;

/// A request that did not give what was asked for.
#[derive(Debug)]
pub(super) enum Failure {
    /// Trying again cannot help.
    Final(DataError),
    /// Trying again may help; the Hub may have said when.
    Passing { url: String, message: String, wait: Option<Duration> },
    /// What came is not what the listing promised. That stays so where the data set was changed, and passes where a server
    /// held a wrong copy.
    Contradiction { url: String, error: DataError },
}

/// How a read has gone since its last progress.
pub(super) struct Patience<'a> {
    settings: &'a HubSettings,
    cancel: &'a CancelToken,
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
    pub(super) fn new(
        settings: &'a HubSettings,
        cancel: &'a CancelToken,
        answered: &'a AtomicBool,
        waits: &'a Waits,
    ) -> Self {
        Self { settings, cancel, answered, waits, failing: None }
    }

    /// Something came through: what failed before no longer counts.
    pub(super) fn progress(&mut self) {
        if let Some(failing) = self.failing.take() {
            self.waits.over(failing.number);
        }
    }

    /// Waits before the next attempt, or gives up.
    pub(super) fn wait(&mut self, failure: Failure) -> Result<(), DataError> {
        let (since, failures, number) = match &self.failing {
            Some(failing) => (failing.since, failing.failures + 1, Some(failing.number)),
            None => (Instant::now(), 1, None),
        };
        let (url, reason, ordered) = match failure {
            Failure::Final(error) => return Err(error),
            Failure::Contradiction { error, .. } if failures >= CONTRADICTED_ATTEMPTS => return Err(error),
            Failure::Contradiction { url, error } => (url, error.to_string(), None),
            Failure::Passing { url, message, wait } => (url, message, wait),
        };
        let left = self.settings.patience.saturating_sub(since.elapsed());
        let unknown = !self.answered.load(Ordering::Relaxed);
        if left.is_zero() || (unknown && failures >= FIRST_ATTEMPTS) {
            return Err(DataError::Network { url, attempts: failures, message: reason });
        }
        // What the Hub orders is the least: one that goes on failing is not asked ever faster.
        let ordered = ordered.unwrap_or_default().min(LONGEST_ORDERED_PAUSE);
        let pause = self.pause(failures).max(ordered).min(left);
        let number = self.waits.note(number, Waiting { url, reason, since, next_attempt: Instant::now() + pause });
        self.failing = Some(Failing { since, failures, number });
        self.cancel.wait(pause)
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
        let (settings, cancel, waits) = (HubSettings::default(), CancelToken::new(), Waits::default());
        let patience = Patience::new(&settings, &cancel, &ANSWERED, &waits);
        for (failures, full) in [(1, 0.2), (2, 0.4), (5, 3.2), (10, 60.0), (100, 60.0)] {
            let pause = patience.pause(failures).as_secs_f64();
            assert!((full / 2.0..=full).contains(&pause), "{failures}: {pause}");
        }
    }

    #[test]
    fn only_the_time_without_progress_counts() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (cancel, waits) = (CancelToken::new(), Waits::default());
        let mut patience = Patience::new(&settings, &cancel, &ANSWERED, &waits);
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
        let (cancel, waits) = (CancelToken::new(), Waits::default());
        let mut first = Patience::new(&settings, &cancel, &ANSWERED, &waits);
        assert_eq!(waits.longest(), None);
        first.wait(passing()).unwrap();
        let told = waits.longest().unwrap().to_string();
        assert_eq!(told, "waiting for the Hub for 0 s: http://hub/x: reset; trying again");
        let mut second = Patience::new(&settings, &cancel, &ANSWERED, &waits);
        second.wait(passing()).unwrap();
        first.progress();
        assert!(waits.longest().is_some());
        drop(second);
        assert_eq!(waits.longest(), None);
    }

    #[test]
    fn the_next_attempt_is_told_when_the_hub_says_to_wait() {
        let (settings, cancel, waits) = (HubSettings::default(), CancelToken::new(), Waits::default());
        let mut patience = Patience::new(&settings, &cancel, &ANSWERED, &waits);
        cancel.cancel();
        let Failure::Passing { url, message, .. } = passing() else { unreachable!() };
        let ordered = Failure::Passing { url, message, wait: Some(Duration::from_secs(12)) };
        patience.wait(ordered).unwrap_err();
        let told = waits.longest().unwrap().to_string();
        assert_eq!(told, "waiting for the Hub for 0 s: http://hub/x: reset; next try in 12 s");
    }

    #[test]
    fn what_contradicts_the_listing_is_asked_for_a_few_times() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (cancel, waits) = (CancelToken::new(), Waits::default());
        let mut patience = Patience::new(&settings, &cancel, &ANSWERED, &waits);
        let url = || "http://hub/x".to_owned();
        let failure = || Failure::Contradiction {
            url: url(),
            error: DataError::Answer { url: url(), message: "shorter".to_owned() },
        };
        let failures = (0..100).take_while(|_| patience.wait(failure()).is_ok()).count();
        assert_eq!(failures, 3);
    }

    #[test]
    fn a_hub_that_never_answered_is_given_up_sooner() {
        let settings = HubSettings { pause: Duration::ZERO, ..HubSettings::default() };
        let (cancel, waits, answered) = (CancelToken::new(), Waits::default(), AtomicBool::new(false));
        let mut patience = Patience::new(&settings, &cancel, &answered, &waits);
        let failures = (0..100).take_while(|_| patience.wait(passing()).is_ok()).count();
        assert_eq!(failures, 5);
    }

    #[test]
    fn a_stop_ends_the_waiting_at_once() {
        let settings = HubSettings { pause: Duration::from_mins(10), ..HubSettings::default() };
        let (cancel, waits) = (CancelToken::new(), Waits::default());
        cancel.cancel();
        let error = Patience::new(&settings, &cancel, &ANSWERED, &waits).wait(passing()).unwrap_err();
        assert!(matches!(error, DataError::Closed));
    }
}
