//! The time limit of a session (`--time-limit`): the run ends, saved, before it is reached.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for what follows the last save: closing files, the summary, the end of the process.
const EXIT_TIME: Duration = Duration::from_secs(2);
/// How much longer than the longest save so far the last one may take, as a factor.
const SAVE_MARGIN: f64 = 1.5;

/// The rate at which a checkpoint is written, until one has been, in bytes per second: a slow network disk.
const ASSUMED_SAVE_RATE: f64 = 100e6;

/// A point in time at which the run must have ended, and the time that ending it takes.
#[derive(Debug, Default)]
pub struct TimeLimit {
    end: OnceLock<Instant>,
    step: Longest,
    evaluation: Longest,
    save: Longest,
}

/// The longest of several times, in milliseconds.
#[derive(Debug, Default)]
struct Longest(AtomicU64);

impl Longest {
    fn observe(&self, time: Duration) {
        self.0.fetch_max(time.as_millis() as u64, Ordering::Relaxed);
    }

    fn get(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }
}

impl TimeLimit {
    /// Sets the limit: `limit` after `start`. Only the first call counts.
    pub fn set(&self, start: Instant, limit: Duration) {
        if let Some(end) = start.checked_add(limit) {
            let _ = self.end.set(end);
        }
    }

    /// Reserves time for the first save, by the size of a checkpoint.
    pub(crate) fn expect_save(&self, bytes: u64) {
        self.save.observe(Duration::from_secs_f64(bytes as f64 / ASSUMED_SAVE_RATE));
    }

    /// Reserves time for another save as long as this one.
    pub(crate) fn observe_save(&self, time: Duration) {
        self.save.observe(time);
    }

    /// Reserves time for another step as long as this one.
    pub(crate) fn observe_step(&self, time: Duration) {
        self.step.observe(time);
    }

    /// Reserves time for another evaluation as long as this one, where the limit cannot interrupt it.
    pub(crate) fn observe_evaluation(&self, time: Duration) {
        self.evaluation.observe(time);
    }

    /// Whether the run must begin to end.
    pub(crate) fn is_reached(&self) -> bool {
        self.end.get().is_some_and(|end| {
            let reserved = self.step.get() + self.evaluation.get() + self.save.get().mul_f64(SAVE_MARGIN) + EXIT_TIME;
            Instant::now() + reserved >= *end
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_early_enough_to_save() {
        let (limit, now) = (TimeLimit::default(), Instant::now());
        limit.observe_step(Duration::from_mins(5));
        assert!(!limit.is_reached(), "there is none");
        limit.set(now, Duration::from_hours(1));
        limit.observe_save(Duration::from_mins(30));
        assert!(!limit.is_reached(), "50 min and 2 s are reserved");
        limit.observe_step(Duration::from_mins(4));
        limit.observe_evaluation(Duration::from_mins(9));
        assert!(!limit.is_reached(), "59 min and 2 s are reserved");
        limit.observe_save(Duration::from_mins(31));
        assert!(limit.is_reached(), "60.5 min are reserved");
    }

    #[test]
    fn the_first_save_is_expected_by_its_size() {
        let limit = TimeLimit::default();
        limit.set(Instant::now(), Duration::from_mins(1));
        limit.expect_save(3_000_000_000);
        assert!(!limit.is_reached(), "47 s are reserved");
        limit.expect_save(4_000_000_000);
        assert!(limit.is_reached(), "62 s are reserved");
    }
}
