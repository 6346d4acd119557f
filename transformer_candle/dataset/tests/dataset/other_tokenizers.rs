//! Streams with the tokenizers of other models: documents that start with a BOS token, and SentencePiece's bytes.

#[path = "../../src/tokenizer/sentencepiece_fixture.rs"]
mod sentencepiece_fixture;

use std::fs;

use crate::fixtures::{documents, jsonl, settings};
use dataset::{
    Batch, CancelToken, DataError, DataSource, HeldOut, IGNORED_TARGET, StreamSettings, TokenStream, Tokenizer,
};
use run_config::{NEWEST_READING_VERSION, Packing};
use sentencepiece_fixture::{Form, sentencepiece};
use tempfile::TempDir;

const BOS: u32 = 1;
const END: u32 = 2;

/// A folder of documents, two tokenizers that differ in whether documents start with BOS, and one of the other form.
fn material() -> (TempDir, DataSource, Vec<String>, [Tokenizer; 3]) {
    let folder = tempfile::tempdir().unwrap();
    let mut texts = documents(0, 60);
    texts.extend(["\u{e9}\u{4e2d} \u{1f600}", " a  b ", "</s> \u{2581} <s>"].map(str::to_owned));
    fs::write(folder.path().join("a.jsonl"), jsonl(&texts)).unwrap();
    let source =
        DataSource::local(&["*.jsonl".to_owned()], folder.path(), "text", NEWEST_READING_VERSION, &CancelToken::new())
            .unwrap();
    let open = |name: &str, form: Form, config: &str| {
        let path = folder.path().join(name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("tokenizer.json"), sentencepiece(form).to_string()).unwrap();
        fs::write(path.join("tokenizer_config.json"), config).unwrap();
        Tokenizer::of_model(&path).unwrap()
    };
    let no_bos = r#"{"add_bos_token": false}"#;
    let tokenizers = [
        open("with", Form::Prepend, "{}"),
        open("without", Form::Prepend, no_bos),
        open("metaspace", Form::Metaspace, "{}"),
    ];
    (folder, source, texts, tokenizers)
}

fn all(source: &DataSource, settings: &StreamSettings, tokenizer: &Tokenizer) -> Batch {
    TokenStream::open(source, settings, tokenizer, None).unwrap().next_sequences(10_000).unwrap()
}

fn targets(batch: &Batch) -> Vec<i32> {
    batch.targets.iter().copied().filter(|&target| target != IGNORED_TARGET).collect()
}

#[test]
fn every_document_starts_with_bos() {
    let (_folder, source, texts, [with, without, _]) = material();
    for packing in [Packing::Concat, Packing::Documents] {
        // Long enough for a window in one sequence.
        let settings = StreamSettings { packing, sequence_length: 1 << 14, ..settings() };
        let (batch, plain) = (all(&source, &settings, &with), all(&source, &settings, &without));
        let ids = targets(&batch);
        assert!(ids.contains(&(BOS as i32)));
        let documents = ids.split(|&id| id == END as i32).filter(|document| !document.is_empty());
        assert!(documents.clone().all(|document| document[0] == BOS as i32));
        assert_eq!(documents.count(), texts.len());
        let without_bos: Vec<i32> = ids.into_iter().filter(|&id| id != BOS as i32).collect();
        assert_eq!(without_bos, targets(&plain));
        let Some(starts) = batch.document_starts else { continue };
        for (index, start) in
            starts.into_iter().enumerate().filter(|&(index, _)| batch.targets[index] != IGNORED_TARGET)
        {
            let first = index / (1 << 14) * (1 << 14);
            let bos = batch.inputs[first..=index].iter().rposition(|&id| id == BOS);
            assert_eq!(start as usize, bos.unwrap_or(0), "{index}");
        }
    }
}

#[test]
fn target_bytes_are_those_of_the_documents() {
    let (_folder, source, texts, tokenizers) = material();
    let bytes: usize = texts.iter().map(String::len).sum();
    for tokenizer in &tokenizers {
        for sequence_length in [3, 32, 1000] {
            let settings = StreamSettings { sequence_length, ..settings() };
            assert_eq!(all(&source, &settings, tokenizer).target_bytes, Some(bytes as u64));
            let mut held_out =
                HeldOut::whole(&source, &StreamSettings { sequence_length, ..StreamSettings::default() }, tokenizer)
                    .unwrap();
            let batches = held_out.batches(4, usize::MAX).map(|batch| batch.unwrap().target_bytes.unwrap());
            assert_eq!(batches.sum::<u64>(), bytes as u64);
        }
    }
}

#[test]
fn held_out_documents_start_with_bos() {
    let (_folder, source, texts, [with, ..]) = material();
    let mut held_out =
        HeldOut::whole(&source, &StreamSettings { sequence_length: 32, ..StreamSettings::default() }, &with).unwrap();
    let count = |batch: Batch| targets(&batch).iter().filter(|&&id| id == BOS as i32).count();
    assert_eq!(held_out.batches(4, usize::MAX).map(|batch| count(batch.unwrap())).sum::<usize>(), texts.len());
}

#[test]
fn a_cursor_belongs_to_streams_with_the_same_bos() {
    let (_folder, source, _, [with, without, _]) = material();
    let stream = TokenStream::open(&source, &settings(), &with, None).unwrap();
    let refused = TokenStream::open(&source, &settings(), &without, Some(stream.cursor())).err().unwrap();
    assert!(matches!(refused, DataError::Cursor { difference } if difference.contains("bos")));
    assert!(TokenStream::open(&source, &settings(), &with, Some(stream.cursor())).is_ok());
}
