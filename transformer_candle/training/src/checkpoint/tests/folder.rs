//! The folder of checkpoints: `latest` and `best`, choice on resume, pruning.

use super::*;

fn path(folder: &TempDir, step: u64) -> PathBuf {
    folder.path().join(step_name(step))
}

/// Writes `latest` as earlier versions did.
fn write_pointer(folder: &TempDir, text: &str) {
    let latest = folder.path().join("latest");
    let _ = fs::remove_file(&latest);
    fs::write(latest, text).unwrap();
}

fn steps(folder: &TempDir) -> Vec<u64> {
    list(folder.path()).unwrap().into_iter().map(|checkpoint| checkpoint.step).collect()
}

#[test]
fn an_empty_folder_has_no_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    for directory in [folder.path().to_owned(), folder.path().join("missing")] {
        assert!(list(&directory).unwrap().is_empty());
        let error = newest_intact(&directory, &CancelToken::new()).unwrap_err();
        assert!(matches!(error, CheckpointError::Absent { .. }), "{error}");
        assert_eq!(error.exit_code(), 2);
        assert!(matches!(load_state(&directory).unwrap_err(), CheckpointError::Absent { .. }));
    }
}

#[test]
fn other_names_are_ignored() {
    let folder = saved(&[5]);
    for name in ["step-5", "step-0000000x", "steps", ".step-00000006.tmp-1", "step-00000007.bak"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("step-00000009"), "a file").unwrap();
    assert_eq!(steps(&folder), [5]);
}

#[test]
fn latest_and_best_name_their_checkpoints() {
    let folder = saved(&[5, 10]);
    let target = |name| fs::read_link(folder.path().join(name)).unwrap();
    assert_eq!(target("latest"), Path::new("step-00000010"));
    assert_eq!(latest(folder.path()), Some(path(&folder, 10)));
    assert_eq!(best(folder.path()), None);
    mark_best(folder.path(), &path(&folder, 5)).unwrap();
    assert_eq!(target("best"), Path::new("step-00000005"));
    assert_eq!(Checkpoint::open(&folder.path().join("best")).unwrap().directory(), path(&folder, 5));
    assert_eq!(best(folder.path()), Some(path(&folder, 5)));
    assert_eq!(names(folder.path()), ["best", "latest", "step-00000005", "step-00000010"]);
}

#[test]
fn an_invalid_pointer_file_is_ignored() {
    let folder = saved(&[5, 10]);
    for text in ["", "step-", "../step-00000005", "step-00000007\n", "\0\0\0"] {
        write_pointer(&folder, text);
        assert_eq!(latest(folder.path()), None, "{text:?}");
        assert_eq!(newest(folder.path()).0, path(&folder, 10));
    }
}

#[test]
fn a_pointer_of_an_earlier_version_is_read() {
    let folder = saved(&[5, 10]);
    write_pointer(&folder, "step-00000005\n");
    assert_eq!(latest(folder.path()), Some(path(&folder, 5)));
    assert_eq!(pointed_checkpoint(&folder.path().join("latest")), Some(path(&folder, 5)));
    assert_eq!(Checkpoint::open(&folder.path().join("latest")).unwrap().directory(), path(&folder, 5));
    assert_eq!(pointed_checkpoint(&path(&folder, 5)), None);
}

