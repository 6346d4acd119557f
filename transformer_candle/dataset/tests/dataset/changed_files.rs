//! Files that grow, are added or are removed while a run is stopped: what was consumed stays proven, and the order of the
//! rest is that of the files as they were, and of all of them from the next epoch on.

use std::path::PathBuf;

use crate::fixtures::{
    Sequence, documents, folder_source, jsonl, open, parquet, rows, settings, sorted, split_texts, stage, tokenizer,
    write,
};
use dataset::ledger::{Ledger, LedgerHead, LedgerRecord, StepRecord};
use dataset::{
    Audit, CancelToken, Cursor, FileChanges, Mixture, StreamSettings, audit, check_consumed, recorded_files, replay,
};
use proptest::prelude::*;

/// The epoch of a step, and the sequences that it consumed.
type Consumed = (u64, Vec<Sequence>);

/// A run over the files of a folder, with its ledger.
struct Run {
    _folder: tempfile::TempDir,
    text: PathBuf,
    ledger: PathBuf,
    settings: StreamSettings,
    mixture: Mixture,
    head: LedgerHead,
    cursor: Cursor,
    step: u64,
    sequences_per_step: usize,
}

impl Run {
    /// 60 documents in five files: two of JSON lines, two of text, one of Parquet.
    fn start(seed: u64, held_out_fraction: f64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (text, ledger) = (folder.path().join("text"), folder.path().join("ledger.jsonl"));
        write(
            &text,
            &[
                ("b.jsonl", jsonl(&documents(0, 12))),
                ("c.txt", separated(&documents(12, 12))),
                ("d.parquet", parquet(&documents(24, 12), 5)),
                ("e.jsonl", jsonl(&documents(36, 12))),
                ("f.txt", separated(&documents(48, 12))),
            ],
        );
        let settings = StreamSettings { epochs: Some(3), seed, held_out_fraction, ..settings() };
        let mixture = Mixture::from(folder_source(&text));
        let cursor = open_at(&mixture, &settings, None).cursor();
        let head = LedgerHead::empty();
        let mut run =
            Self { _folder: folder, text, ledger, settings, mixture, head, cursor, step: 0, sequences_per_step: 3 };
        run.record_files();
        run
    }

    fn record_files(&mut self) {
        let mut ledger = Ledger::open(&self.ledger, &self.head, &CancelToken::new()).unwrap();
        for record in self.mixture.files_records() {
            ledger.append(&LedgerRecord::Files(record)).unwrap();
        }
        self.head = ledger.sync().unwrap();
    }

    /// Takes at most `steps` steps; returns what they consumed.
    fn train(&mut self, steps: usize) -> Vec<Consumed> {
        let cursor = serde_json::from_str(&serde_json::to_string(&self.cursor).unwrap()).unwrap();
        let mixture = Mixture::from(folder_source(&self.text));
        let mut stream = open_at(&mixture, &self.settings, Some(cursor));
        let mut ledger = Ledger::open(&self.ledger, &self.head, &CancelToken::new()).unwrap();
        let mut consumed = Vec::new();
        for _ in 0..steps {
            let cursor_before = stream.cursor();
            // Between two windows the cursor names the window after the last of its epoch.
            let mut epoch = cursor_before.components[0].start.epoch;
            let batch = stream.next_sequences(self.sequences_per_step).unwrap();
            if batch.is_empty() {
                break;
            }
            self.step += 1;
            epoch = stream.opened_windows().last().map_or(epoch, |window| window.start.epoch);
            for window in stream.opened_windows().filter(|window| !window.is_in_progress_at(&self.cursor)) {
                ledger.append(&LedgerRecord::Window(window.clone())).unwrap();
            }
            let record = StepRecord::new(self.step, &cursor_before, &stream.cursor(), &batch);
            ledger.append(&LedgerRecord::Step(record)).unwrap();
            consumed.push((epoch, rows(&batch)));
        }
        (self.cursor, self.head) = (stream.cursor(), ledger.sync().unwrap());
        self.mixture = stream.mixture().clone();
        consumed
    }

    fn changes(&self) -> FileChanges {
        let records = recorded_files(&self.ledger, &self.head, &CancelToken::new()).unwrap();
        Mixture::from(folder_source(&self.text)).changed_files(&records, &self.cursor).unwrap()
    }

    fn refusal(&self) -> Option<String> {
        self.changes().refusal(&self.ledger, &self.head, &self.settings).unwrap()
    }

    /// Accepts the files as they are; returns how many steps were proven.
    fn accept(&mut self) -> usize {
        assert_eq!(self.refusal(), None);
        let FileChanges { files, mixture, cursor } = self.changes();
        mixture.restore(&cursor, &self.settings);
        let stages = stage(mixture.clone(), &self.settings);
        let proven = check_consumed(&self.ledger, &self.head, &files, &stages, &tokenizer()).unwrap();
        (self.mixture, self.cursor) = (mixture, cursor);
        self.record_files();
        proven
    }

