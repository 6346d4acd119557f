//! A file on the Hub, read by range.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::client::HubClient;
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// Reads a file of a pinned revision. The signed address that the Hub redirects to is used until it fails once.
pub(crate) struct HubFile {
    client: Arc<HubClient>,
    name: String,
    url: String,
    length: u64,
    address: Mutex<Option<String>>,
    cancel: CancelToken,
}

impl HubFile {
    pub(crate) fn new(client: Arc<HubClient>, name: String, url: String, length: u64, cancel: CancelToken) -> Self {
        Self { client, name, url, length, address: Mutex::default(), cancel }
    }

    fn address(&self) -> String {
        let known = self.address.lock().unwrap_or_else(PoisonError::into_inner);
        known.clone().unwrap_or_else(|| self.url.clone())
    }

    fn remember(&self, address: Option<String>) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
    }
}

impl ByteSource for HubFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn preferred_read(&self) -> u64 {
        4 << 20
    }

    /// Another server may have a sound copy.
    fn distrust(&self) -> bool {
        self.remember(None);
        true
    }

    /// Goes on from the byte reached after each failure; failures with progress between them are not counted together.
    fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
        let mut bytes = Vec::new();
        let mut patience = self.client.patience(&self.cancel);
        while bytes.len() < length {
            let missing = start + bytes.len() as u64..start + length as u64;
            let (piece, tried) = self.client.try_range(self.address(), missing, self.length, &self.cancel)?;
            if !piece.is_empty() {
                patience.progress();
            }
            if bytes.is_empty() {
                bytes = piece;
            } else {
                bytes.extend(piece);
            }
            match tried {
                Ok(address) => self.remember(Some(address)),
                Err(failure) => {
                    self.remember(None);
                    patience.wait(failure)?;
                }
            }
        }
        Ok(bytes.into())
    }
}
