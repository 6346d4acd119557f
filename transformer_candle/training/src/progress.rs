//! Progress output of a run: one live line on a terminal, plain lines where stdout is a file or a pipe.

mod waits;

use std::{
    io::{self, IsTerminal},
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use dataset::hub::RetryStatus;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use self::waits::WaitMessages;
use crate::{
    report::{EvaluationReport, LogInterval, StepReport, UtilizationReport},
    terminal::{columns, escaped, print_line},
    units::{duration, grouped, grouped_decimal},
};

/// Columns of the bar in a live line.
const BAR: usize = 10;

/// Weight of the newest step in the exponential moving average of the step time.
const SMOOTHING: f64 = 0.1;

/// How often the retry status is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How progress is shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProgressMode {
    /// A live line if stdout is a terminal, else plain lines.
    #[default]
    Auto,
    /// Plain lines, one every `log_every_n_steps`.
    Plain,
    /// No output.
    Silent,
}

/// Shows the progress of one run.
#[derive(Debug)]
pub struct Progress {
    sink: Sink,
    total_steps: Option<u64>,
    log_interval: LogInterval,
    smoothed_step_seconds: Option<f64>,
    /// Steps shown since the current stage began.
    steps_seen: u64,
    /// The last step of each stage and the cost of one of its steps, in any unit; empty without stages.
    stages: Vec<(u64, f64)>,
    /// The current stage.
    stage: usize,
    /// The wait for data, as reported by plain lines.
    waits: WaitMessages,
}

#[derive(Debug)]
enum Sink {
    Live(ProgressBar),
    Plain,
    Silent,
}

impl Progress {
    /// Returns the progress after `steps_done` of `total_steps` steps; plain lines are printed every `log_every` steps.
    pub fn new(mode: ProgressMode, steps_done: u64, total_steps: Option<u64>, log_every: u64) -> Self {
        let sink = match mode {
            ProgressMode::Silent => Sink::Silent,
            ProgressMode::Auto if io::stdout().is_terminal() => Sink::Live(live_line(steps_done, total_steps)),
            ProgressMode::Auto | ProgressMode::Plain => Sink::Plain,
        };
        Self {
            sink,
            total_steps,
            log_interval: LogInterval::new(log_every, total_steps),
            smoothed_step_seconds: None,
            steps_seen: 0,
            stages: Vec::new(),
            stage: 0,
            waits: WaitMessages::default(),
        }
    }

    /// Sets a run's stages, each as its last step and the cost of one step, and the current one.
    #[must_use]
    pub(crate) fn with_stages(self, stages: Vec<(u64, f64)>, stage: usize) -> Self {
        Self { stages, stage, ..self }
    }

    /// Notes that the next step is the first of a stage.
    pub(crate) fn enter_stage(&mut self, stage: usize) {
        self.stage = stage;
        // Other sizes take other times, and the first step of a stage waits for its first data.
        self.smoothed_step_seconds = None;
        self.steps_seen = 0;
    }

    /// Shows a step, in which epoch of the data it is where the run has only one source, and the utilization of its
    /// machine.
    pub fn step(&mut self, report: &StepReport, epoch: Option<u64>, utilization: Option<&UtilizationReport>) {
        self.end_wait();
        let smoothed = match self.smoothed_step_seconds {
            // The first step includes the wait for the first data.
            Some(average) if self.steps_seen > 1 => average + SMOOTHING * (report.step_seconds - average),
            _ => report.step_seconds,
        };
        self.smoothed_step_seconds = Some(smoothed);
        self.steps_seen += 1;
        match &self.sink {
            Sink::Live(bar) => {
                bar.set_position(report.step);
                let beside_bar = columns().map_or(usize::MAX, |columns| columns.saturating_sub(BAR + 2));
                bar.set_message(fitting(&self.parts(report, epoch, utilization), beside_bar));
            }
            Sink::Plain if self.log_interval.includes(report.step) => {
                print_line(&fitting(&self.parts(report, epoch, utilization), usize::MAX));
            }
            Sink::Plain | Sink::Silent => {}
        }
    }

    /// Shows why training waits for data. Call it repeatedly during the wait: the live line follows each call, plain
    /// lines are printed when the reason changes and once a minute.
    pub fn data_wait(&self, waiting: &RetryStatus) {
        match &self.sink {
            Sink::Live(bar) => bar.set_message(escaped(&waiting.to_string()).into_owned()),
            Sink::Plain => self.waits.line(Some(waiting)).iter().for_each(|line| print_line(line)),
            Sink::Silent => {}
        }
    }

