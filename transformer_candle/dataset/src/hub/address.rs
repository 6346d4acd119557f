//! Addresses and ranges as HTTP headers write them.

use ureq::http::Uri;

/// `bytes 5-9/100` as first, last, total.
pub(super) fn content_range(value: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, total) = value.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then(|| (first, last, total.parse().ok()))
}

/// The address of `rel="next"` in a `Link` header.
pub(super) fn next_link(value: &str) -> Option<String> {
    let next = value.split(',').find(|link| link.contains("rel=\"next\""))?;
    Some(next.split_once('<')?.1.split_once('>')?.0.to_owned())
}

/// Where a redirect from `base` leads; none if that is no address of the web.
pub(super) fn absolute(base: &Uri, target: &str) -> Option<String> {
    if target.starts_with("http://") || target.starts_with("https://") {
        return Some(target.to_owned());
    }
    let path = target.strip_prefix('/').filter(|path| !path.starts_with('/'))?;
    Some(format!("{}://{}/{path}", base.scheme_str()?, base.authority()?))
}

/// Scheme, host and port: what decides who may see the token.
pub(super) fn origin(uri: &Uri) -> (Option<&str>, Option<String>, Option<u16>) {
    let port = uri.port_u16().or(match uri.scheme_str() {
        Some("https") => Some(443),
        Some("http") => Some(80),
        _ => None,
    });
    (uri.scheme_str(), uri.host().map(str::to_ascii_lowercase), port)
}

/// An address for messages: signatures and other secrets are in the query.
pub(super) fn shown(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_understood_or_refused() {
        assert_eq!(content_range("bytes 5-9/100"), Some((5, 9, Some(100))));
        assert_eq!(content_range("bytes 5-9/*"), Some((5, 9, None)));
        assert_eq!(content_range("bytes */100"), None);
        assert_eq!(content_range("bytes 9-5/100"), None);
        let link = "<http://h/p?a=1>; rel=\"prev\", <http://h/p?cursor=x>; rel=\"next\"";
        assert_eq!(next_link(link).as_deref(), Some("http://h/p?cursor=x"));
        assert_eq!(next_link("<http://h/p>; rel=\"last\""), None);
    }

    #[test]
    fn a_redirect_may_be_relative_to_the_host() {
        let base = "https://h:8/a/b?c".parse().unwrap();
        assert_eq!(absolute(&base, "/x?y").as_deref(), Some("https://h:8/x?y"));
        assert_eq!(absolute(&base, "http://o/x").as_deref(), Some("http://o/x"));
        assert_eq!((absolute(&base, "//o/x"), absolute(&base, "ftp://o")), (None, None));
    }
}
