//! A run's metrics: `metrics.jsonl` and TensorBoard events, both rewound on resume so that each step appears once.

mod event_folder;
mod jsonl;
mod tensorboard;
mod tfrecord;

use std::path::Path;

use dataset::AppendFile;

use crate::{Result, report::Record};

/// A file that receives a run's records in step order. A record has left the process when the call returns, so that a
/// kill loses nothing; only records that a full disk refuses are buffered.
#[derive(Debug)]
struct MetricsSink {
    file: AppendFile,
    /// Returns the bytes of a record; empty for a record that the file does not have.
    encode: fn(&Record) -> Vec<u8>,
}

impl MetricsSink {
    fn record(&mut self, record: &Record) {
        let bytes = (self.encode)(record);
        if !bytes.is_empty() {
            self.file.append(&bytes);
        }
    }
}

/// Writes a run's metrics to every sink.
#[derive(Debug)]
pub struct MetricsWriter {
    sinks: Vec<MetricsSink>,
}

impl MetricsWriter {
    /// Opens the metrics of a run directory, and its TensorBoard events in a folder of their own where one is given.
    /// `rewind_to` keeps what was written up to that step, for a resume; without it the metrics start empty.
    pub fn open(run_directory: &Path, tensorboard: Option<&Path>, rewind_to: Option<u64>) -> Result<Self> {
        let mut sinks = vec![jsonl::open(&run_directory.join("metrics.jsonl"), rewind_to)?];
        if let Some(folder) = tensorboard {
            sinks.push(tensorboard::open(folder, run_directory, rewind_to)?);
        }
        Ok(Self { sinks })
    }

    /// Returns a writer that writes nothing, for ranks other than the first.
    pub fn off() -> Self {
        Self { sinks: Vec::new() }
    }

    /// Records a report.
    pub fn record(&mut self, record: &Record) {
        self.sinks.iter_mut().for_each(|sink| sink.record(record));
    }

    /// Makes everything written durable, as far as the disk has space. Called before a checkpoint, so that no
    /// checkpoint outlives the metrics that led to it.
    pub fn flush(&mut self) {
        for sink in &mut self.sinks {
            sink.file.sync();
        }
    }

    /// Returns what files lack that cannot be written, one sentence each.
    pub fn unwritten(&self) -> Vec<String> {
        self.sinks.iter().filter_map(|sink| sink.file.unwritten()).collect()
    }

