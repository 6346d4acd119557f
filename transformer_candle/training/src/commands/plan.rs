//! `plan`: what a config needs, before anything is allocated.

use std::path::PathBuf;

use clap::Args;
use run_config::RunConfig;

use super::Output;
use crate::Result;
use crate::memory_plan::MemoryPlan;

/// What `plan` takes.
#[derive(Debug, Clone, Args)]
pub struct PlanOptions {
    /// The run's config: YAML, TOML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub config: PathBuf,
    /// Set a key of the config, as in `data.batch_size=4`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// The plan of a config. Needs neither tokenizer nor data.
pub fn run(options: &PlanOptions) -> Result<MemoryPlan> {
    MemoryPlan::new(&RunConfig::load_for_planning(&options.config, &options.overrides)?)
}

pub(super) fn main(options: &PlanOptions, output: &mut dyn Output) -> Result<u8> {
    let plan = run(options)?;
    if options.json {
        output.print_json(&plan)?;
    } else {
        output.print(&format!("{plan}\n"))?;
    }
    Ok(0)
}
