//! A file on the Hub, read with range requests.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::client::HubClient;
use crate::DataError;
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// A file at a pinned revision. The signed URL that the Hub redirects to is reused until it fails once.
pub(crate) struct HubFile {
    client: Arc<HubClient>,
    name: String,
    url: String,
    length: u64,
    signed_url: Mutex<Option<String>>,
    cancel: CancelToken,
}

impl HubFile {
    pub(crate) fn new(client: Arc<HubClient>, name: String, url: String, length: u64, cancel: CancelToken) -> Self {
        Self { client, name, url, length, signed_url: Mutex::default(), cancel }
    }

    fn current_url(&self) -> String {
        let signed_url = self.signed_url.lock().unwrap_or_else(PoisonError::into_inner);
        signed_url.clone().unwrap_or_else(|| self.url.clone())
    }

    fn store_signed_url(&self, signed_url: Option<String>) {
        *self.signed_url.lock().unwrap_or_else(PoisonError::into_inner) = signed_url;
    }
}

impl ByteSource for HubFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn preferred_read_size(&self) -> u64 {
        4 << 20
    }

    /// Drops the signed URL, since another server may have an intact copy.
    fn invalidate(&self) -> bool {
        self.store_signed_url(None);
        true
    }

    /// Resumes at the next missing byte after each failure; progress resets the count of failures.
    fn read(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
        let mut bytes = Vec::new();
        let mut backoff = self.client.backoff(&self.cancel);
        while bytes.len() < length {
            let remaining = start + bytes.len() as u64..start + length as u64;
            let (chunk, result) =
                self.client.try_get_range(self.current_url(), remaining, self.length, &self.cancel)?;
            if !chunk.is_empty() {
                backoff.progress();
            }
            if bytes.is_empty() {
                bytes = chunk;
            } else {
                bytes.extend(chunk);
            }
            match result {
                Ok(signed_url) => self.store_signed_url(Some(signed_url)),
                Err(failure) => {
                    self.store_signed_url(None);
                    backoff.wait(failure)?;
                }
            }
        }
        Ok(bytes.into())
    }
}
