//! The crate as its users see it. One program for all tests: each further one would be linked and optimised anew.

#![allow(clippy::unwrap_used, clippy::format_collect)]

mod bad_files;
mod changed_files;
mod chat;
mod data_order;
mod errors;
mod fineweb_scale;
mod fixtures;
mod held_out;
mod hub;
mod ledger;
mod loopback_hub;
mod mixture;
mod other_tokenizers;
mod stages;
