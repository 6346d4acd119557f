//! Token ids of documents to sequences of equal length in which every token of text is a target exactly once.
//!
//! The tokens of all documents, each followed by end-of-text, form one line with an end-of-text before the first. Sequence
//! `k` has tokens `kT .. kT + T` as inputs and `kT + 1 .. kT + T + 1` as targets: what one sequence ends with as a target
//! the next starts with as an input. Where the line ends within a sequence the rest is padding that counts for nothing.
//!
//! With [`Packing::Documents`] the tokens are the same, but a document's first token is no target: it would be predicted from
//! the document before, to which the end-of-text between them belongs. So a document begins behind each position without a
//! target, and nowhere else: [`Batch::document_starts`]. A piece of a text file counts as a document, for the shuffled line has
//! other neighbours for it than the file.

use std::ops::Range;

use run_config::Packing;

use crate::batch::{Batch, IGNORED_TARGET};

/// A line of tokens, and how it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackedTokens {
    /// Starts with end-of-text.
    tokens: Vec<u32>,
    /// Where documents begin, if their first tokens are no targets.
    beginnings: Option<Vec<usize>>,
    sequence_length: usize,
    end_of_text: u32,
}

impl PackedTokens {
    pub(crate) fn new(sequence_length: usize, packing: Packing, end_of_text: u32) -> Self {
        Self::with_capacity(sequence_length, packing, end_of_text, 0)
    }

    /// With room for a line of `tokens` behind the first end-of-text.
    pub(crate) fn with_capacity(sequence_length: usize, packing: Packing, end_of_text: u32, tokens: usize) -> Self {
        let mut line = Vec::with_capacity(tokens + 1);
        line.push(end_of_text);
        let beginnings = (packing == Packing::Documents).then(Vec::new);
        Self { tokens: line, beginnings, sequence_length, end_of_text }
    }

    /// Appends a document; `ends` says whether end-of-text follows.
    pub(crate) fn push(&mut self, ids: &[u32], ends: bool) {
        if let Some(beginnings) = &mut self.beginnings
            && (ends || !ids.is_empty())
        {
            beginnings.push(self.tokens.len());
        }
        self.tokens.extend_from_slice(ids);
        if ends {
            self.tokens.push(self.end_of_text);
        }
    }

