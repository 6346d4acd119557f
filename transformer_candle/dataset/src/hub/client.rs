//! One HTTP request and what its answer means.

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ureq::Agent;
use ureq::http::header::{AUTHORIZATION, CONTENT_RANGE, LINK, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{HeaderMap, HeaderName, Response, StatusCode, Uri};

use super::retry::{Failure, Patience, ordered_wait};
use super::retry_status::Waits;
use super::settings::HubSettings;
use super::url::{absolute, content_range, next_link, origin, shown, with_user, without_user};
use crate::DataError;
use crate::cancel::CancelToken;

/// Redirects followed for one request.
const MOST_REDIRECTS: usize = 5;
/// A page of a listing or a card is shorter than this.
const LONGEST_TEXT: u64 = 64 << 20;

/// Talks to one endpoint; safe to share between threads.
pub(crate) struct HubClient {
    settings: HubSettings,
    agent: Agent,
    endpoint: Uri,
    /// User and password for the endpoint; no address that is told has them.
    user: Option<String>,
    /// The endpoint has answered something.
    answered: AtomicBool,
}

/// A text and where its next page is.
pub(super) struct Page {
    pub text: String,
    pub next: Option<String>,
}

/// An answer after redirects.
struct Answer {
    url: String,
    response: Response<ureq::Body>,
}

impl HubClient {
    pub(crate) fn new(mut settings: HubSettings) -> Result<Self, DataError> {
        let user;
        (settings.endpoint, user) = without_user(&settings.endpoint);
        let endpoint: Uri = settings.endpoint.parse().map_err(|_| not_an_address(&settings.endpoint))?;
        if !matches!(endpoint.scheme_str(), Some("http" | "https")) || endpoint.host().is_none() {
            return Err(not_an_address(&settings.endpoint));
        }
        if user.as_ref().is_some_and(|user| with_user(&endpoint, user).is_none()) {
            let problem =
                "has a user or password with characters that an address cannot have: encode them, as %40 for @";
            return Err(DataError::HubSetting { setting: "HF_ENDPOINT", problem: problem.to_owned() });
        }
        if settings.token.as_deref().is_some_and(|token| !token.chars().all(|c| c.is_ascii_graphic())) {
            let problem = "holds characters that no token has; copy it again from the Hub's settings page".to_owned();
            return Err(DataError::HubSetting { setting: "HF_TOKEN", problem });
        }
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(settings.silence))
            .timeout_connect(Some(settings.silence))
            .timeout_recv_response(Some(settings.silence))
            .timeout_per_read(Some(settings.silence))
            .timeout_per_write(Some(settings.silence))
            .max_idle_connections(64)
            .max_idle_connections_per_host(32)
            .user_agent(concat!("transformer_candle/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Self { settings, agent, endpoint, user, answered: AtomicBool::new(false) })
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.settings.endpoint
    }

    /// Who waits for this endpoint.
    pub(super) fn waits(&self) -> &Waits {
        &self.settings.waits
    }

    pub(super) fn patience<'a>(&'a self, cancel: &'a CancelToken) -> Patience<'a> {
        Patience::new(&self.settings, cancel, &self.answered, &self.settings.waits)
    }

    /// The text at `url`, asked for until it comes, a refusal is final, or `cancel` says to stop.
    pub(super) fn text(self: &Arc<Self>, url: &str, cancel: &CancelToken) -> Result<Page, DataError> {
        let mut patience = self.patience(cancel);
        loop {
            let (client, asked) = (Arc::clone(self), url.to_owned());
            match cancel.wait_for("hub", move || client.try_text(&asked))? {
                Ok(page) => return Ok(page),
                Err(failure) => patience.wait(failure)?,
            }
        }
    }

    fn try_text(&self, url: &str) -> Result<Page, Failure> {
        let Answer { url, response } = self.follow(url, None)?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(&url, &response));
        }
        let next = header(response.headers(), &LINK).and_then(next_link);
        let expected = response.body().content_length();
        let mut bytes = Vec::new();
        let read = response.into_body().into_reader().take(LONGEST_TEXT).read_to_end(&mut bytes);
        read.map_err(|error| passing(&url, error.to_string()))?;
        if expected.is_some_and(|expected| expected > bytes.len() as u64) {
            return Err(passing(&url, "the answer was cut off".to_owned()));
        }
        let text = String::from_utf8(bytes).map_err(|_| passing(&url, "the answer is not text".to_owned()))?;
        Ok(Page { text, next })
    }

    /// The bytes `range` of a file of `length` bytes, as many as come, and which address gave them.
    pub(super) fn try_range(
        self: &Arc<Self>,
        url: String,
        range: Range<u64>,
        length: u64,
        cancel: &CancelToken,
    ) -> Result<(Vec<u8>, Result<String, Failure>), DataError> {
        let (client, wanted) = (Arc::clone(self), cancel.clone());
        cancel.wait_for("hub", move || {
            let mut bytes = Vec::with_capacity((range.end - range.start) as usize);
            let tried = client.read_range(&url, &range, length, &mut bytes, &wanted);
            (bytes, tried)
        })
    }

    fn read_range(
        &self,
        url: &str,
        range: &Range<u64>,
        length: u64,
        buffer: &mut Vec<u8>,
        cancel: &CancelToken,
    ) -> Result<String, Failure> {
        let Answer { url, response } = self.follow(url, Some(range))?;
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            return Err(changed(&url, "fewer", length));
        }
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Err(self.refusal(&url, &response));
        }
        let given = header(response.headers(), &CONTENT_RANGE).and_then(content_range);
        match given {
            Some((first, last, total)) if first == range.start && last < range.end && total == Some(length) => {
                let expected = (last + 1 - first) as usize;
                read_body(response, expected, buffer, cancel).map_err(|message| passing(&url, message))?;
                Ok(url)
            }
            Some((_, _, Some(total))) if total != length => Err(changed(&url, &format!("{total}"), length)),
            _ => Err(passing(&url, "the answer holds another part of the file than was asked for".to_owned())),
        }
    }

    /// Asks, and goes where the answer points; the token goes along to the endpoint's own origin only.
    fn follow(&self, url: &str, range: Option<&Range<u64>>) -> Result<Answer, Failure> {
        let mut url = url.to_owned();
        for _ in 0..=MOST_REDIRECTS {
            let uri: Uri = url.parse().map_err(|_| answer(&url, "it points to what is no address"))?;
            let own = self.is_own(&uri);
            let with_user = self.user.as_ref().filter(|_| own).and_then(|user| with_user(&uri, user));
            let mut request = self.agent.get(with_user.as_ref().unwrap_or(&uri));
            if let Some(token) = self.settings.token.as_ref().filter(|_| own) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some(range) = range {
                request = request.header(RANGE, format!("bytes={}-{}", range.start, range.end - 1));
            }
            let mut response = request.call().map_err(|error| transport(&url, &error))?;
            self.answered.store(true, Ordering::Relaxed);
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(Answer { url, response });
            }
            let target = header(response.headers(), &LOCATION).and_then(|target| absolute(&uri, target));
            // A short body that has been read leaves the connection fit for the next request.
            let _ = response.body_mut().with_config().limit(4096).read_to_vec();
            url = target.ok_or_else(|| answer(&url, "it redirects to nowhere"))?;
        }
        Err(answer(&url, "it redirects in a circle"))
    }

    /// Whether an address has the endpoint's scheme, host and port.
    pub(super) fn is_own(&self, uri: &Uri) -> bool {
        origin(uri) == origin(&self.endpoint)
    }

    /// What an answer without the content means.
    fn refusal(&self, url: &str, response: &Response<ureq::Body>) -> Failure {
        let status = response.status().as_u16();
        let headers = response.headers();
        let own = url.parse::<Uri>().is_ok_and(|uri| self.is_own(&uri));
        // A signed address of another host that refuses has expired; a fresh one is asked for.
        let passing_status = matches!(status, 200 | 408 | 425 | 429 | 500..=599);
        if passing_status || (!own && matches!(status, 400..=499)) {
            let wait = ordered_wait(header(headers, &RETRY_AFTER), header(headers, &RATE_LIMIT));
            let message = match status {
                200 => "it sent the whole file instead of the part asked for".to_owned(),
                _ => format!("it answered {}", response.status()),
            };
            return Failure::Passing { url: shown(url), message, wait };
        }
        let hint = match (status, self.settings.token.is_some()) {
            (401 | 403, false) => {
                "the data set is gated or private, or there is none of this name: check the name, or set HF_TOKEN"
            }
            (401 | 403, true) => {
                "the token in HF_TOKEN may not read this: accept the data set's conditions on its page, or use another token"
            }
            (404, false) => "there is no such data set, revision or file: check the name (private ones need HF_TOKEN)",
            (404, true) => "there is no such data set, revision or file: check the name",
            _ => "the Hub does not accept the request",
        };
        Failure::Final(DataError::Refused { url: shown(url), status, hint: hint.to_owned() })
    }
}

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

