//! What a person sees of a run: one live line on a terminal, plain lines where stdout goes to a file or a pipe.

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
    report::{EvaluationReport, LogInterval, StepReport},
    terminal::{escaped, print_line},
    units::{duration, grouped},
};

/// Weight of the newest step in the smoothed time a step takes.
const SMOOTHING: f64 = 0.1;

/// A failure that passes sooner is not worth a plain line; one that stays gets a line this often.
const WORTH_A_LINE: Duration = Duration::from_secs(1);
const BETWEEN_LINES: Duration = Duration::from_mins(1);
/// How often work that may wait for data is looked at.
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Where progress goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ProgressMode {
    /// A live line if stdout is a terminal, else plain lines.
    #[default]
    Auto,
    /// Plain lines, one every `log_every_n_steps`.
    Plain,
    /// Nothing.
    Silent,
}

/// The progress of one run.
#[derive(Debug)]
pub struct Progress {
    sink: Sink,
    total_steps: Option<u64>,
    log_interval: LogInterval,
    smoothed_step_seconds: Option<f64>,
    /// Steps shown so far.
    steps_seen: u64,
    /// The wait for data that plain lines tell of.
    waits: WaitMessages,
}

/// What is worth a line of a wait for data: that it lasts, when its reason changes, and once a minute.
#[derive(Debug, Default)]
pub struct WaitMessages(Mutex<Option<ReportedWait>>);

/// A wait for data as far as it was told.
#[derive(Debug)]
struct ReportedWait {
    began: Instant,
    reason: String,
    told: Instant,
}

#[derive(Debug)]
enum Sink {
    Live(ProgressBar),
    Plain,
    Silent,
}

impl Progress {
    /// `done` steps of `total_steps` lie behind; plain lines come every `log_every` steps.
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
            waits: WaitMessages::default(),
        }
    }

    /// Shows a step.
    pub fn step(&mut self, report: &StepReport) {
        self.waited();
        let smoothed = match self.smoothed_step_seconds {
            // The first step waits for the first data: it says nothing about those that follow.
            Some(before) if self.steps_seen > 1 => before + SMOOTHING * (report.step_seconds - before),
            _ => report.step_seconds,
        };
        self.smoothed_step_seconds = Some(smoothed);
        self.steps_seen += 1;
        match &self.sink {
            Sink::Live(bar) => {
                bar.set_position(report.step);
                bar.set_message(self.line(report));
            }
            Sink::Plain if self.log_interval.includes(report.step) => print_line(&self.line(report)),
            Sink::Plain | Sink::Silent => {}
        }
    }

    /// Shows what training stands still for. To be called again and again meanwhile: a live line follows each call, plain lines
    /// come when the reason changes, and once a minute.
    pub fn waiting(&self, waiting: &RetryStatus) {
        match &self.sink {
            Sink::Live(bar) => bar.set_message(escaped(&waiting.to_string()).into_owned()),
            Sink::Plain => self.waits.line(Some(waiting)).iter().for_each(|line| print_line(line)),
            Sink::Silent => {}
        }
    }

    /// Does work that may wait for data without saying so, and looks meanwhile what it waits for.
    pub(crate) fn watching<R>(&self, waiting: impl Fn() -> Option<RetryStatus> + Send, work: impl FnOnce() -> R) -> R {
        thread::scope(|scope| {
            let (_until_dropped, working) = mpsc::channel::<()>();
            let watch = move || {
                while working.recv_timeout(BETWEEN_LOOKS) == Err(RecvTimeoutError::Timeout) {
                    if let Some(waiting) = waiting() {
                        self.waiting(&waiting);
                    }
                }
            };
            // Where the system starts no more threads the work goes unwatched.
            let _ = thread::Builder::new().spawn_scoped(scope, watch);
            work()
        })
    }

    /// Ends a wait that was told of.
    fn waited(&self) {
        self.waits.line(None).iter().for_each(|line| self.say(line));
    }

    /// Shows an evaluation.
    pub fn evaluation(&self, report: &EvaluationReport) {
        self.waited();
        let mut parts = vec![
            format!("step {}", grouped(report.step)),
            format!("held-out loss {:.4}", report.loss),
            format!("perplexity {:.2}", report.perplexity),
        ];
        parts.extend(report.bits_per_byte.map(|bits| format!("{bits:.3} bits per byte")));
        self.say(&parts.join("  "));
    }

    /// Shows where a checkpoint was written.
    pub fn checkpoint(&self, path: &Path) {
        self.say(&format!("checkpoint {}", path.display()));
    }

    /// Shows any other line.
    pub fn say(&self, line: &str) {
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

    /// `step 120/2,000  loss 3.4567  12,345 tokens/s  ETA 3m 20s`
    fn line(&self, report: &StepReport) -> String {
        let total = self.total_steps.map(|total| format!("/{}", grouped(total)));
        let mut parts = vec![
            format!("step {}{}", grouped(report.step), total.unwrap_or_default()),
            format!("loss {:.4}", report.loss),
            format!("{} tokens/s", grouped(report.tokens_per_second as u64)),
        ];
        parts.extend(report.mfu.map(|mfu| format!("MFU {:.1} %", 100.0 * mfu)));
        if let (Some(total), Some(seconds)) = (self.total_steps, self.smoothed_step_seconds) {
            let left = total.saturating_sub(report.step) as f64 * seconds;
            parts.push(format!("ETA {}", duration(Duration::from_secs_f64(left))));
        }
        parts.join("  ")
    }
}

