//! A Hub and its CDN on two ports of this machine, which fail on request and record all requests.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use dataset::hub::{AccessToken, HubSettings, TokenOrigin};
use dataset::{CancelToken, DataError, DataSource};
use run_config::{NEWEST_READING_VERSION, StreamingConfig};

pub const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// A failure of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Status(u16),
    /// Half of the body is sent.
    Truncate,
    /// `Content-Range` names another range.
    WrongRange,
    /// The whole file is sent for a range request.
    NoRange,
    /// `Content-Range` has another size than the listing.
    OtherSize,
    /// No response, then the connection is closed.
    Hang,
}

#[derive(Clone, Debug)]
pub struct Request {
    pub cdn: bool,
    pub path: String,
    pub range: Option<String>,
    pub token: Option<String>,
}

/// The bytes of a file. The middle of a large one repeats, so that a data set of any size fits in memory.
#[derive(Clone, Default)]
pub struct Content {
    pub head: Bytes,
    pub middle: Bytes,
    pub times: usize,
    pub tail: Bytes,
}

impl From<Vec<u8>> for Content {
    fn from(bytes: Vec<u8>) -> Self {
        Self { head: bytes.into(), ..Self::default() }
    }
}

impl Content {
    pub fn length(&self) -> usize {
        self.head.len() + self.times * self.middle.len() + self.tail.len()
    }

    fn read(&self, range: Range<usize>) -> Bytes {
        if range.end <= self.head.len() {
            return self.head.slice(range);
        }
        let tail = self.length() - self.tail.len();
        let mut bytes = Vec::with_capacity(range.len());
        let mut at = range.start;
        while at < range.end {
            let (part, offset) = match at {
                _ if at < self.head.len() => (&self.head, at),
                _ if at < tail => (&self.middle, (at - self.head.len()) % self.middle.len()),
                _ => (&self.tail, at - tail),
            };
            let length = (part.len() - offset).min(range.end - at);
            bytes.extend_from_slice(&part[offset..offset + length]);
            at += length;
        }
        bytes.into()
    }
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Content>,
    /// Entries per page of a listing.
    page: usize,
    token: Option<String>,
    cdn: String,
    hub: String,
    faults: Vec<(&'static str, Fault, usize)>,
    requests: Vec<Request>,
}

pub struct LoopbackHub {
    state: Arc<Mutex<State>>,
    pub endpoint: String,
}

impl LoopbackHub {
    pub fn serve(files: &[(&str, Vec<u8>)]) -> Self {
        Self::serve_shared(files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.clone().into())).collect())
    }

    pub fn serve_shared(files: BTreeMap<String, Content>) -> Self {
        let state = Arc::new(Mutex::new(State { files, page: 1000, ..State::default() }));
        let endpoint = listen(&state, false);
        let cdn = listen(&state, true);
        state.lock().unwrap().cdn = cdn;
        state.lock().unwrap().hub.clone_from(&endpoint);
        Self { state, endpoint }
    }

    pub fn with_page(self, page: usize) -> Self {
        self.state.lock().unwrap().page = page;
        self
    }

    pub fn with_token(self, token: &str) -> Self {
        self.state.lock().unwrap().token = Some(token.to_owned());
        self
    }

    /// The next `count` requests whose path contains `part` fail.
    pub fn fail(&self, part: &'static str, fault: Fault, count: usize) {
        self.state.lock().unwrap().faults.push((part, fault, count));
    }

    /// No request fails from here on.
    pub fn clear_faults(&self) {
        self.state.lock().unwrap().faults.clear();
    }

    /// Every request since the last call.
    pub fn take_requests(&self) -> Vec<Request> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    pub fn settings(&self, token: Option<&str>) -> HubSettings {
        HubSettings {
            endpoint: self.endpoint.clone(),
            token: token.map(|token| AccessToken::new(token, TokenOrigin::Variable("HF_TOKEN"))),
            retry_timeout: Duration::from_millis(1500),
            initial_backoff: Duration::from_millis(1),
            idle_timeout: Duration::from_millis(150),
            ..HubSettings::default()
        }
    }

    pub fn source(&self) -> Result<DataSource, DataError> {
        DataSource::streaming(
            &streaming("owner/name"),
            self.settings(None),
            NEWEST_READING_VERSION,
            &CancelToken::new(),
        )
    }
}

pub fn streaming(dataset: &str) -> StreamingConfig {
    StreamingConfig {
        dataset: dataset.to_owned(),
        split: "train".to_owned(),
        max_samples: None,
        stream_batch_size: 100,
        experiment: "e".to_owned(),
        config: None,
        revision: None,
        text_column: "text".to_owned(),
        tokenizer: None,
    }
}

fn listen(state: &Arc<Mutex<State>>, cdn: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let state = Arc::clone(state);
    std::thread::spawn(move || {
        for connection in listener.incoming().flatten() {
            let state = Arc::clone(&state);
            std::thread::spawn(move || serve_connection(&connection, &state, cdn));
        }
    });
    address
}

