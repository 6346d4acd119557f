//! The fingerprint of a stream: hashes of everything that its order depends on.

use run_config::{FIRST_READING_VERSION, Packing};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::ledger::hex;
use crate::sequence_packer::SequencePacker;
use crate::{Mixture, StreamSettings};

/// Everything that the order of the stream depends on, as three hashes. A run may be resumed only where they are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamFingerprint {
    /// Hash of each component's shards (names and sizes in listing order), revision and text column.
    pub data: String,
    /// Hash of the tokenizer's file and of the token that ends a document.
    pub tokenizer: String,
    /// Hash of seed, sequence length, packing, BOS, chat template and how it is used, shuffle window, open shards,
    /// `max_samples`, held-out fraction, reading version, mixture weights, and the version of the order itself.
    pub order: String,
}

/// Version of the data order, which must change whenever the same settings would give another order.
const ORDER_VERSION: u64 = 1;

impl StreamFingerprint {
    /// The hash of the data of a stream: [`Self::data`].
    pub fn data_hash(mixture: &Mixture) -> String {
        let mut data = FieldHasher::default();
        for source in mixture.sources() {
            data.string(source.revision().unwrap_or(""));
            data.string(source.text_column());
            data.number(source.shards().len() as u64);
            for shard in source.shards() {
                data.string(&shard.name);
                data.number(shard.bytes);
                if shard.epoch > 0 {
                    data.number(shard.epoch);
                }
            }
        }
        data.finish()
    }

    pub(crate) fn new(mixture: &Mixture, settings: &StreamSettings, packer: &SequencePacker) -> Self {
        let tokenizer = packer.tokenizer();
        let mut tokens = FieldHasher::default();
        tokens.string(tokenizer.content_hash());
        tokens.number(u64::from(tokenizer.end_of_text()));
        let mut order = FieldHasher::default();
        for number in [
            ORDER_VERSION,
            settings.seed,
            settings.sequence_length as u64,
            settings.shuffle_buffer_size as u64,
            settings.open_shards as u64,
            settings.max_samples.map_or(0, |samples| samples.saturating_add(1)),
            settings.held_out_fraction.to_bits(),
        ] {
            order.number(number);
        }
        for &weight in mixture.schedule().weights() {
            order.number(weight);
        }
        // Hashed only where they are not the default: fingerprints of runs older than these settings stay valid.
        match settings.packing {
            Packing::Concat => {}
            Packing::Documents => order.string("documents"),
            Packing::Padded => order.string("padded"),
        }
        if let Some(chat) = packer.chat() {
            order.string("chat");
            chat.identity().iter().for_each(|setting| order.string(setting));
        }
        if tokenizer.parses_special_tokens() && packer.chat().is_none() {
            order.string("parse_special_tokens");
        }
        if let Some(bos) = tokenizer.document_tokens().leading_bos() {
            order.string("bos");
            order.number(u64::from(bos));
        }
        if let Some(source) =
            mixture.sources().first().filter(|source| source.reading_version() > FIRST_READING_VERSION)
        {
            order.string("reading version");
            order.number(u64::from(source.reading_version()));
        }
        Self { data: Self::data_hash(mixture), tokenizer: tokens.finish(), order: order.finish() }
    }

    /// Returns what differs, in words for a message; `None` if nothing does.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.data != other.data {
            Some("the data set (its revision, files or text column)")
        } else if self.tokenizer != other.tokenizer {
            Some("the tokenizer")
        } else if self.order != other.order {
            Some(
                "a setting of the data order (seed, sequence_length, packing, bos, shuffle_buffer_size, max_samples, \
                 held_out_fraction, reading_version, parse_special_tokens, the weights of a mixture, or the format, the \
                 chat template and its keys)",
            )
        } else {
            None
        }
    }
}

/// Hashes fields without ambiguity: strings are preceded by their length.
#[derive(Default)]
struct FieldHasher(Sha256);

impl FieldHasher {
    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn string(&mut self, string: &str) {
        self.number(string.len() as u64);
        self.0.update(string.as_bytes());
    }

    /// The first 128 bits of the hash, in hexadecimal.
    fn finish(self) -> String {
        hex(&self.0.finalize()[..16])
    }
}
