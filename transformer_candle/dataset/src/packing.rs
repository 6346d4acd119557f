//! Packing: the token ids of documents become sequences of equal length, in which every token is a target exactly once.
//!
//! The tokens of all documents, each followed by end-of-text, are concatenated, with one end-of-text before the first.
//! Sequence `k` of length `T` has tokens `kT .. kT + T` as inputs and `kT + 1 .. kT + T + 1` as targets: the last
//! target of a sequence is the first input of the next. The rest of the last sequence is padding, which the loss
//! ignores.
//!
//! With [`Packing::Documents`] each end-of-text, as an input, starts the document after it, and attention does not look
//! back past it. Only the end-of-text tokens added here separate documents: an equal id within a text does not. Of the
//! chunks of a text file only the last is followed by end-of-text: the others count as one document with their
//! neighbours in the concatenation.

use run_config::Packing;

use crate::batch::{Batch, IGNORED_TARGET};

/// Concatenated tokens, to be cut into sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackedTokens {
    /// Starts with end-of-text.
    tokens: Vec<u32>,
    /// Ascending indices of the end-of-text tokens added here, if documents are kept apart.
    end_indices: Option<Vec<usize>>,
    sequence_length: usize,
    end_of_text: u32,
}

impl PackedTokens {
    pub(crate) fn new(sequence_length: usize, packing: Packing, end_of_text: u32) -> Self {
        Self::with_capacity(sequence_length, packing, end_of_text, 0)
    }

    /// Reserves memory for `targets` tokens.
    pub(crate) fn with_capacity(sequence_length: usize, packing: Packing, end_of_text: u32, targets: usize) -> Self {
        let tokens = Vec::with_capacity(targets + 1);
        let end_indices = (packing == Packing::Documents).then(Vec::new);
        let mut packed = Self { tokens, end_indices, sequence_length, end_of_text };
        packed.push(&[], true);
        packed
    }

    /// Appends a document, followed by end-of-text if `ends_document`.
    pub(crate) fn push(&mut self, ids: &[u32], ends_document: bool) {
        self.tokens.extend_from_slice(ids);
        if ends_document {
            if let Some(end_indices) = &mut self.end_indices {
                end_indices.push(self.tokens.len());
            }
            self.tokens.push(self.end_of_text);
        }
    }

    pub(crate) fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Number of target tokens.
    pub(crate) fn targets(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Number of sequences; the last may be padded.
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
        if let Some(end_indices) = &self.end_indices {
            let starts = document_starts(end_indices, start, self.sequence_length);
            batch.document_starts.get_or_insert_default().extend(starts);
        }
    }
}

/// Where the document of each of `length` positions from index `start` starts, as an index relative to `start`.
fn document_starts(end_indices: &[usize], start: usize, length: usize) -> impl Iterator<Item = i32> {
    let first = end_indices.partition_point(|&index| index < start);
    let mut end_indices = end_indices[first..].iter().peekable();
    let mut document_start = 0;
    (0..length).map(move |position| {
        if end_indices.next_if_eq(&&(start + position)).is_some() {
            document_start = position as i32;
        }
        document_start
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const END: u32 = 1000;

    fn pack(documents: &[(Vec<u32>, bool)], sequence_length: usize, packing: Packing) -> (PackedTokens, Batch) {
        let mut packed = PackedTokens::new(sequence_length, packing, END);
        for (ids, ends_document) in documents {
            packed.push(ids, *ends_document);
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
        let documents = [(vec![1, 2, 3], true), (vec![4], true)];
        let (_, batch) = pack(&documents, 4, Packing::Concat);
        assert_eq!(batch.inputs, [END, 1, 2, 3, END, 4, END, END]);
        assert_eq!(batch.targets, [1, 2, 3, END as i32, 4, END as i32, IGNORED_TARGET, IGNORED_TARGET]);
        assert_eq!((batch.target_count, batch.target_bytes, batch.sequences()), (6, Some(8), 2));
        assert_eq!(batch.document_starts, None);
    }

    #[test]
    fn only_added_end_of_text_starts_a_document() {
        let documents =
            [(vec![1, 2, 3], true), (vec![4, 5], false), (vec![6, END, 7], true), (vec![], true), (vec![8], true)];
        let (_, batch) = pack(&documents, 5, Packing::Documents);
        assert_eq!(batch.inputs, [END, 1, 2, 3, END, 4, 5, 6, END, 7, END, END, 8, END, END]);
        assert_eq!(batch.document_starts.unwrap(), [0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 1, 1, 3, 3]);
    }

    #[test]
    fn no_documents_give_no_sequences() {
        assert_eq!(PackedTokens::new(4, Packing::Concat, END).sequences(), 0);
    }

    proptest! {
        #[test]
        fn every_token_is_a_target_once(
            documents in prop::collection::vec((prop::collection::vec(0..END, 0..20), Just(true)), 0..30),
            sequence_length in 1_usize..17,
        ) {
            let (packed, batch) = pack(&documents, sequence_length, Packing::Concat);
            let concatenated: Vec<u32> = documents.iter().flat_map(|(ids, _)| ids.iter().copied().chain([END])).collect();
            let counted: Vec<u32> =
                batch.targets.iter().filter(|&&id| id != IGNORED_TARGET).map(|&id| id as u32).collect();
            prop_assert_eq!(&counted, &concatenated);
            prop_assert_eq!(batch.target_count, concatenated.len());
            let before: Vec<u32> = std::iter::once(END).chain(concatenated.iter().copied()).take(concatenated.len()).collect();
            prop_assert_eq!(&batch.inputs[..concatenated.len()], &before[..]);
            prop_assert_eq!(batch.inputs.len(), packed.sequences() * sequence_length);
            prop_assert!(batch.inputs.len() - concatenated.len() < sequence_length);
        }

        #[test]
        fn document_starts_point_to_the_last_end_of_text(
            documents in prop::collection::vec((prop::collection::vec(0..=END, 0..20), any::<bool>()), 0..30),
            sequence_length in 1_usize..17,
        ) {
            let (_, mut batch) = pack(&documents, sequence_length, Packing::Documents);
            let starts = batch.document_starts.take().unwrap_or_default();
            let (_, concat) = pack(&documents, sequence_length, Packing::Concat);
            prop_assert_eq!(&batch, &concat);
            let document_ends = |(ids, ends): &(Vec<u32>, bool)| [vec![false; ids.len()], vec![true; usize::from(*ends)]];
            let is_end: Vec<bool> = documents.iter().flat_map(document_ends).flatten().collect();
            let starts_document: Vec<bool> = std::iter::once(true).chain(is_end).collect();
            prop_assert_eq!(starts.len(), batch.inputs.len());
            for (index, &start) in starts.iter().enumerate() {
                let first = index / sequence_length * sequence_length;
                let document_start = (first..=index).rev().find(|&before| starts_document.get(before) == Some(&true));
                prop_assert_eq!(start as usize, document_start.map_or(0, |start| start - first));
            }
        }
    }
}
