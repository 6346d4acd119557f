//! Training data: shards of text become documents, shuffle windows, packed sequences and batches, in an order that is a
//! pure function of the data and its settings.
//!
//! Terms: a *shard* is a file of the listing. A *row group* is the part of a shard that can be read on its own, and a
//! *row* holds one document or is skipped (`formats`). A *component* is one source of a mixture. A *window*, short for
//! shuffle window, is the set of documents that are shuffled together.
//!
//! Modules, in the order in which they process the data:
//!
//! - `source`: names and patterns become a listing of shards ([`DataSource`]), `file_parts`: with changes that a run has
//!   accepted, with `hub` (the Hugging Face Hub) or
//!   `local_files`; `mixture`: several sources with weights; `mixture_schedule`: which of them gives the next sequence.
//! - `byte_source`, `block_cache`, `formats`: range requests, cached on disk, become rows of row groups.
//! - `corrupted_rows`: parts of shards that cannot be decoded; `skip_notices`: what users are told of skipped rows.
//! - `held_out_split`: which rows are trained on, and which are held out.
//! - `permutation`, `open_shards`: in which order shards and row groups are read. `shuffle_window`: documents are
//!   shuffled, tokenized (`tokenizer`, `encoder`), packed (`packing`) and shuffled again; `sequence_packer` does so
//!   with text and with conversations (`chat`, `conversation_packing`).
//! - `window_prefetch`: the thread that prepares the windows of a component; `component_stream`: its sequences;
//!   `stream`: the [`TokenStream`], which gives batches of all components (`stream_settings`). `cursor`: the position
//!   to resume from; `fingerprint`: hashes that identify the stream of a cursor.
//! - `ledger`: an append-only log of what each step consumed, for `ledger_audit`, `ledger_replay` and `ledger_files` (files
//!   that have changed); `append_file`: a log file that survives a full disk.
//! - `held_out_batches`: evaluation. `documents`: text in listing order (`sequential_reader`). `cancel`: cancellation.
//!
//! # The data order
//!
//! The sequences of a stream, and their order, are a pure function of what the [`StreamFingerprint`] hashes: names and
//! sizes of the shards, revision, text column, reading version, tokenizer, mixture weights, and the [`StreamSettings`]
//! except `workers` and `epochs`. Threads, timing, retries, restarts and batch sizes change nothing.
//!
//! **Listing.** Local shards: the patterns in their order, the files of one pattern sorted by path; of a folder those of
//! one split. Hub shards: the patterns of the split in their order, the files of one pattern sorted by path. A shard
//! counts once; empty ones are left out.
//!
//! **Randomness.** `key(purpose, numbers, name)` is the first eight bytes, little-endian, of SHA-256 over the purpose,
//! a zero byte, the count of the numbers and the numbers (each as eight bytes, little-endian) and the name. A
//! permutation by a key is a Fisher-Yates shuffle from the last item down, drawing from `SplitMix64` with the key as
//! its state; draws below a bound use Lemire's method with rejection (`permutation`).
//!
//! **Each component**, independently of the others:
//!
//! 1. The training rows are the first `max_samples` rows in listing order, or all, without the held-out rows
//!    (`held_out_split`, which does not depend on the seed).
//! 2. In each epoch, from 0, the shards that have training rows are permuted by `key("files", [seed, epoch], "")`, and
//!    the row groups of each shard by `key("groups", [seed, epoch], shard name)`. The row groups of compressed JSON
//!    Lines and of JSON arrays keep their order. `open_shards` shards are open at a time and read interleaved, as
//!    `open_shards` defines.
//! 3. A window is the next `ceil(w * shuffle_buffer_size)` documents, or fewer once they hold `ceil(w * 64 MiB)` of
//!    text, with `w` the component's normalised weight; but at least 256 documents and 4 MiB, or `shuffle_buffer_size`
//!    if that is smaller. It ends early at the end of the epoch. Its documents are permuted by
//!    `key("documents", [seed, epoch, window], "")`, with the windows of an epoch counted from 0.
//! 4. The documents are tokenized, each is followed by `<|endoftext|>`, and one `<|endoftext|>` stands before the
//!    first; with `bos` the tokenizer's BOS token is between each `<|endoftext|>` and the document after it. Sequence
//!    `k` of length `T` has tokens `kT .. kT + T` of this as inputs and `kT + 1 .. kT + T + 1` as targets; the last
//!    sequence is padded (`packing`). So every token of a document is a target exactly once, and windows do not depend
//!    on each other. `packing: documents` gives the same sequences and, for each position, where its document starts.
//!
//!    Conversations (`format: chat`) are rendered by the chat template instead, without further tokens; those that
//!    cannot be are skipped. With `packing: documents` the conversations of a window are put into sequences from the
//!    longest to the shortest, equally long ones in their order: each where it leaves the least space, in the first of
//!    several such sequences. With `packing: padded` each has a sequence of its own (`conversation_packing`).
//! 5. The sequences of the window are permuted by `key("sequences", [seed, epoch, window], "")` and delivered. Windows
//!    without a sequence are counted but deliver nothing.
//!
//! **The mixture.** After components have delivered `n_0, n_1, ...` sequences, `mixture_schedule` determines which
//! gives the next one: no component is ever a whole sequence away from its weight. A component whose epoch ends starts
//! its next epoch, whatever the others do.
//!
//! **Resuming.** A [`Cursor`] is a position between two sequences: for each component the start of its window (epoch,
//! window and the position of each open shard) and the numbers of sequences delivered. Resuming reads at most one
//! window of each component again.
//!
//! **Corrupted rows.** A shard whose content cannot be decoded is skipped from the first row on that cannot: to the end of the
//! row group, or of the shard where row groups cannot be read on their own (`corrupted_rows`). Slots go on as if the shard
//! had no such rows. The rows, with the epoch and window in which they were found, are part of the cursor and of the
//! ledger, and are skipped without being read in this window and all later ones: the order is a pure function of the
//! content as it was recorded. The split into training and held-out rows counts what can be decoded; from reading version 2
//! on the cursor holds it, so that it is decided once.
//!
//! **Changed files.** A run may accept local files that have changed since its checkpoint, if the batches of all steps that
//! consumed rows of them are still the same ([`check_consumed`]). Files keep their place in the listing. What was added,
//! files or the bytes after the former end of a file of lines, follows as further shards, which the permutations of later
//! epochs than the one in progress have; a file that is gone keeps its place and is skipped like a corrupted one from the
//! window after the one in use on. The cursor then holds the list ([`FilePart`]). The order continues from the same position;
//! the rest of a changed shard whose turn in the epoch is over is not read before the next epoch.
//!
//! **Stages.** A run may have stages that differ in sequence length and mixture weights. The stream of a stage starts, for
//! each component, at the start of the window after the one in use, with no sequence delivered: steps 1 to 5 and the
//! mixture then go on as above with the stage's settings. Sequences of the windows in use that were not delivered are left
//! out, at most one window of each component, and the ledger lists them. So the order of a stage is a pure function of
//! its settings and of the cursor that it starts at.
//!
//! # Memory
//!
//! However large shards and row groups are, a stream holds at most the sum of ([`memory_bound()`]):
//!
//! - the window in use, as tokens, and the one in preparation, as text and then as tokens twice (by document and
//!   joined): together four times the text of a window, which is `shuffle_buffer_size` documents and at most 64 MiB,
//!   plus one document per open shard. The components of a mixture divide it by their weights (plus 4 MiB of text for
//!   each component that would have less);
//! - for each of the 16 open shards of a component a block of at most 4 MiB and a copy of it, a page, decoded rows, and
//!   one entry per row group of a Parquet footer. The writer determines the size of a page: pyarrow puts at least 1024
//!   documents into one;
//! - for each of `num_workers` up to 100 MiB of words that the encoder caches.
//!
//! Measured by `benches/data/memory.py`; figures in `docs/guide/data.md`.
//!
//! # Example
//!
//! ```
//! # use std::path::Path;
//! use dataset::{CancelToken, DataSource, StreamSettings, TokenStream, Tokenizer};
//! use run_config::NEWEST_READING_VERSION;
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! # let tokenizer_json = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer.json");
//! std::fs::write(folder.join("pages.jsonl"), "{\"text\": \"one page\"}\n{\"text\": \"another\"}\n")?;
//! let source = DataSource::local(&["*.jsonl".to_owned()], folder, "text", NEWEST_READING_VERSION, &CancelToken::new())?;
//! let tokenizer = Tokenizer::load(&tokenizer_json, &[])?;
//! let settings = StreamSettings { sequence_length: 8, seed: 42, ..StreamSettings::default() };
//!
//! let mut stream = TokenStream::open(&source, &settings, &tokenizer, None)?;
//! let first = stream.next_sequences(4)?;
//! let cursor = stream.cursor();
//! let second = stream.next_sequences(4)?;
//!
//! let mut resumed = TokenStream::open(&source, &settings, &tokenizer, Some(cursor))?;
//! assert_eq!(resumed.next_sequences(4)?, second);
//! assert_eq!(first.sequences(), 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::format_collect))]

