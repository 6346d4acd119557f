//! Whether the rows of a source can be used at all, and what to say where they cannot.

use std::sync::PoisonError;

use run_config::{DataFormat, grouped};

use super::{DataSource, MAX_SHARDS_PROBED};
use crate::error::MissingColumn;
use crate::formats::Field;
use crate::{DataError, SkippedRows};

impl DataSource {
    /// Fails if rows are skipped because the first shard with fields lacks the columns that are read.
    pub(crate) fn check_columns(&self, skipped: SkippedRows) -> Result<(), DataError> {
        let is_checked = match self.listing.format {
            DataFormat::Text => skipped.null + skipped.malformed > 0,
            DataFormat::Chat => skipped.not_conversation > 0,
        };
        let first = if is_checked { self.first_fields()? } else { None };
        let Some((file, fields)) = first else { return Ok(()) };
        match self.listing.format {
            DataFormat::Text => match self.missing_column(file, &fields) {
                Some(column) => Err(DataError::MissingColumn(column)),
                None => Ok(()),
            },
            DataFormat::Chat => {
                let columns: Vec<String> = fields.into_iter().map(|field| field.name).collect();
                let names: Vec<&str> = columns.iter().map(String::as_str).collect();
                let has_conversations = self.rules().has_conversations(&names);
                if has_conversations {
                    Ok(())
                } else {
                    Err(DataError::NoConversations { file: file.to_owned(), columns })
                }
            }
        }
    }

    /// Returns a notice, once for a shard, that none of the rows that were read of it can be used.
    pub(crate) fn unusable_notice(&self, shard: usize, skipped: SkippedRows) -> Option<String> {
        let mut reported_shards = self.listing.unusable.lock().unwrap_or_else(PoisonError::into_inner);
        if skipped.total() == 0 || !reported_shards.insert(shard) {
            return None;
        }
        let lacks_text = skipped.null + skipped.malformed > 0;
        let fields = if lacks_text { self.open(shard).and_then(|mut file| file.fields()) } else { Ok(Vec::new()) };
        let texts = fields.unwrap_or_default().into_iter().filter(|field| field.non_string_type.is_none());
        let texts: Vec<String> = texts.map(|field| field.name).collect();
        let columns =
            if texts.is_empty() { String::new() } else { format!("; its text columns are {}", texts.join(", ")) };
        let (name, rows) = (&self.shards()[shard].name, grouped(skipped.total()));
        Some(format!("no row of {name} can be used: of {rows} that were read, {skipped}{columns}"))
    }

    /// Returns the name and the fields of the first shard that has some.
    fn first_fields(&self) -> Result<Option<(&str, Vec<Field>)>, DataError> {
        for (index, shard) in self.shards().iter().enumerate().take(MAX_SHARDS_PROBED) {
            let Some(mut reader) = self.open_intact(index)? else { continue };
            let fields = reader.fields()?;
            if !fields.is_empty() {
                return Ok(Some((&shard.name, fields)));
            }
        }
        Ok(None)
    }

    fn missing_column(&self, file: &str, fields: &[Field]) -> Option<MissingColumn> {
        let field = fields.iter().find(|field| field.name == self.text_column());
        let value_type = field.map(|field| field.non_string_type);
        let available = fields.iter().filter(|field| field.non_string_type.is_none());
        // The first rows alone are without text, as far as can be seen.
        let is_present = match value_type {
            Some(None) => true,
            Some(Some("null")) => available.clone().next().is_none(),
            _ => false,
        };
        (!is_present).then(|| MissingColumn {
            file: file.to_owned(),
            column: self.text_column().to_owned(),
            value_type: value_type.flatten(),
            available: available.map(|field| field.name.clone()).collect(),
        })
    }
}
