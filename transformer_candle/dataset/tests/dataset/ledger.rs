//! The ledger proves what a run consumed, and makes its batches again.

use std::path::Path;

use crate::fixtures::{
    documents, folder_source, jsonl, open, parquet, parquet_rows, settings, stage, tokenizer, write,
};
use dataset::ledger::{BeginRecord, Ledger, LedgerHead, LedgerRecord, StepRecord, for_each_record};
use dataset::{Audit, Batch, CancelToken, Cursor, DataError, DataSource, StreamSettings, audit, replay};
use proptest::prelude::*;

/// A folder with Parquet, JSON Lines, bad rows, and a row group with nothing but bad rows.
fn mixed_folder() -> (tempfile::TempDir, DataSource) {
    let folder = tempfile::tempdir().unwrap();
    let mut rows: Vec<Option<Vec<u8>>> = documents(200, 30).into_iter().map(|text| Some(text.into_bytes())).collect();
    rows[3] = None;
    rows[20..].fill(Some(Vec::new()));
    write(
        folder.path(),
        &[
            ("a.parquet", parquet(&documents(0, 90), 17)),
            ("b.jsonl", jsonl(&documents(100, 41))),
            ("c.parquet", parquet_rows(&rows, 10)),
        ],
    );
    let source = folder_source(folder.path());
    (folder, source)
}