    fn audit(&self) -> Audit {
        audit(&self.ledger, &self.head, &stage(self.mixture.clone(), &self.settings), true).unwrap()
    }

    fn append(&self, name: &str, bytes: &[u8]) {
        let path = self.text.join(name);
        std::fs::write(&path, [std::fs::read(&path).unwrap(), bytes.to_vec()].concat()).unwrap();
    }
}

fn open_at(mixture: &Mixture, settings: &StreamSettings, cursor: Option<Cursor>) -> dataset::TokenStream {
    dataset::TokenStream::open(mixture.clone(), settings, &tokenizer(), cursor).unwrap()
}

/// A text of documents with separators between them, and a line end at its end.
fn separated(documents: &[String]) -> Vec<u8> {
    format!("{}\n", documents.join("\n<|endoftext|>\n")).into_bytes()
}

/// The texts of one epoch among the steps' sequences, each in a sequence of its own.
fn texts_of(consumed: &[Consumed], epoch: u64) -> Vec<String> {
    let of_epoch = consumed.iter().filter(|(of, _)| *of == epoch).flat_map(|(_, sequences)| sequences);
    let texts = of_epoch.flat_map(|(_, targets)| split_texts(targets, &tokenizer()));
    sorted(texts.map(|text| text.trim_end().to_owned()).collect())
}

