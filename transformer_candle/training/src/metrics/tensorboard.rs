//! `tensorboard/`: one event file per run, in TensorBoard's format.
//!
//! A resume writes a new file with the events it keeps and removes the earlier ones, so that TensorBoard shows each
//! step once, also if it is running meanwhile.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use dataset::AppendFile;

use super::sink::MetricsSink;
use super::tfrecord::{self, Event, EventPayload, Summary, Value};
use crate::atomic_file::{self, staged_name};
use crate::report::{Record, Scalar};
use crate::{Result, TrainerError};

/// The open event file.
#[derive(Debug)]
pub(super) struct EventFile {
    file: AppendFile,
}

impl MetricsSink for EventFile {
    /// Opens an event file for a run with its events up to the step `rewind_to`, without it empty. Other runs may have
    /// files in the same folder.
    fn open(folder: &Path, run: &str, rewind_to: Option<u64>) -> Result<Self> {
        fs::create_dir_all(folder).map_err(TrainerError::io("create", folder))?;
        atomic_file::remove_leftovers(folder, |name| is_leftover(name, run));
        let earlier = event_files(folder, run).map_err(TrainerError::io("read", folder))?;
        let events = match rewind_to {
            Some(step) => kept(&earlier, step).map_err(TrainerError::io("rewind", folder))?,
            None => Vec::new(),
        };
        let path = unused_name(folder, run);
        let written = atomic_file::replace_with(&path, |writer| write_all(writer, &events));
        let file =
            written.and_then(|file| AppendFile::from_file(&path, file)).map_err(TrainerError::io("write", &path))?;
        for file in &earlier {
            fs::remove_file(file).map_err(TrainerError::io("remove", file))?;
        }
        Ok(Self { file })
    }

    /// Appends an event with all curves of the record whose values are known, and its text; none if it has neither.
    fn record(&mut self, record: &Record) {
        let mut values = curves(record);
        values.extend(record.shown.iter().map(|shown| Value::text(&shown.tag, &literal(&shown.text))));
        if values.is_empty() {
            return;
        }
        let summary = Summary { value: values };
        let event = Event { wall_time: now(), step: record.step as i64, what: Some(EventPayload::Summary(summary)) };
        self.file.append(&tfrecord::record(&event));
    }

    fn flush(&mut self) {
        self.file.sync();
    }

    fn take_notices(&mut self) -> Vec<String> {
        self.file.take_notices()
    }
}

/// Returns the values of a record that are curves; a component's have its name appended to their tags.
fn curves(record: &Record) -> Vec<Value> {
    let whole = record.scalars.iter().map(|scalar| (scalar, None));
    let components = record.components.iter();
    let of_components =
        components.flat_map(|component| component.scalars.iter().map(|scalar| (scalar, Some(&component.name))));
    let curve = |(scalar, component): (&Scalar, Option<&String>)| {
        let (tag, value) = (scalar.tag?, scalar.value?);
        let tag = component.map_or_else(|| tag.to_owned(), |name| format!("{tag}/{name}"));
        Some(Value::scalar(tag, value.as_f64() as f32))
    };
    whole.chain(of_components).filter_map(curve).collect()
}

