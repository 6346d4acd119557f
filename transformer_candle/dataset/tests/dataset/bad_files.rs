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
        let cursor_before = stream.cursor();
        let batch = stream.next_sequences(5)?;
        for (component, corruption) in stream.found_corruption() {
            ledger.append(&LedgerRecord::Corrupted(CorruptedRecord::new(component, corruption))).unwrap();
        }
        if batch.is_empty() {
            break;
        }
        for window in stream.opened_windows() {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        ledger.append(&LedgerRecord::Step(StepRecord::new(step, &cursor_before, &stream.cursor(), &batch))).unwrap();
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

/// Whether what was decoded of the damaged files, but for the rows that the ledger records as corrupted, is what they
/// hold when they are repaired. The checksum of gzip comes after its rows: some may have been decoded wrongly before.
fn decoded_as_repaired(damaged: &DataSource, damage: &[(usize, Damage)], recorded: &[CorruptedRecord]) -> bool {
    let mut decoded = Documents::open(damaged, None);
    let texts: Vec<String> = decoded.by_ref().collect::<Result<_, _>>().unwrap();
    damage.iter().all(|(index, _)| {
        let documents = documents(20 * index, 12);
        let rows_per_group = if index % 3 == 0 { 3 } else { 12 };
        let is_skipped = |row: u64| {
            let (row_group, row) = (row / rows_per_group, row % rows_per_group);
            let of_file = recorded.iter().filter(|record| record.found.rows.shard == *index as u64);
            of_file.map(|record| record.found.rows).any(|rows| {
                (rows.row_group == row_group && rows.first_row <= row)
                    || (rows.row_group < row_group && rows.rest_of_shard)
            })
        };
        let rest = (0..).zip(&documents).filter(|(row, _)| !is_skipped(*row)).map(|(_, text)| text);
        let number = |text: &str| text.split([' ', ':']).nth(1).and_then(|number| number.parse::<usize>().ok());
        let of_file = texts.iter().filter(|text| number(text).is_none_or(|number| number / 20 == *index));
        of_file.eq(rest)
    })
}

fn corrupted_records(path: &Path, head: &LedgerHead) -> Vec<CorruptedRecord> {
    let mut records = Vec::new();
    for_each_record(path, head, &CancelToken::new(), |record| {
        if let LedgerRecord::Corrupted(record) = record {
            records.push(record);
        }
        Ok(())
    })
    .unwrap();
    records
}

/// Trains on damaged files, resumes and audits the run, and replays it once the files are repaired.
fn resume_replay_and_audit(damage: &[(usize, Damage)], settings: &StreamSettings) {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    write_files(&text, damage);
    let (source, path) = (folder_source(&text), folder.path().join("ledger.jsonl"));
    let (head, cursors) = train(&path, &source, settings).unwrap();
    let audited = audit(&path, &head, &stage(&source, settings), true).unwrap();
    assert_eq!(audited.problems, [""; 0]);
    let all = sequences(&mut open(&source, settings, None), 5).unwrap();
    for (step, cursor) in cursors.iter().enumerate().step_by(13) {
        let fresh = folder_source(&text);
        let rest = sequences(&mut open(&fresh, settings, Some(round_trip(cursor))), 5).unwrap();
        assert_eq!(rest, all[(5 * step).min(all.len())..], "step {step}");
    }
    let read = |source: &DataSource| Documents::open(source, None).collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(read(&source), read(&folder_source(&text)));
    let is_intact = decoded_as_repaired(&source, damage, &corrupted_records(&path, &head));
    // A file that is repaired later changes nothing that was consumed.
    write_files(&text, &[]);
    let repaired_source = listed_before(&source, &text);
    dataset::Mixture::from(&repaired_source).restore(cursors.last().unwrap(), settings);
    let replays = (1..cursors.len() as u64).step_by(13);
    let replays = replays.map(|step| replay(&path, &head, step, &stage(&repaired_source, settings), &tokenizer()));
    if is_intact {
        assert!(replays.map(Result::unwrap).count() > 0);
        assert_eq!(audit(&path, &head, &stage(&repaired_source, settings), true).unwrap().problems, [""; 0]);
    } else {
        let differs = |error: &DataError| error.to_string().contains("differs from the one trained on");
        assert!(replays.filter_map(Result::err).all(|error| differs(&error)));
    }
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
        let settings = StreamSettings { epochs: Some(2), seed, held_out_fraction, max_samples, ..settings() };
        let damage = if one == other { vec![(one, first)] } else { vec![(one, first), (other, second)] };
        resume_replay_and_audit(&damage, &settings);
    }
}

#[test]
fn audits_pass_where_only_held_out_rows_are_corrupted() {
    let settings = StreamSettings { epochs: Some(2), seed: 0, held_out_fraction: 0.1, ..settings() };
    for length in [0.29462, 0.78778] {
        resume_replay_and_audit(&[(7, Damage::Truncated(length)), (0, Damage::Truncated(0.0))], &settings);
    }
}

#[test]
fn replay_refuses_rows_decoded_wrongly_before_a_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    // The gzip stream still decodes, to another text in row 9, until its checksum shows that it is corrupted.
    let damage = [(34, Damage::Overwritten(0.82468, 12))];
    write_files(&text, &damage);
    let (source, path) = (folder_source(&text), folder.path().join("ledger.jsonl"));
    let settings = StreamSettings { epochs: Some(2), seed: 478, ..settings() };
    let (head, cursors) = train(&path, &source, &settings).unwrap();
    assert!(!decoded_as_repaired(&source, &damage, &corrupted_records(&path, &head)));
    write_files(&text, &[]);
    let repaired_source = folder_source(&text);
    let steps = 1..cursors.len() as u64;
    let replayed = |step| replay(&path, &head, step, &stage(&repaired_source, &settings), &tokenizer());
    let errors: Vec<String> = steps.filter_map(|step| replayed(step).err()).map(|error| error.to_string()).collect();
    assert!(!errors.is_empty() && errors.len() < cursors.len() / 4, "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("differs from the one trained on")), "{errors:?}");
}

/// A source of the repaired files. The sizes that it lists must be those of the run: where damage changes a size, the run
/// accepts the changed data first.
fn listed_before(damaged: &DataSource, folder: &Path) -> DataSource {
    let repaired_source = folder_source(folder);
    if repaired_source.describe() == damaged.describe() { repaired_source } else { damaged.clone() }
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
    let records = corrupted_records(&folder.path().join("ledger.jsonl"), &head);
    assert_eq!(records.len(), corrupted.len(), "each is recorded once");
    write_files(&text, &[]);
    let repaired_source = folder_source(&text);
    let rest = sequences(&mut open(&repaired_source, &settings, Some(round_trip(cursor))), 5).unwrap();
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
