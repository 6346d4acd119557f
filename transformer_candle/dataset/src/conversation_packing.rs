//! Packs conversations into sequences, each as a whole.
//!
//! A conversation of `n + 1` tokens takes `n` positions: the last token is a target only. With [`Packing::Documents`]
//! conversations share sequences: from the longest to the shortest, each goes where it leaves the least space, or opens
//! a sequence (best-fit decreasing, Ding et al., 2024, <https://arxiv.org/abs/2404.10830>). With [`Packing::Padded`]
//! each has a sequence of its own. The rest of a sequence is padding, which the loss ignores.

use std::collections::BTreeSet;
use std::ops::Range;

use run_config::Packing;

use crate::batch::{Batch, IGNORED_TARGET};
use crate::chat::EncodedConversation;
use crate::sequence_packer::Sequences;

/// Conversations packed into sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackedConversations {
    /// The tokens of all conversations.
    ids: Vec<u32>,
    /// Whether the loss counts each token as a target.
    counted: Vec<bool>,
    /// For each conversation, the index of its first token in `ids` and that of its document among those appended.
    documents: Vec<(usize, usize)>,
    /// Number of documents that were appended, of which some are no conversations.
    appended: usize,
    /// For each sequence, the ranges of its conversations in `ids` and `counted`, in the order of their positions.
    sequences: Vec<Vec<Range<usize>>>,
    sequence_length: usize,
    packing: Packing,
    /// Token id of padding inputs.
    padding: u32,
    targets: usize,
}

impl PackedConversations {
    pub(crate) fn new(sequence_length: usize, packing: Packing, padding: u32) -> Self {
        Self {
            ids: Vec::new(),
            counted: Vec::new(),
            documents: Vec::new(),
            appended: 0,
            sequences: Vec::new(),
            sequence_length,
            packing,
            padding,
            targets: 0,
        }
    }

    /// Puts these documents into new sequences, but for those that are no conversations.
    pub(crate) fn append(&mut self, documents: &[Option<EncodedConversation>]) {
        let mut ranges = Vec::with_capacity(documents.len());
        for (index, document) in documents.iter().enumerate() {
            let Some(conversation) = document else { continue };
            let start = self.ids.len();
            self.documents.push((start, self.appended + index));
            self.ids.extend_from_slice(&conversation.ids);
            self.counted.extend_from_slice(&conversation.counted);
            self.targets += conversation.counted.iter().skip(1).filter(|&&counted| counted).count();
            ranges.push(start..self.ids.len());
        }
        self.appended += documents.len();
        if self.packing == Packing::Documents {
            self.fill(ranges);
        } else {
            self.sequences.extend(ranges.into_iter().map(|range| vec![range]));
        }
    }

    /// Assigns conversations to new sequences by best-fit decreasing.
    fn fill(&mut self, mut ranges: Vec<Range<usize>>) {
        ranges.sort_by_key(|range| std::cmp::Reverse(range.len()));
        // (positions left, index) of the new sequences.
        let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
        for range in ranges {
            let positions = range.len() - 1;
            let best = open.range((positions, 0)..).next().copied();
            let (room, index) = best.unwrap_or_else(|| {
                self.sequences.push(Vec::new());
                (self.sequence_length, self.sequences.len() - 1)
            });
            open.remove(&(room, index));
            open.insert((room - positions, index));
            self.sequences[index].push(range);
        }
    }
}

impl Sequences for PackedConversations {
    fn sequences(&self) -> usize {
        self.sequences.len()
    }

    fn targets(&self) -> usize {
        self.targets
    }

    fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn is_complete(&self, k: usize) -> bool {
        self.sequences.len() > k
    }

    fn documents(&self, k: usize) -> Vec<usize> {
        let document_of = |range: &Range<usize>| {
            let conversation = self.documents.partition_point(|&(start, _)| start < range.start);
            self.documents[conversation].1
        };
        self.sequences[k].iter().map(document_of).collect()
    }

