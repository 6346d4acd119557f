//! The files of a source as a run reads them, where it has accepted others than it began with.
//!
//! A file keeps its place in the listing, so that what was consumed can be made again. What was added, files or the end
//! of a file, comes after all others and is read from a later epoch on; a file that was removed keeps its place, but is
//! not read from a window on.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use super::{DataSource, Location, Shard};
use crate::DataError;
use crate::byte_source::{ByteSource, LocalFile};
use crate::formats::{Compression, Format, is_array_start, read_head};
use crate::skipped_rows::is_zero;

/// A file of a run's listing, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilePart {
    /// The name of the file, as listed.
    pub name: String,
    /// The first byte of the part.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// The first epoch that reads the part.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epoch: u64,
    /// Epoch and window from which on a removed file is not read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removed: Option<(u64, u64)>,
}

impl FilePart {
    /// A file that is read as a whole, from the first epoch on.
    pub(crate) fn whole(name: &str, bytes: u64) -> Self {
        Self { name: name.to_owned(), offset: 0, bytes, epoch: 0, removed: None }
    }
}

impl DataSource {
    /// Returns the source that reads these parts, or the same one if there are none or it does so already. A file whose
    /// size is another than that of its parts has other shards than the run that recorded them.
    pub(crate) fn arranged(&self, parts: &[FilePart]) -> Self {
        let Location::Local(paths) = &self.listing.location else { return self.clone() };
        if parts.is_empty() || parts == self.listing.parts {
            return self.clone();
        }
        let listed = self.shards().iter().zip(paths);
        let by_name: HashMap<&str, (&Shard, &Option<PathBuf>)> =
            listed.clone().map(|file| (file.0.name.as_str(), file)).collect();
        let mut last_offsets: HashMap<&str, u64> = HashMap::new();
        for part in parts {
            let last = last_offsets.entry(&part.name).or_default();
            *last = part.offset.max(*last);
        }
        let mut arranged = Vec::with_capacity(parts.len());
        for FilePart { name, offset, bytes, epoch, removed } in parts {
            let listed_shard = by_name.get(name.as_str()).filter(|_| removed.is_none());
            let bytes = match listed_shard {
                Some((shard, _)) if last_offsets[name.as_str()] == *offset => shard.bytes.saturating_sub(*offset),
                Some(_) => *bytes,
                None => 0,
            };
            let format = listed_shard.map_or_else(|| Format::from_name(name), |(shard, _)| Some(shard.format));
            let format = format.unwrap_or(Format::Text);
            let shard = Shard { name: name.clone(), offset: *offset, bytes, epoch: *epoch, format };
            arranged.push((shard, listed_shard.and_then(|(_, path)| (*path).clone())));
        }
        let others = listed.filter(|(shard, _)| !last_offsets.contains_key(shard.name.as_str()));
        arranged.extend(others.map(|(shard, path)| (shard.clone(), path.clone())));
        let (shards, paths) = arranged.into_iter().unzip();
        let of = &self.listing;
        let splits = of.held_out_splits.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let listed = (shards, Location::Local(paths));
        let source = Self::new(of.name.clone(), &of.text_column, of.reading_version, listed, &self.cancel);
        source.with(|listing| {
            (listing.format, listing.skips_bad_files) = (of.format, of.skips_bad_files);
            (listing.parts, listing.notes) = (parts.to_vec(), of.notes.clone());
            listing.held_out_splits = Mutex::new(splits);
        })
    }

    /// The parts of files that are read, if they are not the files as listed.
    pub(crate) fn parts(&self) -> &[FilePart] {
        &self.listing.parts
    }

    /// Number of shards that were added to the listing and that an epoch reads.
    pub(crate) fn added_shards(&self, epoch: u64) -> usize {
        self.shards().iter().filter(|shard| (1..=epoch).contains(&shard.epoch)).count()
    }

    /// Whether a shard was removed, in whatever window.
    pub(crate) fn is_removed(&self, shard: usize) -> bool {
        self.parts().get(shard).is_some_and(|part| part.removed.is_some())
    }

    /// Whether a window, of an epoch, does not read a shard because it was removed.
    pub(crate) fn is_removed_at(&self, shard: usize, window: (u64, u64)) -> bool {
        self.parts().get(shard).and_then(|part| part.removed).is_some_and(|removed| removed <= window)
    }

    /// Returns the parts of the files as listed now, for a run that has read `parts`: what was added is read from
    /// `epoch` on, and what was removed is not read from `window` on.
    pub(crate) fn changed_parts(
        &self,
        parts: &[FilePart],
        epoch: u64,
        window: (u64, u64),
    ) -> Result<Vec<FilePart>, DataError> {
        let listed: HashMap<&str, usize> =
            (0..).zip(self.shards()).map(|(index, shard)| (shard.name.as_str(), index)).collect();
        let mut sizes: HashMap<&str, u64> = HashMap::new();
        for part in parts {
            *sizes.entry(&part.name).or_default() += part.bytes;
        }
        let (mut current_parts, mut appended) = (parts.to_vec(), Vec::new());
        for part in current_parts.iter_mut().filter(|part| part.removed.is_none()) {
            let was = sizes[part.name.as_str()];
            match listed.get(part.name.as_str()) {
                None => part.removed = Some(window),
                // Only the last part of a file can have changed.
                Some(_) if part.offset + part.bytes < was => {}
                Some(&shard) => {
                    let is = self.shards()[shard].bytes;
                    if is > was && self.is_appended(shard, was)? {
                        appended.push(FilePart { offset: was, epoch, ..FilePart::whole(&part.name, is - was) });
                    } else {
                        part.bytes = is.saturating_sub(part.offset);
                    }
                }
            }
        }
        let names: HashSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        let added = self.shards().iter().filter(|shard| !names.contains(shard.name.as_str()));
        let added = added.map(|shard| FilePart { epoch, ..FilePart::whole(&shard.name, shard.bytes) });
        current_parts.extend(appended.into_iter().chain(added));
        Ok(current_parts)
    }

    /// Whether what follows the first `length` bytes of a file can be read as rows of its own: lines of a format whose
    /// row groups can be read alone.
    fn is_appended(&self, shard: usize, length: u64) -> Result<bool, DataError> {
        let (file, Location::Local(paths)) = (&self.shards()[shard], &self.listing.location) else {
            return Ok(false);
        };
        let Some(path) = &paths[shard] else { return Ok(false) };
        if length == 0 || !matches!(file.format, Format::Text | Format::Jsonl(Compression::None)) {
            return Ok(false);
        }
        let source = LocalFile::open(&file.name, path, (0, file.bytes), &self.cancel)?;
        let is_line_end = source.read(length - 1, 1)?[..] == *b"\n";
        let is_array = file.format != Format::Text && is_array_start(&read_head(&source)?);
        Ok(is_line_end && !is_array)
    }
}
