use super::*;
use crate::byte_source::testing::MemoryFile;
use crate::formats::parquet_fixture::{ParquetOptions, write_parquet};
use crate::formats::testing::{all_rows, rest_of_group, texts};

fn open(bytes: Vec<u8>) -> ParquetFile {
    ParquetFile::open(MemoryFile::new(bytes, 1 << 20), "text").unwrap()
}

fn documents(count: usize) -> Vec<Option<Vec<u8>>> {
    (0..count).map(|i| Some(format!("document {i} {}", "word ".repeat(i % 50)).into_bytes())).collect()
}

fn as_strings(rows: &[Option<Vec<u8>>]) -> Vec<&str> {
    rows.iter().flatten().map(|row| str::from_utf8(row).unwrap()).collect()
}

#[test]
fn every_codec_page_size_and_version_reads_back() {
    let rows = documents(500);
    for codec in ["UNCOMPRESSED", "SNAPPY", "GZIP(6)", "BROTLI(1)", "ZSTD(1)", "LZ4_RAW"] {
        for (page_rows, dictionary, version_2) in [(17, true, false), (1000, false, true)] {
            let options =
                ParquetOptions { codec: codec.parse().unwrap(), row_group_rows: 130, page_rows, dictionary, version_2 };
            let mut file = open(write_parquet(&rows, &options));
            let read = all_rows(&mut file);
            assert_eq!(read.iter().map(Vec::len).collect::<Vec<_>>(), [130, 130, 130, 110], "{codec}");
            assert_eq!(texts(&read), as_strings(&rows), "{codec}");
        }
    }
}

#[test]
fn only_the_text_column_of_the_row_group_is_read() {
    let rows = documents(4000);
    let bytes = write_parquet(&rows, &ParquetOptions { row_group_rows: 1000, ..ParquetOptions::default() });
    let total = bytes.len() as u64;
    for preferred in [64, 1 << 20] {
        let source = MemoryFile::new(bytes.clone(), preferred);
        let mut file = ParquetFile::open(Arc::clone(&source) as _, "text").unwrap();
        let footer = source.bytes_read();
        assert!(footer <= 64 << 10);
        assert!(file.seek(2, 0).unwrap());
        assert_eq!(rest_of_group(&mut file).len(), 1000);
        let (_, length) = file.row_groups[2].chunk.byte_range();
        assert_eq!(source.bytes_read() - footer, length);
        assert!(length < total / 6, "{length} of {total}");
    }
}

#[test]
fn any_row_can_be_seeked() {
    let rows = documents(300);
    let mut file = open(write_parquet(&rows, &ParquetOptions { row_group_rows: 200, ..ParquetOptions::default() }));
    let read = all_rows(&mut file);
    for (row_group, row) in [(0, 0), (0, 63), (0, 64), (0, 199), (0, 200), (1, 99), (1, 100)] {
        assert!(file.seek(row_group, row).unwrap());
        assert_eq!(rest_of_group(&mut file), read[row_group as usize][row as usize..]);
    }
    assert!(!file.seek(2, 0).unwrap());
    assert_eq!((file.row_count(1).unwrap(), file.row_count(2).unwrap()), (Some(100), None));
}

#[test]
fn long_documents_are_decoded_a_megabyte_at_a_time() {
    let long = vec![Some(vec![b'x'; 300 << 10]); 40];
    for (rows, decoded) in [(documents(100), 64), (long, 3)] {
        let mut file = open(write_parquet(&rows, &ParquetOptions::default()));
        assert!(file.seek(0, 0).unwrap());
        assert!(file.next_row().unwrap().is_some());
        assert_eq!(file.open.as_ref().unwrap().decoded.len(), decoded - 1);
        assert_eq!(rest_of_group(&mut file).len(), rows.len() - 1);
    }
}

#[test]
fn skipped_rows_keep_their_positions() {
    let rows = [Some(b"a".to_vec()), None, Some(Vec::new()), Some(vec![0xc3]), Some(b"b".to_vec()), None];
    let mut file = open(write_parquet(&rows, &ParquetOptions::default()));
    let read = all_rows(&mut file);
    let skipped = |reason| Row::Skipped(reason);
    assert_eq!(read[0][1..4], [skipped(SkipReason::Null), skipped(SkipReason::Empty), skipped(SkipReason::NotUtf8)]);
    assert_eq!(read[0][5], skipped(SkipReason::Null));
    assert_eq!(texts(&read), ["a", "b"]);
}

#[test]
fn a_missing_text_column_lists_the_available_ones() {
    let bytes = write_parquet(&documents(3), &ParquetOptions::default());
    let error = ParquetFile::open(MemoryFile::new(bytes, 100), "body").err().unwrap();
    let message = error.to_string();
    assert!(message.contains("`body`") && message.contains("text, url") && message.contains("--text-column"));
}

#[test]
fn corruption_never_panics() {
    let bytes = write_parquet(&documents(200), &ParquetOptions::default());
    let read = |bytes: Vec<u8>| -> Result<u64, DataError> {
        let mut file = ParquetFile::open(MemoryFile::new(bytes, 100), "text")?;
        let mut rows = 0;
        for row_group in 0..file.row_groups.len() as u64 {
            file.seek(row_group, 0)?;
            while file.next_row()?.is_some() {
                rows += 1;
            }
        }
        Ok(rows)
    };
    for cut in [0, 3, 11, 100, bytes.len() / 2, bytes.len() - 1] {
        assert!(read(bytes[..cut].to_vec()).is_err(), "cut at {cut}");
    }
    for position in (0..bytes.len()).step_by(7) {
        let mut bytes = bytes.clone();
        bytes[position] ^= 0x55;
        let _ = read(bytes);
    }
}
