//! Tests of the tokenizer: what begins and ends documents, and how many bytes tokens stand for.

use std::fs;

use proptest::prelude::*;
use run_config::Bos;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::document_tokens::Choice;
use super::sentencepiece_fixture::{Form, sentencepiece};
use super::*;

/// A byte-level BPE of the 256 bytes, five merges and end-of-text, whose file asks to truncate texts to four
/// tokens.
const JSON: &str = include_str!("../../tests/fixtures/tokenizer.json");

fn byte_tokenizer() -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, JSON).unwrap();
    Tokenizer::load(&path, &[]).unwrap()
}

#[test]
fn texts_round_trip_and_bytes_add_up() {
    let tokenizer = byte_tokenizer();
    let token_bytes = tokenizer.token_bytes().unwrap();
    for text in ["the docking thing", "\u{e9}\u{4e2d}\u{1f600}\r\n\0", "", "longer than the file's truncation allows"] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids).unwrap(), text);
        assert_eq!(ids.iter().map(|&id| token_bytes[id as usize]).sum::<u32>() as usize, text.len(), "{text}");
    }
    assert_eq!(token_bytes[tokenizer.end_of_text() as usize], 0);
    assert_eq!(tokenizer.vocab_size(), 262);
}

#[test]
fn text_never_becomes_a_special_token() {
    let tokenizer = byte_tokenizer();
    let ids = tokenizer.encode("a <|endoftext|> b").unwrap();
    assert!(!ids.contains(&tokenizer.end_of_text()));
    assert_eq!(tokenizer.decode(&ids).unwrap(), "a <|endoftext|> b");
}

#[test]
fn special_tokens_may_name_another_end_of_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, JSON.replace("<|endoftext|>", "</s>")).unwrap();
    let error = Tokenizer::load(&path, &["<pad>".to_owned()]).err().unwrap().to_string();
    assert!(error.contains("<|endoftext|>") && error.contains("tokenizer.json"), "{error}");
    let tokenizer = Tokenizer::load(&path, &["<pad>".to_owned(), "</s>".to_owned()]).unwrap();
    assert_eq!(tokenizer.document_tokens(), &DocumentTokens::ended_by(261, "</s>"));
}

#[test]
fn missing_and_invalid_files_are_named_in_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    for content in [None, Some("{}"), Some("not json")] {
        if let Some(content) = content {
            std::fs::write(&path, content).unwrap();
        }
        let error = Tokenizer::load(&path, &[]).err().unwrap().to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
    }
}

/// A folder with a `tokenizer.json` and files beside it.
fn folder_with(tokenizer: &Value, files: &[(&str, Value)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files.iter().chain([&("tokenizer.json", tokenizer.clone())]) {
        fs::write(folder.path().join(name), content.to_string()).unwrap();
    }
    folder
}

fn marks(tokenizer: &Value, files: &[(&str, Value)], choice: Choice) -> Result<DocumentTokens, String> {
    let folder = folder_with(tokenizer, files);
    let read = Tokenizer::read(&folder.path().join("tokenizer.json"), TokenizerReading::Folder, choice);
    read.map(|tokenizer| tokenizer.document_tokens().clone()).map_err(|error| error.to_string())
}

#[test]
fn a_file_s_truncation_cuts_no_document() {
    let mut json: Value = serde_json::from_str(JSON).unwrap();
    json["truncation"]["max_length"] = 600.into();
    let folder = folder_with(&json, &[]);
    let text = "a document of some hundred tokens ".repeat(100);
    let encoded = |truncates| {
        let choice = Choice { truncates, ..Choice::default() };
        let path = folder.path().join("tokenizer.json");
        Tokenizer::read(&path, TokenizerReading::Folder, choice).unwrap().encode(&text).unwrap()
    };
    let (whole, cut) = (encoded(false), encoded(true));
    assert_eq!(byte_tokenizer().decode(&whole).unwrap(), text);
    assert_eq!(cut, whole[..600], "runs of the first reading version");
}

fn without_template(mut tokenizer: Value) -> Value {
    tokenizer["post_processor"] = Value::Null;
    tokenizer
}

/// The fixture's tokenizer with other special tokens: `<|begin_of_text|>` and these.
fn with_tokens(names: &[&str]) -> Value {
    let mut json: Value = serde_json::from_str(JSON).unwrap();
    let mut token = json["added_tokens"][0].clone();
    let tokens = ["<|begin_of_text|>"].iter().chain(names).zip(261..).map(|(name, id)| {
        (token["content"], token["id"]) = (json!(name), json!(id));
        token.clone()
    });
    json["added_tokens"] = tokens.collect();
    json
}

#[test]
fn documents_start_with_bos_where_the_files_say_so() {
    let template = sentencepiece(Form::Prepend);
    let plain = without_template(template.clone());
    let config = |adds: Value| vec![("tokenizer_config.json", json!({ "bos_token": "<s>", "add_bos_token": adds }))];
    let starts =
        |tokenizer: &Value, files: &[(&str, Value)]| marks(tokenizer, files, Choice::default()).unwrap().leading_bos();
    assert_eq!(starts(&template, &[]), Some(1));
    assert_eq!(starts(&plain, &[]), None);
    for (tokenizer, adds, expected) in [
        (&template, Value::Null, Some(1)),
        (&template, json!(false), None),
        (&plain, Value::Null, None),
        (&plain, json!(true), Some(1)),
    ] {
        assert_eq!(starts(tokenizer, &config(adds)), expected);
    }
    let by_id = [
        ("tokenizer_config.json", json!({ "add_bos_token": true })),
        ("generation_config.json", json!({ "bos_token_id": 1 })),
    ];
    assert_eq!(starts(&plain, &by_id), Some(1));
    let map = [("tokenizer_config.json", json!({})), ("special_tokens_map.json", json!({ "bos_token": "<unk>" }))];
    assert_eq!(starts(&template, &map), None, "the template's token is not the BOS");
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false });
    let nested = json!({ "type": "Sequence", "processors": [byte_level, template["post_processor"]] });
    let mut llama_3 = plain;
    llama_3["post_processor"] = nested;
    assert_eq!(starts(&llama_3, &[]), Some(1));
}