    fn write(&self, k: usize, token_bytes: Option<&[u32]>, batch: &mut Batch) {
        let first = batch.inputs.len();
        let mut document_starts = Vec::new();
        for range in &self.sequences[k] {
            let start = batch.inputs.len() - first;
            document_starts.extend(std::iter::repeat_n(start as i32, range.len() - 1));
            batch.inputs.extend_from_slice(&self.ids[range.start..range.end - 1]);
            for (&id, &counted) in self.ids[range.clone()].iter().zip(&self.counted[range.clone()]).skip(1) {
                batch.targets.push(if counted { id as i32 } else { IGNORED_TARGET });
                batch.target_count += usize::from(counted);
                if let (Some(total), Some(bytes), true) = (&mut batch.target_bytes, token_bytes, counted) {
                    *total += u64::from(bytes[id as usize]);
                }
            }
        }
        let length = batch.inputs.len() - first;
        batch.inputs.resize(first + self.sequence_length, self.padding);
        batch.targets.resize(first + self.sequence_length, IGNORED_TARGET);
        if self.packing == Packing::Documents {
            // Each position of the padding is a document of its own, which costs attention nothing.
            document_starts.extend(length as i32..self.sequence_length as i32);
            batch.document_starts.get_or_insert_default().extend(document_starts);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn conversation(ids: &[u32], counted: &[u32]) -> EncodedConversation {
        let counted = ids.iter().map(|id| counted.contains(id)).collect();
        EncodedConversation { ids: ids.to_vec(), counted, ..EncodedConversation::default() }
    }

    fn batch_of(packed: &PackedConversations) -> Batch {
        let mut batch = Batch::new(packed.sequence_length, true);
        (0..packed.sequences()).for_each(|k| packed.write(k, Some(&[2; 100]), &mut batch));
        batch
    }

    const X: i32 = IGNORED_TARGET;

    #[test]
    fn short_conversations_share_a_sequence() {
        let mut packed = PackedConversations::new(6, Packing::Documents, 99);
        packed.append(&[
            Some(conversation(&[1, 2, 3], &[2, 3])),
            None,
            Some(conversation(&[11, 12, 13, 14, 15], &[14, 15])),
            Some(conversation(&[21, 22, 23, 24], &[21, 24])),
        ]);
        assert_eq!([0, 1].map(|k| packed.documents(k)), [vec![2, 0], vec![3]]);
        let batch = batch_of(&packed);
        assert_eq!(batch.inputs, [11, 12, 13, 14, 1, 2, 21, 22, 23, 99, 99, 99]);
        assert_eq!(batch.targets, [X, X, 14, 15, 2, 3, X, X, 24, X, X, X]);
        assert_eq!(batch.document_starts.as_deref(), Some(&[0, 0, 0, 0, 4, 4, 0, 0, 0, 3, 4, 5][..]));
        assert_eq!((batch.target_count, batch.target_bytes, packed.targets()), (5, Some(10), 5));
    }

    #[test]
    fn padded_conversations_have_a_sequence_each() {
        let mut packed = PackedConversations::new(3, Packing::Padded, 99);
        packed.append(&[Some(conversation(&[1, 2], &[2])), Some(conversation(&[3, 4, 5, 6], &[6]))]);
        let batch = batch_of(&packed);
        assert_eq!(batch.inputs, [1, 99, 99, 3, 4, 5]);
        assert_eq!(batch.targets, [2, X, X, X, X, 6]);
        assert_eq!(batch.document_starts, None);
    }

    proptest! {
        #[test]
        fn each_conversation_is_in_one_sequence(lengths in prop::collection::vec(2_usize..18, 0..60)) {
            let conversations: Vec<Option<EncodedConversation>> = lengths
                .iter()
                .enumerate()
                .map(|(index, &length)| {
                    let (ids, counted) = (vec![index as u32; length], vec![true; length]);
                    Some(EncodedConversation { ids, counted, ..EncodedConversation::default() })
                })
                .collect();
            let mut packed = PackedConversations::new(17, Packing::Documents, 99);
            packed.append(&conversations);
            let mut sequences: Vec<(u32, usize)> = Vec::new();
            for sequence in &packed.sequences {
                prop_assert!(sequence.iter().map(|range| range.len() - 1).sum::<usize>() <= 17);
                sequences.extend(sequence.iter().map(|range| (packed.ids[range.start], range.len())));
            }
            sequences.sort_unstable();
            let expected: Vec<(u32, usize)> = lengths.iter().enumerate().map(|(index, &n)| (index as u32, n)).collect();
            prop_assert_eq!(sequences, expected);
        }
    }
}
