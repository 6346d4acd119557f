//! Identifies a process across machines, reboots and containers.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process that can be told from every other one: process ids repeat on other machines, after a reboot, in containers
/// and in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Process {
    /// The boot of its machine, which containers share.
    boot: String,
    /// The namespace of its process id.
    namespace: String,
    /// Its process id there.
    pub(super) pid: u32,
    /// When it started, in clock ticks since the boot.
    start: u64,
}

/// What is known of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    Lives,
    Ended,
    /// It belongs to another machine, boot or container.
    Elsewhere,
}

impl Process {
    /// This process. Where the system does not tell one boot from another, no process counts as one of here.
    pub(super) fn own() -> Self {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default().to_string_lossy().into_owned();
        let pid = std::process::id();
        Self { boot, namespace, pid, start: start_of(pid).unwrap_or(0) }
    }

    /// Returns what this process, which sees the same processes as `here` where both say so, is known to be.
    pub(super) fn life(&self, here: &Self) -> Life {
        if self.boot.is_empty() || self.namespace.is_empty() || !self.is_neighbour(here) {
            return Life::Elsewhere;
        }
        if start_of(self.pid) == Some(self.start) { Life::Lives } else { Life::Ended }
    }

    fn is_neighbour(&self, other: &Self) -> bool {
        (&self.boot, &self.namespace) == (&other.boot, &other.namespace)
    }
}

/// Returns when a process of this namespace started, in clock ticks since the boot; None if there is no such process.
fn start_of(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain both spaces and parentheses; the start is the 20th field after it.
    let (_, fields) = status.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next()?;
    (!matches!(state, "Z" | "X")).then(|| fields.nth(18)?.parse().ok())?
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A process of another boot, with the same process id.
    pub(in super::super) fn after_a_reboot(process: &Process) -> Process {
        Process { boot: "another".to_owned(), ..process.clone() }
    }

    /// A process of another container on the same machine, with the same process id.
    pub(in super::super) fn in_another_container(process: &Process) -> Process {
        Process { namespace: "pid:[1]".to_owned(), ..process.clone() }
    }

    /// An ended process of this machine, whose id belongs to another process by now.
    pub(in super::super) fn earlier(process: &Process) -> Process {
        Process { start: process.start.wrapping_sub(1), ..process.clone() }
    }

    #[test]
    fn equal_process_ids_are_told_apart() {
        let own = Process::own();
        assert_eq!(own.life(&own), Life::Lives);
        assert_eq!(earlier(&own).life(&own), Life::Ended);
        assert_eq!(after_a_reboot(&own).life(&own), Life::Elsewhere);
        assert_eq!(in_another_container(&own).life(&own), Life::Elsewhere);
        let nameless = Process { boot: String::new(), ..own };
        assert_eq!(nameless.life(&nameless), Life::Elsewhere);
    }
}
