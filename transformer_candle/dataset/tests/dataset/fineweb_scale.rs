//! A data set of FineWeb's size: 24,000 shards of 1,000 row groups of 1,000 documents. Its listing, footers and row
//! groups are made as they are requested.

use std::sync::Arc;

use crate::fixtures::{open, parquet};
use crate::loopback_hub::{Content, LoopbackHub, Request};
use dataset::{Cursor, StreamSettings};
use parquet::file::metadata::{ParquetMetaDataBuilder, ParquetMetaDataReader, ParquetMetaDataWriter, RowGroupMetaData};

const FILES: usize = 24_000;
const GROUPS: usize = 1000;
const ROW_GROUP_ROWS: usize = 1000;
const OPEN_SHARDS: usize = 16;
/// Documents per window; the open shards divide them evenly.
const WINDOW: usize = 1024;
/// Tokens of a FineWeb document (3 KB of text) with GPT-2's tokenizer.
const TOKENS_PER_DOCUMENT: f64 = 700.0;

fn main_settings() -> StreamSettings {
    StreamSettings {
        sequence_length: 1024,
        shuffle_buffer_size: WINDOW,
        held_out_fraction: 0.001,
        open_shards: OPEN_SHARDS,
        workers: 4,
        epochs: None,
        ..StreamSettings::default()
    }
}

/// Words that do not compress to nothing, a quarter of FineWeb's length: a row group is fetched with one request up to
/// 4 MiB, so that longer documents would change no count.
fn documents() -> Vec<String> {
    let mut state = 1_u64;
    let mut word = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        format!("{:x} ", state >> 40)
    };
    (0..ROW_GROUP_ROWS).map(|_| (0..110).map(|_| word()).collect()).collect()
}

/// A file with one row group and its footer entry repeated.
fn file() -> Content {
    let one = parquet(&documents(), ROW_GROUP_ROWS);
    let metadata = ParquetMetaDataReader::new().parse_and_finish(&bytes::Bytes::from(one.clone())).unwrap();
    let group = metadata.row_group(0);
    let size: usize = group.columns().iter().map(|column| column.byte_range().1 as usize).sum();
    let groups = (0..GROUPS).map(|index| shifted(group, (index * size) as i64)).collect();
    let file = metadata.file_metadata();
    let repeated = ParquetMetaDataBuilder::new(file.clone()).set_row_groups(groups).build();
    let mut tail = Vec::new();
    ParquetMetaDataWriter::new(&mut tail, &repeated).finish().unwrap();
    let one = bytes::Bytes::from(one);
    Content { head: one.slice(..4), middle: one.slice(4..4 + size), times: GROUPS, tail: tail.into() }
}

fn shifted(group: &RowGroupMetaData, by: i64) -> RowGroupMetaData {
    let columns = group.columns().iter().map(|column| {
        let offset = column.data_page_offset() + by;
        column.clone().into_builder().set_data_page_offset(offset).build().unwrap()
    });
    let columns = columns.collect();
    RowGroupMetaData::builder(Arc::clone(&group.schema_descr_ptr()))
        .set_num_rows(group.num_rows())
        .set_total_byte_size(group.total_byte_size())
        .set_column_metadata(columns)
        .build()
        .unwrap()
}

fn fineweb() -> LoopbackHub {
    let file = file();
    let files = (0..FILES).map(|i| (format!("data/CC-{:03}/{i:05}.parquet", i / 250), file.clone()));
    LoopbackHub::serve_shared(files.collect())
}

fn resolved(requests: &[Request]) -> usize {
    requests.iter().filter(|request| request.path.contains("/resolve/")).count()
}

fn content(requests: &[Request]) -> usize {
    requests.iter().filter(|request| request.cdn).count()
}

/// Reads until `windows` more windows have come into use.
fn read_windows(stream: &mut dataset::TokenStream, windows: usize) {
    let mut window_count = 0;
    while window_count < windows {
        assert!(!stream.next_sequences(64).unwrap().is_empty());
        window_count += stream.opened_windows().count();
    }
}

#[test]
fn fineweb_streams_with_a_few_dozen_requests() {
    let hub = fineweb();
    let source = hub.source().unwrap();
    let requests = hub.take_requests();
    assert_eq!(source.describe().files, FILES as u64);
    assert!(source.describe().bytes > 10 << 40, "terabytes");
    assert_eq!(requests.len(), 2 + FILES / 1000, "the commit, the card, and one page per thousand files");

    // An open shard requests its signed URL, its footer and its row group; a second window is prefetched.
    let mut stream = open(&source, &main_settings(), None);
    assert_eq!(stream.next_sequences(64).unwrap().sequences(), 64);
    let first = hub.take_requests();
    assert!(resolved(&first) <= OPEN_SHARDS + 1, "{}", resolved(&first));
    assert!(content(&first) <= 2 * OPEN_SHARDS + 2, "{}", content(&first));

    // Sixteen windows later each open shard has reached its second row group.
    let windows = 1 + ROW_GROUP_ROWS * OPEN_SHARDS / WINDOW;
    read_windows(&mut stream, windows);
    let later = hub.take_requests();
    let documents = (windows * WINDOW) as f64;
    let five_minutes = 300.0 * 25_000.0 / TOKENS_PER_DOCUMENT;
    let requests = later.len() as f64 / documents * five_minutes;
    assert_eq!(resolved(&later), 0, "a signed address serves until it expires");
    assert!(content(&later) <= 2 * OPEN_SHARDS, "{}", content(&later));
    // The Hub allows anyone 500 requests for listings and 3,000 for files in five minutes; the CDN does not count.
    assert!(requests < 30.0, "{requests:.1} requests in five minutes");

    // Close to the end of the epoch.
    let mut cursor = serde_json::to_value(stream.cursor()).unwrap();
    drop(stream);
    let component = &mut cursor["components"][0];
    component["window"] = (FILES * GROUPS * ROW_GROUP_ROWS / WINDOW - 100).into();
    component["next_file"] = (FILES - 10).into();
    let slots = (0..OPEN_SHARDS).map(|slot| {
        serde_json::json!({"file": FILES - 10 - OPEN_SHARDS + slot, "group": GROUPS - 1, "row": ROW_GROUP_ROWS - WINDOW / OPEN_SHARDS - 7})
    });
    component["lanes"] = slots.collect();
    assert!(cursor.to_string().len() < 4096, "{} bytes", cursor.to_string().len());
    let cursor: Cursor = serde_json::from_value(cursor).unwrap();
    hub.take_requests();
    let mut resumed = open(&source, &main_settings(), Some(cursor));
    assert!(!resumed.next_sequences(64).unwrap().is_empty());
    assert_eq!(resumed.opened_windows().count(), 1, "one window is read again");
    drop(resumed);
    let resumed = hub.take_requests();
    // As at the beginning: the shards of the window, then those that the prefetched window opens.
    assert!(resolved(&resumed) <= OPEN_SHARDS + 10, "{}", resolved(&resumed));
    assert!(content(&resumed) <= 2 * (OPEN_SHARDS + 10), "{}", content(&resumed));
}
