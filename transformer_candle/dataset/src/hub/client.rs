//! HTTP requests to the Hub, with redirects, credentials and the classification of errors.

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use run_config::system_error::in_words;
use ureq::Agent;
use ureq::http::header::{AUTHORIZATION, CONTENT_RANGE, LINK, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{HeaderMap, HeaderName, Response, StatusCode, Uri};

use super::access_token::AccessToken;
#[cfg(test)]
use super::access_token::TokenOrigin;
use super::proxy::{NamedProxy, Proxies};
use super::retry::{Backoff, RequestError, retry_delay};
use super::retry_status::RetryMonitor;
use super::settings::HubSettings;
use super::url::{
    origin, parse_content_range, parse_next_link, redacted, resolve_redirect, split_credentials, with_credentials,
};
use crate::DataError;
use crate::cancel::CancelToken;

/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 5;
/// Maximum length of a page of a listing, and of a dataset card.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// A client of one endpoint; can be shared between threads.
pub(crate) struct HubClient {
    settings: HubSettings,
    agent: Agent,
    endpoint: Uri,
    /// User and password of the endpoint, which no message shows.
    credentials: Option<String>,
    proxies: Proxies,
    /// Whether the endpoint has responded to any request.
    responded: AtomicBool,
}

/// A page of text, and the URL of the next page.
pub(super) struct Page {
    pub text: String,
    pub next: Option<String>,
}

/// The response after all redirects, and its URL.
struct FinalResponse {
    url: String,
    response: Response<ureq::Body>,
}

impl HubClient {
    pub(crate) fn new(mut settings: HubSettings) -> Result<Self, DataError> {
        let user;
        (settings.endpoint, user) = split_credentials(&settings.endpoint);
        let endpoint: Uri = settings.endpoint.parse().map_err(|_| invalid_endpoint(&settings.endpoint))?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) || endpoint.host().is_none() {
            return Err(invalid_endpoint(&settings.endpoint));
        }
        if user.as_ref().is_some_and(|user| with_credentials(&endpoint, user).is_none()) {
            let problem = "has a user or password with characters that are invalid in a URL: percent-encode them, for example %40 for @";
            return Err(DataError::hub_setting("HF_ENDPOINT", problem));
        }
        if let Some(token) =
            settings.token.as_ref().filter(|token| !token.secret().chars().all(|c| c.is_ascii_graphic()))
        {
            let problem =
                format!("{} contains characters that no token has: {}", token.origin(), token.origin().remedy());
            return Err(DataError::hub_setting("the access token", problem));
        }
        let proxies = Proxies::from_environment();
        proxies.of(&endpoint).map(NamedProxy::proxy).transpose()?;
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .timeout_resolve(Some(settings.idle_timeout))
            .timeout_connect(Some(settings.idle_timeout))
            .timeout_recv_response(Some(settings.idle_timeout))
            .timeout_per_read(Some(settings.idle_timeout))
            .timeout_per_write(Some(settings.idle_timeout))
            .max_idle_connections(64)
            .max_idle_connections_per_host(32)
            .user_agent(concat!("transformer_candle/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self { settings, agent, endpoint, credentials: user, proxies, responded: AtomicBool::new(false) })
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.settings.endpoint
    }

    /// The requests to this endpoint that are being retried.
    pub(super) fn retries(&self) -> &RetryMonitor {
        &self.settings.retries
    }

    pub(super) fn backoff<'a>(&'a self, cancel: &'a CancelToken) -> Backoff<'a> {
        Backoff::new(&self.settings, cancel, &self.responded)
    }

    /// Requests the text at `url`; retries until it arrives, an error is permanent, or `cancel` is cancelled.
    pub(super) fn get_text(self: &Arc<Self>, url: &str, cancel: &CancelToken) -> Result<Page, DataError> {
        let mut backoff = self.backoff(cancel);
        loop {
            let (client, owned_url) = (Arc::clone(self), url.to_owned());
            match cancel.run_blocking("hub", move || client.try_get_text(&owned_url))? {
                Ok(page) => return Ok(page),
                Err(failure) => backoff.wait(failure)?,
            }
        }
    }

    fn try_get_text(&self, url: &str) -> Result<Page, RequestError> {
        let FinalResponse { url, response } = self.send(url, None)?;
        if response.status() != StatusCode::OK {
            return Err(self.error_from_status(&url, &response));
        }
        let next = header(response.headers(), &LINK).and_then(parse_next_link);
        let expected = response.body().content_length();
        let mut bytes = Vec::new();
        let read = response.into_body().into_reader().take(MAX_TEXT_BYTES).read_to_end(&mut bytes);
        read.map_err(|error| transient(&url, in_words(&error)))?;
        if expected.is_some_and(|expected| expected > bytes.len() as u64) {
            return Err(transient(&url, "the response was truncated".to_owned()));
        }
        let text =
            String::from_utf8(bytes).map_err(|_| transient(&url, "the response is not UTF-8 text".to_owned()))?;
        Ok(Page { text, next })
    }

    /// Requests `range` of a file of `length` bytes; returns the bytes that arrived, and the URL they came from or the
    /// error.
    pub(super) fn try_get_range(
        self: &Arc<Self>,
        url: String,
        range: Range<u64>,
        length: u64,
        cancel: &CancelToken,
    ) -> Result<(Vec<u8>, Result<String, RequestError>), DataError> {
        let (client, cancel_copy) = (Arc::clone(self), cancel.clone());
        cancel.run_blocking("hub", move || {
            let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
            let outcome = client.read_range(&url, &range, length, &mut bytes, &cancel_copy);
            (bytes, outcome)
        })
    }

    fn read_range(
        &self,
        url: &str,
        range: &Range<u64>,
        length: u64,
        buffer: &mut Vec<u8>,
        cancel: &CancelToken,
    ) -> Result<String, RequestError> {
        let FinalResponse { url, response } = self.send(url, Some(range))?;
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(size_mismatch(&url, "fewer", length));
        }
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Err(self.error_from_status(&url, &response));
        }
        let served = header(response.headers(), &CONTENT_RANGE).and_then(parse_content_range);
        match served {
            Some((first, last, total)) if first == range.start && last < range.end && total == Some(length) => {
                let expected = (last + 1 - first) as usize;
                read_body(response, expected, buffer, cancel).map_err(|message| transient(&url, message))?;
                Ok(url)
            }
            Some((_, _, Some(total))) if total != length => Err(size_mismatch(&url, &format!("{total}"), length)),
            _ => Err(transient(&url, "the response has another range of the file than requested".to_owned())),
        }
    }

    /// Sends a request and follows redirects; credentials are sent to the endpoint's own origin only.
    fn send(&self, url: &str, range: Option<&Range<u64>>) -> Result<FinalResponse, RequestError> {
        let mut url = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let uri: Uri = url.parse().map_err(|_| invalid_response(&url, "the URL is invalid"))?;
            let own = self.is_endpoint_origin(&uri);
            let with_credentials =
                self.credentials.as_ref().filter(|_| own).and_then(|user| with_credentials(&uri, user));
            let proxy = self.proxies.of(&uri);
            let connection = proxy.map(NamedProxy::proxy).transpose().map_err(RequestError::Permanent)?;
            let mut request =
                self.agent.get(with_credentials.as_ref().unwrap_or(&uri)).config().proxy(connection).build();
            if let Some(token) = self.settings.token.as_ref().filter(|_| own) {
                request = request.header(AUTHORIZATION, format!("Bearer {}", token.secret()));
            }
            if let Some(range) = range {
                request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
            }
            let mut response = request.call().map_err(|error| transport_error(&url, &error, proxy))?;
            self.responded.store(true, Ordering::Relaxed);
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(FinalResponse { url, response });
            }
            let target = header(response.headers(), &LOCATION).and_then(|target| resolve_redirect(&uri, target));
            // After a short body has been read the connection can be reused.
            let _ = response.body_mut().with_config().limit(4096).read_to_vec();
            url = target.ok_or_else(|| invalid_response(&url, "it redirects without a valid location"))?;
        }
        Err(invalid_response(&url, "it redirects too often"))
    }

    /// Whether a URL has the endpoint's scheme, host and port.
    pub(super) fn is_endpoint_origin(&self, uri: &Uri) -> bool {
        origin(uri) == origin(&self.endpoint)
    }

    /// Returns the error for a response without the requested content.
    fn error_from_status(&self, url: &str, response: &Response<ureq::Body>) -> RequestError {
        let status = response.status().as_u16();
        let headers = response.headers();
        let own = url.parse::<Uri>().is_ok_and(|uri| self.is_endpoint_origin(&uri));
        // A signed URL of another host that refuses has expired; a fresh one is requested.
        let is_transient = matches!(status, 200 | 408 | 425 | 429 | 500..=599);
        if is_transient || (!own && matches!(status, 400..=499)) {
            let retry_after = retry_delay(header(headers, &RETRY_AFTER), header(headers, &RATE_LIMIT));
            let message = match status {
                200 => "it sent the whole file instead of the requested range".to_owned(),
                _ => format!("it answered {}", response.status()),
            };
            return RequestError::Transient { url: redacted(url), message, retry_after };
        }
        let hint = match (status, &self.settings.token) {
            (401 | 403, None) => "the data set is gated or private, or does not exist: check the name, and log in \
                                  (`hf auth login`) or set HF_TOKEN"
                .to_owned(),
            (401 | 403, Some(token)) => self.refusal_of(token, status, headers),
            (404, None) => "there is no such data set, revision or file: check the name (private ones need a token: \
                            `hf auth login` or HF_TOKEN)"
                .to_owned(),
            (404, Some(_)) => "there is no such data set, revision or file: check the name".to_owned(),
            _ => "the Hub does not accept the request".to_owned(),
        };
        RequestError::Permanent(DataError::Refused { url: redacted(url), status, hint })
    }

    /// Describes why a token does not open what was requested: the Hub does not know it, or its owner has no access.
    fn refusal_of(&self, token: &AccessToken, status: u16, headers: &HeaderMap) -> String {
        let origin = token.origin();
        let is_known = status == 403 || matches!(header(headers, &ERROR_CODE), Some("GatedRepo" | "RepoNotFound"));
        if is_known {
            let owner = self.owner_of_the_token().map_or_else(String::new, |owner| format!(", which is {owner}'s,"));
            return format!(
                "the token {origin}{owner} has no access: accept the data set's conditions on its page, or use another token"
            );
        }
        let reason = header(headers, &ERROR_MESSAGE).map(|reason| reason.replace(token.secret(), "..."));
        let reason = reason
            .filter(|reason| reason.len() <= LONGEST_MESSAGE)
            .map_or_else(String::new, |reason| format!(" ({reason})"));
        format!(
            "the Hub does not accept the token {origin}{reason}, it is wrong, expired or revoked: {}",
            origin.remedy()
        )
    }

    /// Asks the Hub whose the token is; none where it does not say so.
    fn owner_of_the_token(&self) -> Option<String> {
        let FinalResponse { response, .. } = self.send(&format!("{}/api/whoami-v2", self.endpoint()), None).ok()?;
        if response.status() != StatusCode::OK {
            return None;
        }
        let text = response.into_body().with_config().limit(1 << 20).read_to_string().ok()?;
        let account: serde_json::Value = serde_json::from_str(&text).ok()?;
        Some(account["name"].as_str()?.to_owned())
    }
}

