//! Records steps and observes the run beside them: the interval of logging, the time spent between steps, the
//! utilization of the machine, and advice on what holds the run back.

use std::{mem, time::Duration};

use kernels::Device;
use run_config::RunConfig;

use crate::{
    advice::Advisor,
    device,
    metrics::MetricsWriter,
    ranks::RankFigures,
    report::{AdviceReport, LogInterval, RankUsage, StepReport, UtilizationReport},
    utilization::UtilizationSampler,
};

/// The observer of one session of training.
pub(super) struct Observation {
    log_interval: LogInterval,
    sampler: UtilizationSampler,
    latest: Option<UtilizationReport>,
    /// The newest sample of this process.
    usage: RankUsage,
    /// The rank of this process.
    rank: usize,
    advisor: Advisor,
    advice: Vec<String>,
    since_step: BetweenSteps,
    /// Time since the last step that was logged.
    since_line: BetweenSteps,
}

/// Time spent between steps on saving and evaluating, in seconds.
#[derive(Clone, Copy, Debug, Default)]
struct BetweenSteps {
    saving: f64,
    evaluating: f64,
}

impl Observation {
    /// Starts sampling. `hosts` has the host of each rank, of which this process is `rank`; it is empty for one
    /// process.
    pub(super) fn start(config: &RunConfig, device: &Device, workers: usize, rank: usize, hosts: Vec<String>) -> Self {
        let runtime = &config.runtime;
        let sampler = runtime.utilization_every.map_or_else(UtilizationSampler::off, |every| {
            UtilizationSampler::start(every.duration(), device::gpu_uuid(device))
        });
        Self {
            log_interval: LogInterval::new(runtime.log_every_n_steps, config.scheduler.total_steps),
            sampler,
            latest: None,
            usage: RankUsage::default(),
            rank,
            advisor: Advisor::new(workers, hosts),
            advice: Vec::new(),
            since_step: BetweenSteps::default(),
            since_line: BetweenSteps::default(),
        }
    }

    /// Notes that the next step is the first of a stage.
    pub(super) fn enter_stage(&mut self) {
        self.advisor.enter_stage();
    }

    pub(super) fn saved(&mut self, time: Duration) {
        self.since_step.saving += time.as_secs_f64();
    }

    pub(super) fn evaluated(&mut self, time: Duration) {
        self.since_step.evaluating += time.as_secs_f64();
    }

    /// Records the advice that an evaluation leads to.
    pub(super) fn evaluation(&mut self, step: u64, loss: f64, metrics: &mut MetricsWriter) {
        let advice = self.advisor.evaluation(loss);
        self.advise(step, advice, metrics);
    }

    /// Returns the seconds of saving and of evaluating since the last step.
    pub(super) fn take_between_steps(&mut self) -> (f64, f64) {
        let BetweenSteps { saving, evaluating } = mem::take(&mut self.since_step);
        self.since_line.saving += saving;
        self.since_line.evaluating += evaluating;
        (saving, evaluating)
    }

    /// Records a step if it is to be logged (`always` logs it in any case), then the utilization sampled during it and
    /// the advice that both lead to. `ranks` are the figures of each rank; empty for one process.
    pub(super) fn step(
        &mut self,
        report: &StepReport,
        ranks: &[RankFigures],
        always: bool,
        metrics: &mut MetricsWriter,
    ) {
        if always || self.log_interval.includes(report.step) {
            let BetweenSteps { saving, evaluating } = mem::take(&mut self.since_line);
            let line = StepReport { save_seconds: saving, evaluation_seconds: evaluating, ..report.clone() };
            metrics.record(&line.record());
        }
        let mut advice = self.advisor.step(report);
        let mut usage: Vec<RankUsage> = ranks.iter().map(|figures| figures.usage).collect();
        for sample in self.sampler.take(report.step) {
            self.usage = sample.usage();
            if let Some(own) = usage.get_mut(self.rank) {
                *own = self.usage;
            }
            let Some(sample) = sample.of_ranks(&usage) else { continue };
            metrics.record(&sample.record());
            advice.extend(self.advisor.utilization(&sample));
            self.latest = Some(sample);
        }
        self.advise(report.step, advice, metrics);
    }

    /// Records advice, and keeps it for [`Observation::take_advice`].
    pub(super) fn advise(&mut self, step: u64, advice: Vec<String>, metrics: &mut MetricsWriter) {
        for text in advice {
            let advice = AdviceReport { step, text };
            metrics.record(&advice.record());
            self.advice.push(advice.text);
        }
    }

    /// Returns this process's own memory and CPU use at its newest sample.
    pub(super) fn usage(&self) -> RankUsage {
        self.usage
    }

    /// Returns the newest sample, summed over all ranks.
    pub(super) fn utilization(&self) -> Option<&UtilizationReport> {
        self.latest.as_ref()
    }

    pub(super) fn take_advice(&mut self) -> Vec<String> {
        mem::take(&mut self.advice)
    }
}
