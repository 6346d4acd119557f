//! Chat data as a stream: columns of both formats, order, resuming, held-out conversations, and rows that are skipped.

use std::fs;
use std::path::Path;

use crate::fixtures::{self, Sequence, folder_source, gzip, sequences, write};
use dataset::{ChatSettings, DataSource, HeldOut, IGNORED_TARGET, StreamSettings, TokenStream, Tokenizer};
use run_config::{DataFormat, NEWEST_READING_VERSION, OverlongConversations, Packing};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A chat template that names roles in ordinary text.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

fn tokenizer(folder: &Path) -> Tokenizer {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer.json");
    fs::create_dir_all(folder).unwrap();
    fs::copy(fixture, folder.join("tokenizer.json")).unwrap();
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    Tokenizer::load(&folder.join("tokenizer.json"), &[]).unwrap()
}

fn settings() -> StreamSettings {
    let chat = ChatSettings {
        template: None,
        date: None,
        assistant_only_loss: true,
        overlong: OverlongConversations::Truncate,
        parse_special_tokens: None,
        reading_version: NEWEST_READING_VERSION,
    };
    StreamSettings { sequence_length: 96, packing: Packing::Documents, chat: Some(chat), ..fixtures::settings() }
}

/// Conversations `first..first + count`, of different lengths and all distinct.
fn conversations(first: usize, count: usize) -> Vec<Value> {
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let conversation = |i: usize| {
        let mut turns = vec![turn("user", format!("number {i}?")), turn("assistant", format!("It is {i}."))];
        if i.is_multiple_of(3) {
            turns.extend([turn("user", "again".to_owned()), turn("assistant", format!("{}", i * i))]);
        }
        json!({"messages": turns, "source": "made up"})
    };
    (first..first + count).map(conversation).collect()
}

fn jsonl(rows: &[Value]) -> Vec<u8> {
    rows.iter().flat_map(|row| format!("{row}\n").into_bytes()).collect()
}

struct Data {
    _folder: TempDir,
    source: DataSource,
    tokenizer: Tokenizer,
}

fn data(files: &[(&str, Vec<u8>)]) -> Data {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("data"), files);
    let source = folder_source(&folder.path().join("data")).with_format(DataFormat::Chat);
    let tokenizer = tokenizer(&folder.path().join("model"));
    Data { _folder: folder, source, tokenizer }
}

fn usual() -> Data {
    data(&[
        ("a.jsonl", jsonl(&conversations(0, 60))),
        ("b.jsonl.gz", gzip(&jsonl(&conversations(60, 30)))),
        ("c.jsonl", jsonl(&conversations(90, 20))),
    ])
}

impl Data {
    fn stream(&self, settings: &StreamSettings) -> TokenStream {
        TokenStream::open(&self.source, settings, &self.tokenizer, None).unwrap()
    }

    /// Returns what the assistant says in all sequences, turn by turn, sorted.
    fn answers(&self, sequences: &[Sequence]) -> Vec<String> {
        let mut answers = Vec::new();
        for (_, targets) in sequences {
            let spans = targets.split(|&target| target == IGNORED_TARGET).filter(|span| !span.is_empty());
            answers.extend(spans.map(|span| {
                let ids: Vec<u32> = span.iter().map(|&id| id as u32).collect();
                assert_eq!(ids.last(), Some(&self.tokenizer.end_of_text()), "the end of the turn counts");
                self.tokenizer.decode(&ids).unwrap()
            }));
        }
        answers.sort();
        answers
    }
}

fn expected(first: usize, count: usize) -> Vec<String> {
    let answers = |i: usize| {
        let second = i.is_multiple_of(3).then(|| (i * i).to_string());
        std::iter::once(format!("It is {i}.")).chain(second)
    };
    let mut all: Vec<String> = (first..first + count).flat_map(answers).collect();
    all.sort();
    all
}

#[test]
fn each_turn_of_the_assistant_counts_once_per_epoch() {
    let data = usual();
    let mut sequence_counts = Vec::new();
    for packing in [Packing::Documents, Packing::Padded] {
        let mut stream = data.stream(&StreamSettings { packing, ..settings() });
        let sequences = sequences(&mut stream, 4).unwrap();
        assert_eq!(data.answers(&sequences), expected(0, 110));
        sequence_counts.push(sequences.len());
    }
    assert!(sequence_counts[0] < 80 && sequence_counts[1] == 110, "{sequence_counts:?}");
}

#[test]
fn a_stream_resumes_at_any_batch() {
    let data = usual();
    let whole = sequences(&mut data.stream(&settings()), 1).unwrap();
    let mut stream = data.stream(&settings());
    for position in 0..whole.len() {
        let mut resumed = TokenStream::open(&data.source, &settings(), &data.tokenizer, Some(stream.cursor())).unwrap();
        assert_eq!(fixtures::rows(&resumed.next_sequences(1).unwrap()), whole[position..=position]);
        stream.next_sequences(1).unwrap();
    }
}

