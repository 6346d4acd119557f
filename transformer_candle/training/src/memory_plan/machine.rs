//! How much memory this machine has left for a program: what the kernel could give without swapping, and what the
//! program's control groups (containers, batch systems) still allow.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Bytes that can still be allocated; none where the system does not tell.
pub(super) fn available_memory() -> Option<u64> {
    available_under(Path::new("/"))
}

fn available_under(root: &Path) -> Option<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let of_machine = field(&meminfo, "MemAvailable:").map(|kilobytes| kilobytes * 1024);
    of_machine.into_iter().chain(of_control_groups(root)).min()
}

/// What each control group from the program's own up to the root still allows.
fn of_control_groups(root: &Path) -> Vec<u64> {
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

    #[test]
    fn this_machine_tells_its_memory() {
        assert!(available_memory().unwrap() > 1 << 20);
    }

    #[test]
    fn a_container_allows_less_than_the_machine_has() {
        let root = machine(&[
            ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"),
            ("proc/self/cgroup", "0::/jobs/mine\n"),
            ("sys/fs/cgroup/jobs/memory.max", "5000000\n"),
            ("sys/fs/cgroup/jobs/memory.current", "2000000\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 1\ninactive_file 500000\n"),
            ("sys/fs/cgroup/jobs/mine/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/mine/memory.current", "1\n"),
        ]);
        assert_eq!(available_under(root.path()), Some(3_500_000));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_as_well() {
        let root = machine(&[
            ("proc/meminfo", "MemAvailable: 8000 kB\n"),
            ("proc/self/cgroup", "7:cpu:/\n6:memory:/box\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "400\n"),
        ]);
        assert_eq!(available_under(root.path()), Some(600));
    }

    #[test]
    fn without_groups_it_is_what_the_kernel_says_and_else_unknown() {
        let root = machine(&[("proc/meminfo", "MemAvailable: 8 kB\n")]);
        assert_eq!(available_under(root.path()), Some(8192));
        assert_eq!(available_under(&root.path().join("nowhere")), None);
    }
}
