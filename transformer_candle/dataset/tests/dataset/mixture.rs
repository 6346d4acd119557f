//! A stream over several sources: each is read as it would be alone, and their sequences alternate by their weights.

use std::collections::BTreeSet;

use crate::fixtures::{
    self, Sequence, documents, folder_source, held_out_texts, jsonl, mixed, parquet, rows, settings, split_texts,
    stage, tokenizer, write,
};
use dataset::ledger::{Ledger, LedgerHead, LedgerRecord, StepRecord, for_each_record};
use dataset::{Batch, CancelToken, Cursor, DataError, DataSource, Mixture, StreamSettings, TokenStream, audit, replay};
use proptest::prelude::*;

/// Returns three sources: 200 documents in many shards, 40 in one, and 3.
fn sources() -> (Vec<tempfile::TempDir>, Vec<DataSource>) {
    let (many_folder, many, _) = mixed();
    let [few_folder, least_folder] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    write(few_folder.path(), &[("few.jsonl", jsonl(&documents(300, 40)))]);
    write(least_folder.path(), &[("least.parquet", parquet(&documents(400, 3), 2))]);
    let sources = vec![many, folder_source(few_folder.path()), folder_source(least_folder.path())];
    (vec![many_folder, few_folder, least_folder], sources)
}

fn mixture(sources: &[DataSource], weights: &[f64]) -> Mixture {
    Mixture::new(sources.iter().cloned().zip(weights.iter().copied()).collect()).unwrap()
}

fn open(mixture: &Mixture, settings: &StreamSettings, cursor: Option<Cursor>) -> TokenStream {
    TokenStream::open(mixture, settings, &tokenizer(), cursor).unwrap()
}

fn endless() -> StreamSettings {
    StreamSettings { epochs: None, ..settings() }
}

fn next_sequences(stream: &mut TokenStream, sequences: usize) -> Vec<Sequence> {
    rows(&stream.next_sequences(sequences).unwrap())
}

/// Runs steps with a ledger.
fn train(
    mixture: &Mixture,
    settings: &StreamSettings,
    ledger: &mut Ledger,
    steps: u64,
    sequences: usize,
) -> Vec<Batch> {
    let mut stream = open(mixture, settings, None);
    let step = |step| {
        let cursor_before = stream.cursor();
        let batch = stream.next_sequences(sequences).unwrap();
        for window in stream.opened_windows() {
            ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
        }
        ledger.append(&LedgerRecord::Step(StepRecord::new(step, &cursor_before, &stream.cursor(), &batch))).unwrap();
        batch
    };
    (1..=steps).map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn components_keep_their_own_order_and_weight(
        weights in prop::collection::vec(0.01..1.0_f64, 1..4),
        length in 1_usize..400,
    ) {
        let (_folders, sources) = sources();
        let mixture = mixture(&sources[..weights.len()], &weights);
        let mut stream = open(&mixture, &endless(), None);
        let mut delivered = vec![Vec::new(); weights.len()];
        for k in 1..=length {
            let cursor_before = stream.cursor();
            let sequence = next_sequences(&mut stream, 1);
            let cursors = stream.cursor().components.into_iter().zip(cursor_before.components);
            let component = cursors.into_iter().position(|(next, former)| next.delivered > former.delivered).unwrap();
            delivered[component].extend(sequence);
            for (component, delivered) in delivered.iter().enumerate() {
                prop_assert!((delivered.len() as f64 - mixture.weight(component) * k as f64).abs() < 1.0);
            }
        }
        for (source, delivered) in sources.iter().zip(delivered) {
            let mut alone = TokenStream::open(source, &endless(), &tokenizer(), None).unwrap();
            prop_assert_eq!(next_sequences(&mut alone, delivered.len()), delivered);
        }
    }
}

#[test]
fn mixtures_resume_from_any_position() {
    let (_folders, sources) = sources();
    let mixture = mixture(&sources, &[0.5, 0.3, 0.2]);
    let mut stream = open(&mixture, &endless(), None);
    let (mut cursors, mut uninterrupted) = (vec![stream.cursor()], Vec::new());
    for _ in 0..120 {
        uninterrupted.extend(next_sequences(&mut stream, 1));
        cursors.push(stream.cursor());
    }
    assert!(
        stream.cursor().components[2].start.epoch >= 2,
        "the smallest starts new epochs while others are in their first"
    );
    for (position, cursor) in cursors.into_iter().enumerate() {
        let json = serde_json::to_string(&cursor).unwrap();
        let settings = StreamSettings { workers: 1 + position % 8, ..endless() };
        let mut resumed = open(&mixture, &settings, Some(serde_json::from_str(&json).unwrap()));
        let remaining = uninterrupted.len() - position;
        let rest: Vec<Sequence> =
            [remaining.min(5), remaining.saturating_sub(5)].map(|n| next_sequences(&mut resumed, n)).concat();
        assert_eq!(rest, uninterrupted[position..], "from position {position}: {json}");
    }
}

