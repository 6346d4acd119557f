//! Which rows are trained on and which are held out.

use std::path::Path;

use crate::fixtures::{
    documents, epoch_texts, folder_source, held_out_texts, mixed, parquet, settings, sorted, tokenizer, write,
};
use dataset::{CancelToken, DataError, DataSource, HeldOut, StreamSettings};
use run_config::Packing;

#[test]
fn max_samples_takes_the_first_documents() {
    let (_folder, source, documents) = mixed();
    for samples in [1, 7, 60, 65, 131, 199, 200, 5000] {
        let limited = StreamSettings { max_samples: Some(samples), ..settings() };
        let texts = epoch_texts(&source, &limited).unwrap();
        let expected = &documents[..documents.len().min(samples as usize)];
        assert_eq!(sorted(texts), sorted(expected.to_vec()), "{samples}");
    }
}

#[test]
fn held_out_documents_are_never_trained_on() {
    let (_folder, source, documents) = mixed();
    for fraction in [0.0001, 0.1, 0.5] {
        let settings = StreamSettings { held_out_fraction: fraction, ..settings() };
        let held_out = held_out_texts(&source, &settings);
        assert!(!held_out.is_empty() && held_out.len() < documents.len(), "{fraction}");
        let trained = epoch_texts(&source, &settings).unwrap();
        assert_eq!(sorted([trained, held_out.clone()].concat()), sorted(documents.clone()), "{fraction}");
        assert_eq!(held_out_texts(&source, &StreamSettings { seed: 99, ..settings }), held_out);
    }
}

#[test]
fn documents_after_max_samples_are_held_out() {
    let (_folder, source, documents) = mixed();
    for (samples, whole) in [(30, true), (58, true), (149, true), (198, true), (200, false)] {
        let settings = StreamSettings { held_out_fraction: 0.01, max_samples: Some(samples), ..settings() };
        let held_out = held_out_texts(&source, &settings);
        let trained = epoch_texts(&source, &settings).unwrap();
        assert!(!held_out.is_empty(), "{samples}");
        if whole {
            assert_eq!(sorted(trained), sorted(documents[..samples as usize].to_vec()), "{samples}");
            assert!(held_out.iter().all(|text| documents[samples as usize..].contains(text)), "{samples}");
        } else {
            assert_eq!(sorted([trained, held_out].concat()), sorted(documents.clone()));
        }
    }
}

#[test]
fn row_groups_after_max_samples_are_chosen_by_hash() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("one.parquet", parquet(&documents(0, 200), 2))]);
    let source = folder_source(folder.path());
    let settings = StreamSettings { held_out_fraction: 0.3, max_samples: Some(101), ..settings() };
    assert_eq!(sorted(epoch_texts(&source, &settings).unwrap()), sorted(documents(0, 101)));
    let held_out = held_out_texts(&source, &settings);
    assert!((10..60).contains(&held_out.len()), "{}", held_out.len());
    assert!(held_out.iter().all(|text| documents(102, 98).contains(text)));
}

#[test]
fn a_single_row_group_loses_its_last_eighth() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("one.parquet", parquet(&documents(0, 80), 1000))]);
    let settings = StreamSettings { held_out_fraction: 0.001, ..settings() };
    let source = folder_source(folder.path());
    assert_eq!(held_out_texts(&source, &settings), documents(70, 10));
    assert_eq!(sorted(epoch_texts(&source, &settings).unwrap()), sorted(documents(0, 70)));
}

#[test]
fn validation_sources_are_read_completely() {
    let (_folder, source, documents) = mixed();
    let mut held_out =
        HeldOut::whole(&source, &StreamSettings { sequence_length: 16, ..StreamSettings::default() }, &tokenizer())
            .unwrap();
    let batches = held_out.batches(3, usize::MAX).collect::<Result<Vec<_>, _>>().unwrap();
    let bytes: u64 = batches.iter().map(|batch| batch.target_bytes.unwrap()).sum();
    assert_eq!(bytes as usize, documents.iter().map(String::len).sum::<usize>());
    assert!(batches[..batches.len() - 1].iter().all(|batch| batch.sequences() == 3));
    let mut by_documents = HeldOut::whole(
        &source,
        &StreamSettings { sequence_length: 16, packing: Packing::Documents, ..StreamSettings::default() },
        &tokenizer(),
    )
    .unwrap();
    let mut starts = Vec::new();
    for (batch, by_documents) in batches.iter().zip(by_documents.batches(3, usize::MAX)) {
        let mut by_documents = by_documents.unwrap();
        starts.extend(by_documents.document_starts.take().unwrap());
        assert_eq!(&by_documents, batch);
    }
    assert_eq!(starts.len(), batches.iter().map(|batch| batch.inputs.len()).sum::<usize>());
    assert!(starts.iter().any(|&start| start > 0));
    assert_eq!(held_out.batches(3, usize::MAX).take(2).map(Result::unwrap).collect::<Vec<_>>(), batches[..2]);
}

/// A file of JSON lines of which only some have text.
fn with_nulls(texts: &[String], nulls_before: usize, nulls_after: usize) -> (tempfile::TempDir, Vec<u8>) {
    let nulls = |count: usize| "{\"text\": null, \"id\": 123456}\n".repeat(count);
    let lines: String = texts.iter().map(|text| format!("{{\"text\": \"{text}\"}}\n")).collect();
    (tempfile::tempdir().unwrap(), [nulls(nulls_before), lines, nulls(nulls_after)].concat().into_bytes())
}

#[test]
fn what_is_held_out_has_text() {
    let texts = documents(0, 60);
    for (nulls_before, nulls_after) in [(0, 0), (0, 30), (20_000, 0), (0, 20_000), (9_000, 9_000), (40_000, 40_000)] {
        for fraction in [0.001, 0.2] {
            let (folder, lines) = with_nulls(&texts, nulls_before, nulls_after);
            write(folder.path(), &[("a.jsonl", lines)]);
            let source = folder_source(folder.path());
            let settings = StreamSettings { held_out_fraction: fraction, ..settings() };
            let held_out = held_out_texts(&source, &settings);
            assert!(!held_out.is_empty() && held_out.len() < texts.len(), "{nulls_before} {nulls_after} {fraction}");
            let trained = epoch_texts(&source, &settings).unwrap();
            assert_eq!(
                sorted([trained, held_out].concat()),
                sorted(texts.clone()),
                "{nulls_before} {nulls_after} {fraction}"
            );
        }
    }
}

#[test]
fn version_1_may_hold_out_rows_without_text() {
    let (folder, lines) = with_nulls(&documents(0, 60), 20_000, 0);
    write(folder.path(), &[("a.jsonl", lines)]);
    let patterns = [folder.path().to_str().unwrap().to_owned()];
    let source = DataSource::local(&patterns, Path::new(""), "text", 1, &CancelToken::new()).unwrap();
    let settings = StreamSettings { held_out_fraction: 0.001, ..settings() };
    assert!(matches!(HeldOut::open(&source, &settings, &tokenizer()), Err(DataError::NothingHeldOut { .. })));
}
