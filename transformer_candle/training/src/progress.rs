//! Progress output of a run: one live line on a terminal, plain lines where stdout is a file or a pipe.

use std::{
    io::{self, IsTerminal},
    path::Path,
    sync::{
        Mutex, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use dataset::hub::RetryStatus;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    report::{EvaluationReport, LogInterval, StepReport, UtilizationReport},
    terminal::{escaped, print_line},
    units::{duration, grouped},
};

/// Weight of the newest step in the exponential moving average of the step time.
const SMOOTHING: f64 = 0.1;

/// Shorter waits are not reported; longer ones are reported at this interval.
const MIN_REPORTED_WAIT: Duration = Duration::from_secs(1);
const WAIT_REPORT_INTERVAL: Duration = Duration::from_mins(1);
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

/// Decides when a wait for data is reported: after a second, when its reason changes, and once a minute.
#[derive(Debug, Default)]
pub struct WaitMessages(Mutex<Option<ReportedWait>>);

/// The last report of a wait for data.
#[derive(Debug)]
struct ReportedWait {
    began: Instant,
    reason: String,
    reported: Instant,
}

#[derive(Debug)]
enum Sink {
    Live(ProgressBar),
    Plain,
    Silent,
}

impl Progress {
    /// Returns the progress after `done` of `total_steps` steps; plain lines are printed every `log_every` steps.
    pub fn new(mode: ProgressMode, done: u64, total_steps: Option<u64>, log_every: u64) -> Self {
        let sink = match mode {
            ProgressMode::Silent => Sink::Silent,
            ProgressMode::Auto if io::stdout().is_terminal() => Sink::Live(live_line(done, total_steps)),
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

    /// Shows a step, and the utilization of its machine.
    pub fn step(&mut self, report: &StepReport, utilization: Option<&UtilizationReport>) {
        self.end_wait();
        let smoothed = match self.smoothed_step_seconds {
            // The first step includes the wait for the first data.
            Some(before) if self.steps_seen > 1 => before + SMOOTHING * (report.step_seconds - before),
            _ => report.step_seconds,
        };
        self.smoothed_step_seconds = Some(smoothed);
        self.steps_seen += 1;
        match &self.sink {
            Sink::Live(bar) => {
                bar.set_position(report.step);
                bar.set_message(self.line(report, utilization));
            }
            Sink::Plain if self.log_interval.includes(report.step) => print_line(&self.line(report, utilization)),
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
            format!("perplexity {:.2}", report.perplexity),
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

    /// Formats a step: `step 120/2,000  loss 3.4567  12,345 tokens/s  CPU 1.9 cores 812.3 MB  ETA 3m 20s`.
    fn line(&self, report: &StepReport, utilization: Option<&UtilizationReport>) -> String {
        let total = self.total_steps.map(|total| format!("/{}", grouped(total)));
        let mut parts = vec![format!("step {}{}", grouped(report.step), total.unwrap_or_default())];
        if self.stages.len() > 1 {
            parts.push(format!("stage {}/{}", self.stage + 1, self.stages.len()));
        }
        parts.push(format!("loss {:.4}", report.loss));
        parts.push(report.rates());
        parts.extend(report.mfu.map(|mfu| format!("MFU {:.1} %", 100.0 * mfu)));
        parts.extend(report.ranks.as_ref().map(|ranks| ranks.summary(report.step_seconds)));
        parts.extend(utilization.map(UtilizationReport::summary));
        if let (Some(total), Some(seconds)) = (self.total_steps, self.smoothed_step_seconds) {
            let left = self.steps_left(report.step, total) * seconds;
            parts.push(format!("ETA {}", duration(Duration::from_secs_f64(left))));
        }
        parts.join("  ")
    }
}

impl Progress {
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

impl WaitMessages {
    /// Returns the line to print for the current wait, if one is due; it counts as reported. `waiting` is None once the
    /// wait is over.
    pub fn line(&self, waiting: Option<&RetryStatus>) -> Option<String> {
        let mut wait = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = waiting else {
            return wait.take().map(|last| format!("data resumed after {}", duration(last.began.elapsed())));
        };
        let known =
            |last: &ReportedWait| last.reason == waiting.reason && last.reported.elapsed() < WAIT_REPORT_INTERVAL;
        if waiting.since.elapsed() < MIN_REPORTED_WAIT || wait.as_ref().is_some_and(known) {
            return None;
        }
        let now = Instant::now();
        let began = wait.as_ref().map_or(now, |last| last.began);
        *wait = Some(ReportedWait { began, reason: waiting.reason.clone(), reported: now });
        Some(waiting.to_string())
    }
}

/// Formats a prompt and its completion as lines that begin with `  | `.
fn quoted(prompt: &str, text: &str) -> String {
    let text = format!("{prompt}{text}");
    text.lines().map(|line| format!("  | {line}")).collect::<Vec<_>>().join("\n")
}

fn live_line(done: u64, total_steps: Option<u64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total_steps, ProgressDrawTarget::stdout());
    let template = if total_steps.is_some() { "{bar:20} {wide_msg}" } else { "{spinner} {wide_msg}" };
    bar.set_style(ProgressStyle::with_template(template).expect("the templates above are well formed"));
    bar.set_position(done);
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

    #[test]
    fn a_line_shows_step_loss_speed_and_eta() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&report(1900), None);
        assert_eq!(progress.line(&report(1900), None), "step 1,900/2,000  loss 3.4568  12,345 tokens/s  ETA 3m 20s");
    }

    #[test]
    fn a_line_names_positions_where_some_have_no_target() {
        let progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        let line = progress.line(&StepReport { positions_per_second: 40_000.0, ..report(7) }, None);
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s (40,000 positions/s)");
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
        progress.step(&report(7), Some(&utilization));
        let line = progress.line(&report(7), Some(&utilization));
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s  CPU 1.9 cores 812.3 MB");
    }

    #[test]
    fn a_line_of_several_ranks_shows_the_exchange() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        let ranks = RankTimes { compute_seconds: vec![1.0, 1.5], exchange_seconds: 0.3, is_even: true };
        let report = StepReport { ranks: Some(ranks), ..report(7) };
        progress.step(&report, None);
        let line = progress.line(&report, None);
        assert_eq!(line, "step 7  loss 3.4568  12,345 tokens/s  exchange 15 %, rank 1 takes 1.5x");
    }

    #[test]
    fn the_eta_ignores_the_slow_first_step() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&StepReport { step_seconds: 100.0, ..report(1) }, None);
        progress.step(&report(2), None);
        progress.step(&report(3), None);
        assert!(progress.line(&report(1900), None).ends_with("ETA 3m 20s"));
    }

    #[test]
    fn the_eta_counts_the_cost_of_later_stages() {
        let progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        let mut progress = progress.with_stages(vec![(1000, 1.0), (1900, 2.0), (2000, 4.0)], 0);
        progress.step(&report(900), None);
        let line = progress.line(&report(900), None);
        assert!(line.starts_with("step 900/2,000  stage 1/3  loss"), "{line}");
        // 100 steps, 900 of twice and 100 of four times the cost, 2 seconds each.
        assert!(line.ends_with("ETA 1h 16m"), "{line}");
        progress.enter_stage(2);
        progress.step(&report(1901), None);
        assert!(progress.line(&report(1901), None).ends_with("stage 3/3  loss 3.4568  12,345 tokens/s  ETA 3m 18s"));
    }

    #[test]
    fn without_total_steps_there_is_no_eta() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        progress.step(&report(7), None);
        assert!(!progress.line(&report(7), None).contains("ETA"));
    }

    #[test]
    fn plain_lines_show_first_every_nth_and_last_step() {
        let progress = Progress::new(ProgressMode::Plain, 0, Some(25), 10);
        let shown: Vec<u64> = (1..=25).filter(|step| progress.log_interval.includes(*step)).collect();
        assert_eq!(shown, [1, 10, 20, 25]);
    }

    #[test]
    fn a_wait_is_reported_once_a_minute_or_on_a_new_reason() {
        let messages = WaitMessages::default();
        let is_reported = |waiting: &RetryStatus| messages.line(Some(waiting)).is_some();
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        let waiting = |since, reason: &str| RetryStatus {
            url: "http://hub/x".to_owned(),
            reason: reason.to_owned(),
            since: ago(since),
            next_attempt: Instant::now(),
        };
        assert!(!is_reported(&waiting(0, "reset")), "it may pass in a moment");
        assert!(is_reported(&waiting(2, "reset")));
        assert!(!is_reported(&waiting(3, "reset")));
        assert!(is_reported(&waiting(3, "it answered 503")));
        messages.0.lock().unwrap().as_mut().unwrap().reported = ago(61);
        assert!(is_reported(&waiting(70, "it answered 503")));
        assert_eq!(messages.line(None).unwrap(), "data resumed after 0s");
        assert_eq!(messages.line(None), None);
        assert!(is_reported(&waiting(2, "it answered 503")), "another wait");
    }
}
