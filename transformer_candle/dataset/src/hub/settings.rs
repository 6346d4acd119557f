//! Settings of the Hub client: endpoint, token, timeouts and cache.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use run_config::DataConfig;

use super::access_token::AccessToken;
use super::url::split_credentials;
use crate::block_cache::BLOCK_BYTES;
use crate::cache_folder::cache_root;
use crate::hub::retry_status::RetryMonitor;

/// Settings of the Hub client. [`HubSettings::from_environment`] reads the variables that `huggingface_hub` reads.
#[derive(Clone)]
pub struct HubSettings {
    /// URL of the Hub, without a trailing slash.
    pub endpoint: String,
    /// Access token; sent to the endpoint only.
    pub token: Option<AccessToken>,
    /// Whether requests are forbidden.
    pub offline: bool,
    /// How long a request is retried without progress.
    pub retry_timeout: Duration,
    /// Delay after the first failure; it doubles with each further one, up to a minute.
    pub initial_backoff: Duration,
    /// How long a connection may be silent.
    pub idle_timeout: Duration,
    /// Folder and size limit in bytes of the block cache; none for no cache.
    pub cache: Option<(PathBuf, u64)>,
    /// Records the requests that are being retried.
    pub retries: RetryMonitor,
}

impl Default for HubSettings {
    fn default() -> Self {
        Self {
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            offline: false,
            retry_timeout: Duration::from_hours(1),
            initial_backoff: Duration::from_millis(200),
            idle_timeout: Duration::from_secs(20),
            cache: None,
            retries: RetryMonitor::default(),
        }
    }
}

impl HubSettings {
    /// Reads `HF_ENDPOINT`, the token ([`AccessToken::from_environment`]), `HF_HUB_OFFLINE`, and the seconds of
    /// `HF_HUB_DOWNLOAD_TIMEOUT`.
    pub fn from_environment() -> Self {
        let mut settings = Self::default();
        if let Some(endpoint) = environment_variable("HF_ENDPOINT") {
            endpoint.trim_end_matches('/').clone_into(&mut settings.endpoint);
        }
        settings.token = AccessToken::from_environment();
        settings.offline = environment_variable("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value));
        if let Some(timeout) = environment_variable("HF_HUB_DOWNLOAD_TIMEOUT").as_deref().and_then(parse_seconds) {
            settings.idle_timeout = timeout;
        }
        settings
    }

    /// Returns the settings with the retry timeout and the block cache of a run.
    #[must_use]
    pub fn with_run_config(self, data: &DataConfig) -> Self {
        let folder = || data.cache_dir.clone().unwrap_or_else(|| cache_root().join("blocks"));
        let limit = data.cache_limit.bytes();
        let cache = (limit >= BLOCK_BYTES).then(|| (folder(), limit));
        Self { retry_timeout: data.network_patience.duration(), cache, ..self }
    }
}

/// Shows where the token comes from, and the endpoint without user and password.
impl fmt::Debug for HubSettings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HubSettings")
            .field("endpoint", &split_credentials(&self.endpoint).0)
            .field("token", &self.token)
            .field("offline", &self.offline)
            .field("retry_timeout", &self.retry_timeout)
            .field("initial_backoff", &self.initial_backoff)
            .field("idle_timeout", &self.idle_timeout)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

fn environment_variable(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// Parses an integer number of seconds, at least one, as `huggingface_hub` does.
fn parse_seconds(value: &str) -> Option<Duration> {
    value.parse().ok().filter(|&seconds| seconds > 0).map(Duration::from_secs)
}

/// Whether a variable says yes, as `huggingface_hub` reads it.
pub(super) fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.trim().to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_positive_integers() {
        assert_eq!(parse_seconds("10"), Some(Duration::from_secs(10)));
        for other in ["", "0", "-1", "soon", "0.5", "1e300"] {
            assert_eq!(parse_seconds(other), None, "{other}");
        }
    }
}
