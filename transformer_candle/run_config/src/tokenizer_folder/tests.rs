#![allow(clippy::unwrap_used)]

use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::templates::ADDITIONAL_TEMPLATES;
use super::*;

/// A tokenizer of three words and one special token, with files beside it.
fn folder(files: &[(&str, Value)]) -> (TempDir, Value) {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content.to_string()).unwrap();
    }
    let end = AddedTokens::from_json(&json!([{ "id": 3, "content": "<end>", "special": true }]));
    let vocab = json!({ "a": 0, "b": 1, "<s>": 2 });
    (folder, json!({ "model": { "vocab": vocab }, "added_tokens": end.to_json() }))
}

fn read(folder: &TempDir, reading: TokenizerReading) -> TokenizerFolder {
    TokenizerFolder::read(&folder.path().join("tokenizer.json"), reading).unwrap()
}

fn names(tokenizer_json: &Value) -> Vec<(u64, &str)> {
    let added = tokenizer_json["added_tokens"].as_array().unwrap().iter();
    added.map(|token| (token["id"].as_u64().unwrap(), token["content"].as_str().unwrap())).collect()
}

#[test]
fn tokens_get_the_next_free_ids() {
    let decoder = json!({ "9": { "content": "<turn>", "special": true }, "3": { "content": "<end>", "lstrip": true } });
    let config = json!({ "added_tokens_decoder": decoder, "bos_token": "<s>", "pad_token": { "content": "<pad>" } });
    let (folder, mut json) = folder(&[("tokenizer_config.json", config)]);
    let additions = read(&folder, TokenizerReading::Folder).complete(&mut json);
    assert_eq!(additions, Additions { any: true, left_out: Vec::new() });
    assert_eq!(names(&json), [(2, "<s>"), (3, "<end>"), (4, "<turn>"), (5, "<pad>")]);
    assert_eq!(json["added_tokens"][1]["lstrip"], true, "the config's properties override the tokenizer's");
    let second_completion = read(&folder, TokenizerReading::Folder).complete(&mut json);
    assert!(!second_completion.any, "what is complete stays as it is");
}

#[test]
fn tokens_without_an_embedding_are_left_out() {
    let added = json!({ "<turn>": 4, "<pad>": 5 });
    let (folder, mut json) = folder(&[("added_tokens.json", added), ("config.json", json!({ "vocab_size": 5 }))]);
    let additions = read(&folder, TokenizerReading::Folder).complete(&mut json);
    assert_eq!(additions.left_out, ["<pad>"]);
    assert_eq!(names(&json), [(3, "<end>"), (4, "<turn>")]);
}

#[test]
fn a_recorded_tokenizer_is_its_own_file() {
    let files = [
        ("added_tokens.json", json!({ "<turn>": 4 })),
        ("tokenizer_config.json", json!({ "eos_token": "<end>" })),
        ("special_tokens_map.json", json!({ "eos_token": "<s>", "bos_token": "<s>" })),
    ];
    let (folder, mut json) = folder(&files);
    let tokenizer_folder = read(&folder, TokenizerReading::Recorded);
    assert!(!tokenizer_folder.complete(&mut json).any);
    let role = |name: &str, token: &str| (name.to_owned(), token.to_owned());
    assert_eq!(tokenizer_folder.roles(), [role("eos_token", "<end>"), role("bos_token", "<s>")]);
    assert_eq!(read(&folder, TokenizerReading::Folder).with_role("eos_token").next(), Some("<s>"));
}

#[test]
fn files_of_templates_hide_those_of_the_config() {
    let list = json!([{ "name": "tool_use", "template": "T" }, { "name": "default", "template": "D" }]);
    let (folder, _) = folder(&[("tokenizer_config.json", json!({ "chat_template": list }))]);
    let templates_of = |reading| {
        let templates = read(&folder, reading).templates.into_iter();
        templates.map(|template| (template.name, template.source)).collect::<Vec<_>>()
    };
    let template = |name: &str, source: &str| (name.to_owned(), source.to_owned());
    assert_eq!(templates_of(TokenizerReading::Folder), [template("default", "D"), template("tool_use", "T")]);
    assert_eq!(templates_of(TokenizerReading::Recorded), [template("default", "D")]);
    fs::write(folder.path().join(CHAT_TEMPLATE), "F").unwrap();
    assert_eq!(templates_of(TokenizerReading::Folder), [template("default", "F")]);
    fs::create_dir(folder.path().join(ADDITIONAL_TEMPLATES)).unwrap();
    fs::write(folder.path().join(ADDITIONAL_TEMPLATES).join("tool_use.jinja"), "A").unwrap();
    assert_eq!(templates_of(TokenizerReading::Folder), [template("default", "F"), template("tool_use", "A")]);
}

