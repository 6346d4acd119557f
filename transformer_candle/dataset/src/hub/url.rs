//! URLs and HTTP headers.

use ureq::http::Uri;

/// Parses `bytes 5-9/100` as first, last, total.
pub(super) fn parse_content_range(value: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then(|| (first, last, total.parse().ok()))
}

/// Returns the URL of `rel="next"` in a `Link` header.
pub(super) fn parse_next_link(value: &str) -> Option<String> {
    let next = value.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// Returns the target of a redirect from `base`; `None` if it is not an HTTP URL.
pub(super) fn resolve_redirect(base: &Uri, target: &str) -> Option<String> {
    if target.starts_with("http://") || target.starts_with("https://") {
        return Some(target.to_owned());
    }
    let path = target.strip_prefix('/').filter(|path| !path.starts_with('/'))?;
    Some(format!("{}://{}/{path}", base.scheme_str()?, base.authority()?))
}

/// Returns scheme, host and port of a URL, which decide whether it may be sent the token.
pub(super) fn origin(uri: &Uri) -> (Option<&str>, Option<String>, Option<u16>) {
    let port = uri.port_u16().or(match uri.scheme_str() {
        Some("https") => Some(443),
        Some("http") => Some(80),
        _ => None,
    });
    (uri.scheme_str(), uri.host().map(str::to_ascii_lowercase), port)
}

/// Returns a URL for messages, without its query, which may hold a signature or a key, and without user and password.
pub fn redacted(url: &str) -> String {
    let plain = url.split(['?', '#']).next().unwrap_or_default();
    let Some((scheme, rest)) = plain.split_once("://") else {
        return plain.to_owned();
    };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let host = authority.rsplit('@').next().unwrap_or_default();
    format!("{scheme}://{host}{path}")
}

/// Splits user and password from an endpoint. They end at the last `@`, so that a password that is not percent-encoded
/// is recognised as well.
pub(super) fn split_credentials(endpoint: &str) -> (String, Option<String>) {
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("", endpoint));
    let separator = if scheme.is_empty() { "" } else { "://" };
    match rest.rsplit_once('@') {
        Some((user, host)) => (format!("{scheme}{separator}{host}"), Some(user.to_owned())),
        None => (endpoint.to_owned(), None),
    }
}

/// Returns a URL with `user`, which may be `user:password`, before its host; `None` if that is not a valid URL.
pub(super) fn with_credentials(uri: &Uri, user: &str) -> Option<Uri> {
    let mut parts = uri.clone().into_parts();
    let host = parts.authority.as_ref()?.as_str().rsplit('@').next()?;
    parts.authority = Some(format!("{user}@{host}").parse().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_parsed_or_rejected() {
        assert_eq!(parse_content_range("bytes 5-9/100"), Some((5, 9, Some(100))));
        assert_eq!(parse_content_range("bytes 5-9/*"), Some((5, 9, None)));
        assert_eq!(parse_content_range("bytes */100"), None);
        assert_eq!(parse_content_range("bytes 9-5/100"), None);
        let link = "<http://h/p?a=1>; rel=\"prev\", <http://h/p?cursor=x>; rel=\"next\"";
        assert_eq!(parse_next_link(link).as_deref(), Some("http://h/p?cursor=x"));
        assert_eq!(parse_next_link("<http://h/p>; rel=\"last\""), None);
    }

    #[test]
    fn credentials_are_redacted() {
        assert_eq!(redacted("https://u:p@h:8/a@b/c?sig=x"), "https://h:8/a@b/c");
        assert_eq!(redacted("https://h/a"), "https://h/a");
        let parted = |endpoint| split_credentials(endpoint);
        assert_eq!(parted("https://u:p@h:8/hub"), ("https://h:8/hub".to_owned(), Some("u:p".to_owned())));
        assert_eq!(parted("https://u:p/a@b@h"), ("https://h".to_owned(), Some("u:p/a@b".to_owned())));
        assert_eq!(parted("u:p@h"), ("h".to_owned(), Some("u:p".to_owned())));
        assert_eq!(parted("https://h"), ("https://h".to_owned(), None));
        let uri = "https://h:8/a?b".parse().unwrap();
        assert_eq!(with_credentials(&uri, "u:p").unwrap().to_string(), "https://u:p@h:8/a?b");
        assert_eq!(with_credentials(&uri, "u p"), None);
    }

    #[test]
    fn redirects_may_be_relative_to_the_host() {
        let base = "https://h:8/a/b?c".parse().unwrap();
        assert_eq!(resolve_redirect(&base, "/x?y").as_deref(), Some("https://h:8/x?y"));
        assert_eq!(resolve_redirect(&base, "http://o/x").as_deref(), Some("http://o/x"));
        assert_eq!((resolve_redirect(&base, "//o/x"), resolve_redirect(&base, "ftp://o")), (None, None));
    }
}
