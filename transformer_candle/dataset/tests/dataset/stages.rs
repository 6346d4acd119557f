//! Stages of a run: each has an order of its own from where the one before ended, and the ledger accounts for what is left
//! out between them.

use std::path::Path;

use crate::fixtures::{self, documents, folder_source, jsonl, mixed, rows, settings, stage, tokenizer, write};
use dataset::ledger::{
    BeginRecord, Ledger, LedgerHead, LedgerRecord, SequenceRange, StageRecord, StepRecord, for_each_record,
};
use dataset::{
    Audit, Batch, CancelToken, Cursor, Mixture, NextStage, StreamSettings, StreamStage, TokenStream, Until, audit,
    replay,
};
use proptest::prelude::*;

/// Returns three stages over the same data, with sequences of 8, 32 and 16 tokens.
fn stages(data: impl Into<Mixture>) -> [StreamStage; 3] {
    let mixture = data.into();
    [8, 32, 16].map(|sequence_length| StreamStage {
        mixture: mixture.clone(),
        settings: StreamSettings { sequence_length, epochs: None, ..settings() },
    })
}

fn open(stage: &StreamStage, cursor: Option<Cursor>) -> TokenStream {
    TokenStream::open(&stage.mixture, &stage.settings, &tokenizer(), cursor).unwrap()
}

fn next_stage(stream: &mut TokenStream, stage: &StreamStage) -> NextStage {
    stream.next_stage(stage, &|| false).unwrap()
}