#[test]
fn mixtures_end_with_the_next_ended_component() {
    let (_folders, sources) = sources();
    let mixture = mixture(&sources[1..], &[0.5, 0.5]);
    let mut stream = open(&mixture, &settings(), None);
    let all = next_sequences(&mut stream, 100_000);
    let alone = next_sequences(&mut fixtures::open(&sources[2], &settings(), None), 1000).len();
    assert_eq!(all.len(), 2 * alone + 1, "the smaller one ends it");
    assert!(stream.next_sequences(1).unwrap().is_empty());
    assert!(open(&mixture, &settings(), Some(stream.cursor())).next_sequences(1).unwrap().is_empty());
}

#[test]
fn cursors_of_other_mixtures_are_rejected_by_reason() {
    let (_folders, sources) = sources();
    let cursor = open(&mixture(&sources, &[0.6, 0.3, 0.1]), &settings(), None).cursor();
    let refused = |mixture: &Mixture, cursor: &Cursor| {
        let outcome = TokenStream::open(mixture, &settings(), &tokenizer(), Some(cursor.clone()));
        outcome.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(refused(&mixture(&sources, &[6.0, 3.0, 1.0]), &cursor), "");
    assert!(refused(&mixture(&sources, &[0.5, 0.4, 0.1]), &cursor).contains("weights of a mixture"));
    let [first, second, third] = sources.clone().try_into().unwrap();
    assert!(refused(&mixture(&[second, first, third], &[0.6, 0.3, 0.1]), &cursor).contains("data set"));
    let mut other_cursor = cursor;
    other_cursor.components[0].delivered = 7;
    assert!(refused(&mixture(&sources, &[0.6, 0.3, 0.1]), &other_cursor).contains("the position itself"));
}

#[test]
fn weights_must_be_positive_and_finite() {
    let (_folders, sources) = sources();
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Mixture::new(vec![(sources[0].clone(), weight), (sources[1].clone(), 1.0)]).unwrap_err();
        assert!(error.to_string().contains("weight"), "{weight}: {error}");
    }
    assert!(matches!(Mixture::new(Vec::new()), Err(DataError::NoSource)));
}

#[test]
fn components_hold_out_the_same_rows_as_alone() {
    let (_folders, sources) = sources();
    let settings = StreamSettings { held_out_fraction: 0.2, sequence_length: 1 << 16, ..endless() };
    let mut stream = open(&mixture(&sources[..2], &[0.5, 0.5]), &settings, None);
    let trained: BTreeSet<String> =
        next_sequences(&mut stream, 60).iter().flat_map(|(_, targets)| split_texts(targets, &tokenizer())).collect();
    let held_out: BTreeSet<String> = sources[..2].iter().flat_map(|source| held_out_texts(source, &settings)).collect();
    assert!(trained.is_disjoint(&held_out) && trained.len() + held_out.len() == 240);
}

#[test]
fn audits_and_replays_cover_every_component() {
    let (folders, sources) = sources();
    let mixture = mixture(&sources, &[0.6, 0.3, 0.1]);
    let path = folders[0].path().join("ledger");
    let mut ledger = Ledger::open(&path, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    let batches = train(&mixture, &endless(), &mut ledger, 60, 7);
    let head = ledger.sync().unwrap();
    let report = audit(&path, &head, &stage(&mixture, &endless()), false).unwrap();
    assert_eq!(report.problems, [""; 0]);
    assert_eq!(report.components.iter().map(|component| component.sequences).sum::<u64>(), 60 * 7);
    for (component, documents) in report.components.iter().zip([200, 40, 3]) {
        let finished: Vec<_> = component.epochs.iter().filter(|epoch| epoch.finished).collect();
        assert!(finished.iter().all(|epoch| epoch.whole && epoch.documents == documents), "{component:?}");
        assert_eq!(component.epochs.len(), finished.len() + 1);
    }
    assert!(report.components[2].epochs.len() > 3);
    for (step, batch) in (1..).zip(&batches) {
        assert_eq!(
            &replay(&path, &head, step, &stage(&mixture, &endless()), &tokenizer()).unwrap().batch,
            batch,
            "step {step}"
        );
    }
    let other = path.with_extension("other");
    let mut unfair = Ledger::open(&other, &LedgerHead::empty(), &CancelToken::new()).unwrap();
    for_each_record(&path, &head, &CancelToken::new(), |mut record| {
        if let LedgerRecord::Step(step) = &mut record {
            step.sequence_ranges.truncate(1);
        }
        unfair.append(&record).map_err(|source| DataError::Io { path: other.clone(), source })
    })
    .unwrap();
    let problems = audit(&other, &unfair.sync().unwrap(), &stage(&mixture, &endless()), false).unwrap().problems;
    assert!(problems.iter().any(|problem| problem.contains("their mixture weights")), "{problems:?}");
}
