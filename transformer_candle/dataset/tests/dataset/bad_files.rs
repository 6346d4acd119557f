//! Files that cannot be decoded are skipped, recorded, and skipped again by whoever resumes, audits or replays the run.

use std::path::Path;

use crate::fixtures::{
    documents, folder_source, gzip, jsonl, open, parquet_gzip, sequences, settings, stage, tokenizer, write, zstd,
};
use dataset::ledger::{CorruptedRecord, Ledger, LedgerHead, LedgerRecord, StepRecord, for_each_record};
use dataset::{CancelToken, Cursor, DataError, DataSource, Documents, HeldOut, StreamSettings, audit, replay};
use proptest::prelude::*;

const FILES: usize = 40;

/// What happens to a file: it is cut off at a fraction of its length, or bytes from there on are overwritten.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Truncated(f64),
    Overwritten(f64, usize),
    /// Of a Parquet file, the page of text of this row group is overwritten.
    TextPage(usize),
}

impl Damage {
    fn of(self, mut bytes: Vec<u8>) -> Vec<u8> {
        let at = |fraction: f64| (fraction * bytes.len() as f64) as usize;
        match self {
            Self::Truncated(fraction) => bytes.truncate(at(fraction).max(1)),
            Self::Overwritten(fraction, count) => {
                let (start, end) = (at(fraction), bytes.len().min(at(fraction) + count));
                bytes[start..end].fill(0xa5);
            }
            Self::TextPage(row_group) => {
                let starts = bytes.windows(3).enumerate().filter(|(_, start)| *start == [0x1f, 0x8b, 8]);
                // Each row group has a page of each of three columns, the second of which is the text.
                let page = starts.map(|(at, _)| at).nth(3 * row_group + 1).unwrap();
                bytes[page + 12..page + 20].fill(0xa5);
            }
        }
        bytes
    }
}

/// A small file of each format in turn.
fn file(index: usize) -> (String, Vec<u8>) {
    let documents = documents(20 * index, 12);
    match index % 3 {
        0 => (format!("f{index:02}.parquet"), parquet_gzip(&documents, 3)),
        1 => (format!("f{index:02}.jsonl.gz"), gzip(&jsonl(&documents))),
        _ => (format!("f{index:02}.jsonl.zst"), zstd(&jsonl(&documents))),
    }
}

fn write_files(folder: &Path, damage: &[(usize, Damage)]) {
    for index in 0..FILES {
        let (name, bytes) = file(index);
        let damaged = damage.iter().find(|(damaged, _)| *damaged == index);
        write(folder, &[(&name, damaged.map_or(bytes.clone(), |(_, damage)| damage.of(bytes)))]);
    }
}

/// Runs all epochs with a ledger; returns its head and the cursor before each step and after the last.
fn train(path: &Path, source: &DataSource, settings: &StreamSettings) -> Result<(LedgerHead, Vec<Cursor>), DataError> {
    let mut ledger = Ledger::open(path, &LedgerHead::empty(), &CancelToken::new())?;
    let mut stream = open(source, settings, None);
    let mut cursors = vec![stream.cursor()];
    for step in 1.. {
        let before = stream.cursor();
        let batch = stream.next_sequences(5)?;
        for (component, found) in stream.found_corruption() {
            ledger.append(&LedgerRecord::Corrupted(CorruptedRecord::new(component, found))).unwrap();
        }
        if batch.is_empty() {
            break;
        }
        for window in stream.opened_windows() {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        ledger.append(&LedgerRecord::Step(StepRecord::new(step, &before, &stream.cursor(), &batch))).unwrap();
        cursors.push(stream.cursor());
    }
    Ok((ledger.sync().unwrap(), cursors))
}

fn round_trip(cursor: &Cursor) -> Cursor {
    serde_json::from_str(&serde_json::to_string(cursor).unwrap()).unwrap()
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        (0.0..1.0f64).prop_map(Damage::Truncated),
        (0.0..1.0f64, 1..400usize).prop_map(|(at, count)| Damage::Overwritten(at, count)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]
    #[test]
    fn streams_with_bad_files_resume_replay_and_pass_the_audit(
        (one, first) in (0..FILES, damage()),
        (other, second) in (0..FILES, damage()),
        seed in 0..1000u64,
        held_out_fraction in prop_oneof![Just(0.0), Just(0.1)],
        max_samples in prop_oneof![Just(None), Just(Some(300))],
    ) {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        write_files(&text, &[(one, first), (other, second)]);
        let (source, path) = (folder_source(&text), folder.path().join("ledger.jsonl"));
        let settings = StreamSettings { epochs: Some(2), seed, held_out_fraction, max_samples, ..settings() };
        let (head, cursors) = train(&path, &source, &settings).unwrap();
        let audited = audit(&path, &head, &stage(&source, &settings), true).unwrap();
        prop_assert_eq!(audited.problems, [""; 0]);
        let all = sequences(&mut open(&source, &settings, None), 5).unwrap();
        for (step, cursor) in cursors.iter().enumerate().step_by(13) {
            let fresh = folder_source(&text);
            let rest = sequences(&mut open(&fresh, &settings, Some(round_trip(cursor))), 5).unwrap();
            prop_assert_eq!(&rest, &all[(5 * step).min(all.len())..], "step {}", step);
        }
        let read = |source: &DataSource| Documents::open(source, None).collect::<Result<Vec<_>, _>>().unwrap();
        prop_assert_eq!(read(&source), read(&folder_source(&text)));
        // A file that is repaired later changes nothing that was consumed.
        write_files(&text, &[]);
        let repaired = listed_before(&source, &text);
        repaired_run_is_proven(&path, &head, &repaired, &settings, &cursors);
    }
}

/// A source of the repaired files. The sizes that it lists must be those of the run: where damage changes a size, the run
/// accepts the changed data first.
fn listed_before(damaged: &DataSource, folder: &Path) -> DataSource {
    let repaired = folder_source(folder);
    if repaired.describe() == damaged.describe() { repaired } else { damaged.clone() }
}

fn repaired_run_is_proven(
    path: &Path,
    head: &LedgerHead,
    source: &DataSource,
    settings: &StreamSettings,
    cursors: &[Cursor],
) {
    if let Some(cursor) = cursors.last() {
        dataset::Mixture::from(source).restore(cursor, settings);
    }
    for step in (1..cursors.len() as u64).step_by(13) {
        replay(path, head, step, &stage(source, settings), &tokenizer()).unwrap();
    }
    assert_eq!(audit(path, head, &stage(source, settings), true).unwrap().problems, [""; 0]);
}

#[test]
fn repaired_files_are_skipped_as_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    let index = 3;
    write_files(&text, &[(index, Damage::TextPage(1))]);
    let source = folder_source(&text);
    let settings = StreamSettings { epochs: Some(2), ..settings() };
    let (head, cursors) = train(&folder.path().join("ledger.jsonl"), &source, &settings).unwrap();
    let all = sequences(&mut open(&source, &settings, None), 5).unwrap();
    let second_epoch = cursors.iter().position(|cursor| cursor.components[0].start.epoch == 1).unwrap();
    let cursor = &cursors[second_epoch];
    let corrupted = &cursor.components[0].corrupted;
    assert!(!corrupted.is_empty() && corrupted.iter().all(|rows| rows.shard == index as u64), "{corrupted:?}");
    let mut records = 0;
    for_each_record(&folder.path().join("ledger.jsonl"), &head, &CancelToken::new(), |record| {
        records += usize::from(matches!(record, LedgerRecord::Corrupted(_)));
        Ok(())
    })
    .unwrap();
    assert_eq!(records, corrupted.len(), "each is recorded once");
    write_files(&text, &[]);
    let repaired = folder_source(&text);
    let rest = sequences(&mut open(&repaired, &settings, Some(round_trip(cursor))), 5).unwrap();
    assert_eq!(rest, all[5 * second_epoch..]);
}