    /// Returns notes for the user since the last call, one sentence each.
    pub fn take_notices(&mut self) -> Vec<String> {
        self.sinks.iter_mut().flat_map(|sink| sink.file.take_notices()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{
        AdviceReport, EndReport, EvaluationReport, GpuUtilization, RankTimes, RanksUtilization, SampleReport,
        StepReport, UtilizationReport,
    };

    fn open(run: &Path, rewind_to: Option<u64>) -> MetricsWriter {
        MetricsWriter::open(run, Some(&run.join("tensorboard")), rewind_to).unwrap()
    }

    fn step(step: u64) -> StepReport {
        StepReport {
            step,
            loss: 2.5,
            learning_rate: 1e-3,
            grad_norm: 0.75,
            tokens: step * 4096,
            tokens_per_second: 1234.5,
            positions_per_second: 2469.0,
            mfu: None,
            step_seconds: 3.25,
            data_wait_seconds: 0.0,
            save_seconds: 0.5,
            evaluation_seconds: 0.0,
            memory_bytes: 1 << 30,
            ranks: None,
        }
    }

    fn evaluation(step: u64) -> EvaluationReport {
        EvaluationReport {
            step,
            loss: 2.0,
            perplexity: 2f64.exp(),
            bits_per_byte: Some(1.1),
            tokens: 512,
            components: Vec::new(),
            samples: Vec::new(),
        }
    }

    fn utilization(step: u64, gpu: Option<GpuUtilization>) -> UtilizationReport {
        UtilizationReport { step, time: 1.5e9, rss_bytes: 1 << 29, cpu_cores: 1.75, swap_bytes: 0, ranks: None, gpu }
    }

    fn sample(step: u64) -> SampleReport {
        SampleReport { step, index: 0, prompt: "The \"cat\"".to_owned(), text: " sat.\n".to_owned() }
    }

    fn end(step: u64, reason: &str) -> EndReport {
        EndReport { step, reason: reason.to_owned(), exit_code: None }
    }

    #[test]
    fn lines_have_the_documented_keys() {
        let run = tempfile::tempdir().unwrap();
        let mut metrics = open(run.path(), None);
        metrics.record(&step(1).record());
        metrics.record(&evaluation(1).record());
        metrics.record(&utilization(1, None).record());
        let gpu = GpuUtilization {
            utilization: Some(0.97),
            memory_bytes: Some(30_000_000_000),
            memory_total_bytes: Some(34_190_917_632),
            power_watts: Some(412.5),
            power_limit_watts: Some(575.0),
            temperature_celsius: Some(71),
            clock_mhz: Some(2400),
            throttle: Some("thermal"),
        };
        metrics.record(&utilization(1, Some(gpu)).record());
        metrics.record(&utilization(1, Some(GpuUtilization::default())).record());
        metrics.record(&sample(1).record());
        metrics.record(&AdviceReport { step: 1, text: "lower it".to_owned() }.record());
        metrics.record(&end(1, "all steps are done").record());
        metrics.flush();
        insta::assert_snapshot!(std::fs::read_to_string(run.path().join("metrics.jsonl")).unwrap(), @r#"
        {"kind":"train","step":1,"loss":2.5,"learning_rate":0.001,"grad_norm":0.75,"tokens":4096,"tokens_per_second":1234.5,"positions_per_second":2469.0,"mfu":null,"step_seconds":3.25,"data_wait_seconds":0.0,"save_seconds":0.5,"evaluation_seconds":0.0,"memory_bytes":1073741824}
        {"kind":"evaluation","step":1,"loss":2.0,"perplexity":7.38905609893065,"bits_per_byte":1.1,"tokens":512}
        {"kind":"utilization","step":1,"time":1500000000.0,"rss_bytes":536870912,"cpu_cores":1.75,"swap_bytes":0}
        {"kind":"utilization","step":1,"time":1500000000.0,"rss_bytes":536870912,"cpu_cores":1.75,"swap_bytes":0,"gpu_utilization":0.97,"gpu_memory_bytes":30000000000,"gpu_memory_total_bytes":34190917632,"gpu_power_watts":412.5,"gpu_power_limit_watts":575.0,"gpu_temperature_celsius":71,"gpu_clock_mhz":2400,"gpu_throttle":"thermal"}
        {"kind":"utilization","step":1,"time":1500000000.0,"rss_bytes":536870912,"cpu_cores":1.75,"swap_bytes":0,"gpu_utilization":null,"gpu_memory_bytes":null,"gpu_memory_total_bytes":null,"gpu_power_watts":null,"gpu_power_limit_watts":null,"gpu_temperature_celsius":null,"gpu_clock_mhz":null,"gpu_throttle":null}
        {"kind":"sample","step":1,"prompt":"The \"cat\"","text":" sat.\n"}
        {"kind":"advice","step":1,"text":"lower it"}
        {"kind":"end","step":1,"reason":"all steps are done"}
        "#);
    }

    #[test]
    fn lines_of_several_ranks_have_their_times_too() {
        let run = tempfile::tempdir().unwrap();
        let mut metrics = open(run.path(), None);
        let ranks = RankTimes { compute_seconds: vec![2.5, 3.0], exchange_seconds: 0.25, is_even: true };
        metrics.record(&StepReport { ranks: Some(ranks), ..step(1) }.record());
        let ranks = Some(RanksUtilization { largest: 1, max_rss_bytes: 1 << 28 });
        metrics.record(&UtilizationReport { ranks, ..utilization(1, None) }.record());
        metrics.flush();
        insta::assert_snapshot!(std::fs::read_to_string(run.path().join("metrics.jsonl")).unwrap(), @r#"
        {"kind":"train","step":1,"loss":2.5,"learning_rate":0.001,"grad_norm":0.75,"tokens":4096,"tokens_per_second":1234.5,"positions_per_second":2469.0,"mfu":null,"step_seconds":3.25,"data_wait_seconds":0.0,"save_seconds":0.5,"evaluation_seconds":0.0,"memory_bytes":1073741824,"exchange_seconds":0.25,"slowest_rank":1,"slowest_rank_seconds":3.0,"median_rank_seconds":2.5,"rank_compute_seconds":[2.5,3.0]}
        {"kind":"utilization","step":1,"time":1500000000.0,"rss_bytes":536870912,"cpu_cores":1.75,"swap_bytes":0,"max_rank_rss_bytes":268435456,"largest_rank":1}
        "#);
        let tags = tensorboard::steps_and_tags(&run.path().join("tensorboard")).into_iter().flat_map(|(_, tags)| tags);
        let tags: Vec<String> = tags.filter(|tag| tag.contains("rank") || tag.contains("exchange")).collect();
        let expected = ["exchange_seconds", "ranks/slowest_compute_seconds", "ranks/median_compute_seconds"];
        assert_eq!(tags, [&expected[..], &["system/max_rank_rss_bytes"]].concat());
    }

    #[test]
    fn a_resumed_run_writes_what_an_uninterrupted_one_writes() {
        let (straight, resumed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let run = |directory: &Path, rewind_to, steps: std::ops::RangeInclusive<u64>| {
            let mut metrics = open(directory, rewind_to);
            for number in steps.clone() {
                metrics.record(&step(number).record());
                if number % 2 == 0 {
                    metrics.record(&evaluation(number).record());
                    metrics.record(&sample(number).record());
                    metrics.record(&utilization(number, None).record());
                    metrics.record(&utilization(number, None).record());
                }
                metrics.flush();
            }
            let reason = if *steps.end() == 10 { "all steps are done" } else { "stopped by SIGINT" };
            metrics.record(&end(*steps.end(), reason).record());
        };
        run(straight.path(), None, 1..=10);
        run(resumed.path(), None, 1..=7);
        run(resumed.path(), Some(4), 5..=6);
        run(resumed.path(), Some(6), 7..=10);
        let lines = |directory: &Path| std::fs::read_to_string(directory.join("metrics.jsonl")).unwrap();
        assert_eq!(lines(straight.path()), lines(resumed.path()));
        let events = |directory: &Path| tensorboard::steps_and_tags(&directory.join("tensorboard"));
        assert_eq!(events(straight.path()), events(resumed.path()));
    }

    #[test]
    fn a_new_run_starts_empty() {
        let run = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let mut metrics = open(run.path(), None);
            metrics.record(&step(1).record());
        }
        assert_eq!(std::fs::read_to_string(run.path().join("metrics.jsonl")).unwrap().lines().count(), 1);
        assert_eq!(std::fs::read_dir(run.path().join("tensorboard")).unwrap().count(), 1);
    }
}
