//! `plan`: what a config needs, how fast it trains and what that costs, before anything is allocated.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use run_config::{ByteSize, Format, ResolvedRun, RunConfig};
use serde::Serialize;

use super::count::at_least_one;
use super::{ConfigSource, Output};
use crate::memory_plan::{Change, Interconnect, MemoryPlan, PlanGpu, PlanRequest};
use crate::stability::{self, StabilityChange};
use crate::{Result, TrainerError, atomic_file, speed_advice::speed_advice};

/// Minimum of `--memory` in bytes: less is a mistake.
const LEAST_MEMORY: u64 = 1_000_000;

/// What `plan` takes.
#[derive(Debug, Clone, Args)]
pub struct PlanOptions {
    /// The run to plan.
    #[command(flatten)]
    pub source: ConfigSource,
    /// Set a key of the config, as in `data.batch_size=4`. Repeatable.
    #[arg(long = "override", value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
    /// Plan for this GPU: rtx5090, rtx4090, rtx3090, a100-40, a100-80, h100, h200, or `this` machine. [default: the GPU
    /// or CPU that would train the config]
    #[arg(long, value_name = "NAME")]
    pub gpu: Option<PlanGpu>,
    /// Plan for this much memory, such as 24GB.
    #[arg(long, value_name = "SIZE", value_parser = memory_size)]
    pub memory: Option<ByteSize>,
    /// Plan for about this many tokens, such as 20B, instead of `scheduler.total_steps`.
    #[arg(long, value_name = "COUNT", value_parser = at_least_one::<u64>)]
    pub tokens: Option<u64>,
    /// What the machine draws, for the cost of electricity. [default: the GPU's board power]
    #[arg(long, value_name = "W", value_parser = amount)]
    pub watts: Option<f64>,
    /// The price of a kilowatt-hour, in any currency.
    #[arg(long, value_name = "PRICE", value_parser = amount)]
    pub price_per_kwh: Option<f64>,
    /// The price of the rented machine per hour, in any currency; with `--ranks` of each GPU, as `--watts` is.
    #[arg(long, value_name = "PRICE", value_parser = amount)]
    pub price_per_hour: Option<f64>,
    /// Plan for this many processes, each on a GPU, which share a step and the optimizer's state (`torchrun`). Memory is
    /// that of the one with the most.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub ranks: Option<u64>,
    /// The machines that the ranks are on. [default: 1]
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub nodes: Option<u64>,
    /// The network of each machine, as in `400Gb/s` or `50GB/s`, in each direction; without `--nodes` the link between the
    /// GPUs of one. [default: the link that such GPUs have]
    #[arg(long, value_name = "RATE")]
    pub interconnect: Option<Interconnect>,
    /// Write the config with the changes that make it fit, and the same tokens per step.
    #[arg(long, value_name = "OUT.yaml")]
    pub apply: Option<PathBuf>,
    /// The run diverged, or its loss jumps: show a lower learning rate, a longer warm-up and clipping; with `--apply` write
    /// them too.
    #[arg(long)]
    pub unstable: bool,
    /// Also list the operations of a step: launches, FLOPs, bytes, time, and what bounds it.
    #[arg(long)]
    pub operations: bool,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Parses a size of memory, `24GB`. A number alone would be bytes, which nobody means.
fn memory_size(text: &str) -> std::result::Result<ByteSize, String> {
    let size: ByteSize = text.parse()?;
    if size.0 >= LEAST_MEMORY {
        return Ok(size);
    }
    let with_unit =
        if text.trim().parse::<f64>().is_ok() { format!(": did you mean `{}GB`?", text.trim()) } else { String::new() };
    Err(format!("must be at least 1 MB{with_unit}"))
}

fn amount(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("must be a number, at least 0".to_owned()),
    }
}

impl PlanOptions {
    fn request(&self) -> PlanRequest {
        let &Self { gpu, memory, watts, price_per_kwh, price_per_hour, interconnect, .. } = self;
        let [ranks, nodes] = [self.ranks, self.nodes].map(|number| number.map(|number| number as usize));
        PlanRequest {
            gpu,
            memory,
            watts,
            price_per_kwh,
            price_per_hour,
            times_operations: true,
            lists_operations: self.operations,
            ranks,
            nodes,
            interconnect,
        }
    }

    /// Returns the overrides, with the number of steps that `--tokens` amounts to.
    fn all_overrides(&self, config: &Path) -> Result<Vec<String>> {
        let mut overrides = self.overrides.clone();
        if let Some(tokens) = self.tokens {
            let run = RunConfig::load_for_planning(config, &overrides)?;
            if run.config.stages.is_some() {
                let message = "--tokens: the config's stages say how long it trains. Change their steps, or add \
                               `--override stages=null`";
                return Err(TrainerError::Request(message.to_owned()));
            }
            let steps = tokens.div_ceil(run.config.data.tokens_per_step() as u64);
            overrides.extend([format!("scheduler.total_steps={steps}"), "scheduler.total_epochs=null".to_owned()]);
        }
        Ok(overrides)
    }
}

/// The output of `plan`: the plan, advice on faster settings, and what `--unstable` and `--apply` add.
#[derive(Serialize)]
struct Planned {
    #[serde(flatten)]
    plan: MemoryPlan,
    advice: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    against_divergence: Option<Vec<StabilityChange>>,
    /// The changes with which the run fits, and those against divergence, as `--apply` writes them. None if nothing is
    /// enough.
    #[serde(skip)]
    changes: Option<Vec<Change>>,
}