    pub(crate) fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Positions that the sequences have between them, padding apart.
    pub(crate) fn positions(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Tokens that are targets.
    pub(crate) fn targets(&self) -> usize {
        self.positions() - self.beginnings.as_ref().map_or(0, Vec::len)
    }

    /// How many sequences the line fills, the last perhaps in part.
    pub(crate) fn sequences(&self) -> usize {
        self.positions().div_ceil(self.sequence_length)
    }

    /// Appends sequence `k` to a batch.
    pub(crate) fn write(&self, k: usize, token_bytes: Option<&[u32]>, batch: &mut Batch) {
        let start = k * self.sequence_length;
        let end = (start + self.sequence_length).min(self.positions());
        let padding = self.sequence_length - (end - start);
        batch.inputs.extend_from_slice(&self.tokens[start..end]);
        batch.inputs.extend(std::iter::repeat_n(self.end_of_text, padding));
        let first = batch.targets.len();
        batch.targets.extend(self.tokens[start + 1..=end].iter().map(|&id| id as i32));
        let without = self.beginnings_among(start + 1..end + 1);
        for &beginning in without {
            batch.targets[first + beginning - start - 1] = IGNORED_TARGET;
        }
        batch.target_count += end - start - without.len();
        if let (Some(total), Some(bytes)) = (&mut batch.target_bytes, token_bytes) {
            let counted = batch.targets[first..].iter().filter(|&&id| id != IGNORED_TARGET);
            *total += counted.map(|&id| u64::from(bytes[id as usize])).sum::<u64>();
        }
        batch.targets.extend(std::iter::repeat_n(IGNORED_TARGET, padding));
    }

    /// The beginnings of documents among these places in the line.
    fn beginnings_among(&self, places: Range<usize>) -> &[usize] {
        let all = self.beginnings.as_deref().unwrap_or_default();
        &all[all.partition_point(|&at| at < places.start)..all.partition_point(|&at| at < places.end)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: u32 = 1000;

    fn pack(documents: &[(Vec<u32>, bool)], sequence_length: usize, packing: Packing) -> (PackedTokens, Batch) {
        let mut packed = PackedTokens::new(sequence_length, packing, END);
        for (ids, ends) in documents {
            packed.push(ids, *ends);
        }
        let mut batch = Batch::new(sequence_length, true);
        let bytes: Vec<u32> = (0..=END).map(|id| if id == END { 0 } else { 2 }).collect();
        for k in 0..packed.sequences() {
            packed.write(k, Some(&bytes), &mut batch);
        }
        (packed, batch)
    }

    fn starts(batch: &Batch) -> Vec<i32> {
        let mut starts = vec![-1; batch.inputs.len()];
        batch.write_document_starts(0..batch.sequences(), &mut starts);
        starts
    }

    const NONE: i32 = IGNORED_TARGET;

    #[test]
    fn two_short_documents_fill_two_sequences() {
        let documents = [(vec![1, 2, 3], true), (vec![4], true)];
        let (_, batch) = pack(&documents, 4, Packing::Concat);
        assert_eq!(batch.inputs, [END, 1, 2, 3, END, 4, END, END]);
        assert_eq!(batch.targets, [1, 2, 3, END as i32, 4, END as i32, NONE, NONE]);
        assert_eq!((batch.target_count, batch.target_bytes, batch.sequences()), (6, Some(8), 2));
    }

    #[test]
    fn packed_by_documents_no_first_token_is_a_target_and_none_looks_back_across_a_border() {
        let documents = [(vec![1, 2, 3], true), (vec![4, 5], false), (vec![6], true)];
        let (packed, batch) = pack(&documents, 4, Packing::Documents);
        assert_eq!(batch.inputs, [END, 1, 2, 3, END, 4, 5, 6]);
        assert_eq!(batch.targets, [NONE, 2, 3, END as i32, NONE, 5, NONE, END as i32]);
        assert_eq!(starts(&batch), [0, 1, 1, 1, 0, 1, 1, 3]);
        assert_eq!((batch.target_count, packed.targets(), batch.target_bytes), (5, 5, Some(6)));
    }

    #[test]
    fn nothing_packs_into_no_sequences() {
        assert_eq!(PackedTokens::new(4, Packing::Concat, END).sequences(), 0);
    }

    proptest! {
        #[test]
        fn every_token_is_a_target_once_and_every_input_is_the_token_before(
            documents in prop::collection::vec((prop::collection::vec(0..END, 0..20), Just(true)), 0..30),
            sequence_length in 1_usize..17,
        ) {
            let (packed, batch) = pack(&documents, sequence_length, Packing::Concat);
            let line: Vec<u32> = documents.iter().flat_map(|(ids, _)| ids.iter().copied().chain([END])).collect();
            let counted: Vec<u32> =
                batch.targets.iter().filter(|&&id| id != IGNORED_TARGET).map(|&id| id as u32).collect();
            prop_assert_eq!(&counted, &line);
            prop_assert_eq!(batch.target_count, line.len());
            let before: Vec<u32> = std::iter::once(END).chain(line.iter().copied()).take(line.len()).collect();
            prop_assert_eq!(&batch.inputs[..line.len()], &before[..]);
            prop_assert_eq!(batch.inputs.len(), packed.sequences() * sequence_length);
            prop_assert!(batch.inputs.len() - line.len() < sequence_length);
        }

        #[test]
        fn by_documents_every_other_token_is_a_target_once_and_sees_its_document_only(
            documents in prop::collection::vec((prop::collection::vec(0..END, 0..20), any::<bool>()), 0..30),
            sequence_length in 1_usize..17,
        ) {
            let (packed, batch) = pack(&documents, sequence_length, Packing::Documents);
            let (_, concat) = pack(&documents, sequence_length, Packing::Concat);
            prop_assert_eq!(&batch.inputs, &concat.inputs);
            // What each place in the line belongs to, from 1; the end-of-text before the first document to none.
            let lengths = documents.iter().map(|(ids, ends)| ids.len() + usize::from(*ends));
            let of: Vec<usize> = std::iter::once(0).chain((1..).zip(lengths).flat_map(|(i, n)| vec![i; n])).collect();
            let mut counted = 0;
            for (place, (&target, &start)) in batch.targets.iter().zip(&starts(&batch)).enumerate() {
                let first = place / sequence_length * sequence_length;
                let inside = of.get(place + 1).is_some_and(|next| *next == of[place]);
                prop_assert_eq!(target, if inside { concat.targets[place] } else { IGNORED_TARGET });
                counted += usize::from(inside);
                if place + 1 < of.len() {
                    let begins = (first..=place).find(|&before| of[before] == of[place]).map(|begins| begins - first);
                    prop_assert_eq!(Some(start as usize), begins);
                }
            }
            prop_assert_eq!((batch.target_count, packed.targets()), (counted, counted));
        }
    }
}
