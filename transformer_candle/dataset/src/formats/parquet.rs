//! Parquet without Arrow: reads the footer, then only the text column of the row groups that are needed.
//!
//! Only one entry per row group is kept of the footer. A column chunk is fetched in blocks as its pages are decoded, so
//! that a reader holds one block, one page and a few rows however large the row group is. Page checksums are verified
//! where the file has them.

use std::collections::VecDeque;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Buf, Bytes};
use parquet::basic::{LogicalType, Type as PhysicalType};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::metadata::{
    ColumnChunkMetaData, FooterTail, ParquetMetaData, ParquetMetaDataOptions, ParquetMetaDataReader,
    ParquetStatisticsPolicy, RowGroupMetaData,
};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::ColumnDescPtr;

use super::{Row, ShardReader};
use crate::DataError;
use crate::byte_source::{ByteSource, RangeReader};
use crate::error::MissingColumn;
use crate::skipped_rows::SkipReason;

/// Rows decoded at a time; fewer if they hold more text than [`MAX_BATCH_BYTES`].
const MAX_BATCH_ROWS: u64 = 64;
const MAX_BATCH_BYTES: u64 = 1 << 20;
/// Bytes that are fetched before a page header is parsed.
const PAGE_HEADER_BYTES: u64 = 4096;

pub(crate) struct ParquetFile {
    source: Arc<dyn ByteSource>,
    column: ColumnDescPtr,
    /// Whether the column has the type null, which is what pandas writes for a column without a value.
    all_null: bool,
    row_groups: Vec<RowGroup>,
    open: Option<OpenRowGroup>,
}

struct RowGroup {
    rows: u64,
    chunk: ColumnChunkMetaData,
}

struct OpenRowGroup {
    /// `None` if the column has the type null.
    reader: Option<ColumnReaderImpl<ByteArrayType>>,
    rows_left: u64,
    rows_per_batch: u64,
    decoded: VecDeque<Row>,
}

impl ParquetFile {
    pub(crate) fn open(source: Arc<dyn ByteSource>, text_column: &str) -> Result<Self, DataError> {
        let metadata = read_footer(source.as_ref())?;
        let (index, column) = find_column(&metadata, source.name(), text_column)?;
        let row_groups = metadata.row_groups().iter().map(|row_group| {
            let chunk = row_group.column(index);
            check_bounds(source.as_ref(), row_group, chunk)?;
            Ok(RowGroup { rows: row_group.num_rows() as u64, chunk: chunk.clone() })
        });
        let row_groups = row_groups.collect::<Result<_, _>>()?;
        let all_null = is_null(&column);
        Ok(Self { source, column, all_null, row_groups, open: None })
    }

    fn open_row_group(&self, row_group: &RowGroup) -> Result<OpenRowGroup, ParquetError> {
        let reader = if self.all_null {
            None
        } else {
            let bytes = ChunkBytes::new(Arc::clone(&self.source), &row_group.chunk);
            let pages = SerializedPageReader::new(Arc::new(bytes), &row_group.chunk, row_group.rows as usize, None)?;
            Some(ColumnReaderImpl::new(Arc::clone(&self.column), Box::new(pages)))
        };
        Ok(OpenRowGroup {
            reader,
            rows_left: row_group.rows,
            rows_per_batch: rows_per_batch(row_group.rows, row_group.chunk.uncompressed_size()),
            decoded: VecDeque::new(),
        })
    }
}

impl ShardReader for ParquetFile {
    fn row_groups(&self) -> Option<u64> {
        Some(self.row_groups.len() as u64)
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        self.open = None;
        let Some(row_group) = self.row_groups.get(row_group as usize) else {
            return Ok(false);
        };
        let row = row.min(row_group.rows);
        let mut open = self.open_row_group(row_group).map_err(DataError::decoding(self.source.name()))?;
        if row > 0 {
            if let Some(reader) = &mut open.reader {
                reader.skip_records(row as usize).map_err(DataError::decoding(self.source.name()))?;
            }
            open.rows_left -= row;
        }
        self.open = Some(open);
        Ok(true)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        let Some(open) = &mut self.open else {
            return Ok(None);
        };
        if open.decoded.is_empty() && open.rows_left > 0 {
            let max_level = self.column.max_def_level();
            open.decode(max_level).map_err(DataError::decoding(self.source.name()))?;
            if open.decoded.is_empty() {
                return Err(corrupted(self.source.as_ref(), "a row group has fewer rows than the footer says"));
            }
        }
        Ok(open.decoded.pop_front())
    }

    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        Ok(self.row_groups.get(row_group as usize).map(|row_group| row_group.rows))
    }
}