fn trimmed(documents: impl IntoIterator<Item = String>) -> Vec<String> {
    sorted(documents.into_iter().map(|text| text.trim_end().to_owned()).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn files_that_grow_or_are_added_are_read_from_the_next_epoch(
        seed in 0..1000u64,
        held_out_fraction in prop_oneof![Just(0.0), Just(0.1)],
        steps in 1..14usize,
        later in 0..30usize,
    ) {
        let (mut run, mut same) = (Run::start(seed, held_out_fraction), Run::start(seed, held_out_fraction));
        let first_batches = run.train(steps);
        run.append("b.jsonl", &jsonl(&documents(100, 5)));
        run.append("f.txt", &separated(&documents(105, 5)));
        write(&run.text, &[("a.jsonl", jsonl(&documents(110, 5)))]);
        let epoch = run.cursor.components[0].start.epoch;
        run.accept();
        let mut rest = run.train(later);
        // A second change, of a file that has grown before.
        run.append("b.jsonl", &jsonl(&documents(115, 5)));
        let second = run.cursor.components[0].start.epoch;
        run.accept();
        rest.extend(run.train(usize::MAX));
        let whole = same.train(usize::MAX);
        let of_epoch = |consumed: &[Consumed]| -> Vec<Sequence> {
            let parts = consumed.iter().take_while(|(of, _)| *of <= epoch);
            parts.flat_map(|(_, sequences)| sequences.clone()).collect()
        };
        let all: Vec<_> = first_batches.into_iter().chain(rest).collect();
        let (ours, theirs) = (of_epoch(&all), of_epoch(&whole));
        // The last step of the epoch may reach into the next one.
        let common = ours.len().min(theirs.len()).saturating_sub(3);
        prop_assert_eq!(&ours[..common], &theirs[..common]);
        let audit = run.audit();
        prop_assert_eq!(audit.problems, [""; 0]);
        let documents: Vec<u64> = audit.components[0].epochs.iter().map(|epoch| epoch.documents).collect();
        let held_out = 60 - same.audit().components[0].epochs[0].documents;
        for (number, documents) in (0..).zip(documents) {
            let expected = 60 - held_out + if number > epoch { 15 } else { 0 } + if number > second { 5 } else { 0 };
            prop_assert_eq!(documents, expected, "epoch {}", number);
        }
        for step in (1..=run.step).step_by(7) {
            replay(&run.ledger, &run.head, step, &stage(run.mixture.clone(), &run.settings), &tokenizer()).unwrap();
        }
    }
}

#[test]
fn every_appended_and_added_document_is_read_once_an_epoch() {
    let mut run = Run::start(3, 0.0);
    (run.settings.sequence_length, run.sequences_per_step) = (1 << 16, 1);
    run.cursor = open_at(&run.mixture, &run.settings, None).cursor();
    run.train(2);
    run.append("e.jsonl", &jsonl(&documents(200, 5)));
    write(&run.text, &[("a.parquet", parquet(&documents(300, 5), 2))]);
    assert!(run.accept() > 0, "steps consumed rows of the file");
    run.settings.epochs = Some(2);
    let consumed = run.train(usize::MAX);
    let mut expected = documents(0, 60);
    expected.extend(documents(200, 5));
    expected.extend(documents(300, 5));
    assert_eq!(texts_of(&consumed, 1), trimmed(expected));
}

#[test]
fn a_file_is_removed_once_no_window_in_use_needs_it() {
    let mut run = Run::start(5, 0.0);
    run.train(4);
    let unneeded = |run: &Run, name: &str| {
        let content = std::fs::read(run.text.join(name)).unwrap();
        std::fs::remove_file(run.text.join(name)).unwrap();
        let refusal = run.refusal();
        write(&run.text, &[(name, content)]);
        refusal
    };
    let names = ["b.jsonl", "c.txt", "d.parquet", "e.jsonl", "f.txt"];
    let refused: Vec<String> = names.iter().filter_map(|name| unneeded(&run, name)).collect();
    assert!(!refused.is_empty() && refused.len() < names.len(), "{refused:?}");
    assert!(refused.iter().all(|reason| reason.contains("shuffle window in use")), "{refused:?}");
    let removed_name = names.iter().find(|name| unneeded(&run, name).is_none()).unwrap();
    std::fs::remove_file(run.text.join(removed_name)).unwrap();
    run.accept();
    run.train(usize::MAX);
    let audit = run.audit();
    assert_eq!(audit.problems, [""; 0]);
    assert!(audit.components[0].changed.iter().any(|change| change.contains("is gone")), "{:?}", audit.components);
    assert_eq!(audit.components[0].epochs.last().unwrap().documents, 48);
}

#[test]
fn changes_that_would_move_other_rows_are_refused() {
    let mut held_out = Run::start(5, 0.1);
    held_out.train(1);
    std::fs::remove_file(held_out.text.join("d.parquet")).unwrap();
    let reason = held_out.refusal().unwrap();
    assert!(reason.contains("d.parquet") && (reason.contains("held out") || reason.contains("window")), "{reason}");
    let mut limited = Run::start(5, 0.0);
    limited.settings.max_samples = Some(40);
    limited.cursor = open_at(&limited.mixture, &limited.settings, None).cursor();
    limited.train(2);
    limited.append("b.jsonl", &jsonl(&documents(100, 1)));
    assert!(limited.refusal().unwrap().contains("data.max_samples"));
}

#[test]
fn a_grown_file_that_is_rewritten_is_refused() {
    let mut run = Run::start(5, 0.0);
    run.train(30);
    let original = std::fs::read(run.text.join("b.jsonl")).unwrap();
    run.append("b.jsonl", &jsonl(&documents(100, 3)));
    run.accept();
    write(&run.text, &[("b.jsonl", original[..original.len() / 2].to_vec())]);
    assert!(run.refusal().unwrap().contains("b.jsonl has grown before"));
    let other = [original.to_ascii_uppercase(), jsonl(&documents(100, 1))].concat();
    write(&run.text, &[("b.jsonl", other)]);
    let FileChanges { files, mixture, cursor } = run.changes();
    mixture.restore(&cursor, &run.settings);
    let stages = stage(mixture, &run.settings);
    check_consumed(&run.ledger, &run.head, &files, &stages, &tokenizer()).unwrap_err();
}

#[test]
fn rows_appended_to_a_changed_file_are_refused() {
    let mut run = Run::start(5, 0.0);
    run.train(30);
    let other: Vec<String> = documents(0, 12).iter().map(|text| text.replace("document", "Document")).collect();
    write(&run.text, &[("b.jsonl", jsonl(&[other, documents(100, 3)].concat()))]);
    let FileChanges { files, mixture, cursor } = run.changes();
    mixture.restore(&cursor, &run.settings);
    let stages = stage(mixture, &run.settings);
    let error = check_consumed(&run.ledger, &run.head, &files, &stages, &tokenizer()).unwrap_err();
    assert!(error.to_string().contains("differs from the one trained on"), "{error}");
}

#[test]
fn parts_of_files_are_stored_in_cursors() {
    let mut run = Run::start(5, 0.0);
    run.train(2);
    assert!(!serde_json::to_string(&run.cursor).unwrap().contains("files"));
    run.append("b.jsonl", &jsonl(&documents(100, 1)));
    run.accept();
    let files = serde_json::to_value(&run.cursor).unwrap()["components"][0]["files"].clone();
    assert_eq!(files[0]["name"], "b.jsonl");
    assert_eq!(
        (&files[5]["name"], &files[5]["offset"], &files[5]["epoch"]),
        (&files[0]["name"], &files[0]["bytes"], &1.into())
    );
    let resumed = open(&folder_source(&run.text), &run.settings, Some(run.cursor.clone()));
    assert_eq!(resumed.cursor(), run.cursor);
}
