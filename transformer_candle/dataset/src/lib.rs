//! Where tokens come from: sources -> documents -> windows -> sequences, in an order that is a pure function.
//!
//! The way of a batch, file by file:
//!
//! - `source`: a name or patterns become a listing ([`DataSource`]). `hub` asks the Hugging Face Hub, `local` this machine.
//! - `byte_source`, `formats`: a file's bytes by range become rows of its groups.
//! - `selection`: which rows are trained on, and which are held out.
//! - `order`, `lanes`: which files and groups come when. `window`: documents shuffled, tokenised, packed (`packing`) and
//!   shuffled again.
//! - `producer`: the thread that prepares windows; `stream`: the [`TokenStream`] that hands out batches (and the order,
//!   defined in one place). `cursor`: where it goes on.
//! - `held_out`: evaluation batches. `documents`: texts in listing order.
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::format_collect))]

mod batch;
mod byte_source;
mod cache;
mod cursor;
mod documents;
mod error;
mod formats;
mod held_out;
pub mod hub;
mod lanes;
mod local;
mod order;
mod packing;
mod producer;
mod selection;
mod skipped;
mod source;
mod stop;
mod stream;
mod tokenizer;
mod walk;
mod window;

pub use batch::{Batch, IGNORED_TARGET};
pub use cache::cache_root;
pub use cursor::{Cursor, LanePosition, StreamIdentity, WindowStart};
pub use documents::Documents;
pub use error::DataError;
pub use held_out::{HeldOut, HeldOutBatches};
pub use skipped::SkippedRows;
pub use source::{DataSource, SourceDescription};
pub use stream::{StreamSettings, TokenStream};
pub use tokenizer::Tokenizer;
