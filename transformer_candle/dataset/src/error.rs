//! Everything that can go wrong between a data set's name and a batch.

use std::path::PathBuf;

/// Why data cannot be read. Each message names the file, URL or key and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A local file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}