/// Serves requests until the client closes the connection or a fault does.
fn serve_connection(connection: &TcpStream, state: &Mutex<State>, cdn: bool) -> Option<()> {
    connection.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(connection.try_clone().ok()?);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let path = line.split(' ').nth(1)?.to_owned();
        let (mut range, mut token) = (None, None);
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).ok()?;
            let Some((name, value)) = header.trim_end().split_once(": ") else {
                break;
            };
            match name.to_ascii_lowercase().as_str() {
                "range" => range = Some(value.to_owned()),
                "authorization" => token = Some(value.to_owned()),
                _ => {}
            }
        }
        let request = Request { cdn, path, range, token };
        let mut state = state.lock().ok()?;
        let fault = take_fault(&mut state.faults, &request.path);
        let (head, body) = state.answer(&request, fault);
        state.requests.push(request);
        drop(state);
        if fault == Some(Fault::Hang) {
            std::thread::sleep(Duration::from_millis(300));
            return None;
        }
        let mut writer = connection;
        let sent_bytes = if fault == Some(Fault::Truncate) { body.len() / 2 } else { body.len() };
        write!(writer, "HTTP/1.1 {head}Content-Length: {}\r\n\r\n", body.len()).ok()?;
        writer.write_all(&body[..sent_bytes]).ok()?;
        if sent_bytes < body.len() {
            return None;
        }
    }
}

fn take_fault(faults: &mut [(&'static str, Fault, usize)], path: &str) -> Option<Fault> {
    let (_, fault, count) = faults.iter_mut().find(|(part, _, count)| *count > 0 && path.contains(part))?;
    *count -= 1;
    Some(*fault)
}

impl State {
    /// The status line with headers, and the body.
    fn answer(&self, request: &Request, fault: Option<Fault>) -> (String, Bytes) {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        if let Some(Fault::Status(status)) = fault {
            return (format!("{status} Fault\r\nRetry-After: 0\r\n"), Bytes::from_static(b"no"));
        }
        if request.cdn {
            let signed = query.contains("signature=s3cret");
            let refusal = ("403 Forbidden\r\n".to_owned(), Bytes::new());
            return if signed { self.range(&path["/cdn/".len()..], request, fault) } else { refusal };
        }
        let refused = self.token.as_ref().is_some_and(|token| request.token != Some(format!("Bearer {token}")));
        if refused {
            return ("401 Unauthorized\r\n".to_owned(), Bytes::from_static(b"{\"error\": \"gated\"}"));
        }
        let resolve = format!("/datasets/owner/name/resolve/{SHA}/");
        if path.starts_with("/api/datasets/owner/name/revision/") {
            return ("200 OK\r\n".to_owned(), format!("{{\"sha\": \"{SHA}\"}}").into_bytes().into());
        } else if let Some(folder) = path.strip_prefix(&format!("/api/datasets/owner/name/tree/{SHA}")) {
            return self.tree(folder.trim_start_matches('/'), query);
        } else if let Some(file) = path.strip_prefix(&resolve) {
            if file == "README.md" && self.files.contains_key(file) {
                return ("200 OK\r\n".to_owned(), self.files[file].head.clone());
            } else if self.files.contains_key(file) {
                let location = format!("{}/cdn/{file}?signature=s3cret", self.cdn);
                return (format!("302 Found\r\nLocation: {location}\r\n"), Bytes::from_static(b"Found"));
            }
        }
        ("404 Not Found\r\n".to_owned(), Bytes::from_static(b"{\"error\": \"not found\"}"))
    }

    fn tree(&self, folder: &str, query: &str) -> (String, Bytes) {
        let first: usize = query.split("cursor=").nth(1).map_or(0, |cursor| cursor.parse().unwrap());
        let below = |name: &&String| folder.is_empty() || name.starts_with(&format!("{folder}/"));
        let names: Vec<&String> = self.files.keys().filter(below).collect();
        let mut body = "[{\"type\": \"directory\", \"path\": \"data\", \"size\": 0}".to_owned();
        for name in names.iter().skip(first).take(self.page) {
            let size = self.files[*name].length();
            write!(body, ", {{\"type\": \"file\", \"path\": \"{name}\", \"size\": {size}, \"oid\": \"x\"}}").unwrap();
        }
        let mut head = "200 OK\r\n".to_owned();
        if first + self.page < names.len() {
            let (hub, next) = (&self.hub, first + self.page);
            let url = format!("{hub}/api/datasets/owner/name/tree/{SHA}/{folder}?recursive=true&cursor={next}");
            write!(head, "Link: <{url}>; rel=\"next\"\r\n").unwrap();
        }
        (head, (body + "]").into())
    }

    fn range(&self, file: &str, request: &Request, fault: Option<Fault>) -> (String, Bytes) {
        let bytes = &self.files[file];
        let bounds = request.range.as_ref().and_then(|range| range.strip_prefix("bytes=")?.split_once('-'));
        let Some((first, last)) = bounds.filter(|_| fault != Some(Fault::NoRange)) else {
            return ("200 OK\r\n".to_owned(), bytes.read(0..bytes.length()));
        };
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
        let shift = usize::from(fault == Some(Fault::WrongRange)) * 7;
        let total = bytes.length() + usize::from(fault == Some(Fault::OtherSize));
        let head = format!("206 Partial\r\nContent-Range: bytes {}-{}/{total}\r\n", first + shift, last + shift);
        (head, bytes.read(first..last + 1))
    }
}
