//! How long a run takes, at speeds that are assumed and say so.

use run_config::{Device, RunConfig};
use serde::Serialize;

/// bf16 products with f32 sums on an RTX 5090, nominal.
const RTX_5090_FLOPS: f64 = 209.5e12;
/// The share of it that a well-tuned trainer reaches on models of this kind.
const RTX_5090_SHARE: f64 = 0.8;
/// What a core with 256-bit or wider vectors sustains over a whole step.
const FLOPS_PER_CPU_THREAD: f64 = 25e9;
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

impl Estimate {
    fn at(flops_per_second: f64, assumption: String, flops_per_token: f64, total_tokens: Option<u64>) -> Self {
        let tokens_per_second = flops_per_second / flops_per_token;
        let seconds = total_tokens.map(|tokens| tokens as f64 / tokens_per_second);
        Self { tokens_per_second, seconds, assumption }
    }
}

/// Nobody has measured this run: a guess for this machine's CPU, and four fifths of an RTX 5090 for runs that a CPU would
/// not finish.
pub(super) fn assumed(config: &RunConfig, flops_per_token: f64, total_tokens: Option<u64>) -> Vec<Estimate> {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = config.runtime.threads.unwrap_or_else(cores);
    let on_cpu = Estimate::at(
        FLOPS_PER_CPU_THREAD * threads as f64,
        format!("on {threads} CPU threads, assuming 25 GFLOP/s each"),
        flops_per_token,
        total_tokens,
    );
    let on_card = Estimate::at(
        RTX_5090_FLOPS * RTX_5090_SHARE,
        "on an RTX 5090, assuming 80 % of its 209.5 TFLOP/s".to_owned(),
        flops_per_token,
        total_tokens,
    );
    let hopeless = on_cpu.seconds.is_some_and(|seconds| seconds > LONGEST_CPU_RUN_SECONDS);
    match config.runtime.device {
        Device::Cuda(_) => vec![on_card],
        Device::Auto if hopeless => vec![on_card, on_cpu],
        Device::Auto | Device::Cpu => vec![on_cpu],
    }
}