#[test]
fn a_config_decides_on_bos_against_the_files() {
    let template = sentencepiece(Form::Metaspace);
    let choice = |bos| Choice { bos, ..Choice::default() };
    let never = marks(&template, &[], choice(Bos::Never)).unwrap();
    assert_eq!((never.leading_bos(), never.files_say_bos), (None, true));
    let files = [("tokenizer_config.json", json!({ "bos_token": { "content": "<s>" } }))];
    let always = marks(&without_template(template), &files, choice(Bos::Always)).unwrap();
    assert_eq!((always.leading_bos(), always.files_say_bos), (Some(1), false));
}

#[test]
fn bos_without_a_token_of_its_own_is_refused() {
    let json: Value = serde_json::from_str(JSON).unwrap();
    let ours = [("tokenizer_config.json", json!({ "bos_token": "<|endoftext|>", "add_bos_token": true }))];
    let auto = marks(&json, &ours, Choice::default()).unwrap();
    assert_eq!((auto.leading_bos(), auto.files_say_bos, auto.bos), (None, false, None));
    let always = Choice { bos: Bos::Always, ..Choice::default() };
    let error = marks(&json, &ours, always).unwrap_err();
    assert!(error.contains("data.bos is true") && error.contains("`<|endoftext|>` also ends documents"), "{error}");
    let error = marks(&json, &[], always).unwrap_err();
    assert!(error.contains("has no BOS token") && error.contains("leave data.bos out"), "{error}");
}

#[test]
fn the_files_of_a_model_name_its_end_of_text() {
    let json = with_tokens(&["<|eom|>", "<|turn|>"]);
    let end = |files: &[(&str, Value)]| marks(&json, files, Choice::default()).map(|marks| marks.end_of_text.name);
    assert!(end(&[]).unwrap_err().contains("eos_token"));
    let files = [
        ("special_tokens_map.json", json!({ "eos_token": { "content": "<|turn|>" } })),
        ("tokenizer_config.json", json!({ "eos_token": "<|eom|>" })),
        ("generation_config.json", json!({ "eos_token_id": [999, 262, 263] })),
        ("config.json", json!({ "eos_token_id": 263 })),
    ];
    let names = ["<|turn|>", "<|eom|>", "<|eom|>", "<|turn|>"];
    for (first, name) in names.iter().enumerate() {
        assert_eq!(end(&files[first..]).unwrap(), *name);
    }
    let absent = [("tokenizer_config.json", json!({ "eos_token": "<|absent|>" }))];
    assert_eq!(end(&absent).unwrap(), "<|absent|>", "a token with a role is added");
}

#[test]
fn the_end_of_a_turn_is_not_the_end_of_a_document() {
    let json = with_tokens(&["<|end_of_text|>", "<|eot_id|>"]);
    let chat = [
        ("tokenizer_config.json", json!({ "eos_token": "<|eot_id|>" })),
        ("generation_config.json", json!({ "eos_token_id": [262, 263] })),
    ];
    let end = |choice| marks(&json, &chat, choice).unwrap().end_of_text.name;
    assert_eq!(end(Choice::default()), "<|end_of_text|>");
    let special_tokens = ["<|eot_id|>".to_owned()];
    assert_eq!(end(Choice { special_tokens: &special_tokens, ..Choice::default() }), "<|end_of_text|>");
    assert_eq!(end(Choice { end_of_text: Some(263), ..Choice::default() }), "<|eot_id|>", "a checkpoint's");
}

#[test]
fn damaged_files_beside_the_tokenizer_are_named() {
    let folder = folder_with(&sentencepiece(Form::Prepend), &[]);
    fs::write(folder.path().join("tokenizer_config.json"), "{").unwrap();
    let error = Tokenizer::of_model(folder.path()).err().unwrap().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
}