impl OpenRowGroup {
    /// Decodes the next rows; a row whose definition level is below `max_level` is null.
    fn decode(&mut self, max_level: i16) -> Result<(), ParquetError> {
        let mut levels: Vec<i16> = Vec::new();
        let mut values: Vec<ByteArray> = Vec::new();
        let row_count = self.rows_per_batch.min(self.rows_left) as usize;
        let Some(reader) = &mut self.reader else {
            self.rows_left -= row_count as u64;
            self.decoded.extend((0..row_count).map(|_| Row::Skipped(SkipReason::Null)));
            return Ok(());
        };
        let (rows, _, _) = reader.read_records(row_count, Some(&mut levels), None, &mut values)?;
        self.rows_left -= rows as u64;
        let mut values = values.into_iter();
        for row in 0..rows {
            // A column that cannot be null has no levels.
            let null = levels.get(row).is_some_and(|&level| level < max_level);
            let value = if null { None } else { values.next() };
            self.decoded.push_back(match value {
                Some(value) => Row::from_bytes(value.data().to_vec(), true),
                None => Row::Skipped(SkipReason::Null),
            });
        }
        Ok(())
    }
}

/// Returns the number of rows of a row group to decode at a time.
fn rows_per_batch(rows: u64, bytes: i64) -> u64 {
    let row_bytes = u64::try_from(bytes).unwrap_or(0).checked_div(rows).unwrap_or(0);
    MAX_BATCH_BYTES.checked_div(row_bytes).unwrap_or(MAX_BATCH_ROWS).clamp(1, MAX_BATCH_ROWS)
}

/// Checks that a column chunk is inside the file.
pub(super) fn check_bounds(
    source: &dyn ByteSource,
    row_group: &RowGroupMetaData,
    chunk: &ColumnChunkMetaData,
) -> Result<(), DataError> {
    let start = chunk.dictionary_page_offset().unwrap_or_else(|| chunk.data_page_offset());
    let inside =
        start >= 0 && chunk.compressed_size() >= 0 && start as u64 + chunk.compressed_size() as u64 <= source.length();
    if inside && row_group.num_rows() >= 0 {
        return Ok(());
    }
    Err(corrupted(source, "a row group is outside the file"))
}

/// Reads the footer, almost always with one read: it has about a kilobyte per row group, and row groups of a few
/// megabytes are usual.
pub(super) fn read_footer(source: &dyn ByteSource) -> Result<ParquetMetaData, DataError> {
    const TAIL: usize = 8;
    let length = source.length();
    if length < 12 {
        return Err(corrupted(source, "it is too short to be Parquet"));
    }
    let guess = (length / 1024).clamp(64 << 10, 4 << 20).min(length) as usize;
    let mut end = source.read(length - guess as u64, guess)?;
    let tail = FooterTail::try_from(&end[guess - TAIL..])
        .map_err(|_| corrupted(source, "it does not end like a Parquet file (truncated, or another format)"))?;
    if tail.is_encrypted_footer() {
        return Err(corrupted(source, "it is encrypted"));
    }
    let footer_bytes = tail.metadata_length() + TAIL;
    if footer_bytes as u64 > length {
        return Err(corrupted(source, "its footer is longer than the file"));
    }
    if footer_bytes > guess {
        end = source.read(length - footer_bytes as u64, footer_bytes)?;
    }
    let footer = &end[end.len() - footer_bytes..end.len() - TAIL];
    let options = ParquetMetaDataOptions::new()
        .with_column_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_size_stats_policy(ParquetStatisticsPolicy::SkipAll)
        .with_encoding_stats_policy(ParquetStatisticsPolicy::SkipAll);
    ParquetMetaDataReader::decode_metadata_with_options(footer, Some(&options))
        .map_err(DataError::decoding(source.name()))
}

