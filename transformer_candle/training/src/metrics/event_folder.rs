//! Which event files of a folder a run has written, wherever it lies and whatever its directory is called by now.
//!
//! A folder inside the run's directory holds no other run's files, so that every file of this program is the run's. In
//! a folder that several runs share, those whose names end with the name of the run's directory are.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use run_config::regular_file;

use super::tfrecord::{self, Event, EventPayload};
use crate::atomic_file::{self, is_number, staged_name};

/// The writer in the first record of this program's event files.
pub(super) const WRITER: &str = "transformer_candle";
const PREFIX: &str = "events.out.tfevents.";
/// Tags that a step's event has together. Other writers make an event of each.
const TAGS_OF_A_STEP: [&str; 2] = ["loss/train", "learning_rate"];

/// An event file that the run has written before.
#[derive(Debug)]
pub(super) struct EarlierFile {
    pub(super) path: PathBuf,
    /// Its events, up to the first record that is truncated or corrupted.
    pub(super) events: Vec<Event>,
}

/// Returns the run's event files, oldest first, and removes what its killed writers left.
pub(super) fn take_over(folder: &Path, run_directory: &Path) -> io::Result<Vec<EarlierFile>> {
    let (end, is_own) = (ending(run_directory), is_inside(folder, run_directory));
    let is_of_run = |name: &str| has_our_form(name) && (is_own || name.ends_with(&end));
    // Earlier versions called the staging file `rewound`.
    let is_leftover = |name: &str| staged_name(name).is_some_and(|name| name == "rewound" || is_of_run(name));
    atomic_file::remove_leftovers(folder, is_leftover);
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !is_of_run(&name) {
            continue;
        }
        let has_name_of_run = name.ends_with(&end);
        let events = match regular_file::read(&path) {
            Ok(bytes) => tfrecord::read(&bytes),
            Err(error) if has_name_of_run => return Err(error),
            Err(_) => continue,
        };
        if is_ours(&events, has_name_of_run) {
            files.push(EarlierFile { path, events });
        }
    }
    // Their names begin with the time.
    files.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(files)
}

/// Returns an unused path, named as TensorBoard does: `events.out.tfevents.<seconds>.<host>.<process>.<count>.<run>`.
pub(super) fn unused_path(folder: &Path, run_directory: &Path, seconds: u64) -> PathBuf {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (process, end) = (std::process::id(), ending(run_directory));
    (0..u32::MAX)
        .map(|count| folder.join(format!("{PREFIX}{seconds:010}.{host}.{process}.{count}{end}")))
        .find(|path| !path.exists())
        .expect("some number is not used")
}

/// Returns what the names of a run's event files end with.
fn ending(run_directory: &Path) -> String {
    format!(".{}", run_directory.file_name().unwrap_or_default().to_string_lossy())
}

fn is_inside(folder: &Path, run_directory: &Path) -> bool {
    match (folder.canonicalize(), run_directory.canonicalize()) {
        (Ok(folder), Ok(run_directory)) => folder.starts_with(run_directory),
        _ => false,
    }
}

/// Whether a name has the form that [`unused_path`] gives. Host and run may contain dots.
fn has_our_form(name: &str) -> bool {
    let Some(parts) = name.strip_prefix(PREFIX).map(|rest| rest.split('.').collect::<Vec<_>>()) else { return false };
    let (Some(seconds), Some(behind_host)) = (parts.first(), parts.get(2..)) else { return false };
    is_number(seconds) && behind_host.windows(3).any(|parts| is_number(parts[0]) && is_number(parts[1]))
}

/// Whether this program wrote a file with these events. Earlier versions named no writer; their files are known by the
/// name of the run, or by an event of a step.
fn is_ours(events: &[Event], has_name_of_run: bool) -> bool {
    let Some((Event { what: Some(EventPayload::FileVersion(_)), source_metadata, .. }, rest)) = events.split_first()
    else {
        return false;
    };
    match source_metadata {
        Some(metadata) => metadata.writer == WRITER,
        None => has_name_of_run || rest.iter().any(is_of_step),
    }
}