#[test]
fn other_row_groups_of_a_bad_file_are_used() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path(), &[(0, Damage::TextPage(0))]);
    let mut read = Documents::open(folder_source(folder.path()), None);
    let texts: Vec<String> = read.by_ref().collect::<Result<_, _>>().unwrap();
    let of_file = documents(0, 12).iter().filter(|text| texts.contains(text)).count();
    assert_eq!(of_file, 9, "three of four row groups");
    assert_eq!(texts.len(), 12 * (FILES - 1) + of_file);
    let notices = read.take_notices();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].starts_with("f00.parquet is corrupted") && notices[0].contains("row group 0"), "{}", notices[0]);
    assert_eq!(read.take_notices(), [""; 0]);
}

#[test]
fn too_many_bad_files_end_a_stream_and_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let truncated = |index| (index, Damage::Truncated(0.5));
    write_files(folder.path(), &[truncated(0), truncated(4), truncated(8)]);
    let source = folder_source(folder.path());
    let errors = [
        sequences(&mut open(&source, &settings(), None), 5).unwrap_err(),
        Documents::open(&source, None).find_map(Result::err).unwrap(),
        HeldOut::whole(&source, &settings(), &tokenizer()).unwrap().batches(4, 1000).find_map(Result::err).unwrap(),
    ];
    for error in errors {
        let message = error.to_string();
        assert!(message.contains("3 of the 40 files"), "{message}");
        assert!(
            ["f00.parquet", "f04.jsonl.gz", "f08.jsonl.zst"].iter().all(|name| message.contains(name)),
            "{message}"
        );
    }
}

#[test]
fn bad_files_stop_a_stream_if_asked_or_if_there_is_no_other() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path(), &[(1, Damage::Truncated(0.5))]);
    let stopping = folder_source(folder.path()).with_bad_files_skipped(false);
    let error = sequences(&mut open(&stopping, &settings(), None), 5).unwrap_err();
    assert!(matches!(&error, DataError::Format { file, .. } if file == "f01.jsonl.gz"), "{error}");
    let alone = tempfile::tempdir().unwrap();
    let (name, bytes) = file(1);
    write(alone.path(), &[(&name, Damage::Truncated(0.5).of(bytes))]);
    let error = sequences(&mut open(&folder_source(alone.path()), &settings(), None), 5).unwrap_err();
    assert!(matches!(error, DataError::Format { .. }), "{error}");
}

#[test]
fn a_file_that_becomes_bad_in_a_used_window_ends_the_resumed_run() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path(), &[]);
    let settings = StreamSettings { shuffle_buffer_size: 1000, ..settings() };
    let mut stream = open(&folder_source(folder.path()), &settings, None);
    stream.next_sequences(3).unwrap();
    let cursor = stream.cursor();
    let (name, bytes) = file(1);
    write(folder.path(), &[(&name, Damage::Overwritten(0.3, 40).of(bytes))]);
    let error = open(&folder_source(folder.path()), &settings, Some(cursor)).next_sequences(3).unwrap_err();
    assert!(error.to_string().contains("f01.jsonl.gz") && error.to_string().contains("restore the file"), "{error}");
}