/// Returns a description of the proxy by which this process reaches a URL.
pub fn proxy_of(url: &str) -> Option<String> {
    Some(Proxies::from_environment().of(&url.parse().ok()?)?.to_string())
}

const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");
/// Bytes of an error message of the Hub that is shown.
const LONGEST_MESSAGE: usize = 200;
const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

fn read_body(
    response: Response<ureq::Body>,
    expected: usize,
    buffer: &mut Vec<u8>,
    cancel: &CancelToken,
) -> Result<(), String> {
    let mut reader = response.into_body().into_reader();
    let end = buffer.len() + expected;
    let mut chunk = vec![0; 64 << 10];
    while buffer.len() < end {
        if cancel.is_cancelled() {
            return Err("cancelled".to_owned());
        }
        let piece_length = chunk.len().min(end - buffer.len());
        match reader.read(&mut chunk[..piece_length]) {
            Ok(0) => return Err("the response was truncated".to_owned()),
            Ok(read) => buffer.extend_from_slice(&chunk[..read]),
            Err(error) => return Err(in_words(&error)),
        }
    }
    // Nothing follows the last byte; reading the end lets the connection be reused.
    let _ = reader.read(&mut chunk[..1]);
    Ok(())
}

fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn transient(url: &str, message: String) -> RequestError {
    RequestError::Transient { url: redacted(url), message, retry_after: None }
}

