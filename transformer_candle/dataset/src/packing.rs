//! Packing: the token ids of documents become sequences of equal length, in which every token is a target exactly once.
//!
//! The tokens of all documents, each followed by end-of-text, are concatenated, with one end-of-text before the first.
//! Sequence `k` of length `T` has tokens `kT .. kT + T` as inputs and `kT + 1 .. kT + T + 1` as targets: the last
//! target of a sequence is the first input of the next. The rest of the last sequence is padding, which the loss
//! ignores.
//!
//! Where documents start with a BOS token, one is put between each end-of-text and the text after it. It is predicted
//! from the end-of-text like any other token.
//!
//! With [`Packing::Documents`] attention does not look back past the start of a document: its BOS, or else the
//! end-of-text before it, from which its first token is predicted. Only the end-of-text tokens added here separate
//! documents: an equal id within a text does not. Of the chunks of a text file only the last is followed by
//! end-of-text: the others count as one document with their neighbours in the concatenation.

use run_config::Packing;

use crate::batch::{Batch, IGNORED_TARGET};
use crate::sequence_packer::Sequences;
use crate::tokenizer::{DocumentTokens, EncodedText};

/// Concatenated tokens, to be cut into sequences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PackedTokens {
    /// Token ids of all documents, starting with end-of-text.
    tokens: Vec<u32>,
    /// For each document that was appended, the index after its last token.
    document_ends: Vec<usize>,
    /// Ascending indices of the tokens that start a document, if documents are kept apart.
    document_starts: Option<Vec<usize>>,
    /// Texts whose [`EncodedText::surplus_bytes`] are not 0, ascending: index of the first token, and surplus bytes.
    surplus_bytes: Vec<(usize, i64)>,
    sequence_length: usize,
    end_of_text: u32,
    bos: Option<u32>,
    /// Whether the last token is an end-of-text that was added here.
    is_between_documents: bool,
}

impl PackedTokens {
    pub(crate) fn new(sequence_length: usize, packing: Packing, marks: &DocumentTokens) -> Self {
        let mut packed = Self {
            tokens: Vec::new(),
            document_ends: Vec::new(),
            document_starts: (packing == Packing::Documents).then(Vec::new),
            surplus_bytes: Vec::new(),
            sequence_length,
            end_of_text: marks.end_of_text.id,
            bos: marks.leading_bos(),
            is_between_documents: false,
        };
        packed.end_document();
        packed
    }

    /// Reserves memory for `tokens` more tokens.
    pub(crate) fn reserve(&mut self, tokens: usize) {
        self.tokens.reserve(tokens);
    }

    /// Appends a document, followed by end-of-text if `ends_document`.
    pub(crate) fn push(&mut self, text: &EncodedText, ends_document: bool) {
        let mut ids = text.ids.as_slice();
        if let Some(bos) = self.bos.filter(|_| self.is_between_documents) {
            self.mark_document_start();
            self.tokens.push(bos);
            // A text that spells the tokens added here has them already.
            ids = ids.strip_prefix(&[bos]).filter(|_| text.is_parsed).unwrap_or(ids);
        }
        self.is_between_documents = false;
        if ends_document && text.is_parsed {
            ids = ids.strip_suffix(&[self.end_of_text]).unwrap_or(ids);
        }
        if text.surplus_bytes != 0 {
            self.surplus_bytes.push((self.tokens.len(), text.surplus_bytes));
        }
        self.tokens.extend_from_slice(ids);
        if ends_document {
            self.end_document();
        }
        self.document_ends.push(self.tokens.len());
    }

    fn end_document(&mut self) {
        if self.bos.is_none() {
            self.mark_document_start();
        }
        self.tokens.push(self.end_of_text);
        self.is_between_documents = true;
    }

    /// Records that the next token starts a document.
    fn mark_document_start(&mut self) {
        if let Some(starts) = &mut self.document_starts {
            starts.push(self.tokens.len());
        }
    }

    /// Sums the surplus bytes of the texts that start at the indices `first..=last`.
    fn surplus_bytes_of(&self, first: usize, last: usize) -> i64 {
        let from = self.surplus_bytes.partition_point(|&(index, _)| index < first);
        self.surplus_bytes[from..].iter().take_while(|&&(index, _)| index <= last).map(|&(_, bytes)| bytes).sum()
    }
}

impl Sequences for PackedTokens {
    fn targets(&self) -> usize {
        self.tokens.len() - 1
    }

    fn tokens(&self) -> usize {
        self.targets()
    }

    fn sequences(&self) -> usize {
        self.targets().div_ceil(self.sequence_length)
    }

    fn is_complete(&self, k: usize) -> bool {
        self.targets() >= (k + 1) * self.sequence_length
    }

    fn documents(&self, k: usize) -> Vec<usize> {
        let (first, last) = (k * self.sequence_length + 1, ((k + 1) * self.sequence_length).min(self.targets()));
        let document_of = |token: usize| self.document_ends.partition_point(|&end| end <= token);
        (document_of(first)..=document_of(last)).collect()
    }

