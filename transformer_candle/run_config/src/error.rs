//! Errors of a config: every problem of a file at once, each with its key and the way out.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// Everything that is wrong with one config file. Displays one line per problem.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    /// The file, where the config came from one.
    pub file: Option<PathBuf>,
    /// The problems, in the order of the schema. Never empty.
    pub problems: Vec<Problem>,
}

/// One problem of a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The key, such as `optimizer.learning_rate`; empty where the whole file is meant.
    pub path: String,
    /// What is wrong, with the offending value.
    pub message: String,
    /// The option of the command line that the value was given by, where it was: `--override`, or a flag that stands
    /// for the key.
    pub given_by: Option<String>,
    /// The way out, where there is a definite one.
    pub suggestion: Option<String>,
}

impl Problem {
    /// A problem of the key `path`.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), given_by: None, suggestion: None }
    }

    /// A problem of the file as a whole.
    pub fn of_file(message: impl Into<String>) -> Self {
        Self::new("", message)
    }

    /// Formats the problem of a key of a JSON file as a sentence: "`rope_theta` is 0.5; it must be greater than 1".
    pub fn sentence(&self) -> String {
        if self.path.is_empty() { self.message.clone() } else { format!("`{}` {}", self.path, self.message) }
    }

    /// Returns the problem with a way out.
    #[must_use]
    pub fn suggest(mut self, suggestion: impl Into<String>) -> Self {
        self.suggestion = Some(suggestion.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        if !self.path.is_empty() {
            write!(formatter, "{}: ", self.path)?;
        }
        formatter.write_str(&self.message)?;
        if let Some(option) = &self.given_by {
            write!(formatter, " (given by {option})")?;
        }
        match &self.suggestion {
            Some(suggestion) => write!(formatter, "; {suggestion}"),
            None => Ok(()),
        }
    }
}

impl ConfigError {
    /// An error with these problems in `file`.
    pub(crate) fn new(file: Option<&Path>, problems: Vec<Problem>) -> Self {
        Self { file: file.map(Path::to_path_buf), problems }
    }

    /// Returns the error for a command line on which flags stand for keys: `flags` has the flag of a key, such as
    /// `--seed` for `runtime.seed`, which a problem of that key then names instead of `--override`.
    #[must_use]
    pub fn naming(mut self, flags: &BTreeMap<String, String>) -> Self {
        for problem in &mut self.problems {
            if let (Some(option), Some(flag)) = (&mut problem.given_by, flags.get(&problem.path)) {
                option.clone_from(flag);
            }
        }
        self
    }

    /// An error with one problem.
    pub(crate) fn one(file: &Path, problem: Problem) -> Self {
        Self::new(Some(file), vec![problem])
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        let file = self.file.as_ref().map_or_else(|| "the config".to_owned(), |file| file.display().to_string());
        if let [problem] = self.problems.as_slice() {
            return write!(formatter, "{file}: {problem}");
        }
        write!(formatter, "{file}: {} problems", self.problems.len())?;
        for problem in &self.problems {
            write!(formatter, "\n  {problem}")?;
        }
        Ok(())
    }
}
