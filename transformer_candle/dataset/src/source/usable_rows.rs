//! Whether the rows of a source can be used at all, and what to say where they cannot.

use std::sync::PoisonError;

use run_config::{DataFormat, grouped};

use super::{DataSource, MAX_SHARDS_PROBED};
use crate::cancel::CancelToken;
use crate::error::MissingColumn;
use crate::{DataError, SkippedRows};

impl DataSource {
    /// Fails if rows are skipped because the first shard with fields lacks the columns that are read.
    pub(crate) fn check_columns(&self, skipped: SkippedRows, cancel: &CancelToken) -> Result<(), DataError> {
        match self.listing.format {
            DataFormat::Text if skipped.null + skipped.malformed > 0 => match self.missing_column(cancel)? {
                Some(missing) => Err(DataError::MissingColumn(missing)),
                None => Ok(()),
            },
            DataFormat::Chat if skipped.not_conversation > 0 => self.check_conversations(cancel),
            _ => Ok(()),
        }
    }

    /// Returns a notice, once for a shard, that none of the rows that were read of it can be used.
    pub(crate) fn unusable_notice(&self, shard: usize, skipped: SkippedRows, cancel: &CancelToken) -> Option<String> {
        let mut told = self.listing.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        if skipped.total() == 0 || !told.insert(shard) {
            return None;
        }
        let lacks_text = skipped.null + skipped.malformed > 0;
        let fields =
            if lacks_text { self.open(shard, cancel).and_then(|mut file| file.fields()) } else { Ok(Vec::new()) };
        let texts = fields.unwrap_or_default().into_iter().filter(|field| field.non_string_type.is_none());
        let texts: Vec<String> = texts.map(|field| field.name).collect();
        let columns =
            if texts.is_empty() { String::new() } else { format!("; its text columns are {}", texts.join(", ")) };
        let (name, rows) = (&self.shards()[shard].name, grouped(skipped.total()));
        Some(format!("no row of {name} can be used: of {rows} that were read, {skipped}{columns}"))
    }

    fn check_conversations(&self, cancel: &CancelToken) -> Result<(), DataError> {
        for (index, file) in self.shards().iter().enumerate().take(MAX_SHARDS_PROBED) {
            let Some(mut reader) = self.open_intact(index, cancel)? else { continue };
            let columns: Vec<String> = reader.fields()?.into_iter().map(|field| field.name).collect();
            let names: Vec<&str> = columns.iter().map(String::as_str).collect();
            if !columns.is_empty() {
                let found = self.rules().has_conversations(&names);
                return if found {
                    Ok(())
                } else {
                    Err(DataError::NoConversations { file: file.name.clone(), columns })
                };
            }
        }
        Ok(())
    }

    fn missing_column(&self, cancel: &CancelToken) -> Result<Option<MissingColumn>, DataError> {
        for (index, file) in self.shards().iter().enumerate().take(MAX_SHARDS_PROBED) {
            let Some(mut reader) = self.open_intact(index, cancel)? else { continue };
            let fields = reader.fields()?;
            if !fields.is_empty() {
                let named = fields.iter().find(|field| field.name == self.text_column());
                let found = named.map(|field| field.non_string_type);
                let available = fields.iter().filter(|field| field.non_string_type.is_none());
                // The first rows alone are without text, as far as can be seen.
                let is_present = match found {
                    Some(None) => true,
                    Some(Some("null")) => available.clone().next().is_none(),
                    _ => false,
                };
                return Ok((!is_present).then(|| MissingColumn {
                    file: file.name.clone(),
                    column: self.text_column().to_owned(),
                    found: found.flatten(),
                    available: available.map(|field| field.name.clone()).collect(),
                }));
            }
        }
        Ok(None)
    }
}
