//! Where tokens come from: sources -> documents -> windows -> sequences, in an order that is a pure function.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod batch;
mod cursor;
mod documents;
mod error;
mod held_out;
pub mod hub;
mod skipped;
mod source;
mod stream;
mod tokenizer;

pub use batch::{Batch, IGNORED_TARGET};
pub use cursor::{Cursor, LanePosition, StreamIdentity};
pub use documents::Documents;
pub use error::DataError;
pub use held_out::{HeldOut, HeldOutBatches};
pub use skipped::SkippedRows;
pub use source::{DataSource, SourceDescription, cache_root};
pub use stream::{StreamSettings, TokenStream};
pub use tokenizer::Tokenizer;
