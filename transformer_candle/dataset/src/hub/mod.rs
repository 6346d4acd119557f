//! A thin client of the Hugging Face Hub: what commit a name stands for, which files it has, and their bytes by range.
//!
//! The token goes to the endpoint's own origin and nowhere else: redirects (every large file is served from a signed
//! address of another host) are followed here, one by one, and messages never show an address's query.

mod client;
mod data_files;
mod dataset_card;
mod hub_file;
mod repository;
mod retry;
mod retry_status;
mod settings;
mod url;

pub(crate) use repository::Repository;
pub use retry_status::{RetryMonitor, RetryStatus};
pub use settings::HubSettings;
