//! How much memory this machine has left for a program: what the kernel could give without swapping, what the program's
//! control groups (containers, batch systems) still allow, and what its own limits (`ulimit`) do.

use std::{
    fs,
    path::{Path, PathBuf},
};

use rustix::process::{Resource, getrlimit};

use crate::address_space;

/// Bytes that can still be allocated, and what bounds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AvailableMemory {
    pub(super) bytes: u64,
    /// Such as `free on this machine`.
    pub(super) origin: &'static str,
}

/// Returns the tightest memory limit of a process that will start `threads` threads; `None` if the system reports none.
pub(super) fn available_memory(threads: usize) -> Option<AvailableMemory> {
    let data = getrlimit(Resource::Data).current;
    available_under(Path::new("/"), &limits(address_space::limit(), data, threads))
}

/// A resource limit of the process (`ulimit`).
struct Limit {
    bytes: Option<u64>,
    /// The line of `/proc/self/status` with the bytes of it that are in use.
    usage_line: &'static str,
    /// Bytes of it that threads will reserve.
    reserved: u64,
    origin: &'static str,
}

fn limits(address_space: Option<u64>, data: Option<u64>, threads: usize) -> [Limit; 2] {
    let reserved = address_space.map_or(0, |limit| address_space::reserved(threads, limit));
    let address_space_origin = "left of the address space that `ulimit -v` allows, less what threads reserve";
    let data_origin = "left of the data that `ulimit -d` allows";
    [
        Limit { bytes: address_space, usage_line: "VmSize:", reserved, origin: address_space_origin },
        Limit { bytes: data, usage_line: "VmData:", reserved: 0, origin: data_origin },
    ]
}

fn available_under(root: &Path, limits: &[Limit]) -> Option<AvailableMemory> {
    let read = |file| fs::read_to_string(root.join(file)).unwrap_or_default();
    let kibibytes = |text: &str, name| field(text, name).map(|kibibytes| kibibytes * 1024);
    let machine = kibibytes(&read("proc/meminfo"), "MemAvailable:")
        .map(|bytes| AvailableMemory { bytes, origin: "free on this machine" });
    let groups = cgroup_allowances(root)
        .into_iter()
        .map(|bytes| AvailableMemory { bytes, origin: "left of what this process's control group allows" });
    let status = read("proc/self/status");
    let limits = limits.iter().filter_map(|&Limit { bytes, usage_line, reserved, origin }| {
        let used_bytes = kibibytes(&status, usage_line).unwrap_or(0);
        Some(AvailableMemory { bytes: bytes?.saturating_sub(used_bytes).saturating_sub(reserved), origin })
    });
    machine.into_iter().chain(groups).chain(limits).min_by_key(|available| available.bytes)
}

/// Returns the bytes that each control group from the program's own up to the root still allows.
fn cgroup_allowances(root: &Path) -> Vec<u64> {
    let membership = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut allowances = Vec::new();
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (parts.next(), parts.next()) else {
            continue;
        };
        let (mount, names) = match controllers {
            "" => ("sys/fs/cgroup", V2),
            _ if controllers.split(',').any(|name| name == "memory") => ("sys/fs/cgroup/memory", V1),
            _ => continue,
        };
        let (mount, group) = (root.join(mount), PathBuf::from(group.trim_start_matches('/')));
        allowances.extend(group.ancestors().filter_map(|group| allowance(&mount.join(group), names)));
    }
    allowances
}

#[derive(Clone, Copy)]
struct FileNames {
    limit: &'static str,
    usage: &'static str,
    inactive_file: &'static str,
}

const V2: FileNames = FileNames { limit: "memory.max", usage: "memory.current", inactive_file: "inactive_file" };
const V1: FileNames =
    FileNames { limit: "memory.limit_in_bytes", usage: "memory.usage_in_bytes", inactive_file: "total_inactive_file" };

/// The limit less what is used; file pages that have not been touched lately are given back on demand and do not count.
fn allowance(group: &Path, names: FileNames) -> Option<u64> {
    let read = |name| fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read(names.limit)?.trim().parse().ok()?;
    let usage: u64 = read(names.usage)?.trim().parse().ok()?;
    let reclaimable = read("memory.stat").and_then(|stat| field(&stat, names.inactive_file)).unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next())??.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn bytes_under(root: &Path) -> Option<u64> {
        available_under(root, &[]).map(|available| available.bytes)
    }

    #[test]
    fn this_machine_reports_its_memory() {
        assert!(available_memory(1).unwrap().bytes > 1 << 20);
    }

    #[test]
    fn a_container_limit_bounds_free_memory() {
        let root = machine(&[
            ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"),
            ("proc/self/cgroup", "0::/jobs/mine\n"),
            ("sys/fs/cgroup/jobs/memory.max", "5000000\n"),
            ("sys/fs/cgroup/jobs/memory.current", "2000000\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 500000\n"),
            ("sys/fs/cgroup/jobs/mine/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/mine/memory.current", "1\n"),
        ]);
        assert_eq!(bytes_under(root.path()), Some(3_500_000));
    }

    #[test]
    fn cgroup_v1_limits_are_read() {
        let root = machine(&[
            ("proc/meminfo", "MemAvailable: 8000 kB\n"),
            ("proc/self/cgroup", "7:cpu:/\n6:memory:/box\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "400\n"),
        ]);
        assert_eq!(bytes_under(root.path()), Some(600));
    }

    #[test]
    fn without_cgroups_meminfo_is_used() {
        let root = machine(&[("proc/meminfo", "MemAvailable: 8 kB\n")]);
        assert_eq!(bytes_under(root.path()), Some(8192));
        assert_eq!(bytes_under(&root.path().join("nowhere")), None);
    }

    #[test]
    fn the_tightest_limit_is_named() {
        let root = machine(&[
            ("proc/meminfo", "MemAvailable: 8 kB\n"),
            ("proc/self/status", "VmPeak: 9 kB\nVmSize: 4 kB\nVmData: 1 kB\n"),
        ]);
        let under =
            |address_space, data, threads| available_under(root.path(), &limits(address_space, data, threads)).unwrap();
        assert_eq!(under(None, None, 1).origin, "free on this machine");
        let address_space_origin = under(Some(address_space::reserved(1, 0) + 10_000), None, 1);
        assert_eq!(address_space_origin.bytes, 10_000 - 4096);
        assert!(address_space_origin.origin.contains("ulimit -v"));
        assert_eq!(under(Some(1 << 40), Some(2000), 9).bytes, 2000 - 1024);
        assert_eq!(under(Some(1), None, 1).bytes, 0, "more is used already");
    }
}