    /// Runs `work` and reports its waits for data from another thread.
    pub(crate) fn with_wait_reports<R>(
        &self,
        waiting: impl Fn() -> Option<RetryStatus> + Send,
        work: impl FnOnce() -> R,
    ) -> R {
        thread::scope(|scope| {
            let (_until_dropped, working) = mpsc::channel::<()>();
            let watch = move || {
                while working.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    if let Some(waiting) = waiting() {
                        self.data_wait(&waiting);
                    }
                }
            };
            // Without another thread the work runs without reports.
            let _ = thread::Builder::new().spawn_scoped(scope, watch);
            work()
        })
    }

    /// Reports the end of a wait that was reported.
    fn end_wait(&self) {
        self.waits.line(None).iter().for_each(|line| self.print(line));
    }

    /// Shows an evaluation.
    pub fn evaluation(&self, report: &EvaluationReport) {
        self.end_wait();
        let mut parts = vec![
            format!("step {}", grouped(report.step)),
            format!("held-out loss {:.4}", report.loss),
            format!("perplexity {}", grouped_decimal(report.perplexity, 2)),
        ];
        parts.extend(report.bits_per_byte.map(|bits| format!("{bits:.3} bits per byte")));
        self.print(&parts.join("  "));
        for sample in &report.samples {
            self.print(&quoted(&sample.prompt, &sample.text));
        }
    }

    /// Shows where a checkpoint was written.
    pub fn checkpoint(&self, path: &Path) {
        self.print(&format!("checkpoint {}", path.display()));
    }

    /// Prints a line.
    pub fn print(&self, line: &str) {
        match &self.sink {
            Sink::Live(bar) => bar.println(escaped(line)),
            Sink::Plain => print_line(line),
            Sink::Silent => {}
        }
    }

    /// Leaves the last live line standing.
    pub fn finish(&self) {
        if let Sink::Live(bar) = &self.sink {
            bar.abandon();
        }
    }

    /// Formats what a line says of a step, the most important first: `step 120/2,000`, `loss 3.4567`,
    /// `ETA 3 min 20 s`, `12,345 tokens/s`, `CPU 1.9 cores 812.3 MB`.
    fn parts(&self, report: &StepReport, epoch: Option<u64>, utilization: Option<&UtilizationReport>) -> Vec<String> {
        let total = self.total_steps.map(|total| format!("/{}", grouped(total)));
        let mut parts = vec![format!("step {}{}", grouped(report.step), total.unwrap_or_default())];
        if self.stages.len() > 1 {
            parts.push(format!("stage {}/{}", self.stage + 1, self.stages.len()));
        }
        parts.extend(epoch.filter(|epoch| *epoch > 1).map(|epoch| format!("epoch {}", grouped(epoch))));
        parts.push(format!("loss {:.4}", report.loss));
        if let (Some(total), Some(seconds)) = (self.total_steps, self.smoothed_step_seconds) {
            let seconds_left = self.steps_left(report.step, total) * seconds;
            parts.push(format!("ETA {}", duration(Duration::from_secs_f64(seconds_left))));
        }
        parts.extend(report.rates());
        parts.extend(report.mfu.map(|mfu| format!("MFU {:.1} %", 100.0 * mfu)));
        parts.extend(report.ranks.as_ref().map(|ranks| ranks.summary(report.step_seconds)));
        parts.extend(utilization.map(UtilizationReport::summary));
        parts
    }

    /// Returns the steps left after `step`, as the number of steps of the current stage that cost as much.
    fn steps_left(&self, step: u64, total: u64) -> f64 {
        let Some((_, current)) = self.stages.get(self.stage) else {
            return total.saturating_sub(step) as f64;
        };
        let mut from = step;
        let costs = self.stages.iter().skip(self.stage).map(|&(end, cost)| {
            let steps = end.min(total).saturating_sub(from);
            from = from.max(end);
            steps as f64 * cost / current
        });
        costs.sum()
    }
}

/// Joins the first parts, as many as fit into `columns`, and at least one.
fn fitting(parts: &[String], columns: usize) -> String {
    let mut lines = (1..=parts.len()).rev().map(|count| parts[..count].join("  "));
    lines.find(|line| line.chars().count() <= columns).unwrap_or_else(|| parts[0].clone())
}

/// Formats a prompt and its completion as lines that begin with `  | `.
fn quoted(prompt: &str, text: &str) -> String {
    let text = format!("{prompt}{text}");
    text.lines().map(|line| format!("  | {line}")).collect::<Vec<_>>().join("\n")
}

