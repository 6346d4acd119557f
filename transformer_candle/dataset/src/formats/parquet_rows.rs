//! Conversations in Parquet: nested columns become the JSON of a row.
//!
//! Like the module `parquet`, it fetches only the columns that are read, in blocks. Records are assembled by the crate
//! `parquet`. A field that is null is left out, as trl advises: Parquet gives every object of a column the same fields,
//! so that null means that an object does not have the field. Only a `content` may be null.

use std::sync::Arc;

use parquet::bloom_filter::Sbbf;
use parquet::column::page::PageReader;
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::reader::RowGroupReader;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::record::reader::{ReaderIter, RowIter, TreeBuilder};
use parquet::record::{Field as Value, Row as Record};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};
use serde_json::{Map, Value as Json, json};

use super::parquet::{ChunkBytes, check_bounds, read_footer};
use super::{ReadingRules, Row, ShardReader};
use crate::DataError;
use crate::byte_source::ByteSource;

/// Rows decoded at a time.
const BATCH_ROWS: usize = 64;

pub(crate) struct ParquetConversations {
    source: Arc<dyn ByteSource>,
    metadata: ParquetMetaData,
    /// The columns that are read.
    schema: SchemaDescPtr,
    open: Option<ReaderIter>,
}

impl ParquetConversations {
    pub(crate) fn open(source: Arc<dyn ByteSource>, rules: &ReadingRules) -> Result<Self, DataError> {
        let metadata = read_footer(source.as_ref())?;
        let root = metadata.file_metadata().schema_descr().root_schema();
        let names: Vec<&str> = root.get_fields().iter().map(|field| field.name()).collect();
        if !rules.has_conversations(&names) {
            let columns = names.into_iter().map(str::to_owned).collect();
            return Err(DataError::NoConversations { file: source.name().to_owned(), columns });
        }
        let read = root.get_fields().iter().filter(|field| rules.is_conversation_column(field.name()));
        let schema = Type::group_type_builder(root.name()).with_fields(read.cloned().collect()).build();
        let schema = schema.map_err(DataError::decoding(source.name()))?;
        let schema = Arc::new(SchemaDescriptor::new(Arc::new(schema)));
        for row_group in metadata.row_groups() {
            let is_read = |path: &[String]| path.first().is_some_and(|name| rules.is_conversation_column(name));
            let mut read = row_group.columns().iter().filter(|chunk| is_read(chunk.column_path().parts()));
            read.try_for_each(|chunk| check_bounds(source.as_ref(), row_group, chunk))?;
        }
        Ok(Self { source, metadata, schema, open: None })
    }

    fn open_row_group(&self, index: usize) -> ParquetResult<ReaderIter> {
        let row_group = OpenRowGroup { source: &self.source, metadata: self.metadata.row_group(index) };
        TreeBuilder::new().with_batch_size(BATCH_ROWS).as_iter(Arc::clone(&self.schema), &row_group)
    }
}

impl ShardReader for ParquetConversations {
    fn row_groups(&self) -> Option<u64> {
        Some(self.metadata.num_row_groups() as u64)
    }

    fn seek(&mut self, row_group: u64, row: u64) -> Result<bool, DataError> {
        self.open = None;
        if row_group >= self.metadata.num_row_groups() as u64 {
            return Ok(false);
        }
        let open = self.open_row_group(row_group as usize);
        self.open = Some(open.map_err(DataError::decoding(self.source.name()))?);
        for _ in 0..row {
            if self.next_row()?.is_none() {
                break;
            }
        }
        Ok(true)
    }

    fn next_row(&mut self) -> Result<Option<Row>, DataError> {
        let Some(record) = self.open.as_mut().and_then(Iterator::next) else {
            return Ok(None);
        };
        let record = record.map_err(DataError::decoding(self.source.name()))?;
        let row = Json::Object(object(&record));
        Ok(Some(Row::from_bytes(row.to_string().into_bytes(), true)))
    }

    fn row_count(&mut self, row_group: u64) -> Result<Option<u64>, DataError> {
        let row_group = self.metadata.row_groups().get(row_group as usize);
        Ok(row_group.map(|row_group| row_group.num_rows().max(0) as u64))
    }
}

fn object(record: &Record) -> Map<String, Json> {
    let fields = record.get_column_iter().map(|(name, value)| (name.clone(), json_of(value)));
    fields.filter(|(name, value)| name == "content" || !value.is_null()).collect()
}

fn json_of(value: &Value) -> Json {
    match value {
        Value::Null => Json::Null,
        Value::Bool(value) => json!(value),
        Value::Byte(value) => json!(value),
        Value::Short(value) => json!(value),
        Value::Int(value) | Value::Date(value) | Value::TimeMillis(value) => json!(value),
        Value::Long(value)
        | Value::TimeMicros(value)
        | Value::TimestampMillis(value)
        | Value::TimestampMicros(value) => json!(value),
        Value::UByte(value) => json!(value),
        Value::UShort(value) => json!(value),
        Value::UInt(value) => json!(value),
        Value::ULong(value) => json!(value),
        Value::Float16(value) => json!(value.to_f32()),
        Value::Float(value) => json!(value),
        Value::Double(value) => json!(value),
        Value::Str(value) => json!(value),
        Value::Bytes(value) => json!(value.as_utf8().ok()),
        Value::Decimal(_) => json!(value.to_string()),
        Value::Group(record) => Json::Object(object(record)),
        Value::ListInternal(list) => list.elements().iter().map(json_of).collect(),
        Value::MapInternal(map) => {
            let name = |key: &Value| match key {
                Value::Str(name) => name.clone(),
                other => other.to_string(),
            };
            Json::Object(map.entries().iter().map(|(key, value)| (name(key), json_of(value))).collect())
        }
    }
}

/// The column chunks of a row group, each with a block of its own.
struct OpenRowGroup<'a> {
    source: &'a Arc<dyn ByteSource>,
    metadata: &'a RowGroupMetaData,
}

impl RowGroupReader for OpenRowGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.metadata
    }

    fn num_columns(&self) -> usize {
        self.metadata.num_columns()
    }

    fn get_column_page_reader(&self, column: usize) -> ParquetResult<Box<dyn PageReader>> {
        let chunk = self.metadata.column(column);
        let bytes = Arc::new(ChunkBytes::new(Arc::clone(self.source), chunk));
        let rows = self.metadata.num_rows().max(0) as usize;
        Ok(Box::new(SerializedPageReader::new(bytes, chunk, rows, None)?))
    }

    fn get_column_bloom_filter(&self, _: usize) -> Option<&Sbbf> {
        None
    }

    fn get_row_iter(&self, _: Option<Type>) -> ParquetResult<RowIter<'_>> {
        Err(ParquetError::NYI("rows are read by a ReaderIter".to_owned()))
    }
}