fn is_of_step(event: &Event) -> bool {
    let Some(EventPayload::Summary(summary)) = &event.what else { return false };
    TAGS_OF_A_STEP.into_iter().all(|tag| summary.value.iter().any(|value| value.tag == tag))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::tfrecord::{SourceMetadata, Summary, Value, record};

    const FILE: &str = "events.out.tfevents.0000000001.host.42.0";

    /// Writes an event file with the named writer and one event that has all `tags`.
    fn write(path: &Path, writer: Option<&str>, tags: &[&str]) {
        let header = Event {
            what: Some(EventPayload::FileVersion("brain.Event:2".to_owned())),
            source_metadata: writer.map(|writer| SourceMetadata { writer: writer.to_owned() }),
            ..Event::default()
        };
        let value = tags.iter().map(|tag| Value::scalar((*tag).to_owned(), 1.0)).collect();
        let event = Event { step: 1, what: Some(EventPayload::Summary(Summary { value })), ..Event::default() };
        fs::write(path, [record(&header), record(&event)].concat()).unwrap();
    }

    fn taken_over(folder: &Path, run_directory: &Path) -> Vec<String> {
        let files = take_over(folder, run_directory).unwrap();
        files.iter().map(|file| file.path.extension().unwrap().to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn files_of_other_writers_are_not_the_runs() {
        let run = tempfile::tempdir().unwrap();
        let demo = run.path().join("demo");
        let folder = demo.join("tensorboard");
        fs::create_dir_all(&folder).unwrap();
        for (end, writer, tags) in [
            ("former", Some(WRITER), &["loss/validation"][..]),
            ("older", None, &TAGS_OF_A_STEP),
            ("single", None, &["loss/train"]),
            ("torch", Some("tensorboard.summary.writer.event_file_writer"), &TAGS_OF_A_STEP),
            ("demo", Some("tensorboard.summary.writer.event_file_writer"), &TAGS_OF_A_STEP),
        ] {
            write(&folder.join(format!("{FILE}.{end}")), writer, tags);
        }
        write(&folder.join(FILE), Some(WRITER), &["loss/validation"]);
        assert_eq!(taken_over(&folder, &demo), ["former", "older"]);
    }

    #[test]
    fn a_shared_folder_keeps_the_files_of_other_runs() {
        let root = tempfile::tempdir().unwrap();
        for end in ["demo", "other"] {
            write(&root.path().join(format!("{FILE}.{end}")), Some(WRITER), &TAGS_OF_A_STEP);
            fs::write(root.path().join(format!(".{FILE}.{end}.tmp-42")), "half").unwrap();
        }
        fs::create_dir(root.path().join("demo")).unwrap();
        assert_eq!(taken_over(root.path(), &root.path().join("demo")), ["demo"]);
        assert!(!root.path().join(format!(".{FILE}.demo.tmp-42")).exists());
        assert!(root.path().join(format!(".{FILE}.other.tmp-42")).exists());
    }

    #[test]
    fn staging_files_of_a_killed_writer_are_removed() {
        let run = tempfile::tempdir().unwrap();
        let leftovers = [".rewound.tmp-42".to_owned(), format!(".{FILE}.former.tmp-42")];
        let other_file = format!(".{FILE}.tmp-42");
        leftovers.iter().chain([&other_file]).for_each(|name| fs::write(run.path().join(name), "half").unwrap());
        take_over(run.path(), run.path()).unwrap();
        assert!(leftovers.iter().all(|name| !run.path().join(name).exists()));
        assert!(run.path().join(other_file).exists());
    }

    #[test]
    fn hosts_and_runs_may_contain_dots() {
        for name in ["1.host.42.0.demo", "1.host.example.org.42.0.demo", "1.host.42.0.v1.2", "1.10.42.0.7"] {
            assert!(has_our_form(&format!("{PREFIX}{name}")), "{name}");
        }
        for name in ["1.host", "1.host.42.0", "1.host.demo", "x.host.42.0.demo"] {
            assert!(!has_our_form(&format!("{PREFIX}{name}")), "{name}");
        }
    }
}
