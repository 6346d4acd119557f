//! The access token, from where `huggingface_hub` takes it.

use std::fmt;
use std::path::{Path, PathBuf};

use run_config::regular_file;

use super::settings::is_true;
use crate::cache_folder::user_cache_folder;

/// The page on which tokens are made.
const SETTINGS_PAGE: &str = "https://huggingface.co/settings/tokens";
/// The variables that may hold a token, in their order; the second is the former name of the first.
const VARIABLES: [&str; 2] = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];

/// An access token of the Hub, and where it comes from. `Debug` shows only the latter.
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken {
    secret: String,
    origin: TokenOrigin,
}

/// Where a token comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenOrigin {
    /// An environment variable.
    Variable(&'static str),
    /// A file that `hf auth login` has written, and the name of the token in the list beside it.
    File {
        /// The file.
        path: PathBuf,
        /// The token's name.
        name: Option<String>,
    },
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AccessToken").field("origin", &self.origin).finish_non_exhaustive()
    }
}

impl fmt::Display for TokenOrigin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Variable(name) => write!(formatter, "in {name}"),
            Self::File { path, name: Some(name) } => write!(formatter, "`{name}` in {}", path.display()),
            Self::File { path, name: None } => write!(formatter, "in {}", path.display()),
        }
    }
}

impl TokenOrigin {
    /// Returns what to do about a token that the Hub does not accept.
    pub fn remedy(&self) -> String {
        match self {
            Self::Variable(name) => {
                format!("set {name} to one from {SETTINGS_PAGE}, or unset it: public data need none")
            }
            Self::File { .. } => {
                "`hf auth login` stores another, `hf auth logout` removes it: public data need none".to_owned()
            }
        }
    }
}

impl AccessToken {
    /// Returns a token.
    pub fn new(secret: impl Into<String>, origin: TokenOrigin) -> Self {
        Self { secret: secret.into(), origin }
    }

    pub(super) fn secret(&self) -> &str {
        &self.secret
    }

    /// Where it comes from.
    pub fn origin(&self) -> &TokenOrigin {
        &self.origin
    }

    /// Finds the token of this process, as `huggingface_hub.get_token` does: `HF_TOKEN`, else its former name
    /// `HUGGING_FACE_HUB_TOKEN`, else the file `HF_TOKEN_PATH`, else `token` in `HF_HOME`. None with
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`.
    pub fn from_environment() -> Option<Self> {
        Self::find(|name| std::env::var(name).ok(), |path| regular_file::read_to_string(path).ok())
    }

    fn find(variable: impl Fn(&str) -> Option<String>, read: impl Fn(&Path) -> Option<String>) -> Option<Self> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        if variable("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value)) {
            return None;
        }
        let variable_value = VARIABLES.iter().find_map(|name| Some((*name, variable(name)?)));
        if let Some((name, secret)) =
            variable_value.map(|(name, value)| (name, cleaned(&value))).filter(|(_, secret)| !secret.is_empty())
        {
            return Some(Self::new(secret, TokenOrigin::Variable(name)));
        }
        let path = token_path(&variable);
        let secret = cleaned(&read(&path)?);
        let name = read(&path.with_file_name("stored_tokens")).and_then(|stored| name_of(&stored, &secret));
        (!secret.is_empty()).then(|| Self::new(secret, TokenOrigin::File { path, name }))
    }
}

fn cleaned(token: &str) -> String {
    token.replace(['\r', '\n'], "").trim().to_owned()
}

fn token_path(variable: &impl Fn(&str) -> Option<String>) -> PathBuf {
    match (variable("HF_TOKEN_PATH"), variable("HF_HOME")) {
        (Some(path), _) => expanded(&path, variable),
        (None, Some(home)) => expanded(&home, variable).join("token"),
        (None, None) => user_cache_folder().join("huggingface/token"),
    }
}

/// Replaces a leading `~` by the home folder, and `$NAME` and `${NAME}` by variables, as Python's `os.path` does.
fn expanded(path: &str, variable: &impl Fn(&str) -> Option<String>) -> PathBuf {
    let below_home = path.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'));
    let path = below_home.and_then(|rest| Some(variable("HOME")? + rest)).unwrap_or_else(|| path.to_owned());
    let mut parts = path.split('$');
    let mut expansion = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_name = |character: char| character.is_ascii_alphanumeric() || character == '_';
        let (name, rest) = match part.strip_prefix('{').and_then(|braced| braced.split_once('}')) {
            Some(braced) => braced,
            None => part.split_at(part.find(|character| !is_name(character)).unwrap_or(part.len())),
        };
        match variable(name) {
            Some(value) => expansion.extend([value.as_str(), rest]),
            None => expansion.extend(["$", part]),
        }
    }
    PathBuf::from(expansion)
}

/// Returns the name under which `hf auth login` has stored a token: a section of an INI file.
fn name_of(stored: &str, secret: &str) -> Option<String> {
    let mut section = None;
    for line in stored.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            section = Some(name);
        } else if line.split_once('=').is_some_and(|(key, value)| key.trim() == "hf_token" && value.trim() == secret) {
            return section.map(str::to_owned);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The token that is found with these variables, where every file `token` holds `hf_stored`.
    fn token_of(variables: &[(&str, &str)]) -> Option<(String, String)> {
        let variable =
            |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
        let read = |path: &Path| match path.file_name()?.to_str()? {
            "token" => Some("hf_stored\n".to_owned()),
            "stored_tokens" => Some("[laptop]\nhf_token = hf_stored\n[other]\nhf_token = hf_other\n".to_owned()),
            _ => None,
        };
        AccessToken::find(variable, read).map(|token| (token.secret.clone(), token.origin.to_string()))
    }

    #[test]
    fn tokens_come_from_where_huggingface_hub_takes_them() {
        let home = ("HF_HOME", "/hf");
        let own = |secret: &str, origin: &str| Some((secret.to_owned(), origin.to_owned()));
        assert_eq!(token_of(&[home, ("HF_TOKEN", " hf_a\r\n")]), own("hf_a", "in HF_TOKEN"));
        assert_eq!(token_of(&[home, ("HUGGING_FACE_HUB_TOKEN", "hf_b")]), own("hf_b", "in HUGGING_FACE_HUB_TOKEN"));
        assert_eq!(token_of(&[("HF_TOKEN", "hf_a"), ("HUGGING_FACE_HUB_TOKEN", "hf_b")]), own("hf_a", "in HF_TOKEN"));
        assert_eq!(token_of(&[home, ("HF_TOKEN", "")]), own("hf_stored", "`laptop` in /hf/token"));
        assert_eq!(
            token_of(&[("HOME", "/me"), ("HF_HOME", "~/$X/${Y}z"), ("X", "x"), ("Y", "y")]),
            own("hf_stored", "`laptop` in /me/x/yz/token")
        );
        assert_eq!(token_of(&[home, ("HF_TOKEN_PATH", "/other/token")]), own("hf_stored", "`laptop` in /other/token"));
        assert_eq!(token_of(&[home, ("HF_TOKEN_PATH", "/none")]), None);
        assert_eq!(token_of(&[home, ("HF_TOKEN", "hf_a"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")]), None);
    }

    #[test]
    fn debug_output_hides_the_token() {
        let text = format!("{:?}", AccessToken::new("hf_secret", TokenOrigin::Variable("HF_TOKEN")));
        assert!(text.contains("HF_TOKEN") && !text.contains("hf_secret"), "{text}");
    }
}
