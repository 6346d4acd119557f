//! Finds what holds a run back, from the times of its steps and from samples of its utilization: one sentence each with
//! the way out.
//!
//! A finding needs more than one bad moment: shares of time are taken over minutes and must come from several steps,
//! samples must agree several times in a row. Each kind is told once.

mod overfitting;
mod ranks;

use std::time::Duration;

use self::{overfitting::OverfittingRule, ranks::RankRules};
use crate::{
    report::{StepReport, UtilizationReport},
    units::{bytes, duration},
};

/// The part of a run's time that may be spent waiting for data.
const MAX_DATA_WAIT: f64 = 0.02;
/// The part of a run's time that saving checkpoints may take.
const MAX_SAVING: f64 = 0.05;
/// Swapped-out memory that matters: less is what the system has tidied away.
const MIN_SWAP_BYTES: u64 = 64 << 20;
/// Samples in a row that must agree.
const SAMPLES_IN_A_ROW: usize = 3;

/// Looks for what holds back one session of training.
#[derive(Debug)]
pub(crate) struct Advisor {
    num_workers: usize,
    data_wait: ShareRule,
    saving: ShareRule,
    throttle: StreakRule,
    swap: StreakRule,
    growth: GrowthRule,
    ranks: RankRules,
    overfitting: OverfittingRule,
    /// Whether the first step, which waits for the first data, is over.
    is_warm: bool,
}

impl Advisor {
    /// Returns the advisor of a run; `hosts` has the host of each rank, and is empty for one process.
    pub(crate) fn new(num_workers: usize, hosts: Vec<String>) -> Self {
        Self {
            num_workers,
            ranks: RankRules::new(hosts),
            data_wait: ShareRule::new(MAX_DATA_WAIT, 5.0),
            // A run of seconds may well spend some of them saving.
            saving: ShareRule::new(MAX_SAVING, 60.0),
            throttle: StreakRule::default(),
            swap: StreakRule::default(),
            growth: GrowthRule::new(num_workers),
            overfitting: OverfittingRule::default(),
            is_warm: false,
        }
    }

    /// Excludes the next step, which waits for its stage's first data. Losses of another stage are not comparable.
    pub(crate) fn enter_stage(&mut self) {
        self.overfitting.restart();
        self.is_warm = false;
    }

    /// Returns the findings that a step adds, one sentence each.
    pub(crate) fn step(&mut self, report: &StepReport) -> Vec<String> {
        self.overfitting.step(report.loss.into());
        if !std::mem::replace(&mut self.is_warm, true) {
            return Vec::new();
        }
        let StepReport { step_seconds, data_wait_seconds, save_seconds, evaluation_seconds, .. } = *report;
        let num_workers = self.num_workers;
        let waits = self.data_wait.observe(data_wait_seconds, step_seconds).map(|share| {
            format!(
                "{} of the time training waits for data: raise data.num_workers (it is {num_workers}) while CPU cores are \
                 idle; otherwise the source is slow: copy the text to a local disk, or check the network",
                percent(share)
            )
        });
        let saves = self.saving.observe(save_seconds, step_seconds + save_seconds + evaluation_seconds).map(|share| {
            format!(
                "{} of the time is spent saving checkpoints, the last in {save_seconds:.1} s: raise \
                 runtime.checkpoint.every_n_steps (and runtime.evaluation.every_n_steps, as a better evaluation is saved), or \
                 put the run on a faster disk",
                percent(share)
            )
        });
        let ranks = report.ranks.as_ref().map(|ranks| self.ranks.step(ranks, step_seconds));
        waits.into_iter().chain(saves).chain(ranks.into_iter().flatten()).collect()
    }

    /// Returns the findings that an evaluation adds, one sentence each.
    pub(crate) fn evaluation(&mut self, loss: f64) -> Vec<String> {
        self.overfitting.evaluate(loss).into_iter().collect()
    }

