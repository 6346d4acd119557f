//! Rank, scale and modules of low-rank adapters.

use run_config::{LoraConfig, TargetModules};

/// The adapters of a model: everything that decides their parameters and their arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraShape {
    /// Width between the two matrices, R.
    pub rank: usize,
    /// The scale of an adapter's output, before it is divided by R or its square root.
    pub alpha: f64,
    /// Whether `alpha` is divided by the square root of R instead of R.
    pub rslora: bool,
    /// Probability that an input of an adapter is zero in training.
    pub dropout: f64,
    /// The modules of every block that have an adapter.
    pub modules: TargetModules,
}

impl LoraShape {
    /// The adapters that a validated config asks for, if any.
    pub fn from_config(config: &LoraConfig) -> Option<Self> {
        let &LoraConfig { alpha, rslora, dropout, ref target_modules, .. } = config;
        let of_rank =
            |rank| Self { rank, alpha: alpha.unwrap_or(rank as f64), rslora, dropout, modules: target_modules.clone() };
        config.rank.map(of_rank)
    }

    /// The factor of an adapter's output: `alpha` over R or its square root.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }
}
