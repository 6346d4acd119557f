//! The state to resume from: a few numbers for each lane of each component, whatever the size of the data, and what
//! they belong to.

use bytes::Bytes;
use run_config::Packing;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{DataError, Mixture, StreamSettings, Tokenizer};

/// Where a lane stands: after `row` rows of a group. Files and groups are counted in their permuted order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LanePosition {
    /// Place of the file in the epoch's permutation of files.
    pub file: u64,
    /// Place of the group in the file's permutation of groups.
    pub group: u64,
    /// Rows of the group already taken, skipped ones included.
    pub row: u64,
}

/// Where a window starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowStart {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Window of the epoch, from 0.
    pub window: u64,
    /// Place in the files' permutation of the first file that no lane has taken.
    pub next_file: u64,
    /// Where the lanes stand; none for a lane without a file.
    pub lanes: Vec<Option<LanePosition>>,
}

/// Where a component of the stream stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentPosition {
    /// The window that its next sequence is in.
    #[serde(flatten)]
    pub start: WindowStart,
    /// Sequences of the window already delivered.
    pub sequence: u64,
    /// Sequences of the component delivered in all. Together with the other components' it says whose turn is next.
    pub given: u64,
}

/// A position between two sequences of the stream. As JSON it has under 2 KiB for a component with 16 lanes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The stream that the position belongs to.
    pub identity: StreamIdentity,
    /// Where each component stands, in their order.
    pub components: Vec<ComponentPosition>,
}

impl WindowStart {
    /// The first window of an epoch, before any lane has a file.
    pub(crate) fn of_epoch(epoch: u64, lanes: usize) -> Self {
        Self { epoch, window: 0, next_file: 0, lanes: vec![None; lanes] }
    }
}

impl ComponentPosition {
    /// Refuses numbers that no stream of `lanes` lanes over `files` files comes to.
    fn is_possible(&self, lanes: usize, files: usize) -> bool {
        let WindowStart { epoch, window, next_file, lanes: positions } = &self.start;
        let small = [*epoch, *window, self.sequence].iter().all(|&number| u32::try_from(number).is_ok());
        let counted = i64::try_from(self.given).is_ok();
        let places = positions.iter().flatten().all(|position| position.file < *next_file);
        small && counted && places && positions.len() == lanes && *next_file <= files as u64
    }
}

impl Cursor {
    /// Before the first sequence.
    pub(crate) fn at_start(identity: StreamIdentity, components: usize, lanes: usize) -> Self {
        let start = ComponentPosition { start: WindowStart::of_epoch(0, lanes), sequence: 0, given: 0 };
        Self { identity, components: vec![start; components] }
    }

    /// Refuses a position of another stream, and numbers that this stream does not come to.
    pub(crate) fn checked(self, identity: &StreamIdentity, mixture: &Mixture, lanes: usize) -> Result<Self, DataError> {
        if let Some(difference) = self.identity.difference(identity) {
            return Err(DataError::Cursor { difference });
        }
        let parts = self.components.iter().zip(mixture.sources());
        if mixture.shares().lead_to(&self.given())
            && parts.into_iter().all(|(position, source)| position.is_possible(lanes, source.files().len()))
        {
            Ok(self)
        } else {
            Err(DataError::Cursor { difference: "the position itself" })
        }
    }

    /// How many sequences each component has given.
    pub(crate) fn given(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.given).collect()
    }
}

/// Everything that the order of the stream depends on, as three hashes. A run may be resumed only where they are equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamIdentity {
    /// Of each component the files' names and sizes in listing order, the revision, the text column.
    pub data: String,
    /// The tokenizer's file and the token that ends a document.
    pub tokenizer: String,
    /// Seed, sequence length, packing, window, lanes, `max_samples`, held-out fraction, the components' shares, and the
    /// version of the order itself.
    pub order: String,
}

/// Changes whenever the same settings would give another order.
const ORDER_VERSION: u64 = 1;

impl StreamIdentity {
    pub(crate) fn of(mixture: &Mixture, settings: &StreamSettings, tokenizer: &Tokenizer) -> Self {
        let mut data = Parts::default();
        for source in mixture.sources() {
            data.text(source.describe().revision.as_deref().unwrap_or(""));
            data.text(source.text_column());
            data.number(source.files().len() as u64);
            for file in source.files() {
                data.text(&file.name);
                data.number(file.bytes);
            }
        }
        let mut tokens = Parts::default();
        tokens.text(tokenizer.content_hash());
        tokens.number(u64::from(tokenizer.end_of_text()));
        let mut order = Parts::default();
        for number in [
            ORDER_VERSION,
            settings.seed,
            settings.sequence_length as u64,
            settings.shuffle_buffer_size as u64,
            settings.lanes as u64,
            settings.max_samples.map_or(0, |samples| samples.saturating_add(1)),
            settings.held_out_fraction.to_bits(),
        ] {
            order.number(number);
        }
        for &share in mixture.shares().numbers() {
            order.number(share);
        }
        // Without it the identity is that of streams from before there was a choice.
        if settings.packing == Packing::Documents {
            order.text("documents");
        }
        Self { data: data.hash(), tokenizer: tokens.hash(), order: order.hash() }
    }

    /// What differs, in words for a message; none if nothing does.
    pub fn difference(&self, other: &Self) -> Option<&'static str> {
        if self.data != other.data {
            Some("the data set (its revision, files or text column)")
        } else if self.tokenizer != other.tokenizer {
            Some("the tokenizer")
        } else if self.order != other.order {
            Some(
                "a setting of the data order (seed, sequence_length, packing, shuffle_buffer_size, max_samples, held_out_fraction \
                 or the weights of a mixture)",
            )
        } else {
            None
        }
    }
}

/// Hashes values so that no two lists of values look the same.
#[derive(Default)]
struct Parts(Sha256);

impl Parts {
    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.number(text.len() as u64);
        self.0.update(text.as_bytes());
    }

    /// The first 128 bits, in hexadecimal.
    fn hash(self) -> String {
        format!("{:x}", Bytes::copy_from_slice(&self.0.finalize()[..16]))
    }
}
