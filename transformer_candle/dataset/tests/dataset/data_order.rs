//! The data order, as defined in the crate's documentation.

use crate::fixtures::{
    self, documents, epoch_texts, folder_source, gzip, held_out_texts, jsonl, mixed, open, parquet, sequences,
    settings, sorted, tokenizer, write,
};
use dataset::{Cursor, Documents, StreamSettings};
use proptest::prelude::*;
use run_config::Packing;
use sha2::{Digest, Sha256};

#[test]
fn every_document_is_read_once_per_epoch() {
    let (_folder, source, documents) = mixed();
    assert_eq!(sorted(epoch_texts(&source, &settings()).unwrap()), sorted(documents));
}

#[test]
fn every_token_is_a_target_once_at_any_length() {
    let (_folder, source, documents) = mixed();
    let tokenizer = tokenizer();
    let encoded = documents.iter().flat_map(|document| tokenizer.encode(document).unwrap());
    let mut expected: Vec<i32> = encoded.map(|id| id as i32).collect();
    expected.extend(documents.iter().map(|_| tokenizer.end_of_text() as i32));
    expected.sort_unstable();
    for sequence_length in [1, 7, 64] {
        let mut stream = open(&source, &StreamSettings { sequence_length, ..settings() }, None);
        let mut targets = Vec::new();
        let (mut target_count, mut bytes) = (0, 0);
        loop {
            let batch = stream.next_sequences(5).unwrap();
            if batch.is_empty() {
                break;
            }
            target_count += batch.target_count;
            bytes += batch.target_bytes.unwrap();
            targets.extend(batch.targets.into_iter().filter(|&id| id != dataset::IGNORED_TARGET));
        }
        targets.sort_unstable();
        assert_eq!((target_count, &targets), (expected.len(), &expected));
        assert_eq!(bytes as usize, documents.iter().map(String::len).sum::<usize>());
    }
}

#[test]
fn document_packing_only_adds_document_starts() {
    let (_folder, source, _) = mixed();
    let batch = |packing| {
        let settings = StreamSettings { packing, ..settings() };
        open(&source, &settings, None).next_sequences(usize::MAX).unwrap()
    };
    let mut by_documents = batch(Packing::Documents);
    let starts = by_documents.document_starts.take().unwrap();
    assert_eq!(by_documents, batch(Packing::Concat));
    let length = by_documents.sequence_length;
    let starts_document = |index: usize| starts[index] as usize == index % length;
    // No text here contains the id of end-of-text, and each ends with one; padding looks like end-of-text.
    let padding = |index: usize| by_documents.targets[index] == dataset::IGNORED_TARGET;
    for index in (0..starts.len()).filter(|&index| index % length > 0 && !padding(index)) {
        assert_eq!(starts_document(index), by_documents.inputs[index] == tokenizer().end_of_text(), "{index}");
        assert!(starts_document(index) || starts[index] == starts[index - 1], "{index}");
    }
}

/// Hash of a data order. A change of it changes the data of every resumed run, and must come with a new
/// `ORDER_VERSION`.
const GOLDEN: &str = "514249082e7144b54eb798e098359a6b41aa0d6bcb3a6e1b1a67d8b539ee2e5c";