fn live_line(steps_done: u64, total_steps: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total_steps, ProgressDrawTarget::stdout());
    let template = if total_steps.is_some() { "{bar:10} {wide_msg}" } else { "{spinner} {wide_msg}" };
    bar.set_style(ProgressStyle::with_template(template).expect("the templates above are well formed"));
    bar.set_position(steps_done);
    bar
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::RankTimes;

    fn report(step: u64) -> StepReport {
        StepReport {
            step,
            loss: 3.45678,
            learning_rate: 3e-4,
            grad_norm: 0.5,
            tokens: 1000,
            tokens_per_second: 12345.6,
            positions_per_second: 12345.6,
            mfu: None,
            step_seconds: 2.0,
            data_wait_seconds: 0.0,
            save_seconds: 0.0,
            evaluation_seconds: 0.0,
            memory_bytes: 1,
            ranks: None,
        }
    }

    fn line(progress: &Progress, report: &StepReport, utilization: Option<&UtilizationReport>) -> String {
        fitting(&progress.parts(report, None, utilization), usize::MAX)
    }

    #[test]
    fn a_line_shows_step_loss_eta_and_speed() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&report(1900), None, None);
        assert_eq!(
            line(&progress, &report(1900), None),
            "step 1,900/2,000  loss 3.4568  ETA 3 min 20 s  12,345 tokens/s"
        );
    }

    #[test]
    fn a_live_line_drops_what_does_not_fit_from_its_end() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(20_000), 10);
        let report = StepReport { mfu: Some(0.546), step_seconds: 80.0, ..report(19_285) };
        progress.step(&report, None, None);
        let parts = progress.parts(&report, Some(3), None);
        let whole = "step 19,285/20,000  epoch 3  loss 3.4568  ETA 15 h 53 min  12,345 tokens/s  MFU 54.6 %";
        for (columns, expected) in
            [(86, whole), (85, &whole[..74]), (74, &whole[..74]), (73, &whole[..57]), (1, &whole[..18])]
        {
            assert_eq!(fitting(&parts, columns), expected, "{columns}");
        }
    }

    #[test]
    fn a_line_names_positions_where_some_have_no_target() {
        let progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        let line = line(&progress, &StepReport { positions_per_second: 40_000.0, ..report(7) }, None);
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s  40,000 positions/s");
    }

    #[test]
    fn a_line_shows_the_utilization_once_it_is_known() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        let utilization = UtilizationReport {
            step: 7,
            time: 0.0,
            rss_bytes: 812_300_000,
            cpu_cores: 1.94,
            swap_bytes: 0,
            ranks: None,
            gpu: None,
        };
        progress.step(&report(7), None, Some(&utilization));
        let line = line(&progress, &report(7), Some(&utilization));
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s  CPU 1.9 cores 812.3 MB");
    }

    #[test]
    fn a_line_of_several_ranks_shows_the_exchange() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        let ranks = RankTimes { compute_seconds: vec![1.0, 1.5], exchange_seconds: 0.3, is_even: true };
        let report = StepReport { ranks: Some(ranks), ..report(7) };
        progress.step(&report, None, None);
        let line = line(&progress, &report, None);
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s  exchange 15 %, rank 1 takes 1.5x");
    }

    #[test]
    fn the_eta_ignores_the_slow_first_step() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&StepReport { step_seconds: 100.0, ..report(1) }, None, None);
        progress.step(&report(2), None, None);
        progress.step(&report(3), None, None);
        assert!(line(&progress, &report(1900), None).contains("  ETA 3 min 20 s  "));
    }

    #[test]
    fn the_eta_counts_the_cost_of_later_stages() {
        let progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        let mut progress = progress.with_stages(vec![(1000, 1.0), (1900, 2.0), (2000, 4.0)], 0);
        progress.step(&report(900), None, None);
        let first = line(&progress, &report(900), None);
        assert!(first.starts_with("step 900/2,000  stage 1/3  loss"), "{first}");
        // 100 steps, 900 of twice and 100 of four times the cost, 2 seconds each.
        assert!(first.contains("ETA 1 h 16 min"), "{first}");
        progress.enter_stage(2);
        progress.step(&report(1901), None, None);
        assert!(line(&progress, &report(1901), None).contains("stage 3/3  loss 3.4568  ETA 3 min 18 s  12,345"));
    }

    #[test]
    fn without_total_steps_there_is_no_eta() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        progress.step(&report(7), None, None);
        assert!(!line(&progress, &report(7), None).contains("ETA"));
    }

    #[test]
    fn plain_lines_show_first_every_nth_and_last_step() {
        let progress = Progress::new(ProgressMode::Plain, 0, Some(25), 10);
        let shown_steps: Vec<u64> = (1..=25).filter(|step| progress.log_interval.includes(*step)).collect();
        assert_eq!(shown_steps, [1, 10, 20, 25]);
    }
}