fn read_body(
    response: Response<ureq::Body>,
    expected: usize,
    buffer: &mut Vec<u8>,
    cancel: &CancelToken,
) -> Result<(), String> {
    let mut reader = response.into_body().into_reader();
    let end = buffer.len() + expected;
    let mut piece = vec![0; 64 << 10];
    while buffer.len() < end {
        if cancel.is_cancelled() {
            return Err("no longer wanted".to_owned());
        }
        let wanted = piece.len().min(end - buffer.len());
        match reader.read(&mut piece[..wanted]) {
            Ok(0) => return Err("the answer was cut off".to_owned()),
            Ok(read) => buffer.extend_from_slice(&piece[..read]),
            Err(error) => return Err(error.to_string()),
        }
    }
    // What lies behind the last byte is nothing; having read it lets the connection serve the next request.
    let _ = reader.read(&mut piece[..1]);
    Ok(())
}

fn header<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn passing(url: &str, message: String) -> Failure {
    Failure::Passing { url: shown(url), message, wait: None }
}

/// The file is not the one of `length` bytes that was listed.
fn changed(url: &str, found: &str, length: u64) -> Failure {
    let message = format!("the file has {found} bytes, its listing says {length}: the data set was changed");
    let url = shown(url);
    Failure::Contradiction { url: url.clone(), error: DataError::Answer { url, message } }
}

