//! Token ids of documents to sequences of equal length in which every token of text is a target exactly once.
//!
//! The tokens of all documents, each followed by end-of-text, form one line with an end-of-text before the first. Sequence
//! `k` has tokens `kT .. kT + T` as inputs and `kT + 1 .. kT + T + 1` as targets: what one sequence ends with as a target
//! the next starts with as an input. Where the line ends within a sequence the rest is padding that counts for nothing.

use crate::batch::{Batch, IGNORED_TARGET};

/// A line of tokens, and how it is cut.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackedTokens {
    /// Starts with end-of-text.
    tokens: Vec<u32>,
    sequence_length: usize,
    end_of_text: u32,
}

impl PackedTokens {
    pub(crate) fn new(sequence_length: usize, end_of_text: u32) -> Self {
        Self::with_capacity(sequence_length, end_of_text, 0)
    }

    /// With room for `targets` tokens.
    pub(crate) fn with_capacity(sequence_length: usize, end_of_text: u32, targets: usize) -> Self {
        let mut tokens = Vec::with_capacity(targets + 1);
        tokens.push(end_of_text);
        Self { tokens, sequence_length, end_of_text }
    }

    /// Appends a document; `ends` says whether end-of-text follows.
    pub(crate) fn push(&mut self, ids: &[u32], ends: bool) {
        self.tokens.extend_from_slice(ids);
        if ends {
            self.tokens.push(self.end_of_text);
        }
    }

    pub(crate) fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Tokens that are targets.
    pub(crate) fn targets(&self) -> usize {
        self.tokens.len() - 1
    }

    /// How many sequences the line fills, the last perhaps in part.
    pub(crate) fn sequences(&self) -> usize {
        self.targets().div_ceil(self.sequence_length)
    }

    /// Appends sequence `k` to a batch.
    pub(crate) fn write(&self, k: usize, token_bytes: Option<&[u32]>, batch: &mut Batch) {
        let start = k * self.sequence_length;
        let end = (start + self.sequence_length).min(self.targets());
        let padding = self.sequence_length - (end - start);
        batch.inputs.extend_from_slice(&self.tokens[start..end]);
        batch.inputs.extend(std::iter::repeat_n(self.end_of_text, padding));
        let targets = &self.tokens[start + 1..=end];
        batch.targets.extend(targets.iter().map(|&id| id as i32));
        batch.targets.extend(std::iter::repeat_n(IGNORED_TARGET, padding));
        batch.target_count += end - start;
        if let (Some(total), Some(bytes)) = (&mut batch.target_bytes, token_bytes) {
            *total += targets.iter().map(|&id| u64::from(bytes[id as usize])).sum::<u64>();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: u32 = 1000;

    fn pack(documents: &[Vec<u32>], sequence_length: usize) -> (PackedTokens, Batch) {
        let mut packed = PackedTokens::new(sequence_length, END);
        for document in documents {
            packed.push(document, true);
        }
        let mut batch = Batch::new(sequence_length, true);
        let bytes: Vec<u32> = (0..=END).map(|id| if id == END { 0 } else { 2 }).collect();
        for k in 0..packed.sequences() {
            packed.write(k, Some(&bytes), &mut batch);
        }
        (packed, batch)
    }

    #[test]
    fn two_short_documents_fill_two_sequences() {
        let (_, batch) = pack(&[vec![1, 2, 3], vec![4]], 4);
        assert_eq!(batch.inputs, [END, 1, 2, 3, END, 4, END, END]);
        assert_eq!(batch.targets, [1, 2, 3, END as i32, 4, END as i32, IGNORED_TARGET, IGNORED_TARGET]);
        assert_eq!((batch.target_count, batch.target_bytes, batch.sequences()), (6, Some(8), 2));
    }

    #[test]
    fn nothing_packs_into_no_sequences() {
        assert_eq!(PackedTokens::new(4, END).sequences(), 0);
    }

    proptest! {
        #[test]
        fn every_token_is_a_target_once_and_every_input_is_the_token_before(
            documents in prop::collection::vec(prop::collection::vec(0..END, 0..20), 0..30),
            sequence_length in 1_usize..17,
        ) {
            let (packed, batch) = pack(&documents, sequence_length);
            let line: Vec<u32> = documents.iter().flat_map(|ids| ids.iter().copied().chain([END])).collect();
            let counted: Vec<u32> =
                batch.targets.iter().filter(|&&id| id != IGNORED_TARGET).map(|&id| id as u32).collect();
            prop_assert_eq!(&counted, &line);
            prop_assert_eq!(batch.target_count, line.len());
            let before: Vec<u32> = std::iter::once(END).chain(line.iter().copied()).take(line.len()).collect();
            prop_assert_eq!(&batch.inputs[..line.len()], &before[..]);
            prop_assert_eq!(batch.inputs.len(), packed.sequences() * sequence_length);
            prop_assert!(batch.inputs.len() - line.len() < sequence_length);
        }
    }
}