/// Returns the error of a file that does not have the listed `length`.
fn size_mismatch(url: &str, actual: &str, length: u64) -> RequestError {
    let message = format!("the file has {actual} bytes, its listing says {length}: the data set was changed");
    RequestError::ListingMismatch { url: redacted(url), error: DataError::invalid_response(url, message) }
}

fn invalid_response(url: &str, message: &str) -> RequestError {
    RequestError::Permanent(DataError::invalid_response(url, message))
}

/// Returns the error of a request without a response. Invalid URLs stay invalid; everything else may be transient.
fn transport_error(url: &str, error: &ureq::Error, proxy: Option<&NamedProxy>) -> RequestError {
    match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
            invalid_response(url, "the request cannot be made: check HF_ENDPOINT and the proxy settings")
        }
        error => transient(url, proxy.map_or_else(|| transport_error_in_words(error), |proxy| proxy.explain(error))),
    }
}

/// Says why there is no response.
pub(super) fn transport_error_in_words(error: &ureq::Error) -> String {
    match error {
        ureq::Error::Io(error) => in_words(error),
        error => error.to_string(),
    }
}

fn invalid_endpoint(endpoint: &str) -> DataError {
    let problem = format!("is `{}`, which is not a URL like https://huggingface.co", redacted(endpoint));
    DataError::hub_setting("HF_ENDPOINT", problem)
}

