//! Which steps are profiled, as `--profile` names them.

use std::{fmt, ops::RangeInclusive, str::FromStr};

use crate::error::{Result, TrainerError};

/// Steps of a session that come before those that are counted: the first ones touch their memory for the first time.
const WARM_UP: u64 = 2;
/// Most steps that are profiled: no viewer opens the trace of more.
const MOST: u64 = 100;

/// Steps to profile: a range of step numbers, or how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProfileSteps {
    /// This many, after the first two of the session.
    Count(u64),
    /// From the first of these to the last.
    Range(u64, u64),
}

impl FromStr for ProfileSteps {
    type Err = String;

    /// Reads `3`, `10-12`, or `10..13`, whose end is not part of it.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let number = |text: &str| {
            text.trim().parse::<u64>().ok().filter(|&number| number > 0).ok_or(
                "is neither a number of steps, as in `3`, nor a range, as in `10-12` or `10..13` (steps 10, 11 and 12)",
            )
        };
        let steps = if let Some((first, end)) = text.split_once("..") {
            Self::Range(number(first)?, number(end)?.saturating_sub(1))
        } else if let Some((first, last)) = text.split_once('-') {
            Self::Range(number(first)?, number(last)?)
        } else {
            Self::Count(number(text)?)
        };
        match steps {
            Self::Range(first, last) if first > last => Err("is a range that ends before it begins".to_owned()),
            steps if steps.count() > MOST => Err(format!("are {} steps: at most {MOST} are profiled", steps.count())),
            steps => Ok(steps),
        }
    }
}

impl ProfileSteps {
    fn count(self) -> u64 {
        match self {
            Self::Count(count) => count,
            Self::Range(first, last) => last - first + 1,
        }
    }

    /// The numbers of the steps, for a session that begins after step `steps_done` and ends with step `last`, if it is
    /// known.
    ///
    /// # Errors
    /// [`TrainerError::Request`] if the session does not take them all.
    pub fn resolve(self, steps_done: u64, last: Option<u64>) -> Result<RangeInclusive<u64>> {
        let available = last.map_or(u64::MAX, |last| last.saturating_sub(steps_done));
        let steps = match self {
            // A session that is just long enough has no steps to warm up with.
            Self::Count(count) => {
                let skipped_steps = WARM_UP.min(available.saturating_sub(count));
                steps_done + skipped_steps + 1..=(steps_done + skipped_steps).saturating_add(count)
            }
            Self::Range(first, last) => first..=last,
        };
        if *steps.start() <= steps_done {
            return Err(TrainerError::Request(format!(
                "--profile {self} begins with step {}, and this session begins after step {steps_done}: name later \
                 steps, or how many",
                steps.start()
            )));
        }
        match last {
            Some(last) if *steps.end() > last => Err(TrainerError::Request(format!(
                "--profile {self} asks for step {}, and training ends with step {last}: name earlier steps, or fewer",
                steps.end()
            ))),
            _ => Ok(steps),
        }
    }
}

impl fmt::Display for ProfileSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Range(first, last) => write!(f, "{first}-{last}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> std::result::Result<ProfileSteps, String> {
        text.parse()
    }

    #[test]
    fn ranges_and_counts_are_read() {
        assert_eq!(parsed("3"), Ok(ProfileSteps::Count(3)));
        assert_eq!(parsed("10-12"), Ok(ProfileSteps::Range(10, 12)));
        assert_eq!(parsed("10..13"), Ok(ProfileSteps::Range(10, 12)));
        assert_eq!(parsed("7-7"), Ok(ProfileSteps::Range(7, 7)));
    }

    #[test]
    fn what_names_no_steps_is_refused() {
        for text in ["", "0", "-3", "3-", "a..b", "1.5", "10..=12", "12-10", "10..10", "1-101", "1000000", "1..1"] {
            assert!(parsed(text).is_err(), "{text}");
        }
    }

    #[test]
    fn counted_steps_follow_the_first_two() {
        let resolved =
            |steps: ProfileSteps, steps_done, last| steps.resolve(steps_done, last).map_err(|error| error.to_string());
        assert_eq!(resolved(ProfileSteps::Count(3), 0, None), Ok(3..=5));
        assert_eq!(resolved(ProfileSteps::Count(3), 100, Some(1000)), Ok(103..=105));
        assert_eq!(resolved(ProfileSteps::Count(3), 0, Some(4)), Ok(2..=4), "as many as there are");
        assert!(resolved(ProfileSteps::Count(5), 0, Some(4)).unwrap_err().contains("ends with step 4"));
        assert_eq!(resolved(ProfileSteps::Range(10, 12), 9, Some(12)), Ok(10..=12));
        assert!(resolved(ProfileSteps::Range(10, 12), 10, None).unwrap_err().contains("begins after step 10"));
    }
}