impl WaitMessages {
    /// The line that is due, if one is, about what is waited for at the moment; it counts as told.
    pub fn line(&self, waiting: Option<&RetryStatus>) -> Option<String> {
        let mut wait = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(waiting) = waiting else {
            return wait.take().map(|told| format!("data resumed after {}", duration(told.began.elapsed())));
        };
        let known = |told: &ReportedWait| told.reason == waiting.reason && told.told.elapsed() < BETWEEN_LINES;
        if waiting.since.elapsed() < WORTH_A_LINE || wait.as_ref().is_some_and(known) {
            return None;
        }
        let told = Instant::now();
        let began = wait.as_ref().map_or(told, |told| told.began);
        *wait = Some(ReportedWait { began, reason: waiting.reason.clone(), told });
        Some(waiting.to_string())
    }
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

    fn report(step: u64) -> StepReport {
        StepReport {
            step,
            loss: 3.45678,
            learning_rate: 3e-4,
            grad_norm: 0.5,
            tokens: 1000,
            tokens_per_second: 12345.6,
            mfu: None,
            step_seconds: 2.0,
            data_wait_seconds: 0.0,
            memory_bytes: 1,
        }
    }

    #[test]
    fn a_line_shows_step_loss_speed_and_eta() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&report(1900));
        assert_eq!(progress.line(&report(1900)), "step 1,900/2,000  loss 3.4568  12,345 tokens/s  ETA 3m 20s");
    }

    #[test]
    fn the_eta_ignores_the_slow_first_step() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, Some(2000), 10);
        progress.step(&StepReport { step_seconds: 100.0, ..report(1) });
        progress.step(&report(2));
        progress.step(&report(3));
        assert!(progress.line(&report(1900)).ends_with("ETA 3m 20s"));
    }

    #[test]
    fn without_total_steps_there_is_no_eta() {
        let mut progress = Progress::new(ProgressMode::Silent, 0, None, 10);
        progress.step(&report(7));
        assert!(!progress.line(&report(7)).contains("ETA"));
    }

    #[test]
    fn plain_lines_show_first_every_nth_and_last_step() {
        let progress = Progress::new(ProgressMode::Plain, 0, Some(25), 10);
        let shown: Vec<u64> = (1..=25).filter(|step| progress.log_interval.includes(*step)).collect();
        assert_eq!(shown, [1, 10, 20, 25]);
    }

    #[test]
    fn a_wait_is_reported_once_a_minute_or_on_a_new_reason() {
        let news = WaitMessages::default();
        let is_news = |waiting: &RetryStatus| news.line(Some(waiting)).is_some();
        let ago = |seconds| Instant::now().checked_sub(Duration::from_secs(seconds)).unwrap();
        let waiting = |since, reason: &str| RetryStatus {
            url: "http://hub/x".to_owned(),
            reason: reason.to_owned(),
            since: ago(since),
            next_attempt: Instant::now(),
        };
        assert!(!is_news(&waiting(0, "reset")), "it may pass in a moment");
        assert!(is_news(&waiting(2, "reset")));
        assert!(!is_news(&waiting(3, "reset")));
        assert!(is_news(&waiting(3, "it answered 503")));
        news.0.lock().unwrap().as_mut().unwrap().told = ago(61);
        assert!(is_news(&waiting(70, "it answered 503")));
        assert_eq!(news.line(None).unwrap(), "data resumed after 0s");
        assert_eq!(news.line(None), None);
        assert!(is_news(&waiting(2, "it answered 503")), "another wait");
    }
}
