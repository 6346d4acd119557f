//! A data set on the Hub at one commit: its card, its listing and its files.

use std::sync::Arc;

use serde::Deserialize;

use super::client::HubClient;
use super::data_files::{self, ListedFile};
use super::hub_file::HubFile;
use super::retry_status::RetryStatus;
use super::settings::HubSettings;
use crate::DataError;
use crate::block_cache::{BlockCache, CacheKey, CachedSource};
use crate::byte_source::ByteSource;
use crate::cancel::CancelToken;

/// Maximum number of pages of a listing; the Hub puts a thousand entries on one.
const MAX_PAGES: usize = 10_000;

/// A data set at a pinned commit.
#[derive(Clone)]
pub(crate) struct Repository {
    client: Arc<HubClient>,
    cache: Option<Arc<BlockCache>>,
    name: String,
    revision: String,
}

#[derive(Deserialize)]
struct RevisionAnswer {
    sha: String,
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
}

impl Repository {
    /// Resolves `revision` (a branch, tag or commit; `main` by default) to a commit.
    pub(crate) fn pin(
        settings: HubSettings,
        name: &str,
        revision: Option<&str>,
        cancel: &CancelToken,
    ) -> Result<Self, DataError> {
        if !is_dataset_name(name) {
            return Err(DataError::DatasetName { name: name.to_owned() });
        }
        if settings.offline {
            return Err(DataError::Offline { name: name.to_owned() });
        }
        let cache = settings.cache.clone().map(|(folder, limit)| Arc::new(BlockCache::new(folder, limit)));
        let client = Arc::new(HubClient::new(settings)?);
        let revision = encode(revision.unwrap_or("main"), false);
        let url = format!("{}/api/datasets/{name}/revision/{revision}", client.endpoint());
        let answer: RevisionAnswer = parse(&url, &client.get_text(&url, cancel)?.text)?;
        if answer.sha.len() < 7 || !answer.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(DataError::invalid_response(&url, "it has no commit hash"));
        }
        Ok(Self { client, cache, name: name.to_owned(), revision: answer.sha })
    }

    /// The commit.
    pub(crate) fn revision(&self) -> &str {
        &self.revision
    }

    /// The request that has been failing for the longest time; none if all succeed.
    pub(crate) fn retry_status(&self) -> Option<RetryStatus> {
        self.client.retries().longest()
    }

    /// The files of a split, resolved as the `datasets` library does.
    pub(crate) fn files(
        &self,
        config: Option<&str>,
        split: &str,
        cancel: &CancelToken,
    ) -> Result<Vec<ListedFile>, DataError> {
        let card = self.card(cancel)?;
        data_files::resolve(&self.name, card.as_deref(), config, split, |folder| self.tree(folder, cancel))
    }

    /// Opens one of the files.
    pub(crate) fn open(&self, file: &str, length: u64, cancel: &CancelToken) -> Arc<dyn ByteSource> {
        let url = self.resolve(file);
        let source = HubFile::new(Arc::clone(&self.client), file.to_owned(), url, length, cancel.clone());
        match &self.cache {
            None => Arc::new(source),
            Some(cache) => {
                let cached = CacheKey::new(&self.name, &self.revision, file, length);
                Arc::new(CachedSource::new(source, Arc::clone(cache), cached, cancel.clone()))
            }
        }
    }

    fn resolve(&self, path: &str) -> String {
        format!("{}/datasets/{}/resolve/{}/{}", self.client.endpoint(), self.name, self.revision, encode(path, true))
    }

    /// The text of `README.md`; none if it does not exist.
    fn card(&self, cancel: &CancelToken) -> Result<Option<String>, DataError> {
        match self.client.get_text(&self.resolve("README.md"), cancel) {
            Ok(page) => Ok(Some(page.text)),
            Err(DataError::Refused { status: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Every file below `folder`, sorted; empty if the folder does not exist.
    fn tree(&self, folder: &str, cancel: &CancelToken) -> Result<Vec<ListedFile>, DataError> {
        let slash = if folder.is_empty() { "" } else { "/" };
        let folder = encode(folder, true);
        let mut url = format!(
            "{}/api/datasets/{}/tree/{}{slash}{folder}?recursive=true&expand=false",
            self.client.endpoint(),
            self.name,
            self.revision
        );
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let page = match self.client.get_text(&url, cancel) {
                Err(DataError::Refused { status: 404, .. }) if !folder.is_empty() => {
                    return Ok(Vec::new());
                }
                page => page?,
            };
            let entries: Vec<TreeEntry> = parse(&url, &page.text)?;
            files.extend(
                entries
                    .into_iter()
                    .filter(|entry| entry.kind == "file")
                    .map(|entry| ListedFile { path: entry.path, bytes: entry.size }),
            );
            match page.next {
                Some(next) if next != url => url = next,
                _ => {
                    files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
                    return Ok(files);
                }
            }
        }
        Err(DataError::invalid_response(&url, "the listing does not end"))
    }
}

fn parse<T: for<'de> Deserialize<'de>>(url: &str, text: &str) -> Result<T, DataError> {
    serde_json::from_str(text).map_err(|error| DataError::invalid_response(url, error.to_string()))
}

/// Whether a name is that of a data set: `owner/name`, or a legacy name without an owner.
fn is_dataset_name(name: &str) -> bool {
    let mut parts = name.split('/');
    let part = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
    };
    parts.by_ref().take(2).all(part) && parts.next().is_none()
}

/// Percent-encodes a URL path; `keep_slashes` keeps those between folders.
fn encode(text: &str, keep_slashes: bool) -> String {
    use std::fmt::Write as _;
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || (keep_slashes && byte == b'/') {
            encoded.push(byte as char);
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_data_set_names_are_rejected() {
        for name in ["HuggingFaceFW/fineweb", "wikitext", "a-b/c_d.e"] {
            assert!(is_dataset_name(name), "{name}");
        }
        for name in ["", "a/b/c", "/a", "a/", "../etc", "a/..", "a b", "a?b", "http://x/y", "a/b#c"] {
            assert!(!is_dataset_name(name), "{name}");
        }
    }

    #[test]
    fn paths_keep_slashes_and_revisions_encode_them() {
        assert_eq!(encode("data/a b#1.parquet", true), "data/a%20b%231.parquet");
        assert_eq!(encode("refs/convert/parquet", false), "refs%2Fconvert%2Fparquet");
        assert_eq!(encode("\u{e9}?", true), "%C3%A9%3F");
    }
}