    /// Returns the findings that a sample adds, one sentence each.
    pub(crate) fn utilization(&mut self, report: &UtilizationReport) -> Vec<String> {
        let gpu = report.gpu.as_ref();
        let throttle = gpu.and_then(|gpu| Some((throttle_remedy(gpu.throttle?)?, gpu)));
        let throttled = self.throttle.observe(throttle.is_some()).then_some(throttle).flatten().map(|(remedy, gpu)| {
            let celsius = gpu.temperature_celsius.map_or_else(String::new, |celsius| format!(" at {celsius} \u{b0}C"));
            let mhz = gpu.clock_mhz.map_or_else(String::new, |mhz| format!(", its clock is {mhz} MHz"));
            format!("the GPU is throttled ({}){celsius}{mhz}: {remedy}", gpu.throttle.unwrap_or_default())
        });
        let swap_advice = self.swap.observe(report.swap_bytes >= MIN_SWAP_BYTES).then(|| {
            format!(
                "{} of {} are swapped out, which slows training down: close other programs, or lower \
                 data.shuffle_buffer_size, data.num_workers or the micro-batch",
                bytes(report.swap_bytes),
                if report.ranks.is_some() { "the ranks" } else { "this process" }
            )
        });
        let largest = report.ranks.map_or(report.rss_bytes, |ranks| ranks.max_rss_bytes);
        let whose = report.ranks.map_or("this process".to_owned(), |ranks| format!("rank {}", ranks.largest));
        let growth_advice = self.growth.observe(report.time, largest).map(|Growth { from, to, seconds }| {
            format!(
                "the memory of {whose} keeps growing, from {} to {} in {}: if it does not level off, stop with Ctrl-C \
                 before memory runs out and continue with --resume, which starts small again",
                bytes(from),
                bytes(to),
                duration(Duration::from_secs_f64(seconds))
            )
        });
        [throttled, swap_advice, growth_advice].into_iter().flatten().collect()
    }
}

/// Returns what to do about a GPU's throttling. None for the power limit, which is harmless under full load.
fn throttle_remedy(reason: &str) -> Option<&'static str> {
    match reason {
        "thermal" => Some("improve its cooling (fans, dust, air flow, other GPUs beside it), or lower its power limit"),
        "power brake" | "hardware slowdown" => Some("check its power supply and cables"),
        _ => None,
    }
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

/// A rule for a part of the time that is too large over the last minutes. It must come from several steps; their count
/// restarts where the share is below half of the limit.
#[derive(Debug)]
struct ShareRule {
    limit: f64,
    /// Seconds of a run before anything is found.
    min_seconds: f64,
    /// Exponentially decayed sum of the part that is watched, in seconds. `total` is that of all time.
    part: f64,
    total: f64,
    /// Seconds observed in all, without the decay.
    observed: f64,
    /// Steps above the limit since the share was last below half of it.
    steps: usize,
    is_told: bool,
}

impl ShareRule {
    /// Time constant of the decay in seconds: older time weighs 1 / e.
    const MEMORY: f64 = 300.0;
    const MIN_STEPS: usize = 3;

    fn new(limit: f64, min_seconds: f64) -> Self {
        Self { limit, min_seconds, part: 0.0, total: 0.0, observed: 0.0, steps: 0, is_told: false }
    }

    /// Returns the decay of earlier time over so many seconds.
    fn weight(seconds: f64) -> f64 {
        (-seconds / Self::MEMORY).exp()
    }

    /// Adds a step of `total` seconds, `part` of them watched; returns the share when it is first found too large.
    fn observe(&mut self, part: f64, total: f64) -> Option<f64> {
        let weight = Self::weight(total);
        self.part = weight * self.part + part;
        self.total = weight * self.total + total;
        self.observed += total;
        self.steps += usize::from(part > self.limit * total);
        let share = self.part / self.total.max(f64::MIN_POSITIVE);
        if share < self.limit / 2.0 {
            self.steps = 0;
        }
        let is_lasting = self.steps >= Self::MIN_STEPS && self.observed >= self.min_seconds;
        let is_found = !self.is_told && share > self.limit && is_lasting;
        self.is_told |= is_found;
        is_found.then_some(share)
    }
}

/// A rule for a state that lasts for [`SAMPLES_IN_A_ROW`].
#[derive(Debug, Default)]
struct StreakRule {
    length: usize,
    is_told: bool,
}

impl StreakRule {
    /// Adds a sample; returns true the first time that the state has lasted.
    fn observe(&mut self, holds: bool) -> bool {
        self.length = if holds { self.length + 1 } else { 0 };
        self.length == SAMPLES_IN_A_ROW && !std::mem::replace(&mut self.is_told, true)
    }
}