#[test]
fn values_of_the_wrong_type_are_named() {
    let template = json!([{ "name": "default", "template": 1 }]);
    for (file, content, expected) in [
        (TOKENIZER_CONFIG, json!({ "eos_token": { "content": [] } }), "`eos_token.content` must be a string"),
        (TOKENIZER_CONFIG, json!({ "eos_token": 2 }), "`eos_token` must be a string, or an object"),
        (TOKENIZER_CONFIG, json!({ "eos_token": ["<end>"] }), "`eos_token` must be"),
        (TOKENIZER_CONFIG, json!({ "image_token": {} }), "`image_token.content` must be"),
        (
            TOKENIZER_CONFIG,
            json!({ "pad_token": { "content": "a", "lstrip": 1 } }),
            "`pad_token.lstrip` must be true or",
        ),
        (TOKENIZER_CONFIG, json!({ "add_bos_token": "yes" }), "`add_bos_token` must be true or false"),
        (TOKENIZER_CONFIG, json!({ "additional_special_tokens": "<a>" }), "`additional_special_tokens` must be a list"),
        (TOKENIZER_CONFIG, json!({ "extra_special_tokens": ["<a>", 3] }), "`extra_special_tokens[1]` must be"),
        (TOKENIZER_CONFIG, json!({ "extra_special_tokens": { "a_token": [] } }), "`extra_special_tokens.a_token` must"),
        (TOKENIZER_CONFIG, json!({ "added_tokens_decoder": [] }), "`added_tokens_decoder` must be an object"),
        (TOKENIZER_CONFIG, json!({ "added_tokens_decoder": { "x": "<a>" } }), "`added_tokens_decoder.x` must be named"),
        (TOKENIZER_CONFIG, json!({ "added_tokens_decoder": { "4": null } }), "`added_tokens_decoder.4` must be"),
        (TOKENIZER_CONFIG, json!({ "chat_template": template }), "`chat_template` must be a string, or a list"),
        (TOKENIZER_CONFIG, json!({ "chat_template": 3 }), "`chat_template` must be"),
        (TOKENIZER_CONFIG, json!([]), "it must hold a JSON object"),
        (SPECIAL_TOKENS_MAP, json!({ "bos_token": true }), "`bos_token` must be"),
        (ADDED_TOKENS, json!({ "<turn>": "4" }), "`<turn>` must be the id of the token"),
    ] {
        let (folder, _) = folder(&[(file, content.clone())]);
        let refused = TokenizerFolder::read(&folder.path().join("tokenizer.json"), TokenizerReading::Folder);
        let TokenizerFileError { path, message } = refused.unwrap_err();
        assert!(path.ends_with(file) && message.contains(expected), "{content}: {}: {message}", path.display());
    }
    for config in [json!({ "eos_token": null }), json!({ "add_eos_token": false, "model_max_length": 1e30 })] {
        read(&folder(&[(TOKENIZER_CONFIG, config)]).0, TokenizerReading::Folder);
    }
}

#[test]
fn token_ids_of_the_wrong_type_are_named() {
    for config in [json!({}), json!({ "eos_token_id": [1, 2], "bos_token_id": null }), json!({ "bos_token_id": -1 })] {
        assert_eq!(wrong_token_ids(&config), None);
    }
    for id in [json!("2"), json!([[2]]), json!(2.5), json!({}), json!([null]), json!(true)] {
        let problem = wrong_token_ids(&json!({ "eos_token_id": id })).unwrap();
        assert!(problem.contains("`eos_token_id` must be an integer or a list"), "{problem}");
    }
}
