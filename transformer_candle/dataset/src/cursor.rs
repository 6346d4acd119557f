//! The cursor: the position of a stream, to resume from. Its size does not depend on the size of the data.

use serde::{Deserialize, Serialize};

use crate::held_out_split::HeldOutSplit;
use crate::{CorruptedRows, DataError, FilePart, Mixture, StreamFingerprint};

/// The position of an open shard: after `row` rows of a row group. Shards and row groups are counted in their permuted
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardPosition {
    /// Position of the shard in the epoch's permutation of shards.
    #[serde(rename = "file")]
    pub shard: u64,
    /// Position of the row group in the shard's permutation of row groups.
    #[serde(rename = "group")]
    pub row_group: u64,
    /// Rows of the row group already read, skipped ones included.
    pub row: u64,
}

/// The position at which a shuffle window starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowStart {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Window of the epoch, from 0.
    pub window: u64,
    /// Position in the epoch's permutation of the first shard that has not been opened.
    #[serde(rename = "next_file")]
    pub next_shard: u64,
    /// The position of each open shard; none for a slot without a shard.
    #[serde(rename = "lanes")]
    pub open_shards: Vec<Option<ShardPosition>>,
}

/// The position of one component of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentPosition {
    /// The window that its next sequence is in.
    #[serde(flatten)]
    pub start: WindowStart,
    /// Sequences of the window already delivered.
    pub sequence: u64,
    /// Sequences of the component delivered in all epochs of the stage. The counts of all components determine which is
    /// next.
    #[serde(rename = "given")]
    pub delivered: u64,
    /// Corrupted rows that the windows so far have skipped, the one in use included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corrupted: Vec<CorruptedRows>,
    /// Which rows are held out; `None` before the first window, and in runs of reading version 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) split: Option<HeldOutSplit>,
    /// The local files as the run reads them, once it has accepted that some were added, appended to or removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) files: Vec<FilePart>,
}

/// A position between two sequences of the stream. As JSON it is under 2 KiB for a component with 16 open shards that
/// reads its files as listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// The stream that the position belongs to.
    #[serde(rename = "identity")]
    pub fingerprint: StreamFingerprint,
    /// The position of each component, in the order of the mixture.
    pub components: Vec<ComponentPosition>,
}

impl WindowStart {
    /// The first window of an epoch, before any shard is open.
    pub(crate) fn epoch_start(epoch: u64, open_shards: usize) -> Self {
        Self { epoch, window: 0, next_shard: 0, open_shards: vec![None; open_shards] }
    }
}

impl ComponentPosition {
    /// The position before the first sequence of a window, with none delivered before.
    pub(crate) fn at(start: WindowStart) -> Self {
        Self { start, sequence: 0, delivered: 0, corrupted: Vec::new(), split: None, files: Vec::new() }
    }

    /// Whether a stream with `slots` open shards over `shards` shards can reach this position.
    fn is_valid(&self, slots: usize, shards: usize) -> bool {
        let WindowStart { epoch, window, next_shard, open_shards } = &self.start;
        let shards_exist = self.corrupted.iter().all(|rows| rows.shard < shards as u64);
        let fits_u32 = [*epoch, *window, self.sequence].iter().all(|&number| u32::try_from(number).is_ok());
        let fits_i64 = i64::try_from(self.delivered).is_ok();
        let opened = open_shards.iter().flatten().all(|position| position.shard < *next_shard);
        let split_exists = self.split.as_ref().is_none_or(|split| split.is_of(shards));
        fits_u32
            && fits_i64
            && opened
            && shards_exist
            && split_exists
            && open_shards.len() == slots
            && *next_shard <= shards as u64
    }
}

impl Cursor {
    /// The position before the first sequence.
    pub(crate) fn at_start(fingerprint: StreamFingerprint, components: usize, open_shards: usize) -> Self {
        let start = ComponentPosition::at(WindowStart::epoch_start(0, open_shards));
        Self { fingerprint, components: vec![start; components] }
    }

    /// Rejects a cursor of another stream, and positions that this stream cannot reach.
    pub(crate) fn validated(
        self,
        fingerprint: &StreamFingerprint,
        mixture: &Mixture,
        open_shards: usize,
    ) -> Result<Self, DataError> {
        if let Some(difference) = self.fingerprint.difference(fingerprint) {
            return Err(DataError::Cursor { difference });
        }
        let mut positions = self.components.iter().zip(mixture.sources());
        if mixture.schedule().is_reachable(&self.delivered())
            && positions.all(|(position, source)| position.is_valid(open_shards, source.shards().len()))
        {
            Ok(self)
        } else {
            Err(DataError::Cursor { difference: "the position itself" })
        }
    }

    /// Number of sequences that each component has delivered.
    pub(crate) fn delivered(&self) -> Vec<u64> {
        self.components.iter().map(|component| component.delivered).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_cursors_keep_their_keys() {
        let [data, tokenizer, order] = ["dd", "tt", "oo"].map(str::to_owned);
        let fingerprint = StreamFingerprint { data, tokenizer, order };
        let position = ShardPosition { shard: 4, row_group: 5, row: 6 };
        let start = WindowStart { epoch: 1, window: 2, next_shard: 3, open_shards: vec![Some(position), None] };
        let components = vec![ComponentPosition { sequence: 7, delivered: 8, ..ComponentPosition::at(start) }];
        let json = concat!(
            r#"{"identity":{"data":"dd","tokenizer":"tt","order":"oo"},"components":[{"epoch":1,"window":2,"#,
            r#""next_file":3,"lanes":[{"file":4,"group":5,"row":6},null],"sequence":7,"given":8}]}"#
        );
        let cursor = Cursor { fingerprint, components };
        assert_eq!(serde_json::to_string(&cursor).unwrap(), json);
        assert_eq!(serde_json::from_str::<Cursor>(json).unwrap(), cursor);
    }
}
