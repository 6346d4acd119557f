//! Documents in listing order.

use crate::{DataError, DataSource};

/// The documents of a source in listing order, one at a time.
pub struct Documents {}

impl Documents {
    /// Starts at the first document; stops after `max_samples` rows.
    pub fn open(_source: &DataSource, _max_samples: Option<u64>) -> Result<Self, DataError> {
        unimplemented!()
    }
}

impl Iterator for Documents {
    type Item = Result<String, DataError>;
    fn next(&mut self) -> Option<Self::Item> {
        unimplemented!()
    }
}
