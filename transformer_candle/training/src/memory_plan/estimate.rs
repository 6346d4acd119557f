//! How long a run takes, at speeds that are assumed and say so.

use run_config::{Device, RunConfig};
use serde::Serialize;

/// bf16 products with f32 sums on an RTX 5090, nominal.
const RTX_5090_FLOPS: f64 = 209.5e12;
/// The share of it that a well-tuned trainer reaches on models of this kind.
const RTX_5090_SHARE: f64 = 0.8;
/// What a core with 512-bit vectors sustains over a whole step.
const FLOPS_PER_CPU_THREAD: f64 = 40e9;
/// A run that takes a CPU longer than this is not meant for one.
const LONGEST_CPU_RUN_SECONDS: f64 = 30.0 * 86_400.0;

/// How long a run takes at one speed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Target tokens a second.
    pub tokens_per_second: f64,
    /// The whole run, where its length is known.
    pub seconds: Option<f64>,
    /// Where the speed comes from.
    pub assumption: String,
}

/// What a run computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    pub(super) flops_per_token: f64,
    pub(super) total_tokens: Option<u64>,
}

impl Work {
    fn at(self, flops_per_second: f64, assumption: String) -> Estimate {
        let tokens_per_second = flops_per_second / self.flops_per_token;
        let seconds = self.total_tokens.map(|tokens| tokens as f64 / tokens_per_second);
        Estimate { tokens_per_second, seconds, assumption }
    }

    fn on_cpu(self, config: &RunConfig) -> Estimate {
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = config.runtime.threads.unwrap_or_else(cores);
        let assumption = format!("on {threads} CPU threads, assuming 40 GFLOP/s each");
        self.at(FLOPS_PER_CPU_THREAD * threads as f64, assumption)
    }

    fn on_card(self) -> Estimate {
        let assumption = "on an RTX 5090, assuming 80 % of its 209.5 TFLOP/s".to_owned();
        self.at(RTX_5090_FLOPS * RTX_5090_SHARE, assumption)
    }

    /// Whether a run is meant for a card: it says so, or leaves it open and would take a CPU months.
    pub(super) fn is_for_card(self, config: &RunConfig) -> bool {
        match config.runtime.device {
            Device::Cuda(_) => true,
            Device::Cpu => false,
            Device::Auto => self.on_cpu(config).seconds.is_some_and(|seconds| seconds > LONGEST_CPU_RUN_SECONDS),
        }
    }

    /// Nobody has measured this run: a guess for this machine's CPU, or four fifths of an RTX 5090.
    pub(super) fn estimate(self, config: &RunConfig, for_card: bool) -> Estimate {
        if for_card { self.on_card() } else { self.on_cpu(config) }
    }
}
