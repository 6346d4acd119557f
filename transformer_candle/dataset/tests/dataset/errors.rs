//! Errors of a stream: bad data, missing data and cursors of other streams.

use std::time::{Duration, Instant};

use crate::fixtures::{
    self, documents, epoch_texts, folder_source, jsonl, open, parquet, parquet_rows, settings, tokenizer, write,
};
use dataset::{DataError, DataSource, HeldOut, SkippedRows, StreamSettings, TokenStream};
use run_config::Packing;

fn folder(files: &[(&str, Vec<u8>)]) -> (tempfile::TempDir, DataSource) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), files);
    let source = folder_source(folder.path()).with_bad_files_skipped(false);
    (folder, source)
}

#[test]
fn bad_rows_are_counted_and_skipped() {
    let rows = [Some(b"first".to_vec()), None, Some(Vec::new()), Some(vec![0xff, 0xfe]), Some(b"last".to_vec()), None];
    let lines = b"{\"text\": \"third\"}\n{\"text\": 1}\nnonsense\n{}\n".to_vec();
    let (_folder, source) = folder(&[("a.parquet", parquet_rows(&rows, 2)), ("b.jsonl", lines)]);
    let mut stream = open(&source, &settings(), None);
    stream.next_sequences(1000).unwrap();
    assert_eq!(
        stream.skipped(),
        [SkippedRows { null: 3, empty: 1, not_utf8: 1, malformed: 2, ..SkippedRows::default() }]
    );
    assert_eq!(fixtures::sorted(epoch_texts(&source, &settings()).unwrap()), ["first", "last", "third"]);
}

#[test]
fn data_without_documents_is_an_error_with_counts() {
    let (_folder, source) = folder(&[("a.jsonl", b"{\"body\": \"x\"}\n{\"text\": \"\"}\n".to_vec())]);
    let settings = StreamSettings { epochs: None, ..settings() };
    let mut stream = open(&source, &settings, None);
    let message = stream.next_sequences(1).unwrap_err().to_string();
    assert!(
        message.contains("2 rows") && message.contains("1 without text") && message.contains("1 empty"),
        "{message}"
    );
    assert!(matches!(stream.next_sequences(1), Err(DataError::Closed)));
    let held_out =
        HeldOut::whole(&source, &StreamSettings { sequence_length: 8, ..StreamSettings::default() }, &tokenizer())
            .err()
            .unwrap();
    assert!(matches!(held_out, DataError::NothingHeldOut { .. }), "{held_out}");
    let message = held_out.to_string();
    assert!(message.contains("all 2 rows") && message.contains("were skipped: 1 without text, 1 empty"), "{message}");
}

#[test]
fn holding_out_all_data_is_an_error() {
    let (_folder, source) = folder(&[("a.parquet", parquet(&documents(0, 40), 4))]);
    let settings = StreamSettings { held_out_fraction: 1.0, epochs: None, ..settings() };
    let message = open(&source, &settings, None).next_sequences(1).unwrap_err().to_string();
    assert!(message.contains("held_out_fraction"), "{message}");
}

#[test]
fn one_document_trains_but_cannot_be_held_out() {
    let (_folder, source) = folder(&[("a.txt", b"only this".to_vec())]);
    let settings = StreamSettings { held_out_fraction: 0.01, ..settings() };
    assert_eq!(epoch_texts(&source, &settings).unwrap(), ["only this"]);
    let message = HeldOut::open(&source, &settings, &tokenizer()).err().unwrap().to_string();
    assert!(message.contains("data.validation_shards"), "{message}");
}

#[test]
fn errors_follow_the_data_read_before_them() {
    let (folder, source) =
        folder(&[("a.jsonl", jsonl(&documents(0, 50))), ("b.parquet", parquet(&documents(50, 50), 10))]);
    let settings = |seed| StreamSettings { open_shards: 1, shuffle_buffer_size: 10, seed, ..settings() };
    let jsonl_first = |seed: &u64| {
        let first = epoch_texts(&source, &settings(*seed)).unwrap().swap_remove(0);
        documents(0, 50).contains(&first)
    };
    let settings = settings((0..100).find(jsonl_first).unwrap());
    let mut bytes = parquet(&documents(50, 50), 10);
    bytes[10..2000].fill(0xaa);
    write(folder.path(), &[("b.parquet", bytes)]);
    let mut stream = open(&source, &settings, None);
    let mut cursor = stream.cursor();
    let error = loop {
        match stream.next_sequences(2) {
            Ok(batch) => assert!(!batch.is_empty()),
            Err(error) => break error,
        }
        cursor = stream.cursor();
    };
    assert!(cursor.components[0].start.window >= 4, "{cursor:?}");
    assert_eq!(stream.cursor(), cursor);
    assert!(error.to_string().contains("b.parquet"), "{error}");
}

