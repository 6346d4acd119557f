//! Glob patterns over absolute paths.

use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};

use crate::DataError;

/// Characters that make a name a glob.
pub(super) const GLOB_CHARACTERS: [char; 4] = ['*', '?', '[', '{'];

/// A glob over absolute paths. The default one matches everything.
#[derive(Default)]
pub(super) struct Glob {
    /// The deepest folder above everything that can match.
    pub folder: PathBuf,
    whole: Option<GlobMatcher>,
    /// `prefixes[i]` must match a folder's path of `i + 1` components if anything below it can match. Ends at the first
    /// `**`, or where a part is no valid glob.
    prefixes: Vec<GlobMatcher>,
}

impl Glob {
    /// Compiles a pattern that is relative to `base`. Folders at its start that exist are names, whatever characters they
    /// have.
    pub(super) fn new(pattern: &str, base: &Path) -> Result<Self, DataError> {
        let bad = |error: globset::Error| DataError::Pattern {
            pattern: pattern.to_owned(),
            message: error.kind().to_string(),
        };
        // Without `.` components, as in the paths that are found.
        let parts = Path::new(pattern).components().filter(|part| !matches!(part, Component::CurDir));
        let parts: PathBuf = parts.collect();
        let mut folder = base.to_owned();
        let mut rest = parts.components();
        while let Some(part) = rest.clone().next() {
            let below = folder.join(part);
            let is_plain = !part.as_os_str().to_string_lossy().contains(GLOB_CHARACTERS);
            let is_last = rest.clone().nth(1).is_none();
            if is_last || !(is_plain || below.is_dir()) {
                break;
            }
            (folder, _) = (below, rest.next());
        }
        let glob = Path::new(&globset::escape(&folder.to_string_lossy())).join(rest.as_path());
        let matcher = |glob: &Path| {
            let built = GlobBuilder::new(&glob.to_string_lossy()).literal_separator(true).build();
            built.map(|glob| glob.compile_matcher())
        };
        let whole = matcher(&glob).map_err(bad)?;
        let mut prefix = PathBuf::new();
        let parts = glob.components().take_while(|part| !part.as_os_str().to_string_lossy().contains("**"));
        // Half of an alternative that contains a separator is not a valid glob: from there on folders are not filtered.
        let prefixes = parts.map_while(|part| {
            prefix.push(part);
            matcher(&prefix).ok()
        });
        Ok(Self { folder, prefixes: prefixes.collect(), whole: Some(whole) })
    }

    pub(super) fn matches(&self, path: &Path) -> bool {
        self.whole.as_ref().is_none_or(|whole| whole.is_match(path))
    }

    /// Whether anything below a folder can match.
    pub(super) fn may_match_below(&self, folder: &Path) -> bool {
        self.prefixes.get(folder.components().count() - 1).is_none_or(|prefix| prefix.is_match(folder))
    }

    /// Number of the glob's components that a folder's path has matched; what it matches below depends on this alone.
    pub(super) fn pattern_depth(&self, folder: &Path) -> usize {
        folder.components().count().min(self.prefixes.len())
    }
}