    fn write(&self, k: usize, token_bytes: Option<&[u32]>, batch: &mut Batch) {
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
            *total = total.saturating_add_signed(-self.surplus_bytes_of(start + 1, end));
        }
        if let Some(indices) = &self.document_starts {
            let starts = document_starts(indices, start, self.sequence_length);
            batch.document_starts.get_or_insert_default().extend(starts);
        }
    }
}

/// Returns, for each of `length` positions from index `start`, the first position of its document, relative to `start`.
fn document_starts(indices: &[usize], start: usize, length: usize) -> impl Iterator<Item = i32> {
    let first = indices.partition_point(|&index| index < start);
    let mut indices = indices[first..].iter().peekable();
    let mut document_start = 0;
    (0..length).map(move |position| {
        if indices.next_if_eq(&&(start + position)).is_some() {
            document_start = position as i32;
        }
        document_start
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenizer::NamedToken;

    const END: u32 = 1000;
    const BOS: u32 = 1001;

    fn pack(documents: &[(Vec<u32>, bool)], sequence_length: usize, packing: Packing) -> (PackedTokens, Batch) {
        pack_with(&DocumentTokens::ended_by(END, "</s>"), documents, sequence_length, packing)
    }

    fn pack_with_bos(
        documents: &[(Vec<u32>, bool)],
        sequence_length: usize,
        packing: Packing,
    ) -> (PackedTokens, Batch) {
        let bos = Some(NamedToken { id: BOS, name: "<s>".to_owned() });
        let marks = DocumentTokens { bos, starts_with_bos: true, ..DocumentTokens::ended_by(END, "</s>") };
        pack_with(&marks, documents, sequence_length, packing)
    }

    fn pack_with(
        marks: &DocumentTokens,
        documents: &[(Vec<u32>, bool)],
        sequence_length: usize,
        packing: Packing,
    ) -> (PackedTokens, Batch) {
        let mut packed = PackedTokens::new(sequence_length, packing, marks);
        for (ids, ends_document) in documents {
            packed.push(&EncodedText { ids: ids.clone(), ..EncodedText::default() }, *ends_document);
        }
        let mut batch = Batch::new(sequence_length, true);
        let bytes: Vec<u32> = (0..=BOS).map(|id| if id < END { 2 } else { 0 }).collect();
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
    fn a_sequence_knows_its_documents() {
        let documents = [(vec![1, 2, 3], true), (vec![4], true), (vec![], true), (vec![5, 6, 7, 8, 9], true)];
        let (packed, batch) = pack(&documents, 4, Packing::Concat);
        assert_eq!(batch.targets[..8], [1, 2, 3, END as i32, 4, END as i32, END as i32, 5]);
        assert_eq!([0, 1, 2, 3].map(|k| packed.documents(k)), [vec![0], vec![1, 2, 3], vec![3], vec![3]]);
    }

    #[test]
    fn no_documents_give_no_sequences() {
        assert_eq!(pack(&[], 4, Packing::Concat).0.sequences(), 0);
        assert_eq!(pack_with_bos(&[], 4, Packing::Documents).0.sequences(), 0);
    }

    #[test]
    fn bos_stands_between_end_of_text_and_document() {
        let documents = [(vec![1, 2, 3], true), (vec![4, 5], false), (vec![6], true), (vec![7], true)];
        let (_, batch) = pack_with_bos(&documents, 7, Packing::Documents);
        assert_eq!(batch.inputs, [END, BOS, 1, 2, 3, END, BOS, 4, 5, 6, END, BOS, 7, END]);
        let (bos, end) = (BOS as i32, END as i32);
        assert_eq!(batch.targets, [bos, 1, 2, 3, end, bos, 4, 5, 6, end, bos, 7, end, IGNORED_TARGET]);
        // The end of a document belongs to it: the next one starts at its BOS.
        assert_eq!(batch.document_starts.unwrap(), [0, 1, 1, 1, 1, 1, 6, 0, 0, 0, 0, 4, 4, 4]);
        assert_eq!(batch.target_bytes, Some(14));
    }

    #[test]
    fn surplus_bytes_count_where_a_text_starts() {
        let mut packed = PackedTokens::new(3, Packing::Concat, &DocumentTokens::ended_by(END, "</s>"));
        for (ids, surplus_bytes) in [(vec![1, 2, 3], 1), (vec![4], -5), (vec![5, 6], 0), (vec![], -1)] {
            packed.push(&EncodedText { ids, surplus_bytes, ..EncodedText::default() }, true);
        }
        let bytes_of = |k| {
            let mut batch = Batch::new(3, true);
            packed.write(k, Some(&[2; 1001]), &mut batch);
            batch.target_bytes.unwrap()
        };
        // Targets: 1 2 3 | END 4 END | 5 6 END | END
        assert_eq!([0, 1, 2, 3].map(bytes_of), [5, 11, 6, 3]);
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
            let expected: Vec<u32> =
                std::iter::once(END).chain(concatenated.iter().copied()).take(concatenated.len()).collect();
            prop_assert_eq!(&batch.inputs[..concatenated.len()], &expected[..]);
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
                let document_start = (first..=index).rev().find(|&start| starts_document.get(start) == Some(&true));
                prop_assert_eq!(start as usize, document_start.map_or(0, |start| start - first));
            }
        }
    }
}
