//! A thin client of the Hugging Face Hub: what commit a name stands for, which files it has, and their bytes by range.
//!
//! The token goes to the endpoint's own origin and nowhere else: redirects (every large file is served from a signed
//! address of another host) are followed here, one by one, and messages never show an address's query.

mod address;
mod card;
mod client;
mod file;
mod layout;
mod repository;
mod retry;
mod settings;
mod waits;

pub(crate) use repository::Repository;
pub use settings::HubSettings;
pub use waits::{Waiting, Waits};