fn answer(url: &str, message: &str) -> Failure {
    Failure::Final(DataError::Answer { url: shown(url), message: message.to_owned() })
}

/// What went wrong before there was an answer. Wrong addresses stay wrong; the rest of the network comes and goes.
fn transport(url: &str, error: &ureq::Error) -> Failure {
    match error {
        ureq::Error::BadUri(_) | ureq::Error::Http(_) | ureq::Error::InvalidProxyUrl => {
            answer(url, "the request cannot be made: check HF_ENDPOINT and the proxy settings")
        }
        error => passing(url, error.to_string()),
    }
}

fn not_an_address(endpoint: &str) -> DataError {
    DataError::HubSetting {
        setting: "HF_ENDPOINT",
        problem: format!("is `{}`, which is not an address like https://huggingface.co", shown(endpoint)),
    }
}

#[cfg(test)]
pub(super) fn quick(endpoint: &str, token: Option<&str>) -> HubSettings {
    HubSettings {
        endpoint: endpoint.to_owned(),
        token: token.map(str::to_owned),
        pause: std::time::Duration::from_millis(1),
        silence: std::time::Duration::from_millis(500),
        ..HubSettings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_endpoint_s_own_origin_is_trusted() {
        let client = HubClient::new(quick("https://hub.example", Some("t"))).unwrap();
        for (url, own) in [
            ("https://hub.example/x", true),
            ("https://HUB.example:443/x", true),
            ("http://hub.example/x", false),
            ("https://hub.example:444/x", false),
            ("https://cdn.hub.example/x", false),
            ("https://hub.example.evil/x", false),
        ] {
            assert_eq!(client.is_own(&url.parse().unwrap()), own, "{url}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused_without_showing_the_token() {
        let error = HubClient::new(quick("huggingface.co", None)).err().unwrap();
        assert!(error.to_string().starts_with("HF_ENDPOINT"), "{error}");
        let error = HubClient::new(quick("https://h", Some("hf_se cret\n"))).err().unwrap();
        assert!(error.to_string().starts_with("HF_TOKEN") && !error.to_string().contains("cret"), "{error}");
        assert!(!format!("{:?}", quick("https://h", Some("hf_secret"))).contains("hf_secret"));
        for endpoint in
            ["https://user:secret@h", "user:secret@h", "https://user:sec/secret@h", "https://user:a secret@h"]
        {
            assert!(!format!("{:?}", quick(endpoint, None)).contains("secret"), "{endpoint}");
            let told = HubClient::new(quick(endpoint, None))
                .map_or_else(|error| error.to_string(), |client| client.endpoint().to_owned());
            assert!(!told.contains("secret") && !told.contains("user:"), "{endpoint}: {told}");
        }
    }
}