fn plan(options: &PlanOptions) -> Result<Planned> {
    let config = options.source.file()?;
    let overrides = options.all_overrides(&config)?;
    let run = RunConfig::load_for_planning(&config, &overrides)?;
    let request = options.request();
    if let Some(out) = &options.apply {
        check_output(out)?;
    }
    let plan = MemoryPlan::for_request(&run, &request)?;
    let against_divergence = options.unstable.then(|| stability::against_divergence(&run.config));
    let fitting_changes = plan.fitting_changes(&run, &request).ok();
    let changes = fitting_changes.map(|fitting_changes| stabler(&fitting_changes, against_divergence.as_deref()));
    if let (Some(out), Some(changes)) = (&options.apply, &changes) {
        write(out, changes, &run, &overrides)?;
    }
    let untimed = PlanRequest { times_operations: false, lists_operations: false, ..request };
    let plan_of = |run: &ResolvedRun| MemoryPlan::for_request(run, &untimed);
    let advice = match plan.shortage {
        Some(_) => Vec::new(),
        None => speed_advice(&run, run.config.data.batch_size, &plan, plan_of, None)?,
    };
    Ok(Planned { plan, advice, against_divergence, changes })
}

/// Returns the changes with which a run fits, and those against divergence of all other keys.
fn stabler(fitting: &[Change], against_divergence: Option<&[StabilityChange]>) -> Vec<Change> {
    let stabler = against_divergence.unwrap_or_default().iter().map(|stabler| stabler.change.clone());
    let others = stabler.filter(|change| fitting.iter().all(|fitting| fitting.key != change.key));
    fitting.iter().cloned().chain(others).collect()
}

/// Returns the plan of a config. Needs neither tokenizer nor data.
pub fn run(options: &PlanOptions) -> Result<MemoryPlan> {
    Ok(plan(options)?.plan)
}

pub(super) fn main(options: &PlanOptions, output: &mut dyn Output) -> Result<u8> {
    let planned = plan(options)?;
    if options.json {
        output.print_json(&planned)?;
        return check_written(options, &planned).map(|()| 0);
    }
    print(options, &planned, output)?;
    check_written(options, &planned).map(|()| 0)
}

/// Fails with the plan's error if `--apply` was given and no changes make the run fit.
fn check_written(options: &PlanOptions, Planned { plan, changes, .. }: &Planned) -> Result<()> {
    if options.apply.is_some() && changes.is_none() { plan.check() } else { Ok(()) }
}

fn print(options: &PlanOptions, planned: &Planned, output: &mut dyn Output) -> Result<()> {
    let Planned { plan, advice, against_divergence, changes } = planned;
    output.print_wrapped(&format!("{plan}\n"))?;
    if !advice.is_empty() {
        output.print_wrapped(&format!("\nFaster:\n  {}\n", advice.join("\n  ")))?;
    }
    if let Some(changes) = against_divergence {
        output.print_wrapped(&format!("\n{}\n", shown(changes)))?;
    }
    match (changes, &options.apply) {
        (Some(changes), Some(out)) => output.print_wrapped(&format!("\n{}\n", written(changes, out)))?,
        (None, _) if !plan.options.is_empty() => output.print_wrapped("\nNo combination of these is enough.\n")?,
        (Some(_), None) if !plan.options.is_empty() => {
            output.print_wrapped("\n`--apply OUT.yaml` writes the config with the changes that make it fit.\n")?;
        }
        _ => {}
    }
    plan.operations_table().map_or(Ok(()), |table| output.print_wrapped(&format!("\n{table}\n")))
}

/// Formats the changes that `--unstable` suggests.
fn shown(changes: &[StabilityChange]) -> String {
    if changes.is_empty() {
        return "Nothing is left to change against divergence: look at the data".to_owned();
    }
    let line = |StabilityChange { change, effect }: &StabilityChange| format!("  {change}: {effect}");
    let lines: Vec<String> = changes.iter().map(line).collect();
    format!("Against divergence, together:\n{}", lines.join("\n"))
}

/// Refuses an existing file, and a name that would not load as a config.
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

/// Writes the config with these changes to `out`.
fn write(out: &Path, changes: &[Change], run: &ResolvedRun, overrides: &[String]) -> Result<()> {
    let text = fs::read_to_string(&run.config_path).map_err(TrainerError::io("read", &run.config_path))?;
    let format = Format::from_path(&run.config_path).unwrap_or(Format::Yaml);
    let overrides = [overrides, &changes.iter().map(Change::as_override).collect::<Vec<_>>()].concat();
    let config = RunConfig::parse_of_file(&text, format, &overrides, Some(&run.config_path))?;
    atomic_file::replace(out, config.to_commented_yaml().as_bytes()).map_err(TrainerError::io("write", out))
}

fn written(changes: &[Change], out: &Path) -> String {
    let out = out.display();
    if changes.is_empty() {
        return format!("wrote {out}: the config fits as it is");
    }
    let lines: Vec<String> = changes.iter().map(|change| format!("  {change}")).collect();
    format!("wrote {out}, which fits and takes the same tokens per step:\n{}", lines.join("\n"))
}
