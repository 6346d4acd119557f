//! A thin client of the Hugging Face Hub: resolves revisions, lists files and reads byte ranges.
//!
//! The token is sent to the endpoint's own origin only: redirects (every large file is served from a signed URL of
//! another host) are followed here one by one, and messages never show the query of a URL.

mod access_token;
mod client;
mod data_files;
mod dataset_card;
mod hub_file;
mod proxy;
mod repository;
mod retry;
mod retry_status;
mod settings;
mod url;

pub use access_token::{AccessToken, TokenOrigin};
pub use client::proxy_of;
pub(crate) use data_files::{FolderFiles, infer_folder_splits, is_metadata};
pub(crate) use repository::Repository;
pub use retry_status::{RetryMonitor, RetryStatus};
pub use settings::HubSettings;
pub use url::redacted;
