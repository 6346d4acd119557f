//! `tensorboard/`: one event file per run, in TensorBoard's format.
//!
//! A resume writes a new file with the events it keeps and removes the earlier ones, so that TensorBoard shows each
//! step once, also if it is running meanwhile.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use dataset::AppendFile;

use super::MetricsSink;
use super::event_folder::{self, EarlierFile, WRITER};
use super::tfrecord::{self, Event, EventPayload, SourceMetadata, Summary, Value};
use crate::atomic_file;
use crate::report::{Record, Scalar};
use crate::{Result, TrainerError};

/// Opens an event file for a run with its events up to the step `rewind_to`, without it empty. Files of other programs
/// in the folder stay, and those of other runs in a folder that is shared.
pub(super) fn open(folder: &Path, run_directory: &Path, rewind_to: Option<u64>) -> Result<MetricsSink> {
    fs::create_dir_all(folder).map_err(TrainerError::io("create", folder))?;
    let earlier = event_folder::take_over(folder, run_directory).map_err(TrainerError::io("rewind", folder))?;
    let events = rewind_to.map_or_else(Vec::new, |step| retained_events(&earlier, step));
    let path = event_folder::unused_path(folder, run_directory, now() as u64);
    let outcome = atomic_file::replace_with(&path, |writer| write_all(writer, &events));
    let file = outcome.and_then(|file| AppendFile::from_file(&path, file)).map_err(TrainerError::io("write", &path))?;
    for EarlierFile { path, .. } in &earlier {
        fs::remove_file(path).map_err(TrainerError::io("remove", path))?;
    }
    Ok(MetricsSink { file, encode: event })
}

/// Returns an event with all curves of the record whose values are known, and its text; empty if it has neither.
fn event(record: &Record) -> Vec<u8> {
    let mut value = curves(record);
    value.extend(record.shown_text.iter().map(|shown_text| Value::text(&shown_text.tag, &literal(&shown_text.text))));
    if value.is_empty() {
        return Vec::new();
    }
    let what = Some(EventPayload::Summary(Summary { value }));
    tfrecord::record(&Event { wall_time: now(), step: record.step as i64, what, source_metadata: None })
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

/// Returns the events up to a step, each once where several files have it: that of the newest file, which repeats what
/// it took over. Within one file a step may have several events of a kind.
fn retained_events(files: &[EarlierFile], last_step: u64) -> Vec<Event> {
    let mut names = HashSet::new();
    let mut events = Vec::new();
    for file in files.iter().rev() {
        let mut names_here = HashSet::new();
        for event in &file.events {
            let Some(EventPayload::Summary(summary)) = &event.what else {
                continue;
            };
            let Some(first) = summary.value.first() else {
                continue;
            };
            let name = (event.step, first.tag.clone());
            if event.step <= last_step as i64 && !names.contains(&name) {
                names_here.insert(name);
                events.push(event.clone());
            }
        }
        names.extend(names_here);
    }
    events.sort_by_key(|event| event.step);
    events
}

fn write_all(writer: &mut impl Write, events: &[Event]) -> io::Result<()> {
    let header = Event {
        wall_time: now(),
        step: 0,
        what: Some(EventPayload::FileVersion("brain.Event:2".to_owned())),
        source_metadata: Some(SourceMetadata { writer: WRITER.to_owned() }),
    };
    std::iter::once(&header).chain(events).try_for_each(|event| writer.write_all(&tfrecord::record(event)))
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

    fn loss(step: u64) -> Record {
        let loss = Scalar { key: "loss", tag: Some("loss/train"), value: Some((step as f64).into()) };
        Record { scalars: vec![loss], ..Record::new("train", step) }
    }

    #[test]
    fn duplicate_and_truncated_events_are_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = open(folder.path(), Path::new("runs/demo"), None).unwrap();
        for step in 1..=5 {
            events.record(&loss(step));
        }
        // What a kill between writing the rewound file and removing the earlier one leaves, with a truncated end.
        let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(file).unwrap();
        fs::write(folder.path().join("events.out.tfevents.0000000001.host.1.0.demo"), &bytes[..bytes.len() - 3])
            .unwrap();
        drop(open(folder.path(), Path::new("runs/demo"), Some(4)).unwrap());
        let steps: Vec<i64> = steps_and_tags(folder.path()).into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }

    #[test]
    fn several_events_of_a_step_survive_rewinding() {
        let folder = tempfile::tempdir().unwrap();
        let mut events = open(folder.path(), Path::new("runs/demo"), None).unwrap();
        for cores in [1.0_f64, 2.0] {
            let cores = Scalar { key: "cpu_cores", tag: Some("system/cpu_cores"), value: Some(cores.into()) };
            events.record(&Record { scalars: vec![cores], ..Record::new("utilization", 1) });
        }
        events.record(&Record::new("end", 1));
        drop(open(folder.path(), Path::new("runs/demo"), Some(1)).unwrap());
        assert_eq!(steps_and_tags(folder.path()), vec![(1, vec!["system/cpu_cores".to_owned()]); 2]);
    }

    #[test]
    fn text_is_shown_as_it_is() {
        assert_eq!(literal("# def f(x):\n    *x*\n"), "    # def f(x):\n        *x*");
    }

    #[test]
    fn a_renamed_run_takes_its_events_along() {
        let root = tempfile::tempdir().unwrap();
        let (former_folder, new_folder) = (root.path().join("former"), root.path().join("moved"));
        let open = |run: &Path, rewind_to| open(&run.join("tensorboard"), run, rewind_to).unwrap();
        let mut events = open(&former_folder, None);
        (1..=5).for_each(|step| events.record(&loss(step)));
        drop(events);
        fs::rename(&former_folder, &new_folder).unwrap();
        let mut events = open(&new_folder, Some(3));
        events.record(&loss(4));
        drop(events);
        let steps: Vec<i64> =
            steps_and_tags(&new_folder.join("tensorboard")).into_iter().map(|(step, _)| step).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }
}