#[test]
fn prompts_start_as_documents_do() {
    let template = folder_with(&sentencepiece(Form::Prepend), &[]);
    let tokenizer = Tokenizer::of_model(template.path()).unwrap();
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [1]);
    assert_eq!(tokenizer.encode_prompt("the").unwrap()[0], 1);
    assert_eq!(tokenizer.decode(&tokenizer.encode_prompt("the").unwrap()).unwrap(), "the");
    assert_eq!(byte_tokenizer().encode_prompt("").unwrap(), [261]);
}

fn opened(json: &Value) -> Tokenizer {
    Tokenizer::of_model(folder_with(json, &[]).path()).unwrap()
}

/// Returns the bytes of the tokens of a text, and by how many they exceed the bytes of the text.
fn bytes_of(tokenizer: &Tokenizer, text: &str) -> (i64, i64) {
    let EncodedText { ids, surplus_bytes, .. } = tokenizer.encode_document(text).unwrap();
    let bytes = tokenizer.token_bytes().unwrap();
    (ids.iter().map(|&id| i64::from(bytes[id as usize])).sum(), surplus_bytes)
}

#[test]
fn normalized_text_counts_as_it_was_written() {
    let mut json: Value = serde_json::from_str(JSON).unwrap();
    json["normalizer"] = json!({ "type": "NFC" });
    assert_eq!(bytes_of(&opened(&json), "e\u{301} e"), (4, -1));
    json["normalizer"] = Value::Null;
    json["pre_tokenizer"]["add_prefix_space"] = true.into();
    assert_eq!(bytes_of(&opened(&json), "a b"), (4, 1));
}

#[test]
fn unknown_decoders_have_no_token_bytes() {
    let mut json = sentencepiece(Form::Prepend);
    json["decoder"] = json!({ "type": "WordPiece", "prefix": "##", "cleanup": true });
    assert_eq!(opened(&json).token_bytes(), None);
    json["decoder"] =
        json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true });
    let tokenizer = opened(&json);
    let bytes = tokenizer.token_bytes().unwrap();
    assert_eq!((bytes[1], bytes[3 + 256]), (0, 1), "<s> and the space");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn bytes_of_sentencepiece_are_those_of_the_text(
        text in prop_oneof![".{0,80}", "( |the|do|ing|\u{e9}|\u{4e2d}|\u{1f600}|\n|</s>|<0x41>){0,40}"],
    ) {
        prop_assume!(!text.contains('\u{2581}'));
        for form in [Form::Prepend, Form::Metaspace] {
            let tokenizer = opened(&sentencepiece(form));
            let has_space = matches!(form, Form::Metaspace) && text.starts_with(' ');
            let added = i64::from(!text.is_empty() && !has_space);
            prop_assert_eq!(bytes_of(&tokenizer, &text), (text.len() as i64 + added, added));
            let decoded = tokenizer.decode(&tokenizer.encode(&text).unwrap()).unwrap();
            prop_assert_eq!(decoded, if has_space { &text[1..] } else { text.as_str() });
        }
    }
}

/// Returns what loading, encoding and decoding says of the tests' tokenizer with another value.
fn load_error(pointer: &str, value: &serde_json::Value) -> String {
    let folder = tempfile::tempdir().unwrap();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
    *json.pointer_mut(pointer).unwrap() = value.clone();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, json.to_string()).unwrap();
    let outcome = Tokenizer::load(&path, &[]).and_then(|tokenizer| {
        let ids = tokenizer.encode("the \u{e9}nd a\u{301}")?;
        ids.iter().try_for_each(|&id| tokenizer.decode(&[id]).map(drop))
    });
    match outcome {
        Err(DataError::Tokenizer { message, .. }) => message,
        other => panic!("{pointer} = {value}: {other:?}"),
    }
}

#[test]
fn values_that_the_library_panics_on_are_errors() {
    use serde_json::json;
    let fails = "the tokenizers library fails on a value in it";
    for (pointer, value, expected) in [
        ("/model/continuing_subword_prefix", json!("##"), "its model.continuing_subword_prefix is `##`, and a merge"),
        ("/model/continuing_subword_prefix", json!("\u{e9}\u{20ac}"), "does not start with it"),
        ("/added_tokens/0/id", json!(u32::MAX), "has the id 4294967295, and ids are below"),
        ("/model/vocab/a", json!(4_000_000_000_u32), "its token `a` has the id 4000000000"),
        ("/model/merges/0", json!("nothing a"), "`nothing` out of vocabulary"),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), fails),
        ("/normalizer", json!({"type": "Prepend", "prepend": ""}), ""),
        ("/pre_tokenizer", json!({"type": "FixedLength", "length": 0}), fails),
        ("/decoder", json!({"type": "Strip", "content": "a", "start": 9, "stop": 9}), fails),
    ] {
        let message = load_error(pointer, &value);
        assert!(message.contains(expected), "{pointer} = {value}: {message}");
    }
}
