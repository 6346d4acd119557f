//! The proxies that the environment names, chosen as `huggingface_hub` and curl choose them.

use ureq::Proxy;
use ureq::http::Uri;

use super::client::transport_error_in_words;
use super::url::redacted;
use crate::DataError;

/// The proxies of this process.
#[derive(Clone, Default)]
pub(super) struct Proxies {
    http: Option<NamedProxy>,
    https: Option<NamedProxy>,
    /// Hosts that are reached without one.
    bypassed: Vec<String>,
}

/// A proxy, and the variable that names it.
#[derive(Clone)]
pub(super) struct NamedProxy {
    variable: String,
    /// Its address as messages show it, without user and password.
    address: String,
    url: String,
}

impl Proxies {
    /// Reads `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY`; their names in small letters take precedence.
    pub(super) fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let either = |name: &str| {
            let names = [name.to_owned(), name.to_ascii_uppercase()];
            let (name, value) = names.into_iter().find_map(|name| variable(&name).map(|value| (name, value)))?;
            Some((name, value.trim().to_owned())).filter(|(_, value)| !value.is_empty())
        };
        let of_scheme = |name| either(name).or_else(|| either("all_proxy")).map(NamedProxy::new);
        let bypassed = either("no_proxy").map_or_else(String::new, |(_, hosts)| hosts.to_ascii_lowercase());
        if bypassed == "*" {
            return Self::default();
        }
        let bypassed = bypassed.split(',').map(|host| host.trim().trim_start_matches(['*', '.']).to_owned());
        let bypassed = bypassed.filter(|host| !host.is_empty()).collect();
        Self { http: of_scheme("http_proxy"), https: of_scheme("https_proxy"), bypassed }
    }

    /// Returns the proxy by which a URL is reached.
    pub(super) fn of(&self, uri: &Uri) -> Option<&NamedProxy> {
        let host = uri.host()?.to_ascii_lowercase();
        let with_port = format!("{host}:{}", uri.port_u16().unwrap_or_default());
        let is_below =
            |host: &str, name: &str| host.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        if self.bypassed.iter().any(|name| is_below(&host, name) || is_below(&with_port, name)) {
            return None;
        }
        if uri.scheme_str() == Some("https") { self.https.as_ref() } else { self.http.as_ref() }
    }
}

impl NamedProxy {
    fn new((variable, value): (String, String)) -> Self {
        let url = if value.contains("://") { value } else { format!("http://{value}") };
        Self { variable, address: redacted(&url), url }
    }

    /// Returns the proxy for requests.
    ///
    /// # Errors
    /// [`DataError::HubSetting`] if its address is no URL of a proxy, or of a SOCKS proxy.
    pub(super) fn proxy(&self) -> Result<Proxy, DataError> {
        let setting = |problem: String| DataError::hub_setting(&self.variable, problem);
        if self.url.starts_with("socks") {
            return Err(setting(format!(
                "names the SOCKS proxy {}, and this program knows only http:// and https:// ones: name such a proxy, or \
                 unset {}",
                self.address, self.variable
            )));
        }
        Proxy::new(&self.url)
            .map_err(|_| setting(format!("is `{}`, which is not a proxy like http://host:3128", self.address)))
    }

    /// Describes an error of a request through the proxy.
    pub(super) fn explain(&self, error: &ureq::Error) -> String {
        let Self { variable, address, .. } = self;
        let mend = format!("correct or unset {variable}");
        match error {
            ureq::Error::ConnectProxyFailed(cause) => {
                format!("the proxy {address} that {variable} names refuses the connection ({cause}): {mend}")
            }
            ureq::Error::Io(_) | ureq::Error::HostNotFound | ureq::Error::Timeout(_) => {
                let error = transport_error_in_words(error);
                format!("the proxy {address} that {variable} names does not connect ({error}): {mend}")
            }
            error => format!("{error}, by the proxy {address} that {variable} names"),
        }
    }
}

impl std::fmt::Display for NamedProxy {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "the proxy {} that {} names", self.address, self.variable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::from_variables(|name| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_scheme_s_proxy_is_used_but_for_bypassed_hosts() {
        let some =
            [("HTTPS_PROXY", "http://u:secret@s:1"), ("ALL_PROXY", "a:2"), ("NO_PROXY", "localhost, .inside.org,h:80")];
        let proxy_of = |variables: &[(&str, &str)], url: &str| {
            proxies(variables).of(&url.parse().unwrap()).map(|proxy| (proxy.variable.clone(), proxy.address.clone()))
        };
        let proxy = |variable: &str, address: &str| Some((variable.to_owned(), address.to_owned()));
        assert_eq!(proxy_of(&some, "https://huggingface.co/x"), proxy("HTTPS_PROXY", "http://s:1"));
        assert_eq!(proxy_of(&some, "http://huggingface.co"), proxy("ALL_PROXY", "http://a:2"));
        for url in ["https://localhost", "http://a.inside.org", "https://inside.org", "http://h:80"] {
            assert_eq!(proxy_of(&some, url), None, "{url}");
        }
        assert!(proxy_of(&some, "http://h:81").is_some() && proxy_of(&some, "http://outside.org").is_some());
        assert_eq!(proxy_of(&[("https_proxy", ""), ("HTTPS_PROXY", "s:1")], "https://h"), None);
        assert_eq!(
            proxy_of(&[("https_proxy", "small:1"), ("HTTPS_PROXY", "s:1")], "https://h"),
            proxy("https_proxy", "http://small:1")
        );
        assert_eq!(proxy_of(&[("HTTPS_PROXY", "s:1"), ("no_proxy", "*")], "https://h"), None);
        assert_eq!(proxy_of(&[("HTTPS_PROXY", "s:1")], "http://h"), None);
    }

    #[test]
    fn addresses_that_are_no_proxy_are_refused_without_secrets() {
        for (value, word) in [
            ("socks5://u:secret@h:1", "SOCKS"),
            ("http://u:secret@", "not a proxy"),
            ("ftp://u:secret@h", "not a proxy"),
        ] {
            let proxies = proxies(&[("ALL_PROXY", value)]);
            let message = proxies.of(&"https://h".parse().unwrap()).unwrap().proxy().unwrap_err().to_string();
            assert!(
                message.starts_with("ALL_PROXY") && message.contains(word) && !message.contains("secret"),
                "{message}"
            );
        }
    }
}