#[test]
fn data_order_matches_the_golden_hash() {
    let (_folder, source, _) = mixed();
    let settings = StreamSettings { held_out_fraction: 0.1, epochs: Some(2), ..settings() };
    let mut hash = Sha256::new();
    for (inputs, targets) in sequences(&mut open(&source, &settings, None), 10).unwrap() {
        hash.update(inputs.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
        hash.update(targets.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<_>>());
    }
    assert_eq!(format!("{:x}", bytes::Bytes::copy_from_slice(&hash.finalize())), GOLDEN);
}

#[test]
fn threads_and_batch_sizes_change_nothing() {
    let (_folder, source, _) = mixed();
    let uninterrupted = sequences(&mut open(&source, &settings(), None), 1).unwrap();
    for (workers, at_a_time) in [(1, 1000), (2, 3), (8, 7)] {
        let mut stream = open(&source, &StreamSettings { workers, ..settings() }, None);
        assert_eq!(sequences(&mut stream, at_a_time).unwrap(), uninterrupted);
    }
}

#[test]
fn streams_resume_from_any_position() {
    let (_folder, source, _) = mixed();
    let settings = StreamSettings { sequence_length: 256, epochs: Some(2), ..settings() };
    let mut stream = open(&source, &settings, None);
    let mut cursors = vec![stream.cursor()];
    let mut uninterrupted = Vec::new();
    loop {
        let batch = stream.next_sequences(1).unwrap();
        if batch.is_empty() {
            break;
        }
        uninterrupted.extend(fixtures::rows(&batch));
        cursors.push(stream.cursor());
    }
    assert!(uninterrupted.len() > 40);
    for (position, cursor) in cursors.into_iter().enumerate() {
        let json = serde_json::to_string(&cursor).unwrap();
        let cursor: Cursor = serde_json::from_str(&json).unwrap();
        let rest = sequences(&mut open(&source, &settings, Some(cursor)), 4).unwrap();
        assert_eq!(rest, uninterrupted[position..], "from position {position}: {json}");
    }
}

#[test]
fn a_cursor_of_sixteen_open_shards_is_small() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<(String, Vec<u8>)> =
        (0..40).map(|i| (format!("{i:02}.parquet"), parquet(&documents(i * 10, 10), 4))).collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    write(folder.path(), &files);
    let settings = StreamSettings { open_shards: 16, shuffle_buffer_size: 100, ..settings() };
    let mut stream = open(&folder_source(folder.path()), &settings, None);
    let mut longest = 0;
    while !stream.next_sequences(10).unwrap().is_empty() {
        longest = longest.max(serde_json::to_string(&stream.cursor()).unwrap().len());
    }
    assert!((500..2048).contains(&longest), "{longest}");
}

#[test]
fn epochs_and_seeds_give_different_orders() {
    let (_folder, source, documents) = mixed();
    let texts =
        |seed, epochs| epoch_texts(&source, &StreamSettings { seed, epochs: Some(epochs), ..settings() }).unwrap();
    let two = texts(7, 2);
    let (first, second) = two.split_at(documents.len());
    assert_eq!(first, texts(7, 1));
    assert_eq!(sorted(first.to_vec()), sorted(second.to_vec()));
    let same_index = first.iter().zip(second).filter(|(a, b)| a == b).count();
    assert!(same_index < 20, "{same_index}");
    assert_ne!(first, texts(8, 1));
}

#[test]
fn windows_mix_shards_and_shuffle_documents() {
    let (_folder, source, all) = mixed();
    let texts =
        epoch_texts(&source, &StreamSettings { open_shards: 5, shuffle_buffer_size: 50, ..settings() }).unwrap();
    let index = |text: &String| all.iter().position(|other| other == text).unwrap();
    let first_window: Vec<usize> = texts[..50].iter().map(index).collect();
    for file in [0..60, 60..90, 90..130, 130..150, 150..200] {
        let indices: Vec<usize> = first_window.iter().copied().filter(|index| file.contains(index)).collect();
        assert_eq!(indices.len(), 10, "{file:?}");
        assert!(!indices.is_sorted());
    }
}