#[test]
fn newest_intact_names_the_corrupted_ones_it_skips() {
    let folder = saved(&[5, 10, 15]);
    corrupt(&path(&folder, 15).join("optimizer.safetensors"));
    fs::remove_file(path(&folder, 10).join("MANIFEST.json")).unwrap();
    let (newest_name, corrupted) = newest(folder.path());
    assert_eq!(newest_name, path(&folder, 5));
    let names: Vec<_> = corrupted.iter().map(|corrupted| corrupted.name.as_str()).collect();
    assert_eq!(names, ["step-00000015", "step-00000010"]);
    corrupt(&path(&folder, 5).join("tokenizer.json"));
    let error = newest_intact(folder.path(), &CancelToken::new()).unwrap_err();
    assert_eq!(error.exit_code(), 5);
    for word in ["step-00000015", "optimizer.safetensors", "step-00000010", "MANIFEST.json", "step-00000005"] {
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn an_empty_checkpoint_folder_is_skipped() {
    let folder = saved(&[5]);
    fs::create_dir(path(&folder, 10)).unwrap();
    write_pointer(&folder, "step-00000010");
    let (newest_name, corrupted) = newest(folder.path());
    assert_eq!(newest_name, path(&folder, 5));
    assert_eq!(corrupted[0].name, "step-00000010");
}

#[test]
fn checkpoints_beyond_latest_are_not_resumed() {
    // 15 and 20 were saved; a resume from 10 saved 12.
    let folder = saved(&[10, 15, 20, 12]);
    assert_eq!(newest(folder.path()).0, path(&folder, 12));
    corrupt(&path(&folder, 12).join("config.json"));
    assert_eq!(newest(folder.path()).0, path(&folder, 10));
    corrupt(&path(&folder, 10).join("config.json"));
    assert_eq!(newest(folder.path()).0, path(&folder, 20), "better than nothing");
}

#[test]
fn pruning_keeps_the_newest_and_the_best() {
    let folder = saved(&[5, 10, 15, 20]);
    mark_best(folder.path(), &path(&folder, 5)).unwrap();
    assert_eq!(prune(folder.path(), 2, 0).unwrap().removed, ["step-00000010"]);
    assert_eq!(steps(&folder), [5, 15, 20]);
    assert_eq!(prune(folder.path(), 0, 0).unwrap().removed, ["step-00000015"], "the newest is never removed");
}

#[test]
fn pruning_after_a_rewind_removes_later_checkpoints() {
    let folder = saved(&[10, 15, 20, 12]);
    assert_eq!(prune(folder.path(), 2, 0).unwrap().removed, ["step-00000015", "step-00000020"]);
    assert_eq!(steps(&folder), [10, 12]);
}

#[test]
fn pruning_keeps_the_lowest_losses() {
    let folder = tempfile::tempdir().unwrap();
    for (step, loss) in [(1, 2.0), (2, 1.0), (3, 1.5), (4, 3.0), (5, 4.0)] {
        let state = TrainerState { evaluation_loss: Some(loss), ..state_at(step) };
        Tiny::at(Precision::Fp32, step).save(folder.path(), &state);
    }
    assert_eq!(prune(folder.path(), 1, 2).unwrap().removed, ["step-00000001", "step-00000004"]);
    assert_eq!(steps(&folder), [2, 3, 5]);
}

#[test]
fn the_best_can_have_a_separate_folder() {
    let (folder, best_folder) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (step, loss) in [(1, 2.0), (2, 1.0), (3, 0.5)] {
        let state = TrainerState { evaluation_loss: Some(loss), ..state_at(step) };
        let checkpoint = Tiny::at(Precision::Fp32, step).save(folder.path(), &state);
        keep_best_in(best_folder.path(), &checkpoint, 2).unwrap();
        prune(folder.path(), 1, 0).unwrap();
    }
    assert_eq!(steps(&folder), [3]);
    assert_eq!(steps(&best_folder), [2, 3]);
    assert_eq!(best(best_folder.path()), Some(path(&best_folder, 3)));
    for step in [2, 3] {
        verify(&path(&best_folder, step), &CancelToken::new()).unwrap();
    }
}

#[test]
fn saving_a_step_again_replaces_a_corrupted_one() {
    let folder = saved(&[5]);
    corrupt(&path(&folder, 5).join("model.safetensors"));
    Tiny::at(Precision::Fp32, 5).save(folder.path(), &state_at(5));
    verify(&path(&folder, 5), &CancelToken::new()).unwrap();
    assert_eq!(names(folder.path()), ["latest", "step-00000005"]);
}

#[test]
fn cancelling_stops_reading() {
    let folder = saved(&[5, 10]);
    let cancel = CancelToken::when(|| true);
    assert!(matches!(verify(&path(&folder, 10), &cancel), Err(CheckpointError::Interrupted)));
    // A verification that was cancelled does not count as corruption.
    assert!(matches!(newest_intact(folder.path(), &cancel), Err(CheckpointError::Interrupted)));
    let mut tiny = Tiny::zeros(Precision::Fp32);
    let read = Checkpoint::open(&path(&folder, 10)).unwrap().weights(&tiny_shape(), &mut tiny.weights, &cancel);
    assert!(matches!(read, Err(CheckpointError::Interrupted)));
}

#[test]
#[cfg(unix)]
fn a_path_that_is_not_a_regular_file_is_corruption() {
    let folder = saved(&[5, 10]);
    for name in ["model.safetensors", "MANIFEST.json"] {
        let file = path(&folder, 10).join(name);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &file).unwrap();
        let (newest_name, corrupted) = newest(folder.path());
        assert_eq!(newest_name, path(&folder, 5));
        assert_eq!(corrupted[0].reason, format!("{name} cannot be read: it is a device, not a regular file"));
    }
}

#[test]
fn a_disk_without_room_is_told_beforehand() {
    let folder = saved(&[5, 10]);
    let missing_folder = folder.path().join("not/yet/there");
    assert_eq!(check_room(&missing_folder, 1000, 3).unwrap(), None);
    let error = check_room(&missing_folder, 1 << 60, 1).unwrap_err();
    assert!(error.to_string().contains("1152921504.61 GB") && error.to_string().contains("--run-dir"), "{error}");
    assert_eq!(error.exit_code(), 2);
    assert!(!missing_folder.exists());
    // Two of the many that are to be kept are there.
    let note = check_room(folder.path(), 1000, 1 << 40).unwrap().unwrap();
    assert!(note.contains("1099511627774 more of them"), "{note}");
}

#[test]
fn copies_that_followed_links_are_pointers_still() {
    let folder = saved(&[5, 10]);
    let pointer = folder.path().join("latest");
    fs::remove_file(&pointer).unwrap();
    fs::create_dir(&pointer).unwrap();
    for file in fs::read_dir(path(&folder, 5)).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&file, pointer.join(file.file_name().unwrap())).unwrap();
    }
    assert_eq!(latest(folder.path()), Some(path(&folder, 5)));
    Tiny::at(Precision::Fp32, 15).save(folder.path(), &state_at(15));
    assert_eq!(fs::read_link(&pointer).unwrap(), Path::new("step-00000015"));
}

#[test]
fn a_removed_checkpoint_names_the_newest() {
    let folder = saved(&[5, 10]);
    fs::remove_dir_all(path(&folder, 5)).unwrap();
    let error = Checkpoint::open(&path(&folder, 5)).unwrap_err();
    assert!(matches!(&error, CheckpointError::Removed { newest, .. } if *newest == path(&folder, 10)), "{error}");
    assert_eq!(error.exit_code(), 2);
    assert!(removed(&path(&folder, 10)).is_none() && removed(&folder.path().join("other")).is_none());
}
