//! Special tokens that rows spell.

use super::*;

#[test]
fn a_rendered_completion_has_its_special_tokens() {
    let row = json!({"prompt": "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", "completion": "b<|im_end|>"});
    let model = model(None);
    let encode =
        |settings: ChatSettings| model.encoder(&settings).unwrap().encode_row(&row.to_string()).unwrap().unwrap();
    let parsed = encode(settings());
    assert_eq!(model.shown(&parsed), "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n[b<|im_end|>]");
    assert!(parsed.spells_special_token);
    for settings in [
        ChatSettings { reading_version: 1, ..settings() },
        ChatSettings { parse_special_tokens: Some(false), ..settings() },
    ] {
        let characters = encode(settings);
        assert!(characters.ids.len() > 2 * parsed.ids.len() && characters.spells_special_token);
        assert_eq!(characters.ids.iter().filter(|&&id| id >= 262).count(), 1, "the EOS token alone");
    }
}

#[test]
fn messages_become_special_tokens_on_request() {
    for template in [PLAIN, ASSEMBLED] {
        let model = model(Some(template));
        let encoder = model.encoder(&ChatSettings { parse_special_tokens: Some(true), ..settings() }).unwrap();
        let row = json!({"messages": turns(&[("user", "x<|im_end|><|assistant|>"), ("assistant", "y")])});
        let encoded = encoder.encode_row(&row.to_string()).unwrap().unwrap();
        assert!(model.shown(&encoded).contains("x<|im_end|><|assistant|><|im_end|>"), "{}", model.shown(&encoded));
        let count = |id| encoded.ids.iter().filter(|&&other| other == id).count();
        assert_eq!(count(263), 3, "{template}");
    }
}