/// Runs some steps from a position with a ledger; returns the final position and the batches.
fn train(
    source: &DataSource,
    settings: &StreamSettings,
    ledger: &mut Ledger,
    from: Option<Cursor>,
    steps: std::ops::RangeInclusive<u64>,
    sequences: usize,
) -> (Cursor, Vec<Batch>) {
    let mut stream = open(source, settings, from);
    let mut batches = Vec::new();
    for step in steps {
        let cursor_before = stream.cursor();
        let batch = stream.next_sequences(sequences).unwrap();
        if batch.is_empty() {
            break;
        }
        for window in stream.opened_windows().filter(|window| !window.is_in_progress_at(&cursor_before)) {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        ledger.append(&LedgerRecord::Step(StepRecord::new(step, &cursor_before, &stream.cursor(), &batch))).unwrap();
        batches.push(batch);
    }
    (stream.cursor(), batches)
}

/// Runs all epochs with a ledger.
fn whole(path: &Path, source: &DataSource, settings: &StreamSettings, sequences: usize) -> (LedgerHead, Vec<Batch>) {
    let mut ledger = Ledger::open(path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    let (_, batches) = train(source, settings, &mut ledger, None, 1..=u64::MAX, sequences);
    (ledger.sync().unwrap(), batches)
}

fn audited(path: &Path, head: &LedgerHead, source: &DataSource, settings: &StreamSettings) -> Audit {
    audit(path, head, &stage(source, settings), true).unwrap()
}

/// The ledger with some records changed, and a valid hash chain.
fn rewritten(
    path: &Path,
    head: &LedgerHead,
    change: impl Fn(&mut Vec<LedgerRecord>),
) -> (std::path::PathBuf, LedgerHead) {
    let mut records = Vec::new();
    for_each_record(path, head, &CancelToken::new(), |record| {
        records.push(record);
        Ok(())
    })
    .unwrap();
    change(&mut records);
    let other = path.with_extension("rewritten");
    let mut ledger = Ledger::open(&other, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    for record in &records {
        ledger.append(record).unwrap();
    }
    (other, ledger.sync().unwrap())
}

#[test]
fn audits_prove_that_each_document_is_used_once() {
    let (folder, source) = mixed_folder();
    for (seed, sequences, held_out_fraction, max_samples) in
        [(1, 1, 0.0, None), (2, 3, 0.2, None), (3, 100, 0.0, Some(70)), (4, 7, 0.3, Some(95))]
    {
        let settings = StreamSettings { epochs: Some(2), seed, held_out_fraction, max_samples, ..settings() };
        let path = folder.path().join(format!("ledger-{seed}.jsonl"));
        let (head, batches) = whole(&path, &source, &settings, sequences);
        let audit = audited(&path, &head, &source, &settings);
        assert_eq!(audit.problems, [""; 0]);
        assert_eq!(audit.steps, batches.len() as u64);
        assert_eq!(audit.targets, batches.iter().map(|batch| batch.target_count as u64).sum::<u64>());
        let epochs = &audit.components[0].epochs;
        assert_eq!(epochs.len(), 2);
        assert!(epochs.iter().all(|epoch| epoch.finished && epoch.documents == epochs[0].documents));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn interrupted_runs_have_the_same_ledger(
        cuts in prop::collection::vec(1_u64..40, 0..5),
        sequences in 1_usize..6,
    ) {
        let (folder, source) = mixed_folder();
        let settings = StreamSettings { epochs: Some(1), ..settings() };
        let (uninterrupted, all) = whole(&folder.path().join("whole.jsonl"), &source, &settings, sequences);

        let path = folder.path().join("cut.jsonl");
        let (mut head, mut cursor, mut step, mut batches) = (LedgerHead::empty(), None, 1, Vec::new());
        for steps in cuts.into_iter().chain([u64::MAX / 2]) {
            let mut ledger = Ledger::open(&path, &head, &CancelToken::new()).unwrap();
            let (saved, some) = train(&source, &settings, &mut ledger, cursor, step..=step + steps - 1, sequences);
            head = ledger.sync().unwrap();
            step += some.len() as u64;
            // Steps after the checkpoint are lost with the process.
            train(&source, &settings, &mut ledger, Some(saved.clone()), step..=step + 2, sequences);
            batches.extend(some);
            cursor = Some(saved);
        }
        prop_assert_eq!(head, uninterrupted);
        prop_assert_eq!(batches, all);
    }
}

#[test]
fn audits_name_missing_and_repeated_rows() {
    let (folder, source) = mixed_folder();
    let settings = StreamSettings { epochs: Some(1), ..settings() };
    let path = folder.path().join("ledger.jsonl");
    let (head, _) = whole(&path, &source, &settings, 2);
    let problem = |change: &dyn Fn(&mut Vec<LedgerRecord>)| {
        let (path, head) = rewritten(&path, &head, change);
        audited(&path, &head, &source, &settings).problems.join("; ")
    };
    assert_eq!(problem(&|_| ()), "");
    let of_first_window = |more: fn(&mut u64)| {
        problem(&|records| {
            let LedgerRecord::Window(window) = &mut records[0] else {
                panic!("a ledger starts with a window");
            };
            more(&mut window.row_ranges[0].rows);
            more(&mut window.documents);
        })
    };
    let short = of_first_window(|rows| *rows -= 1);
    assert!(short.contains("was not used"), "{short}");
    let long = of_first_window(|rows| *rows += 1);
    assert!(long.contains("was used twice"), "{long}");
    let message = problem(&|records| {
        let step = records.iter().rposition(|record| matches!(record, LedgerRecord::Step(_))).unwrap();
        records.remove(step - 1);
    });
    assert!(message.contains(" of epoch 1 of ") && message.contains("not where the previous step ended"), "{message}");
}

#[test]
fn replay_makes_any_step_s_batch_again() {
    let (folder, source) = mixed_folder();
    let settings = StreamSettings { epochs: Some(2), ..settings() };
    let path = folder.path().join("ledger.jsonl");
    let (head, batches) = whole(&path, &source, &settings, 5);
    for (step, batch) in (1..).zip(&batches) {
        assert_eq!(
            &replay(&path, &head, step, &stage(&source, &settings), &tokenizer()).unwrap().batch,
            batch,
            "step {step}"
        );
    }
    let error = replay(&path, &head, 10_000, &stage(&source, &settings), &tokenizer()).unwrap_err();
    assert!(error.to_string().contains("no step 10000"), "{error}");
    // The same names and sizes, other words.
    write(folder.path(), &[("b.jsonl", jsonl(&documents(100, 41)).to_ascii_uppercase())]);
    let failures = (1..=batches.len() as u64)
        .filter(|&step| replay(&path, &head, step, &stage(&source, &settings), &tokenizer()).is_err())
        .count();
    assert!(failures > 0);
}

#[test]
fn a_ledger_may_start_in_the_middle_of_a_run() {
    let (folder, source) = mixed_folder();
    let settings = StreamSettings { epochs: Some(2), ..settings() };
    let path = folder.path().join("late.jsonl");
    for steps in [1, 7, 30] {
        let mut first_ledger =
            Ledger::open(&folder.path().join("lost.jsonl"), &LedgerHead::empty(), &CancelToken::new()).unwrap();
        let (cursor, _) = train(&source, &settings, &mut first_ledger, None, 1..=steps, 2);
        let mut ledger = Ledger::open(&path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
        let mut stream = open(&source, &settings, Some(cursor.clone()));
        ledger.append(&LedgerRecord::Begin(BeginRecord::new(steps, 0, &cursor))).unwrap();
        stream.next_sequences(1).unwrap();
        for window in stream.opened_windows().filter(|window| window.is_in_progress_at(&cursor)) {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        train(&source, &settings, &mut ledger, Some(cursor), steps + 1..=u64::MAX, 2);
        let audit = audited(&path, &ledger.sync().unwrap(), &source, &settings);
        assert_eq!(audit.problems, [""; 0]);
        assert_eq!(audit.components[0].epochs.iter().map(|epoch| epoch.whole).collect::<Vec<_>>(), [false, true]);
    }
}

#[test]
fn a_missing_ledger_is_rejected_if_a_checkpoint_has_one() {
    let (folder, source) = mixed_folder();
    let path = folder.path().join("ledger.jsonl");
    let (head, _) = whole(&path, &source, &settings(), 2);
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(Ledger::open(&path, &head, &CancelToken::new()), Err(DataError::Io { .. })));
}
