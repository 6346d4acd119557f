//! Full disks, failing disks and kills leave old checkpoints intact and no partial ones.

use std::cell::Cell;
use std::env;
use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::checkpoint::staging::{Sink, create_file};

/// A disk with a number of bytes left, and its error when they are used up.
struct FullingDisk {
    inner: Box<dyn Sink>,
    room: Rc<Cell<usize>>,
    error: io::ErrorKind,
}

impl Write for FullingDisk {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        // Disks fill up in the middle of a write.
        let fits = piece.len().min(self.room.get());
        if fits == 0 && !piece.is_empty() {
            return Err(self.error.into());
        }
        let count = self.inner.write(&piece[..fits])?;
        self.room.set(self.room.get() - count);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl Sink for FullingDisk {
    fn sync(&mut self) -> io::Result<()> {
        if self.room.get() == 0 { Err(self.error.into()) } else { self.inner.sync() }
    }
}

/// Saves step 2 beside an intact step 1 to a disk with limited room.
fn save_with_room(folder: &TempDir, bytes: usize, error: io::ErrorKind) -> Result<PathBuf> {
    let room = Rc::new(Cell::new(bytes));
    let create = |path: &Path| -> io::Result<Box<dyn Sink>> {
        Ok(Box::new(FullingDisk { inner: create_file(path)?, room: Rc::clone(&room), error }))
    };
    Tiny::at(Precision::Fp32, 2).save_through(folder.path(), &state_at(2), &create)
}

#[test]
fn a_full_disk_leaves_older_checkpoints_and_no_partial_one() {
    let folder = saved(&[1]);
    let checkpoint_bytes: u64 = list(folder.path()).unwrap()[0].bytes().unwrap();
    let mut refused = 0;
    for room in (0..checkpoint_bytes as usize).step_by(977) {
        let error = save_with_room(&folder, room, io::ErrorKind::StorageFull).unwrap_err();
        assert!(matches!(error, CheckpointError::NoSpace { step: 2, .. }), "{room}: {error}");
        assert_eq!(names(folder.path()), ["latest", "step-00000001"], "with room for {room}");
        assert_eq!(latest(folder.path()).unwrap(), folder.path().join("step-00000001"));
        refused += 1;
    }
    assert!(refused > 10);
    verify(&folder.path().join("step-00000001"), &CancelToken::new()).unwrap();
    save_with_room(&folder, 2 * checkpoint_bytes as usize, io::ErrorKind::StorageFull).unwrap();
}

#[test]
fn a_full_disk_error_names_the_way_out() {
    let folder = saved(&[1]);
    let message = save_with_room(&folder, 100, io::ErrorKind::StorageFull).unwrap_err().to_string();
    assert!(message.starts_with("not enough room for the checkpoint of step 2 in"), "{message}");
    assert!(message.contains("runtime.checkpoint.directory"), "{message}");
    assert!(!message.contains('\n'), "{message}");
}

#[test]
fn a_file_size_limit_error_names_the_way_out() {
    let folder = saved(&[1]);
    let error = save_with_room(&folder, 9000, io::ErrorKind::FileTooLarge).unwrap_err();
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("`ulimit -f`"), "{error}");
    assert_eq!(names(folder.path()), ["latest", "step-00000001"]);
}

#[test]
fn an_io_error_leaves_no_partial_checkpoint() {
    let folder = saved(&[1]);
    let error = save_with_room(&folder, 9000, io::ErrorKind::Other).unwrap_err();
    assert!(matches!(error, CheckpointError::Io { .. }), "{error}");
    assert_eq!(error.exit_code(), 1);
    assert!(error.to_string().contains("step-00000002"), "{error}");
    assert_eq!(names(folder.path()), ["latest", "step-00000001"]);
}

#[test]
fn readers_see_the_previous_checkpoint_during_a_save() {
    let folder = saved(&[1]);
    let create = |path: &Path| {
        assert_eq!(newest(folder.path()).0, folder.path().join("step-00000001"));
        assert_eq!(list(folder.path()).unwrap().len(), 1);
        create_file(path)
    };
    Tiny::at(Precision::Fp32, 2).save_through(folder.path(), &state_at(2), &create).unwrap();
    assert_eq!(newest(folder.path()).0, folder.path().join("step-00000002"));
}

#[test]
fn the_next_save_removes_files_of_killed_writers() {
    let folder = saved(&[1]);
    let leftover = folder.path().join(".step-00000002.tmp-4242");
    fs::create_dir(&leftover).unwrap();
    fs::write(leftover.join("model.safetensors"), "half").unwrap();
    fs::write(folder.path().join(".latest.tmp-4242"), "step-0").unwrap();
    assert_eq!(newest(folder.path()).0, folder.path().join("step-00000001"));
    Tiny::at(Precision::Fp32, 3).save(folder.path(), &state_at(3));
    assert_eq!(names(folder.path()), ["latest", "step-00000001", "step-00000003"]);
}

/// The environment variable with the writer's folder; unset when the test below is run like any other.
const FOLDER: &str = "TRANSFORMER_CANDLE_TEST_FOLDER";

#[test]
fn writer_that_is_killed() {
    let Some(folder) = env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let first =
        newest_intact(&folder, &CancelToken::new()).map_or(1, |newest| newest.checkpoint.state().unwrap().step + 1);
    for step in first.. {
        Tiny::at(Precision::Fp32, step).save(&folder, &state_at(step));
        mark_best(&folder, &folder.join(step_name(step))).unwrap();
        prune(&folder, 2, 0).unwrap();
    }
}

#[test]
fn a_killed_writer_leaves_every_checkpoint_intact() {
    let folder = tempfile::tempdir().unwrap();
    let mut newest_step = 0;
    for round in 0..30 {
        let mut writer = Command::new(env::current_exe().unwrap())
            .args(["--exact", "checkpoint::tests::crash::writer_that_is_killed"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // Each round kills it a little later after a save, so that kills hit every part of one.
        let start = Instant::now();
        let grown =
            || latest(folder.path()).is_some_and(|path| load_state(&path).is_ok_and(|state| state.step > newest_step));
        while !grown() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_micros(700 * round));
        writer.kill().unwrap();
        writer.wait().unwrap();
        let (path, corrupted) = newest(folder.path());
        assert!(corrupted.is_empty(), "{corrupted:?}");
        let step = load_state(&path).unwrap().step;
        assert!(step > newest_step, "step {newest_step} was there before, {step} is left");
        let mut read = Tiny::zeros(Precision::Fp32);
        read.restore(&path).unwrap();
        assert_eq!(read.bits(), Tiny::at(Precision::Fp32, step).bits());
        newest_step = step;
    }
}
