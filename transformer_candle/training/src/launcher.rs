//! The program that launched this one, as the environment names it: the session counts from its start, and ends when it
//! does.

use std::env;
use std::time::{Duration, Instant, SystemTime};

#[cfg(target_os = "linux")]
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::stop::{StopReason, StopSignal};

/// Names the launcher in the environment: its process id, when it started in seconds since 1970, and what was typed for
/// it, with colons in between.
pub const LAUNCHER: &str = "ORCHESTRATE_LAUNCHER";

/// A process that launched this one or one of its parents.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launcher {
    process_id: i32,
    started: Duration,
}

impl Launcher {
    /// Returns the launcher that the environment names; none if this process was started by hand.
    pub fn from_environment() -> Option<Self> {
        Self::parse(&env::var(LAUNCHER).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let (process_id, rest) = text.split_once(':')?;
        let uptime = rest.split_once(':').map_or(rest, |(uptime, _)| uptime);
        let uptime = Duration::try_from_secs_f64(uptime.parse().ok()?).ok()?;
        Some(Self { process_id: process_id.parse().ok()?, started: uptime })
    }

    /// Returns when it started.
    pub fn start(self) -> Option<Instant> {
        let age = SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(self.started)?;
        Instant::now().checked_sub(age)
    }

    /// Asks this process to stop, by SIGTERM, as soon as the launcher has ended, however it ended. Does nothing if another
    /// process stands between them, nor on systems other than Linux.
    pub fn stop_with_it(self, stop: &StopSignal) {
        #[cfg(target_os = "linux")]
        {
            let parent = || getppid().map(Pid::as_raw_pid);
            if parent() != Some(self.process_id) {
                return;
            }
            let is_set = set_parent_process_death_signal(Some(Signal::TERM)).is_ok();
            // It may have ended in between.
            if is_set && parent() != Some(self.process_id) {
                stop.request(StopReason::Terminate);
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = stop;
    }
}

/// Returns what to type for the program `orchestrate`: what was typed for the launcher, where there is one.
pub(crate) fn orchestrate() -> String {
    let launcher = env::var(LAUNCHER).unwrap_or_default();
    launcher.splitn(3, ':').nth(2).unwrap_or("orchestrate").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_counts_from_the_launcher_s_start() {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        for command in ["", ":.venv/bin/orchestrate"] {
            let launcher = Launcher::parse(&format!("17:{}{command}", now - 100.0)).unwrap();
            let age = launcher.start().unwrap().elapsed();
            assert!(age >= Duration::from_secs(100) && age < Duration::from_mins(10), "{age:?}");
        }
        for text in ["", "17", "17:", "x:1.0", "17:-1", "17:nan"] {
            assert_eq!(Launcher::parse(text), None, "{text}");
        }
        let later = Launcher::parse(&format!("17:{}", now + 1e6)).unwrap();
        assert_eq!(later.start(), None, "the clock was set back");
    }
}