#[test]
fn sequences_of_a_long_document_are_spread() {
    let folder = tempfile::tempdir().unwrap();
    let book: String = (0..3000).map(|i| format!("line {i} of a long book\n")).collect();
    write(folder.path(), &[("book.txt", book.clone().into_bytes())]);
    let settings = StreamSettings { sequence_length: 100, shuffle_buffer_size: 100, ..settings() };
    let read = sequences(&mut open(&folder_source(folder.path()), &settings, None), 10).unwrap();
    let ranges: Vec<Option<(usize, usize)>> = read
        .iter()
        .map(|(inputs, _)| {
            let text = tokenizer().decode(inputs).unwrap();
            book.find(&text).map(|start| (start, start + text.len()))
        })
        .collect();
    let followers = ranges.windows(2).filter(|pair| pair[0].zip(pair[1]).is_some_and(|(a, b)| a.1 == b.0)).count();
    assert!(ranges.iter().flatten().count() > 200);
    assert!(followers < 8, "{followers} of {}", ranges.len());
}

#[test]
fn text_files_come_back_from_their_chunks() {
    let folder = tempfile::tempdir().unwrap();
    let book: String = (0..9000).map(|i| format!("line {i} of a long book\n")).collect();
    write(folder.path(), &[("book.txt", book.clone().into_bytes())]);
    let source = folder_source(folder.path());
    let chunks = Documents::open(&source, None).collect::<Result<Vec<_>, _>>().unwrap();
    assert!(chunks.len() > 4 && chunks.concat() == book);
    let mut targets = 0;
    let mut ends = 0;
    for (_, row) in sequences(&mut open(&source, &settings(), None), 100).unwrap() {
        targets += row.iter().filter(|&&id| id != dataset::IGNORED_TARGET).count();
        ends += row.iter().filter(|&&id| id == tokenizer().end_of_text() as i32).count();
    }
    let ids: usize = chunks.iter().map(|chunk| tokenizer().encode(chunk).unwrap().len()).sum();
    assert_eq!((targets, ends), (ids + 1, 1));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn training_and_held_out_rows_partition_the_data(
        files in prop::collection::vec((0_usize..4, 1_usize..60, 1_usize..30), 1..7),
        (seed, window, open_shards, samples) in (any::<u64>(), 1_usize..80, 1_usize..9, prop::option::of(1_u64..150)),
        (fraction, cut) in (prop::sample::select(vec![0.0, 0.001, 0.3]), 0.0..1.0),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut all = Vec::new();
        for (i, &(kind, count, row_group_rows)) in files.iter().enumerate() {
            let part = documents(all.len(), count);
            let (ending, bytes) = match kind {
                0 => ("jsonl", jsonl(&part)),
                1 => ("jsonl.gz", gzip(&jsonl(&part))),
                _ => ("parquet", parquet(&part, row_group_rows)),
            };
            write(folder.path(), &[(&format!("{i}.{ending}"), bytes)]);
            all.extend(part);
        }
        let source = folder_source(folder.path());
        let settings = StreamSettings {
            seed, shuffle_buffer_size: window, open_shards, max_samples: samples, held_out_fraction: fraction, ..settings()
        };
        let limit = samples.map_or(all.len(), |samples| all.len().min(samples as usize));
        let trained = epoch_texts(&source, &settings).unwrap();
        if fraction == 0.0 {
            prop_assert_eq!(sorted(trained), sorted(all[..limit].to_vec()));
        } else if all.len() > 1 {
            let held_out = held_out_texts(&source, &settings);
            prop_assert!(!held_out.is_empty());
            prop_assert!(held_out.iter().all(|text| !trained.contains(text)));
            if limit < all.len() {
                prop_assert_eq!(sorted(trained), sorted(all[..limit].to_vec()));
            } else {
                prop_assert_eq!(sorted([trained, held_out].concat()), sorted(all));
            }
        }
        let uninterrupted = sequences(&mut open(&source, &settings, None), 3).unwrap();
        let mut stream = open(&source, &settings, None);
        let position = (cut * uninterrupted.len() as f64) as usize;
        stream.next_sequences(position).unwrap();
        let rest = sequences(&mut open(&source, &settings, Some(stream.cursor())), 5).unwrap();
        prop_assert_eq!(&rest, &uninterrupted[position..]);
    }
}