/// Converts text to Markdown that shows it unchanged: the text dashboard renders Markdown, where indented lines are
/// code.
fn literal(text: &str) -> String {
    text.lines().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

/// Returns the run's event files, oldest first: their names begin with the time and end with the run.
fn event_files(folder: &Path, run: &str) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if is_event_file(&path.file_name().unwrap_or_default().to_string_lossy(), run) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a killed writer of this run left a file of this name (`rewound` in earlier versions).
fn is_leftover(name: &str, run: &str) -> bool {
    staged_name(name).is_some_and(|name| name == "rewound" || is_event_file(name, run))
}

fn is_event_file(name: &str, run: &str) -> bool {
    name.starts_with("events.out.tfevents.") && name.ends_with(&format!(".{run}"))
}

/// Returns the events up to a step, each once where several files have it. Within one file a step may have several
/// events of a kind.
fn kept(files: &[PathBuf], last_step: u64) -> io::Result<Vec<Event>> {
    let mut seen = HashSet::new();
    let mut events = Vec::new();
    for file in files {
        let mut seen_here = HashSet::new();
        for event in tfrecord::read(&fs::read(file)?) {
            let Some(EventPayload::Summary(summary)) = &event.what else {
                continue;
            };
            let Some(first) = summary.value.first() else {
                continue;
            };
            let name = (event.step, first.tag.clone());
            if event.step <= last_step as i64 && !seen.contains(&name) {
                seen_here.insert(name);
                events.push(event);
            }
        }
        seen.extend(seen_here);
    }
    Ok(events)
}

fn write_all(writer: &mut impl Write, events: &[Event]) -> io::Result<()> {
    let version =
        Event { wall_time: now(), step: 0, what: Some(EventPayload::FileVersion("brain.Event:2".to_owned())) };
    std::iter::once(&version).chain(events).try_for_each(|event| writer.write_all(&tfrecord::record(event)))
}

/// Returns an unused path, named as TensorBoard does: `events.out.tfevents.<seconds>.<host>.<process>.<count>.<run>`.
fn unused_name(folder: &Path, run: &str) -> PathBuf {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let (seconds, process) = (now() as u64, std::process::id());
    (0..u32::MAX)
        .map(|count| folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{count}.{run}")))
        .find(|path| !path.exists())
        .expect("some number is not used")
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// Returns (step, tags) of every event of a folder, as TensorBoard shows them.
#[cfg(test)]
pub(super) fn steps_and_tags(folder: &Path) -> Vec<(i64, Vec<String>)> {
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "one run, one event file");
    let events = tfrecord::read(&fs::read(&files[0]).unwrap());
    assert!(matches!(events[0].what, Some(EventPayload::FileVersion(_))));
    let summaries = events.into_iter().filter_map(|event| match event.what {
        Some(EventPayload::Summary(summary)) => {
            Some((event.step, summary.value.into_iter().map(|value| value.tag).collect()))
        }
        _ => None,
    });
    summaries.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duplicate_and_truncated_events_are_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::open(folder.path(), "demo", None).unwrap();
        for step in 1..=5 {
            let loss = Scalar { key: "loss", tag: Some("loss/train"), value: Some(1.0_f64.into()) };
            events.record(&Record { scalars: vec![loss], ..Record::new("train", step) });
        }
        // What a kill between writing the rewound file and removing the earlier one leaves, with a truncated end.
        let bytes = fs::read(&event_files(folder.path(), "demo").unwrap()[0]).unwrap();
        fs::write(folder.path().join("events.out.tfevents.0000000001.host.1.0.demo"), &bytes[..bytes.len() - 3])
            .unwrap();
        drop(EventFile::open(folder.path(), "demo", Some(4)).unwrap());
        let steps: Vec<i64> = steps_and_tags(folder.path()).into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }

    #[test]
    fn several_events_of_a_step_survive_rewinding() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = EventFile::open(folder.path(), "demo", None).unwrap();
        for cores in [1.0_f64, 2.0] {
            let cores = Scalar { key: "cpu_cores", tag: Some("system/cpu_cores"), value: Some(cores.into()) };
            events.record(&Record { scalars: vec![cores], ..Record::new("utilization", 1) });
        }
        events.record(&Record::new("end", 1));
        drop(EventFile::open(folder.path(), "demo", Some(1)).unwrap());
        assert_eq!(steps_and_tags(folder.path()), vec![(1, vec!["system/cpu_cores".to_owned()]); 2]);
    }

    #[test]
    fn text_is_shown_as_it_is() {
        assert_eq!(literal("# def f(x):\n    *x*\n"), "    # def f(x):\n        *x*");
    }

    #[test]
    fn files_of_killed_writers_of_this_run_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let left = [".rewound.tmp-42", ".events.out.tfevents.0000000001.host.42.0.demo.tmp-42"];
        let of_others = ".events.out.tfevents.0000000001.host.42.0.other.tmp-42";
        for name in left.iter().chain([&of_others]) {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        drop(EventFile::open(folder.path(), "demo", None).unwrap());
        assert!(left.iter().all(|name| !folder.path().join(name).exists()));
        assert!(folder.path().join(of_others).exists());
    }

    #[test]
    fn events_of_other_runs_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        drop(EventFile::open(folder.path(), "first", None).unwrap());
        for _ in 0..2 {
            drop(EventFile::open(folder.path(), "second", None).unwrap());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
