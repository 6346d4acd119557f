//! `plan`: what a config needs, how fast it trains and what that costs, before anything is allocated.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use run_config::{ByteSize, Format, ResolvedRun, RunConfig};

use super::Output;
use crate::memory_plan::{Change, MemoryPlan, PlanGpu, PlanRequest};
use crate::{Result, TrainerError, atomic_file};

/// What `plan` takes.
#[derive(Debug, Clone, Args)]
pub struct PlanOptions {
    /// The run's config: YAML, TOML or JSON.
    #[arg(short, long, value_name = "FILE")]
    pub config: PathBuf,
    /// Set a key of the config, as in `data.batch_size=4`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Plan for this GPU: rtx5090, rtx4090, rtx3090, a100-40, a100-80, h100, h200, or `this` machine. [default: the GPU
    /// or CPU that would train the config]
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<PlanGpu>,
    /// Plan for this much memory, such as 24GB.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Plan for about this many tokens, such as 20B, instead of `scheduler.total_steps`.
    #[arg(long, value_name = "COUNT", value_parser = token_count)]
    pub tokens: Option<u64>,
    /// What the machine draws, for the cost of electricity. [default: the GPU's board power]
    #[arg(long, value_name = "W", value_parser = amount)]
    pub watts: Option<f64>,
    /// The price of a kilowatt-hour, in any currency.
    #[arg(long, value_name = "PRICE", value_parser = amount)]
    pub price_per_kwh: Option<f64>,
    /// The price of the rented machine per hour, in any currency.
    #[arg(long, value_name = "PRICE", value_parser = amount)]
    pub price_per_hour: Option<f64>,
    /// Write the config with the changes that make it fit, and the same tokens per step.
    #[arg(long, value_name = "OUT.yaml")]
    pub apply: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// `20B`, `1.5T`, `300M`, `2000000`
fn token_count(text: &str) -> std::result::Result<u64, String> {
    let text = text.trim();
    let (number, factor) = match text.to_ascii_uppercase().chars().last() {
        Some('K') => (&text[..text.len() - 1], 1e3),
        Some('M') => (&text[..text.len() - 1], 1e6),
        Some('B' | 'G') => (&text[..text.len() - 1], 1e9),
        Some('T') => (&text[..text.len() - 1], 1e12),
        _ => (text, 1.0),
    };
    let tokens = number.trim().replace('_', "").parse::<f64>().map(|number| number * factor);
    match tokens {
        Ok(tokens) if (1.0..1e18).contains(&tokens) => Ok(tokens.round() as u64),
        _ => Err("must be a number of tokens such as `20B`, `300M` or `2000000`".to_owned()),
    }
}

fn amount(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("must be a number, at least 0".to_owned()),
    }
}

impl PlanOptions {
    fn request(&self) -> PlanRequest {
        let &Self { gpu, memory, watts, price_per_kwh, price_per_hour, .. } = self;
        PlanRequest { gpu, memory, watts, price_per_kwh, price_per_hour, times_operations: true }
    }

    /// The overrides, with the steps that `--tokens` comes to.
    fn all_overrides(&self) -> Result<Vec<String>> {
        let mut overrides = self.overrides.clone();
        if let Some(tokens) = self.tokens {
            let run = RunConfig::load_for_planning(&self.config, &overrides)?;
            let steps = tokens.div_ceil(run.config.data.tokens_per_step() as u64);
            overrides.extend([format!("scheduler.total_steps={steps}"), "scheduler.total_epochs=null".to_owned()]);
        }
        Ok(overrides)
    }
}

/// A plan, and what `--apply` changed.
struct Planned {
    plan: MemoryPlan,
    changes: Option<Vec<Change>>,
}

fn plan(options: &PlanOptions) -> Result<Planned> {
    let overrides = options.all_overrides()?;
    let run = RunConfig::load_for_planning(&options.config, &overrides)?;
    let request = options.request();
    if let Some(out) = &options.apply {
        check_output(out)?;
    }
    let plan = MemoryPlan::for_request(&run, &request)?;
    let changes = options.apply.as_deref().map(|out| apply(out, &plan, &run, &request, &overrides)).transpose()?;
    Ok(Planned { plan, changes })
}

/// The plan of a config. Needs neither tokenizer nor data.
pub fn run(options: &PlanOptions) -> Result<MemoryPlan> {
    Ok(plan(options)?.plan)
}

pub(super) fn main(options: &PlanOptions, output: &mut dyn Output) -> Result<u8> {
    let Planned { plan, changes } = plan(options)?;
    if options.json {
        output.print_json(&plan)?;
        return Ok(0);
    }
    output.print(&format!("{plan}\n"))?;
    if let (Some(changes), Some(out)) = (changes, &options.apply) {
        output.print(&format!("\n{}\n", written(&changes, out)))?;
    }
    Ok(0)
}

/// Refuses a file that is there, and a name that would not load.
fn check_output(out: &Path) -> Result<()> {
    let is_yaml = out.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
    let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
    let problem = if !is_yaml {
        "the name must end in .yaml"
    } else if folder.is_some_and(|folder| !folder.is_dir()) {
        "there is no such folder"
    } else if out.symlink_metadata().is_ok() {
        "there is such a file: give another name, or remove it"
    } else {
        return Ok(());
    };
    Err(TrainerError::Request(format!("--apply {}: {problem}", out.display())))
}

/// Writes the config that fits; what it changed.
fn apply(
    out: &Path,
    plan: &MemoryPlan,
    run: &ResolvedRun,
    request: &PlanRequest,
    overrides: &[String],
) -> Result<Vec<Change>> {
    let changes = plan.fitting_changes(run, request)?;
    let text = fs::read_to_string(&run.config_path).map_err(TrainerError::io("read", &run.config_path))?;
    let format = Format::from_path(&run.config_path).unwrap_or(Format::Yaml);
    let overrides = [overrides, &changes.iter().map(Change::as_override).collect::<Vec<_>>()].concat();
    let config = RunConfig::parse_of_file(&text, format, &overrides, Some(&run.config_path))?;
    atomic_file::replace(out, config.to_commented_yaml().as_bytes()).map_err(TrainerError::io("write", out))?;
    Ok(changes)
}

fn written(changes: &[Change], out: &Path) -> String {
    let out = out.display();
    if changes.is_empty() {
        return format!("wrote {out}: the config fits as it is");
    }
    let lines: Vec<String> = changes.iter().map(|change| format!("  {change}")).collect();
    format!("wrote {out}, which fits and takes the same tokens per step:\n{}", lines.join("\n"))
}
