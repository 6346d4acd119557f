//! Parquet files for tests: an optional text column between two others.

use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::properties::{WriterProperties, WriterVersion};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

pub(crate) struct ParquetOptions {
    pub codec: Compression,
    pub row_group_rows: usize,
    pub page_rows: usize,
    pub dictionary: bool,
    pub version_2: bool,
}

impl Default for ParquetOptions {
    fn default() -> Self {
        Self { codec: Compression::SNAPPY, row_group_rows: 100, page_rows: 20, dictionary: false, version_2: false }
    }
}

/// A Parquet file with columns `id`, `text` and `url`.
pub(crate) fn write_parquet(rows: &[Option<Vec<u8>>], options: &ParquetOptions) -> Vec<u8> {
    let schema = "message schema { required int64 id; optional binary text (UTF8); required binary url (UTF8); }";
    let properties = WriterProperties::builder()
        .set_compression(options.codec)
        .set_dictionary_enabled(options.dictionary)
        .set_data_page_row_count_limit(options.page_rows)
        .set_write_batch_size(options.page_rows)
        .set_writer_version(if options.version_2 { WriterVersion::PARQUET_2_0 } else { WriterVersion::PARQUET_1_0 })
        .build();
    let mut bytes = Vec::new();
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(&mut bytes, schema, Arc::new(properties)).unwrap();
    for (index, rows) in rows.chunks(options.row_group_rows).enumerate() {
        write_group(&mut writer, index * options.row_group_rows, rows);
    }
    writer.close().unwrap();
    bytes
}

fn write_group(writer: &mut SerializedFileWriter<&mut Vec<u8>>, first: usize, rows: &[Option<Vec<u8>>]) {
    let ids: Vec<i64> = (first..first + rows.len()).map(|id| id as i64).collect();
    let texts: Vec<ByteArray> = rows.iter().flatten().map(|text| text.clone().into()).collect();
    let present: Vec<i16> = rows.iter().map(|row| i16::from(row.is_some())).collect();
    let urls: Vec<ByteArray> = ids
        .iter()
        .map(|id| ByteArray::from(format!("https://example.org/{id}/{}", "page/".repeat(30)).as_str()))
        .collect();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&texts, Some(&present), None).unwrap();
    column.close().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&urls, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
}
