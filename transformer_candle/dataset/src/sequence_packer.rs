//! Documents become packed sequences: text by `packing`, conversations by `conversation_packing`.

use std::ops::Deref;

use rayon::prelude::*;
use run_config::Packing;

use crate::batch::Batch;
use crate::cancel::CancelToken;
use crate::chat::{ConversationEncoder, EncodedConversation};
use crate::conversation_packing::PackedConversations;
use crate::formats::Document;
use crate::packing::PackedTokens;
use crate::skipped_rows::{SkipReason, SkippedRows};
use crate::tokenizer::{EncodedText, spelled_tokens};
use crate::{DataError, StreamSettings, Tokenizer};

/// Tokenizes documents and packs them into sequences. Clones share tokenizer and template.
#[derive(Clone)]
pub(crate) struct SequencePacker {
    tokenizer: Tokenizer,
    /// Encodes conversations; none for text.
    chat: Option<ConversationEncoder>,
    sequence_length: usize,
    packing: Packing,
}

/// Counts of the documents that were skipped or truncated when they were packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PackedDocuments {
    /// Conversations that were skipped.
    pub skipped: SkippedRows,
    /// Conversations whose end was cut off.
    pub truncated: u64,
    /// Documents and conversations that spell special tokens.
    pub spelling_special_tokens: u64,
    /// Conversations whose rows have fields that are not used.
    pub with_unused_fields: u64,
}

/// Packed sequences, of text or of conversations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PackedSequences {
    Text(PackedTokens),
    Chat(PackedConversations),
}

impl SequencePacker {
    pub(crate) fn new(settings: &StreamSettings, tokenizer: &Tokenizer) -> Result<Self, DataError> {
        let &StreamSettings { sequence_length, packing, .. } = settings;
        let chat = settings.chat.as_ref();
        let chat = chat.map(|chat| ConversationEncoder::new(tokenizer, chat, sequence_length)).transpose()?;
        Ok(Self { tokenizer: tokenizer.clone(), chat, sequence_length, packing })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub(crate) fn chat(&self) -> Option<&ConversationEncoder> {
        self.chat.as_ref()
    }

    /// Creates a batch without sequences.
    pub(crate) fn empty_batch(&self) -> Batch {
        Batch::new(self.sequence_length, self.tokenizer.token_bytes().is_some())
    }

    /// Creates an empty set of packed sequences.
    pub(crate) fn empty(&self) -> PackedSequences {
        let &Self { sequence_length, packing, .. } = self;
        let marks = self.tokenizer.document_tokens();
        match self.chat {
            None => PackedSequences::Text(PackedTokens::new(sequence_length, packing, marks)),
            Some(_) => PackedSequences::Chat(PackedConversations::new(sequence_length, packing, marks.end_of_text.id)),
        }
    }

    /// Tokenizes documents in the threads of the current pool and appends them in this order; each text is dropped once
    /// it is tokenized.
    pub(crate) fn append(
        &self,
        packed: &mut PackedSequences,
        documents: Vec<Document>,
        cancel: &CancelToken,
    ) -> Result<PackedDocuments, DataError> {
        match (packed, &self.chat) {
            (PackedSequences::Chat(packed), Some(chat)) => append_conversations(packed, chat, documents, cancel),
            (PackedSequences::Text(packed), _) => self.append_text(packed, documents, cancel),
            (PackedSequences::Chat(_), None) => {
                unreachable!("`empty` makes sequences of conversations with an encoder")
            }
        }
    }

    fn append_text(
        &self,
        packed: &mut PackedTokens,
        documents: Vec<Document>,
        cancel: &CancelToken,
    ) -> Result<PackedDocuments, DataError> {
        let consequence = || spelled_tokens::consequence(self.tokenizer.parses_special_tokens());
        let encoded: Vec<Result<(EncodedText, bool, bool), DataError>> = documents
            .into_par_iter()
            .map(|document| {
                cancel.check()?;
                let spells = self.tokenizer.spelled_tokens().tell(&document.text, consequence);
                Ok((self.tokenizer.encode_document(&document.text)?, document.ends_document, spells))
            })
            .collect();
        let added = if self.tokenizer.document_tokens().starts_with_bos { 2 } else { 1 };
        packed.reserve(encoded.iter().flatten().map(|(text, ..)| text.ids.len() + added).sum());
        let mut totals = PackedDocuments::default();
        for document in encoded {
            let (text, ends_document, spells) = document?;
            packed.push(&text, ends_document);
            totals.spelling_special_tokens += u64::from(spells);
        }
        Ok(totals)
    }
}

fn append_conversations(
    packed: &mut PackedConversations,
    chat: &ConversationEncoder,
    documents: Vec<Document>,
    cancel: &CancelToken,
) -> Result<PackedDocuments, DataError> {
    let encoded: Vec<Result<Result<EncodedConversation, SkipReason>, DataError>> = documents
        .into_par_iter()
        .map(|document| {
            cancel.check()?;
            chat.encode_row(&document.text)
        })
        .collect();
    let (mut totals, mut conversations) = (PackedDocuments::default(), Vec::with_capacity(encoded.len()));
    for conversation in encoded {
        match conversation? {
            Ok(conversation) => {
                totals.truncated += u64::from(conversation.truncated);
                totals.spelling_special_tokens += u64::from(conversation.spells_special_token);
                totals.with_unused_fields += u64::from(conversation.has_unused_fields);
                conversations.push(Some(conversation));
            }
            Err(reason) => {
                totals.skipped.count(reason);
                conversations.push(None);
            }
        }
    }
    packed.append(&conversations);
    Ok(totals)
}

/// The sequences of packed documents.
pub(crate) trait Sequences {
    /// Number of sequences; the last may be padded.
    fn sequences(&self) -> usize;

    /// Number of targets that the loss counts.
    fn targets(&self) -> usize;

    /// Number of tokens.
    fn tokens(&self) -> usize;

    /// Indices of the documents, among those appended, that have targets in sequence `k`, in the order of their
    /// positions.
    fn documents(&self, k: usize) -> Vec<usize>;

    /// Whether appending more documents leaves sequence `k` as it is.
    fn is_complete(&self, k: usize) -> bool;

    /// Appends sequence `k` to a batch.
    fn write(&self, k: usize, token_bytes: Option<&[u32]>, batch: &mut Batch);
}

impl Deref for PackedSequences {
    type Target = dyn Sequences;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Text(packed) => packed,
            Self::Chat(packed) => packed,
        }
    }
}
