//! Fast tokenization with the ids of the Hugging Face library.
//!
//! The Hugging Face `tokenizers` library defines the ids. For byte-level BPE with GPT-2's pattern, which is what
//! `orchestrate` trains, crate `fastokens` gives the same ids several times faster: no difference in 1.1 GB of mixed
//! text and 300,000 random strings (`docs/experiments/data.md`). It is used where the tokenizer is exactly of this kind
//! and the two agree on sample texts; everywhere else the library encodes.

use fastokens::AddedTokenPolicy;
use serde_json::Value;
use tokenizers::Tokenizer;

/// The implementation that encodes.
pub(crate) enum Encoder {
    Fast(Box<fastokens::Tokenizer>, AddedTokenPolicy),
    Library,
}

/// Texts on which byte-level tokenizers have been known to disagree: contractions, runs of spaces, digits, joined
/// characters, text that spells a special token.
const AGREEMENT_SAMPLES: [&str; 8] = [
    "It's we'LL they'Re don't 'tis ''s",
    "  leading,  inner   and trailing spaces   \t\t\n\n \r\n x\u{a0}\u{2003}y",
    "1 22 333 4444 55555 3.14159 0x1F \u{bd} \u{2167} \u{661}\u{662}",
    "e\u{301} \u{e9} \u{df} \u{130}\u{131} \u{4e2d}\u{6587}\u{65e5}\u{672c} \u{d55c}\u{ad6d} \u{ba4}\u{bae}\u{bbf}",
    "\u{1f642}\u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{feff}\u{200b}\u{0}\u{7f}\u{ad}",
    "<|endoftext|> <|end <|pad|>x<|endoftext|>",
    "fn main() { let x_1 = \"\\n\"; } // ====== ------ __init__ #!$%&",
    "https://example.org/?a=b&c=%20d aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

impl Encoder {
    /// Chooses the encoder of a tokenizer, given the `tokenizer.json` that it was read from, and whether special tokens
    /// that text spells are taken as tokens, as `reference` has it.
    pub(crate) fn choose(reference: &Tokenizer, json: Value, parses_special_tokens: bool) -> Self {
        let policy = if parses_special_tokens { AddedTokenPolicy::All } else { AddedTokenPolicy::SkipSpecial };
        let fast = Some(json).filter(is_supported).and_then(|json| {
            let fast = fastokens::Tokenizer::from_json(json).ok()?;
            let agree = |text: &&str| {
                reference
                    .encode_fast(*text, false)
                    .is_ok_and(|encoding| encode(&fast, text, policy).is_ok_and(|ids| ids == encoding.get_ids()))
            };
            AGREEMENT_SAMPLES.iter().all(agree).then_some(fast)
        });
        fast.map_or(Self::Library, |fast| Self::Fast(Box::new(fast), policy))
    }

    /// Whether the tokens of a text without special tokens are known to have exactly its bytes: the fast encoder
    /// supports no tokenizer that changes text.
    pub(crate) fn keeps_bytes(&self) -> bool {
        matches!(self, Self::Fast(..))
    }

    /// Encodes a text as token ids.
    pub(crate) fn encode(&self, reference: &Tokenizer, text: &str) -> Result<Vec<u32>, tokenizers::Error> {
        match self {
            Self::Fast(fast, policy) => {
                let mut ids = encode(fast, text, *policy)?;
                // It reserves for the worst case; a window of documents would hold twice the memory.
                ids.shrink_to_fit();
                Ok(ids)
            }
            Self::Library => Ok(reference.encode_fast(text, false)?.get_ids().to_vec()),
        }
    }
}

fn encode(fast: &fastokens::Tokenizer, text: &str, policy: AddedTokenPolicy) -> Result<Vec<u32>, fastokens::Error> {
    fast.encode_with_policy(text, false, policy)
}

/// Whether a `tokenizer.json` is byte-level BPE with GPT-2's pattern that changes text in no other way.
fn is_supported(json: &Value) -> bool {
    let (model, split) = (&json["model"], &json["pre_tokenizer"]);
    let absent = |value: &Value| value.is_null() || value == false || value == "";
    json["normalizer"].is_null()
        && split["type"] == "ByteLevel"
        && split["add_prefix_space"] == false
        && split["use_regex"] != false
        && (model["type"] == "BPE" || model["type"].is_null())
        && ["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"]
            .iter()
            .all(|key| absent(&model[key]))
        && absent(&model["ignore_merges"])
        && json["added_tokens"].as_array().is_none_or(|tokens| tokens.iter().all(|token| token["special"] == true))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;
    use tokenizers::models::TrainerWrapper;
    use tokenizers::models::bpe::{BPE, BpeTrainer};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    fn fixture_tokenizer() -> (Tokenizer, Value) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        // As [`crate::Tokenizer`] does: a file's truncation is not of its ids.
        json["truncation"] = Value::Null;
        let mut tokenizer = Tokenizer::from_bytes(json.to_string()).unwrap();
        tokenizer.set_encode_special_tokens(true);
        (tokenizer, json)
    }

    fn choose(change: impl Fn(&mut Value)) -> Encoder {
        let (reference, mut json) = fixture_tokenizer();
        change(&mut json);
        Encoder::choose(&reference, json, false)
    }

    #[test]
    fn only_plain_byte_level_bpe_uses_the_fast_encoder() {
        assert!(matches!(choose(|_| ()), Encoder::Fast(..)));
        let others: [fn(&mut Value); 5] = [
            |json| json["normalizer"] = serde_json::json!({"type": "NFC"}),
            |json| json["pre_tokenizer"]["add_prefix_space"] = true.into(),
            |json| json["pre_tokenizer"]["use_regex"] = false.into(),
            |json| json["model"]["dropout"] = 0.1.into(),
            |json| json["added_tokens"][0]["special"] = false.into(),
        ];
        for other in others {
            assert!(matches!(choose(other), Encoder::Library));
        }
    }

    #[test]
    fn disagreement_falls_back_to_the_library() {
        let swapped = choose(|json| {
            let (a, b) = (json["model"]["vocab"]["a"].take(), json["model"]["vocab"]["e"].take());
            (json["model"]["vocab"]["a"], json["model"]["vocab"]["e"]) = (b, a);
        });
        assert!(matches!(swapped, Encoder::Library));
    }

    /// Words of the kinds that make a tokenizer slow, each of `length` bytes or a little more.
    fn long_words(length: usize) -> [String; 6] {
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut random_word = |letters: &[char], size: usize| -> String {
            (0..length / size).map(|_| letters[random(letters.len())]).collect()
        };
        let cjk: Vec<char> = ('\u{4e00}'..'\u{5200}').collect();
        [
            format!("name{}value", " ".repeat(length)),
            "=".repeat(length),
            random_word(&['A', 'C', 'G', 'T'], 1),
            random_word(&('a'..='z').collect::<Vec<_>>(), 1),
            random_word(&('+'..='z').collect::<Vec<_>>(), 1),
            random_word(&cjk, 3),
        ]
    }

    /// A tokenizer with merges, trained on the beginnings of such words and on text.
    fn trained_tokenizer() -> (Tokenizer, Value) {
        let mut tokenizer = Tokenizer::new(BPE::default());
        tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        let alphabet = ByteLevel::alphabet().into_iter().collect();
        let trainer = BpeTrainer::builder().show_progress(false).vocab_size(900).initial_alphabet(alphabet).build();
        let texts = long_words(3000).into_iter().chain(AGREEMENT_SAMPLES.map(str::to_owned));
        tokenizer.train(&mut TrainerWrapper::from(trainer), texts).unwrap();
        let json = serde_json::from_str(&tokenizer.to_string(false).unwrap()).unwrap();
        (tokenizer, json)
    }

    #[test]
    fn ids_of_long_words_equal_the_library_s() {
        let (reference, json) = trained_tokenizer();
        let encoder = Encoder::choose(&reference, json, false);
        assert!(matches!(encoder, Encoder::Fast(..)));
        for text in long_words(30_000) {
            let expected = reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            assert!(expected.len() > 20, "{}", expected.len());
            assert_eq!(encoder.encode(&reference, &text).unwrap(), expected, "{:?}", text.chars().nth(5));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn ids_equal_the_library_s(text in prop_oneof![".{0,200}", "[ -~\\s]{0,300}", "(\\s|'s|<\\|endoftext\\|>|[0-9]|\\PC){0,60}"]) {
            let (mut reference, json) = fixture_tokenizer();
            for parses_special_tokens in [false, true] {
                reference.set_encode_special_tokens(!parses_special_tokens);
                let encoder = Encoder::choose(&reference, json.clone(), parses_special_tokens);
                prop_assert!(matches!(encoder, Encoder::Fast(..)));
                let expected = reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
                prop_assert_eq!(encoder.encode(&reference, &text).unwrap(), expected);
            }
        }
    }
}