fn find_column(metadata: &ParquetMetaData, file: &str, text_column: &str) -> Result<(usize, ColumnDescPtr), DataError> {
    let schema = metadata.file_metadata().schema_descr();
    let texts: Vec<(usize, &ColumnDescPtr)> = schema
        .columns()
        .iter()
        .enumerate()
        .filter(|(_, column)| column.physical_type() == PhysicalType::BYTE_ARRAY && column.max_rep_level() == 0)
        .collect();
    let nulls =
        schema.columns().iter().enumerate().filter(|(_, column)| is_null(column) && column.max_rep_level() == 0);
    // The path of a field of a struct is `column.field`.
    let path = |column: &ColumnDescPtr| column.path().string() == text_column;
    let match_column = texts.iter().copied().chain(nulls).find(|(_, column)| path(column));
    if let Some((index, column)) = match_column {
        return Ok((index, Arc::clone(column)));
    }
    let is_below = |rest: &str| rest.is_empty() || rest.starts_with('.');
    let other_column =
        schema.columns().iter().find(|column| column.path().string().strip_prefix(text_column).is_some_and(is_below));
    Err(DataError::MissingColumn(MissingColumn {
        file: file.to_owned(),
        column: text_column.to_owned(),
        value_type: other_column.map(describe_type),
        available: texts.iter().map(|(_, column)| column.path().string()).collect(),
    }))
}

/// Whether a column has the type null.
fn is_null(column: &ColumnDescPtr) -> bool {
    matches!(column.logical_type_ref(), Some(LogicalType::Unknown))
}

/// Describes the type of a column that does not hold strings, in words.
fn describe_type(column: &ColumnDescPtr) -> &'static str {
    match column.physical_type() {
        _ if column.max_rep_level() > 0 => "lists",
        _ if column.path().parts().len() > 1 => "objects (a struct)",
        _ if is_null(column) => "null",
        PhysicalType::BOOLEAN => "booleans",
        PhysicalType::INT32 | PhysicalType::INT64 | PhysicalType::INT96 => "integers",
        PhysicalType::FLOAT | PhysicalType::DOUBLE => "numbers",
        PhysicalType::BYTE_ARRAY | PhysicalType::FIXED_LEN_BYTE_ARRAY => "bytes",
    }
}

fn corrupted(source: &dyn ByteSource, message: &str) -> DataError {
    DataError::Format { file: source.name().to_owned(), message: message.to_owned() }
}

/// The bytes of one column chunk, fetched in blocks: pages are read in order, so that one block serves many.
pub(super) struct ChunkBytes {
    source: Arc<dyn ByteSource>,
    end: u64,
    block: Mutex<Block>,
}

#[derive(Default)]
struct Block {
    start: u64,
    bytes: Bytes,
}

impl ChunkBytes {
    pub(super) fn new(source: Arc<dyn ByteSource>, chunk: &ColumnChunkMetaData) -> Self {
        let (start, length) = chunk.byte_range();
        Self { source, end: start + length, block: Mutex::default() }
    }

    /// Returns at least `length` bytes from `start`, as many as are buffered. Forward reading fetches no byte twice.
    fn read_at_least(&self, start: u64, length: usize) -> Result<Bytes, DataError> {
        if start + length as u64 > self.end {
            return Err(corrupted(self.source.as_ref(), "a page extends beyond its column"));
        }
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let skip = start.checked_sub(block.start).filter(|&skip| skip <= block.bytes.len() as u64);
        let buffered = skip.map_or_else(Bytes::new, |skip| block.bytes.slice(skip as usize..));
        if buffered.len() >= length {
            return Ok(buffered);
        }
        let target_length = (length as u64).max(self.source.preferred_read_size()).min(self.end - start) as usize;
        let more = self.source.read(start + buffered.len() as u64, target_length - buffered.len())?;
        let bytes = if buffered.is_empty() { more } else { [buffered, more].concat().into() };
        *block = Block { start, bytes: bytes.clone() };
        Ok(bytes)
    }
}

impl Length for ChunkBytes {
    fn len(&self) -> u64 {
        self.source.length()
    }
}

impl ChunkReader for ChunkBytes {
    type T = std::io::Chain<bytes::buf::Reader<Bytes>, RangeReader>;

    /// Returns a reader for a page header, which fits into [`PAGE_HEADER_BYTES`] unless it has unusual statistics.
    fn get_read(&self, start: u64) -> parquet::errors::Result<Self::T> {
        let remaining = self.end.saturating_sub(start);
        let first = self.read_at_least(start, remaining.min(PAGE_HEADER_BYTES) as usize)?;
        let rest = RangeReader::new(Arc::clone(&self.source), start + first.len() as u64, self.end);
        Ok(first.reader().chain(rest))
    }

    fn get_bytes(&self, start: u64, length: usize) -> parquet::errors::Result<Bytes> {
        Ok(self.read_at_least(start, length)?.slice(..length))
    }
}

#[cfg(test)]
mod tests;
