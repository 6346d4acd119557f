//! `metrics.jsonl`: one JSON object per line.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;

use dataset::AppendFile;
use run_config::regular_file;
use serde::{Deserialize, Serialize};

use super::MetricsSink;
use crate::report::{EndReport, Record};
use crate::{Result, TrainerError, atomic_file};

#[derive(Serialize)]
struct Line<'a> {
    kind: &'a str,
    #[serde(flatten)]
    record: &'a Record,
}

/// Opens the file, keeping the lines up to the step `rewind_to`; empty without it.
pub(super) fn open(path: &Path, rewind_to: Option<u64>) -> Result<MetricsSink> {
    let outcome =
        atomic_file::replace_with(path, |output| rewind_to.map_or(Ok(()), |step| copy_lines(path, output, step)));
    let file = outcome.and_then(|file| AppendFile::from_file(path, file)).map_err(TrainerError::io("write", path))?;
    Ok(MetricsSink { file, encode: line })
}

/// Returns a record as a whole line.
fn line(record: &Record) -> Vec<u8> {
    let mut line = serde_json::to_vec(&Line { kind: record.kind, record }).expect("records are plain values");
    line.push(b'\n');
    line
}

/// Copies the complete lines up to a step, without the ends of earlier sessions, which an uninterrupted run has not
/// written. Drops later steps and a line that a kill or a power loss truncated.
fn copy_lines(path: &Path, output: &mut impl Write, last_step: u64) -> io::Result<()> {
    #[derive(Deserialize)]
    struct Position {
        #[serde(default)]
        kind: String,
        step: u64,
    }
    let mut reader = match regular_file::open(path) {
        Ok(file) => BufReader::new(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        let is_kept = |Position { kind, step }| step <= last_step && kind != EndReport::KIND;
        if line.ends_with(b"\n") && serde_json::from_slice(&line).is_ok_and(is_kept) {
            output.write_all(&line)?;
        }
        line.clear();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn record(step: u64) -> Record {
        Record::new("train", step)
    }

    fn file_bytes(path: &Path) -> Vec<u8> {
        let mut lines = open(path, None).unwrap();
        for step in 1..=3 {
            lines.record(&record(step));
        }
        fs::read(path).unwrap()
    }

    #[test]
    fn rewinding_drops_a_truncated_last_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let bytes = file_bytes(&path);
        let two_lines = bytes.len() / 3 * 2;
        for torn in two_lines..bytes.len() {
            fs::write(&path, &bytes[..torn]).unwrap();
            drop(open(&path, Some(3)).unwrap());
            assert_eq!(fs::read(&path).unwrap(), bytes[..two_lines], "torn at {torn}");
        }
    }

    #[test]
    fn rewinding_appends_after_the_step() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        file_bytes(&path);
        open(&path, Some(1)).unwrap().record(&record(2));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"kind\":\"train\",\"step\":1}\n{\"kind\":\"train\",\"step\":2}\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn rewinding_drops_the_end_of_an_earlier_session() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let bytes = file_bytes(&path);
        let end = EndReport { step: 3, reason: "stopped by SIGINT".to_owned(), exit_code: None };
        open(&path, Some(3)).unwrap().record(&end.record());
        assert!(fs::read_to_string(&path).unwrap().ends_with("\"step\":3,\"reason\":\"stopped by SIGINT\"}\n"));
        drop(open(&path, Some(3)).unwrap());
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }

    #[test]
    fn a_missing_file_starts_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        drop(open(&path, Some(5)).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"");
    }
}
