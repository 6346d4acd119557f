//! Where tokens come from: sources -> documents -> windows -> sequences, in an order that is a pure function.
//!
//! The way of a batch, file by file:
//!
//! - `source`: a name or patterns become a listing ([`DataSource`]). `hub` asks the Hugging Face Hub, `local` this
//!   machine. `mixture`: one or several sources, the components, with their `shares`.
//! - `byte_source`, `block_cache`, `formats`: a file's bytes by range, kept on disk, become rows of its groups.
//! - `split`: which rows are trained on, and which are held out.
//! - `order`, `lanes`: which files and groups come when. `window`: documents shuffled, tokenised, packed (`packing`)
//!   and shuffled again.
//! - `producer`: the thread that prepares a component's windows; `component_stream`: its sequences one after the other;
//!   `stream`: the [`TokenStream`] that hands out batches of all. `cursor`: where it goes on.
//! - `ledger`: what each step was trained on, to prove and to repeat it, in an `append_file` that outlives a full disk.
//! - `held_out`: evaluation batches. `documents`: texts in listing order. `cancel`: what ends all this early.
//!
//! # The order
//!
//! Everything below is a pure function of the [`StreamFingerprint`]: the files with their sizes and revision, the shares,
//! the tokenizer, and the [`StreamSettings`] without `workers` and `epochs`. Threads, timing, retries, restarts and
//! batch sizes change nothing.
//!
//! Each component has an order of its own, 1 to 4:
//!
//! 1. The training set is the first `max_samples` rows in listing order, or all, without what is held out.
//! 2. In each epoch the files stand in a line permuted by (seed, epoch). `lanes` of them are open at a time, and each
//!    file's row groups are permuted by (seed, epoch, file name).
//! 3. A window is the component's share of `shuffle_buffer_size` documents (or of 64 MiB of text; at least 256
//!    documents, or 4 MiB, if the whole has as many), taken evenly across the lanes; its documents are shuffled by
//!    (seed, epoch, window), tokenised, joined with `<|endoftext|>` after each and one before the first, and cut into
//!    sequences; every token of a document is a target exactly once. With `packing: documents` the same sequences say
//!    which of those `<|endoftext|>` each position looks back to. The last sequence is padded, so that windows do not
//!    depend on each other.
//! 4. The sequences of the window are shuffled by (seed, epoch, window).
//!
//! The components take turns, in `shares` of the sequences: after any number of them no component has given a whole
//! sequence more or less than its weight says. One that ends begins its next epoch while the others go on.
//!
//! The position between two sequences is a [`Cursor`]: for each component the window's place, the lanes' places at the
//! window's start and the numbers of sequences delivered. Going on from it reads at most one window of each again.
//!
//! # Memory
//!
//! However large files and row groups are, a stream holds at most the sum of ([`memory_bound`]):
//!
//! - the window in use, as tokens, and the one in preparation, as text and then as tokens twice (by document and in a
//!   line): together four times the text of a window, which is `shuffle_buffer_size` documents and at most 64 MiB, plus
//!   one document a lane. The components of a mixture share it (4 MiB of text more for each whose part is smaller);
//! - for each of the 16 lanes of a component a block of at most 4 MiB of the file and a copy of it, a page, decoded
//!   rows, and of a Parquet footer one entry a row group. A page is what its writer made it: pyarrow puts 1024
//!   documents into one at least;
//! - for each of `num_workers` up to 100 MiB of words that the encoder has met.
//!
//! Measured beside it: `benches/data/memory.py`, figures in `docs/guide/data.md`.
//!
//! # Example
//!
//! ```
//! # use std::path::Path;
//! use dataset::{CancelToken, DataSource, StreamSettings, TokenStream, Tokenizer};
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! # let tokenizer_json = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer.json");
//! std::fs::write(folder.join("pages.jsonl"), "{\"text\": \"one page\"}\n{\"text\": \"another\"}\n")?;
//! let source = DataSource::local(&["*.jsonl".to_owned()], folder, "text", &CancelToken::new())?;
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
mod component_stream;
mod cursor;
mod documents;
mod encoder;
mod error;
mod fingerprint;
mod formats;
mod held_out_batches;
mod held_out_split;
pub mod hub;
pub mod ledger;
mod local_files;
mod memory_bound;
mod mixture;
mod mixture_schedule;
mod open_shards;
mod packing;
mod permutation;
mod sequential_reader;
mod shuffle_window;
mod skipped_rows;
mod source;
mod stream;
mod tokenizer;
mod window_prefetch;

pub use append_file::AppendFile;
pub use batch::{Batch, IGNORED_TARGET};
pub use cache_folder::cache_root;
pub use cancel::CancelToken;
pub use cursor::{ComponentPosition, Cursor, ShardPosition, WindowStart};
pub use documents::Documents;
pub use error::{DataError, MissingColumn};
pub use fingerprint::StreamFingerprint;
pub use held_out_batches::{HeldOut, HeldOutBatches};
pub use memory_bound::memory_bound;
pub use mixture::Mixture;
pub use skipped_rows::SkippedRows;
pub use source::{DataSource, SourceDescription};
pub use stream::{StreamSettings, TokenStream};
pub use tokenizer::Tokenizer;