/// A rule for memory that grows from block to block of samples. A block counts with its smallest sample, so that
/// buffers that come and go do not count.
#[derive(Debug)]
struct GrowthRule {
    /// Smallest growth that is a finding: less is what the caches of the data stream take as they fill.
    min_bytes: u64,
    block: Vec<u64>,
    /// Time and bytes of the smallest block so far.
    least: Option<(f64, u64)>,
    last: u64,
    /// Blocks in a row that were larger than the one before.
    rising: usize,
    is_told: bool,
}

/// Memory that has grown, in bytes.
#[derive(Debug, PartialEq)]
struct Growth {
    from: u64,
    to: u64,
    seconds: f64,
}

impl GrowthRule {
    const SAMPLES_PER_BLOCK: usize = 10;
    const MIN_RISING: usize = 6;
    const MIN_BYTES: u64 = 512 << 20;
    /// Bytes of the words that the encoder of each worker caches.
    const BYTES_PER_WORKER: u64 = 100 << 20;

    fn new(num_workers: usize) -> Self {
        let min_bytes = Self::MIN_BYTES + num_workers as u64 * Self::BYTES_PER_WORKER;
        Self { min_bytes, block: Vec::new(), least: None, last: u64::MAX, rising: 0, is_told: false }
    }

    /// Adds a sample; returns the growth when it is first found.
    fn observe(&mut self, time: f64, rss_bytes: u64) -> Option<Growth> {
        self.block.push(rss_bytes);
        if self.block.len() < Self::SAMPLES_PER_BLOCK {
            return None;
        }
        let to = self.block.drain(..).min().unwrap_or(rss_bytes);
        self.rising = if to > self.last { self.rising + 1 } else { 0 };
        self.last = to;
        let (since, from) = *self.least.insert(self.least.filter(|(_, least)| *least < to).unwrap_or((time, to)));
        let is_found = !self.is_told && self.rising >= Self::MIN_RISING && to >= from + self.min_bytes;
        self.is_told |= is_found;
        is_found.then_some(Growth { from, to, seconds: time - since })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::GpuUtilization;

    fn step(step_seconds: f64, data_wait_seconds: f64, save_seconds: f64) -> StepReport {
        StepReport {
            step: 1,
            loss: 1.0,
            learning_rate: 1e-3,
            grad_norm: 1.0,
            tokens: 1,
            tokens_per_second: 1.0,
            positions_per_second: 1.0,
            mfu: None,
            step_seconds,
            data_wait_seconds,
            save_seconds,
            evaluation_seconds: 0.0,
            memory_bytes: 1,
            ranks: None,
        }
    }

    fn sample(time: f64) -> UtilizationReport {
        UtilizationReport { step: 1, time, rss_bytes: 1 << 30, cpu_cores: 1.0, swap_bytes: 0, ranks: None, gpu: None }
    }

    /// Returns each finding: the number of its step, and the advice.
    fn advice_of(steps: impl IntoIterator<Item = StepReport>) -> Vec<(usize, String)> {
        let mut advisor = Advisor::new(2, Vec::new());
        let advice = steps
            .into_iter()
            .enumerate()
            .flat_map(|(index, report)| advisor.step(&report).into_iter().map(move |text| (index + 1, text)));
        advice.collect()
    }

    #[test]
    fn a_steady_wait_for_data_is_told_once() {
        let advice = advice_of((0..500).map(|_| step(1.0, 0.03, 0.0)));
        assert_eq!(advice.len(), 1);
        assert_eq!(advice[0].0, 6, "the first step and five seconds");
        assert!(advice[0].1.starts_with("3 % of the time training waits for data: raise data.num_workers (it is 2)"));
    }

    #[test]
    fn waits_at_the_borders_of_windows_are_found_when_they_return() {
        let wait = |step_number: usize| if step_number.is_multiple_of(100) { 10.0 } else { 0.0 };
        let advice = advice_of((1..1000).map(|number| step(1.0 + wait(number), wait(number), 0.0)));
        assert_eq!(advice.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [300]);
    }

    #[test]
    fn the_first_data_and_one_stall_are_no_finding() {
        let first = std::iter::once(step(100.0, 99.0, 0.0));
        let stalled =
            first.chain((0..2000).map(|number| if number == 50 { step(60.0, 59.0, 0.0) } else { step(1.0, 0.0, 0.0) }));
        assert_eq!(advice_of(stalled), []);
        assert_eq!(advice_of((0..2000).map(|_| step(1.0, 0.015, 0.0))), [], "below the limit");
    }

    #[test]
    fn a_share_below_half_of_the_limit_forgets_earlier_steps() {
        let mut rule = ShareRule::new(0.02, 5.0);
        let mut count = 0;
        for _ in 0..20 {
            for number in 0..2000 {
                count += usize::from(rule.observe(if number < 2 { 10.0 } else { 0.0 }, 10.0).is_some());
            }
        }
        assert_eq!(count, 0, "two at a time, hours apart");
    }

    #[test]
    fn slow_saving_is_found_and_fast_saving_is_not() {
        let saves =
            |seconds: f64| (0..400).map(move |number| step(1.0, 0.0, if number % 20 == 0 { seconds } else { 0.0 }));
        let advice = advice_of(saves(4.0));
        assert_eq!(advice.len(), 1);
        assert!(advice[0].1.contains("saving checkpoints, the last in 4.0 s"), "{}", advice[0].1);
        assert_eq!(advice_of(saves(0.4)), []);
    }

    fn utilization_advice(samples: impl IntoIterator<Item = UtilizationReport>) -> Vec<String> {
        let mut advisor = Advisor::new(2, Vec::new());
        samples.into_iter().flat_map(|report| advisor.utilization(&report)).collect()
    }

    #[test]
    fn throttling_must_last_and_the_power_limit_is_no_fault() {
        let throttled = |reasons: &[Option<&'static str>]| {
            utilization_advice(reasons.iter().map(|&throttle| {
                let gpu = GpuUtilization {
                    throttle,
                    temperature_celsius: Some(91),
                    clock_mhz: Some(1200),
                    ..GpuUtilization::default()
                };
                UtilizationReport { gpu: Some(gpu), ..sample(0.0) }
            }))
        };
        let thermal = Some("thermal");
        assert!(throttled(&[thermal, thermal, None, thermal, thermal, None]).is_empty());
        assert!(throttled(&[Some("power limit"); 50]).is_empty());
        let advice = throttled(&[thermal; 50]);
        assert_eq!(advice.len(), 1);
        assert!(advice[0].starts_with("the GPU is throttled (thermal) at 91 \u{b0}C, its clock is 1200 MHz: improve"));
    }

    #[test]
    fn swap_in_use_is_found() {
        let swapped =
            |bytes| utilization_advice((0..10).map(|_| UtilizationReport { swap_bytes: bytes, ..sample(0.0) }));
        assert!(swapped(1 << 20).is_empty());
        let advice = swapped(1_300_000_000);
        assert_eq!(advice.len(), 1);
        assert!(advice[0].starts_with("1.30 GB of this process are swapped out"), "{}", advice[0]);
    }

    fn growth(rss_bytes: impl Fn(u64) -> u64) -> Vec<String> {
        utilization_advice(
            (0..2000).map(|number| UtilizationReport { rss_bytes: rss_bytes(number), ..sample(10.0 * number as f64) }),
        )
    }

    #[test]
    fn memory_that_grows_steadily_is_found_once() {
        let advice = growth(|number| (2 << 30) + number * (10 << 20));
        assert_eq!(advice.len(), 1);
        assert!(advice[0].contains("from 2.15 GB to 2.99 GB in 13 min 20 s"), "{}", advice[0]);
        assert_eq!(growth(|number| (2 << 30) + number * (1 << 20)), growth(|number| (2 << 30) + number * (1 << 20)));
    }

    #[test]
    fn memory_that_levels_off_or_comes_and_goes_is_no_finding() {
        assert!(growth(|number| (2 << 30) + (number * (10 << 20)).min(400 << 20)).is_empty(), "caches that fill");
        assert!(growth(|number| (2 << 30) + number % 50 * (100 << 20)).is_empty(), "windows of text");
        assert!(growth(|number| (2 << 30) + number * 4096).is_empty(), "pages");
    }
}