mod append_file;
mod batch;
mod block_cache;
mod byte_source;
mod cache_folder;
mod cancel;
mod chat;
mod component_stream;
mod conversation_packing;
mod corrupted_rows;
mod cursor;
mod documents;
mod encoder;
mod encoder_speed;
mod error;
mod fingerprint;
mod formats;
mod held_out_batches;
mod held_out_split;
pub mod hub;
pub mod ledger;
mod ledger_audit;
mod ledger_files;
mod ledger_replay;
mod local_files;
mod memory_bound;
mod mixture;
mod mixture_schedule;
mod open_shards;
mod packing;
mod permutation;
mod sequence_packer;
mod sequential_reader;
mod shuffle_window;
mod skip_notices;
mod skipped_rows;
mod source;
mod stream;
mod stream_settings;
mod tokenizer;
mod window_prefetch;

pub use append_file::AppendFile;
pub use batch::{Batch, IGNORED_TARGET};
pub use cache_folder::cache_root;
pub use cancel::CancelToken;
pub use chat::{ChatSettings, ConversationEncoder};
pub use corrupted_rows::{CorruptedRows, FoundCorruption};
pub use cursor::{ComponentPosition, Cursor, ShardPosition, WindowStart};
pub use documents::Documents;
pub use error::{DataError, MissingColumn};
pub use fingerprint::StreamFingerprint;
pub use held_out_batches::{HeldOut, HeldOutBatches};
pub use ledger_audit::{Audit, AuditedComponent, AuditedEpoch, audit};
pub use ledger_files::{ChangedFile, FileChanges, check_consumed, recorded_files};
pub use ledger_replay::{ReplayedBatch, SequenceRows, SourceRow, replay};
pub use local_files::FolderSplit;
pub use memory_bound::{expected_memory, memory_bound};
pub use mixture::Mixture;
pub use skipped_rows::SkippedRows;
pub use source::{DataSource, FilePart, SourceDescription};
pub use stream::{NextStage, StreamStage, TokenStream, Until};
pub use stream_settings::{StreamSettings, max_workers};
pub use tokenizer::{DocumentTokens, NamedToken, Tokenizer, TokenizerDefinition, check_tokenizer_json};