#[test]
fn cursors_of_other_streams_are_rejected_by_reason() {
    let (folder, source) = folder(&[("a.jsonl", jsonl(&documents(0, 50)))]);
    let cursor = open(&source, &settings(), None).cursor();
    let refused = |source: &DataSource, settings: &StreamSettings| {
        TokenStream::open(source, settings, &tokenizer(), Some(cursor.clone())).err().map(|error| error.to_string())
    };
    assert_eq!(refused(&source, &StreamSettings { workers: 9, epochs: None, ..settings() }), None);
    for other in [
        StreamSettings { seed: 8, ..settings() },
        StreamSettings { sequence_length: 33, ..settings() },
        StreamSettings { packing: Packing::Documents, ..settings() },
        StreamSettings { shuffle_buffer_size: 21, ..settings() },
        StreamSettings { max_samples: Some(50), ..settings() },
        StreamSettings { held_out_fraction: 0.5, ..settings() },
    ] {
        assert!(refused(&source, &other).unwrap().contains("data order"), "{other:?}");
    }
    write(folder.path(), &[("b.jsonl", jsonl(&documents(50, 1)))]);
    assert!(refused(&folder_source(folder.path()), &settings()).unwrap().contains("data set"));
}

#[test]
fn unreachable_positions_are_rejected() {
    let (_folder, source) = folder(&[("a.jsonl", jsonl(&documents(0, 50)))]);
    let cursor = open(&source, &settings(), None).cursor();
    let json = serde_json::to_value(&cursor).unwrap();
    for (key, value) in [
        ("epoch", serde_json::json!(u64::MAX)),
        ("window", serde_json::json!(u64::MAX)),
        ("sequence", serde_json::json!(u64::MAX)),
        ("next_file", serde_json::json!(2)),
        ("lanes", serde_json::json!([])),
        ("lanes", serde_json::json!([{"file": 7, "group": 0, "row": 0}, null, null])),
    ] {
        let mut json = json.clone();
        json["components"][0][key] = value;
        let cursor = serde_json::from_value(json).unwrap();
        let error = TokenStream::open(&source, &settings(), &tokenizer(), Some(cursor)).err().unwrap();
        assert!(matches!(error, DataError::Cursor { .. }), "{key}: {error}");
    }
    let mut past_the_end = cursor;
    past_the_end.components[0].sequence = 10_000;
    let error = open(&source, &settings(), Some(past_the_end)).next_sequences(1).unwrap_err();
    assert!(matches!(error, DataError::Cursor { .. }), "{error}");
}

#[test]
fn invalid_settings_are_rejected() {
    let (_folder, source) = folder(&[("a.jsonl", jsonl(&documents(0, 5)))]);
    for (settings, name) in [
        (StreamSettings { sequence_length: 0, ..settings() }, "sequence_length"),
        (StreamSettings { shuffle_buffer_size: 0, ..settings() }, "shuffle_buffer_size"),
        (StreamSettings { max_samples: Some(0), ..settings() }, "max_samples"),
        (StreamSettings { workers: 0, ..settings() }, "num_workers"),
    ] {
        let error = TokenStream::open(&source, &settings, &tokenizer(), None).err().unwrap().to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn endless_streams_repeat_epochs_until_dropped() {
    let (_folder, source) = folder(&[("a.jsonl", jsonl(&documents(0, 30)))]);
    let mut stream = open(&source, &StreamSettings { epochs: None, ..settings() }, None);
    let batch = stream.next_sequences(500).unwrap();
    assert_eq!((batch.sequences(), stream.cursor().components[0].start.epoch > 2), (500, true));
    let start = Instant::now();
    drop(stream);
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn ended_streams_stay_ended() {
    let (_folder, source) = folder(&[("a.jsonl", jsonl(&documents(0, 30)))]);
    let mut stream = open(&source, &settings(), None);
    assert!(!stream.next_sequences(10_000).unwrap().is_empty());
    assert!(stream.next_sequences(1).unwrap().is_empty());
    let mut resumed = open(&source, &settings(), Some(stream.cursor()));
    assert!(resumed.next_sequences(1).unwrap().is_empty());
    let longer = StreamSettings { epochs: Some(2), ..settings() };
    assert!(!open(&source, &longer, Some(stream.cursor())).next_sequences(1).unwrap().is_empty());
}