#[cfg(test)]
pub(super) fn fast_settings(endpoint: &str, token: Option<&str>) -> HubSettings {
    HubSettings {
        endpoint: endpoint.to_owned(),
        token: token.map(|token| AccessToken::new(token, TokenOrigin::Variable("HF_TOKEN"))),
        initial_backoff: std::time::Duration::from_millis(1),
        idle_timeout: std::time::Duration::from_millis(500),
        ..HubSettings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_are_limited_to_the_endpoint_origin() {
        let client = HubClient::new(fast_settings("https://hub.example", Some("t"))).unwrap();
        for (url, own) in [
            ("https://hub.example/x", true),
            ("https://HUB.example:443/x", true),
            ("http://hub.example/x", false),
            ("https://hub.example:444/x", false),
            ("https://cdn.hub.example/x", false),
            ("https://hub.example.evil/x", false),
        ] {
            assert_eq!(client.is_endpoint_origin(&url.parse().unwrap()), own, "{url}");
        }
    }

    #[test]
    fn invalid_settings_are_rejected_without_secrets() {
        let error = HubClient::new(fast_settings("huggingface.co", None)).err().unwrap();
        assert!(error.to_string().starts_with("HF_ENDPOINT"), "{error}");
        let error = HubClient::new(fast_settings("https://h", Some("hf_se cret\n"))).err().unwrap();
        assert!(error.to_string().contains("in HF_TOKEN") && !error.to_string().contains("cret"), "{error}");
        assert!(!format!("{:?}", fast_settings("https://h", Some("hf_secret"))).contains("hf_secret"));
        for endpoint in
            ["https://user:secret@h", "user:secret@h", "https://user:sec/secret@h", "https://user:a secret@h"]
        {
            assert!(!format!("{:?}", fast_settings(endpoint, None)).contains("secret"), "{endpoint}");
            let message = HubClient::new(fast_settings(endpoint, None))
                .map_or_else(|error| error.to_string(), |client| client.endpoint().to_owned());
            assert!(!message.contains("secret") && !message.contains("user:"), "{endpoint}: {message}");
        }
    }
}