#[test]
fn the_order_depends_on_neither_threads_nor_batches_but_on_the_template() {
    let data = usual();
    let first = sequences(&mut data.stream(&settings()), 1).unwrap();
    let other = StreamSettings { workers: 1, ..settings() };
    assert_eq!(sequences(&mut data.stream(&other), 7).unwrap(), first);
    let cursor = data.stream(&settings()).cursor();
    fs::write(data.tokenizer.path().with_file_name("chat_template.jinja"), format!("{TEMPLATE} ")).unwrap();
    let error = TokenStream::open(&data.source, &settings(), &data.tokenizer, Some(cursor)).err().unwrap();
    assert!(error.to_string().contains("chat template"), "{error}");
}

#[test]
fn held_out_conversations_are_not_trained_on() {
    let data = data(&[("a.jsonl", jsonl(&conversations(0, 3000)))]);
    let settings = StreamSettings { held_out_fraction: 0.2, ..settings() };
    let trained = data.answers(&sequences(&mut data.stream(&settings), 8).unwrap());
    let mut held_out = HeldOut::open(&data.source, &settings, &data.tokenizer).unwrap();
    let mut evaluate = || {
        let batches = held_out.batches(3, usize::MAX).collect::<Result<Vec<_>, _>>().unwrap();
        data.answers(&batches.iter().flat_map(fixtures::rows).collect::<Vec<_>>())
    };
    let evaluated = evaluate();
    assert!(!evaluated.is_empty() && evaluate() == evaluated);
    let mut all = [trained, evaluated].concat();
    all.sort();
    assert_eq!(all, expected(0, 3000));
}

#[test]
fn held_out_sequences_are_counted_up_to_a_limit() {
    let data = data(&[("a.jsonl", jsonl(&conversations(0, 40)))]);
    let mut held_out = HeldOut::whole(&data.source, &settings(), &data.tokenizer).unwrap();
    let there = held_out.batches(1, usize::MAX).count();
    assert!(there > 2);
    let mut held_out = HeldOut::whole(&data.source, &settings(), &data.tokenizer).unwrap();
    let counts = [0, 2, there, there + 5].map(|limit| held_out.sequences_up_to(limit, &|| false).unwrap());
    assert_eq!(counts, [0, 2, there, there]);
    assert_eq!(held_out.batches(1, usize::MAX).count(), there, "counting takes none of them");
}

#[test]
fn bad_rows_are_skipped_and_counted_by_reason() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let rows = [
        json!({"messages": [turn("user", "a"), turn("assistant", "b")]}),
        json!({"messages": [turn("bot", "a"), turn("assistant", "b")]}),
        json!({"messages": []}),
        json!({"messages": [turn("user", "a"), turn("assistant", "")]}),
        json!({"messages": [turn("user", "only a question")]}),
        json!({"messages": [turn("user", &"long ".repeat(40)), turn("assistant", "b")]}),
        json!({"messages": [turn("user", "a"), turn("assistant", &"long ".repeat(40))]}),
    ];
    let mut bytes = jsonl(&rows);
    bytes.extend_from_slice(b"nonsense\n");
    let data = data(&[("a.jsonl", bytes)]);
    let mut stream = data.stream(&settings());
    let sequences = sequences(&mut stream, 1).unwrap();
    let skipped = stream.skipped()[0];
    let reasons: Vec<_> = skipped.counts().into_iter().filter(|(_, count)| *count > 0).collect();
    let expected =
        [("malformed", 1), ("not_conversation", 1), ("unknown_role", 1), ("empty_message", 1), ("no_target", 2)];
    assert_eq!((reasons.as_slice(), skipped.total()), (expected.as_slice(), 6));
    assert_eq!((stream.truncated(), sequences.len()), (vec![1], 2));
    let skipped = {
        let chat = settings().chat.map(|chat| ChatSettings { overlong: OverlongConversations::Skip, ..chat });
        let mut stream = data.stream(&StreamSettings { chat, ..settings() });
        fixtures::sequences(&mut stream, 1).unwrap();
        (stream.skipped()[0].overlong, stream.truncated())
    };
    assert_eq!(skipped, (2, vec![0]));
}

#[test]
fn data_without_conversations_says_what_is_missing() {
    let message = |files: &[(&str, Vec<u8>)]| {
        let data = data(files);
        data.stream(&settings()).next_sequences(1).unwrap_err().to_string()
    };
    let text = message(&[("a.jsonl", jsonl(&[json!({"text": "x", "prompt": "y"})]))]);
    assert!(text.contains("a.jsonl has no conversations") && text.contains("its columns are text, prompt"), "{text}");
    assert!(message(&[("a.txt", b"words".to_vec())]).contains("a.txt has no conversations"));
    let empty = message(&[("a.jsonl", jsonl(&[json!({"messages": []})]))]);
    assert!(empty.contains("1 not a conversation; for example: its messages are empty"), "{empty}");
}
