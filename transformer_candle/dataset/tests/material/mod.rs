//! What the tests read: a small tokenizer, documents that can be told apart, folders of files in every format.

#![allow(dead_code, clippy::unwrap_used, clippy::format_collect)]

use std::io::Write;
use std::path::Path;
use std::sync::OnceLock;

use dataset::{
    Batch, CancelToken, Cursor, DataError, DataSource, HeldOut, IGNORED_TARGET, StreamSettings, TokenStream, Tokenizer,
};
use run_config::Packing;

#[path = "../../src/formats/writing.rs"]
mod writing;

use writing::{ParquetWriting, write_parquet};

/// A byte-level BPE of the 256 bytes, five merges and end-of-text.
pub fn tokenizer() -> Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/material/tokenizer.json");
    TOKENIZER.get_or_init(|| Tokenizer::load(&path, &[]).unwrap()).clone()
}

/// Settings small enough that a few documents fill several windows.
pub fn settings() -> StreamSettings {
    StreamSettings {
        sequence_length: 32,
        packing: Packing::Concat,
        shuffle_buffer_size: 20,
        seed: 7,
        max_samples: None,
        lanes: 3,
        held_out_fraction: 0.0,
        epochs: Some(1),
        workers: 2,
    }
}

/// Documents `first..first + count` of different lengths, none equal to another.
pub fn documents(first: usize, count: usize) -> Vec<String> {
    (first..first + count).map(|i| format!("document {i}: {}", "the docking ".repeat(i * 7 % 11))).collect()
}

pub fn parquet(documents: &[String], group_rows: usize) -> Vec<u8> {
    let rows: Vec<_> = documents.iter().map(|text| Some(text.clone().into_bytes())).collect();
    write_parquet(&rows, &ParquetWriting { group_rows, ..ParquetWriting::default() })
}

pub fn parquet_rows(rows: &[Option<Vec<u8>>], group_rows: usize) -> Vec<u8> {
    write_parquet(rows, &ParquetWriting { group_rows, ..ParquetWriting::default() })
}

pub fn jsonl(documents: &[String]) -> Vec<u8> {
    let lines = documents.iter().map(|text| format!("{}\n", serde_json::json!({"id": 1, "text": text})));
    lines.collect::<String>().into_bytes()
}

pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

pub fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 1).unwrap()
}

pub fn write(folder: &Path, files: &[(&str, Vec<u8>)]) {
    for (name, bytes) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// All files of a folder.
pub fn folder_source(folder: &Path) -> DataSource {
    DataSource::local(&[folder.to_str().unwrap().to_owned()], Path::new(""), "text", &CancelToken::new()).unwrap()
}

pub fn open(source: &DataSource, settings: &StreamSettings, cursor: Option<Cursor>) -> TokenStream {
    TokenStream::open(source, settings, &tokenizer(), cursor).unwrap()
}

/// Inputs and targets.
pub type Sequence = (Vec<u32>, Vec<i32>);

/// Every sequence of a stream that ends, as inputs and targets.
pub fn sequences(stream: &mut TokenStream, at_a_time: usize) -> Result<Vec<Sequence>, DataError> {
    let mut all = Vec::new();
    loop {
        let batch = stream.next_sequences(at_a_time)?;
        if batch.is_empty() {
            return Ok(all);
        }
        all.extend(rows(&batch));
    }
}

pub fn rows(batch: &Batch) -> Vec<Sequence> {
    let inputs = batch.inputs.chunks(batch.sequence_length);
    inputs.zip(batch.targets.chunks(batch.sequence_length)).map(|(i, t)| (i.to_vec(), t.to_vec())).collect()
}

/// The documents of one epoch in the order of their windows: with sequences as long as a window nothing is cut.
pub fn epoch_texts(source: &DataSource, settings: &StreamSettings) -> Result<Vec<String>, DataError> {
    let settings = StreamSettings { sequence_length: 1 << 16, ..settings.clone() };
    let tokenizer = tokenizer();
    let mut stream = TokenStream::open(source, &settings, &tokenizer, None)?;
    let mut texts = Vec::new();
    for (_, targets) in sequences(&mut stream, 1)? {
        texts.extend(split_texts(&targets, &tokenizer));
    }
    Ok(texts)
}

/// The texts between ends of text.
pub fn split_texts(targets: &[i32], tokenizer: &Tokenizer) -> Vec<String> {
    let ids: Vec<u32> = targets.iter().filter(|&&id| id != IGNORED_TARGET).map(|&id| id as u32).collect();
    let mut texts: Vec<String> =
        ids.split(|&id| id == tokenizer.end_of_text()).map(|ids| tokenizer.decode(ids).unwrap()).collect();
    assert_eq!(texts.pop().as_deref(), Some(""), "the last document has an end");
    texts
}

pub fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort();
    texts
}

/// 200 documents in files of every format with many, one and unknown numbers of groups.
pub fn mixed() -> (tempfile::TempDir, DataSource, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[
            ("a.parquet", parquet(&documents(0, 60), 7)),
            ("b.jsonl", jsonl(&documents(60, 30))),
            ("c.jsonl.gz", gzip(&jsonl(&documents(90, 40)))),
            ("d.jsonl.zst", zstd(&jsonl(&documents(130, 20)))),
            ("e.parquet", parquet(&documents(150, 50), 25)),
        ],
    );
    let source = folder_source(folder.path());
    (folder, source, documents(0, 200))
}

/// The texts of an evaluation, which must be the same in a second one.
pub fn held_out_texts(source: &DataSource, settings: &StreamSettings) -> Vec<String> {
    let settings = StreamSettings { sequence_length: 1 << 16, ..settings.clone() };
    let mut held_out = HeldOut::open(source, &settings, &tokenizer()).unwrap();
    let mut texts = || -> Vec<String> {
        let batches = held_out.batches(1, usize::MAX).collect::<Result<Vec<_>, _>>().unwrap();
        batches.iter().flat_map(|batch| split_texts(&batch.targets, &tokenizer())).collect()
    };
    let first = texts();
    assert_eq!(texts(), first);
    first
}
