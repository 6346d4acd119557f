use super::super::process::tests::{after_a_reboot, earlier, in_another_container};
use super::*;

const QUICK: Timing =
    Timing { beat: Duration::from_millis(2), patience: Duration::from_millis(250), settle: Duration::from_millis(10) };
/// With which nothing is found out by waiting.
const PATIENT: Timing = Timing { patience: Duration::from_secs(100_000), ..QUICK };

fn take(folder: &Path, process: Process, timing: Timing) -> Result<Lease, Refusal> {
    Lease::take(folder, process, false, timing)
}

fn refused(outcome: Result<Lease, Refusal>) -> Owner {
    match outcome {
        Err(Refusal::Held(owner)) => owner,
        other => panic!("not refused: {other:?}"),
    }
}

/// Leaves the lease of a process that was killed.
fn leave(folder: &Path, process: Process) {
    let content = Content::new("killed".to_owned(), process);
    fs::write(folder.join(LEASE), content.to_bytes().unwrap()).unwrap();
}

#[test]
fn a_living_owner_is_named_and_releases_the_lease_at_its_end() {
    let folder = tempfile::tempdir().unwrap();
    let lease = take(folder.path(), Process::own(), PATIENT).unwrap();
    let owner = refused(take(folder.path(), Process::own(), PATIENT));
    assert_eq!((owner.pid, owner.host), (std::process::id(), super::super::host()));
    assert_eq!(lease.lost_to(), None);
    drop(lease);
    assert!(!folder.path().join(LEASE).exists());
    take(folder.path(), Process::own(), PATIENT).unwrap();
}

#[test]
fn an_owner_elsewhere_is_known_by_its_beats() {
    let own = Process::own();
    for elsewhere in [after_a_reboot(&own), in_another_container(&own)] {
        let folder = tempfile::tempdir().unwrap();
        let lease = take(folder.path(), elsewhere.clone(), QUICK).unwrap();
        assert_eq!(refused(take(folder.path(), own.clone(), PATIENT)).pid, elsewhere.pid);
        drop(lease);
        leave(folder.path(), elsewhere);
        take(folder.path(), own.clone(), QUICK).unwrap();
    }
}

#[test]
fn a_killed_owner_of_this_machine_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    leave(folder.path(), earlier(&Process::own()));
    take(folder.path(), Process::own(), PATIENT).unwrap();
}

#[test]
fn a_file_that_is_no_lease_is_replaced_after_the_wait() {
    for content in ["", "half a lea"] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(LEASE), content).unwrap();
        let lease = take(folder.path(), Process::own(), QUICK).unwrap();
        assert_eq!(lease.lost_to(), None);
    }
}

#[test]
fn a_lease_that_was_taken_over_is_lost_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let lease = take(folder.path(), Process::own(), PATIENT).unwrap();
    let path = folder.path().join(LEASE);
    let theirs = Content::new("7".to_owned(), after_a_reboot(&Process::own()));
    theirs.replace(&path).unwrap();
    lease.state.renew().unwrap();
    assert_eq!(lease.lost_to().unwrap().pid, std::process::id());
    drop(lease);
    assert_eq!(fs::read(&path).unwrap(), theirs.to_bytes().unwrap());
}

#[test]
fn a_late_owner_looks_before_it_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Timing { beat: PATIENT.patience, patience: Duration::ZERO, ..QUICK };
    let lease = take(folder.path(), Process::own(), slow).unwrap();
    let theirs = Content::new("7".to_owned(), after_a_reboot(&Process::own()));
    theirs.replace(&folder.path().join(LEASE)).unwrap();
    assert!(lease.lost_to().is_some());
}

#[test]
fn an_inherited_lease_lasts_as_long_as_either_process() {
    let (folder, own) = (tempfile::tempdir().unwrap(), Process::own());
    let path = folder.path().join(LEASE);
    let parent = take(folder.path(), own.clone(), PATIENT).unwrap();
    let child = Lease::take(folder.path(), in_another_container(&own), true, PATIENT).unwrap();
    drop(child);
    assert_eq!(refused(take(folder.path(), own.clone(), PATIENT)).pid, own.pid);
    let child = Lease::take(folder.path(), in_another_container(&own), true, PATIENT).unwrap();
    drop(parent);
    assert!(path.exists());
    assert_eq!(child.lost_to(), None);
    drop(child);
    assert!(!path.exists());
}

#[test]
fn an_owner_that_was_written_over_enters_itself_again() {
    let (folder, own) = (tempfile::tempdir().unwrap(), Process::own());
    let path = folder.path().join(LEASE);
    let silent = Timing { beat: PATIENT.patience, ..PATIENT };
    let parent = take(folder.path(), own.clone(), silent).unwrap();
    let before = fs::read(&path).unwrap();
    let child = Lease::take(folder.path(), in_another_container(&own), true, silent).unwrap();
    fs::write(&path, before).unwrap();
    child.state.renew().unwrap();
    let content = Content::parse(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(content.processes, [own.clone(), in_another_container(&own)]);
    drop((parent, child));
}

#[test]
fn a_removed_lease_is_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let lease = take(folder.path(), Process::own(), PATIENT).unwrap();
    fs::remove_file(folder.path().join(LEASE)).unwrap();
    lease.state.renew().unwrap();
    assert_eq!(lease.lost_to(), None);
    assert_eq!(refused(take(folder.path(), Process::own(), PATIENT)).pid, std::process::id());
}

#[test]
fn of_several_that_find_a_killed_owner_one_keeps_the_lease() {
    let own = Process::own();
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        leave(folder.path(), earlier(&own));
        let leases: Vec<Lease> = thread::scope(|scope| {
            let takers: Vec<_> = (0..3).map(|_| scope.spawn(|| take(folder.path(), own.clone(), PATIENT))).collect();
            takers.into_iter().filter_map(|taker| taker.join().unwrap().ok()).collect()
        });
        for lease in &leases {
            lease.state.renew().unwrap();
        }
        assert_eq!(leases.iter().filter(|lease| lease.lost_to().is_none()).count(), 1);
    }
}