/// The sequences of every window of a stage that is read from the start, window by window.
fn windows(stage: &StreamStage, count: usize) -> Vec<Vec<fixtures::Sequence>> {
    let mut stream = open(stage, None);
    (0..count).map(|_| rows(&stream.next_sequences_until(Until::WindowEnd(usize::MAX), &|| false).unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn a_stage_starts_at_the_window_after_the_one_in_use(sequences in 0_usize..500) {
        let (_folder, source, _) = mixed();
        let [short, long, _] = stages(&source);
        let of_windows = windows(&short, 9);
        let mut stream = open(&short, None);
        stream.next_sequences(sequences).unwrap();
        let cursor = stream.cursor();
        let NextStage { stream: mut next, left_out, .. } = next_stage(&mut stream, &long);

        // Window by window, an epoch of 200 documents has 10 of 20.
        let ends: Vec<usize> = of_windows.iter().scan(0, |end, window| { *end += window.len(); Some(*end) }).collect();
        let window = ends.partition_point(|end| *end <= sequences);
        prop_assume!(window < 8);
        let is_inside = sequences > window.checked_sub(1).map_or(0, |previous| ends[previous]);
        let rest = SequenceRange {
            component: 0,
            epoch: 0,
            window: window as u64,
            first_sequence: cursor.components[0].sequence,
            sequences: (ends[window] - sequences) as u64,
        };
        prop_assert_eq!(left_out, if is_inside { vec![rest] } else { Vec::new() });
        let first = window + usize::from(is_inside);
        let expected: Vec<_> = windows(&long, first + 2)[first..].concat();
        prop_assert_eq!(&rows(&next.next_sequences(expected.len()).unwrap()), &expected);

        // The same from a cursor, as after a kill at any position.
        let mut resumed = next_stage(&mut open(&short, Some(cursor)), &long);
        prop_assert_eq!(resumed.left_out, next_stage(&mut stream, &long).left_out);
        prop_assert_eq!(resumed.stream.cursor(), next_stage(&mut stream, &long).stream.cursor());
        prop_assert_eq!(resumed.opened.len(), usize::from(is_inside));
        prop_assert_eq!(rows(&resumed.stream.next_sequences(expected.len()).unwrap()), expected);
    }
}

#[test]
fn batches_may_end_with_the_window() {
    let (_folder, source, _) = mixed();
    let [short, ..] = stages(&source);
    let mut stream = open(&short, None);
    let mut whole = open(&short, None);
    for _ in 0..12 {
        let batch = loop {
            let batch = stream.next_sequences_until(Until::WindowEnd(7), &|| false).unwrap();
            assert!(batch.sequences() == 7 || stream.is_between_windows());
            assert_eq!(rows(&whole.next_sequences(batch.sequences()).unwrap()), rows(&batch));
            if stream.is_between_windows() {
                break batch;
            }
        };
        assert!(!batch.is_empty());
        assert_eq!(stream.cursor(), whole.cursor());
    }
    assert!(stream.cursor().components[0].start.epoch > 0);
}

/// Runs the stages with a ledger, some steps each, killed before the steps in `kills`.
fn train(path: &Path, stages: &[StreamStage], steps: u64, sequences: usize, kills: &[u64]) -> (LedgerHead, Vec<Batch>) {
    let mut ledger = Ledger::open(path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    let (mut stream, mut current, mut batches) = (open(&stages[0], None), 0, Vec::new());
    let mut cut: Option<Cursor> = None;
    for step in 1..=steps * stages.len() as u64 {
        if kills.contains(&step) {
            cut = Some(stream.cursor());
            stream = open(&stages[current], cut.clone());
        }
        let mut cursor_before = stream.cursor();
        let is_new =
            |window: &&dataset::ledger::WindowRecord| !cut.as_ref().is_some_and(|cut| window.is_in_progress_at(cut));
        let due = (step - 1) / steps;
        if due as usize != current {
            current = due as usize;
            let NextStage { stream: next, left_out, opened } = next_stage(&mut stream, &stages[current]);
            for window in opened.iter().filter(is_new) {
                ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
            }
            ledger.append(&LedgerRecord::Stage(StageRecord { stage: due, step, left_out })).unwrap();
            stream = next;
            cursor_before = stream.cursor();
        }
        let batch = stream.next_sequences(sequences).unwrap();
        for window in stream.opened_windows().filter(is_new) {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        ledger.append(&LedgerRecord::Step(StepRecord::new(step, &cursor_before, &stream.cursor(), &batch))).unwrap();
        batches.push(batch);
        cut = None;
    }
    (ledger.sync().unwrap(), batches)
}

#[test]
fn the_ledger_of_a_staged_run_is_that_of_a_killed_one() {
    let (folder, source, _) = mixed();
    let stages = stages(&source);
    let (head, batches) = train(&folder.path().join("whole"), &stages, 30, 5, &[]);
    for kills in [&[30_u64, 31, 32][..], &[1, 61], &[2, 29, 31, 60, 61, 90]] {
        let killed = train(&folder.path().join("killed"), &stages, 30, 5, kills);
        assert!(killed == (head.clone(), batches.clone()), "{kills:?}");
    }
}

fn audit_problems(path: &Path, head: &LedgerHead, stages: &[StreamStage]) -> String {
    audit(path, head, stages, false).unwrap().problems.join("; ")
}

/// The ledger with some records changed, and a valid hash chain.
fn rewritten(
    path: &Path,
    head: &LedgerHead,
    change: impl Fn(&mut LedgerRecord) -> bool,
) -> (std::path::PathBuf, LedgerHead) {
    let other = path.with_extension("rewritten");
    let mut ledger = Ledger::open(&other, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    for_each_record(path, head, &CancelToken::new(), |mut record| {
        if change(&mut record) {
            ledger.append(&record).unwrap();
        }
        Ok(())
    })
    .unwrap();
    let head = ledger.sync().unwrap();
    (other, head)
}

#[test]
fn an_audit_counts_what_stages_leave_out() {
    let (folder, source, all) = mixed();
    let stages = stages(&source);
    let path = folder.path().join("ledger");
    let (head, batches) = train(&path, &stages, 100, 5, &[]);
    let Audit { components, stage_sequences, problems, .. } = audit(&path, &head, &stages, false).unwrap();
    assert_eq!(problems, [""; 0]);
    assert_eq!((components[0].sequences, &*stage_sequences), (1500, &[500, 500, 500][..]));
    assert!(components[0].left_out > 0);
    let finished: Vec<_> = components[0].epochs.iter().filter(|epoch| epoch.finished).collect();
    assert!(finished.len() > 1 && finished.iter().all(|epoch| epoch.documents == all.len() as u64));
    for (step, batch) in (1..).zip(&batches) {
        assert_eq!(&replay(&path, &head, step, &stages, &tokenizer()).unwrap().batch, batch, "step {step}");
    }
    let problem_after = |change: &dyn Fn(&mut LedgerRecord) -> bool| {
        let (path, head) = rewritten(&path, &head, change);
        audit_problems(&path, &head, &stages)
    };
    assert_eq!(problem_after(&|_| true), "");
    let unlisted = problem_after(&|record| {
        if let LedgerRecord::Stage(stage) = record {
            stage.left_out.clear();
        }
        true
    });
    assert!(unlisted.contains("begins in the middle of a window"), "{unlisted}");
    let dropped = problem_after(&|record| !matches!(record, LedgerRecord::Stage(_)));
    assert!(dropped.contains("not where the previous step ended"), "{dropped}");
    let short = problem_after(&|record| {
        if let LedgerRecord::Stage(stage) = record {
            stage.left_out.iter_mut().for_each(|range| range.sequences -= 1);
        }
        true
    });
    assert!(short.contains("what stage 1 leaves out"), "{short}");
}

#[test]
fn a_ledger_may_start_right_before_a_stage() {
    let (folder, source, _) = mixed();
    let stages = stages(&source);
    let mut stream = open(&stages[1], None);
    stream.next_sequences(3).unwrap();
    let cursor = stream.cursor();
    let path = folder.path().join("late");
    let mut ledger = Ledger::open(&path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    ledger.append(&LedgerRecord::Begin(BeginRecord::new(3, 1, &cursor))).unwrap();
    let NextStage { mut stream, left_out, opened } = next_stage(&mut open(&stages[1], Some(cursor)), &stages[2]);
    for window in opened {
        ledger.append(&LedgerRecord::Window(window)).unwrap();
    }
    ledger.append(&LedgerRecord::Stage(StageRecord { stage: 2, step: 4, left_out })).unwrap();
    let cursor_before = stream.cursor();
    let batch = stream.next_sequences(4).unwrap();
    for window in stream.opened_windows() {
        ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
    }
    ledger.append(&LedgerRecord::Step(StepRecord::new(4, &cursor_before, &stream.cursor(), &batch))).unwrap();
    let head = ledger.sync().unwrap();
    assert_eq!(audit_problems(&path, &head, &stages), "");
    assert_eq!(replay(&path, &head, 4, &stages, &tokenizer()).unwrap().batch, batch);
}

#[test]
fn a_stage_may_weigh_the_sources_otherwise() {
    let (_folder, many, _) = mixed();
    let few_folder = tempfile::tempdir().unwrap();
    write(few_folder.path(), &[("few.jsonl", jsonl(&documents(300, 40)))]);
    let few = folder_source(few_folder.path());
    let weighed = |first: f64, second: f64| Mixture::new(vec![(many.clone(), first), (few.clone(), second)]).unwrap();
    let settings = StreamSettings { epochs: None, ..settings() };
    let stages: Vec<StreamStage> =
        [weighed(0.9, 0.1), weighed(0.25, 0.75)].into_iter().flat_map(|mixture| stage(mixture, &settings)).collect();
    let path = few_folder.path().join("ledger");
    let (head, batches) = train(&path, &stages, 20, 10, &[21]);
    let report = audit(&path, &head, &stages, false).unwrap();
    assert_eq!(report.problems, [""; 0]);
    let sequences: Vec<u64> = report.components.iter().map(|component| component.sequences).collect();
    assert_eq!(sequences, [180 + 50, 20 + 150]);
    for (step, batch) in (1..).zip(&batches) {
        assert_eq!(&replay(&path, &head, step, &stages, &tokenizer()).unwrap().batch, batch, "step {step}");
    }
    let as_first = [stages[0].clone(), stages[0].clone()];
    assert!(audit_problems(&path, &head, &as_first).contains("their mixture weights"));
    let mismatched = open(&stages[0], None).next_stage(&stages[1], &|| false).unwrap().stream.cursor();
    assert!(TokenStream::open(&stages[0].mixture, &settings, &tokenizer(), Some(mismatched)).is_err());
}
